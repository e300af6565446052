"""Training samples in RULER's sentences, as text with marked answers, encoded to exactly the length asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numpy.random import Generator

from kvengine.evals.train.samples import Codec, Sample, number, random_uuid, sentence, word_key

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
OPENING = {
    True: "A special magic {one} is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {one} afterwards.\n",
    False: "Some special magic {many} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {many} afterwards.\n",
}
QUESTION = {
    True: "What is the special magic {one} for {query} mentioned in the provided text?",
    False: "What are all the special magic {many} for {query} mentioned in the provided text?",
}
PREFIX = {
    True: " The special magic {one} for {query} mentioned in the provided text is",
    False: " The special magic {many} for {query} mentioned in the provided text are",
}


@dataclass
class Turn:
    """A question on the context and its answers, which may be given in any order."""

    task: str
    question: str
    prefix: str
    answers: list[str]

    def length(self, codec: Codec) -> int:
        answer = sum(len(codec(" " + value)) + 1 for value in self.answers)
        return 2 + len(codec(self.question)) + len(codec(self.prefix)) + answer

    def write(self, sample: Sample, codec: Codec, rng: Generator, recipe: Recipe) -> None:
        sample.given(codec("\n" if rng.random() < 0.7 else "\n\n"))
        sample.given(codec(self.question))
        sample.given(codec(self.prefix))
        write_answers(sample, codec, self.answers, rng, recipe)


def write_answers(sample: Sample, codec: Codec, answers: Sequence[str], rng: Generator, recipe: Recipe) -> None:
    """The answers in random order with commas; in the place of each, any that is left is right."""
    left = [codec(" " + answers[i]) for i in rng.permutation(len(answers))]
    rest = min(recipe.rest, recipe.whole / len(left[0]))
    for place, ids in enumerate(left):
        others = sorted({other[0] for other in left[place + 1 :]} - {ids[0]})
        sample.answer(ids, rest=rest, also=others)
        sample.answer(codec("." if place == len(left) - 1 else ","), first=0.3)
    sample.end(codec.tokenizer.eos_token_id)


@dataclass(frozen=True)
class Recipe:
    """What needle samples are made of: how often which haystack, key, value and question; probabilities."""

    noise: float = 0.25
    needles: float = 0.35  # a haystack of needles; the rest is prose
    uuid_values: float = 0.1
    uuid_keys: float = 0.2  # of the samples with UUID values
    several: float = 0.4  # questions with more than one answer
    long_form: float = 0.6  # question and prefix, not the prefix alone
    opening: float = 1.0  # how often the task is announced before the context
    turns: float = 0.3  # share of the length that questions may take
    most_turns: int = 24
    most_needles: int = 40  # that may be asked for
    rest: float = 0.5  # weight of a value's tokens after its first
    whole: float = 3.0  # and of all of these together, at most: UUIDs have twenty


def phrase(rng: Generator, recipe: Recipe, keys: Sequence[str], answers: list[str], kind: str) -> Turn:
    """A question about these keys, in RULER's wording."""
    single = len(answers) == 1
    query = keys[0] if len(keys) == 1 else ", ".join(keys[:-1]) + ", and " + keys[-1]
    named = {"one": kind[:-1], "many": kind, "query": query}
    question = QUESTION[single].format(**named) if rng.random() < recipe.long_form else ""
    task = "single" if single else "multiquery" if len(keys) > 1 else "multivalue"
    return Turn(kind[0] + "_" + task, question, PREFIX[single].format(**named), answers)


