"""`cache.stats()` says what is really allocated, held and read."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import MIXED, SMALL, Bare, every, greedy, held, one, patched, prompts
from torch import Tensor
from transformers import LogitsProcessor

import kvengine
from kvengine.cache import LayerCache
from kvengine.evals import maps
from kvengine.session import Call
from kvengine.stack import Stack

TOKEN = 2 * 16 * 4  # bytes of a key and a value
KIVI = 16 * 2 * 16 // 2 + 2 * (2 * 16 + 16 * 2) * 2  # of a page: codes; scales and zeros
BY_TOKEN = {"oracle_topk(budget=24)": TOKEN}


def tensors_of(cache: kvengine.EngineCache) -> dict[int, int]:
    """Bytes of every storage that can be reached from the cache's lanes, found by walking objects."""
    found: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[object] = [cache.session.text, *(part.lane for layer in cache.engines for part in layer.parts)]
    while todo:
        x = todo.pop()
        if id(x) in seen or isinstance(x, (type, str, int, float, torch.dtype, torch.device)):
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            storage = x.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(x, dict):
            todo += x.values()
        elif isinstance(x, (list, tuple)):
            todo += x
        elif type(x).__module__.startswith("kvengine") and not isinstance(x, kvengine.EngineCache):
            todo += [
                v for k, v in getattr(x, "__dict__", {}).items() if k not in ("session", "stack", "retention", "users")
            ]
    return found


def check_bytes(cache: kvengine.EngineCache) -> None:
    """What is reported is what is allocated; pages on their way to another tier may arrive meanwhile."""
    gc.collect()
    lanes = [part.lane for layer in cache.engines for part in layer.parts]
    for _ in range(50):
        stats, real = cache.stats(), sum(tensors_of(cache).values())
        if stats.bytes == cache.stats().bytes:
            break
        time.sleep(0.02)
    read = [
        x
        for lane in lanes
        for x in (lane.units, lane.saw and lane.saw.tail, lane.beside.made and lane.beside.made.units)
    ]
    small = 640 * len(lanes) + sum(x.nbytes for x in read if x is not None)  # lengths of rows, …
    host = stats.bytes.get("host", {})
    other = host.get("pages.index", 0) + host.get("page.behind", 0)  # no tensors: a graph, what is still to be written
    assert 0 <= real - stats.tier("device") - stats.tier("host") + other <= small
    assert set(stats.bytes) <= {"device", "host", "disk", "remote"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("asked", [prompts, one], ids=["ragged", "alone"])
@pytest.mark.parametrize("text", every(5, [*SMALL.values(), *MIXED]))
def test_bytes_equal_the_allocations(text: str, asked: Callable[[], dict[str, Tensor]]) -> None:
    """After decoding, and after a prompt that follows: nothing is kept of what was there before."""
    model, inputs = patched(text), asked()
    cache = kvengine.EngineCache(model)
    out = greedy(model, inputs, cache=cache)
    check_bytes(cache)
    ids = torch.cat([inputs["input_ids"], out, inputs["input_ids"][:, -40:]], 1)
    mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, inputs["input_ids"].shape[1] :])], 1)
    greedy(model, {"input_ids": ids, "attention_mask": mask}, 1, cache=cache)
    check_bytes(cache)


def test_a_prompt_that_follows_keeps_nothing_that_units_were_chosen_by_before() -> None:
    """A case of the test above that the fast suite would leave out: the summaries grow, and who saw them must let go."""
    test_bytes_equal_the_allocations(SMALL["quest"], one)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("text", every(3, [*SMALL.values(), *MIXED], 1))
def test_tokens_held_are_those_that_are_there(text: str) -> None:
    model = patched(text)
    cache = kvengine.EngineCache(model)
    greedy(model, prompts(), cache=cache)
    stats = cache.stats()
    assert stats.held.tolist() == [[[len(p) for p in heads] for heads in held(layer)] for layer in cache.engines]
    assert (stats.attended <= stats.held).all() and stats.seen == 61 + 23


@pytest.mark.parametrize(
    ("text", "held_by_head", "read_by_head"),
    [
        ("full", 84, 84),
        ("streaming(sinks=2, recent=14)", 16, 16),
        ("h2o(budget=24)", 24, 24),
        ("snapkv(budget=24, window=6)", 24 + 23, 24 + 23),
        ("oracle_topk(budget=24)", 84, 24),
    ],
)
def test_budgets_are_tokens(text: str, held_by_head: int, read_by_head: int) -> None:
    model = patched(text)
    cache = kvengine.EngineCache(model)
    greedy(model, one(), cache=cache)
    stats = cache.stats()
    assert (stats.held == held_by_head).all() and (stats.attended == read_by_head).all()


