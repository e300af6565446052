"""A model whose heads are shared among processes (`tp_plan="auto"`): each holds its own, and the text is that of one process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support import SMALL, llama

pytestmark = pytest.mark.slow

CODE = """
import json, sys
import torch, transformers
from transformers.distributed import DistributedConfig
import kvengine

torch.set_num_threads(1)
folder, texts = sys.argv[1], json.loads(sys.argv[2])
plan = DistributedConfig(tp_plan="auto")
shared = transformers.LlamaForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=torch.float32)
whole = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
ids = torch.randint(1, 128, (2, 61), generator=torch.Generator().manual_seed(1))
mask = torch.ones_like(ids)
mask[0, :9] = 0
options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False)
for text in texts:
    cache = []
    for model in (whole, shared):
        with kvengine.patched(model, text):
            cache.append(kvengine.EngineCache(model))
            out = model.generate(ids, cache=cache[-1], **options)
            said = (out, said[0]) if model is shared else (out,)
    whole_bytes, own_bytes = (one.stats().bytes_held for one in cache)
    with open(f"{folder}/said{torch.distributed.get_rank()}", "a") as file:
        print(torch.equal(*said), own_bytes < 0.6 * whole_bytes, text, file=file)
torch.distributed.destroy_process_group()
"""
ALONE = ("full", "snapkv", "h2o", "kivi", "quest", "streaming", "d2o", "zipcache", "host")
"""Methods whose heads decide alone; where they decide together (tova, adakv, lowrank), those of a process do."""


def test_every_process_holds_its_heads_and_says_the_same(tmp_path: Path) -> None:
    llama(num_key_value_heads=2, num_attention_heads=4).save_pretrained(tmp_path / "model")
    texts = [SMALL[name] for name in ALONE]
    (tmp_path / "run.py").write_text(CODE)
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", str(tmp_path / "run.py")]
    done = subprocess.run(
        [*command, str(tmp_path / "model"), json.dumps(texts)], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(2):
        said = (tmp_path / "model" / f"said{rank}").read_text().splitlines()
        assert len(said) == len(texts) and not [line for line in said if not line.startswith("True True")]
