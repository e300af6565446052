"""Contexts with hidden passkeys.

Two wordings: "passkey", the published one (ten keys of 32 words of the spelling alphabet), and "magic", RULER's needles
with numbers, which small models that never saw the former know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kvengine.errors import EvaluationError, unknown
from kvengine.evals.tasks._words import essay, number, pair, prose, sentences

NATO = (
    "Alpha Bravo Charlie Delta Echo Foxtrot Golf Hotel India Juliett Kilo Lima Mike November Oscar Papa Quebec Romeo "
    "Sierra Tango Uniform Victor Whiskey X-ray Yankee Zulu"
).split()
ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
DEPTHS = (0.05, 0.95)  # where in the context keys are hidden


@dataclass(frozen=True)
class Key:
    """A hidden sentence, the question about it, and the answer."""

    sentence: str
    question: str
    answer: str


def passkeys(source: Random, count: int) -> list[Key]:
    """The published wording."""
    found = []
    for ordinal in ORDINALS[:count]:
        words = " ".join(source.choices(NATO, k=32))
        told = f" Remember this sequence of words, it's the {ordinal} passkey to the vault: {words}."
        ask = f"\nBased on the content of the book, what is the {ordinal} passkey to the vault?\nPasskey:"
        found.append(Key(told, ask, f" {words}"))
    return found


def magic(source: Random, count: int) -> list[Key]:
    """RULER's wording."""
    found: dict[str, Key] = {}
    while len(found) < count:
        name, value = pair(source), number(source)
        told = f" One of the special magic numbers for {name} is: {value}."
        what = f"special magic number for {name} mentioned in the provided text"
        found[name] = Key(told, f"\nWhat is the {what}? The {what} is", f" {value}")
    return list(found.values())


STYLES: dict[str, Callable[[Random, int], list[Key]]] = {"passkey": passkeys, "magic": magic}
OPENINGS = {
    "passkey": "This is a very long story book: <book>",
    "magic": "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the numbers afterwards.\n",
}


@dataclass(frozen=True)
class Sample:
    """A context, then each question with its answer."""

    context: Int[Tensor, "token"]
    turns: list[tuple[Int[Tensor, "_"], Int[Tensor, "_"]]]

    @property
    def ids(self) -> Int[Tensor, "token"]:
        return torch.cat([self.context, *(part for turn in self.turns for part in turn)])

    @property
    def predicts(self) -> Bool[Tensor, "token"]:
        """The places from which a token of an answer is predicted."""
        marks = [torch.zeros(len(self.context), dtype=torch.bool)]
        for question, answer in self.turns:
            marks += [torch.zeros(len(question), dtype=torch.bool), torch.ones(len(answer), dtype=torch.bool)]
        return torch.cat([*marks, torch.zeros(1, dtype=torch.bool)])[1:]


@dataclass(frozen=True)
class Passkeys:
    """Draws samples.

    Attributes:
        tokenizer: of the model.
        style: "passkey" or "magic".
        keys: how many are hidden in a context.
        text: file or folder of prose; by default the bundled novel.
    """

    tokenizer: Any
    style: str = "passkey"
    keys: int = 10
    text: Path | None = None

    def __post_init__(self) -> None:
        if self.style not in STYLES:
            raise EvaluationError(unknown("style", self.style, STYLES))
        if not 1 <= self.keys <= len(ORDINALS):
            raise EvaluationError(f"keys={self.keys} must lie between 1 and {len(ORDINALS)}")

    def draw(self, seed: int | str, length: int) -> Sample:
        """A context of about `length` tokens, always the same for the same seed.

        Raises:
            EvaluationError: the keys alone are longer.
        """
        source = Random(f"duo/{seed}")
        keys = STYLES[self.style](source, self.keys)
        room = length - self.told(keys)
        if room < 1:
            raise EvaluationError(
                f"{self.keys} keys do not fit into {length} tokens (they take {length - room}); "
                "use longer contexts (--shortest, --length) or fewer --keys"
            )
        told = self.hide(keys, self.haystack(source, room), source)
        start = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        context = start + self.encode(OPENINGS[self.style] + told)
        turns = [(torch.tensor(self.encode(key.question)), torch.tensor(self.encode(key.answer))) for key in keys]
        source.shuffle(turns)
        return Sample(torch.tensor(context), turns)

    def told(self, keys: list[Key]) -> int:
        """Tokens of a context that are none of the text's."""
        return sum(len(self.encode(key.sentence)) for key in keys) + len(self.encode(OPENINGS[self.style]))

    def needs(self, seed: int | str) -> tuple[int, int]:
        """Tokens that a context's keys take, and its questions and answers behind it: about as many as those of other seeds."""
        keys = STYLES[self.style](Random(f"duo/{seed}"), self.keys)
        return self.told(keys), sum(len(self.encode(key.question)) + len(self.encode(key.answer)) for key in keys)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def haystack(self, source: Random, room: int) -> list[str]:
        """Sentences of about so many tokens, from a random place of the text."""
        words = prose(self.text)
        start = source.randrange(len(words))
        found, count = [], 0
        for sentence in sentences(essay(words[start:] + words[:start], room + 50)):
            count += len(self.encode(" " + sentence))
            if count > room:
                break
            found.append(sentence)
        return found

    def hide(self, keys: list[Key], text: list[str], source: Random) -> str:
        low, high = (round(share * len(text)) for share in DEPTHS)
        places = sorted((source.randint(low, high) for _ in keys), reverse=True)
        parts = [" " + sentence for sentence in text]
        for place, key in zip(places, reversed(keys), strict=True):
            parts.insert(place, key.sentence)
        return "".join(parts).lstrip()
