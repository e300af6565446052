"""Models whose heads share latents (MLA): absorbed attention is the model's own, and every policy works on latents."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from families import configs
from support import SMALL, every
from support_device import pretended, there
from torch import Tensor, nn
from transformers import DynamicCache

import kvengine
from kvengine import latent, nested, saved, tail
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, KernelError, UnsupportedPolicy
from kvengine.hf.names import CACHE
from kvengine.kernels import dispatch
from kvengine.kernels.attention import attention
from kvengine.lane import Lane
from kvengine.speculative.triforce import TriForce
from kvengine.stack import Stack

NAMES = [name for name, family in configs.FAMILIES.items() if "latent" in family.caches and configs.exists(name)]
WHOLE = [
    "streaming(recent=500)", "h2o(budget=500)", "tova(budget=500)", "snapkv(budget=500)", "pyramidkv(budget=500)",
    "adakv(budget=500)", "keydiff(budget=500)", "d2o(budget=500)", "elastic(budget=500)", "quest(budget=500)",
    "landmarks(budget=500)", "retrieval(budget=500)", "oracle_topk(budget=500)", "host", "host + quest(budget=500)",
    "snapkv(budget=500) + quest(budget=500)",
]  # fmt: skip


LATENT = [text for kind, text in SMALL.items() if kind not in ("disk", "remote")]
"""Every second is in one of the two tests below, the others are in the other."""


def attentions(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if latent.is_latent(module)]


def greedy(model: Any, count: int = 12, **options: Any) -> Tensor:
    out: Tensor = model.generate(**configs.padded_batch(), max_new_tokens=count, do_sample=False, **options)
    return out


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_absorbed_attention_is_attention_over_what_is_made_of_latents(name: str, queries: int) -> None:
    module, rng = attentions(configs.build(name))[0].double(), torch.Generator().manual_seed(0)
    heads, rank, wide = module.num_heads, module.kv_lora_rank, module.qk_nope_head_dim + module.qk_rope_head_dim
    query = torch.randn(2, heads, queries, wide, generator=rng, dtype=torch.float64)
    latents = torch.randn(2, 1, 11, rank + module.qk_rope_head_dim, generator=rng, dtype=torch.float64)
    causal = torch.ones(queries, 11, dtype=torch.bool).tril(11 - queries)[None, None]
    seen = causal & (torch.rand(2, 1, 1, 11, generator=rng) < 0.7) | (torch.arange(11) == 2)
    k, v = latent.expanded(module, latents)
    for mask in (None, seen):
        weights = (query @ k.mT * 0.3).masked_fill(~(causal if mask is None else mask), -torch.inf).softmax(-1)
        want = (weights @ v).transpose(1, 2)
        assert torch.allclose(latent.attend(module, query, latents, mask, 0.3), want, atol=1e-12)


@pytest.mark.parametrize("text", ["full", "snapkv(budget=12, window=4)"])
@pytest.mark.parametrize("name", NAMES)
def test_a_decoded_token_makes_keys_of_itself_only(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where layers have a window, which stays transformers' own."""
    model, made = configs.build(name), list[int]()
    kind = type(attentions(model)[0])

    def expand(self: Any, c: Tensor, r: Tensor, own: Any = kind.expand_kv) -> Any:
        made.extend([c.shape[2]] if getattr(self, "sliding_window", None) is None else [])
        return own(self, c, r)

    monkeypatch.setattr(kind, "expand_kv", expand)
    cache = kvengine.EngineCache(kvengine.patch(model, text))
    out = model(torch.randint(2, 99, (1, 600)), **{CACHE: cache})
    assert made == [600] * len(cache.engines)  # once, by the model itself
    made.clear()
    model(out.logits[:, -1:].argmax(-1), **{CACHE: out[CACHE]})
    assert set(made) == {1}


@cache
def stock(name: str) -> Tensor:
    return greedy(configs.build(name))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", every(len(NAMES), product(NAMES, WHOLE)), ids=" ".join)
def test_a_budget_beyond_the_text_gives_the_stock_tokens(case: tuple[str, str]) -> None:
    name, text = case
    assert torch.equal(greedy(kvengine.patch(configs.build(name), text)), stock(name))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("text", [LATENT[0], *every(2, LATENT[1:])])
def test_a_row_alone_is_the_row_in_a_batch(text: str) -> None:
    model, batch = configs.build("deepseek_v3"), configs.padded_batch()
    try:
        kvengine.patch(model, text)
    except UnsupportedPolicy as error:
        assert text.startswith(("duo", "expected_attention", "lowrank")), error
        return
    together = greedy(model)[:, 20:]
    for row in range(3):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
        alone = model.generate(ids, max_new_tokens=12, do_sample=False)[:, ids.shape[1] :]
        assert torch.equal(alone[0], together[row])


