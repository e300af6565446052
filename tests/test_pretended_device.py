"""On a pretended CUDA device: nothing of the host's meets what is on the device, and a step moves nothing between them.

Every stack reads a padded batch and decodes, and says what it says on the CPU. Kernels run as their references.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from families import configs
from layout import ROOT
from support import MIXED, SMALL, every, greedy, in_turn, llama, prompts
from support_device import CUDA, Device, Elsewhere, Pretended, moved_by_steps, pretended, there
from test_compiled import DIM, EVERY, PROMPT, STEPS, at, tokens
from torch import Tensor

import kvengine
from kvengine import attending
from kvengine.cache import LayerCache
from kvengine.errors import KernelError
from kvengine.fixed import FixedLayer
from kvengine.hf.compiled import CompiledDecode
from kvengine.kernels import dispatch
from kvengine.kernels.causal_attention import reference as causal
from kvengine.kernels.causal_attention.native import fits
from kvengine.kernels.column_mass import blocks, reference
from kvengine.kernels.cpu import library
from kvengine.kernels.fetch_pages import fetch_pages
from kvengine.kernels.gpu import chip
from kvengine.kernels.merge_states import merge_states
from kvengine.kernels.state import State
from kvengine.kernels.streams import side_stream
from kvengine.lane import Lane
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack

STACKS = list({Stack.parse(text): text for text in (*SMALL.values(), *MIXED)}.values())  # several null choices are one

LAUNCHED = {
    "duo(sinks=2, recent=10) + quest(budget=24, page=4) + kivi(group=8, residual=8)": {"attend_kernel", "score_kernel",
                                                                                      "quantise_kernel"},
    "host + quest(budget=24, page=4)": {"fetch_kernel", "score_kernel", "top_kernel", "put_kernel"},
    "zipcache(block=16)": {"pack_kernel", "join_kernel", "lse_kernel", "mass_kernel"},
}  # fmt: skip
"""Some of the kernels that these launch."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return pretended(monkeypatch)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(5, STACKS))
def test_the_text_is_that_of_the_cpu(text: str, device: Device) -> None:
    model, batch = llama(), prompts(2)
    with kvengine.patched(model, text):
        want = greedy(model, batch, 8)
    with device:
        with kvengine.patched(there(model), text):
            got = greedy(model, {name: there(x) for name, x in batch.items()}, 8)
        assert got.is_cuda and got.tolist() == want.tolist()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "text",
    ["duo(sinks=2, recent=10)", "duo(sinks=2, recent=10) + quest(budget=24, page=4) + kivi(group=8, residual=8)"],
)
def test_lanes_answer_in_their_heads_places_where_steps_are_recorded(text: str, device: Device) -> None:
    model, batch = llama(), prompts(2)
    with kvengine.patched(model, text):
        want = greedy(model, batch, 12)
    with device, kvengine.patched(there(model), text):
        there_too = {name: there(x) for name, x in batch.items()}
        got = greedy(model, there_too, 12, custom_generate=CompiledDecode(model, "eager")).tolist()
    assert got == want.tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", ["h2o(budget=24)", "kivi(group=8, residual=8)", "host + quest(budget=24, page=4)"])
def test_lanes_go_each_its_own_way(text: str, device: Device) -> None:
    """One by launches that are made again, another in general, as before its budget is full."""
    model, batch = llama(), prompts(2)
    with kvengine.patched(model, f"duo(sinks=2, recent=10) + {text}"):
        want = greedy(model, batch, 12)
    with device, kvengine.patched(there(model), f"duo(sinks=2, recent=10) + {text}"):
        assert greedy(model, {name: there(x) for name, x in batch.items()}, 12).tolist() == want.tolist()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", ["full", "snapkv(budget=12, window=4)", "quest(budget=24, page=4)", "host"])
def test_heads_that_share_latents(text: str, device: Device) -> None:
    model, batch = configs.build("minicpm3"), configs.padded_batch()
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    with kvengine.patched(model, text):
        want = model.generate(**batch, **options)
    with device, kvengine.patched(there(model), text):
        got = model.generate(**{name: there(x) for name, x in batch.items()}, **options)
        assert got.is_cuda and got.tolist() == want.tolist()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", LAUNCHED)
