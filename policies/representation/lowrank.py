"""Low-rank keys, as in ShadowKV (Sun et al., ICML 2025, arXiv:2410.21465): few coordinates for each key of a prompt.

    K     =  [token, head * dim]: the sequence's keys before rotation, all KV heads side by side
    G     =  K^T K  =  W diag(s^2) W^T                          (head * dim square; eigenvectors by falling eigenvalue)
    U     =  K W_r,        K^ = U W_r^T                         (r = rank: K's singular value decomposition, cut at r)
    key   =  R(position) K^                                     (rotated on read, at the token's true position)

Error: |K - K^|^2 = sum of the discarded s^2, the least possible at that rank. Values stay exact.

Bytes: token * rank + head * dim * rank elements per sequence, whatever the number of heads, where the keys had
token * head * dim. With 8 heads of 128 and rank 160: 6.4 times fewer, for prompts much longer than 1024 tokens.

Default: rank 160, as in the paper's runs with 8 heads of 128 (a share of 0.156; a fraction does the same elsewhere).

Only the first prompt is stored so; tokens that come later stay exact. Keys before rotation have far less rank than
after it, so the model must use RoPE.

Differs from the official code: eigenvectors of the Gram matrix instead of a full singular value decomposition; prompts
of any length, padded batches (it recognises a prompt by having more than 4096 tokens, and all must be equally long).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import UnsupportedPolicy
from kvengine.policies import name_of
from kvengine.policies._budget import Budget, check_budget
from kvengine.policies.representation import Fields, Representation
from kvengine.policies.retention.full import Full

if TYPE_CHECKING:
    from kvengine.stack import Stack


@dataclass(frozen=True)
class LowRank(Representation):
    """The prompt's keys, of all heads together, by their first principal directions.

    Args:
        rank: directions kept, or that as a fraction of heads x channels.
    """

    codec: ClassVar[str] = "lowrank"  # of `kernels.lowrank_attention`
    joint: ClassVar[bool] = True
    needs_rope: ClassVar[bool] = True
    by_token: ClassVar[tuple[str, ...]] = ("u",)
    rank: Budget = 160

    def __post_init__(self) -> None:
        check_budget(self, "directions", rank=self.rank)

    def check(self, stack: Stack) -> None:
        if not isinstance(stack.retention, Full):
            raise UnsupportedPolicy(
                f"'lowrank' stores the keys of all heads of a sequence together, but {name_of(stack.retention)!r} "
                "drops tokens, which would free none of them; use 'full' (heads that stream stay exact)"
            )

    def join(self, k: Float[Tensor, "seq head token dim"]) -> Fields:
        flat = k.transpose(1, 2).flatten(2).float()
        _, vectors = torch.linalg.eigh(flat.transpose(1, 2) @ flat)
        rank = self.rank if isinstance(self.rank, int) else max(1, round(self.rank * flat.shape[2]))
        first = vectors[..., -rank:].flip(-1)  # or all, if there are fewer
        u = flat @ first
        # A coordinate is of all heads, and float16 ends at 65504: of what is beyond half of that the basis takes a power of two.
        beyond = (u.abs().amax(1, keepdim=True) / 2**15).clamp(min=1).log2().ceil().exp2()
        basis = (first * beyond).transpose(1, 2).unflatten(2, (k.shape[1], -1)).transpose(1, 2)
        return {"u": (u / beyond).to(k.dtype), "basis": basis.to(k.dtype).contiguous()}

    def keys(self, joined: Fields, token: Int[Tensor, "row chosen"]) -> Float[Tensor, "row chosen dim"]:
        u, basis = joined["u"], joined["basis"].flatten(0, 1)
        sequence = torch.arange(len(token), device=token.device) // (len(token) // len(u))
        return u[sequence[:, None], token].float() @ basis.float()

    def encode(
        self,
        k: Float[Tensor, "page token dim"],
        v: Float[Tensor, "page token dim_v"],
        score: Float[Tensor, "page token"],
    ) -> Fields:
        return {"v": v}

    def decode(self, fields: Fields) -> tuple[Float[Tensor, "page token 0"], Float[Tensor, "page token dim_v"]]:
        """The values; keys come from `keys`."""
        v = fields["v"]
        return v[..., :0], v