def test_what_is_held(tmp_path: Path) -> None:
    """The latents, once, in the open tail and in dense pages; they are saved, and go on."""
    model = configs.build("deepseek_v3")
    ids = torch.randint(2, 99, (1, 40))
    stock = DynamicCache(config=model.config)
    model(ids, **{CACHE: stock})
    size = sum(x.nbytes for layer in stock.layers for x in (layer.keys, layer.values))
    for text, tokens in (("full", 40), ("snapkv(budget=10, window=4)", 10), ("quest(budget=500, page=8)", 40)):
        kvengine.patch(model, text)
        cache = kvengine.EngineCache(model)
        out = model(ids, **{CACHE: cache})
        token = out.logits[:, -1:].argmax(-1)
        stats, spare = (
            cache.stats(),
            sum(len(x.tail.k) * (x.tail.capacity - len(x.tail)) for x in lanes(cache)) * 24 * 4,
        )
        names = ("tail.k", "tail.v", "page.k", "page.v")
        assert sum(n for name, n in stats.bytes["device"].items() if name in names) - spare == size * tokens // 40
        saved.save(cache, tmp_path / "s.kv", model)
        back = saved.load(model, tmp_path / "s.kv")
        assert torch.equal(model(token, cache=back).logits, model(token, cache=cache).logits)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(2, LATENT))
def test_values_held_once_are_those_held_twice(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, through a padded batch, a rolled-back draft, rows that leave and another turn."""
    model, batch = configs.build("deepseek_v3"), configs.padded_batch()
    ids = torch.randint(2, 99, (2, 7), generator=torch.Generator().manual_seed(2))
    try:
        kvengine.patch(model, text)
    except UnsupportedPolicy:
        return
    found = []
    for once in (True, False):
        if not once:
            monkeypatch.setattr(LayerCache, "inner", property(lambda self: None, lambda self, width: None))
        cache = kvengine.EngineCache(model)
        logits = [model(**batch, **{CACHE: cache}).logits[:, -1:]]
        nested = once and cache.stack != Stack()  # `full` keeps no values at all
        assert all(("v" not in lane.tail.tensors()) == nested for lane in lanes(cache))
        for _ in range(10):
            logits.append(model(logits[-1].argmax(-1), **{CACHE: cache}).logits)
        cache.activate_past_recording()
        for _ in range(3):
            logits.append(model(logits[-1].argmax(-1), **{CACHE: cache}).logits)
        cache.rollback(3)
        cache.commit()
        cache.batch_select_indices(torch.tensor([2, 0]))
        cache.follow_up()
        logits.append(model(ids, **{CACHE: cache}).logits)
        logits.append(model(ids[:, :1], **{CACHE: cache}).logits)
        found.append(logits)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def lanes(cache: kvengine.EngineCache) -> list[Lane]:
    return [part.lane for layer in cache.engines for part in layer.parts]


@pytest.mark.parametrize("text", ["full", "snapkv(budget=500)"])
def test_a_later_mask_that_hides_tokens(text: str) -> None:
    model, batch = configs.build("deepseek_v3"), configs.padded_batch()
    ids = torch.cat([batch["input_ids"], torch.randint(2, 99, (3, 6), generator=torch.Generator().manual_seed(0))], 1)
    mask = torch.cat([batch["attention_mask"], torch.ones(3, 6, dtype=torch.long)], 1)
    mask[0, 12:17] = 0
    found = []
    for make in (lambda: DynamicCache(config=model.config), lambda: kvengine.EngineCache(kvengine.patch(model, text))):
        cache = make()
        model(**batch, **{CACHE: cache})
        found.append(model.generate(ids, attention_mask=mask, **{CACHE: cache}, max_new_tokens=8, do_sample=False))
    assert torch.equal(*found)


class Adapter(nn.Module):
    """A layer as an adapter wraps it."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.more = inner, nn.Linear(inner.in_features, inner.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x) + self.more(x)
        return found


def test_weights_behind_an_adapter_are_not_guessed() -> None:
    model = configs.build("deepseek_v3")
    for module in attentions(model):
        module.kv_b_proj = Adapter(module.kv_b_proj)
    want = greedy(model)
    assert torch.equal(greedy(kvengine.patch(model)), want)
    with pytest.raises(UnsupportedPolicy, match="no recording: the weights.*adapter"):
        kvengine.compile_decode(model)
    kvengine.patch(model, "snapkv(budget=12, window=4)")
    with pytest.raises(UnsupportedPolicy, match="adapter"):
        greedy(model)


def test_drafts_are_taken_back() -> None:
    model = kvengine.patch(configs.build("deepseek_v3"), "snapkv(budget=12, window=4)")
    ids = torch.tensor([[5, 6, 7, 8] * 6])
    want = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, prompt_lookup_num_tokens=3), want)


