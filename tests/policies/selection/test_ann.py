"""The index against looking at every key; the same pages give the same index; its bytes; a machine without faiss."""

from __future__ import annotations

import copy
import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from support import Bare, patched
from support_layer import Run, Tokens, draw, padded, run, stacked
from torch import Tensor

from kvengine import EngineCache
from kvengine.errors import PolicyError, UnsupportedPolicy
from kvengine.stack import Stack
from kvengine.stats import measure

faiss = pytest.importorskip("faiss")
KINDS = ["flat", "ivf", "hnsw"]


def chosen(found: Run) -> list[set[int]]:
    """Positions that each row's last query read of the sealed tokens."""
    lane = found.lane
    assert lane.units is not None and lane.pages is not None
    return [{int(p[u]) for u in row if u >= 0} for row, p in zip(lane.units.tolist(), lane.pages.position, strict=True)]


def by_looking(q: Tensor, k: Tensor, sealed: int, count: int, scale: float) -> list[set[int]]:
    """The rule of the docstring in plain loops: q [row, group, dim], k [row, token, dim]."""
    rows = []
    for heads, keys in zip(q, k[:, :sealed], strict=True):
        want: dict[int, float] = {}
        for head in heads:
            logits = (keys @ head) * scale
            best = sorted(range(sealed), key=lambda i: -float(logits[i]))[:count]
            share = logits[best].log_softmax(0)
            for i, value in zip(best, share.tolist(), strict=True):
                want[i] = max(want.get(i, -1e30), value)
        rows.append(set(sorted(want, key=lambda i: -want[i])[:count]))
    return rows


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("placement", ["", " + host"])
def test_flat_reads_what_looking_at_every_key_would(group: int, placement: str) -> None:
    tokens = draw(321, group=group)
    found = run(f"ann(budget=64){placement}", tokens, 320)
    sealed, tail = len(found.lane.pages), len(found.lane.tail)  # type: ignore[arg-type]
    want = by_looking(tokens.q[0, :, 320].unflatten(0, (2, group)), tokens.k[0], sealed, 64 - tail, tokens.scale)
    assert chosen(found) == want
    assert chosen(found) != [set(range(64 - tail))] * 2


def test_flat_with_one_query_head_is_the_oracle() -> None:
    tokens = draw(400, group=1)
    torch.testing.assert_close(run("ann(budget=64)", tokens, 320).out, run("oracle_topk(budget=64)", tokens, 320).out)


@pytest.mark.parametrize(("kind", "probe", "least"), [("ivf", 8, 0.4), ("ivf", 10_000, 1.0), ("hnsw", 8, 0.9)])
def test_approximate_indices_find_most_and_all_when_they_look_everywhere(kind: str, probe: int, least: float) -> None:
    tokens = draw(1025)
    exact, some = (run(text, tokens, 1024) for text in (
        "ann(budget=64)", f"ann(budget=64, index='{kind}', probe={probe})"))  # fmt: skip
    pairs = list(zip(chosen(exact), chosen(some), strict=True))
    recall = sum(len(a & b) for a, b in pairs) / sum(len(a) for a, _ in pairs)
    assert recall >= least and all(len(a) == len(b) for a, b in pairs)


