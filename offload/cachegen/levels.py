"""Quality levels: how wide a quantisation step is, per layer, for keys and for values.

A step is a multiple of the head's spread (median over tokens of the root mean square over channels, means removed), so
one level means the same on every model. Later layers bear coarser steps: three equal groups of layers whose steps grow
0.5 : 1 : 1.5, as in CacheGen (Liu et al., SIGCOMM 2024, arXiv 2310.07240, section 5.2).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from math import inf
from typing import Any

from kvengine.errors import IncompatibleCache, unknown


@dataclass(frozen=True, kw_only=True)
class Level:
    """One quality level.

    keys, values:  step of the middle layer group, in spreads of the head
    groups:        multipliers of the three layer groups, first to last

    Raises ValueError unless all five are positive numbers.
    """

    keys: float
    values: float
    groups: tuple[float, float, float] = (0.5, 1.0, 1.5)

    def __post_init__(self) -> None:
        for name, steps, count in (
            ("keys", (self.keys,), 1),
            ("values", (self.values,), 1),
            ("groups", self.groups, 3),
        ):
            whole = isinstance(steps, tuple | list) and len(steps) == count
            if not whole or not all(_positive(x) for x in steps):
                expected = "a positive number" if count == 1 else "three positive numbers"
                raise ValueError(f"{name}={getattr(self, name)!r} must be {expected}: steps are multiples of it")

    def step(self, layer: int, layers: int, part: int) -> float:
        """Step of a layer's keys (`part` 0) or values (`part` 1), in spreads."""
        return (self.keys, self.values)[part] * self.groups[3 * layer // layers]

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "groups": list(self.groups)}


def _positive(x: object) -> bool:
    return isinstance(x, int | float) and not isinstance(x, bool) and 0 < x < inf


LEVELS: dict[str, Level] = {
    "near": Level(keys=0.06, values=0.06),
    "high": Level(keys=0.25, values=0.25),
    "medium": Level(keys=0.5, values=0.6),
    "low": Level(keys=0.9, values=1.1),
    "extreme": Level(keys=1.6, values=2.0),
}
"""Best first: about 5, 3.3, 2.3, 1.7 and 1.2 bits per number of the bundled model's. Values bear a little more than keys."""

LOSSLESS = "lossless"
NAMES = (LOSSLESS, *LEVELS)


def resolve(level: str | Level) -> tuple[str, Level | None]:
    """(name, steps); steps are None at the lossless level. Raises IncompatibleCache for a name that does not exist."""
    if isinstance(level, Level):
        return "custom", level
    if level == LOSSLESS:
        return level, None
    if not isinstance(level, str) or level not in LEVELS:
        raise IncompatibleCache(unknown("cache level", str(level), NAMES))
    return level, LEVELS[level]
