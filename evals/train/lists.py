"""Training samples of RULER's other tasks: common words, frequent coded words, variable tracking."""

from __future__ import annotations

import string
from collections.abc import Sequence

from numpy.random import Generator

from kvengine.evals.train.samples import Codec, Sample, sentence
from kvengine.evals.train.text import words

COMMON = (
    "Below is a numbered list of words. In these words, some appear more often than others. "
    "Memorize the ones that appear most often.\n"
)
COMMON_QUESTION = "\nQuestion: What are the {count} most common words in the above list?"
COMMON_PREFIX = " Answer: The top {count} words that appear most often in the list are:"
FREQUENT = (
    "Read the following coded text and track the frequency of each coded word. "
    "Find the three most frequently appeared coded words."
)
FREQUENT_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. "
    "What are the three most frequently appeared words in the above coded text?"
)
FREQUENT_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
TRACKING = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
TRACKING_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
TRACKING_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {value}, they are: "
)


def _dictionary(rng: Generator, count: int) -> list[str]:
    every = (*words("noun"), *words("adjective"), *words("verb"))
    picked: dict[str, None] = {}
    while len(picked) < count:
        picked[every[rng.integers(len(every))]] = None
    return list(picked)


def _numbered(
    rng: Generator, codec: Codec, room: int, top: int, often: int, seldom: int
) -> tuple[list[int], list[str]]:
    """A shuffled numbered list of about `room` tokens and its `top` most common words."""
    rest = max(0, (room // 5 - top * often) // seldom)
    chosen = _dictionary(rng, top + rest)
    flat = [word for word in chosen[:top] for _ in range(often)] + [w for w in chosen[top:] for _ in range(seldom)]
    ids: list[int] = []
    for place, index in enumerate(rng.permutation(len(flat))):
        piece = codec(f" {place + 1}." if place else "1.", keep=True) + codec(" " + flat[index], keep=True)
        if len(ids) + len(piece) > room:
            break
        ids += piece
    return ids, chosen[:top]


def _list_answer(sample: Sample, codec: Codec, answers: Sequence[str], rng: Generator) -> None:
    """` 1. word 2. word`: the words in random order, any that is left being right in each place."""
    left = [codec(" " + answers[i]) for i in rng.permutation(len(answers))]
    for place, ids in enumerate(left):
        sample.answer(codec(f" {place + 1}."), first=0.1, rest=0.1)
        sample.answer(ids, also=sorted({other[0] for other in left[place + 1 :]} - {ids[0]}))
    sample.end(codec.tokenizer.eos_token_id)


def common_words(rng: Generator, codec: Codec, length: int) -> Sample:
    """RULER's cwe; short lists ask for fewer words. From 1024 tokens on an answered small list may come first."""
    sample = Sample(task="common_words")
    sample.given([codec.tokenizer.bos_token_id])
    top, often, seldom = (10, 30, 3) if length >= 4096 else (10, 6, 1) if length >= 1024 else (4, 5, 1)
    if length >= 1024 and rng.random() < 0.7:
        shown = (10, 3) if length >= 4096 else (3, 1)
        _ask_common(rng, codec, sample, 40 * 22 if length >= 4096 else 20 * 9, 10, *shown)
        sample.given(codec("\n"))
    _ask_common(rng, codec, sample, length - len(sample.ids) - 90, top, often, seldom)
    return sample


def _ask_common(rng: Generator, codec: Codec, sample: Sample, room: int, top: int, often: int, seldom: int) -> None:
    ids, answers = _numbered(rng, codec, room, top, often, seldom)
    sample.given(codec(COMMON, keep=True))
    sample.given(ids)
    sample.given(codec(COMMON_QUESTION.format(count=top)))
    sample.given(codec(COMMON_PREFIX.format(count=top)))
    _list_answer(sample, codec, answers, rng)


def frequent_words(rng: Generator, codec: Codec, length: int) -> Sample:
    """RULER's fwe: made-up words with Zipf's frequencies (exponent 2), the most frequent replaced by dots."""
    sample = Sample(task="frequent_words")
    sample.given([codec.tokenizer.bos_token_id, *codec(FREQUENT, keep=True)])
    letters = list(string.ascii_lowercase)
    vocabulary = ["".join(rng.choice(letters, 6)) for _ in range(max(8, length // 50))]
    room, total = length - len(sample.ids) - 95, length // 3
    shares = [total * (rank + 1) ** -2.0 / 1.645 for rank in range(len(vocabulary))]
    flat = [word for word, share in zip(["...", *vocabulary], shares, strict=False) for _ in range(int(share))]
    ids: list[int] = []
    for index in rng.permutation(len(flat)):
        ids += codec(" " + flat[index], keep=True) if len(ids) + 8 < room else ()
    sample.given(ids)
    sample.given(codec(FREQUENT_QUESTION, keep=True))
    sample.given(codec(FREQUENT_PREFIX, keep=True))
    left = [codec(" " + word) for word in vocabulary[:3]]
    for place, word in enumerate(left):
        sample.answer(word, also=sorted({other[0] for other in left[place + 1 :]} - {word[0]}))
        sample.answer(codec("." if place == 2 else ","), first=0.1)
    sample.end(codec.tokenizer.eos_token_id)
    return sample


def variable_tracking(rng: Generator, codec: Codec, length: int) -> Sample:
    """RULER's vt with one to four hops in noise."""
    sample = Sample(task="variables")
    sample.given([codec.tokenizer.bos_token_id, *codec(TRACKING, keep=True)])
    hops, value = int(rng.integers(1, 5)), str(rng.integers(10000, 99999))
    names = ["".join(rng.choice(list(string.ascii_uppercase), 5)) for _ in range(hops + 1)]
    lines = [f"\nVAR {names[0]} = {value}."]
    lines += [f"\nVAR {new} = VAR {old}." for old, new in zip(names, names[1:], strict=False)]
    pieces = [codec(line) for line in lines]
    noise = codec("\n" + sentence(rng, "noise"), keep=True)
    room = length - len(sample.ids) - 75 - 6 * len(names) - sum(map(len, pieces))
    units = max(0, room // len(noise))
    places = sorted(rng.integers(0, units + 1, len(pieces)).tolist())
    for unit in range(units + 1):
        for piece, place in zip(pieces, places, strict=True):
            if place == unit:
                sample.given(piece)
        if unit < units:
            sample.given(noise)
    sample.given(codec(TRACKING_QUESTION.format(value=value)))
    sample.given(codec(TRACKING_PREFIX.format(value=value, count=len(names))))
    for place, name in enumerate(names):
        sample.answer(codec(" " + name if place else name))
    sample.answer(codec("."), first=0.1)
    sample.end(codec.tokenizer.eos_token_id)
    return sample