def test_of_pages_that_were_taken_back_nothing_is_read() -> None:
    one = Bare("quest(budget=24, page=4)", rows=1, heads=1)
    one.feed(24)
    lane = one.cache.parts[0].lane
    assert lane.pages is not None
    units, one.cache.session.recording = lane.pages.units, True
    for _ in range(9):
        one.feed(1)
    asked = lane.units
    assert asked is not None and units in asked
    one.back(9)
    there = {4 * unit + i for unit in asked.flatten().tolist() if 0 <= unit < units for i in range(4)}
    found = [at for at in lane.reach().flatten().tolist() if at >= 0]
    assert sorted(found) == sorted(there | set(range(4 * units, 24)))


def test_a_selection_never_reads_more_than_its_budget() -> None:
    model = patched("quest(budget=40, page=4)")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        token = model(**one(), cache=cache).logits[:, -1:].argmax(-1)
        for _ in range(40):
            token = model(token, cache=cache).logits.argmax(-1)
            assert int(cache.stats().attended.max()) <= 40 < int(cache.stats().held.min())


@pytest.mark.parametrize(
    ("text", "least"),
    [
        ("quest(budget=40, page=4)", 37),
        ("oracle_topk(budget=24)", 24),
        ("retrieval(budget=24, chunk=4)", 21),
        ("ann(budget=24)", 24),
        ("tidal(budget=24, start=0, reselect=0)", 24),
        ("oracle_topk(budget=32) + kivi(bits=4, group=8, residual=8)", 32),
    ],
)
def test_a_token_whose_page_is_sealed_after_it_has_read_its_budget_too(text: str, least: int) -> None:
    """Pages hold 16 tokens: two are sealed on the way. Bytes follow what is read, with the tail and without."""
    model = patched(text)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        token = model(**one(), cache=cache).logits[:, -1:].argmax(-1)
        sizes = []
        for _ in range(40):
            token = model(token, cache=cache).logits.argmax(-1)
            stats, read = cache.stats(), maps.read(cache).sum(-1)
            last = stats.attended[-1]
            assert least <= int(last.min()) and int(last.max()) <= int(text.split("=")[1][:2])
            assert torch.equal(read, stats.attended)
            sizes.append(stats.read_per_token)
            if text in BY_TOKEN:  # the tail, and the rest of what was read one by one; codes: `test_bytes_read`
                tails = [part.lane.tail for layer in cache.engines for part in layer.parts]
                near = sum(2 * len(tail) for tail in tails)
                placed = sum(2 * len(tail) * 4 * tail.placed for tail in tails)
                assert sizes[-1] == near * TOKEN + placed + (int(stats.attended.sum()) - near) * BY_TOKEN[text]
    if "kivi" not in text and "ann" not in text:
        assert max(sizes) < 1.6 * min(sizes)


def test_of_what_was_dropped_later_nothing_counts_as_read() -> None:
    """Tokens dropped one by one leave holes, pages go, the others are packed anew."""
    model = patched("streaming(sinks=2, recent=38) + quest(budget=24, page=4)")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        token = model(**prompts(), cache=cache).logits[:, -1:].argmax(-1)
        for _ in range(80):
            token = model(token, cache=cache).logits.argmax(-1)
            stats = cache.stats()
            assert torch.equal(maps.read(cache).sum(-1), stats.attended) and int(stats.attended.max()) <= 24
            assert int(stats.attended.min()) >= 12 and (maps.held(cache) | ~maps.read(cache)).all()


def test_a_second_prompt_forgets_what_was_read_before() -> None:
    model = patched("quest(budget=24, page=4)")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**one(), cache=cache)
        model(one(1)["input_ids"], cache=cache)
        assert int(cache.stats().attended.max()) <= 24
        cache.follow_up(False)
        model(one(30)["input_ids"], cache=cache)
    assert torch.equal(cache.stats().attended, cache.stats().held)


def test_heads_that_stream_free_their_bytes() -> None:
    """Half of the heads with 12 of 400 tokens: about half of the bytes, not all of them."""
    sizes = []
    for text in ("full", "duo(sparsity=0.5, sinks=2, recent=10)"):
        model = patched(text)
        cache = kvengine.EngineCache(model)
        with torch.no_grad():
            model(**one(400), cache=cache)
        sizes.append(cache.stats().bytes_held)
    assert 0.45 < sizes[1] / sizes[0] < 0.6


