"""KVzip against an oracle: the stock model with eager attention reads the prompt and repeats it, in a few lines of torch."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support import Bare, greedy, held, llama, one, prompts
from torch import Tensor
from transformers import DynamicCache

import kvengine
from kvengine.errors import CacheError, PolicyError, UnsupportedPolicy
from kvengine.hf.names import CACHE
from kvengine.policies.retention.kvzip import best_of_all
from kvengine.session import Call
from kvengine.stack import Stack

LAYERS, HEADS = 2, 2


def oracle(
    model: Any, ids: Tensor, chunk: int, carry: int, sinks: int, prompt: Sequence[int] = (), suffix: Sequence[int] = ()
) -> Tensor:
    """[layer, head, token]: the most that the repeated text pays to each token, of one sequence [1, token]."""
    cache, n = DynamicCache(), ids.shape[1]
    model(ids, **{CACHE: cache})
    found = torch.zeros(LAYERS, HEADS, n)
    for start in range(0, n, chunk):
        end = min(n, start + chunk)
        before = ids[:, max(0, start - carry) : start] if carry else ids[:, :0]
        fed = torch.cat(
            [torch.tensor([[*prompt]]).long(), before, torch.tensor([[*suffix]]).long(), ids[:, start:end]], 1
        )
        out = model(fed, **{CACHE: copy.deepcopy(cache)}, output_attentions=True)
        columns = [*range(min(sinks, start)), *range(start, end), *range(n, n + fed.shape[1])]
        for layer, weights in enumerate(out.attentions):
            among = weights[0][..., columns]
            among = among / among.sum(-1, keepdim=True)
            at = min(sinks, start)
            peak = among[..., at : at + end - start].amax(1)  # over what is fed
            found[layer, :, start:end] = peak.unflatten(0, (HEADS, -1)).amax(1)  # over the group
    return found


def best(scores: Tensor, budget: int) -> list[list[list[int]]]:
    """[layer][head]: positions of the best of all layers and heads."""
    keep = torch.zeros(scores.numel(), dtype=torch.bool)
    keep[scores.flatten().topk(min(scores.numel(), budget * LAYERS * HEADS)).indices] = True
    return [[row.nonzero()[:, 0].tolist() for row in layer] for layer in keep.view_as(scores)]


def read(model: Any, batch: dict[str, Tensor], **options: Any) -> kvengine.EngineCache:
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**batch, cache=cache, **options)
    return cache


def kept(cache: kvengine.EngineCache, row: int = 0, late: int = 0) -> list[list[list[int]]]:
    return [[[p - late for p in head] for head in held(layer)[row]] for layer in cache.engines]


def peer() -> Any:
    model = llama()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 64, "carry": 8, "sinks": 4},
        {"chunk": 16, "carry": 3, "sinks": 2},
        {"chunk": 20, "carry": 0, "sinks": 0},
        {"chunk": 13, "carry": 13, "sinks": 4, "prompt": (5, 6, 7), "suffix": (9, 3)},
    ],
)
@torch.no_grad()
def test_what_stays_is_what_the_oracle_keeps(options: dict[str, Any]) -> None:
    """Of rows with and without padding, in one chunk and in several."""
    batch, stock = prompts(), peer()
    spelled = ", ".join(f"{name}={value}" for name, value in options.items())
    cache = read(kvengine.patch(llama(), f"kvzip(budget=12, {spelled})"), batch)
    for row, mask in enumerate(batch["attention_mask"].bool()):
        ids = batch["input_ids"][row, mask][None]
        late = int((~mask).sum())
        assert kept(cache, row, late) == best(oracle(stock, ids, **options), 12)
    lengths = [len(head) for layer in kept(cache) for head in layer]
    assert sum(lengths) == 12 * LAYERS * HEADS and len(set(lengths)) > 1


@torch.no_grad()
def test_scores_are_stored_and_a_later_turn_repeats_what_came_since() -> None:
    """The first prompt keeps its scores; the answer's and the new turn's tokens are repeated together."""
    model, stock = kvengine.patch(llama(), "kvzip(budget=12, chunk=16, carry=3, sinks=2)"), peer()
    ids, more = one()["input_ids"], one(30, seed=7)["input_ids"]
    cache = read(model, {"input_ids": ids})
    first = kept(cache)
    scores = oracle(stock, ids, 16, 3, 2)
    answer = more[:, :5]
    for token in answer.T:
        model(token[None], cache=cache)
    assert [len(head) for layer in kept(cache) for head in layer] == [len(h) + 5 for x in first for h in x]
    model(more[:, 5:], cache=cache)
    lowest = []
    for layer, (x, y) in enumerate(zip(first, kept(cache), strict=True)):
        for head, (before, now) in enumerate(zip(x, y, strict=True)):
            assert set(now) <= {*before, *range(61, 91)}
            gone = [float(scores[layer, head, p]) for p in before if p not in now]
            lowest.append(
                (max(gone, default=0.0), min((float(scores[layer, head, p]) for p in now if p < 61), default=9.0))
            )
    assert max(gone for gone, _ in lowest) < min(stays for _, stays in lowest)
    stays = [p for x in kept(cache) for head in x for p in head]
    late = [p for p in stays if p > 60]
    assert 0 < len(late) < len(stays)  # old scores count beside new ones
    assert sum(len(head) for x in kept(cache) for head in x) == 12 * LAYERS * HEADS
    assert any(p < 66 for p in late) and any(p > 66 for p in late)


@pytest.mark.parametrize(
    ("softcap", "sinks"), [(0.5, None), (None, [2.0, -1.0, 3.0, 0.0]), (0.7, [1.0, 2.0, -2.0, 3.0])]
)
def test_softcaps_and_sinks_count_where_a_text_is_repeated(softcap: float | None, sinks: list[float] | None) -> None:
    """One layer without a model: what a repeated token pays, written out."""
    bare = Bare("kvzip(budget=12, chunk=16, carry=3, sinks=2)", tokens=60)
    extra = None if sinks is None else torch.tensor(sinks).view(HEADS, -1)
    bare.call = Call(bare.call.scale, softcap, extra)
    bare.feed(60)
    q, k = bare.q[0].unflatten(0, (HEADS, -1)), bare.k[0]
    found = torch.zeros(HEADS, 60)
    for start in range(0, 60, 16):
        chunk = torch.arange(start, min(60, start + 16))
        fed = torch.cat([torch.arange(max(0, start - 3), start), chunk])
        columns = torch.cat([torch.arange(min(2, start)), chunk, fed])
        logits = q[:, :, fed] @ k[:, None, columns].mT * bare.call.scale
        logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
        late = torch.arange(len(columns)) - (len(columns) - len(fed)) > torch.arange(len(fed))[:, None]
        logits = logits.masked_fill(late, -torch.inf)
        if extra is not None:
            logits = torch.cat([logits, extra[..., None, None].expand(-1, -1, len(fed), 1)], -1)
        first = min(2, start)
        found[:, chunk] = logits.softmax(-1)[..., first : first + len(chunk)].amax((1, 2))
    keep = torch.zeros(found.numel(), dtype=torch.bool)
    keep[found.flatten().topk(12 * HEADS).indices] = True
    assert held(bare.cache)[0] == [row.nonzero()[:, 0].tolist() for row in keep.view_as(found)]


@torch.no_grad()
def test_turns_are_repeated_over_pages_with_holes_as_over_none() -> None:
    """What is sealed is as exact elsewhere; heads that keep less leave holes."""
    talk, found = one(360, seed=3)["input_ids"].split([150, 5, 100, 5, 100], 1), []
    for text in (
        "kvzip(budget=80, chunk=16, carry=3, sinks=2)",
        "kvzip(budget=80, chunk=16, carry=3, sinks=2) + host",
    ):
        model = kvengine.patch(llama(), text)
        cache = kvengine.EngineCache(model)
        for i, part in enumerate(talk):
            for piece in part.split(1, 1) if i % 2 else [part]:
                model(piece, cache=cache)
            found.append(kept(cache))
        assert all(part.lane.repeated is None for layer in cache.engines for part in layer.parts)  # let go of
    assert found[:5] == found[5:]


@torch.no_grad()
def test_a_text_within_the_budget_is_not_read_twice() -> None:
    model, passes = kvengine.patch(llama(), "kvzip(budget=61)"), []
    model.model.register_forward_hook(lambda *_: passes.append(1))
    cache = read(model, one())
    assert len(passes) == 1 and kept(cache) == [[list(range(61))] * HEADS] * LAYERS
    more = one(20, seed=3)["input_ids"]
    model(more, cache=cache)
    assert len(passes) == 3 and sum(len(h) for x in kept(cache) for h in x) == 61 * LAYERS * HEADS
    assert torch.equal(greedy(kvengine.patch(llama(), "kvzip(budget=1.0)"), one()), greedy(llama(), one()))


def test_pages_are_freed() -> None:
    want = read(kvengine.patch(llama(), "full"), one(800)).stats().bytes_held
    found = read(kvengine.patch(llama(), "kvzip(budget=0.125)"), one(800)).stats()
    assert found.bytes_held < 0.3 * want and int(found.held.sum()) == 100 * LAYERS * HEADS


@torch.no_grad()
def test_the_pass_is_as_it_was() -> None:
    """Its outputs, hidden states included, and the model, which keeps nothing of a replay."""
    stock = llama()(**prompts(), output_hidden_states=True)
    model = kvengine.patch(llama(), "kvzip(budget=12, chunk=16)")
    out = model(**prompts(), cache=kvengine.EngineCache(model), output_hidden_states=True)
    assert torch.equal(out.logits, stock.logits) and len(out.hidden_states) == len(stock.hidden_states)
    assert all(torch.equal(a, b) for a, b in zip(out.hidden_states, stock.hidden_states, strict=True))


@pytest.mark.parametrize("passes", [1, 2, 4])
@torch.no_grad()
def test_a_replay_that_breaks_off_leaves_the_cache_torn(passes: int) -> None:
    model = kvengine.patch(llama(), "kvzip(budget=12, chunk=16)")
    cache, ids, calls = kvengine.EngineCache(model), one()["input_ids"], []

    def interrupt(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 1 + passes:
            raise KeyboardInterrupt

    hook = model.model.layers[1].self_attn.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        model(ids, cache=cache)
    hook.remove()
    for tokens in (ids[:, :1], ids):
        with pytest.raises(CacheError, match="broke off"):
            model(tokens, cache=cache)
    cache.reset()
    model(ids, cache=cache)
    assert kept(cache) == kept(read(model, one()))


@torch.no_grad()
def test_vectors_are_repeated_as_ids_are() -> None:
    model = kvengine.patch(llama(), "kvzip(budget=12, chunk=16, prompt=(4, 5))")
    ids = one()["input_ids"]
    want = kept(read(model, {"input_ids": ids}))
    vectors = model.get_input_embeddings()(ids)
    assert kept(read(model, {"inputs_embeds": vectors})) == want
    cache = kvengine.EngineCache(model)
    cache.announce(61)
    model(inputs_embeds=vectors[:, :20], cache=cache)
    model(ids[:, 20:], cache=cache)
    assert kept(cache) == want


def test_equal_scores_go_in_order_and_counts_add_up() -> None:
    scores = [torch.rand(3, 2, 50).mul(8).floor().div(8), torch.rand(3, 4, 30).mul(8).floor().div(8)]
    scores[1][1, :, 20:] = -1
    total = torch.tensor([37, 120, 1000])
    found = best_of_all(scores, total)
    assert [int(found[0][i].sum() + found[1][i].sum()) for i in range(3)] == [37, 120, 220]
    for i in range(3):
        rows = [row[row >= 0].tolist() for x in scores for row in x[i]]
        ranked = sorted(((-s, r) for r, row in enumerate(rows) for s in row))[: int(total[i])]
        assert [sum(r == n for _, r in ranked) for n in range(6)] == [*found[0][i].tolist(), *found[1][i].tolist()]


@pytest.mark.parametrize(
    "wrong",
    ["budget=0", "chunk=0", "carry=-1", "carry=17, chunk=16", "sinks=0.5", "prompt=[1]", "prompt=(-1,)", "suffix=5"],
)
def test_wrong_options_are_refused(wrong: str) -> None:
    with pytest.raises(PolicyError):
        Stack.parse(f"kvzip({wrong})")


def test_a_cache_without_its_text_is_refused() -> None:
    fed = Bare("kvzip(budget=24)")
    with pytest.raises(CacheError, match="without the tokens that made them"):
        fed.cache.forward(fed.q, fed.k, fed.v, fed.call)


def test_arguments_beside_the_text_are_refused() -> None:
    model = kvengine.patch(llama(), "kvzip(budget=12)")
    with torch.no_grad(), pytest.raises(UnsupportedPolicy, match="'strange' beside its tokens"):
        model(**one(), cache=kvengine.EngineCache(model), strange=torch.zeros(1))


@pytest.mark.parametrize("option", ["prompt", "suffix"])
def test_ids_that_the_model_does_not_know_are_refused_at_once(option: str) -> None:
    """They would be looked up when the first prompt exceeds the budget."""
    with pytest.raises(PolicyError, match="another tokenizer: llama knows 128"):
        kvengine.patch(llama(), f"kvzip({option}=(5, 128))")
    model = kvengine.patch(llama(), f"kvzip({option}=(5, 127))")
    with pytest.raises(PolicyError, match="another tokenizer"):
        kvengine.EngineCache(model, f"kvzip({option}=(128,))")


def test_of_scores_that_differ_by_their_last_bit_the_greater_counts() -> None:
    one = torch.tensor([[[0.25]]])
    found = best_of_all([one, one, one.nextafter(torch.tensor(1.0))], torch.tensor([2]))
    assert [n.tolist() for n in found] == [[[1]], [[0]], [[1]]]
