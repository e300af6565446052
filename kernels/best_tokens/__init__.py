"""The best tokens of each row."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import pick


def best_tokens(
    score: Float[Tensor, "row token"], count: Int[Tensor, "row"], *, backend: str | None = None
) -> Bool[Tensor, "row token"]:
    """The `count[r]` best tokens of each row; ties go to the later token, -inf is never chosen.

    On the host as on a device nothing waits for `count`. Raises KernelError on shapes that do not fit.

    >>> best_tokens(torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0, 5.0]]), torch.tensor([2, 1]))
    tensor([[False,  True,  True],
            [False, False,  True]])
    """
    if score.dim() != 2 or count.shape != score.shape[:1]:
        raise KernelError(f"score is [row, token], count [row]; got {list(score.shape)} and {list(count.shape)}")
    run = pick("best_tokens", (score,), backend, score.dtype == torch.float32)
    return run.best_tokens(score, count)  # type: ignore[no-any-return]
