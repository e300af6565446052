"""Qwen 4, whose attention reads what an index of its own chooses by a mask, between layers with states: the text is the unpatched
model's, wherever tokens are stored, and a decoded token reads what was chosen and no more."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import support_random
import torch
import transformers
from families import sights
from families.configs import BASE, EXPERTS, LINEAR_HEADS, VOCABULARY, padded_batch
from families.sights import IMAGE, KINDS, QWEN, TOKENS, Sight, grids, shown
from families.test_indexed import CODED, OLD, STORED, WAYS, generated
from families.test_seeing import new, run, stock, talk
from support_device import pretended
from test_split_model import split
from torch import Tensor, nn
from transformers import DynamicCache

import kvengine
from kvengine import EngineCache, saved
from kvengine.errors import CacheError, CorruptBitstream, ModelError, UnsupportedPolicy
from kvengine.hf.cache import STATE
from kvengine.hf.mask import MaskUsed
from kvengine.hf.shown import ShownMask
from kvengine.speculative.triforce import TriForce

pytestmark = pytest.mark.skipif(
    OLD or not hasattr(transformers, "Qwen4ExpForCausalLM"), reason="this transformers has no such Qwen 4"
)
INDEXED, LINEAR = "indexed_attention", "linear_attention"
BUDGET, RATIO = 8, 2
QSA: dict[str, Any] = {
    **{key: x for key, x in BASE.items() if key != "intermediate_size"}, **LINEAR_HEADS, **EXPERTS,
    "shared_expert_intermediate_size": 32, "hc_count": 2, "hc_lowrank": 8, "eos_token_id": 99,
    "num_hidden_layers": 3, "layer_types": [LINEAR, INDEXED, INDEXED],
    "ple_layer_ids": [1], "ple_embed_dim": 16, "heads_per_ngram": 2, "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 2, "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16,
    "indexer_budget": BUDGET, "indexer_compress_ratio": RATIO,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0},
}  # fmt: skip
ALONE = {"layer_types": [INDEXED] * 3, "ple_layer_ids": []}
SIGHT = Sight(
    "Qwen4ExpForConditionalGeneration",
    {"text_config": QSA, "vision_config": QWEN | {"num_position_embeddings": 16}, **TOKENS},
    grids(96), KINDS, axes=True,
)  # fmt: skip


def build(**options: Any) -> Any:
    support_random.seed(0)
    model = transformers.Qwen4ExpForCausalLM(transformers.Qwen4ExpTextConfig(**QSA | options)).float().eval()
    model.generation_config.eos_token_id = None
    for module in model.modules():
        if hasattr(module, "ple_embedding"):
            nn.init.normal_(module.conv1d.weight, std=0.3)  # which begins as zeros, by which nothing would be seen
    return model


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", STORED)
def test_greedy_text_of_a_padded_batch(text: str) -> None:
    model = build()
    want = generated(model, count=12)
    with kvengine.patched(model, text):
        assert torch.equal(generated(model, count=12), want)
    assert not any(module._forward_pre_hooks for module in model.modules())


HERE = {"layers with states too": ("beams", "sampled", "in chunks", "without a cache"),
        "layers with an index alone": ("turns", "passes", "inference mode")}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("text", STORED)
@pytest.mark.parametrize(("kind", "way"), [(kind, way) for kind, ways in HERE.items() for way in ways])
def test_every_way_gives_the_unpatched_models(kind: str, way: str, text: str) -> None:
    """What states have absorbed is not taken back, and transformers lets padding of a later turn fade them: see below."""
    model = build(**ALONE if "alone" in kind else {})
    want = WAYS[way](model)
    with kvengine.patched(model, text):
        torch.testing.assert_close(WAYS[way](model), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "text", ["full", CODED[0], *(pytest.param(x, marks=pytest.mark.slow) for x in ("host", CODED[1]))]
)
def test_a_decoded_token_reads_what_is_named(text: str) -> None:
    model, batch = build(), padded_batch(30)
    cache = EngineCache(kvengine.patch(model, text))
    generated(model, batch, 10, cache=cache)
    stats, tokens = cache.stats(), batch["attention_mask"].sum(1) + 9
    for layer in stats.attended:
        assert torch.equal(layer, (BUDGET + tokens % RATIO)[:, None].expand(-1, 2))
    assert torch.equal(stats.held, tokens[None, :, None].expand(2, -1, 2))
    index = 2 * 3 * 39 * 16 * 4 + 3 * 3 * 39 * 8
    states = sum(x.nbytes for x in (*cache.layers[0].conv_states.values(), cache.layers[0].recurrent_states[0]))
    assert index + states <= stats.bytes["device"]["stock"] <= 3 * (index + states)


def later(model: Any, rows: list[int], text: str | None) -> list[Tensor]:
    """What these rows say of their tokens, over turns of which each row has its own; unpatched, each token by itself."""
    turns = (
        [[1] * 9, [0, 0, 1, 1, 1, 1, 1, 1, 1], [0] * 9],
        [[1], [1], [0]],
        [[1] * 6, [1, 0, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1]],
    )
    turns = (*turns, [[1], [0], [1]], [[0, 0, 1], [1, 1, 1], [1, 0, 0]])
    cache = DynamicCache(config=model.config) if text is None else EngineCache(model)
    mask, out = torch.zeros(len(rows), 0, dtype=torch.long), [[] for _ in rows]  # type: ignore[var-annotated]
    for turn, tokens in enumerate(turns):
        real = torch.tensor(tokens)
        ids = torch.randint(1, VOCABULARY, real.shape, generator=torch.Generator().manual_seed(turn))[rows]
        real = real[rows]
        if text is None:
            ids, real = ids[:, real[0].bool()], real[:, real[0].bool()]
        mask = torch.cat([mask, real], 1)
        if ids.shape[1]:
            at = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            given = {} if text is None else {"attention_mask": mask}
            logits = model(ids, position_ids=at, cache=cache, **given).logits
            for mine, row, some in zip(out, logits, real.bool(), strict=True):
                mine.append(row[some])
    return [torch.cat(row) for row in out]


@torch.no_grad()
@pytest.mark.parametrize("text", STORED[:2])
def test_later_turns_of_a_padded_batch_are_those_of_rows_alone(text: str) -> None:
    """States of n-grams begin as behind an end of a text, also in a row whose first tokens come as others go on."""
    model = build()
    want = [later(model, [row], None)[0] for row in range(3)]
    with kvengine.patched(model, text):
        for mine, found in zip(want, later(model, [0, 1, 2], text), strict=True):
            torch.testing.assert_close(found, mine, rtol=1e-3, atol=1e-3)
        one = torch.randint(1, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(7))
        mask, cache = torch.ones_like(one), EngineCache(model)
        mask[1, 0], at = 0, torch.tensor([[*range(9)], [0, *range(8)]])
        model(one[:, :1], attention_mask=mask[:, :1], position_ids=at[:, :1], cache=cache)
        found = model(one[:, 1:], attention_mask=mask, position_ids=at[:, 1:], cache=cache).logits
    torch.testing.assert_close(found[1:], model(one[1:, 1:], use_cache=False).logits, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("text", STORED[:2])
def test_masks_of_numbers(text: str) -> None:
    model = build(attn_implementation="eager")
    want = generated(model, count=8)
    with kvengine.patched(model, text):
        assert torch.equal(generated(model, count=8), want)


@torch.no_grad()
def test_a_mask_given_as_a_tensor_is_read_by_the_models_own_attention() -> None:
    model, ids = build(), padded_batch(12)["input_ids"][:1]
    mask = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    mask[..., 8:, 3:5] = False
    want = model(ids, attention_mask=mask).logits
    with kvengine.patched(model, "full"):
        torch.testing.assert_close(model(ids, attention_mask=mask).logits, want, rtol=1e-4, atol=1e-4)
    with kvengine.patched(model, "host"), pytest.raises(UnsupportedPolicy, match="a mask given as a tensor"):
        model(ids, attention_mask=mask)


def test_what_else_looks_at_a_mask_is_refused() -> None:
    mask = ShownMask({"device": torch.device("cpu")})
    for act in (lambda: torch.where(mask, 0, 1), lambda: mask.sum(), lambda: torch.ones(1) * mask):  # type: ignore[operator]
        with pytest.raises(MaskUsed):
            act()


@pytest.mark.parametrize("text", ["full", pytest.param(CODED[1], marks=pytest.mark.slow)])
def test_a_session_is_saved_with_its_index(text: str, tmp_path: Path) -> None:
    model, path = build(), tmp_path / "one.kv"
    with kvengine.patched(model, text):
        cache = EngineCache(model)
        out = generated(model, padded_batch(21), 5, cache=cache)
        saved.save(cache, path, model)
        again = saved.load(model, path)
        mask = torch.cat([padded_batch(21)["attention_mask"], torch.ones(3, 8, dtype=torch.long)], 1)
        more = {"input_ids": torch.cat([out, torch.full((3, 3), 7)], 1), "attention_mask": mask}
        want, got = (generated(model, more, 5, cache=one) for one in (cache, again))
        assert torch.equal(got, want)
        again = saved.load(model, path)
        held, again.layers[1].index_places = again.layers[1].index_places, None
        with pytest.raises(CacheError, match="no positions of the 25 tokens"):
            generated(model, more, 5, cache=again)
        for wrong in (held[:, :2], held[..., :20], held.float()):
            again = saved.load(model, path)
            again.layers[1].index_places = wrong
            if wrong.shape[2] < 25:
                with pytest.raises(CacheError, match="no positions"):
                    saved.save(again, path.with_suffix(".two"), model)
                continue
            saved.save(again, path.with_suffix(".two"), model)
            with pytest.raises(CorruptBitstream, match="positions of index keys are not those of 3 rows of 25 tokens"):
                saved.load(model, path.with_suffix(".two"))


class Stop(Exception):
    pass


@torch.no_grad()
@pytest.mark.parametrize("within", ["ple.ple_embedding", "ple.conv1d", "linear_attn"])
def test_a_pass_that_broke_off_behind_the_first_states_is_noticed(within: str) -> None:
    """Those of n-grams come before those of the layer's linear attention."""
    model, ids = kvengine.patch(build(), "full"), torch.full((1, 4), 7)
    cache = EngineCache(model)

    def stop(*_: Any) -> None:
        raise Stop

    model(ids, cache=cache)
    hook = model.model.layers[0].get_submodule(within).register_forward_pre_hook(stop)
    with pytest.raises(Stop):
        model(ids, cache=cache)
    hook.remove()
    with pytest.raises(CacheError, match="broke off.*cache.reset"):
        model(ids, cache=cache)
    cache.reset()
    assert torch.equal(model(ids, cache=cache).logits, model(ids, cache=EngineCache(model)).logits)


