from typing import Any

import pytest
import torch
from support import llama, one
from support_layer import Tokens, draw, padded, plain, rope, run, stacked

import kvengine
from kvengine import choosing
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, PolicyError, UnsupportedPolicy
from kvengine.kernels import dispatch
from kvengine.lane import Call
from kvengine.pages import Pages
from kvengine.policies.selection import Where
from kvengine.policies.selection.tidal import Tidal
from kvengine.session import Session
from kvengine.stack import Stack
from kvengine.stats import measure

LAYERS, NATIVE = 8, dispatch.info()["native"] == "available"


def layers(policy: str, steps: list[Tokens], prompt: int) -> tuple[list[LayerCache], list[torch.Tensor]]:
    """A model's layers, each with tokens of its own; what the last token gives in each."""
    session = Session(rope=rope(16), prompt_end=prompt)
    caches = [LayerCache(Stack.parse(policy), i, LAYERS, session) for i in range(LAYERS)]
    out: list[torch.Tensor] = []
    for a, b in [(0, prompt), *((i, i + 1) for i in range(prompt, steps[0].k.shape[2]))]:
        out = [cache.forward(*t.part(a, b), Call(t.scale)) for cache, t in zip(caches, steps, strict=True)]
    return caches, out


def best(tokens: Tokens, head: int, sealed: int, count: int) -> set[int]:
    logits = tokens.k[0, head, :sealed] @ tokens.q[0, head * 2 : head * 2 + 2, -1].T
    return set(logits.amax(1).topk(count).indices.tolist())


