"""By how many positions a text goes on elsewhere than behind its last token.

Where an image's tokens have positions of three axes (Qwen-VL, GLM-V and their kin), what follows it is counted from the widest of
them on, so that positions and tokens differ from there on. What a pass has said of that is kept with the number of tokens before
it: what is taken back takes its own along.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtyping import Int
from torch import Tensor


@dataclass
class Shifts:
    """said: behind how many tokens a pass began, and what it has said, in that order."""

    said: list[tuple[int, Int[Tensor, "seq 1"]]] = field(default_factory=list)

    def add(self, begin: int, shift: Int[Tensor, "seq 1"]) -> None:
        """What a pass says that begins behind so many tokens; an earlier one that began there, or later, was taken back."""
        self.said = [one for one in self.said if one[0] < begin]
        if self.at(begin) is not shift:
            self.said.append((begin, shift))

    def at(self, seen: int) -> Int[Tensor, "seq 1"] | None:
        """What holds behind so many tokens; None if nothing was said."""
        return next((shift for begin, shift in reversed(self.said) if begin < seen), None)

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given sequences."""
        self.said = [(begin, shift[index.to(shift.device)]) for begin, shift in self.said]

    def repeat(self, repeats: int) -> None:
        """Each sequence, `repeats` times."""
        self.said = [(begin, shift.repeat_interleave(repeats, 0)) for begin, shift in self.said]