@pytest.mark.parametrize(("text", "said"), [
    ("snapkv(budget=12, window=4)", "'snapkv' drops or merges tokens"), ("quest(budget=12)", "'quest' chooses what is read"),
    ("duo", "'duo' tells heads apart"), ("ashape", "'ashape' leaves out a part"), ("lowrank(rank=8)", "'lowrank' judges"),
])  # fmt: skip
def test_what_chooses_tokens_is_refused(text: str, said: str) -> None:
    with pytest.raises(UnsupportedPolicy, match=said):
        kvengine.patch(build(), text)


def test_what_its_index_does_not_know_is_refused() -> None:
    model = kvengine.patch(build(), "full")
    assert getattr(model, STATE).chosen.channels == {(16, 16, False)}  # its attention could be tried
    cache, prefix = EngineCache(model), DynamicCache()
    with torch.no_grad():
        model(torch.full((2, 4), 7), cache=cache)
        for rows in (1, 3):
            with pytest.raises(CacheError, match=f"holds 2 sequences, but the model was given {rows}"):
                model(torch.full((rows, 1), 7), cache=cache)
        model(torch.full((2, 1), 7), cache=cache)
    cache.reset()
    for layer in range(3):
        prefix.update(torch.ones(1, 2, 4, 16), torch.ones(1, 2, 4, 16), layer)
    with pytest.raises(
        ModelError, match="an index of its own, in which a prefix of tuned keys and values has no place"
    ):
        cache.adopt(prefix)
    with pytest.raises(UnsupportedPolicy, match="index of its own"):
        kvengine.patch(model, "full", record=True)
    with pytest.raises(ModelError, match="know no branches"):
        TriForce(model, "recycling", None)


