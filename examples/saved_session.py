"""A session in a file: read a long text once, save the cache, go on later, in another process or on another day.

python examples/saved_session.py [POLICY [MODEL]]          by default "kivi(bits=4)"
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch

import kvengine
from kvengine.evals.loading import load as load_model
from kvengine.saved import extra, load, save

given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
given.add_argument("policy", nargs="?", default="kivi(bits=4)")
given.add_argument("model", nargs="?", default="bundled", help="folder, hub id, or 'bundled'")
policy, name = vars(given.parse_args()).values()
try:
    model, tokenizer = load_model(name, device="cpu")
    kvengine.patch(model, policy)
except (OSError, ValueError) as error:  # no such policy, or no such model
    given.error(str(error))

grass = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
text = grass * 14 + " One of the special magic numbers for quiet-river is: 4817263." + grass * 14
question = "\nWhat is the special magic number for quiet-river mentioned in the provided text?"
question += " The special magic number for quiet-river mentioned in the provided text is"

begin = time.perf_counter()
ids = tokenizer(text, return_tensors="pt").input_ids
cache = kvengine.EngineCache(model)
with torch.no_grad():
    model(ids, cache=cache, logits_to_keep=1)
cache.follow_up()
print(f"read {ids.shape[1]} tokens in {time.perf_counter() - begin:.2f} s; {cache.stats()}")

with tempfile.TemporaryDirectory() as folder:
    file = Path(folder) / "session.kv"
    size = save(cache, file, model, extra={"tokens": ids[0].tolist()})
    print(f"saved {size / 1024:.0f} KiB")

    begin = time.perf_counter()
    restored, seen = load(model, file), torch.tensor([extra(file)["tokens"]])
    print(f"loaded in {time.perf_counter() - begin:.3f} s")

asked = torch.cat([seen, tokenizer(question, return_tensors="pt", add_special_tokens=False).input_ids], 1)
answers = [
    model.generate(asked, cache=one, max_new_tokens=8, do_sample=False)[0, asked.shape[1] :].tolist()
    for one in (restored, cache)
]
same = "the same as" if answers[0] == answers[1] else "other than"
print(f"answer: {tokenizer.decode(answers[0])!r}, {same} that of the session that was never saved.")
