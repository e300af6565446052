"""Between two sealed pages, a decode step neither waits for the device nor makes a shape of data.

A GPU then works while the host is ahead, and what CUDA graphs forbid is not there. Sealing a page (one step in `page`) is
exempt where it allocates, or moves what has holes, and so are placements that keep track on the host of what lies where
(`disk`, `remote`, and `host` with `keep='lru'`). The kernels' torch references, which run here in place
of Triton's, are exempt too; what surrounds the launches of those is watched by itself.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from support_sync import Watch
from transformers import LlamaConfig, LlamaForCausalLM

import kvengine
from kvengine.cache import LayerCache
from kvengine.hf.names import CACHE
from kvengine.offload.placement.host import Fetched
from kvengine.policies import catalogue
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack

HEADS, GROUP, DIM, PROMPT, STEPS = 2, 2, 16, 330, 12
STACKS = [
    "full", "streaming(recent=60)", "h2o(budget=64)", "tova(budget=64)", "snapkv(budget=64)", "pyramidkv(budget=64)",
    "adakv(budget=64)", "keydiff(budget=64)", "expected_attention(budget=64)", "elastic(budget=64)", "d2o(budget=64)",
    "kvzip(budget=64)", "rkv(budget=64)", "chunkkv(budget=64)", "kivi(bits=4)", "zipcache", "quantspec", "turboquant",
    "lowrank(rank=8)", "quest(budget=64)", "tidal(budget=64)", "landmarks(budget=64)",
    "retrieval(budget=64)", "oracle_topk(budget=64)", "duo(sparsity=0.5, sinks=4, recent=32)", "ashape(sinks=4, local=32)",
    "xattention(last=8)", "vertical_slash(vertical=16, slash=16)", "flexprefill(min_budget=128)",
    "host + quest(budget=64)", "duo(sparsity=0.5, sinks=4, recent=32) + quest(budget=64) + kivi(bits=4)",
]  # fmt: skip
SEALED = ["quest(budget=64)", "kivi(bits=4)", "quest(budget=64) + kivi(bits=4)", "landmarks(budget=64)", "turboquant"]
ELSEWHERE = {"uniform", "exact", "dense", "all", "device", "ann", "disk", "remote"}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")
    return Watch(monkeypatch)


def decode(text: str, watch: Watch, steps: int = STEPS, room: int = 0) -> None:
    """A prompt, then some tokens; steps that seal a page are watched if there is `room` for so many columns more."""
    cache = LayerCache(Stack.parse(text), 0, 1)
    cache.session.rope = Rope(10000.0 ** -(torch.arange(DIM // 2) * 2 / DIM))
    rng = torch.Generator().manual_seed(0)
    qkv = [torch.randn(1, h, PROMPT + steps, DIM, generator=rng) for h in (HEADS * GROUP, HEADS, HEADS)]
    with torch.inference_mode():
        tell(cache, 0, PROMPT)
        cache.forward(*(x[:, :, :PROMPT] for x in qkv), Call(0.25))
        rerun([cache], [qkv], Call(0.25))
        for part in cache.parts if room else []:
            assert part.lane.pages is not None
            part.lane.pages.reserve(room)
            part.lane.pages.pool.ensure(room * len(part.lane.first))
        for i in range(PROMPT, PROMPT + steps):
            before = watch.found.copy(), pages(cache)
            with watch:
                cache.forward(*(x[:, :, i : i + 1] for x in qkv), Call(0.25))
            if pages(cache) != before[1] and not room:
                watch.found = before[0]


def pages(cache: LayerCache) -> list[int]:
    """Pages that each row has sealed."""
    held = [part.lane.pages for part in cache.parts]
    return [n for p in held if p is not None for n in p.filled.tolist()]


@pytest.mark.parametrize("text", STACKS)
def test_a_decode_step_does_not_wait(text: str, watch: Watch) -> None:
    decode(text, watch)
    assert not watch.found


@pytest.mark.parametrize("text", ["shadowkv(budget=64, rank=8)", "quest(budget=64) + host(resident=64)"])
def test_what_was_read_last_is_found_without_waiting(text: str, watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the model is on a device: on a CPU pages are read in place."""
    monkeypatch.setattr(Fetched, "resident", lambda *_: None)
    decode(text, watch)
    assert not watch.found


@pytest.mark.parametrize("text", SEALED)
def test_a_page_is_sealed_without_waiting(text: str, watch: Watch) -> None:
    """Where memory need not grow, and the tail has no holes."""
    decode(text, watch, 70, 9)
    assert not watch.found


def test_the_watch_sees_what_waits(watch: Watch) -> None:
    decode("ann(budget=64)", watch)
    assert any("ann.py" in line for line in watch.found)
    x, before = torch.arange(6), len(watch.found)
    with watch:
        x[x > 2], x.tolist(), torch.tensor([1]), int(x.max()), x.repeat_interleave(x)
    assert len(watch.found) == before + 5


def test_every_method_is_watched() -> None:
    named = {word for text in STACKS for word in text.replace("(", " ").split()}
    rest = set(catalogue()) - named - ELSEWHERE - {"host"}
    assert not rest, f"add a stack with {sorted(rest)} to STACKS"


@pytest.mark.parametrize(
    "text",
    ["full", "snapkv(budget=48)", "quest(budget=48) + kivi(bits=4)", "streaming(recent=28)", "kvzip(budget=200)"],
)
def test_a_model_decodes_without_waiting(text: str, watch: Watch) -> None:
    """The seams included: cache, mask and attention function."""
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )).eval()  # fmt: skip
    with kvengine.patched(model, text), torch.inference_mode():
        out = model(torch.randint(64, (1, 150)), use_cache=True)
        for _ in range(3):
            with watch:
                out = model(out.logits[:, -1:].argmax(-1), cache=out[CACHE], use_cache=True)
    ours = {line: n for line, n in watch.found.items() if "site-packages" not in line}
    assert not ours


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_launching_kernels_does_not_wait(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.jit import JITFunction

    from kvengine.kernels.gpu.ahead import cases

    launched: list[str] = []
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: lambda *a, **k: launched.append(self.__name__))
    for name, call in cases().items():
        before = len(launched)
        with watch:
            call()
        assert len(launched) > before, name
    assert not watch.found
