"""Policies side by side on a text and questions of your own.

    python examples/compare_policies.py [FILE.json [MODEL]]

FILE.json: {"text": "…", "questions": [{"question": "…", "answer": "…"}]}; an answer counts as right if it occurs in what
was generated. The questions are asked after the text was compressed, each on its own copy of the cache: the fair and
hard way. Without a file, a text with hidden numbers is made up.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import kvengine
from kvengine.evals.loading import load

POLICIES = [
    "full",
    "streaming(recent=0.25)",
    "snapkv(budget=0.25)",
    "keydiff(budget=0.25)",
    "quest(budget=0.25)",
    "kivi",
]


def made_up() -> dict[str, Any]:
    facts = {"quiet-river": "4817263", "brave-table": "9051842", "early-doctor": "2739605", "happy-garden": "6382917"}
    grass = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again." * 5
    text = grass + "".join(
        f" One of the special magic numbers for {key} is: {fact}.{grass}" for key, fact in facts.items()
    )
    ask = "\nWhat is the special magic number for {0} mentioned in the provided text?"
    ask += " The special magic number for {0} mentioned in the provided text is"
    return {"text": text, "questions": [{"question": ask.format(key), "answer": fact} for key, fact in facts.items()]}


def measure(model: Any, tokenizer: Any, policy: str, task: dict[str, Any]) -> tuple[int, int, int]:
    """Right answers, bytes held, and bytes read per token under a policy."""
    right = 0
    with kvengine.patched(model, policy), torch.inference_mode():
        ids = tokenizer(task["text"], return_tensors="pt").input_ids
        cache = kvengine.EngineCache(model)
        model(ids, cache=cache, logits_to_keep=1)
        cache.follow_up()
        for question in task["questions"]:
            asked = tokenizer(question["question"], return_tensors="pt", add_special_tokens=False).input_ids
            mine = copy.deepcopy(cache)
            whole = torch.cat([ids, asked], 1)
            out = model.generate(whole, cache=mine, max_new_tokens=16, do_sample=False)
            right += question["answer"] in tokenizer.decode(out[0, whole.shape[1] :])
        stats = mine.stats()
    return right, stats.bytes_held, stats.read_per_token


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given.add_argument("file", nargs="?", type=Path)
    given.add_argument("model", nargs="?", default="bundled", help="folder, hub id, or 'bundled'")
    args = given.parse_args()
    try:
        task = json.loads(args.file.read_text(encoding="utf-8-sig")) if args.file else made_up()
        asked = [one[part] for one in task["questions"] for part in ("question", "answer")]
        if not all([task["text"], asked, *asked]):  # an empty answer would occur in whatever is generated
            raise ValueError("there is no text or no question, or a question or an answer is empty")
        if not all(isinstance(x, str) for x in (task["text"], *asked)):
            raise ValueError("text, questions and answers are strings")
        "".join([task["text"], *asked]).encode()  # half of a surrogate pair is no text
    except (OSError, ValueError, KeyError, TypeError) as error:
        given.error(f"{args.file} is not such a file ({type(error).__name__}: {error})")
    try:
        model, tokenizer = load(args.model, device="cpu")
        found = {policy: measure(model, tokenizer, policy, task) for policy in POLICIES}
    except (OSError, ValueError) as error:  # no such model, or none that can be patched
        given.error(str(error))
    full, count = found["full"], len(task["questions"])
    table = Table("policy", "right", "bytes held", "bytes read per token")
    for policy, (right, held, read) in found.items():
        table.add_row(
            policy, f"{right} of {count}", *(f"{100 * x / f:.0f} %" for x, f in ((held, full[1]), (read, full[2])))
        )
    Console(width=80).print(table)
    if not full[0]:
        print("The full cache answers none of the questions, so this tells nothing about policies.")
        return
    good = {policy: read for policy, (right, _, read) in found.items() if right >= full[0]}
    best = min(good, key=lambda policy: good[policy])
    print(
        f"Of those that answer as well as the full cache, {best} reads least: {100 * good[best] / full[2]:.0f} % of its bytes."
    )


if __name__ == "__main__":
    main()
