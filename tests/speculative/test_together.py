"""Several sequences decoded at once: each row's text is the one it has alone, and the weights are read once for all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from families import configs
from support_spec import llama, plain_sampling, prompt
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
)

import kvengine
from kvengine.errors import ModelError
from kvengine.hf.cache import EngineCache
from kvengine.hf.names import CACHE
from kvengine.speculative.accept import Draft
from kvengine.speculative.clock import Watch
from kvengine.speculative.run import padded, texts
from kvengine.speculative.session import Asks, Logits, Pass, Session
from kvengine.speculative.together import PackedCache, packed, packs, together
from kvengine.speculative.triforce import TriForce

MIDDLES = [
    None,
    "full",
    "quest(budget=24, page=4)",
    "snapkv(budget=24, window=4)",
    "streaming(sinks=4, recent=20)",
    "kivi(bits=4, group=8, residual=8)",
    "h2o(budget=24)",
]
LENGTHS = (90, 64, 76, 88)


@pytest.fixture(scope="module")
def target() -> Any:
    return kvengine.patch(llama())


@pytest.fixture(scope="module")
def small() -> Any:
    return llama(1, layers=1)


def row(number: int) -> Tensor:
    return prompt(LENGTHS[number], seed=number)


def batch() -> dict[str, Tensor]:
    """Rows of different lengths, padded on the left."""
    most = max(LENGTHS)
    ids = torch.cat([torch.nn.functional.pad(row(n), (most - length, 0)) for n, length in enumerate(LENGTHS)])
    mask = torch.stack([torch.arange(most) >= most - length for length in LENGTHS]).long()
    return {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


@contextmanager
def counted(*models: Any) -> Iterator[list[tuple[Any, int, bool]]]:
    """Every forward pass: the model, how many tokens, and whether they are of several rows."""
    seen: list[tuple[Any, int, bool]] = []

    def note(model: Any, args: Any, kwargs: Any) -> None:
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        seen.append((model, ids.shape[1], isinstance(kwargs[CACHE], PackedCache)))

    hooks = [model.register_forward_pre_hook(note, with_kwargs=True) for model in models]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "middle, mode",
    [
        *((middle, "coupled") for middle in MIDDLES),
        *((m, mode) for m in MIDDLES[2:4] for mode in ("greedy", "sampled")),
    ],
)
def test_a_row_is_in_a_batch_what_it_is_alone(target: Any, middle: str | None, mode: str) -> None:
    decoder = TriForce(target, "lookup", middle, gamma=(2, 4))
    options: dict[str, Any] = {"do_sample": False} if mode == "greedy" else {"temperature": 0.9, "top_k": 0, "seed": 4}
    options |= {"coupled": True} if mode == "coupled" else {}
    new = 14
    with counted(target) as passes:
        out = decoder.generate(**batch(), max_new_tokens=new, **options)
    found = [out[n, max(LENGTHS) - length :].tolist() for n, length in enumerate(LENGTHS)]
    if mode == "greedy":
        alone = [target.generate(row(n), max_new_tokens=new, do_sample=False)[0].tolist() for n in range(4)]
    elif mode == "coupled":
        alone = [plain_sampling(target, row(n), new, seed=4, temperature=0.9, row=n) for n in range(4)]
    else:  # the draws of a row depend on its place, so only the first can be had alone
        found, alone = found[:1], [decoder.generate(row(0), max_new_tokens=new, **options)[0].tolist()]
    assert found == alone
    asked = sum(tier.passes for tier in decoder.report.tiers) + 4 if mode != "sampled" else len(passes) + 1
    assert len(passes) < asked and any(shared for *_, shared in passes)


def test_passes_are_shared_and_the_draft_goes_first(target: Any, small: Any) -> None:
    """Four rows in step: as many target passes as the slowest row needs, not as all of them need."""
    decoder = TriForce(target, small, None, gamma=(1, 3))
    with counted(target, small) as passes:
        decoder.generate(**batch(), max_new_tokens=12, do_sample=False)
    rounds = decoder.report.tiers[0].passes
    mine = [tokens for model, tokens, _ in passes if model is target][4:]  # the prompts apart
    assert len(mine) <= 11 and sum(mine) == decoder.report.tiers[0].fed and rounds > 2 * len(mine)
    drafts = [tokens for model, tokens, _ in passes if model is small][4:]
    assert sum(drafts) == decoder.report.tiers[1].fed and drafts[0] >= 4


def test_an_end_in_one_row_stops_no_other(target: Any) -> None:
    given = batch()
    free = target.generate(**given, max_new_tokens=24, do_sample=False)
    end = int(free[1, max(LENGTHS) + 3])
    expected = target.generate(**given, max_new_tokens=24, do_sample=False, eos_token_id=end)
    lengths = [(line[max(LENGTHS) :] == end).nonzero() for line in expected]
    assert len(lengths[1]) and any(not len(found) or int(found[0]) > 8 for found in lengths)
    for middle in MIDDLES[:3]:
        decoder = TriForce(target, "lookup", middle, gamma=(2, 4))
        out = decoder.generate(**given, max_new_tokens=24, do_sample=False, eos_token_id=end)
        assert out.tolist() == expected.tolist()


class Lengths(StoppingCriteria):
    """Each row has its own."""

    def __init__(self, most: list[int]) -> None:
        self.most = torch.tensor(most)

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return input_ids.shape[1] >= self.most


def test_criteria_that_tell_rows_apart_end_each_by_its_own(target: Any) -> None:
    most = max(LENGTHS)
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": 1}
    options["stopping_criteria"] = [Lengths([most + 2, most + 9, most + 5, most + 30])]
    want = target.generate(**batch(), **options)
    assert not want[0, most + 2 :].any() and want[1, most + 5 : most + 9].any() and want[3, most + 9 :].any()
    for middle in MIDDLES[:3]:
        assert torch.equal(TriForce(target, "lookup", middle, gamma=(2, 4)).generate(**batch(), **options), want)


@pytest.mark.parametrize(
    "kind, middle", [("recycling", None), ("recycling", MIDDLES[2]), ((3, 2, 1), None), ((3, 2, 1), MIDDLES[1])]
)
def test_trees_in_a_batch(target: Any, small: Any, kind: Any, middle: str | None) -> None:
    draft, widths = ("recycling", None) if kind == "recycling" else (small, kind)
    decoder = TriForce(target, draft, middle, gamma=(3, 3), widths=widths)
    out = decoder.generate(**batch(), max_new_tokens=10, temperature=1.0, top_k=0, seed=2, coupled=True)
    for n, length in enumerate(LENGTHS):
        assert out[n, max(LENGTHS) - length :].tolist() == plain_sampling(target, row(n), 10, seed=2, row=n)


def test_one_store_for_both_in_a_batch(target: Any) -> None:
    options: dict[str, Any] = {"stack": "quantspec(group=8, residual=8)"}
    decoder = TriForce(target, "lookup", "quantspec(bits=4, group=8, residual=8)", gamma=(2, 4), **options)
    out = decoder.generate(**batch(), max_new_tokens=12, do_sample=False)
    for n, length in enumerate(LENGTHS):
        alone = TriForce(target, None, None, **options).generate(row(n), max_new_tokens=12, do_sample=False)
        assert out[n, max(LENGTHS) - length :].tolist() == alone[0].tolist()


def test_lengths_decided_at_run_time_in_a_batch(target: Any, small: Any) -> None:
    for draft in ("lookup", small):
        decoder = TriForce(target, draft, "quest(budget=24, page=4)", gamma="auto")
        out = decoder.generate(**batch(), max_new_tokens=16, do_sample=False)
        assert out.tolist() == target.generate(**batch(), max_new_tokens=16, do_sample=False).tolist()


SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "initializer_range": 0.3, "pad_token_id": None, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip


def family(name: str) -> Any:
    torch.manual_seed(0)
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=8)).eval()
    if name == "neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**SHAPE)).eval()
    if name in configs.FAMILIES:
        return configs.build(name)
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=2, rope_parameters=rope)).eval()


@pytest.mark.parametrize("name, together", [("qwen3", True), ("neox", True), ("gpt2", True), ("dynamic", False)])
def test_families_and_the_way_back_to_one_row_at_a_time(name: str, together: bool) -> None:
    model = kvengine.patch(family(name))
    assert packs(model) is together
    decoder = TriForce(model, "lookup", "quest(budget=24, page=4)", gamma=(2, 4))
    with counted(model) as passes:
        out = decoder.generate(**batch(), max_new_tokens=10, do_sample=False)
    assert any(shared for *_, shared in passes) is together
    for n, length in enumerate(LENGTHS):
        alone = model.generate(row(n), max_new_tokens=10, do_sample=False)
        assert out[n, max(LENGTHS) - length :].tolist() == alone[0].tolist()


@pytest.mark.parametrize("gamma", [(6, 2), (4, 4)])
@pytest.mark.parametrize("middle", ["full", "quest(budget=40, page=4)"])
def test_a_text_that_fills_all_positions_of_its_model_is_drafted_to_its_end(
    middle: str, gamma: tuple[int, int]
) -> None:
    """Behind the last there is no position, and a middle's round may give more tokens than are asked for."""
    config = GPT2Config(**{**SHAPE, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64})
    torch.manual_seed(0)
    model = kvengine.patch(GPT2LMHeadModel(config).eval())
    for length in (40, 52, 58):
        options = {"max_length": 64, "do_sample": False, "pad_token_id": 0}
        decoder = TriForce(model, "lookup", middle, gamma)
        assert torch.equal(decoder.generate(prompt(length), **options), model.generate(prompt(length), **options))


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3n", "gemma3", "lfm2"])
def test_latents_shared_keys_windows_and_states_are_read_row_by_row(name: str) -> None:
    assert not packs(configs.build(name))


