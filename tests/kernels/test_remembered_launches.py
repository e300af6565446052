"""Launches that are made again for the next token (kernels/gpu/launches.py) are those that the general way makes, argument by
argument: on tensors that say they are on a GPU, through Triton's launcher, over a driver that only looks."""

from __future__ import annotations

import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support_driver import needed, said
from torch import Tensor

STACKS = ["quest(budget=96) + kivi(bits=4)", "d2o(budget=24)"]
OTHERS = [
    "full", "streaming(recent=70) + quest(budget=64)",
    "streaming(recent=40)", "h2o(budget=24)", "tova(budget=24)", "elastic(budget=24)", "snapkv(budget=64)",
    "adakv(budget=64)", "zipcache", "zipcache(block=16)", "streaming(recent=70) + zipcache(block=16)", "landmarks(budget=64)",
    "tidal(budget=64)", "turboquant", "duo(sparsity=0.5, sinks=4, recent=32)", "retrieval(budget=64)", "lowrank(rank=8)",
    "lowrank(rank=8) + landmarks(budget=64)", "host + quest(budget=64)", "host(fields=('v',)) + quest(budget=64)",
    "lowrank(rank=8) + landmarks(budget=64) + host", "shadowkv(budget=64, rank=8)", "kivi(residual=256)",
    "duo(sparsity=0.5, sinks=4, recent=32) + quest(budget=64) + kivi(bits=4)",
]  # fmt: skip
GENERAL = {
    "tidal(budget=64)": 2, "host + quest(budget=64)": 3, "host(fields=('v',)) + quest(budget=64)": 2,
    "lowrank(rank=8) + landmarks(budget=64) + host": 2, "shadowkv(budget=64, rank=8)": 4,
}  # fmt: skip
"""How many of a token's launches are always made the general way: those that choose in all of a layer, and that fetch."""
NOTED = {"quest(budget=64)": (2, 4), "landmarks(budget=64)": (2, 8), "kivi(residual=32)": (1, 5), "turboquant": (1, 8)}
"""How often launches are made again for each token, and how often those of 200 are noted anew."""
PRETEND = r"""
from types import SimpleNamespace

own = torch._C.TensorBase.__dict__
torch.Tensor.is_cuda, torch.Tensor.is_cpu = own["is_cpu"], own["is_cuda"]
chip = dict(name="pretended", major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
torch.cuda.get_device_properties = lambda *given: SimpleNamespace(**chip)
torch.cuda.is_available, torch.cuda.current_device = lambda: True, lambda: 0

from kvengine.cache import LayerCache
from kvengine.kernels import fetch_kept, fetch_pages
from kvengine.kernels.fetch_kept import triton as kept_kernels
from kvengine.kernels.fetch_pages.triton import fetch
from kvengine.offload.placement.host import Fetched
from kvengine.kernels.gpu import again, compiling_for, launches
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack
from torch.utils._python_dispatch import TorchDispatchMode

compiling_for.set(90)
torch.set_grad_enabled(False)
seen, kept, places = [], [], {}

def launching(self, source, metadata, make=CudaLauncher.__init__):
    make(self, source, metadata)
    launch, kinds, name = self.launch, list(source.signature.values()), source.fn.__name__

    def run(*given):
        (x, y, z, stream, function, *how), arguments = opened(given)
        numbers = [place(a) if kind[0] == "*" else a for a, kind in zip(arguments, kinds) if kind != "constexpr"]
        seen.append([name, function, x, y, z, stream, *how, numbers])
        launch(*given)

    self.launch = run

def place(x):
    "Where in the cache's tensors or the token's it lies; of other memory, which of what came so far in this step."
    address = x.data_ptr() if torch.is_tensor(x) else x
    for name, (start, end) in places.items():
        if start <= address < end:
            return [name, address - start]
    return others.setdefault(address, len(others))

CudaLauncher.__init__ = launching
Fetched.resident = lambda self, pieces=0: None  # as where the model is on a device and pages are not
fetch_pages.fetch_pages = lambda fields, at, device, **more: {name: fetch(x, at, device) for name, x in fields.items()}
fetch_kept.fetch_kept = lambda *given, remember, backend: kept_kernels.fetch(*given, remember)
torch.empty, torch.empty_like = torch.zeros, torch.zeros_like  # nothing is computed here, but what is there decides

class Keeping(TorchDispatchMode):
    "What was launched on is nothing else in the same step."

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kept.append(func(*args, **(kwargs or {})))
        return kept[-1]

def known(cache, **token):
    found = dict(token)
    for i, part in enumerate(cache.parts):
        lane = part.lane
        found |= {f"{i}.{name}": x for name, x in lane.tail.tensors().items()}
        if lane.pages is not None:
            found |= {f"{i}.pages.{name}": x for name, x in lane.pages.tensors().items()}
            for shelf in lane.pages.pool.shelves:
                found |= {f"{i}.{name}": store.data for name, store in shelf.stores.items()}
    kept.append(found)  # or what replaces a tensor in this step would lie where that was
    spans = {name: x.untyped_storage() for name, x in found.items()}
    return {name: (x.data_ptr(), x.data_ptr() + x.nbytes()) for name, x in spans.items()}

made_again = launches.Launches.again

def lives(text, how):
    rng = torch.Generator().manual_seed(1)
    launches.Launches.again = how
    cache = LayerCache(Stack.parse(text), 2, 8)
    cache.session.rope = Rope(10000.0 ** -(torch.arange(32) / 32))
    prompt = [torch.randn(rows, heads, 150, 64, generator=rng).bfloat16() for heads in (8, 2, 2)]
    cache.forward(*prompt, Call(0.125))
    for lane in [part.lane for part in cache.parts if part.lane.pages is not None and given.get("room")]:
        lane.pages.reserve(given["room"])
        lane.pages.pool.ensure(given["room"] * len(lane.first))
    found, counts, outside = [], [], []
    for _ in range(given["tokens"]):
        q, k, v = torch.randn(rows, 12, 1, 64, generator=rng).bfloat16().split((8, 2, 2), 1)  # of several rows apart
        if rows == 1 or not given.get("apart"):
            q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        seen.clear(), kept.clear(), others.clear(), ours.clear()
        before = cache.seen
        places.clear()
        places.update(known(cache, q=q, k=k, v=v, at=cache.session.position(before, q.device)))
        with Keeping():
            out = cache.forward(q, k, v, Call(0.125))
        found.append(json.loads(json.dumps(seen)))
        outside.append(len(seen) - sum(ours))
        lane = cache.parts[0].lane
        counts.append([list(out.shape), cache.seen, len(lane.tail), lane.tail.clean, lane.whole, lane.lengths[0][0]])
    return found, counts, min(outside)

others, told, ours, rows = {}, {}, [], given.get("rows", 1)
for text in given["stacks"]:
    asked = []
    def again(self, *about):
        before = len(seen)
        asked.append(made_again(self, *about))
        ours.append(len(seen) - before)
        return asked[-1]
    general, counts, _ = lives(text, lambda self, *about: False)
    own, own_counts, outside = lives(text, again)
    wrong = [i for i, (a, b) in enumerate(zip(general, own)) if a != b]
    told[text] = {"wrong": wrong[:3], "first": [[general[i], own[i]] for i in wrong[:1]], "counts": counts == own_counts,
                  "again": sum(asked), "of": len(asked), "launches": len(own[-1]), "outside": outside}
print(json.dumps(told))
"""

