"""A training sample: token ids with marked answers; and the random material that samples are written with."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from numpy.random import Generator
from transformers import PreTrainedTokenizerFast

from kvengine.evals.train.text import NOISE, haystack_sentences, words

IGNORE = -100


class Codec:
    """Encodes pieces of text; pieces begin at a space or a line, so that their tokens are those of the whole text."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self._cached = functools.lru_cache(maxsize=65536)(self._encode)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def __call__(self, text: str, *, keep: bool = False) -> tuple[int, ...]:
        """Token ids of a piece; `keep` remembers them (for sentences that come again)."""
        return self._cached(text) if keep else self._encode(text)


@dataclass
class Sample:
    """Token ids with, for each position, the token to predict there (`IGNORE`: none) and what else would be right.

    `weight` is the loss weight of each position. `also[i]` lists further right answers at position i: a list of values
    may be given in any order.
    """

    ids: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    weight: list[float] = field(default_factory=list)
    also: dict[int, tuple[int, ...]] = field(default_factory=dict)
    task: str = ""

    def given(self, ids: Sequence[int]) -> None:
        """Append text that the model only reads."""
        self.ids += ids
        self.target += [IGNORE] * len(ids)
        self.weight += [0.0] * len(ids)

    def answer(self, ids: Sequence[int], first: float = 1.0, rest: float = 0.5, also: Sequence[int] = ()) -> None:
        """Append tokens that the model must produce; `also` are the alternatives to the first of them."""
        if also:
            self.also[len(self.ids) - 1] = (ids[0], *also)
        for place, token in enumerate(ids):
            self.target[-1], self.weight[-1] = token, (rest if place else first)
            self.ids.append(token)
            self.target.append(IGNORE)
            self.weight.append(0.0)

    def end(self, token: int) -> None:
        """The answer is complete: `token` is to be predicted here, though the text may go on with another question."""
        self.target[-1], self.weight[-1] = token, 0.2


def word_key(rng: Generator) -> str:
    """An adjective and a noun."""
    adjectives, nouns = words("adjective"), words("noun")
    return f"{adjectives[rng.integers(len(adjectives))]}-{nouns[rng.integers(len(nouns))]}"


def number(rng: Generator) -> str:
    """Seven digits, the first not zero."""
    return str(rng.integers(10**6, 10**7))


def random_uuid(rng: Generator) -> str:
    """A version-4 UUID."""
    return str(uuid.UUID(bytes=rng.bytes(16), version=4))


def sentence(rng: Generator, kind: str) -> str:
    """One piece of haystack: noise, prose, or words at random."""
    if kind == "noise":
        return NOISE
    if kind == "prose" and rng.random() < 0.8:
        known = haystack_sentences()
        return known[rng.integers(len(known))]
    return _salad(rng)


def _salad(rng: Generator) -> str:
    """A sentence of dictionary words in no order: prose that nothing can be learnt from."""
    picked = []
    for _ in range(rng.integers(4, 14)):
        kind = words(("noun", "adjective", "verb")[rng.integers(3)])
        picked.append(kind[rng.integers(len(kind))])
    return (" ".join(picked) + ".?!"[rng.integers(3)]).capitalize()