def test_kernels_are_given_what_is_on_the_device(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches that compute nothing: what they are given is there, and fits into a grid."""
    jit, launched = pytest.importorskip("triton.runtime.jit"), set()

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*given: Any, **options: Any) -> None:
            reads_host = kernel.__name__ == "fetch_kernel"
            for i, x in enumerate(given):
                if isinstance(x, Tensor) and not isinstance(x, Pretended):
                    assert i == 0 and reads_host and x.is_pinned(), f"argument {i} of {kernel.__name__} is on the host"
            assert 1 <= grid[0] < 1 << 31 and all(1 <= n <= 65535 for n in grid[1:]), grid
            launched.add(kernel.__name__)

        return run

    monkeypatch.setattr(jit.JITFunction, "__getitem__", launch)
    for name in ("empty", "empty_like"):  # what a kernel would have written
        monkeypatch.setattr(torch, name, getattr(torch, name.replace("empty", "zeros")))
    model = llama()
    with Device(monkeypatch), kvengine.patched(there(model), text):
        for decoder in ({}, {"custom_generate": CompiledDecode(model, "eager")}):
            greedy(model, {name: there(x) for name, x in prompts(2).items()}, 6, **decoder)
    assert launched >= LAUNCHED[text], launched


def layer(text: str, qkv: list[Tensor], here: bool = False) -> LayerCache:
    """`here`: the model was patched on the host, and moved later."""
    cache = LayerCache(Stack.parse(text), 0, 1)
    frequency = 10000.0 ** -(torch.arange(DIM // 2, device="cpu") * 2 / DIM)
    cache.session.rope = Rope(frequency if here else there(frequency))
    tell(cache, 0, PROMPT, rows=len(qkv[0]))
    cache.forward(*(x[:, :, :PROMPT] for x in qkv), Call(0.25))
    rerun([cache], [qkv], Call(0.25))
    return cache


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("text", "held"), in_turn(EVERY, [False, True]))
def test_a_step_moves_nothing(text: str, held: bool, device: Device) -> None:
    """Nor is anything moved between two steps, but the numbers of pages that are sealed, and pages to their place."""
    with device, torch.inference_mode():
        qkv = [there(x) for x in tokens()]
        cache = layer(text, qkv)
        now = torch.tensor([cache.seen], device=CUDA)
        fixed = FixedLayer(cache, STEPS, now) if held else None
        for i in range(6):
            given, before = at(qkv, i), sealed(cache)
            device.moved.clear()
            if fixed is None:
                cache.forward(*given, Call(0.25))
                assert not device.moved or sealed(cache) != before
                continue
            fixed.step(given[0], given[1], given[2], Call(0.25))
            assert not device.moved
            now.add_(1)
            fixed.advance()


def test_a_thread_has_its_own_streams_for_fetches_and_for_recordings(device: Device) -> None:
    """While one records, its fetches are part of that, and others may not wait for them."""
    mine = [side_stream(CUDA, purpose) for purpose in ("fetches", "recordings")]
    assert mine[0] is not mine[1] and mine == [side_stream(CUDA, "fetches"), side_stream(CUDA, "recordings")]
    with ThreadPoolExecutor(1) as other:
        assert other.submit(side_stream, CUDA, "fetches").result() not in mine


def test_keys_of_low_rank_are_turned_without_the_host(device: Device) -> None:
    with device, torch.inference_mode():
        qkv = [there(x) for x in tokens()]
        cache = layer("lowrank(rank=8)", qkv, here=True)
        device.moved.clear()
        cache.forward(*at(qkv, 0), Call(0.25))
        assert not device.moved


def test_tails_of_different_lengths_are_counted_where_they_are(device: Device) -> None:
    with device:
        lane = object.__new__(Lane)
        lane.first = there(torch.zeros(3, dtype=torch.long))
        lane.lengths = [(5, there(torch.tensor([0, 2]))), (7, there(torch.tensor([1])))]
        found = lane.open()
        assert not device.moved and isinstance(found, Tensor) and found.tolist() == [5, 7, 5]


def sealed(cache: LayerCache) -> list[int]:
    return [n for part in cache.parts if (pages := part.lane.pages) is not None for n in pages.filled.inner.tolist()]


@pytest.mark.parametrize("text", ["full", "snapkv(budget=24, window=6)", EVERY[-2]])
def test_what_a_graph_would_record_moves_nothing(text: str, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model included. The host looks at nothing either: what it saw would be in the recording for ever."""
    found = moved_by_steps(device, monkeypatch)
    model = llama()
    with device, kvengine.patched(there(model), text):
        decoder = kvengine.compile_decode(model)
        assert decoder.how == "graph"
        greedy(
            model, {name: there(x) for name, x in prompts(2).items()}, 6, custom_generate=CompiledDecode(model, "eager")
        )
    assert len(found) == 5 and not any(found)


def test_launches_go_to_the_gpu_that_has_the_tensors(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the current one, whatever it is given: a model on several GPUs has tensors on others too."""
    current = [CUDA.index]

    @contextmanager
    def switched(to: torch.device) -> Iterator[None]:
        before, current[0] = current[0], to.index
        yield
        current[0] = before

    monkeypatch.setattr(torch.cuda, "device", switched)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[0])
    monkeypatch.setattr(
        "kvengine.kernels.merge_states.triton.merge_states",
        lambda states: State(torch.full_like(states[0].out, current[0]), states[0].lse),
    )
    with device:
        x = torch.zeros(1, 1, 1, 4, device=CUDA)
        for now in (0, 1):
            current[0] = now
            assert (merge_states([State(x, x[..., 0])] * 2, backend="triton").out == CUDA.index).all()
            assert current[0] == now


@pytest.mark.parametrize("runs", ["triton", "reference"])
def test_what_plans_for_each_length_is_not_asked_while_decoding(
    runs: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's attention on Hopper is cuDNN's, and a text's length is another at every token."""
    asked: list[str] = []
    library_s = torch.nn.functional.scaled_dot_product_attention

    def stock(q: Tensor, *more: Any, **options: Any) -> Any:
        asked.append("library")
        return library_s(q, *more, **options)

    def own(q: Tensor, *more: Any, **options: Any) -> State:
        asked.append("own")
        return State(torch.zeros_like(q), q[..., 0])

    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: runs)
    monkeypatch.setattr(attending, "attention", own)
    monkeypatch.setattr(attending.F, "scaled_dot_product_attention", stock)
    with device:
        q, k = torch.zeros(2, 4, 1, 16, device=CUDA), torch.zeros(2, 9, 16, device=CUDA)
        assert attending.whole(q, k, k, None, 0.25).shape == q.shape
    assert asked == ["own" if runs == "triton" else "library"]


def test_a_gpu_takes_many_queries_of_a_long_prompt_at_once(device: Device) -> None:
    """A launch takes as long as thousands of queries do there; what they need is bounded whatever the batch."""
    q = torch.zeros(8, 4, 4096, 1)
    assert len(blocks(q, 131072)) == 2048
    with device:
        assert len(blocks(there(q), 131072)) == 128
        for rows in (1, 8, 256):
            some = torch.zeros(rows, 4, 4096, 1, device=CUDA)
            longest = max(span.stop - span.start for span in blocks(some, 131072))
            assert rows * 4 * longest * 131072 <= max(reference.ON_GPU, rows * reference.BLOCK)


def test_a_gpu_does_not_wait_for_the_c_compiler(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> None:
        raise AssertionError("the C kernels were asked for")

    monkeypatch.setattr(library, "load", load)
    with device:
        x = torch.zeros(1, 1, 16, 16, device=CUDA)
        assert not fits(x, x, x)
        attending.causal(x, x[0], x[0], 1.0)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("has", "hip", "why"),
    [
        ({"name": "Tesla T4", "major": 7, "minor": 5}, None, r"compute capability 8\.0, and Tesla T4 has 7\.5"),
        ({"name": "MI300X", "major": 9, "minor": 4}, "6.4", "NVIDIA's GPUs, and MI300X is AMD's"),
    ],
)
def test_a_chip_that_kernels_are_not_for_computes_in_torch(
    has: dict[str, Any], hip: str | None, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    jit, device = pytest.importorskip("triton.runtime.jit"), Device(monkeypatch, **has)

    def launch(kernel: Any, grid: Any) -> Any:
        raise AssertionError(f"{kernel.__name__} was launched")

    monkeypatch.setattr(jit.JITFunction, "__getitem__", launch)
    monkeypatch.setattr(torch.version, "hip", hip)
    model, batch, text = llama(), prompts(2), "host + quest(budget=24, page=4) + kivi(group=8, residual=8)"
    with kvengine.patched(model, text):
        want = greedy(model, batch, 8)
    with device:
        with kvengine.patched(there(model), text):
            got = greedy(model, {name: there(x) for name, x in batch.items()}, 8)
        assert got.is_cuda and got.tolist() == want.tolist()
        x = torch.zeros(1, 1, 1, 4, device=CUDA)
        with pytest.raises(KernelError, match=why):
            merge_states([State(x, x[..., 0])] * 2, backend="triton")
        assert re.search(why, dispatch.info()["triton"])
        said = [record.getMessage() for record in caplog.records if record.name == chip.__module__]
        assert len(said) == 1 and re.search(why, said[0]) and "Plain torch computes there" in said[0]
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(KernelError, match="a recorded step cannot wait"):
            fetch_pages({"k": torch.zeros(4, 2)}, torch.zeros(1, dtype=torch.int64, device=CUDA), CUDA)


def test_without_triton_pages_come_by_way_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_has_triton", lambda: False)
    with Device(monkeypatch):
        field, at = torch.arange(8.0).view(4, 2).pin_memory(), torch.tensor([2, 0], device=CUDA)
        found = fetch_pages({"k": field}, at, CUDA)["k"]
        assert found.is_cuda and found.tolist() == [[4, 5], [0, 1]]


def test_it_refuses_what_a_gpu_would(device: Device) -> None:
    """The control."""
    with device:
        x, y = torch.arange(4.0, device="cuda"), torch.arange(4.0)
        for mixed in (lambda: x + y, lambda: torch.cat([x, y[0:1]]), lambda: x.where(y > 1, 0), lambda: y[x.long()]):
            with pytest.raises(Elsewhere):
                mixed()
        with pytest.raises(Elsewhere):
            x[torch.tensor([0, 1])] = y[:2]
        device.moved.clear()
        values: list[Any] = [
            x + y[1],
            x[1:].add_(1),
            torch.zeros_like(x),
            x.new_full((2,), 1),
            y.cuda(),
            y.to(x.device),
        ]
        assert all(isinstance(value, Pretended) for value in values) and x.inner.tolist() == [0, 2, 3, 4]
        assert sum(device.moved.values()) == 2  # the last two
        device.moved.clear()
        assert x[[0, 1]].is_cuda and x.new_tensor([1.0]).is_cuda and x.masked_fill(x > 0, x[0]).is_cuda
        assert y[[0, 1]].is_cpu and x[x[1].long()].is_cuda
        other = x.clone()
        other[:2], other[x > 9], other[x[:1].long()] = 0, 1, 2.0  # the last one
        assert sum(device.moved.values()) == 5
        device.moved.clear()
        assert x.sum().item() == 9 and x.cpu().tolist() == [0, 2, 3, 4] and not x.cpu().is_cuda
        assert sum(device.moved.values()) == 3


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("before", [0, 5])
def test_the_librarys_attention_is_given_no_heads_that_share_memory(
    before: int, padded: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, asked = torch.Generator().manual_seed(0), []
    q, k, v = (
        torch.randn(2, heads, n, 16, generator=rng).half() for heads, n in ((4, 12), (2, 12 + before), (2, 12 + before))
    )
    mask = torch.arange(12 + before).expand(2, -1) >= torch.tensor([[0], [3]]) if padded else None
    want = causal.attention(q, k, v, 0.25, mask)
    library_attention = causal.F.scaled_dot_product_attention

    def noted(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        asked.extend(x.stride() for x in (k, v))
        return library_attention(q, k, v, **options)

    with device:
        monkeypatch.setattr(causal.F, "scaled_dot_product_attention", noted)
        got = causal.attention(there(q), there(k), there(v), 0.25, None if mask is None else there(mask))
        torch.testing.assert_close(got.cpu(), want, rtol=2e-3, atol=2e-3)
    assert asked and all(0 not in strides for strides in asked)


@pytest.mark.slow
def test_the_tests_of_kernels_compare_nothing_across_devices() -> None:
    """On a GPU they run before anything is measured, and one that is red ends the run."""
    # What only Triton does has no reference in its place.
    command = [
        sys.executable,
        "-P",
        "-m",
        "pytest",
        "-q",
        "-p",
        "support_as_on_a_gpu",
        "-p",
        "no:cacheprovider",
        "tests/kernels",
    ]
    alone = ["turned_codes", "far_apart", "turns_as", "a_mean_goes_on", "without_a_table", "nothing_outside"]
    command += ["--ignore=tests/kernels/test_triton.py", "-k", " and not ".join(["triton", *alone])]
    here = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, cwd=ROOT, env=here, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-1000:]
