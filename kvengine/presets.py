"""Papers that choose on several axes at once, spelled as stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    options: tuple[str, ...]
    text: Callable[[dict[str, Any]], str]


def call(name: str, **options: Any) -> str:
    """A term of a policy string.

    >>> call("quest", budget=64), call("kivi")
    ('quest(budget=64)', 'kivi')
    """
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def shadowkv(options: dict[str, Any]) -> str:
    """ShadowKV (arXiv:2410.21465): keys of low rank, values in host memory, chunks chosen by landmarks.

    >>> shadowkv({"budget": 256, "rank": 32})
    "lowrank(rank=32) + landmarks(budget=256) + host(fields=('v',))"
    """
    rank = {key: value for key, value in options.items() if key == "rank"}
    chosen = {key: value for key, value in options.items() if key != "rank"}
    return " + ".join([call("lowrank", **rank), call("landmarks", **chosen), call("host", fields=("v",))])


PRESETS: dict[str, Preset] = {
    "shadowkv": Preset(("budget", "rank", "chunk", "outliers", "local"), shadowkv),
}