def test_layers_read_what_their_chooser_chose() -> None:
    steps = [draw(81, seed=i) for i in range(LAYERS)]
    caches, out = layers("tidal(budget=40, start=1, reselect=4)", steps, 80)
    lanes = [cache.parts[0].lane for cache in caches]
    sealed = len(lanes[0].pages)  # type: ignore[arg-type]
    count = 40 - (81 - sealed)
    for i in (0, 1, 4):
        assert lanes[i].units is None
        torch.testing.assert_close(out[i], plain(steps[i], 80))
    for i, chooser in ((2, 1), (3, 1), (5, 4), (6, 4), (7, 4)):
        seen = torch.zeros(1, 2, 81, dtype=torch.bool)
        seen[..., sealed:] = True
        for head in range(2):
            chosen = best(steps[chooser], head, sealed, count)
            assert set(lanes[i].units[head].tolist()) == chosen  # type: ignore[index]
            assert chosen != best(steps[i], head, sealed, count)
            seen[0, head, list(chosen)] = True
        torch.testing.assert_close(out[i], plain(steps[i], 80, seen), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("more", ["", " + kivi(group=16, residual=8)", " + disk(device=0, host=0)"])
def test_a_layer_that_chooses_reads_keys_once(more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where C does both in one scan; what it gives and what it chooses is what two readings do."""
    steps, found, twice = [draw(84, seed=i) for i in range(LAYERS)], [], []
    logits = Pages.logits
    monkeypatch.setattr(Pages, "logits", lambda *args, **more: twice.append(args) or logits(*args, **more))
    for least in (1 << 30, 1):
        monkeypatch.setattr(choosing, "SCANNED", least)
        twice.clear()
        caches, out = layers(f"tidal(budget=40, start=1, reselect=4){more}", steps, 80)
        lanes = [cache.parts[0].lane for cache in caches]
        assert (not twice) == ("disk" in more or (least == 1 and NATIVE))
        assert all(lane.scanned is None for lane in lanes)
        found.append((out, [lane.units for lane in lanes]))
    for a, b in zip(found[0][0], found[1][0], strict=True):
        torch.testing.assert_close(a, b)
    for x, y in zip(found[0][1], found[1][1], strict=True):
        assert (x is None and y is None) or torch.equal(x, y)


@pytest.mark.parametrize("codes", ["", " + kivi(group=16, residual=8)"])
def test_a_layer_that_chooses_brings_each_page_once(codes: str) -> None:
    """Pages in a tier below: their keys were brought for the choice, and all of them again for attention."""
    steps, policy = [draw(83, seed=i) for i in range(LAYERS)], "tidal(budget=40, start=1, reselect=4)" + codes
    caches, out = layers(f"{policy} + disk(device=0, host=0)", steps, 80)
    for i in (0, 1, 4):
        pages = caches[i].parts[0].lane.pages
        assert pages is not None and measure([caches[i]]).misses == 3 * len(pages.pages_in_use())
    here, straight = layers(policy, steps, 80)
    for a, b, mine, other in zip(out, straight, caches, here, strict=True):
        torch.testing.assert_close(a, b)
        units, same = mine.parts[0].lane.units, other.parts[0].lane.units
        assert (units is None and same is None) or torch.equal(units, same)  # type: ignore[arg-type]


def test_a_capped_layer_brings_each_page_once() -> None:
    tokens = draw(83)
    tokens.softcap = 0.3
    found = run("tidal(budget=24, start=0, reselect=0) + disk(device=0, host=0)", tokens, 80, layers=2)
    torch.testing.assert_close(found.out[:, -1:], plain(tokens, 82))
    assert measure([found.cache]).misses == 3 * len(found.lane.pages.pages_in_use())  # type: ignore[union-attr]


@pytest.mark.skipif(not NATIVE, reason="C does both")
def test_a_capped_layer_reads_them_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap may make equals of logits that are none."""
    monkeypatch.setattr(choosing, "SCANNED", 1)
    tokens = draw(81)
    cache = LayerCache(Stack.parse("tidal(budget=40, start=0, reselect=0)"), 0, LAYERS)
    cache.forward(*tokens.part(0, 80), Call(tokens.scale, softcap=2.0))
    lane, q = cache.parts[0].lane, tokens.q[0, :, 80].unflatten(0, (2, 2))
    assert lane.pages is not None and lane.scan(lane.pages, Call(tokens.scale), q) is not None
    assert lane.scan(lane.pages, Call(tokens.scale, softcap=2.0), q) is None


def test_every_token_has_its_own_choice_even_at_once() -> None:
    """A layer takes all tokens of a pass before the next layer sees the first."""
    steps = [draw(90, seed=i) for i in range(LAYERS)]
    _, single = layers("tidal(budget=40, start=1)", steps, 80)
    session = Session(rope=rope(16), prompt_end=80, following=False)
    caches = [LayerCache(Stack.parse("tidal(budget=40, start=1)"), i, LAYERS, session) for i in range(LAYERS)]
    for cache, t in zip(caches, steps, strict=True):
        cache.forward(*t.part(0, 80), Call(t.scale))
    session.following = True
    together = [cache.forward(*t.part(80, 90), Call(t.scale)) for cache, t in zip(caches, steps, strict=True)]
    _, first = layers("tidal(budget=40, start=1)", [Tokens(*t.part(0, 81)) for t in steps], 80)
    for a, b, c in zip(first, single, together, strict=True):
        torch.testing.assert_close(a, c[:, :1])
        torch.testing.assert_close(b, c[:, -1:])
    assert all(len(memo.choices) <= 10 for memo in session.memo.values())


def test_choices_of_earlier_passes_are_forgotten() -> None:
    steps = [draw(120, seed=i) for i in range(LAYERS)]
    caches, _ = layers("tidal(budget=40, start=1)", steps, 80)
    assert all(set(memo.choices) == {119} for memo in caches[0].session.memo.values())


def test_a_choice_from_a_pass_that_was_rolled_back_is_not_used() -> None:
    """The same place in the text, another token: even where nothing reselects, the choice is made anew."""
    steps, other = [draw(81, seed=i) for i in range(LAYERS)], [draw(81, seed=100 + i) for i in range(LAYERS)]
    policy = "tidal(budget=40, start=1, reselect=0)"
    session = Session(rope=rope(16), prompt_end=80)
    caches = [LayerCache(Stack.parse(policy), i, LAYERS, session) for i in range(LAYERS)]
    for cache, t in zip(caches, steps, strict=True):
        cache.forward(*t.part(0, 80), Call(t.scale))
    session.recording = session.following = True
    for cache, t in zip(caches, other, strict=True):
        cache.forward(*t.part(80, 81), Call(t.scale))
    for cache in caches:
        cache.rollback(1)
    again = [cache.forward(*t.part(80, 81), Call(t.scale)) for cache, t in zip(caches, steps, strict=True)]
    for a, b in zip(layers(policy, steps, 80)[1], again, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("policy", ["tidal(budget=24, start=0, reselect=0)", "oracle_topk(budget=24)"])
def test_a_row_with_fewer_pages_than_others_reads_as_many_tokens_as_alone(policy: str) -> None:
    def last(tokens: Tokens, prompt: int, valid: torch.Tensor | None = None) -> torch.Tensor:
        chooser = run(policy, tokens, prompt, layers=2, valid=valid).cache
        session = Session(rope=rope(16), memo=chooser.session.memo)
        return run(policy, tokens, prompt, layer=1, layers=2, session=session, valid=valid).out[:, -1]

    long, short = draw(101, seed=1), draw(61)
    both, valid = padded(short, 40)
    together = last(stacked(both, long), 100, torch.cat([valid, valid | True]))
    torch.testing.assert_close(together, torch.cat([last(short, 60), last(long, 100)]))


@pytest.mark.parametrize(
    "policy, chooser",
    [
        (Tidal(), [2] * 13 + [13] * 19),
        (Tidal(reselect=0), [2] * 32),
        (Tidal(start=4, reselect=20), [4] * 20 + [20] * 12),
    ],
    ids=str,
)
def test_the_schedule(policy: Tidal, chooser: list[int]) -> None:
    assert [policy.chooser(i, 32) for i in range(32)] == chooser


@pytest.mark.parametrize("other", ["snapkv", "streaming", "duo"])
def test_tokens_of_their_own_are_refused(other: str) -> None:
    with pytest.raises(UnsupportedPolicy, match=f"'tidal' reads the same tokens in all layers, but '{other}'"):
        Stack.parse(f"{other} + tidal")


@pytest.mark.parametrize("value", [-1, 1.5, "13", True])
def test_a_wrong_layer_is_refused(value: Any) -> None:
    with pytest.raises(PolicyError, match="must be a layer's number"):
        Tidal(reselect=value)


@pytest.mark.parametrize(
    "policy, layers, message",
    [
        ("tidal(start=3)", 4, r"has none there: all would read everything. Use tidal\(start=2\), or a selection"),
        ("tidal(start=40)", 4, r"Use tidal\(start=2\)"),
        ("tidal(start=0)", 1, "read everything. Use a selection"),
        ("tidal(start=1, reselect=4)", 4, "this model's layers are 0 to 3"),
    ],
)
def test_a_model_in_which_no_layer_would_follow_is_refused(policy: str, layers: int, message: str) -> None:
    """It read everything, without a word."""
    model = llama(num_hidden_layers=layers)
    with pytest.raises(UnsupportedPolicy, match=message):
        kvengine.patch(model, policy)
    if layers > 1:
        kvengine.patch(model, "tidal(start=2, reselect=3)")


# Correction


def sparse_text(model: Any, ids: torch.Tensor, count: int) -> tuple[kvengine.EngineCache, torch.Tensor]:
    cache, out = kvengine.EngineCache(model), [ids]
    with torch.no_grad():
        token = model(ids, cache=cache).logits[:, -1:].argmax(-1)
        cache.activate_past_recording()
        for _ in range(count):
            out.append(token)
            token = model(token, cache=cache).logits[:, -1:].argmax(-1)
    return cache, torch.cat(out, 1)


def contents(cache: kvengine.EngineCache, layer: int) -> torch.Tensor:
    k, v, position, _ = cache.engines[layer].parts[0].lane.everything()
    order = position.argsort(1)[..., None]
    return torch.cat([x.gather(1, order.expand_as(x)) for x in (k, v)], 2)


def test_correction_gives_the_keys_and_values_of_full_attention() -> None:
    model = kvengine.patch(llama(num_hidden_layers=4), "tidal(budget=20, start=0, reselect=0)")
    cache, ids = sparse_text(model, one(61)["input_ids"], 30)
    with kvengine.patched(model, "full"), torch.no_grad():
        full = kvengine.EngineCache(model)
        want = model(ids, cache=full).logits
    assert (contents(cache, 3) - contents(full, 3)).abs().max() > 1e-2  # polluted before
    with torch.no_grad():
        logits = cache.correct(model, ids[:, -30:]).logits
    torch.testing.assert_close(logits, want[:, -30:], atol=1e-4, rtol=1e-3)
    for layer in range(4):
        torch.testing.assert_close(contents(cache, layer), contents(full, layer), atol=1e-4, rtol=1e-3)
    assert cache.session.recording and not cache.session.dense
    with torch.no_grad():  # and it selects again afterwards
        model(ids[:, -1:], cache=cache)
    assert cache.engines[3].parts[0].lane.units is not None


def test_a_correction_is_no_prompt_to_a_retention() -> None:
    """Of what the cache holds nothing is judged anew: the tokens come as they were decoded."""
    model = kvengine.patch(llama(num_hidden_layers=4), "snapkv(budget=30, window=4) + quest(budget=16, page=4)")
    cache, ids = sparse_text(model, one(61)["input_ids"], 12)
    before = cache.stats().held
    with torch.no_grad():
        cache.correct(model, ids[:, -12:])
    assert torch.equal(cache.stats().held, before) and int(before.max()) == 42


def test_what_was_not_recorded_cannot_be_corrected() -> None:
    model = kvengine.patch(llama(), "tidal(budget=20, start=0)")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(one(61)["input_ids"], cache=cache)
        model(torch.tensor([[5]]), cache=cache)
        with pytest.raises(CacheError, match="cannot go back"):
            cache.correct(model, torch.tensor([[5]]))


@pytest.mark.parametrize("reduce", ["max", "mean"])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_heads_are_compared_by_capped_logits(reduce: Any, softcap: float | None) -> None:
    """A head whose logits are large would otherwise decide for its group; of the largest, the order is the same."""
    keys, q = torch.randn(1, 30, 8, generator=torch.Generator().manual_seed(0)), torch.ones(1, 2, 8)
    q[0, 1] = torch.linspace(-9, 9, 8)
    at = Where(0, 1, lambda: torch.tensor([4]), 4, lambda: keys, 0.5, 30, softcap=softcap)
    logits = q @ keys.mT * 0.5
    capped = logits if softcap is None else softcap * (logits / softcap).tanh()
    want = capped.amax(1) if reduce == "max" else capped.mean(1)
    assert torch.equal(Tidal(reduce=reduce).wanted(q, at).argsort(1), want.argsort(1))
