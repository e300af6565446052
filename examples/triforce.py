"""Speculative decoding where the model drafts for itself behind a cheap cache, and a look-up drafts for that.

    python examples/triforce.py [MODEL [TEXT_FILE]]          by default the bundled model on this file

Prints the text of plain and of speculative decoding, which are the same, and what the latter did.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import kvengine
from kvengine.evals.loading import load
from kvengine.speculative.triforce import TriForce

given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
given.add_argument("model", nargs="?", default="bundled", help="folder, hub id, or 'bundled'")
given.add_argument("file", nargs="?", type=Path, default=__file__, help="a text; by default this script")
name, file = vars(given.parse_args()).values()
try:
    text = Path(file).read_text(encoding="utf-8")
except (OSError, ValueError) as error:
    given.error(f"{file} is no text: {error}")
try:
    model, tokenizer = load(name, device="cpu")
except ValueError as error:  # no such model
    given.error(str(error))

kvengine.patch(model)
ids = tokenizer(text, return_tensors="pt").input_ids

begin = time.perf_counter()
plain = model.generate(ids, max_new_tokens=64, do_sample=False)
print(f"plain: {time.perf_counter() - begin:.2f} s with the prompt")

# An eighth of the context is what the model reads when it drafts for itself.
decoder = TriForce(model, draft="lookup", middle="retrieval(budget=0.125)", gamma=(2, 6))
fast = decoder.generate(ids, max_new_tokens=64, do_sample=False)
print(decoder.report)
print("the same text" if plain.tolist() == fast.tolist() else "another text: a near tie fell the other way")

# Sampling keeps the model's law. With coupled=True a seed gives the same text whatever drafts it.
one = decoder.generate(ids, max_new_tokens=64, temperature=0.8, seed=1, coupled=True)
two = TriForce(model, middle=None).generate(ids, max_new_tokens=64, temperature=0.8, seed=1, coupled=True)
print("coupled sampling: the same text" if one.tolist() == two.tolist() else "coupled sampling: another text")
