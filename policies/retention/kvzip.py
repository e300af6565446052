"""KVzip (Kim et al., NeurIPS 2025, arXiv:2505.23416): what the model looks at while it repeats the context stays.

The prompt has been read with the full cache. Chunk by chunk it is then read once more behind all that is held, as if the
model repeated it, and what was fed for that is thrown away:

    fed of chunk c  =  [prompt | last `carry` tokens of the chunk before | suffix | tokens of c]
    score_j         =  max over the query group and all queries i of what is fed of
                       softmax over [sinks before c | c, as held | what is fed, up to i]_ij           (j in c)
    keep            =  the layers * heads * budget best of a sequence, all its layers and KV heads compared

Which question will be asked plays no part: what is kept serves any. Rows end up with different numbers of tokens, which
live in pages, so that the bytes of what is dropped are freed. Scores stay with the tokens. At a later turn's end the tokens
that no replay has read, those of the answers and the new turn, are repeated, and compete with what older ones scored; the
budget counts them all. What cannot be repeated, since no ids came with it (a tuned prefix), is kept before all else. A text
within the budget is not read twice, and stays exact.

The cost: a prompt is read about twice, so that its time doubles and more; scores take memory for a few queries at a time.
What is fed attends to everything that is held, under a prefill method too, and in heads that a routing gives other rules to
what these hold. It needs a model to read with: by generate(), in a loop of one's own, as a draft's cache.

Differs from the official code: the softmax is in float32; exactly the budget is kept, by rank (equal scores: earlier layers
and heads first, later tokens within one), where the official threshold drops all ties and kvpress keeps a token or two more;
pages are freed where kvpress masks; batches. A system prompt is repeated and judged like the rest, and counts, where the code
keeps it whatever it is worth, and takes all of it for sinks (kvpress: four tokens, which it keeps). The official prompts are
words ("Repeat the previous context exactly."; from the second chunk on others, which end in "starting with"), and a chat
model wants its template around them: give both as ids, `prompt` and `suffix`, the same for all chunks. Nothing is fed by
default, since ids belong to a tokenizer. Where later layers read an earlier one's keys (Gemma 3n), the earlier one's queries
score, as for every policy. In processes that share a model's heads (tensor parallel), those of each process divide its part of
the budget.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.best_tokens import best_tokens
from kvengine.policies._budget import Budget, check_budget, check_count
from kvengine.policies.retention import Replay, Retention, Seen

KEPT = 2.0  # the score of what cannot be repeated: more than any weight of a softmax


@dataclass(frozen=True)
class KVzip(Retention):
    """Keep what the model looks at while it repeats the context.

    Args:
        budget: tokens kept per KV head, on average over the heads of all layers, or a fraction of the prompt.
        chunk: how many tokens are repeated in one pass. Tokens.
        carry: how many tokens of the chunk before are fed ahead of a chunk. Tokens.
        prompt: ids fed ahead of these, asking to repeat the context:
            `tuple(tokenizer("\\n\\nRepeat the previous context exactly.", add_special_tokens=False)["input_ids"])`.
        suffix: ids fed right before a chunk: what a chat template puts between a request and its answer.
        sinks: the first tokens, which share the queries' attention with every later chunk. Tokens.
    """

    ragged: ClassVar[bool] = True
    budget: Budget = 1024
    chunk: int = 2048
    carry: int = 8
    prompt: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    sinks: int = 4

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, 1, chunk=self.chunk)
        check_count(self, carry=self.carry, sinks=self.sinks)
        for name, ids in (("prompt", self.prompt), ("suffix", self.suffix)):
            if not isinstance(ids, tuple) or any(type(i) is not int or i < 0 for i in ids):
                raise PolicyError(f"KVzip: {name}={ids!r} must be a tuple of token ids, such as (271, 39134)")
        if self.carry > self.chunk:
            raise PolicyError(
                f"KVzip: carry={self.carry} tokens of a chunk of {self.chunk}; give at most the whole chunk"
            )

    @property
    def replay(self) -> Replay:
        return Replay(self.chunk, self.carry, self.prompt, self.suffix, self.sinks)

    def due(self, seen: Sequence[Seen]) -> Bool[Tensor, "sequence"]:
        at = seen[0].first.device
        held = sum(by_sequence(s.valid.sum(1), s).to(at) for s in seen)
        return held > self.total(seen)  # type: ignore[return-value]

    def score(self, seen: Seen) -> Float[Tensor, "row token"]:
        if seen.repeated is None:
            return seen.score
        read = seen.repeated > 0
        old = torch.where(seen.score > 0, seen.score, KEPT)
        return torch.where(read, seen.repeated, torch.where(read.any(1, keepdim=True), old, seen.score))

    def measure(self, seen: Seen) -> Float[Tensor, "sequence head token"]:
        return seen.score.float().masked_fill(~seen.valid, -1).unflatten(0, (-1, seen.heads))

    def share(self, seen: Sequence[Seen], measures: Sequence[Float[Tensor, "sequence _ _"]]) -> list[Int[Tensor, "_"]]:
        return [n.flatten(0, 1) for n in best_of_all(measures, self.total(seen))]

    def total(self, seen: Sequence[Seen]) -> Int[Tensor, "sequence"]:
        """What all layers and heads of a sequence may keep together."""
        at = seen[0].first.device
        return sum(by_sequence(s.count(self.budget), s).to(at) for s in seen)  # type: ignore[return-value]

    def keep(self, seen: Seen) -> Bool[Tensor, "row token"] | None:
        if seen.share is None:
            return None
        return best_tokens(seen.score.float().masked_fill(~seen.valid, float("-inf")), seen.share)


def by_sequence(count: Int[Tensor, "row"], seen: Seen) -> Int[Tensor, "sequence"]:
    return count.unflatten(0, (-1, seen.heads)).sum(1)


def best_of_all(
    scores: Sequence[Float[Tensor, "sequence _ _"]], total: Int[Tensor, "sequence"]
) -> list[Int[Tensor, "sequence _"]]:
    """How many of the `total` best of a sequence each head of each layer has.

    Scores are [sequence, head, token], 0 or more, -1 for no token; counts [sequence, head]. Of equal ones, those of earlier
    layers and heads. The score where they begin is found by halving, since floats from 0 on are ordered as their bits are:
    nothing is sorted, and only counts pass from layer to layer.

    >>> layers = torch.tensor([[[0.9, 0.1, 0.5]]]), torch.tensor([[[0.5, 0.5, -1.0], [0.8, 0.0, 0.0]]])
    >>> [n.tolist() for n in best_of_all(layers, torch.tensor([4]))]
    [[[2]], [[1, 1]]]
    """
    bits = [x.contiguous().view(torch.int32) for x in scores]
    low = torch.zeros_like(total, dtype=torch.int32)  # so many are `low` or more
    high = torch.full_like(low, torch.iinfo(torch.int32).max)  # so many are fewer than `total`, or none
    for _ in range(31):
        middle = low + (high - low) // 2
        enough = sum(beyond(x, middle).sum(1).to(total.device) for x in bits) >= total
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    above = [beyond(x, low + 1) for x in bits]
    equal = [beyond(x, low) - n for x, n in zip(bits, above, strict=True)]
    left = total - sum(n.sum(1).to(total.device) for n in above)
    found = []
    for more, same in zip(above, equal, strict=True):
        room = (left[:, None].to(same.device) - same.cumsum(1) + same).clamp(min=0)
        taken = torch.minimum(same, room)
        found.append(more + taken)
        left = left - taken.sum(1).to(left.device)
    return found


def beyond(bits: Int[Tensor, "sequence head token"], least: Int[Tensor, "sequence"]) -> Int[Tensor, "sequence head"]:
    return (bits >= least.to(bits.device)[:, None, None]).sum(2)