pytestmark = needed


@pytest.mark.parametrize(
    ("stacks", "tokens", "least"),
    [(STACKS, 60, 30), pytest.param(STACKS + OTHERS, 90, 40, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_launches_made_again_are_those_of_the_general_way(
    stacks: list[str], tokens: int, least: int, tmp_path: Path
) -> None:
    told = said(PRETEND, {"stacks": stacks, "tokens": tokens}, tmp_path)
    assert set(told) == set(stacks)
    for text, found in told.items():
        assert not found["wrong"] and found["counts"], (text, found)
        assert found["again"] == found["of"] > least, (text, found)
        assert found["outside"] == GENERAL.get(text, 0), (text, found)


@pytest.mark.parametrize(
    "text", ["quest(budget=64)", *(pytest.param(x, marks=pytest.mark.slow) for x in list(NOTED)[1:])]
)
def test_what_is_noted_stays_while_pages_are_sealed(text: str, tmp_path: Path) -> None:
    """But where they fill one more block of a kernel's, or choices sixteen units more."""
    found, (each, most) = said(PRETEND, {"stacks": [text], "tokens": 200, "room": 20}, tmp_path)[text], NOTED[text]
    assert not found["wrong"] and found["counts"], found
    assert found["again"] == found["of"] >= 200 * each - most, found


@pytest.mark.slow
def test_rows_that_lie_apart_are_put_together_for_every_token(tmp_path: Path) -> None:
    """As values do that are a part of what one product made of queries, keys and values."""
    found = said(PRETEND, {"stacks": ["full"], "tokens": 20, "rows": 2, "apart": True}, tmp_path)["full"]
    assert not found["wrong"] and found["counts"] and found["again"] == found["of"] > 10, found


def test_what_comes_late_is_there_until_all_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another stream has filled it, and would give its memory away: the kernels that read it wait on this one."""
    from kvengine.kernels.gpu import again, launches

    active, made = SimpleNamespace(get_current_stream=lambda device: 0), list[tuple[int, bool]]()
    monkeypatch.setattr(launches, "driver", SimpleNamespace(active=active))
    came: list[weakref.ref[Tensor]] = []

    def late() -> list[Tensor]:
        fetched = torch.zeros(4)
        came.append(weakref.ref(fetched))
        return [fetched]

    def launch(*arguments: int) -> None:
        made.append((arguments[-1], bool(came and came[0]() is not None)))

    some = object.__new__(launches.Launches)
    some.device, some.size, some.offsets, some.late, some.pause = torch.device("cpu"), 0, [], [0], 1
    monkeypatch.setattr(again, "TOGETHER", False)
    ready = again.Ready(launch, (), (), None)
    some.ready = [(ready, (1, 1, 1), [0], [(0, i)]) for i in range(2)] * 2
    given = torch.zeros(4)
    assert some.again([given], (), late)
    (first, before), (second, there), _, (last, still) = made
    assert first == given.data_ptr() and not before and second == last != 0 and there and still
