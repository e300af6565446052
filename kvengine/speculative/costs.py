"""What rounds cost by how much they draft, from measured seconds that vary.

Seconds of a round that drafts nothing stand for themselves. For the others a line through the medians at each depth is
fitted, over the tokens drafted down to there (a tree has several at a depth), and each depth departs from it as far as
its own measurements carry: on a busy machine, where the same round takes a fifth more or less from one time to the next,
a few of them say little about a step between two depths; where seconds hardly vary, one says all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice


@dataclass
class Times:
    """Seconds by depth of the draft.

    recent: measurements kept for a depth. step: how far a depth is expected to lie from the line, as a share of its
    seconds. rise: what judging one more token is expected to add to a pass, as a share of it.
    """

    recent: int = 49
    step: float = 0.01
    rise: float = 0.03
    kept: dict[int, deque[float]] = field(default_factory=dict, init=False)
    # seconds of drafting nothing, shortly after a draft
    behind: deque[float] = field(default_factory=lambda: deque(maxlen=49), init=False)
    middle: dict[int, float] = field(default_factory=dict, init=False)
    fresh: dict[int, int] = field(default_factory=dict, init=False)  # measurements that `middle` does not know yet
    spread: float = field(default=0.1, init=False)  # how far a measurement lies from its median, as a share of it
    slope: float = field(default=0.0, init=False)  # expected seconds of one more token, by what drafting took
    sizes: list[float] = field(default_factory=lambda: [0.0], init=False)  # drafted tokens down to each depth, of late

    def add(self, depth: int, draft: float, judge: float, levels: Sequence[int] = (), behind: bool = False) -> None:
        """Take note of a round: seconds of drafting and of judging, and tokens drafted down to each depth (of a tree).

        behind: it drafted nothing, and one shortly before it did.
        """
        for at, size in enumerate(levels or range(1, depth + 1), 1):
            if at == len(self.sizes):
                self.sizes.append(size)
            self.sizes[at] += 0.1 * (size - self.sizes[at])
        kept, total = self.kept.setdefault(depth, deque(maxlen=self.recent)), max(LEAST, draft + judge)
        if behind:
            self.behind.append(total)
        else:
            if len(kept) > 2:
                self.spread += 0.03 * (min(1.0, abs(total / self.middle[depth] - 1)) - self.spread)
                self.spread = max(STEADY, self.spread)
            kept.append(total)
        self.fresh[depth] = self.fresh.get(depth, 0) + 1
        if self.fresh[depth] == 4 or len(kept) < 9:  # to sort them anew takes longer than all the rest
            self.middle[depth], self.fresh[depth] = typical(kept) if depth else self.plain(), 0
        if depth:
            expected = draft / (levels[-1] if levels else depth) + self.rise * judge
            self.slope += (expected - self.slope) * (0.1 if self.slope else 1.0)

    def plain(self) -> float:
        """Seconds of a round that drafts nothing, among others that do not either.

        Shortly behind a draft such a round may take half as long again, the caches being full of other things, and a rule
        that drafts most of the time sees no others, or few. So what they differ by, if that is more than a standard
        error, is taken off.
        """
        alone, behind = self.kept[0], self.behind
        if not (alone and behind):
            return typical(alone or behind)
        few, many, n, m = typical(alone), typical(behind), len(alone), len(behind)
        doubt = 1.25 * self.spread * few * (1 / n + 1 / m) ** 0.5
        return (n * few + m * (many - max(0.0, many - few - doubt))) / (n + m)

    def clear(self) -> None:
        for one in (self.kept, self.middle, self.fresh, self.behind):
            one.clear()
        self.slope = 0.0

    @property
    def drafted(self) -> bool:
        """Whether any round has drafted."""
        return any(self.middle)

    def line(self) -> tuple[float, float]:
        """Seconds at depth 0 and per token over depths from 1 on, a likely slope rather than a steep one."""
        points = [(self.size(depth), len(self.kept[depth]), value) for depth, value in self.middle.items() if depth]
        weight = sum(n for _, n, _ in points)
        x = sum(n * d for d, n, _ in points) / weight
        y = sum(n * t for _, n, t in points) / weight
        noise = (1.25 * self.spread * y) ** 2
        prior = noise / max((0.5 * self.slope) ** 2, 1e-30)  # the expected slope may be wrong by half
        wide = sum(n * (d - x) ** 2 for d, n, _ in points) + prior
        slope = (sum(n * (d - x) * t for d, n, t in points) + prior * self.slope) / wide
        slope = max(0.0, slope - OPTIMISM * (noise / wide) ** 0.5)
        return y - slope * x, slope

    def size(self, depth: int) -> float:
        """Tokens drafted down to that depth; one more per depth where none was drafted yet."""
        known = min(depth, len(self.sizes) - 1)
        return self.sizes[known] + depth - known

    def table(self, most: int) -> list[float]:
        """Seconds by depth from 0 to `most`. Drafting nothing, unless measured, is taken to cost a quarter of a round of one."""
        start, slope = self.line()
        trust = (1.25 * self.spread / self.step) ** 2
        least = 0.5 * min(self.middle.values())  # after a stall a line falls below nothing elsewhere
        out = [0.0]
        for depth in range(1, most + 1):
            n, line = len(self.kept.get(depth, ())), max(least, start + slope * self.size(depth))
            out.append((n * self.middle.get(depth, 0.0) + trust * line) / (n + trust))
        out[0] = self.middle.get(0, out[1] / 4)
        return out


LEAST = 1e-9  # seconds of a round: a clock that stands still is no proof that rounds cost nothing
STEADY = 1e-4  # share: where measurements never differ, a slope would come out of rounding errors
OPTIMISM = 0.3  # standard errors: a slope thought too gentle is tried and corrected, one thought too steep is not


def typical(values: deque[float]) -> float:
    """The mean of the middle three fifths: stalls leave it alone, and it varies less than a median.

    >>> typical(deque([1.0, 2.0, 3.0, 4.0, 1000.0]))
    3.0
    """
    cut = len(values) // 5
    return sum(islice(sorted(values), cut, len(values) - cut)) / (len(values) - 2 * cut)
