"""ShadowKV's resident set, and its bytes at the shape of an 8B model."""

import numpy as np
import pytest
import torch
from support_layer import Tokens, draw, rope, run

from kvengine.cache import LayerCache
from kvengine.errors import UnknownPolicy
from kvengine.offload.placement._tiered import oldest
from kvengine.offload.placement.host import Fetched
from kvengine.session import Call, Session
from kvengine.stack import Stack
from kvengine.stats import Stats, measure

HEADS, DIM, RANK, CHUNK, PAGE = 8, 128, 160, 8, 16  # Llama-3-8B: 8 KV heads of 128; ShadowKV's defaults


def at_8b(tokens: int) -> Stats:
    """One layer of the shape of an 8B model after a prompt, in bf16."""
    g = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, HEADS, tokens, DIM, generator=g).bfloat16() for _ in range(2))
    session = Session(rope=rope(DIM), prompt_end=tokens)
    cache = LayerCache(Stack.parse("shadowkv(budget=512)"), 0, 1, session)
    for a in range(0, tokens, 512):
        cache.forward(
            k[:, :, a : a + 512], k[:, :, a : a + 512], v[:, :, a : a + 512], Call(DIM**-0.5), stock=no_attention
        )
    return measure([cache])


def no_attention(k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The prompt's own output is not looked at."""
    return v[:, :, -512:].transpose(1, 2)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the model is on a device: on a CPU pages are read in place."""
    monkeypatch.setattr(Fetched, "resident", lambda *_: None)


@pytest.mark.usefixtures("fetched")
def test_a_prompt_token_takes_the_bytes_of_the_formula() -> None:
    """What one more prompt token takes of the device: 2 (r + Hk d / C) as in the paper, and our addresses.

    Its code adds 8 Hk / C bytes of chunk numbers, 584 in all, of the 4096 of a full cache. Ours has a position for
    every token and row, a page number per page and row, and whether a chunk is alive: 35 bytes, 611 in all.
    Rows leave different chunks alone, so their positions differ. One per chunk would do, since a chunk's tokens follow one
    another: 583 in all, for which every step would have to spell them out for the kernels that read them.
    """
    short, long = at_8b(1024), at_8b(2048)
    more = {name: size - short.bytes["device"].get(name, 0) for name, size in long.bytes["device"].items()}
    per_token = {name: size / 1024 for name, size in more.items() if size}
    assert per_token == {
        "pages.joint.u": 2 * RANK,
        "pages.summary.mean": 2 * HEADS * DIM / CHUNK,
        "pages.position": 4 * HEADS,
        "pages.table": 4 * HEADS / PAGE,
        "pages.alive": HEADS / CHUNK,
    }
    assert per_token["pages.joint.u"] + per_token["pages.summary.mean"] + 8 * HEADS / CHUNK == 584
    assert sum(per_token.values()) == 611 and 4 * HEADS * DIM == 4096
    values = 2 * HEADS * DIM
    assert (long.tier("host") - short.tier("host")) / 1024 == values
    assert long.bytes["device"]["page.v"] == short.bytes["device"]["page.v"] <= 512 * values  # the resident set


POLICY = "lowrank(rank=8) + landmarks(budget=96, chunk=4, local=8) + host(fields=('v',)"


@pytest.mark.parametrize("keep", ["previous", "lru"])
@pytest.mark.usefixtures("fetched")
def test_the_same_query_fetches_nothing_twice(keep: str) -> None:
    tokens = draw(166, heads=2)
    q = tokens.q.clone()
    q[:, :, 160:] = q[:, :, 160:161]
    tokens = Tokens(q, tokens.k, tokens.v)
    counts, chosen = [], []
    for end in range(160, 166):
        found = run(f"{POLICY}, resident=96, keep='{keep}')", Tokens(*tokens.part(0, end)), 160)
        stats = measure([found.cache])
        counts.append((stats.hits, stats.misses))
        chosen.append(0 if found.lane.units is None else int((found.lane.units >= 0).sum()))
    misses = [b[1] - a[1] for a, b in zip(counts, counts[1:], strict=False)]
    hits = [b[0] - a[0] for a, b in zip(counts, counts[1:], strict=False)]
    assert misses[0] > 0 and not any(misses[1:])
    assert [h + m for h, m in zip(hits, misses, strict=True)] == chosen[1:]


@pytest.mark.parametrize("keep", ["previous", "lru"])
@pytest.mark.usefixtures("fetched")
def test_hits_and_misses_are_those_of_a_plain_list(keep: str) -> None:
    """Against sets of (row, unit): what is read, and of it what a resident set of that rule had."""
    tokens, capacity = draw(200, heads=2), 2 * 96 // 4
    resident: list[tuple[int, int]] = []
    slots: list[list[tuple[int, int]]] = [[], []]
    hits = misses = 0
    session = Session(rope=rope(16), prompt_end=160)
    cache = LayerCache(Stack.parse(f"{POLICY}, resident=96, keep='{keep}')"), 0, 1, session)
    cache.forward(*tokens.part(0, 160), Call(tokens.scale))
    lane = cache.parts[0].lane
    if keep == "lru":  # pages come there when they are sealed
        shelf = lane.pages.pool.shelves[0]  # type: ignore[union-attr]
        row_of = {int(p): (r, c) for r, row in enumerate(lane.pages.table.tolist()) for c, p in enumerate(row)}  # type: ignore[union-attr]
        there = np.flatnonzero(shelf.slot[0] >= 0).tolist()  # type: ignore[attr-defined]
        resident = [(row_of[i // 4][0], row_of[i // 4][1] * 4 + i % 4) for i in there]
    for i in range(160, 200):
        cache.forward(*tokens.part(i, i + 1), Call(tokens.scale))
        wanted = [(r, u) for r, row in enumerate(lane.units.tolist()) for u in row if u >= 0]  # type: ignore[union-attr]
        hits, misses = hits + sum(w in resident for w in wanted), misses + sum(w not in resident for w in wanted)
        if keep == "previous":  # in slots of a row, of which a step that reads fewer leaves some
            for r, held in enumerate(slots):
                mine = [w for w in wanted if w[0] == r]
                held[: len(mine)] = mine
            resident = [w for held in slots for w in held]
        else:
            resident = [x for x in resident if x not in wanted]
            new = sorted(wanted, key=lambda w: int(lane.pages.table[w[0], w[1] // 4]) * 4 + w[1] % 4)  # type: ignore[union-attr]
            resident = ([*resident, *new])[-capacity:]
    stats = measure([cache])
    assert (stats.hits, stats.misses) == (hits, misses) and hits > 0 < misses


def test_those_longest_unused_go_first() -> None:
    assert oldest(np.array([5, 1, 5, 3]), 2).tolist() == [1, 3]


@pytest.mark.parametrize("keep", ["previous", "lru"])
@pytest.mark.usefixtures("fetched")
def test_the_resident_set_changes_no_output(keep: str) -> None:
    tokens = draw(200, heads=2)
    with_set = run(f"{POLICY}, resident=96, keep='{keep}')", tokens, 160)
    assert torch.equal(run(f"{POLICY})", tokens, 160).out, with_set.out)
    stats = measure([with_set.cache])
    assert stats.bytes["device"]["page.v"] <= 2 * 96 * 16 * 4


def test_an_option_that_the_preset_does_not_have_is_refused_by_its_name() -> None:
    with pytest.raises(UnknownPolicy, match="no option of shadowkv is called 'buget'. Did you mean 'budget'"):
        Stack.parse("shadowkv(buget=512)")
