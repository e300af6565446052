"""Oracle top-k: read the tokens with the largest true attention. The ceiling that every selection is measured against.

    want_j  =  max over the query group of softmax(q k^T)_j          (over the sealed tokens; the open tail is read anyway)
    read    =  the best tokens, up to `budget` with the open tail

It looks at every key to choose, so it saves no time; it says what a perfect choice of so many tokens would give. Where
pages are elsewhere (`host`, `disk`), every key is brought for that at every token, and what is chosen once more. A cap on
logits (Gemma 2) counts as in the model's own attention.

Of one query head's attention no other choice of as many tokens receives more. In a query group each head is asked for
shares of what it pays to sealed tokens, whatever it pays to the tail or to a sink's logit (gpt-oss): so a head that looks
there has as much say as the others.
"""

from dataclasses import dataclass

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.policies._budget import Budget, check_budget
from kvengine.policies.selection import Fields, Selection, Where, best


@dataclass(frozen=True)
class OracleTopK(Selection):
    """Read the tokens with the largest true attention.

    Args:
        budget: tokens read per decoded token and KV head, the open tail included, or a fraction of the prompt.
    """

    budget: Budget = 1024

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)

    @property
    def reads(self) -> Budget:
        return self.budget

    def select(
        self, q: Float[Tensor, "row group dim"], summary: Fields, alive: Bool[Tensor, "row unit"], at: Where
    ) -> Int[Tensor, "row chosen"] | None:
        logits = at.logits(q)
        if at.softcap is not None:
            logits = at.softcap * (logits / at.softcap).tanh()
        want = logits.masked_fill(~alive[:, None], float("-inf")).log_softmax(-1).amax(1)
        return best(want, alive, at)
