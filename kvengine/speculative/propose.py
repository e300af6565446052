"""Drafters that need no training: they know the text so far, or what the model has said before.

Their tokens are chosen, not drawn: the law of each is a single point (`None` in a draft).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.speculative.accept import ROOT, Draft
from kvengine.speculative.law import Text
from kvengine.speculative.tier import More


@dataclass
class Lookup:
    """Prompt lookup: what followed the last few tokens when they last occurred.

    most, least: n-gram lengths tried, longest first. The latest occurrence wins; Hugging Face and the original
    (github.com/apoorvumang/prompt-lookup-decoding) take the earliest. The index grows with the text: one dictionary
    entry per token and length.
    """

    most: int = 3
    least: int = 1
    index: dict[tuple[int, ...], int] = field(default_factory=dict, init=False)
    indexed: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise PolicyError(f"lookup needs 1 <= least <= most, not least={self.least}, most={self.most}")

    def propose(self, text: Text, tail: Sequence[int], more: More) -> Draft:
        self._catch_up(text)
        out = Draft()
        while more(out.confidence):
            found = self._find(text, [*tail, *out.tokens])
            if found is None:
                return out
            place, length = found
            for at in range(place, len(text)):  # not a copy of all that follows, of which a few are taken
                if not more(out.confidence):
                    return out
                out.append(text.tokens[at], None, length / self.most)
        return out

    def settle(self, text: Text) -> None:
        return None

    def observe(self, tokens: Sequence[int], logits: Float[Tensor, "token vocab"]) -> None:
        return None

    def _catch_up(self, text: Text) -> None:
        """Index every n-gram that has a successor in the text."""
        for end in range(max(self.indexed, self.least), len(text)):
            for length in range(self.least, min(self.most, end) + 1):
                self.index[tuple(text.tokens[end - length : end])] = end
        self.indexed = max(self.indexed, len(text))

    def _find(self, text: Text, tail: Sequence[int]) -> tuple[int, int] | None:
        """Where the continuation of the longest known n-gram starts, and that n-gram's length."""
        last = text.since(max(0, len(text) + len(tail) - self.most), tail)
        for length in range(min(self.most, len(last)), self.least - 1, -1):
            place = self.index.get(tuple(last[-length:]))
            if place is not None:
                return place, length
        return None


WIDTH = 8
LAST = 32
"""Passes that are remembered while nothing is drafted."""
BLOCK = 128
"""Entries of a vocabulary that are looked at together."""

# How many children each node of the static tree has; a node is the path of ranks that leads to it.
CHILDREN: dict[tuple[int, ...], int] = {
    (): 8,
    **{(rank,): count for rank, count in enumerate((8, 4, 3, 2, 1, 1, 1, 1))},
    **{(0, rank): count for rank, count in enumerate((8, 3, 2, 1, 1, 1, 1, 1))},
    **{(1, 0): 2, (1, 1): 1, (2, 0): 1, (3, 0): 1, (4, 0): 1, (5, 0): 1},
    **{(0, 0, rank): count for rank, count in enumerate((5, 2, 1, 1, 1))},
    **{path: 1 for path in ((0, 1, 0), (0, 2, 0), (1, 0, 0), (2, 0, 0), (3, 0, 0))},
    (0, 0, 0, 0): 3,
    **{path: 1 for path in ((0, 0, 0, 1), (0, 0, 0, 2), (0, 0, 1, 0), (0, 1, 0, 0), (1, 0, 0, 0))},
    (0, 0, 0, 0, 0): 2,
    (0, 0, 0, 1, 0): 1,
}


def static_tree(nodes: int) -> list[tuple[int, ...]]:
    """The first `nodes` nodes of the tree of Token Recycling, level by level, each as its path of ranks."""
    return list(_levels())[:nodes]


def _levels() -> Iterator[tuple[int, ...]]:
    level: list[tuple[int, ...]] = [()]
    while level:
        level = [(*path, rank) for path in level for rank in range(CHILDREN.get(path, 0))]
        yield from level


@dataclass
class Recycling:
    """Token Recycling (arXiv:2408.08696): successors the model has rated highly before, read off as a static tree.

    For each token the model has seen there are its 8 best-rated successors of the last time (the rows of the paper's
    adjacency matrix that are in use). Every pass of the tier above updates them, and they stay between texts. The prompt
    does not, as in the official code; nor, other than there, do passes while nothing is drafted, but for the last 32.
    Greedy in the paper; here the children are laws of one point, so it is exact at every temperature.
    """

    vocab: int
    nodes: int = 80
    successors: dict[int, list[int]] = field(default_factory=dict, init=False, repr=False)
    heard: deque[tuple[Sequence[int], Tensor]] = field(init=False, repr=False)  # yet to be ranked
    tree: list[tuple[int, ...]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= 80:
            raise PolicyError(f"recycling has a tree of 1 to 80 nodes, not {self.nodes}")
        if self.vocab < WIDTH:
            raise PolicyError(f"recycling remembers {WIDTH} successors of a token; the vocabulary has {self.vocab}")
        self.tree, self.heard = static_tree(self.nodes), deque(maxlen=LAST)

    def propose(self, text: Text, tail: Sequence[int], more: More) -> Draft:
        out = Draft(laws=[None])
        self._rank()
        root = tail[-1] if tail else text.tokens[-1]
        nodes: dict[tuple[int, ...], int] = {(): ROOT}
        depth = 0
        for path in self.tree:  # level by level
            if len(path) > depth and not more([1.0] * depth):
                break
            depth, parent = len(path), nodes.get(path[:-1])
            if parent is None:
                continue
            before = root if parent == ROOT else out.tokens[parent]
            if before in self.successors:
                nodes[path] = _hang(out, self.successors[before][path[-1]], parent)
        return out

    def settle(self, text: Text) -> None:
        return None

    def observe(self, tokens: Sequence[int], logits: Float[Tensor, "token vocab"]) -> None:
        self.heard.append((tokens, logits))

    def _rank(self) -> None:
        """Take note of what was heard: of many passes together in the time that a few take one by one."""
        if self.heard:
            tokens = [token for some, _ in self.heard for token in some]
            ranked = best(torch.cat([logits for _, logits in self.heard]), WIDTH)
            self.heard.clear()
            self.successors.update(zip(tokens, ranked.tolist(), strict=True))


def best(scores: Float[Tensor, "row vocab"], count: int) -> Int64[Tensor, "row count"]:
    """The indices of the largest of each row, the largest first.

    On a CPU `topk` takes three times as long as a search among the blocks whose own maximum is large.

    >>> best(torch.arange(8192.0)[None], 3).tolist()
    [[8191, 8190, 8189]]
    """
    blocks = scores.shape[-1] // BLOCK
    if scores.is_cuda or blocks < 4 * count:
        return scores.topk(count, -1).indices
    front = scores[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    chosen = front.amax(2).topk(count, -1).indices
    index = torch.arange(BLOCK * blocks, device=scores.device).unflatten(0, (blocks, BLOCK))[chosen].flatten(1)
    rest = torch.arange(BLOCK * blocks, scores.shape[-1], device=scores.device).expand(len(scores), -1)
    index = torch.cat([index, rest], 1)
    return index.gather(1, scores.gather(1, index).topk(count, -1).indices)


def _hang(draft: Draft, token: int, parent: int) -> int:
    """Add a node; its index."""
    draft.tokens.append(token)
    draft.parents.append(parent)
    draft.laws.append(None)
    draft.confidence.append(1.0)
    return len(draft) - 1
