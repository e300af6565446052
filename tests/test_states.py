"""Models with layers that keep states (linear attention, state spaces, convolutions): what a cache is asked beside `generate`."""

import copy
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

import kvengine
from kvengine import saved
from kvengine.errors import CacheError, EvaluationError, UnsupportedPolicy
from kvengine.evals.engine import CacheSession
from kvengine.evals.together import Fed
from kvengine.evals.together import read as read_together
from kvengine.hf.layer import EngineLayer
from kvengine.hf.names import CACHE
from kvengine.hf.states import StatefulLayer, back, check_back, has_states, held_states, settle

BOTH = ("falcon_h1", "zamba2", "zaya")
"""Layers that keep states and tokens."""
ABSORBED, CONVOLVED = ("qwen3_next", "qwen3_5", *BOTH), ("lfm2",)
KERNEL = 3  # columns of lfm2's convolutions


@pytest.fixture(params=[*ABSORBED, *CONVOLVED])
def model(request: pytest.FixtureRequest) -> Any:
    return built(request.param)


def built(name: str, policy: str = "full") -> Any:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {name}")
    return kvengine.patch(configs.build(name), policy)


def stateful(cache: Any) -> list[Any]:
    return [layer for layer in cache.layers if has_states(layer)]


def read(model: Any, cache: Any, ids: torch.Tensor) -> torch.Tensor:
    """The logits [row, token, word] of further tokens."""
    with torch.no_grad():
        return torch.as_tensor(model(ids, cache=cache).logits)