TARGETS = ["full", "snapkv(budget=30, window=4)"]
MIDDLES = ["quest(budget=24, page=4)", "snapkv(budget=24, window=4)", "kivi(group=8, residual=8)"]


@pytest.mark.parametrize("case", every(2, product(TARGETS, MIDDLES)), ids=" + ".join)
def test_drafts_on_latents_are_lossless(case: tuple[str, str]) -> None:
    stack, middle = case
    model = kvengine.patch(configs.build("deepseek_v3"), stack)
    ids = torch.tensor([[5, 6, 7, 8, 9, 30] * 12])
    decoder = TriForce(model, "lookup", middle, gamma=(2, 4), stack=stack)
    got = model.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=decoder)
    assert torch.equal(got, model.generate(ids, max_new_tokens=24, do_sample=False))
    with pytest.raises(UnsupportedPolicy, match="latents"):
        TriForce(model, "lookup", middle, gamma=(2, 4), in_place=True)
    with pytest.raises(UnsupportedPolicy, match="latents"):
        TriForce(model, "lookup", "full", gamma=(2, 4))


@pytest.mark.skipif(not configs.exists("dots3_note"), reason="this transformers has no such model")
def test_rows_are_drafted_for_where_latents_have_a_rank_in_each_layer() -> None:
    """A configuration does not say one for all."""
    model, ids = configs.build("dots3_note"), torch.tensor([[5, 6, 7, 8] * 4, [30, 9, 31] * 5 + [30]])
    want = model.generate(ids, max_new_tokens=8, do_sample=False)
    decoder = TriForce(kvengine.patch(model), "lookup", "streaming(sinks=2, recent=20)", gamma=(2, 3))
    assert torch.equal(decoder.generate(ids, max_new_tokens=8, do_sample=False), want)
    with pytest.raises(UnsupportedPolicy, match="latents"):
        TriForce(model, "lookup", "quest(budget=24, page=4)", gamma=(2, 3), in_place=True)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("widths", [None, (2, 2)], ids=["recycling", "a small model's"])
@pytest.mark.parametrize("stack", TARGETS)
def test_drafted_trees_look_at_latents(stack: str, widths: tuple[int, int] | None) -> None:
    model = kvengine.patch(configs.build("minicpm3"), stack)
    draft = "recycling" if widths is None else configs.build("minicpm3", seed=1)
    decoder = TriForce(model, draft, None, stack=stack, draft_stack="full", widths=widths)
    for seed in range(3):
        ids = torch.randint(2, 128, (1, 20), generator=torch.Generator().manual_seed(seed)).repeat(1, 2)
        got = model.generate(ids, max_new_tokens=24, do_sample=False, custom_generate=decoder)
        assert torch.equal(got, model.generate(ids, max_new_tokens=24, do_sample=False))


RECORDED = [
    (NAMES[-1], "snapkv(budget=12, window=4)", "eager"),
    # LongCat's experts have the host look, which leaves no trace.
    *((name, "full", ("trace", "eager")[i % 2 or name == "longcat_flash"]) for i, name in enumerate(NAMES)),
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "text", "how"), RECORDED)
def test_a_recorded_step_on_latents(name: str, text: str, how: Any, tmp_path: Path) -> None:
    """Under the full cache too, which goes on with the model's own attention: another turn, in steps that are not recorded."""
    model = kvengine.patch(configs.build(name), text)
    eager, held = kvengine.EngineCache(model), kvengine.EngineCache(model)
    want = greedy(model, cache=eager)
    assert torch.equal(greedy(model, cache=held, custom_generate=kvengine.compile_decode(model, how)), want)
    assert torch.equal(held.stats().held, eager.stats().held)
    saved.save(held, tmp_path / "s.kv", model)
    mask = torch.nn.functional.pad(configs.padded_batch()["attention_mask"], (0, 20), value=1)
    turn = {"input_ids": torch.cat([want, want[:, 4:12]], 1), "attention_mask": mask, "max_new_tokens": 6}
    found = [
        model.generate(**turn, cache=x, do_sample=False) for x in (eager, held, saved.load(model, tmp_path / "s.kv"))
    ]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_latents_that_were_held_still_are_afterwards_as_they_were() -> None:
    model = kvengine.patch(configs.build("deepseek_v3"))
    cache, ids = kvengine.EngineCache(model), configs.padded_batch()["input_ids"][:1]
    with torch.no_grad():
        model(ids, cache=cache)
        decoder = kvengine.compile_decode(model)
        before = cache.engines[0].contents()[0].clone()
        decoder.open(cache, 3).close()
        assert torch.equal(cache.engines[0].contents()[0], before) and not cache.engines[0].contents()[1].numel()
        assert cache.engines[0].inner is None and cache.engines[0].parts[0].lane.inner is None
        want = kvengine.unpatch(model)(torch.cat([ids, ids[:, :1]], 1)).logits[:, -1]
        got = kvengine.patch(model)(ids[:, :1], cache=cache).logits[:, -1]
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("policy", ["full", SMALL["snapkv"]])
def test_latents_of_another_dtype_are_refused(policy: str) -> None:
    """The new ones would be rounded to what the cache holds, where transformers' own cache widens what it has."""
    model = kvengine.patch(configs.build("deepseek_v3").bfloat16(), policy)
    cache, ids = kvengine.EngineCache(model), configs.padded_batch()["input_ids"][:1]
    with torch.no_grad():
        model(ids, cache=cache)
        with pytest.raises(CacheError, match=r"holds torch\.bfloat16 on cpu, but the layer brought torch\.float32"):
            model.float()(ids[:, :1], cache=cache)
        assert model.bfloat16()(ids[:, :1], cache=cache).logits.isfinite().all()  # nothing was taken


