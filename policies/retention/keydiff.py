"""KeyDiff (Park et al., 2025, arXiv:2504.15364): keep the keys that differ most from the average direction.

    anchor   =  mean over tokens t of k_t / |k_t|
    score_j  =  -cos(k_j, anchor)
    keep     =  the best `budget` tokens

No query is looked at, so the verdict costs one pass over the keys. Keys are taken as the cache holds them, rotated.
The prompt is judged at its end; tokens generated later all stay.

Differs from the official code: it judges block by block, so that the prompt never exceeds the budget while it is
read; here a prompt is judged once, so that its chunks do not matter.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from kvengine.policies._budget import Budget, check_budget, check_count
from kvengine.policies.retention import Retention, Seen, keep_top, some_rows


@dataclass(frozen=True)
class KeyDiff(Retention):
    """Keep the tokens whose keys are unlike the others.

    Args:
        budget: tokens kept of the prompt per KV head, or a fraction of the prompt.
        recent: the newest tokens that stay whatever their score, within the budget. Tokens.
    """

    remembers: ClassVar[bool] = False
    budget: Budget = 1024
    recent: int = 0

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, recent=self.recent)

    @property
    def order(self) -> int | None:
        return 0

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        keys = seen.read()[0]
        return torch.cat([apart(keys[rows].float(), seen.valid[rows]) for rows in some_rows(keys)])

    def always(self, seen: Seen) -> Bool[Tensor, "row token"]:
        return seen.recent(self.recent)

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"]:
        return keep_top(seen, seen.score, self.budget, self.always(seen))


def apart(k: Float[Tensor, "row token dim"], valid: Bool[Tensor, "row token"]) -> Float[Tensor, "row token"]:
    """How far each key is from the mean direction of its row's: minus the cosine."""
    if not bool(valid.all()):
        k = k.masked_fill(~valid[..., None], 0)
    length = torch.linalg.vector_norm(k, dim=-1).clamp(min=1e-12)
    total = torch.bmm(1 / length[:, None], k)[:, 0]  # its direction is the mean's
    return -torch.bmm(k, F.normalize(total, dim=-1)[..., None])[..., 0] / length
