"""Pieces that a thread fetches before they are asked for."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import numpy as np
import torch
from torch import Tensor

from kvengine.errors import StoreError
from kvengine.offload.placement._packed import Packed


class Staged:
    """Pieces on their way up from a lower tier."""

    def __init__(self, at: np.ndarray, raw: Tensor) -> None:
        self.at, self.raw = at, raw
        self.future: Future[None] | None = None
        # Why it failed; the error itself knows the frames that it passed, and would keep this with its tiers.
        self.problem = ""

    def fill(self, loads: Sequence[tuple[Packed, np.ndarray, np.ndarray]]) -> None:
        """From each tier, the pieces in these slots to these rows. Runs on a thread of its own."""
        try:
            for level, slots, rows in loads:
                if len(rows) == len(self.at):
                    level.fetch(slots, self.raw)
                elif len(rows):
                    part = torch.empty(len(rows), self.raw.shape[1], dtype=torch.uint8)
                    level.fetch(slots, part)
                    # By numpy: the buffer may have been made in torch's inference mode, in which this thread is not.
                    self.raw.numpy()[rows] = part.numpy()
        except StoreError as error:
            self.problem = str(error)