def test_heads_wider_than_triton_takes_go_to_c_or_torch() -> None:
    q, k = torch.randn(1, 2, 1, 576), torch.randn(1, 9, 576)
    here = "native" if dispatch.info()["native"] == "available" else "reference"
    assert dispatch.chosen((q, k), None, True, 576) == here
    assert dispatch.chosen((q, k), None, False, 576) == "reference"
    with pytest.raises(KernelError, match="576 channels are wider than 512"):
        attention(q, k, k[..., :512].clone(), None, 0.05, backend="triton")


def test_latents_that_move_are_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    moved = tail.moved
    for module in (tail, nested):
        monkeypatch.setattr(module, "moved", lambda x, slots: copied.append(x.shape[-1]) or moved(x, slots))  # type: ignore[func-returns-value]
    k = torch.randn(1, 5, 8)
    held = nested.Nested(6, k, k[..., :6], scored=False, placed=False)
    held.append(k, k[..., :6], torch.arange(5, dtype=torch.int32)[None], True)
    held.append(k[:, :1], k[:, :1, :6], torch.tensor([[5]], dtype=torch.int32), True)
    held.shared = True
    held.own()
    assert copied == [8, 8, 8] and torch.equal(held.held()[1], torch.cat([k, k[:, :1]], 1)[..., :6])


@pytest.mark.parametrize("sealed", [8, 30])
def test_latents_move_to_the_front_of_their_slots_once(sealed: int) -> None:
    """Where sealed ones have left room, less than is needed or more: values are a part of the keys, which have moved by then."""
    k = torch.randn(2, 60, 8, generator=torch.Generator().manual_seed(0))
    held = nested.Nested(6, k, k[..., :6], scored=False, placed=False)
    held.append(k[:, :40], k[:, :40, :6], torch.arange(40, dtype=torch.int32).expand(2, -1), True)
    held.start = sealed
    for i in range(40, 44):
        held.append(k[:, i : i + 1], k[:, i : i + 1, :6], torch.full((2, 1), i, dtype=torch.int32), True)
    assert held.capacity == 40 and held.start == 0
    assert torch.equal(held.held()[0], k[:, sealed:44]) and torch.equal(held.held()[1], k[:, sealed:44, :6])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", ["kivi(group=8, residual=40)", "turboquant(residual=40) + host"])
def test_a_long_answer_over_latents_is_the_same_recorded(form: str) -> None:
    """A recorded step writes to slots of its own; eagerly, what is left of the tail moves whenever these are full."""
    model = kvengine.patch(configs.build("minicpm3").double(), form)
    ids = torch.randint(2, 99, (2, 24), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": 50, "return_dict_in_generate": True, "output_logits": True}
    options |= {"do_sample": False, "eos_token_id": None}
    found = [model.generate(ids, **options, **x) for x in ({}, {"custom_generate": kvengine.compile_decode(model)})]
    torch.testing.assert_close(*(torch.stack(x.logits) for x in found))


def test_a_threshold_moves_once_a_token_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes the general way there, as latents do, is not prepared for another first."""
    calls: list[Lane] = []
    moving = Lane.moving
    monkeypatch.setattr(Lane, "moving", lambda self: calls.append(self) or moving(self))
    model = configs.build("minicpm3")
    ids = torch.randint(2, 100, (1, 40), generator=torch.Generator().manual_seed(0))
    with pretended(monkeypatch), kvengine.patched(there(model), SMALL["d2o"]), torch.no_grad():
        cache = kvengine.EngineCache(model)
        model(there(ids), cache=cache)
        model(there(ids[:, :1]), cache=cache)
        calls.clear()
        model(there(ids[:, :1]), cache=cache)
        assert len(calls) == len(cache.engines)
