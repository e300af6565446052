"""Papers that choose on several axes at once, spelled as stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    options: tuple[str, ...]
    text: Callable[[dict[str, Any]], str]


def call(name: str, /, **options: Any) -> str:
    """A term of a policy string.

    >>> call("quest", budget=64), call("kivi")
    ('quest(budget=64)', 'kivi')
    """
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in options.items())})" if options else name


def shadowkv(options: dict[str, Any]) -> str:
    """ShadowKV (arXiv:2410.21465): keys of low rank, values in host memory, chunks chosen by landmarks.

    The values of as many tokens as the budget stay on the device, those that the previous step read (`keep="lru"`: that
    were read last), so that only what they lack is fetched.

    >>> shadowkv({"budget": 256, "rank": 32})
    "lowrank(rank=32) + landmarks(budget=256) + host(fields=('v',), resident=256)"
    """
    rank = {key: value for key, value in options.items() if key == "rank"}
    chosen = {key: value for key, value in options.items() if key not in ("rank", "keep")}
    kept = {"resident": options.get("budget", 2048)} | {k: v for k, v in options.items() if k == "keep"}
    return " + ".join([call("lowrank", **rank), call("landmarks", **chosen), call("host", fields=("v",), **kept)])


PRESETS: dict[str, Preset] = {
    "shadowkv": Preset(("budget", "rank", "chunk", "outliers", "local", "keep"), shadowkv),
}
