"""Papers that choose on several axes at once, spelled as stacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Preset:
    options: tuple[str, ...]
    text: Callable[[dict[str, Any]], str]


PRESETS: dict[str, Preset] = {}