@pytest.mark.parametrize("loud", [10, 100])
@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_a_loud_channel_does_not_hide_the_keys_that_matter(kind: str, loud: int) -> None:
    tokens = draw(1025)
    tokens.k[..., 1] *= loud
    exact, some = (chosen(run(text, tokens, 1024)) for text in ("ann(budget=64)", f"ann(budget=64, index={kind!r})"))
    assert sum(len(a & b) for a, b in zip(exact, some, strict=True)) > 0.6 * sum(map(len, exact))


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_what_all_keys_have_in_common_does_not_matter(kind: str) -> None:
    """As loud channels have it: to every key the same is added, which moves all logits of a query alike."""
    tokens = draw(1025)
    policy = f"ann(budget=64, index={kind!r}, probe=2)"
    plain = chosen(run(policy, tokens, 1024))
    tokens.k[..., :4] += 16
    loud = chosen(run(policy, tokens, 1024))
    assert all(len(a & b) >= 0.8 * len(a) for a, b in zip(plain, loud, strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_pages_give_the_same_choice_whatever_came_before(kind: str) -> None:
    """At once and step by step; in a padded batch; in another order of rows; after a draft was taken back."""
    policy, tokens = f"ann(budget=64, index='{kind}', probe=2)", draw(580)
    found = run(policy, tokens, 500)
    longer, valid = padded(tokens, 17)
    both = run(policy, stacked(longer, padded(draw(580, seed=3), 17)[0]), 517, valid=torch.cat([valid, valid]))
    torch.testing.assert_close(both.out[:1, 17:], found.out, rtol=1e-4, atol=1e-5)
    drafted = run(policy, Tokens(*tokens.part(0, 540)), 500)
    cache = drafted.cache
    cache.session.recording = True
    for a, b in ((540, 560), (560, 575)):
        cache.forward(*(x[:, :, a:b] * 1.5 for x in (tokens.q, tokens.k, tokens.v)), call(tokens))
    cache.rollback(35)
    cache.commit()
    cache.session.recording = False
    rest = [cache.forward(*tokens.part(i, i + 1), call(tokens)) for i in range(540, 580)]
    torch.testing.assert_close(torch.cat(rest, 1), found.out[:, 540:], rtol=0, atol=0)


def call(tokens: Tokens) -> Any:
    from kvengine.session import Call

    return Call(tokens.scale)


def test_dropped_tokens_are_never_found() -> None:
    found = run("adakv(budget=300, window=6) + ann(budget=32, index='hnsw')", draw(601), 600)
    assert all(p >= 0 for row in chosen(found) for p in row) and all(row for row in chosen(found))


@pytest.mark.parametrize("kind", KINDS)
def test_the_index_is_counted(kind: str) -> None:
    found = run(f"ann(budget=64, index='{kind}')", draw(1025), 1024)
    stats = measure([found.cache])
    rows = found.lane.pages.beside["ann"].rows  # type: ignore[union-attr]
    real = sum(len(faiss.serialize_index(x)) for row in rows for x in (row.flat, row.fast, row.means) if x is not None)
    assert abs(stats.bytes["host"]["pages.index"] - real) <= 0.02 * real + 1000
    full = measure([run("quest(budget=64)", draw(1025), 1024).cache])
    assert stats.read_per_token > 64 * 16 * 8 and full.bytes["device"]["page.k"] == stats.bytes["device"]["page.k"]


@pytest.mark.parametrize(
    ("kind", "reads", "twice"),
    [
        ("ivf", 90 * 8 * 4 + 640 * 8 * 4 // 90, 90 * 8 * 4 + 2 * 640 * 8 * 4 // 90),
        ("hnsw", 64 * (8 + 64) * 4, 640 * 8 * 4),
    ],
)
def test_a_copy_of_an_index_is_the_same_and_grows_alone(kind: str, reads: int, twice: int) -> None:
    """Of 640 tokens. A search reads 90 centres, 4 sqrt(512), and one cell of as many; or 64 keys and their 64 links. Twice as
    thoroughly it reads two cells; or 128 keys and links, but no more than all keys take."""
    from kvengine.policies.selection._index import Row

    keys = np.random.default_rng(0).normal(size=(48, 16, 8)).astype(np.float32)
    row, every = Row(kind, 1), np.ones(768, dtype=bool)
    row.add(np.arange(40), keys[:40])
    row.columns = np.arange(40)
    twin, queries = copy.deepcopy(row), keys[47, :4]
    assert twin.nbytes == row.nbytes and twin.reads == row.reads == reads
    thorough = copy.deepcopy(row)
    thorough.probe = 2
    assert thorough.reads == twice
    thorough.probe = 1000
    assert thorough.reads == 640 * 8 * 4 + (90 * 8 * 4 if kind == "ivf" else 0)
    before = row.search(queries, 9, every)
    for mine, other in zip(before, twin.search(queries, 9, every), strict=True):
        assert np.array_equal(mine, other)
    twin.add(np.arange(40, 48), keys[40:])
    assert (row.tokens, twin.tokens, row.fast.ntotal, twin.fast.ntotal) == (640, 768, 640, 768)
    assert np.array_equal(row.search(queries, 9, every)[0], before[0])


@pytest.mark.parametrize("kind", ["flat", "ivf"])
def test_a_row_finds_the_best_living_tokens_wherever_its_pages_are(kind: str) -> None:
    """33 pages of 8 tokens, between columns in which it has none; all cells are looked at."""
    from kvengine.policies.selection._index import Row

    random = np.random.default_rng(0)
    keys, queries = (random.normal(size=shape).astype(np.float32) for shape in ((33, 8, 4), (3, 4)))
    row, alive = Row(kind, 10_000), random.random(36 * 8) < 0.5
    row.add(np.arange(33), keys)
    row.columns = np.delete(np.arange(36), [1, 5, 9])
    ids, _ = row.search(queries, 200, alive)
    slots = [8 * int(column) + i for column in row.columns for i in range(8)]
    for query, found in zip(queries, ids.tolist(), strict=True):
        wanted = {slot: float(key @ query) for slot, key in zip(slots, keys.reshape(-1, 4), strict=True) if alive[slot]}
        best = sorted(wanted, key=lambda slot: -wanted[slot])
        assert len(best) < 200 and found == best + [-1] * (200 - len(best))


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_a_row_has_an_index_from_256_tokens_on_and_cells_of_twice_as_many_when_there_are(kind: str) -> None:
    from kvengine.policies.selection._index import Row

    keys, row, begun = np.random.default_rng(0).normal(size=(80, 8, 4)).astype(np.float32), Row(kind, 1), list[int]()
    for page in range(80):
        before = row.fast
        row.add(np.arange(page, page + 1), keys[page : page + 1])
        begun += [row.tokens] if row.fast is not before else []
    assert begun == ([256, 512] if kind == "ivf" else [256]) and row.fast.ntotal == 640
    row.columns, queries = np.arange(80), keys[:2, 0]
    found, _ = row.search(queries, 100, np.ones(640, dtype=bool))  # more than are in view otherwise
    assert kind == "ivf" or all(len({*ids} - {-1}) == 100 for ids in found.tolist())


@pytest.mark.parametrize(("kind", "begun"), [("flat", []), ("ivf", [512]), ("hnsw", [256])])
def test_many_pages_at_once_give_what_one_after_the_other_gives(
    kind: str, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And cells are found once, not at every power of two on the way."""
    from kvengine.policies.selection._index import Row

    keys, found, begin = np.random.default_rng(0).normal(size=(80, 8, 4)).astype(np.float32), [], Row.begin
    one, all_of_them = Row(kind, 2), Row(kind, 2)
    for page in range(80):
        one.add(np.arange(page, page + 1), keys[page : page + 1])
    monkeypatch.setattr(Row, "begin", lambda self, tokens: (found.append(tokens), begin(self, tokens))[1])
    all_of_them.add(np.arange(3), keys[:3])
    all_of_them.add(np.arange(3, 80), keys[3:])
    assert found == begun
    one.columns = all_of_them.columns = np.arange(80)
    for a, b in zip(*(x.search(keys[7, :3], 50, np.ones(640, dtype=bool)) for x in (one, all_of_them)), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("more", ["", " + elastic(budget=40, offset=-8)"])
def test_rows_beside_each_other_read_what_looking_at_every_key_would(more: str) -> None:
    """One of them has no page for some time, and pages lose tokens and go."""
    found, exact = (Bare(f"{name}(budget=20){more}", rows=3, group=1, tokens=120) for name in ("ann", "oracle_topk"))
    valid = torch.ones(3, 70, dtype=torch.bool)
    valid[1, :66], valid[2, :20] = False, False
    for x in (found, exact):
        x.feed(70, valid)
    for step in range(40):
        torch.testing.assert_close(found.feed(1), exact.feed(1))
        if step == 30:
            for x in (found, exact):
                order = torch.tensor([2, 0])
                x.cache.rows(order)
                x.q, x.k, x.v = x.q[order], x.k[order], x.v[order]


def test_rows_ask_for_the_keys_of_new_pages_alone() -> None:
    from kvengine.policies.selection._index import Rows

    keys, asked, rows = torch.randn(2, 5 * 4, 3), list[tuple[int, int]](), Rows("flat", 1)

    def read(columns: slice) -> Tensor:
        asked.append((columns.start, columns.stop))
        return keys[:, columns.start * 4 : columns.stop * 4]

    rows.update(np.array([[5, 6, 7], [8, -1, -1]]), read)
    first, second = rows.rows
    rows.update(np.array([[5, 6, 7, -1], [8, -1, 9, -1]]), read)
    assert rows.rows[0] is first and rows.rows[1] is second and asked == [(0, 3), (2, 3)]
    rows.update(np.array([[5, 6, 7, -1, -1], [8, -1, 11, -1, 12]]), read)  # another page has taken the place of one
    assert rows.rows[0] is first and rows.rows[1] is not second and asked[2:] == [(0, 5)]
    held = rows.rows[1].flat.reconstruct_n(0, 12)
    np.testing.assert_array_equal(held, keys[1].unflatten(0, (5, 4))[[0, 2, 4]].flatten(0, 1).numpy())


def test_a_head_that_finds_nothing_has_no_say() -> None:
    """Its cell may hold no living token, when the others' cells do."""
    from kvengine.policies.selection.ann import agree

    inf = np.inf
    ids, logits = np.array([[-1, -1], [7, 2], [3, -1]]), np.array([[-inf, -inf], [3.0, 1.0], [9.0, -inf]])
    assert agree(ids, logits, 2).tolist() == [3, 7] and agree(ids[:1], logits[:1], 2).tolist() == []
    assert agree(ids[:, :0], logits[:, :0], 2).tolist() == []


def test_without_faiss_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedPolicy, match=r"'ann' needs faiss: pip install 'kvengine\[ann\]'"):
        Stack.parse("ann(budget=64)")
    with pytest.raises(PolicyError, match="index='tree' must be one of 'flat', 'ivf', 'hnsw'"):
        Stack.parse("ann(index='tree')")


@pytest.mark.parametrize("index", ["ivf", pytest.param("flat", marks=pytest.mark.slow)])
def test_pages_that_only_some_rows_have_given_back_leave_the_others_in_place(index: str) -> None:
    """A row whose middle is dropped while a longer row still needs the columns: its tokens are found where they are."""
    model = patched(f"streaming(sinks=2, recent=38) + ann(budget=24, index={index!r})").double()
    ids = torch.randint(2, 100, (2, 140), generator=torch.Generator().manual_seed(3))
    start = (0, 33)

    def talk(rows: list[int]) -> Tensor:
        first = min(start[r] for r in rows)
        mask = (torch.arange(first, 140) >= torch.tensor([start[r] for r in rows])[:, None]).long()
        cache, out = EngineCache(model), []
        for end in range(70 - first, 141 - first):
            new = slice(0 if not out else end - 1, end)
            at = (mask[:, :end].cumsum(1) - 1).clamp(min=0)[:, new]
            with torch.no_grad():
                found = model(ids[rows, first:][:, new], attention_mask=mask[:, :end], position_ids=at, cache=cache)
            out.append(found.logits[:, -1])
        return torch.stack(out, 1)

    together = talk([0, 1])
    for row in range(2):
        torch.testing.assert_close(together[row], talk([row])[0], rtol=1e-4, atol=1e-4)
