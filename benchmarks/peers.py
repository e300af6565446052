"""What `benchmarks/kernels.py` adds on a CUDA device: other decode kernels, and timing by CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from kvengine.kernels.fetch_kept import empty, fetch_kept
from kvengine.kernels.fetch_pages import fetch_pages

Case = tuple[int, Callable[[], object]]
PINNED = 1 << 30
"""Bytes of host memory that are fetched from, at most."""
AHEAD = 500_000
"""Cycles, some 0.3 ms, that the host has to queue what is timed."""


def peers(x: dict[str, Tensor], batch: int, heads: int, page: int) -> dict[str, Case]:
    """flash-attn and FlashInfer, where installed (CUDA), and what is fetched from the host. One that is missing or does not
    work is named, and the others go on."""
    found: dict[str, Case] = {}
    dense = 2 * x["k"].numel() * x["k"].element_size()
    for name, make in (("flash-attn", flash), ("flashinfer", flashinfer)):
        try:
            found[name] = dense, make(x, batch, heads, page)
            found[name][1]()  # what is compiled when first called fails here
        except Exception as error:
            found.pop(name, None)
            print(f"left out {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    try:
        found |= fetches(x)
    except Exception as error:
        print(f"FAILED 2048 values from the host: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def flash(x: dict[str, Tensor], batch: int, heads: int, page: int) -> Callable[[], object]:
    """flash-attn over contiguous tokens."""
    from flash_attn import flash_attn_with_kvcache

    q, k, v = (x[name] for name in "qkv")
    by_token = [t.view(batch, heads, *t.shape[1:]).transpose(1, 2).contiguous() for t in (k, v)]
    return partial(flash_attn_with_kvcache, q.reshape(batch, 1, -1, q.shape[-1]), *by_token)


def flashinfer(x: dict[str, Tensor], batch: int, heads: int, page: int) -> Callable[[], object]:
    """FlashInfer over pages. Planning is outside the timed part."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper as Wrapper

    q, k, v = (x[name] for name in "qkv")
    _, length, dim = k.shape
    wrapper = Wrapper(torch.zeros(128 << 20, dtype=torch.uint8, device=k.device), "HND", use_tensor_cores=True)
    count = length // page
    starts = torch.arange(0, batch * count + 1, count, dtype=torch.int32, device=k.device)
    ids = torch.arange(batch * count, dtype=torch.int32, device=k.device)
    last = torch.full((batch,), page, dtype=torch.int32, device=k.device)
    wrapper.plan(starts, ids, last, q.shape[1] * heads, heads, dim, page, q_data_type=q.dtype, kv_data_type=k.dtype)
    paged = tuple(
        t.view(batch, heads, count, page, dim).transpose(1, 2).reshape(-1, heads, page, dim).contiguous()
        for t in (k, v)
    )
    return partial(wrapper.run, q.reshape(batch, -1, dim), paged)


def fetches(x: dict[str, Tensor]) -> dict[str, Case]:
    """2048 tokens of each row from pinned host memory, in units of 8; their bytes cross the bus, or half of them, where the
    device has the others from the last time."""
    rows, length, dim = x["v"].shape
    units, device = rows * length // 8, x["v"].device
    units = min(units, PINNED // (8 * dim * x["v"].element_size()))  # pinning takes time, and is never undone
    host = torch.empty(units, 8, dim, dtype=x["v"].dtype, pin_memory=device.type == "cuda")
    host.copy_(x["v"].view(-1, 8, dim)[:units])
    at = torch.randint(units, (rows * min(2048, length) // 8,), device=device)
    size = len(at) * 8 * dim * host.element_size()
    kept = empty({"v": x["v"].view(-1, 8, dim)[:0]}, rows, len(at) // rows // 2)
    return {
        "2048 values from the host": (size, partial(fetch_pages, {"v": host}, at, device)),
        "2048 values from the host, half there": (size // 2, partial(fetch_kept, kept, {"v": host}, at, device)),
    }


def capture(found: dict[str, Case]) -> None:
    """Put graphs in the place of all calls; a case that fails is named and left out."""
    for name, (size, call) in list(found.items()):
        try:
            found[name] = size, captured(call)
        except Exception as error:  # one that takes too much memory included: what the others need is there
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)
            del found[name]
            torch.cuda.empty_cache()


def between_events(call: Callable[[], object], ahead: int = AHEAD) -> float:
    """Milliseconds that the device takes for a call. It is kept busy for so many cycles, until the host has queued all of it:
    the few microseconds that a launch takes to arrive would else count, and many cases take no longer themselves."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(ahead)
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, which leaves out the host's time; the call itself, which is said, where none can be made."""
    call()  # compile first
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        print(f"not captured, so the host's time counts: {str(error)[:300]}", flush=True)
        return call
    return Replay(graph, call)


class Replay:
    """A graph and the call it was made of, whose tensors it reads: were they given back, so would be their memory."""

    def __init__(self, graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> None:
        self.graph, self.call = graph, call

    def __call__(self) -> None:
        self.graph.replay()
