"""A cache by hand: a conversation of several turns, in which every turn reads only what is new.

    python examples/conversation.py [POLICY [MODEL]]          by default "snapkv(budget=256)"

Shows what the policy holds after each turn, and why `follow_up` matters: what follows the first prompt is not judged as
a prompt of its own, so that the policy's budget is spent once, on the long text.
"""

from __future__ import annotations

import argparse

import torch

import kvengine
from kvengine.evals.loading import load

given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
given.add_argument("policy", nargs="?", default="snapkv(budget=256)")
given.add_argument("model", nargs="?", default="bundled", help="folder, hub id, or 'bundled'")
policy, name = vars(given.parse_args()).values()
try:
    model, tokenizer = load(name, device="cpu")
    kvengine.patch(model, policy)
except (OSError, ValueError) as error:  # no such policy, or no such model
    given.error(str(error))

facts = {"quiet-river": 4817263, "brave-table": 9051842, "early-doctor": 2739605}
grass = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again." * 6
text = grass + "".join(f" One of the special magic numbers for {key} is: {fact}.{grass}" for key, fact in facts.items())


def ask(key: str) -> str:
    question = f"\nWhat is the special magic number for {key} mentioned in the provided text?"
    return f"{question} The special magic number for {key} mentioned in the provided text is"


cache = kvengine.EngineCache(model)
ids = tokenizer(text, return_tensors="pt").input_ids
right = 0
for turn, (key, fact) in enumerate(facts.items(), 1):
    question = tokenizer(ask(key), return_tensors="pt", add_special_tokens=False).input_ids
    ids = torch.cat([ids, question], 1)
    seen, before = cache.seen, ids.shape[1]
    # The whole conversation goes in; what the cache has seen is not read again.
    ids = model.generate(ids, cache=cache, max_new_tokens=8, do_sample=False)
    cache.follow_up()
    answer = tokenizer.decode(ids[0, before:], skip_special_tokens=True)
    right += str(fact) in answer
    held = float(cache.stats().held.float().mean())
    print(
        f"turn {turn}: read {cache.seen - seen:4} new tokens; holds {held:5.0f} of {cache.seen}; {fact} -> {answer!r}"
    )

print(f"{policy}: {right} of {len(facts)} right. The first question was seen by the compression, the others were not.")