@pytest.mark.slow
@pytest.mark.parametrize("stack", STORED[:2])
def test_chains_of_drafts_are_lossless(stack: str) -> None:
    model, ids = build(), padded_batch(41)["input_ids"][:1]
    want = generated(model, {"input_ids": ids}, 24)
    decoder = TriForce(kvengine.patch(model, "full"), "lookup", None, gamma=(2, 4), stack=stack)
    assert torch.equal(decoder.generate(ids, max_new_tokens=24, do_sample=False), want)


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("text", ["full", CODED[1]])
def test_a_model_on_two_devices(text: str, first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The index looks at its mask where its layer is."""
    model, batch = build(), padded_batch(25)
    model.set_experts_implementation("eager")
    with kvengine.patched(model, text):
        want = generated(model, batch, 4)
    with pretended(monkeypatch), kvengine.patched(split(model, first), text):
        assert generated(model, batch, 4).tolist() == want.tolist()


@pytest.mark.slow
def test_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    # A compiler does not know how tests fill new memory.
    monkeypatch.setattr(EngineCache, "update_indexer", torch.compiler.disable(EngineCache.update_indexer))
    model, batch = build(num_hidden_layers=2, layer_types=[LINEAR, INDEXED], ple_layer_ids=[]), padded_batch(21)
    want = generated(model, batch, 3)
    kvengine.patch(model, "host").model = torch.compile(model.model, backend="eager")
    assert torch.equal(generated(model, batch, 3), want)


@pytest.fixture
def seeing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sights.SIGHTS, "qwen4", SIGHT)
    return sights.build("qwen4")


@pytest.mark.slow
@pytest.mark.parametrize("text", STORED[:2])
def test_images(text: str, seeing: Any) -> None:
    """In the first turn and a later one, in chunks, and rows as they are alone."""
    (batch, alone), (one, _) = shown("qwen4", (1, 2)), shown("qwen4", (1, 1))
    ways: list[Callable[[], Any]] = [
        lambda: run(seeing, batch).sequences,
        lambda: run(seeing, batch, prefill_chunk_size=7).sequences,
        lambda: torch.stack([x[:, -6:] for x in talk("qwen4", seeing, caches(), one)]),
    ]
    caches = lambda: stock(seeing)  # noqa: E731
    want = [way() for way in ways]
    kvengine.patch(seeing, text)
    caches = lambda: EngineCache(seeing)  # noqa: E731
    for way, found in zip(ways, want, strict=True):
        assert torch.equal(way(), found)
    for row, given in enumerate(alone):
        assert torch.equal(new(run(seeing, given), given)[0], want[0][row, -6:])


@torch.no_grad()
def test_positions_counted_by_a_mask_are_those_of_new_tokens(seeing: Any) -> None:
    """Behind an image the model counts all tokens by their mask, and unpatched puts them all behind those that it has."""
    (given, _) = shown("qwen4", (1, 2))[1]
    kvengine.patch(seeing, "full")
    out, said = seeing(**given, use_cache=True), []
    ids, mask = given["input_ids"], given["attention_mask"]
    for _ in range(6):
        said.append(out.logits[:, -1])
        ids, mask = (torch.cat([x, y], 1) for x, y in ((ids, said[-1].argmax(-1)[:, None]), (mask, mask[:, :1])))
        out = seeing(input_ids=ids[:, -1:], attention_mask=mask, cache=out.cache)
    more = given | {"input_ids": ids, "attention_mask": mask, "mm_token_type_ids": (ids == IMAGE).long()}
    want = seeing(**more, use_cache=False).logits[:, -7:-1]
    torch.testing.assert_close(torch.stack(said, 1), want, rtol=1e-4, atol=1e-4)
