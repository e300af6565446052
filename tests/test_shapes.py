"""`make test-shapes` checks what signatures state while all tests run; here, while a few texts are generated, and that every
module can be checked at all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EVERY_MODULE = """
import importlib, pkgutil, sys
from jaxtyping import install_import_hook
with install_import_hook("kvengine", "support_types.checked"):
    import kvengine
    for module in pkgutil.walk_packages(kvengine.__path__, "kvengine."):
        if not module.name.endswith("__main__") and "triton" not in module.name.split("."):
            try:
                importlib.import_module(module.name)
            except ModuleNotFoundError as error:
                if (error.name or "kvengine").startswith("kvengine"):
                    raise
print(sum(name.startswith("kvengine") for name in sys.modules))
"""

A_FEW_TEXTS = """
from jaxtyping import install_import_hook
install_import_hook("kvengine", "support_types.checked")
import torch
from families import configs
from support import SMALL, llama, prompts
import kvengine
from kvengine.speculative.triforce import TriForce

torch.set_num_threads(1)
quantised = SMALL["snapkv"] + " + " + SMALL["kivi"]
some = [SMALL[name] for name in ("full", "streaming", "quest", "h2o", "lowrank", "duo")]
runs = [
    (llama(), [*some, quantised, SMALL["zipcache"] + " + host"], True),
    (llama().bfloat16(), ["full", quantised], False),
    (configs.build("deepseek_v3"), ["full", quantised, SMALL["quest"]], True),
    (configs.build("gemma3n"), ["full", SMALL["quest"]], False),
    (configs.build("gpt_oss"), ["full", SMALL["h2o"]], False),
]
for model, policies, drafts in runs:
    for policy in policies:
        kvengine.patch(model, policy).generate(**prompts(2, 40), max_new_tokens=10, do_sample=False)
        print(type(model).__name__, policy)
    kvengine.unpatch(model)
    if drafts:
        decoder = TriForce(model, "lookup", SMALL["quest"], gamma=(2, 4))
        decoder.generate(**prompts(2, 40), max_new_tokens=8, do_sample=True)
        print(type(model).__name__, "drafts")
"""


def checked(script: str) -> list[str]:
    """What a script prints in a process of its own."""
    here = {"PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-P", "-c", script], capture_output=True, text=True, env=os.environ | here)
    assert done.returncode == 0, done.stdout[-200:] + done.stderr[-3000:]
    return done.stdout.splitlines()


@pytest.mark.slow
def test_every_signature_can_be_checked_at_run_time() -> None:
    assert int(checked(EVERY_MODULE)[-1]) > 150


@pytest.mark.slow
def test_signatures_say_what_they_are_given() -> None:
    assert len(checked(A_FEW_TEXTS)) == 19
