"""A-shape (the streaming pattern of MInference, Jiang et al., NeurIPS 2024, arXiv:2407.02490): sinks and a local band.

    query i of n reads token j  iff  j < sinks  or  i - j < local  or  i >= n - last      (and j <= i; j counts real tokens)

With `last` this is Tri-shape (SCBench, Li et al., ICLR 2025, arXiv:2412.10319): the end of the prompt, where a question
stands, reads all of it. What no query of a block reads is skipped, so the work grows with the prompt's length, not with its
square. Retentions that sum attention (`h2o`, `tova`, `d2o`, `elastic`) sum what was read, while under the methods that choose
(`xattention`, ...) they sum the attention to all tokens. Those that ask the last queries (`snapkv` and its kin) look at all
tokens under either.

Defaults: 128 sinks, as where its code reads with this pattern in all heads; the band there is 3968, here 1024. The heads to
which its search gives this pattern have 100 and 800.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.kernels.span_attention import Band
from kvengine.policies._budget import check_count
from kvengine.policies.prefill import Prefill


@dataclass(frozen=True)
class AShape(Prefill):
    """The prompt's queries read the first `sinks` tokens and the `local` newest before them.

    Args:
        sinks: tokens at the start that every query reads.
        local: width of the band, the query's own token included. Tokens.
        last: a prompt's last queries, which read everything. Tokens; 100 in SCBench's code for Tri-shape.
    """

    sinks: int = 128
    local: int = 1024
    last: int = 0

    def __post_init__(self) -> None:
        check_count(self, sinks=self.sinks, last=self.last)
        check_count(self, least=1, local=self.local)

    @property
    def exact(self) -> bool:
        return False

    @property
    def whole(self) -> int:
        return self.last

    def visible(
        self, query: Int[Tensor, "query"], token: Int[Tensor, "row token"], first: Int[Tensor, "row"]
    ) -> Bool[Tensor, "row query token"]:
        sink = token < first[:, None] + self.sinks
        return sink[:, None] | (query[:, None] - token[:, None] < self.local)

    def band(self, first: Int[Tensor, "row"]) -> Band:
        return Band(first, self.sinks, self.local)