def text(rows: int = 1, tokens: int = 20, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, 128, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def prompt(model: Any, ids: torch.Tensor) -> Any:
    cache = kvengine.EngineCache(model)
    read(model, cache, ids)
    return cache


class Stop(Exception):
    pass


def broken(model: Any, cache: Any, ids: torch.Tensor, module: Any) -> None:
    """A pass that stops before a module runs."""

    def stop(*_: Any) -> None:
        raise Stop

    hook = module.register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        read(model, cache, ids)
    hook.remove()


LED = ("qwen3_next", "qwen3_5", "lfm2")  # states come before the first attention


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize("name", LED)
def test_a_pass_that_broke_off_behind_the_first_states_is_noticed(
    name: str, begun: bool, tokens: int, tmp_path: Path
) -> None:
    """They have taken its tokens, and would take them again."""
    model = built(name)
    cache, new = kvengine.EngineCache(model), text(tokens=tokens, seed=2)
    if begun:
        read(model, cache, text())
        read(model, cache, text(tokens=1, seed=3))
    first = next(i for i, layer in enumerate(cache.layers) if isinstance(layer, EngineLayer))
    assert first > 0
    broken(model, cache, new, model.model.layers[first])
    for act in (
        lambda: read(model, cache, new),
        lambda: read(model, copy.deepcopy(cache), new),
        lambda: model.generate(text(tokens=30), max_new_tokens=2, cache=cache),
        lambda: saved.save(cache, tmp_path / "torn.kv", model),
        lambda: cache.rollback(0),
    ):
        with pytest.raises(CacheError, match="broke off.*cache.reset"):
            act()
    cache.reset()
    assert torch.equal(read(model, cache, text()), read(model, kvengine.EngineCache(model), text()))


@pytest.mark.parametrize("begun", [True, False])
def test_a_pass_that_broke_off_between_the_states_and_the_attention_of_a_layer_is_noticed(begun: bool) -> None:
    model = built("falcon_h1")
    cache, new = kvengine.EngineCache(model), text(tokens=3, seed=2)
    if begun:
        read(model, cache, text())
    broken(model, cache, new, model.model.layers[0].self_attn)
    with pytest.raises(CacheError, match="broke off.*cache.reset"):
        read(model, cache, new)
    cache.reset()
    assert torch.equal(read(model, cache, text()), read(model, kvengine.EngineCache(model), text()))


def test_a_pass_that_broke_off_before_the_first_states_may_be_tried_again() -> None:
    model = built("qwen3_next")
    cache, twin, new = prompt(model, text()), prompt(model, text()), text(tokens=1, seed=2)
    broken(model, cache, new, model.model.layers[0].input_layernorm)
    assert torch.equal(read(model, cache, new), read(model, twin, new))


def test_tokens_that_were_taken_back_may_come_again() -> None:
    model = built("lfm2")
    cache = prompt(model, text())
    cache.activate_past_recording()
    for seed in (2, 3):
        read(model, cache, text(tokens=3, seed=seed))
        cache.rollback(3)
    assert cache.seen == 20


def test_a_model_that_forgets_its_states_is_refused_what_would_need_them() -> None:
    """The control: transformers' own later pass is off by more than rounding, and single tokens are not."""
    model, ids = configs.build("jamba"), text(2)
    with torch.no_grad():
        want, stock = model(ids).logits, DynamicCache(config=model.config)
        model(ids[:, :11], **{CACHE: stock}, use_cache=True)
        later = model(ids[:, 11:], **{CACHE: stock}, use_cache=True).logits
    assert (later - want[:, 11:]).abs().max() > 0.1
    cache = prompt(kvengine.patch(model), ids[:, :11])
    with pytest.raises(CacheError, match="jamba over several tokens behind others begins with empty states"):
        read(model, cache, ids[:, 11:])
    with pytest.raises(CacheError, match="no prefill_chunk_size"):
        model.generate(ids, max_new_tokens=2, prefill_chunk_size=8)
    with pytest.raises(UnsupportedPolicy, match="'kvzip' has a prompt read again behind itself"):
        kvengine.patch(model, "kvzip(budget=8)")
    found = torch.cat([read(model, cache, ids[:, t : t + 1]) for t in range(11, 20)], 1)
    torch.testing.assert_close(found, want[:, 11:], rtol=1e-3, atol=1e-3)


def test_unpatched_states_are_left_alone() -> None:
    model = built("qwen3_next")
    kvengine.unpatch(model)
    assert not any(m._forward_pre_hooks for m in model.modules())


@pytest.mark.sampled(3)
@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("by", ["rollback", "crop"])
@pytest.mark.parametrize("name", ABSORBED)
def test_what_a_state_has_absorbed_is_not_taken_back(name: str, by: str, recorded: bool) -> None:
    """And the cache is as it was."""
    if recorded and name == "zaya":
        pytest.skip("its own code cannot go on with more columns of a convolution than it keeps")
    model = built(name)
    cache = prompt(model, text())
    if recorded:
        cache.activate_past_recording()
    read(model, cache, text(tokens=2, seed=2))
    with pytest.raises(CacheError, match="go back by 1 tokens: a layer with a recurrent state has absorbed.*deepcopy"):
        cache.rollback(1) if by == "rollback" else cache.crop(-1)
    twin = prompt(model, text())
    read(model, twin, text(tokens=2, seed=2))
    torch.testing.assert_close(
        read(model, cache, text(tokens=1)), read(model, twin, text(tokens=1)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("by", ["rollback", "crop"])
@pytest.mark.parametrize("before", [1, KERNEL - 1, 20])
def test_a_convolution_gives_back_what_it_recorded(before: int, by: str) -> None:
    model = built("lfm2")
    cache = kvengine.EngineCache(model)
    cache.activate_past_recording()
    read(model, cache, text(tokens=before))
    read(model, cache, text(tokens=7, seed=2))
    if by == "rollback":
        cache.rollback(2)
        cache.rollback(4)
        cache.deactivate_past_recording()
    else:
        cache.crop(-6)
    twin = prompt(model, torch.cat([text(tokens=before), text(tokens=7, seed=2)[:, :1]], 1))
    for i in range(5):
        new = text(tokens=1, seed=3 + i)
        torch.testing.assert_close(read(model, cache, new), read(model, twin, new), atol=1e-4, rtol=1e-4)


def test_one_of_several_states_that_has_absorbed_tokens_is_enough() -> None:
    """A layer may have more convolutions than recurrent states."""
    layer = LinearAttentionLayer(number_of_states=4)  # the last is none of a convolution
    layer.activate_past_recording()
    for i in range(3):
        layer.update_conv_state(torch.ones(1, 4, 9), state_idx=i, conv_kernel_size=KERNEL)
    check_back(layer, 1, 9)
    back(layer, 1)
    settle(layer)
    assert [None if x is None else x.shape[-1] for x in layer.conv_states.values()] == [KERNEL] * 3 + [None]
    layer.update_recurrent_state(torch.ones(1, 4, 4))
    with pytest.raises(CacheError, match="recurrent state has absorbed"):
        check_back(layer, 1, 9)


def test_memory_that_is_asked_for_in_advance_is_not_taken_for_states() -> None:
    model = built("falcon_h1")
    cache = kvengine.EngineCache(model)
    cache.early_initialization(1, 2, 8, torch.float32, model.device)
    assert torch.equal(read(model, cache, text()), read(model, kvengine.EngineCache(model), text()))


def test_a_prompt_shorter_than_a_convolution_that_did_not_record_stays() -> None:
    """Its columns are filled up with zeros, so that some would be left."""
    model = built("lfm2")
    cache = prompt(model, text(tokens=KERNEL - 1))
    with pytest.raises(CacheError, match="given up what would come back into it.*activate_past_recording"):
        cache.rollback(1)
    assert torch.equal(
        read(model, cache, text(tokens=1)), read(model, prompt(model, text(tokens=KERNEL - 1)), text(tokens=1))
    )


def test_a_convolution_that_did_not_record_says_so() -> None:
    model = built("lfm2")
    cache = prompt(model, text())
    with pytest.raises(CacheError, match="given up what would come back into it.*activate_past_recording"):
        cache.rollback(1)
    cache.activate_past_recording()
    read(model, cache, text(tokens=3))
    with pytest.raises(CacheError, match="go back by 4 tokens: a layer with a convolution"):
        cache.crop(-4)
    assert cache.seen == 23


def test_what_was_recorded_is_history(model: Any) -> None:
    """And its states take no more memory than any."""
    cache, twin = prompt(model, text()), prompt(model, text())
    cache.activate_past_recording()
    for each in (cache, twin):
        read(model, each, text(tokens=30, seed=2))
    cache.deactivate_past_recording()
    for a, b in zip(stateful(cache), stateful(twin), strict=True):
        for i, state in a.conv_states.items():
            assert state.shape == b.conv_states[i].shape and state.untyped_storage().nbytes() == state.nbytes
    new = text(tokens=1, seed=3)
    torch.testing.assert_close(read(model, cache, new), read(model, twin, new), atol=1e-4, rtol=1e-4)


def test_look_up_and_a_later_turn() -> None:
    """A turn by prompt look-up ends with the announcement of the next."""
    model = built("lfm2")
    cache = kvengine.EngineCache(model)
    first = model.generate(
        text().repeat(1, 2), max_new_tokens=8, do_sample=False, cache=cache, prompt_lookup_num_tokens=4
    )
    turn = torch.cat([first, text(seed=5)], 1)
    found = model.generate(turn, max_new_tokens=8, do_sample=False, cache=cache)
    assert torch.equal(found, kvengine.unpatch(model).generate(turn, max_new_tokens=8, do_sample=False))


@pytest.mark.parametrize("by", ["numbers", "mask"])
def test_rows_are_chosen_and_repeated(model: Any, by: str) -> None:
    ids, new = text(rows=3), text(rows=2, tokens=1)
    cache = prompt(model, ids)
    cache.batch_select_indices(torch.tensor([0, 2]) if by == "numbers" else torch.tensor([True, False, True]))
    found = read(model, cache, new)
    torch.testing.assert_close(found, read(model, prompt(model, ids[[0, 2]]), new), atol=1e-4, rtol=1e-4)
    cache.batch_repeat_interleave(2)
    found = read(model, cache, new.repeat_interleave(2, 0))
    twin = prompt(model, ids[[0, 0, 2, 2]])
    read(model, twin, new.repeat_interleave(2, 0))
    want = read(model, twin, new.repeat_interleave(2, 0))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("where", ["pass", "choice of rows"])
def test_inference_mode_may_end(model: Any, where: str) -> None:
    cache = kvengine.EngineCache(model)
    ids, new = text(rows=2), text(rows=2, tokens=1)
    with torch.inference_mode(where == "pass"):
        model(ids, cache=cache)
    with torch.inference_mode():
        cache.reorder_cache(torch.tensor([1, 0]))
    torch.testing.assert_close(
        read(model, cache, new), read(model, prompt(model, ids[[1, 0]]), new), atol=1e-4, rtol=1e-4
    )


def test_a_cache_that_was_reset_takes_other_rows(model: Any) -> None:
    cache = prompt(model, text(rows=2))
    cache.activate_past_recording()
    cache.reset()
    assert not cache.seen and not any(layer.record_past for layer in stateful(cache))
    ids = text(rows=3)
    assert torch.equal(read(model, cache, ids), read(model, kvengine.EngineCache(model), ids))


def test_a_copy_goes_on_by_itself(model: Any) -> None:
    """As who wants to take tokens back is told to make one."""
    cache = prompt(model, text())
    twin, new = copy.deepcopy(cache), text(tokens=3)
    want = read(model, cache, new)
    assert torch.equal(read(model, twin, new), want)


def test_what_another_model_is_refused_stays_as_it_was(model: Any) -> None:
    """States come before the first layer that would notice, and had taken the other's tokens."""
    other, cache = copy.deepcopy(model), prompt(model, text())
    want = copy.deepcopy(cache)
    with pytest.raises(CacheError, match="made for another model"):
        read(other, cache, text(1, 3))
    assert torch.equal(read(model, cache, text(1, 3, seed=2)), read(model, want, text(1, 3, seed=2)))
    assert read(other, prompt(other, text()), text(1, 3)).isfinite().all()


WHOLE = (
    "h2o(budget=4096)",
    "quest(budget=4096, page=4)",
    "snapkv(budget=4096, window=4)",
    "kvzip(budget=4096)",
    "streaming",
)
DROPS = (
    "snapkv(budget=12, window=4)",
    "quest(budget=8, page=4) + kivi(bits=4, group=4)",
    "h2o(budget=8)",
    "kvzip(budget=12)",
)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", WHOLE)
@pytest.mark.parametrize("name", BOTH)
def test_tokens_beside_states_are_under_a_policy(name: str, policy: str) -> None:
    """One that leaves nothing out gives the model's own text. A replay leaves states as they were."""
    want = kvengine.unpatch(built(name)).generate(**configs.padded_batch(), max_new_tokens=24, do_sample=False)
    model = built(name, policy)
    cache = kvengine.EngineCache(model)
    found = model.generate(**configs.padded_batch(), max_new_tokens=24, do_sample=False, cache=cache)
    assert torch.equal(found, want)
    assert {type(layer) for layer in stateful(cache)} >= {StatefulLayer}
    assert int(cache.stats().held.max()) == 20 + 24 - 1


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", DROPS)
@pytest.mark.parametrize("name", BOTH)
def test_each_row_is_as_it_is_alone(name: str, policy: str) -> None:
    """Prompt, decoded tokens and a second turn; rows alone have no padding."""
    model, batch = built(name, policy), configs.padded_batch()
    new = text(3, 5, seed=7)

    def logits(rows: slice, pad: int) -> torch.Tensor:
        cache, mask = kvengine.EngineCache(model), batch["attention_mask"][rows, pad:]
        out, after = [], [*new[rows].split(1, 1), new[rows]]
        with torch.no_grad():
            out.append(model(batch["input_ids"][rows, pad:], attention_mask=mask, cache=cache).logits[:, -1:])
            for ids in after:
                mask = torch.cat([mask, torch.ones_like(ids)], 1)
                out.append(model(ids, attention_mask=mask, cache=cache).logits[:, -1:])
        assert int(cache.stats().held.max()) < 30 or "quest" in policy
        return torch.cat(out, 1)

    together = logits(slice(None), 0)
    for row in range(3):
        pad = int((batch["attention_mask"][row] == 0).sum())
        alone = logits(slice(row, row + 1), pad)
        torch.testing.assert_close(together[row : row + 1], alone, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("name", BOTH)
def test_a_policy_reads_what_streaming_names(name: str) -> None:
    """The oracle: the model's own attention under the full cache, with a mask that hides what was dropped."""
    from transformers import AttentionInterface

    sinks, recent, prompt_length = 2, 6, 20
    ids = text(1, prompt_length + 12)

    def masked(module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: Any = None, **_: Any) -> Any:
        n, m, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        at, own = torch.arange(m), torch.arange(m - n, m)[:, None]
        seen = at <= own
        if getattr(module, "sliding_window", None):
            seen &= own - at < 8
        elif n == 1:  # a prompt reads everything
            seen &= (at < sinks) | (own - at <= recent)  # a query reads what was held before it came
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q @ k.transpose(2, 3) * scaling).masked_fill(~seen, float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2), None

    AttentionInterface.register("masked-oracle", masked)
    stock = kvengine.unpatch(built(name))
    stock.set_attn_implementation("masked-oracle")
    model = built(name, f"streaming(sinks={sinks}, recent={recent})")
    caches, found = (None, kvengine.EngineCache(model)), []
    for one, cache in zip((stock, model), caches, strict=True):
        logits = []
        with torch.no_grad():
            out = one(ids[:, :prompt_length], **{CACHE: cache}, use_cache=True)
            for i in range(prompt_length, ids.shape[1]):
                out = one(ids[:, i : i + 1], **{CACHE: out[CACHE]}, use_cache=True)
                logits.append(out.logits)
        found.append(torch.cat(logits, 1))
    torch.testing.assert_close(found[1], found[0], atol=1e-4, rtol=1e-4)


SHARED = ["full", "snapkv(budget=16, window=2)", "kivi(bits=4, group=8, residual=8)", "quest(budget=16, page=4)"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*BOTH, "qwen3_next", "lfm2", "gemma3", "gpt_oss"])
def test_a_shared_context_is_given_with_its_windows_and_states(name: str) -> None:
    """To each policy's cache, which goes on as if it had read it; and to none if it is not all of it."""
    model, contexts = built(name), text(2, 40)
    with torch.inference_mode():
        reading = read_together(model, contexts.tolist())
    question = torch.cat([contexts, text(2, 5, seed=2)], 1)
    for policy, prompts in product(SHARED, (question, contexts, question[:, 3:])):
        with kvengine.patched(model, policy):
            fed, own = (CacheSession(model, kvengine.EngineCache(model)) for _ in range(2))
            given = Fed(fed, reading)
            for tokens in (prompts, *text(2, 3, seed=3).split(1, 1)):
                torch.testing.assert_close(given.rows(tokens), own.rows(tokens), atol=5e-3, rtol=5e-3)
            found = [[(x.held, x.attended) for x in session.usages()] for session in (given, own)]
            assert found[0] == found[1]


def test_a_context_is_not_shared_where_layers_read_anothers_tokens() -> None:
    with pytest.raises(EvaluationError, match="another layer's tokens"):
        read_together(built("gemma3n"), text(1, 40).tolist())


@pytest.mark.parametrize("name", BOTH)
def test_states_of_what_was_reset_are_new(name: str) -> None:
    model = built(name, "h2o(budget=12)")
    cache = prompt(model, text())
    assert held_states(stateful(cache)[0])
    cache.reset()
    assert not any(held_states(layer) for layer in stateful(cache))
    assert torch.equal(read(model, cache, text(seed=4)), read(model, kvengine.EngineCache(model), text(seed=4)))


RAGGED = ("qwen3_next", "lfm2", "falcon_h1", "zamba2")  # windows, as zaya has, are transformers' own and hold padding


def ragged(model: Any, rows: list[int], loop: bool) -> list[torch.Tensor]:
    """Two later turns of 7, 3 and 1, then 2, 6 and 4 new tokens, and a decoded one that some have: what each says last."""
    batch, out = configs.padded_batch(), []
    ids, mask = batch["input_ids"][rows], batch["attention_mask"][rows]
    start = int((mask.sum(0) > 0).int().argmax())
    ids, mask = ids[:, start:], mask[:, start:]
    cache, begin = kvengine.EngineCache(model), 0
    for turn, counts in enumerate(((20, 20, 20), (7, 3, 2), (2, 6, 4), (1, 0, 1))):
        if turn:
            have = torch.tensor(counts)[rows]
            new = text(3, 20, seed=turn)[rows][:, -int(have.max()) :] if have.max() else ids[:, :0]
            here = torch.arange(new.shape[1]) >= new.shape[1] - have[:, None]
            ids, mask = torch.cat([ids, new * here], 1), torch.cat([mask, here.long()], 1)
        if ids.shape[1] == begin:
            continue
        at = (mask.cumsum(1) - 1).clamp(min=0)
        with torch.no_grad():
            for end in range(begin + 1, ids.shape[1] + 1) if loop else [ids.shape[1]]:
                logits = model(
                    ids[:, begin:end], attention_mask=mask[:, :end], position_ids=at[:, begin:end], **{CACHE: cache}
                ).logits
                begin = end
        out.append(logits[:, -1])
    return out


@pytest.mark.sampled(3)
@pytest.mark.parametrize("policy", ["full", "h2o(budget=16)", "kvzip(budget=16, chunk=8, carry=2)"])
@pytest.mark.parametrize("name", RAGGED)
def test_padding_in_a_later_turn_leaves_states_alone(name: str, policy: str) -> None:
    """A state knows no mask: behind other tokens padding would shift its columns, and let it fade."""
    model = built(name, policy)
    together = ragged(model, [0, 1, 2], False)
    for row in range(3):
        alone = ragged(model, [row], False)
        for turn, found in enumerate(alone):
            torch.testing.assert_close(together[turn][row], found[0], atol=2e-4, rtol=2e-4)


ONE, SILENT = ([1], [1], [1]), [0]
TURNS = [  # of three rows, which of a pass's columns are tokens: some bring a single one, wherever it stands
    ([1] * 20, [0] * 3 + [1] * 17, [0] * 7 + [1] * 13), ONE, ONE,
    ([1] * 7, [0] * 4 + [1] * 3, [0] * 6 + [1]), ONE, ONE,
    ([1] + [0] * 5, [1, 0, 1, 1, 0, 1], [0, 0, 1, 0, 0, 0]), ONE,
    ([0, 1, 0], [1, 0, 0], [0, 0, 0]), ONE, ([1], SILENT, [1]), ONE,
    ([1] * 4, [1, 0, 0, 0], [0] * 4), ONE, ONE,
]  # fmt: skip


def said(model: Any, rows: list[int], **options: Any) -> list[list[torch.Tensor]]:
    """What these rows say of their tokens, turn by turn; a single one comes without padding."""
    cache, mask, out = kvengine.EngineCache(model), torch.zeros(len(rows), 0, dtype=torch.long), []
    for turn, tokens in enumerate(TURNS):
        real = torch.tensor(tokens)[rows]
        here = real.any(0) | (len(rows) > 1)
        new, real = text(3, real.shape[1], seed=turn)[rows][:, here], real[:, here]
        mask = torch.cat([mask, real], 1)
        if not real.shape[1]:
            continue
        at = (mask.cumsum(1) - 1).clamp(min=0)[:, -real.shape[1] :]
        with torch.no_grad():
            logits = model(new, attention_mask=mask, position_ids=at, **{CACHE: cache}, **options)[0]
        assert cache.session.parts is None and cache.session.ragged is None
        out.append([row[some] for row, some in zip(logits, real.bool(), strict=True)])
    return out


@pytest.mark.sampled(5)
@pytest.mark.parametrize("policy", [
    "snapkv(budget=6, window=2)", "tova(budget=6) + kivi(bits=4, group=8, residual=8)", "kvzip(budget=6, chunk=8, carry=2)",
    "zipcache(block=8, probes=0.5)", "duo(sinks=2, recent=4) + quest(budget=8, page=4)", "h2o(budget=6) + host",
])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_next", "lfm2", "falcon_h1"])
def test_a_row_with_one_token_in_a_turn_goes_on_decoding(name: str, policy: str) -> None:
    """As it does alone, though what comes for the others is read in parts."""
    model = built(name, policy)
    together = said(model, [0, 1, 2])
    for row in range(3):
        alone = iter(said(model, [row]))
        for found in together:
            if len(found[row]):
                torch.testing.assert_close(found[row], next(alone)[0], atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("made", ["ids", "vectors", "tuple"])
def test_what_a_model_says_of_single_tokens_stands_where_they_are(made: str) -> None:
    """In all that it returns; it counts them itself where it is given no positions."""
    model, found = built("lfm2", "snapkv(budget=6, window=2)"), []
    first, new, mask = text(2), text(2, 4, seed=2), torch.ones(2, 24, dtype=torch.long)
    mask[1, 20:22] = mask[1, 23] = 0
    for alone in (False, True):
        cache, rows, columns = kvengine.EngineCache(model), slice(alone, 2), slice(2, 3) if alone else slice(4)
        read(model, cache, first[rows])
        ids = new[rows, columns]
        given = {"inputs_embeds": model.get_input_embeddings()(ids)} if made == "vectors" else {"input_ids": ids}
        if alone:
            given |= {"position_ids": torch.tensor([[22]])}
        else:
            given |= {"attention_mask": mask}
        out = model(**given, **{CACHE: cache}, output_hidden_states=True, return_dict=made != "tuple")
        states = next(x for x in out if isinstance(x, tuple)) if made == "tuple" else out.hidden_states
        found.append([x[-1, 0 if alone else 2] for x in (out[0], *states)])
    assert len(found[0]) == model.config.num_hidden_layers + 2
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("policy", ["full", "snapkv(budget=6, window=2)"])
@pytest.mark.parametrize("columns", [[0, 3], [2]])
def test_what_routers_of_experts_say_is_told_token_by_token(policy: str, columns: list[int]) -> None:
    """They say it without an axis for rows, where a pass is read in parts too."""
    model, found = built("qwen3_next", policy), []
    first, new, mask = text(2), text(2, 4, seed=2), torch.ones(2, 24, dtype=torch.long)
    mask[1, 20:] = torch.isin(torch.arange(4), torch.tensor(columns)).long()
    for row in (0, 1, None):
        rows, some = slice(None) if row is None else slice(row, row + 1), columns if row else slice(None)
        cache = kvengine.EngineCache(model)
        read(model, cache, first[rows])
        at = (mask.cumsum(1) - 1)[:, 20:]
        given: dict[str, Any] = {"attention_mask": mask} if row is None else {}
        given |= {"position_ids": at[rows][:, some], "output_router_logits": True}
        out = model.model(new[rows][:, some], **{CACHE: cache}, **given).router_logits
        found.append([x.unflatten(0, (2 if row is None else 1, -1)) for x in out])
    for one, other, both in zip(*found, strict=True):
        torch.testing.assert_close(both[0], one[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(both[1, columns], other[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_single_token_that_was_taken_before_a_pass_broke_off_is_noticed(name: str, part: int, tmp_path: Path) -> None:
    """No layer has counted it by then; of a part behind others, states have taken what none has counted."""
    model = built(name, "snapkv(budget=6, window=2)")
    cache, new, mask = prompt(model, text(2)), text(2, 4, seed=2), torch.ones(2, 24, dtype=torch.long)
    mask[1, 20:23] = 0
    mask[0, 22] = int(part < 2)
    passes, layers = iter(range(9)), model.model.layers
    attention = next(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))

    def stop(*_: Any) -> None:
        if next(passes) == part:  # the first is the single token's
            raise Stop

    hook = (layers[-1], layers[0], attention)[part].register_forward_pre_hook(stop)
    with pytest.raises(Stop), torch.no_grad():
        model(new, attention_mask=mask, **{CACHE: cache})
    hook.remove()
    for act in (
        lambda: saved.save(cache, tmp_path / "torn.kv", model),
        lambda: cache.rollback(0),
        lambda: model(new, attention_mask=mask, **{CACHE: copy.deepcopy(cache)}),
        lambda: read(model, cache, new),
    ):
        with pytest.raises(CacheError, match="broke off.*cache.reset"):
            act()
    cache.reset()
    assert torch.equal(read(model, cache, text(2)), read(model, kvengine.EngineCache(model), text(2)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", RAGGED)
def test_nor_does_it_token_by_token(name: str) -> None:
    model = built(name)
    for one, other in zip(ragged(model, [0, 1, 2], True)[1:], ragged(model, [0, 1, 2], False)[1:], strict=True):
        near = 5e-3 if name == "zamba2" else 2e-4  # whose own steps differ so from a pass over many tokens
        torch.testing.assert_close(one[[0, 2]], other[[0, 2]], atol=near, rtol=near)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "policy", ["zipcache(block=8, probes=0.5)", "duo(sinks=2, recent=10) + zipcache(block=8, probes=0.5)"]
)
@pytest.mark.parametrize("name", ["lfm2", "falcon_h1"])
def test_queries_that_are_asked_for_a_prompt_are_those_of_a_row_alone(name: str, policy: str) -> None:
    """They are chosen by how far from its end they are, which later padding of a row brings nearer. The pass comes in parts."""
    model, parts = built(name, policy).double(), []
    later = torch.ones(3, 31, dtype=torch.long)
    later[0, 1:9] = later[1, 0] = later[2, 3:5] = later[2, 7:20] = 0
    turns = [(text(3, 40), torch.ones(3, 40, dtype=torch.long)), (text(3, 31, seed=2), later)]
    turns[0][1][1, :11] = 0
    turns += [(ids, torch.ones(3, 1, dtype=torch.long)) for ids in text(3, 4, seed=3).split(1, 1)]

    def logits(rows: list[int]) -> torch.Tensor:
        cache, mask, out = kvengine.EngineCache(model), torch.zeros(len(rows), 0, dtype=torch.long), []
        for ids, real in turns:
            ids, real = ids[rows], real[rows]
            keep = real[0].bool() | (len(rows) > 1)
            ids, mask = ids[:, keep], torch.cat([mask, real[:, keep]], 1)
            at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            with torch.no_grad():
                out.append(model(ids, attention_mask=mask, position_ids=at, **{CACHE: cache}).logits[:, -1])
            parts.append(cache.session.parts)
        return torch.stack(out, 1)

    together = logits([0, 1, 2])
    for row in range(3):
        torch.testing.assert_close(together[row : row + 1], logits([row]), atol=1e-5, rtol=1e-5)
    assert parts == [None] * len(parts)  # what one pass was told is not told to the next


def test_so_they_cannot_be_where_padding_follows_an_earlier_pass_of_the_prompt() -> None:
    model = built("lfm2", "zipcache(block=8, probes=0.5)")
    cache = kvengine.EngineCache(model)
    cache.announce(30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 22:25] = 0
    with torch.no_grad():
        model(text(2, 20), attention_mask=mask[:, :20], **{CACHE: cache})
        with pytest.raises(CacheError, match="padding follows tokens.*earlier chunk"):
            model(text(2, 10), attention_mask=mask, **{CACHE: cache})


def test_padding_is_not_left_out_where_a_convolution_records() -> None:
    model, batch = built("lfm2"), configs.padded_batch()
    cache = kvengine.EngineCache(model)
    mask = torch.cat([batch["attention_mask"], torch.tensor([[1, 1], [0, 1], [1, 1]])], 1)
    with torch.no_grad():
        model(**batch, **{CACHE: cache})
        cache.activate_past_recording()
        with pytest.raises(CacheError, match="records its columns.*deactivate_past_recording"):
            model(text(3, 2), attention_mask=mask, **{CACHE: cache})
        cache.deactivate_past_recording()
        assert model(text(3, 2), attention_mask=mask, **{CACHE: cache}).logits.shape[1] == 2


@pytest.mark.parametrize("part", [0, 1])
def test_a_pass_in_parts_that_breaks_off_is_noticed(part: int) -> None:
    model, batch, count = built("qwen3_next"), configs.padded_batch(), []
    cache = kvengine.EngineCache(model)
    mask = torch.cat([batch["attention_mask"], torch.tensor([[1, 1, 1], [0, 0, 1], [1, 1, 1]])], 1)

    def stop(*_: Any) -> None:
        count.append(None)
        if len(count) > part:
            raise Stop

    with torch.no_grad():
        model(**batch, **{CACHE: cache})
        hook = model.model.layers[2].register_forward_pre_hook(stop)
        with pytest.raises(Stop):
            model(text(3, 3), attention_mask=mask, **{CACHE: cache})
        hook.remove()
        with pytest.raises(CacheError, match="broke off"):
            model(text(3, 3), attention_mask=mask, **{CACHE: cache})
        cache.reset()
        assert model(**batch, **{CACHE: cache}).logits.isfinite().all()