def needle_sample(rng: Generator, codec: Codec, length: int, recipe: Recipe) -> Sample:
    """Needles in a haystack and several questions on them, `length` tokens or a little less."""
    kind = "uuids" if length >= 256 and rng.random() < recipe.uuid_values else "numbers"
    make_value = random_uuid if kind == "uuids" else number
    make_key = random_uuid if kind == "uuids" and rng.random() < recipe.uuid_keys else word_key
    draw = rng.random()
    hay = "noise" if draw < recipe.noise else "needles" if draw < recipe.noise + recipe.needles else "prose"
    announced = rng.random() < recipe.opening
    budget = length - 2 - announced * len(codec(OPENING[False].format(many=kind), keep=True))
    table = _table(rng, recipe, make_key, make_value, budget, kind)
    turns = _turns(rng, codec, recipe, table, kind, int(budget * recipe.turns))
    budget -= sum(turn.length(codec) for turn in turns)
    asked = {answer for turn in turns for answer in turn.answers}
    lines = [(key, value) for key, values in table.items() for value in values]
    lines.sort(key=lambda line: line[1] not in asked)  # what is asked for comes first: it must fit
    context = _haystack(rng, codec, lines, hay, kind, budget, (make_key, make_value), len(asked))
    sample = Sample(task=turns[0].task)
    single = len(turns[0].answers) == 1
    sample.given([codec.tokenizer.bos_token_id])
    if announced:
        sample.given(codec(OPENING[single].format(one=kind[:-1], many=kind), keep=True))
    sample.given(context)
    for turn in turns:
        turn.write(sample, codec, rng, recipe)
    return sample


def _table(
    rng: Generator,
    recipe: Recipe,
    make_key: Callable[[Generator], str],
    make_value: Callable[[Generator], str],
    budget: int,
    kind: str,
) -> dict[str, list[str]]:
    """Keys with their values: few in prose as RULER has it, or many, so that many questions can be asked."""
    cost = 52 if kind == "uuids" else 20
    most = max(1, int(budget * 0.55) // cost)
    total = (
        int(rng.integers(1, min(most, recipe.most_needles) + 1))
        if rng.random() < 0.8
        else int(rng.integers(1, min(most, 4) + 1))
    )
    table: dict[str, list[str]] = {}
    while total > 0:
        several = rng.random() < recipe.several * 0.4
        count = min(total, (int(rng.integers(2, 4)) if rng.random() < 0.4 else 4) if several else 1)
        table[make_key(rng)] = [make_value(rng) for _ in range(count)]
        total -= count
    return table


def _turns(
    rng: Generator, codec: Codec, recipe: Recipe, table: dict[str, list[str]], kind: str, budget: int
) -> list[Turn]:
    """Questions until the keys or the room run out; every key is asked for once at most, but for the first lists."""
    keys = [list(table)[i] for i in rng.permutation(len(table))]
    turns: list[Turn] = []
    while keys and len(turns) < recipe.most_turns:
        group = [keys.pop()]
        if len(table[group[0]]) == 1 and rng.random() < recipe.several * 0.6:
            want = int(rng.integers(2, 4)) if rng.random() < 0.4 else 4
            spare = [key for key in keys if len(table[key]) == 1][: want - 1]
            group += spare
            keys = [key for key in keys if key not in spare]
        turn = phrase(rng, recipe, group, [value for key in group for value in table[key]], kind)
        budget -= turn.length(codec)
        if budget < 0 and turns:
            break
        turns.append(turn)
    return turns


def _haystack(
    rng: Generator,
    codec: Codec,
    lines: Sequence[tuple[str, str]],
    hay: str,
    kind: str,
    budget: int,
    makers: tuple[Callable[[Generator], str], Callable[[Generator], str]],
    needed: int,
) -> list[int]:
    """Needles at random places of the haystack, within the budget of tokens; the first `needed` needles always."""
    joint = " " if hay == "prose" else "\n"
    items: list[tuple[int, ...]] = []
    for place, (key, value) in enumerate(lines):
        ids = codec(joint + NEEDLE.format(kind=kind, key=key, value=value))
        if len(ids) > budget and place >= needed:
            break
        items.append(ids)
        budget -= len(ids)
    filler: list[tuple[int, ...]] = []
    while True:
        if hay == "needles":
            key, value = makers[0](rng), makers[1](rng)
            ids = codec(joint + NEEDLE.format(kind=kind, key=key, value=value))
        else:
            ids = codec(joint + sentence(rng, hay), keep=True)
        if len(ids) > budget:
            break
        filler.append(ids)
        budget -= len(ids)
    return _shuffled(rng, items, filler)


def _shuffled(rng: Generator, items: list[tuple[int, ...]], filler: list[tuple[int, ...]]) -> list[int]:
    """Items at random places among the filler, both in random order."""
    places = set(rng.permutation(len(items) + len(filler))[: len(items)].tolist())
    order = iter([items[i] for i in rng.permutation(len(items))])
    others = iter(filler)
    out: list[int] = []
    for place in range(len(items) + len(filler)):
        out += next(order) if place in places else next(others)
    return out
