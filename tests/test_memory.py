"""Memory of the cache's own: as torch's, but given back, and what prompts left in the heap too."""

from __future__ import annotations

import copy
import ctypes
import errno
import gc
import mmap
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvengine import memory
from kvengine.offload.placement import TensorStore
from kvengine.session import Session

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


def broken(*_: object, **__: object) -> memory.Block:
    raise OSError(errno.ENOMEM, "no more mappings")


def test_without_mappings_the_heap_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "Block", broken)
    x = memory.empty((1 << 20,), torch.int32, CPU).fill_(3)
    assert x.sum() == 3 << 20 and x.dtype == torch.int32  # 4 MB


@LINUX
@pytest.mark.parametrize(("device", "system", "own"), [("cpu", "linux", 1), ("cpu", "win32", 0), ("meta", "linux", 0)])
def test_only_a_cpu_with_linux_maps_memory(device: str, system: str, own: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a huge page's bytes on, and asks for huge ones where whole ones of them fit."""
    blocks, asked = list[int](), list[tuple[int, ...]]()

    class Noted(memory.Block):
        def __new__(cls, *given: int, **more: int) -> Noted:
            assert more == {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}  # no child of fork writes into the parent's
            blocks.append(given[1])
            return super().__new__(cls, *given, **more)

        def madvise(self, *given: int) -> None:
            asked.append(given)
            raise OSError  # a kernel without

    monkeypatch.setattr(memory, "Block", Noted)
    monkeypatch.setattr(sys, "platform", system)
    for size in (memory.HUGE - 1, memory.HUGE, 2 * memory.HUGE + 5):
        x = memory.empty((size,), torch.uint8, torch.device(device))
        assert x.device.type == device and len(x) == size
    assert blocks == [2 * memory.HUGE, 3 * memory.HUGE + 5] * own
    assert [(what, size) for what, _, size in asked] == [(mmap.MADV_HUGEPAGE, n * memory.HUGE) for n in (1, 2)] * own
    assert not own or x.data_ptr() % memory.HUGE == 0


@pytest.mark.parametrize("lacks", [None, OSError, TypeError, AttributeError])
def test_the_heap_is_trimmed_where_the_library_can(
    lacks: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system says where it cannot."""
    calls: list[int] = []

    def library(name: None) -> SimpleNamespace:
        if lacks in (OSError, TypeError):
            raise lacks
        return SimpleNamespace() if lacks else SimpleNamespace(malloc_trim=calls.append)

    monkeypatch.setattr(memory, "_malloc_trim", memory._malloc_trim.__wrapped__)
    monkeypatch.setattr(ctypes, "CDLL", library)
    memory.trim()
    assert calls == ([] if lacks else [0])


def test_the_heap_is_trimmed_once_for_so_many_bytes_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of keys and of values, in the host's memory."""
    counts, trims, session = list[int](), list[int](), Session()
    monkeypatch.setattr(memory, "trim", lambda: trims.append(0))
    monkeypatch.setattr(memory, "LOOSE", 100)
    for device in ("meta", "cpu", "cpu", "cpu", "cpu"):
        session.passed(torch.empty(30, dtype=torch.int8, device=device), torch.empty(20, dtype=torch.int8))
        counts.append(len(trims))
    assert counts == [0, 0, 1, 1, 2]


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
    model(torch.randint(0, 64, (1, 64)), cache=kvengine.EngineCache(model))
    before = held()
    model(torch.randint(0, 64, (1, 4096)), cache=cache, logits_to_keep=1)
    model(torch.randint(0, 64, (1, 1)), cache=cache)
print(held() - before, held("VmHWM") - before)
"""


@LINUX
@pytest.mark.slow
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


class Runtime:
    """What torch hands through of CUDA's runtime."""

    def __init__(self, able: bool = True) -> None:
        self.able, self.known = able, dict[int, int]()
        self.waited, self.told = list[torch.device](), list[torch.device]()

    def cudaHostRegister(self, start: int, size: int, flags: int) -> int:
        assert flags == 3  # portable and mapped: kernels read it
        if self.able:
            self.known[start] = size
        return 0 if self.able else 2

    def zeros(self, *sides: int, device: torch.device | None = None) -> torch.Tensor:
        if device is not None:
            self.told.append(device)
            raise RuntimeError("CUDA error: what the last call said")
        return torch.ones(sides) * 0

    def cudaHostUnregister(self, start: int) -> int:
        assert self.waited  # something may have been on its way
        return 0 if self.known.pop(start) else 1


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    made, empty = Runtime(), torch.empty
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", made.waited.append)
    monkeypatch.setattr(torch, "empty", lambda *a, pin_memory=False, **b: empty(*a, **b).requires_grad_(pin_memory))
    monkeypatch.setattr(torch, "zeros", made.zeros)
    return made


GPU = torch.device("cuda", 1)


@LINUX
def test_a_large_pinned_block_has_its_own_size_and_goes_when_its_last_view_goes(runtime: Runtime) -> None:
    """torch's own would have twice the bytes, and stay."""
    size = (1 << 24) + 4096
    x = memory.empty((size // 4,), torch.float32, CPU, GPU).fill_(1)
    assert runtime.known == {x.data_ptr(): size}
    view = x[5:9]
    del x
    gc.collect()
    assert runtime.known and not runtime.waited
    del view
    gc.collect()
    assert not runtime.known and runtime.waited == [GPU]


@LINUX
def test_where_cuda_cannot_pin_it_torch_is_asked(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime.able = False
    x = memory.empty((1 << 22,), torch.float64, CPU, GPU)
    assert x.requires_grad and x.dtype == torch.float64  # as the fixture marks what torch pins
    assert runtime.told == [GPU]  # who asks for the last failure hears of it, and no later kernel
    runtime.able = True
    with monkeypatch.context() as without:
        without.setattr(memory, "Block", broken)
        assert memory.empty((1 << 22,), torch.float64, CPU, GPU).requires_grad and not runtime.known
    assert memory.empty((1 << 10,), torch.float32, CPU, GPU).requires_grad and not runtime.known  # a small one


@LINUX
def test_a_copied_store_is_pinned_too(runtime: Runtime) -> None:
    store = TensorStore(torch.zeros(2, 1 << 19), torch.device("cpu"))
    store.reader = GPU
    store.reserve(2)
    store.data.fill_(7)
    twin = copy.deepcopy(store)
    assert set(runtime.known) == {store.data.data_ptr(), twin.data.data_ptr()} and torch.equal(store.data, twin.data)
    store.data[0] = 1
    assert twin.data[0, 0] == 7


@pytest.mark.gpu
def test_a_gpu_reads_the_block_over_the_bus() -> None:
    """As large as it is, pinned, read by copies and by the kernel, and given back."""
    from kvengine.kernels import fetch_pages

    device, before = torch.device("cuda", torch.cuda.current_device()), torch.cuda.host_memory_stats()
    for _ in range(3):  # the system gives the same addresses again
        x = memory.empty((3, 1 << 20), torch.float32, CPU, device)
        x.copy_(torch.randn(3, 1 << 20))
        assert x.is_pinned() and torch.equal(x.to(device, non_blocking=True).cpu(), x)
        at = torch.tensor([2, 0], device=device)
        found = fetch_pages.start({"x": x}, at, device, backend="triton").wait()["x"]
        assert torch.equal(found.cpu(), x[[2, 0]])
        del x
        gc.collect()
    assert torch.cuda.host_memory_stats().get("segment.current") == before.get("segment.current")