def test_four_bits_take_the_bytes_of_four_bits() -> None:
    """4 + 32 / 32 effective bits of 32: 5 of 32, plus positions and the exact residual."""
    model = patched("kivi(bits=4, group=16, residual=0)", head_dim=32)
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        model(**one(512), cache=cache)
    fields = cache.stats().bytes["device"]
    values = 2 * 2 * 512 * 32  # layers, heads, tokens, channels
    assert sum(size for name, size in fields.items() if name.startswith("page.")) == 2 * values * (4 + 2 * 16 / 16) / 8


def test_tokens_dropped_one_by_one_free_pages() -> None:
    model = patched("h2o(budget=24) + host")
    cache = kvengine.EngineCache(model)
    with torch.no_grad():
        token = model(**one(200), cache=cache).logits[:, -1:].argmax(-1)
        most = 0
        for _ in range(200):
            token = model(token, cache=cache).logits.argmax(-1)
            stats = cache.stats()
            most = max(most, stats.pages_used + stats.pages_free)
    assert most <= 2 * 2 * 10 and stats.tier("host") > 0  # layers, heads; 24 tokens in pages of 16, half of them holes


def test_pages_that_cannot_be_packed_anew_are_given_back_when_they_are_empty() -> None:
    """Quantised tokens are not moved, so 24 of them keep at most 24 pages; 38 were filled."""
    bare = Bare("h2o(budget=24) + kivi(group=8, residual=8)", tokens=700)
    bare.feed(100)
    for _ in range(600):
        bare.feed(1)
    (part,) = bare.cache.parts
    pages = part.lane.pages
    assert pages is not None and pages.columns <= 24 and pages.pool.pages <= 2 * 24 * 9 // 8 + 2


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("full", 0),
        ("snapkv(budget=24, window=6)", 0),
        ("h2o(budget=24)", 0),  # scores are written, and read by who judges
        ("streaming(sinks=2, recent=14)", 0),
        ("kivi(bits=4, group=8, residual=8)", KIVI),
        ("quest(budget=24, page=4)", 16 * TOKEN),
        ("oracle_topk(budget=24)", 16 * TOKEN),
    ],
)
def test_bytes_read_are_those_of_the_tokens_read(text: str, page: int) -> None:
    """The open tail, with positions if it has any, the pages or parts that are chosen, and of all pages their bounds."""
    model = patched(text)
    cache = kvengine.EngineCache(model)
    greedy(model, one(), cache=cache)
    stats, want = cache.stats(), 0
    for layer, read in zip(cache.engines, stats.attended.sum((1, 2)).tolist(), strict=True):
        (part,) = layer.parts
        tail, rows = len(part.lane.tail), 2
        want += rows * tail * (TOKEN + 4 * part.lane.tail.placed) + (read - rows * tail) * page // 16
        pages = part.lane.pages
        want += 0 if pages is None or not text.startswith("quest") else rows * pages.units * 2 * 16 * 4
    assert stats.read_per_token == want


def test_what_moves_to_the_host_is_counted_there() -> None:
    model = patched("quest(budget=24) + host(fields=('v',))")
    cache = kvengine.EngineCache(model)
    greedy(model, one(), cache=cache)
    stats = cache.stats()
    assert set(stats.bytes["host"]) == {"page.v"} and "page.k" in stats.bytes["device"]
    assert stats.tier("host") == stats.bytes["device"]["page.k"] and "host" in str(stats)


def test_an_empty_cache_has_empty_statistics() -> None:
    cache = kvengine.EngineCache(patched("full"))
    assert cache.stats().bytes_held == 0 and Stack() == cache.stack


def computed(text: str, ids: Tensor, mask: Tensor | None = None, **options: int) -> float | None:
    model = patched(text)
    cache = kvengine.EngineCache(model)
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids) if mask is None else mask}
    greedy(model, batch, 1, cache=cache, **options)
    return cache.stats().computed


def test_what_is_computed_of_a_prompt() -> None:
    ids = torch.randint(2, 100, (1, 300), generator=torch.Generator().manual_seed(5))
    assert computed("snapkv(budget=24, window=6)", ids) is None
    assert computed("xattention(threshold=1.0)", ids) == 1
    band, every = 0, 300 * 301 // 2
    for start in range(0, 300, 128):  # a block computes what any of its queries sees of the tokens up to each
        near = max(0, start - 8 + 1)
        band += sum(min(2, near) + i + 1 - near for i in range(start, min(300, start + 128)))
    assert computed("ashape(sinks=2, local=8)", ids) == pytest.approx(band / every)
    some = computed("xattention(threshold=0.3, stride=4, block=16, last=8)", ids)
    assert some is not None and 0.1 < some < 0.9
    assert computed(
        "xattention(threshold=0.3, stride=4, block=16, last=8)", ids, prefill_chunk_size=160
    ) == pytest.approx(some)


