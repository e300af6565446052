"""A recorded decode step: the same text as without, nothing moves, and nothing of the host's is baked in.

What a CUDA graph would replay is recorded here as a list of torch operations, by the kernels' references, since a
recording sees no C. The oracle is eager decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support import SMALL, every, greedy, llama, one, prompts
from support_sync import Watch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import kvengine
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, ModelError, UnsupportedPolicy
from kvengine.fixed import FixedLayer, refusal
from kvengine.fixed_lane import FixedLane
from kvengine.hf.compiled import CompiledDecode
from kvengine.hf.steps import Steps
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack

KIVI = "kivi(bits=4, group=8, residual=8)"
MIXED = [
    f"duo(sinks=2, recent=10) + quest(budget=24, page=4) + {KIVI}",
    f"h2o(budget=24) + {KIVI}",
    f"rkv(budget=24, buffer=7, window=4) + {KIVI}",
    f"streaming(sinks=2, recent=14) + {KIVI}",
    "streaming(sinks=2, recent=14, positions='in-cache')",
    "streaming(sinks=2, recent=14, decode=False)",
    "snapkv(budget=24, window=6) + quest(budget=16, page=4)",
    "rkv(budget=24, buffer=7, window=4) + quest(budget=12, page=4)",
    "rkv(budget=24, buffer=7, window=4) + retrieval(budget=12, chunk=4) + turboquant(residual=0)",
    "landmarks(budget=40, chunk=4) + lowrank(rank=8)",
    "quest(budget=0.3, page=4)",
    "quest(budget=24, page=4, reduce='each')",
    f"quest(budget=4096) + {KIVI}",
    "host + quest(budget=24, page=4)",
    "d2o(budget=24, form='official')",
    "landmarks(budget=40, chunk=4) + lowrank(rank=8) + host(fields=('v',))",
    "rkv(budget=10, buffer=13, window=3) + zipcache(salient=0.3, block=24)",
]
# Several null choices are one stack. `ann` is refused, and needs a package that a machine with a GPU may not have.
STACKS = {Stack.parse(text): text for name, text in SMALL.items() if name != "ann"}
EVERY = [text for stack, text in STACKS.items() if refusal(stack) is None] + MIXED
EVEN = ("full", SMALL["snapkv"], SMALL["keydiff"], "streaming(sinks=2, recent=14, decode=False)")
"""Run without padding: their rows are alike, so that counts and the order of slots say what positions would."""
REACHED = [
    "h2o(budget=70)",
    "tova(budget=70)",
    "streaming(sinks=2, recent=64)",
    "landmarks(budget=66, chunk=4) + lowrank(rank=8)",
]
"""Budgets beyond the prompt, that recorded steps reach: until then order says who sees whom, or all is read."""
REFUSED = ["ann(budget=24)", "host(resident=16, keep='lru')", "disk(device=4096, host=8192)"]
SEQUENCES, HEADS, GROUP, DIM, PROMPT, STEPS = 2, 2, 2, 16, 61, 21


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def tokens(seed: int = 0) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    heads = (HEADS * GROUP, HEADS, HEADS)
    return [torch.randn(SEQUENCES, h, PROMPT + STEPS, DIM, generator=rng) for h in heads]


def layer(text: str, qkv: list[Tensor], padding: int = 9) -> LayerCache:
    """A layer that has read its prompt; the second sequence's begins with padding."""
    cache = LayerCache(Stack.parse(text), 0, 1)
    cache.session.rope = Rope(10000.0 ** -(torch.arange(DIM // 2) * 2 / DIM))
    valid = torch.arange(PROMPT) >= torch.tensor([0, padding])[:, None]
    given = None if not padding else valid
    tell(cache, 0, PROMPT, given, SEQUENCES)
    cache.forward(*(x[:, :, :PROMPT] for x in qkv), Call(0.25), given)
    rerun([cache], [qkv], Call(0.25))
    return cache


def at(qkv: list[Tensor], i: int) -> list[Tensor]:
    return [x[:, :, PROMPT + i : PROMPT + i + 1].clone() for x in qkv]


def recorded(fixed: FixedLayer, now: Tensor, first: list[Tensor]) -> tuple[Callable[..., Tensor], Tensor]:
    """The step as a list of operations on what it is given and on the layer's own tensors; and its first result."""
    state, out = [now, *fixed.state()], []

    def step(*given: Tensor) -> Tensor:
        out.append(fixed.step(given[0], given[1], given[2], Call(0.25)))
        now.add_(1)
        return out[0]

    graph = make_fx(step)(*first, *state)
    return lambda *given: graph(*given, *state), out[0]


def replay(text: str, padding: int = 9) -> tuple[list[Tensor], list[Tensor], list[list[int]]]:
    """Outputs of eager steps, those of replayed ones, and where the state lay after each."""
    qkv = tokens()
    eager, held = layer(text, qkv, padding), layer(text, qkv, padding)
    now = torch.tensor([held.seen])
    fixed = FixedLayer(held, STEPS, now)
    run: Callable[..., Tensor] | None = None
    want, got, places = [], [], []
    for i in range(STEPS):
        given = at(qkv, i)
        want.append(eager.forward(*given, Call(0.25)).clone())
        if run is None:
            run, out = recorded(fixed, now, given)
        else:
            out = run(*given)
        got.append(out.clone())
        fixed.advance()
        places.append([p for x in fixed.state() for p in (x.data_ptr(), *x.shape, *x.stride())])
    return want, got, places


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", every(2, EVERY, 1))
def test_the_text_is_that_of_eager_decoding(text: str, model: Any) -> None:
    with kvengine.patched(model, text):
        decoder = kvengine.compile_decode(model, "eager")
        assert torch.equal(decode(model, decoder, prompts(2)), decode(model, None, prompts(2)))


def decode(model: Any, decoder: Any, batch: dict[str, Tensor], count: int = 24, **options: Any) -> Tensor:
    return greedy(model, batch, count, **({"custom_generate": decoder} if decoder else {}), **options)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", ["full", MIXED[0], "streaming(sinks=2, recent=14)"])
def test_a_recorded_model_speaks_the_same_text(text: str) -> None:
    model = llama(num_hidden_layers=1)
    with kvengine.patched(model, text):
        decoder = kvengine.compile_decode(model, "trace")
        assert torch.equal(decode(model, decoder, one(), 30), decode(model, None, one(), 30))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(4, EVERY, 2))
def test_with_the_kernels_that_users_have(text: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with kvengine.patched(model, text):
        decoder = kvengine.compile_decode(model)
        assert decoder.how == "eager"
        assert torch.equal(decode(model, decoder, prompts(2)), decode(model, None, prompts(2)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", ["full", MIXED[0], "h2o(budget=24)", "zipcache(block=16)"])
def test_kernels_in_c_are_not_taken_for_recorded(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    model = llama(num_hidden_layers=1)
    with kvengine.patched(model, text):
        decoder = kvengine.compile_decode(model, "trace")
        assert torch.equal(decode(model, decoder, one(), 30), decode(model, None, one(), 30))


@pytest.mark.sampled(6)
@pytest.mark.parametrize("text", every(3, EVERY))
def test_a_step_recorded_once_is_right_from_then_on(text: str) -> None:
    want, got, places = replay(text, 0 if text in EVEN else 9)
    for i, (x, y) in enumerate(zip(want, got, strict=True)):
        torch.testing.assert_close(y, x, rtol=2e-4, atol=2e-5, msg=lambda m, i=i: f"step {i}: {m}")
    assert all(p == places[0] for p in places), "a tensor has moved, or changed its shape"


@pytest.mark.parametrize(
    "text",
    [
        "streaming(sinks=2, recent=20) + quest(budget=8, page=2)",
        "streaming(sinks=2, recent=20) + oracle_topk(budget=8)",
    ],
)
def test_pages_full_of_holes_are_read_as_eagerly(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager decoding packs pages anew between steps, a recording does not."""
    monkeypatch.setitem(globals(), "STEPS", 70)
    want, got, _ = replay(text)
    for i, (x, y) in enumerate(zip(want, got, strict=True)):
        torch.testing.assert_close(y, x, rtol=2e-4, atol=2e-5, msg=lambda m, i=i: f"step {i}: {m}")


@pytest.mark.parametrize("text", ["streaming(sinks=2, recent=14)", "zipcache(block=16)"])
def test_a_number_of_the_hosts_in_the_recording_is_found(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: positions as the host counts them are right at the recorded step, and wrong at all others."""
    monkeypatch.setattr(FixedLane, "newest", lambda self, n: torch.tensor([self.seen]))
    monkeypatch.setattr(FixedLane, "show", super(FixedLane, FixedLane).show)
    monkeypatch.setattr(FixedLane, "lasting_rule", lambda self: None)  # which looks at no number of the host's
    want, got, _ = replay(text)
    assert not all(torch.allclose(x, y, rtol=2e-4, atol=2e-5) for x, y in zip(want, got, strict=True))


@pytest.mark.parametrize("text", EVERY)
def test_a_step_waits_for_nothing(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, watch = tokens(), Watch(monkeypatch)
    held = layer(text, qkv)
    now = torch.tensor([held.seen])
    fixed = FixedLayer(held, STEPS, now)
    for i in range(3):
        with watch:
            fixed.step(*at(qkv, i), Call(0.25))
        now.add_(1)
        fixed.advance()
    assert not watch.found


@example(f"h2o(budget=24) + {KIVI}", 0, 1, 17)  # tokens leave pages too
@example("landmarks(budget=66, chunk=4) + lowrank(rank=8)", 0, 0, 3)  # reads by what its own tail holds
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(EVERY + REACHED), st.integers(0, 1), st.integers(0, 12), st.integers(1, STEPS - 4))
def test_who_pauses_while_a_layer_is_held_still_took_nothing(text: str, row: int, stop: int, end: int) -> None:
    """One row, from its step on, if that comes. Against eager steps, in which what comes for it is padding."""
    qkv, padding = tokens(), 0 if text in (*EVEN, *REACHED) else 9
    eager, held = layer(text, qkv, padding), layer(text, qkv, padding)
    now, paused = torch.tensor([held.seen]), torch.zeros(SEQUENCES, dtype=torch.bool)
    fixed = FixedLayer(held, end, now)
    for i in range(end):
        if i == stop:
            paused[row] = True
            fixed.pause(paused)
        want = eager.forward(*at(qkv, i), Call(0.25), ~paused[:, None] if bool(paused.any()) else None)
        got = held.forward(*at(qkv, i), Call(0.25))
        now.add_(1)
        fixed.advance()
        torch.testing.assert_close(got[~paused], want[~paused], rtol=2e-4, atol=2e-5)
    fixed.release()
    assert positions(held) == positions(eager) and held.seen == eager.seen and tails(held) == tails(eager)
    for i in range(end, STEPS):
        want, got = (one.forward(*at(qkv, i), Call(0.25)) for one in (eager, held))
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("text", EVERY + REACHED)
def test_what_is_let_go_goes_on_as_if_never_held(text: str) -> None:
    """Half the steps held still, half eagerly: the same answers, and the same tokens held."""
    qkv, padding = tokens(), 0 if text in (*EVEN, *REACHED) else 9
    eager, held = layer(text, qkv, padding), layer(text, qkv, padding)
    now = torch.tensor([held.seen])
    fixed = FixedLayer(held, STEPS, now)
    for i in range(STEPS):
        want = eager.forward(*at(qkv, i), Call(0.25))
        if i == STEPS // 2:
            fixed.release()
        got = held.forward(*at(qkv, i), Call(0.25))
        if i < STEPS // 2:
            now.add_(1)
            fixed.advance()
        torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-5)
    assert positions(held) == positions(eager) and held.seen == eager.seen
    for x, y in zip(held.parts, eager.parts, strict=True):
        mine, other = ((z.lane.tail.placed, z.lane.tail.next, z.lane.tail.clean) for z in (x, y))
        assert mine == other


def positions(cache: LayerCache) -> list[list[int]]:
    rows = []
    for part in cache.parts:
        _, _, position, _ = part.lane.everything()
        rows += [sorted(p for p in row if p >= 0) for row in position.tolist()]
    return rows


def tails(cache: LayerCache) -> list[list[int]]:
    """The positions of each row's newest slots, of as many as it is said to have open: none is padding in between."""
    rows = []
    for lane in (part.lane for part in cache.parts if part.lane.stack.paged):
        position, count = lane.tail.position[:, lane.tail.span], torch.as_tensor(lane.open()).expand(len(lane.first))
        rows += [row[len(row) - n :] for row, n in zip(position.tolist(), count.tolist(), strict=True)]
    return rows


def test_a_recording_is_not_made_in_inference_mode(model: Any) -> None:
    """One that is repeats the first step's numbers."""
    with kvengine.patched(model, "full"):
        decoder = kvengine.compile_decode(model, "trace")
        want = decode(model, None, one(), 8)
        with torch.inference_mode():
            assert torch.equal(decode(model, decoder, one(), 8), want)
            cache = kvengine.EngineCache(model)
            model(**one(), cache=cache)
            with pytest.raises(CacheError, match="cannot be recorded in torch.inference_mode"):
                decoder.open(cache, 4)


@pytest.mark.parametrize("text", ["full", "quest(budget=24, page=4)"])
def test_what_was_read_in_inference_mode_is_recorded_outside_of_it(text: str, model: Any) -> None:
    with kvengine.patched(model, text):
        caches = [kvengine.EngineCache(model) for _ in range(2)]
        token, place = torch.tensor([[7]]), torch.tensor([[61]])
        for cache, inferred in zip(caches, (True, False), strict=True):
            with torch.inference_mode(inferred), torch.no_grad():
                model(**one(), cache=cache)
        with torch.no_grad():
            want = model(token, cache=caches[1]).logits
            steps = kvengine.compile_decode(model, "eager").open(caches[0], 4)
            torch.testing.assert_close(steps(token, place), want)
            steps.close()


def test_a_conversation_goes_on_after_it(model: Any) -> None:
    with kvengine.patched(model, MIXED[0]):
        texts = []
        for decoder in (kvengine.compile_decode(model, "eager"), None):
            cache, batch = kvengine.EngineCache(model), one()
            ids = batch["input_ids"]
            for question in ([], [[5, 6, 7]]):
                ids = torch.cat([ids, torch.tensor(question, dtype=torch.long).view(1, -1)], 1)
                options = {"custom_generate": decoder} if decoder else {}
                ids = model.generate(ids, cache=cache, max_new_tokens=12, do_sample=False, **options)
            texts.append(ids)
        assert torch.equal(*texts)


def test_what_the_last_step_read_is_told_though_its_page_is_sealed(model: Any) -> None:
    """Of one row: the other's page is full at another step."""
    with kvengine.patched(model, MIXED[0]):
        found = []
        for decoder in (kvengine.compile_decode(model, "eager"), None):
            cache = kvengine.EngineCache(model)
            decode(model, decoder, prompts(2), 4, cache=cache)
            found.append(cache.stats().attended)
        assert torch.equal(*found)


def test_generate_keeps_its_arguments(model: Any) -> None:
    """Sampling, a processor, and a batch whose sequences end at different times."""
    with kvengine.patched(model, "quest(budget=24, page=4)"):
        first = decode(model, None, prompts(2), 24)
        common = {"eos_token_id": int(first[0, 5]), "repetition_penalty": 1.3, "do_sample": True, "max_new_tokens": 24}
        found = []
        for call in (kvengine.compile_decode(model, "eager").generate, model.generate):
            torch.manual_seed(3)
            found.append(call(**prompts(2), **common))
        assert torch.equal(*found)


@pytest.mark.parametrize("text", REFUSED)
def test_stacks_that_cannot_be_recorded_are_refused(text: str, model: Any) -> None:
    with kvengine.patched(model, text), pytest.raises(UnsupportedPolicy, match="cannot be recorded: '"):
        kvengine.compile_decode(model)


@pytest.mark.parametrize(
    "text", ["h2o(budget=24)", "duo(sinks=2, recent=10)", "rkv(budget=24, buffer=7, window=4)", "full"]
)
def test_what_judges_each_token_is_not_held_still_where_later_layers_read_it(text: str) -> None:
    """Be it the stack's own retention, or that of some heads."""
    held = LayerCache(Stack.parse(text), 0, 1, readers=1)
    held.forward(*(x[:, :, :30] for x in tokens()), Call(0.25))
    with pytest.raises(UnsupportedPolicy, match="later layers") if text[0] in "hd" else nullcontext():
        FixedLayer(held, 4, torch.tensor([30]))


def test_wrong_uses_are_refused(model: Any) -> None:
    with pytest.raises(ModelError, match="patch"):
        kvengine.compile_decode(model)
    with kvengine.patched(model, "full"):
        with pytest.raises(ModelError, match="CUDA graph"):
            kvengine.compile_decode(model, "graph")
        decoder = kvengine.compile_decode(model, "eager")
        with pytest.raises(ModelError, match="beams"):
            decoder.generate(**one(), num_beams=2, max_new_tokens=3)
        with pytest.raises(ModelError, match="logits only"):
            decoder.generate(**one(), output_hidden_states=True, return_dict_in_generate=True, max_new_tokens=3)
        cache = kvengine.EngineCache(model)
        with pytest.raises(CacheError, match="read its prompt"):
            decoder.open(cache, 4)
        model(one()["input_ids"], cache=cache, use_cache=True)
        steps = decoder.open(cache, 1)
        ids = torch.ones(1, 1, dtype=torch.long)
        with pytest.raises(CacheError, match="one token"):
            model(ids.expand(1, 2), cache=cache, use_cache=True)
        cache.layers[0].incoming = None
        steps(ids, 61 * ids)
        with pytest.raises(CacheError, match="fewer tokens"):
            steps(ids, 62 * ids)
        steps.close()
        assert cache.seen == 62


def test_models_that_must_be_looked_at_are_refused() -> None:
    model = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
    with kvengine.patched(model), pytest.raises(UnsupportedPolicy, match="longest position"):
        kvengine.compile_decode(model, "eager").generate(torch.ones(1, 9, dtype=torch.long), max_new_tokens=3)


class FakeGraph:
    """Stands in for a CUDA graph: capturing runs nothing, replaying runs the step again."""

    captured: Steps

    def replay(self) -> None:
        self.captured.run()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(4, EVERY))
def test_warming_up_leaves_no_trace(text: str, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way to a CUDA graph, with a stand-in for CUDA: what the steps before the capture wrote is undone."""
    runs: list[Steps] = []
    run = Steps.run

    @contextmanager
    def capture(graph: FakeGraph, stream: Any, capture_error_mode: str) -> Iterator[None]:
        """On a GPU the launches inside are noted, not run."""
        assert stream is side  # of the model's GPU, where the steps before have found memory for the library
        assert capture_error_mode == "thread_local"  # a thread that writes another cache's pages does not break it
        graph.captured = runs[-1]
        everything = runs[-1].state()
        before = [x.clone() for x in everything]
        yield
        for x, old in zip(everything, before, strict=True):
            x.copy_(old)

    def noted(self: Steps) -> Tensor:
        runs.append(self)
        self.__dict__.setdefault("logits", torch.zeros(0))
        out = run(self)
        return self.logits.resize_(out.shape).copy_(out)

    stream, side = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))
    monkeypatch.setattr(Steps, "run", noted)
    monkeypatch.setattr("kvengine.hf.steps.side_stream", lambda device, purpose: side)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *a: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda *a: nullcontext())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", FakeGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    with kvengine.patched(model, text):
        decoder = CompiledDecode(model, "graph")
        assert torch.equal(decode(model, decoder, prompts(2), 20), decode(model, None, prompts(2), 20))


def test_a_capture_that_fails_leaves_the_thread_on_its_stream(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch does not come back from one that cannot be ended."""
    here, side = (SimpleNamespace(wait_stream=lambda other: None) for _ in range(2))
    now = [here]

    @contextmanager
    def on(stream: Any) -> Iterator[None]:
        before, now[0] = now[0], stream
        try:
            yield
        finally:
            now[0] = before

    @contextmanager
    def capture(graph: FakeGraph, stream: Any, capture_error_mode: str) -> Iterator[None]:
        now[0] = stream
        yield
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr("kvengine.hf.steps.side_stream", lambda device, purpose: side)
    stand_ins = {"current_stream": lambda *a: now[0], "stream": on, "graph": capture}
    for name, value in (stand_ins | {"CUDAGraph": FakeGraph}).items():
        monkeypatch.setattr(torch.cuda, name, value)
    with kvengine.patched(model, "full"), pytest.raises(RuntimeError, match="previous error"):
        decode(model, CompiledDecode(model, "graph"), prompts(2), 4)
    assert now == [here]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", EVERY)
def test_a_graph_speaks_the_same_text(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the kernels, not their references
    model = llama().cuda()
    batch = {name: x.cuda() for name, x in prompts(2).items()}
    with kvengine.patched(model, text):
        decoder = kvengine.compile_decode(model)
        assert decoder.how == "graph"
        assert torch.equal(decode(model, decoder, batch), decode(model, None, batch))
