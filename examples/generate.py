"""The one-liner: `generate` under a policy of your choice, and what that saved.

python examples/generate.py [POLICY [MODEL]]

The policy is by default "quest(budget=128, page=4, reduce='each') + kivi(bits=4, residual=32)".
"""

from __future__ import annotations

import argparse

import kvengine
from kvengine.evals.loading import load

given = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
given.add_argument("policy", nargs="?", default="quest(budget=128, page=4, reduce='each') + kivi(bits=4, residual=32)")
given.add_argument("model", nargs="?", default="bundled", help="folder, hub id, or 'bundled'")
policy, name = vars(given.parse_args()).values()
try:
    model, tokenizer = load(name, device="cpu")
    kvengine.patch(model, policy)  # the one line
except (OSError, ValueError) as error:  # no such policy, or no such model
    given.error(str(error))

grass = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
needle = " One of the special magic numbers for quiet-river is: 4817263."
question = "\nWhat is the special magic number for quiet-river mentioned in the provided text?"
begin = " The special magic number for quiet-river mentioned in the provided text is"
prompt = tokenizer(grass * 12 + needle + grass * 12 + question + begin, return_tensors="pt")

cache = kvengine.EngineCache(model)  # only to look into it afterwards; generate makes its own otherwise
text = model.generate(**prompt, max_new_tokens=10, do_sample=False, cache=cache)

new = tokenizer.decode(text[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)
print(f"{prompt.input_ids.shape[1]} tokens of prompt; hidden: 4817263; answer:{new}")
print(f"{policy}: {cache.stats()}")

kvengine.unpatch(model)  # and back
stock = model.generate(**prompt, max_new_tokens=10, do_sample=False)
print(f"the unpatched model: {tokenizer.decode(stock[0, prompt.input_ids.shape[1] :], skip_special_tokens=True)}")
