"""SCBench's string retrieval: key-value pairs, strings by prefix and suffix, variables over hops."""

from __future__ import annotations

import json
from random import Random
from string import ascii_letters, digits

from kvengine.evals.tasks._scbench import Row, SessionTask, both
from kvengine.evals.tasks._scores import contains, contains_whole, fraction_found, set_found
from kvengine.evals.tasks._words import NOISE, number, pair, uuid4
from kvengine.evals.tasks.ruler_niah import NEEDLE, among_lines, wording
from kvengine.evals.tasks.ruler_vt import INTRODUCTION, QUESTION, draw_chains, scatter

TURNS = 5


def pairs(source: Random, size: int) -> Row:
    """`size` random UUID pairs on one line of JSON; five of the keys are asked."""
    values = {uuid4(source): uuid4(source) for _ in range(size)}
    asked = source.sample(list(values), min(TURNS, size))
    turns = [{"input": key_question(key), "answer": values[key]} for key in asked]
    return {"context": f"JSON data:\n{json.dumps(values)}", "multi_turns": turns}


def key_question(key: str) -> str:
    """InfiniteBench's words."""
    return f'\nKey: "{key}"\nThe value associated with the specified key is: '


def affixes(source: Random, size: int, length: int = 8) -> Row:
    """Random strings of 65 to 122 characters; the asked ones share their prefix with one other and their suffix too.

    The question's words are re-created: the published ones are in the data only.
    """
    words = [_word(source) for _ in range(max(size, 3 * TURNS))]
    turns = []
    for index in range(TURNS):
        word = words[3 * index]
        words[3 * index + 1] = word[:length] + words[3 * index + 1][length:]
        words[3 * index + 2] = words[3 * index + 2][:-length] + word[-length:]
        ask = (
            f"Prefix: {word[:length]}; Suffix: {word[-length:]}. The word with both prefix and suffix from the dict is"
        )
        turns.append({"input": ask, "answer": word})
    source.shuffle(words)
    return {"context": f"Dict: {words}", "multi_turns": turns}


def _word(source: Random) -> str:
    return "".join(source.choices(ascii_letters + digits, k=source.randint(65, 122)))


def chains(source: Random, size: int, hops: int = 2) -> Row:
    """As many chains of two hops as turns, among noise; each turn asks for another chain's variables.

    The long text stands under `input`, as published.
    """
    drawn = draw_chains(source, TURNS, hops)
    text = INTRODUCTION.format(context=scatter(drawn, max(size, hops + 1), source))
    turns = [{"input": QUESTION.format(query=chain.value), "answer": list(chain.variables)} for chain in drawn]
    return {"input": text, "multi_turns": turns}


def needles(source: Random, size: int) -> Row:
    """RULER's multi-key needles among noise, five of them asked one after the other: short keys and values.

    Not one of the published tasks: they ask for UUIDs, which small models cannot copy.
    """
    values = dict(
        zip((pair(source) for _ in range(3 * TURNS)), (number(source) for _ in range(3 * TURNS)), strict=False)
    )
    lines = [NEEDLE.format(kind="numbers", key=key, value=value) for key, value in values.items()]
    introduction, question, prefix = wording("numbers", single=True)
    turns = [
        {"input": question.format(query=key), "answer": values[key], "prefix": prefix.format(query=key)}
        for key in source.sample(list(values), TURNS)
    ]
    hidden = among_lines([NOISE] * max(size, len(lines)), lines, source)
    return {"context": introduction.format(context=hidden).rstrip("\n"), "multi_turns": turns}


TASKS = (
    SessionTask(
        "scbench_kv",
        {"scbench_kv": 150},
        {"scbench_kv": both(contains, contains_whole)},
        "Extract the value corresponding to the specified key in the JSON object below.\n\n",
        generate=pairs,
    ),
    SessionTask(
        "scbench_prefix_suffix",
        {"scbench_prefix_suffix": 150},
        {"scbench_prefix_suffix": both(contains, contains_whole)},
        generate=affixes,
    ),
    SessionTask(
        "scbench_vt",
        {"scbench_vt": 30},
        {"scbench_vt": both(fraction_found, set_found)},
        generate=chains,
    ),
    SessionTask(
        "scbench_needles",
        {"scbench_needles": 32},
        {"scbench_needles": both(contains, contains_whole)},
        generate=needles,
        own=True,
    ),
)