def test_padding_is_not_counted_as_computed() -> None:
    ids = torch.randint(2, 100, (2, 200), generator=torch.Generator().manual_seed(6))
    text, mask = "xattention(threshold=0.3, stride=4, block=16, last=8)", torch.ones_like(ids)
    mask[1, :70] = 0
    first, second = computed(text, ids[:1]), computed(text, ids[1:, 70:])
    assert first is not None and second is not None
    pairs = 200 * 201 / 2, 130 * 131 / 2
    together = (first * pairs[0] + second * pairs[1]) / sum(pairs)
    assert computed(text, ids, mask=mask) == pytest.approx(together)


def test_an_empty_cache_holds_nothing() -> None:
    stats = kvengine.EngineCache(patched("quest(budget=32, page=8)")).stats()
    assert str(stats) == "0 tokens seen; per head 0 held, 0 read; nothing held"


def test_layers_that_a_first_pass_did_not_come_to_hold_nothing() -> None:
    """Who ran out of memory there asks what is held."""
    cache = kvengine.EngineCache(model := patched("duo(sinks=4, recent=8)"))
    model.model.layers[1].self_attn.q_proj = None
    with pytest.raises(TypeError):
        model(one(70)["input_ids"], cache=cache)
    held = cache.stats().held
    assert held.tolist() == [[[70, 12]], [[0, 0]]] and torch.equal(maps.held(cache).sum(-1), held)


@pytest.mark.parametrize("text", ["kivi(bits=4)", "quest(budget=64)"])
def test_a_tail_that_is_sealed_from_stays_where_it_is(text: str) -> None:
    """Neither copied every few tokens nor grown: what was sealed leaves room for what comes."""
    cache = LayerCache(Stack.parse(text), 0, 1)
    given = [torch.randn(1, heads, 500, 64, generator=torch.Generator().manual_seed(2)) for heads in (4, 2, 2)]
    cache.forward(*(x[:, :, :200] for x in given), Call(0.125))
    tail, places = cache.parts[0].lane.tail, set()
    for i in range(200, 500):
        cache.forward(*(x[:, :, i : i + 1] for x in given), Call(0.125))
        places.add((tail.k.data_ptr(), tail.capacity))
        for x, every_one in zip(tail.held(), given[1:], strict=False):
            assert torch.equal(x.unflatten(0, (1, 2)), every_one[:, :, i + 1 - len(tail) : i + 1])
    assert len(places) == 1


@pytest.mark.parametrize("text", ["full", "quest(budget=64)", "snapkv(budget=64)"])
def test_chunks_of_an_announced_prompt_stay_where_they_are(text: str) -> None:
    """Not copied again and again, each time with all of a layer there twice, until one in 64 is larger than a chunk."""
    cache, places = LayerCache(Stack.parse(text), 0, 1), set()
    given = [torch.randn(1, heads, 500, 64, generator=torch.Generator().manual_seed(2)) for heads in (4, 2, 2)]
    cache.session.prompt_end = 500
    for i in range(0, 480, 20):
        cache.forward(*(x[:, :, i : i + 20] for x in given), Call(0.125))
        tail = cache.parts[0].lane.tail
        places.add((tail.k.data_ptr(), tail.capacity))
    assert len(places) == 1 and tail.capacity == 500
    for x, every_one in zip(tail.held(), given[1:], strict=False):
        assert torch.equal(x.unflatten(0, (1, 2)), every_one[:, :, :480])
    trained = LayerCache(Stack.parse(text), 0, 1)
    trained.session.prompt_end = 500
    q, k, v = (x.clone().requires_grad_() for x in given)
    outs = [trained.forward(q[:, :, s], k[:, :, s], v[:, :, s], Call(0.125)) for s in (slice(0, 250), slice(250, 500))]
    sum(out.sum() for out in outs).backward()  # type: ignore[union-attr]


@pytest.mark.parametrize("chunk", [None, 16])
def test_the_first_token_of_an_answer_does_not_move_the_prompt(chunk: int | None) -> None:
    """All layers would be copied before it, one after the other, each there twice for a moment."""
    model, ids, places = patched("full"), torch.arange(90)[None], list[Any]()
    cache = kvengine.EngineCache(model)

    class Watching(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            places.append(
                [(part.lane.tail.k.data_ptr(), part.lane.tail.capacity) for x in cache.engines for part in x.parts]
            )
            return scores

    more = {"prefill_chunk_size": chunk} if chunk else {}
    model.generate(
        ids, cache=cache, max_new_tokens=5, do_sample=False, eos_token_id=None, logits_processor=[Watching()], **more
    )
    assert len(places) == 5 and all(now == places[0] for now in places)
    assert all(slots < 90 + 10 for _, slots in places[0])
