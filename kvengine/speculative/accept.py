"""The one acceptance rule, for every tier, for chains and trees.

A draft is a tree of tokens (a chain is the tree with one branch). At each node the judge, whose law there is `p`, goes
through the children in the order in which they were drawn. Child `x`, drawn from law `q`, stands with probability
min(1, p(x)/q(x)); if it falls, `p` becomes norm(max(p - q, 0)), `q` loses `x`, and the next child is tried. When none
stands the judge draws from what is left of `p`. The token that comes out has law `p` exactly
(Leviathan et al., arXiv:2211.17192, for one child; Miao et al., arXiv:2305.09781, and Chen et al., arXiv:2402.12374,
for several drawn without replacement).

Differs from the official TriForce code, whose middle tier draws from `p` instead of the residual after a rejection:
its tokens then do not have the law that the top tier tests them against, and the output is biased.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import CacheError, ModelError
from kvengine.speculative.noise import Gumbel, Made, Stream, gumbel

Law = Float[Tensor, " vocab"]
"""Probabilities over the vocabulary after all logit processors, in any floating dtype."""

ROOT = -1


@dataclass
class Draft:
    """Drafted tokens as a tree under the last known token.

    tokens[i] hangs under node parents[i] (ROOT = -1: under the last known token); parents come before children, and
    siblings are listed in the order in which they were drawn. laws[i + 1] is the law that the children of node i were
    drawn from (laws[0]: the root's), or None where they were not drawn but chosen, each then being a law of one point.
    confidence[i]: what the drafter thought of token i, from 0 to 1; only the stopping rule looks at it.

    >>> draft = Draft.chain([5, 7], [None, None])
    >>> draft.parents, draft.path(1), draft.confidence
    ([-1, 0], [5, 7], [1.0, 1.0])
    """

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    laws: list[Law | None] = field(default_factory=list)
    confidence: list[float] = field(default_factory=list)

    @classmethod
    def chain(cls, tokens: Sequence[int], laws: Sequence[Law | None]) -> Draft:
        """tokens[i] was drawn from laws[i] given all before it."""
        return cls(list(tokens), list(range(-1, len(tokens) - 1)), list(laws), [1.0] * len(tokens))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        return self.parents == list(range(-1, len(self) - 1))

    @property
    def levels(self) -> tuple[int, ...]:
        """Nodes down to each depth.

        >>> Draft(tokens=[5, 6, 7], parents=[-1, -1, 0]).levels
        (2, 3)
        """
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent == ROOT else depths[parent] + 1)
        found = Counter(depths)
        return tuple(accumulate(found[depth] for depth in range(len(found))))

    def append(self, token: int, law: Law | None, confidence: float = 1.0) -> None:
        """Lengthen a chain."""
        self.parents.append(len(self) - 1)
        self.tokens.append(token)
        self.laws.append(law)
        self.confidence.append(confidence)

    def children(self, node: int) -> list[int]:
        """Nodes under `node`, in draw order."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path(self, node: int) -> list[int]:
        """Tokens from the root down to `node`."""
        tokens = []
        while node != ROOT:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def depth(self, node: int) -> int:
        """0 for the root's children."""
        return len(self.path(node)) - 1


@dataclass(frozen=True)
class Verdict:
    """path: the drafted nodes that stand, root first. tokens: theirs, and then one token of the judge's own."""

    path: list[int]
    tokens: list[int]


@runtime_checkable
class Laws(Protocol):
    """A law for each place: a tensor of them, or such as are made when they are looked at."""

    def __getitem__(self, at: int, /) -> Law: ...


@runtime_checkable
class Chance(Protocol):
    """A source of randomness; tests put one here that visits every outcome."""

    def happens(self, probability: float) -> bool: ...

    def draw(self, law: Law) -> int: ...


@runtime_checkable
class Rule(Protocol):
    """How a tier draws from its law, and how it judges tokens drawn from another."""

    def pick(self, law: Law, count: int, position: int) -> list[int]:
        """Up to `count` different tokens from `law`, the first being a draw from it."""

    def judge(self, p: Law, q: Law | None, children: Sequence[int], position: int) -> tuple[int | None, int]:
        """Which child stands (None: none of them), and the token that comes out."""


@dataclass
class Rejection:
    """Accept or resample: exact in law, and the most drafts accepted that a chain allows."""

    chance: Chance

    def pick(self, law: Law, count: int, position: int) -> list[int]:
        chosen: list[int] = []
        while len(chosen) < count and float(law.sum()) > 0:
            chosen.append(self.chance.draw(law))
            law = without(law, chosen[-1])
        return chosen

    def judge(self, p: Law, q: Law | None, children: Sequence[int], position: int) -> tuple[int | None, int]:
        if q is None:
            return self._judge_chosen(p, children)
        for index, token in enumerate(children):
            if self.chance.happens(_ratio(p, q, token)):
                return index, token
            p, q = residual(p, q), without(q, token)
        return None, self.chance.draw(p)

    def _judge_chosen(self, p: Law, children: Sequence[int]) -> tuple[int | None, int]:
        """`judge` where each child's law is a point: it stands with its share of what `p` leaves to it."""
        if not children:
            return None, self.chance.draw(p)
        left, chosen = 1.0, dict(zip(children, p[list(children)].tolist(), strict=True))
        for token, share in chosen.items():
            if self.chance.happens(share / left):  # more than the share is left of one that fell
                return list(children).index(token), token
            left -= share
        rest = p.index_fill(0, torch.tensor(list(chosen), device=p.device), 0)
        total = rest.sum()
        return None, self.chance.draw(rest / total if float(total) > 0 else p)


@dataclass
class Coupled:
    """Everybody adds the same noise, fixed by position, to log-probabilities and takes the largest.

    The token that comes out ignores the drafts, so the text is that of plain sampling with the same noise, token for
    token, whatever drafted it. Two laws at total variation d agree with probability (1-d)/(1+d) at least.
    """

    noise: Gumbel

    def pick(self, law: Law, count: int, position: int) -> list[int]:
        keys = law.double().log() + self.noise.at(position, law.shape[-1], law.device)
        best = keys.topk(min(count, law.shape[-1])) if count > 1 else keys.max(-1, keepdim=True)
        found = [token for token, value in zip(best[1].tolist(), best[0].tolist(), strict=True) if value > -torch.inf]
        if not found:
            raise ModelError(
                "the probabilities to draw from are not numbers: the model's scores overflowed, or a processor's"
            )
        return found

    def judge(self, p: Law, q: Law | None, children: Sequence[int], position: int) -> tuple[int | None, int]:
        token = self.pick(p, 1, position)[0]
        return (list(children).index(token) if token in children else None), token


def rule(seed: int, row: int, coupled: bool, made: Made = gumbel) -> Rule:
    """The rule for one sequence; rows with the same seed draw independently of each other. `made`: of the coupled noise."""
    return Coupled(Gumbel(seed, row, made)) if coupled else Rejection(Stream(seed, row))


def walk(draft: Draft, laws: Laws, rule: Rule, position: int) -> Verdict:
    """Judge a draft from the root down.

    laws: the judge's own, 0 after the last known token and i + 1 after node i.
    position: index in the sequence of the first token to come out.
    """
    path: list[int] = []
    tokens: list[int] = []
    node: int | None = ROOT
    while node is not None:
        children = draft.children(node)
        q = draft.laws[node + 1] if children else None
        index, token = rule.judge(laws[node + 1], q, [draft.tokens[c] for c in children], position + len(path))
        tokens.append(token)
        node = None if index is None else children[index]
        path += [] if node is None else [node]
    return Verdict(path, tokens)


def residual(p: Law, q: Law) -> Law:
    """norm(max(p - q, 0)): what a judge draws from once a token from `q` has been turned down.

    Where `q` covers `p` nothing is left; a rejection then has probability 0 up to rounding, and `p` itself is returned.
    """
    rest = (p - q.to(p.device)).clamp_min(0)  # who drafted may be a model on another device
    total = rest.sum()
    return rest / total if float(total) > 0 else p


def without(law: Law, token: int) -> Law:
    """The law once `token` has been taken out of the urn; all zeros if nothing else was in it."""
    rest = law.clone()
    rest[token] = 0
    total = rest.sum()
    return rest / total if float(total) > 0 else rest


def _ratio(p: Law, q: Law, token: int) -> float:
    ours, theirs = float(p[token]), float(q[token])
    if not theirs > 0:
        raise CacheError(
            f"token {token} was proposed with probability {theirs}: a drafter must report the law that it drew from, "
            "after its own processors and without the siblings already drawn"
        )
    return ours / theirs