@pytest.mark.parametrize("more", [{"rope_type": "longrope"}, {"rope_type": "default", "mrope_section": [2, 1, 1]}])
def test_so_are_rotations_that_a_passs_other_tokens_would_change(more: dict[str, Any]) -> None:
    config = LlamaConfig(**SHAPE)
    assert packs(SimpleNamespace(config=config))
    config.rope_parameters = {"rope_theta": 1e4, **more}
    assert not packs(SimpleNamespace(config=config))
    # Of models that rotate each kind of layers in its own way.
    config.rope_parameters = {"full_attention": {"rope_theta": 1e4, **more}}
    assert not packs(SimpleNamespace(config=config))


def test_one_pass_for_all_says_what_one_for_each_says(target: Any) -> None:
    """Chains and trees of different sizes side by side; and the caches hold the same afterwards."""
    tree = Draft([5, 6, 7], [-1, -1, 0], [None] * 4, [1.0] * 3)

    def asks() -> list[Pass]:
        found = []
        for n in range(4):
            session = Session(target, EngineCache(target, "full"))
            session.prefill(row(n)[0].tolist())
            work = session.feeding_tree([3, 4], tree) if n == 2 else session.feeding([9, 8, 7, 6][: n + 1], n or 1)
            found.append(next(work))
        return found

    mine, ours = asks(), asks()
    for alone, side in zip([ask.run() for ask in mine], packed(ours), strict=True):
        torch.testing.assert_close(alone, side, rtol=1e-5, atol=1e-5)
    for a, b in zip(mine, ours, strict=True):
        one, many = a.session, b.session
        assert (one.passes, one.fed, one.shares) == (many.passes, many.fed, 4 * many.shares) and one.passes == 1
        for left, right in zip(a.session.cache.engines, b.session.cache.engines, strict=True):
            assert left.seen == right.seen
            for x, y in zip(left.contents(), right.contents(), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_a_watch_runs_for_its_own_sequence_and_a_share_of_what_is_done_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    time, session = [0.0], SimpleNamespace(model=torch.nn.Identity())

    def work(own: float) -> Asks[float]:
        time[0] += own
        yield Pass(session, [1])  # type: ignore[arg-type]
        time[0] += own
        return own

    def run(passes: list[Pass]) -> list[Logits]:
        time[0] += 10
        return [torch.zeros(1, 1)] * len(passes)

    monkeypatch.setattr("kvengine.speculative.together.run", run)
    for module in ("clock", "together"):
        monkeypatch.setattr(f"kvengine.speculative.{module}.now", lambda: (time[0], 2 * time[0]))
    watches, time[0] = (Watch(), Watch()), 3.0  # what came before is of each
    assert together([(work(own), watch) for own, watch in zip((1.0, 2.0), watches, strict=True)]) == [1.0, 2.0]
    time[0] += 100
    assert [watch() for watch in watches] == [(3.0 + 2 + 5, 20.0), (3.0 + 4 + 5, 24.0)]


class Heard:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.parts: list[Tensor] = []

    def put(self, value: Tensor) -> None:
        self.parts.append(value.flatten().clone())

    def end(self) -> None:
        self.parts.append(torch.tensor([-1]))


@pytest.mark.parametrize("new", [1, 9])
def test_a_padded_row_is_as_long_as_it_is_without_a_draft_and_is_streamed_so(target: Any, new: int) -> None:
    ids = torch.nn.functional.pad(row(1), (7, 0))
    mask, ways = (torch.arange(ids.shape[1]) >= 7).long()[None], []
    for model in (target, TriForce(target, "lookup", None, gamma=(2, 4))):
        heard = Heard()
        out = model.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, streamer=heard, pad_token_id=0
        )
        ways.append((out.tolist(), torch.cat(heard.parts).tolist()))
    assert ways[0] == ways[1] and len(ways[1][0][0]) == ids.shape[1] + new


def test_rows_are_read_without_their_padding_and_made_as_long_as_each_other() -> None:
    ids, mask = torch.tensor([[0, 0, 5], [6, 7, 8]]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert [(text.tokens, text.padding) for text in texts(ids, mask)] == [([5], [0, 0]), ([6, 7, 8], [])]
    with pytest.raises(ModelError, match="row 1 of the batch has no token"):
        list(texts(ids, torch.tensor([[0, 1, 1], [0, 0, 0]])))
    for pad, ends, want in ((3, 9, 3), (0, 9, 0), (None, 9, 9), (None, [8, 9], 8), (None, None, 0)):
        for given in [ends] if ends is None else [ends, torch.tensor(ends), numpy.array(ends)[()]]:
            config = SimpleNamespace(pad_token_id=pad, eos_token_id=given)
            assert padded([[4], [5, 6]], config, torch.device("cpu")).tolist() == [[4, want], [5, 6]]
