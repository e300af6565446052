"""Pages from host memory."""

from __future__ import annotations

import pytest
import support_kernels as oracle
import torch

from kvengine.errors import KernelError
from kvengine.kernels import dispatch
from kvengine.kernels.fetch_pages import fetch_pages, start

BACKENDS = [name for name in oracle.backends() if name != "native"]
SHAPES = {
    "fp32": (torch.float32, (4, 8)),
    "bf16": (torch.bfloat16, (16, 128)),
    "odd": (torch.uint8, (3, 7)),
    "one": (torch.float16, ()),
}


def device(backend: str) -> torch.device:
    return torch.device("cuda" if backend == "triton" and dispatch.info()["triton"] == "available" else "cpu")


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_matches_a_loop(backend: str, kind: str) -> None:
    (dtype, shape), to = SHAPES[kind], device(backend)
    field = torch.randint(0, 200, (9, *shape), generator=torch.Generator().manual_seed(0)).to(dtype)
    field = field.pin_memory() if to.type == "cuda" else field
    for ids in ([3, 0, 8, 3], [5], []):
        at = torch.tensor(ids, dtype=torch.int64, device=to)
        pending = start(
            {"a": field, "b": field.flip(0).contiguous() if to.type == "cpu" else field}, at, to, backend=backend
        )
        got = pending.wait()
        assert got["a"].device.type == to.type and got["a"].shape == (len(ids), *shape)
        for i, page in enumerate(ids):
            assert torch.equal(got["a"][i].cpu(), field[page])
        assert to.type == "cuda" or all(torch.equal(got["b"][i], field[8 - page]) for i, page in enumerate(ids))
        before = got["a"].clone()
        field.add_(1)  # what was fetched is a copy
        assert torch.equal(got["a"], before)


@pytest.mark.skipif("triton" not in BACKENDS, reason="Triton does not run here")
def test_triton_reads_nothing_outside_of_the_field() -> None:
    to = device("triton")
    pool, at = oracle.far("triton", {"a": torch.ones(4, 3, 5)}, torch.tensor([3, -1, 4, 0, 1 << 40], device=to))
    field = pool["a"].pin_memory() if to.type == "cuda" else pool["a"]
    got = start({"a": field}, at, to, backend="triton").wait()["a"]
    assert got[:, 0, 0].tolist() == [1, 0, 0, 1, 0] and torch.equal(got, got[:, :1, :1].expand(-1, 3, 5))


def test_refusals_say_why() -> None:
    field, at = torch.zeros(4, 6), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(KernelError, match="contiguous in host memory"):
        start({"k": field.T}, at, torch.device("cpu"))
    with pytest.raises(KernelError, match="backend"):
        fetch_pages({"k": field}, at, torch.device("cpu"), backend="tritn")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_stream_of_its_own() -> None:
    here, field = torch.device("cuda"), torch.randn(256, 16, 128).pin_memory()
    stream, x = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    at = torch.randperm(256, device=here)[:64]
    pending = start({"k": field}, at, here, stream=stream)
    for _ in range(8):  # work that does not need the pages
        x = (x @ x).tanh()
    got = pending.wait()["k"] + 0
    assert torch.equal(got.cpu(), field[at.cpu()])
    unpinned = start({"k": field.clone()}, at, here, stream=stream).wait()["k"]
    assert torch.equal(unpinned.cpu(), field[at.cpu()])
