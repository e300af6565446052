"""SCBench's mixed tasks: two kinds of question about one context, scored apart."""

from __future__ import annotations

import json
from random import Random

from kvengine.evals.tasks._scbench import Row, SessionTask, both
from kvengine.evals.tasks._scores import contains, contains_whole, first_integer, fraction_found, rouge_lsum, set_found
from kvengine.evals.tasks.scbench_retrieval import chains, pairs
from kvengine.evals.tasks.scbench_semantic import Repository, right_function, same_function

KINDS = ("scbench_kv", "scbench_vt")


def pairs_and_chains(source: Random, size: int) -> Row:
    """Key-value pairs strewn among the lines of variable tracking; eight turns, the two kinds by turns."""
    keys, tracked = pairs(source, max(size // 3, 4)), chains(source, size)
    values = json.loads(keys["context"].partition("\n")[2])
    lines = tracked["input"].split("\n")
    places = sorted(source.choices(range(3, len(lines)), k=len(values)), reverse=True)
    for place, (key, value) in zip(places, values.items(), strict=True):
        lines.insert(place, json.dumps({key: value}))
    turns = [
        {**turn, "task": kind}
        for both in zip(keys["multi_turns"][:4], tracked["multi_turns"][:4], strict=True)
        for kind, turn in zip(KINDS, both, strict=True)
    ]
    return {"context": "\n".join(lines), "multi_turns": turns}


TASKS = (
    SessionTask(
        "scbench_summary_with_needles",
        {"scbench_summary": 800, "scbench_passkey": 15},
        {
            "scbench_summary": both(rouge_lsum, rouge_lsum),
            "scbench_passkey": both(first_integer, contains_whole),
        },
    ),
    Repository(
        "scbench_repoqa_and_kv",
        {"scbench_repoqa": 1024, "scbench_kv": 80},
        {"scbench_repoqa": both(right_function, same_function), "scbench_kv": both(contains, contains_whole)},
    ),
    SessionTask(
        "scbench_mixed",
        {"scbench_kv": 80, "scbench_vt": 30},
        {"scbench_kv": both(contains, contains_whole), "scbench_vt": both(fraction_found, set_found)},
        generate=pairs_and_chains,
        own=True,
    ),
)
