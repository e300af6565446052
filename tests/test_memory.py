"""Memory of the cache's own: as torch's, but given back, and what prompts left in the heap too."""

from __future__ import annotations

import errno
import gc
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvengine import memory

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere torch's own memory is taken")
CPU = torch.device("cpu")


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.int64])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 5), (7, 11), (3, 65537), (2, 1 << 21), (5, 1000003)])
def test_a_tensor_as_torch_makes_it(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = memory.empty(shape, dtype, CPU)
    like = torch.empty(shape, dtype=dtype)
    assert (x.shape, x.dtype, x.stride(), x.device) == (like.shape, like.dtype, like.stride(), like.device)
    assert x.untyped_storage().nbytes() == like.untyped_storage().nbytes()  # what statistics count
    x.fill_(1)
    assert bool((x == 1).all())


@LINUX
def test_a_large_block_is_the_systems_again_when_its_last_view_goes() -> None:
    size = 1 << 26
    before = resident()
    x = memory.empty((size,), torch.uint8, CPU).fill_(7)
    view = x[5:9]
    assert resident() - before > 0.9 * size
    del x
    gc.collect()
    assert view.tolist() == [7] * 4  # still there
    del view
    gc.collect()
    assert resident() - before < 0.1 * size


@LINUX
def test_large_blocks_begin_where_huge_pages_do_and_small_ones_share_the_heap() -> None:
    assert memory.empty((memory.HUGE + 5,), torch.uint8, CPU).data_ptr() % memory.HUGE == 0
    small = [memory.empty((memory.HUGE // 64,), torch.uint8, CPU) for _ in range(8)]
    assert any(x.data_ptr() % mmap.PAGESIZE for x in small)


def test_without_mappings_the_heap_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object, **__: object) -> mmap.mmap:
        raise OSError(errno.ENOMEM, "no more mappings")

    monkeypatch.setattr(mmap, "mmap", none)
    assert memory.empty((1 << 20,), torch.int32, CPU).fill_(3).sum() == 3 << 20  # 4 MB


def test_more_than_there_is_fails_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match=r"can't allocate memory|not enough memory|alloc"):
        memory.empty((1 << 60,), torch.uint8, CPU)


PROMPT = """
import sys
from pathlib import Path
import torch, transformers
import kvengine

torch.set_num_threads(1)
config = transformers.LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=32, num_attention_heads=8,
    num_key_value_heads=8, head_dim=32, max_position_embeddings=8192,
)
model = transformers.LlamaForCausalLM(config).eval()
kvengine.patch(model, sys.argv[1])
cache = kvengine.EngineCache(model)


def held(name="VmRSS"):  # not ru_maxrss: that begins with what the process had that started this one
    return next(int(x.split()[1]) << 10 for x in Path("/proc/self/status").read_text().splitlines() if name in x)


with torch.inference_mode():
    model(torch.randint(0, 64, (1, 64)), past_key_values=kvengine.EngineCache(model))
    before = held()
    model(torch.randint(0, 64, (1, 4096)), past_key_values=cache, logits_to_keep=1)
    model(torch.randint(0, 64, (1, 1)), past_key_values=cache)
print(held() - before, held("VmHWM") - before)
"""


@LINUX
@pytest.mark.parametrize("policy", ["snapkv(budget=256)", "kivi(bits=2)", "full"])
def test_a_process_is_as_small_as_what_it_holds(policy: str) -> None:
    """32 layers of 4096 tokens bring 268 MB of keys and values; 256 of them are 17 MB, two bits of all about 30."""
    run = subprocess.run([sys.executable, "-P", "-c", PROMPT, policy], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    after, most = (int(x) / 1e6 for x in run.stdout.split())
    room = 100  # a layer's activations, and prompts' keys and values until the heap is trimmed
    held = {"snapkv(budget=256)": 17, "kivi(bits=2)": 30, "full": 268}[policy]
    assert held * 0.9 < after < held + room
    assert most < held + 2 * room
