from typing import Any

import pytest
import torch
from support_layer import draw, plain, run

from kvengine import page_reads
from kvengine.kernels.cpu import library
from kvengine.page_reads import Readable
from kvengine.policies.selection import Where, best
from kvengine.policies.selection.oracle_topk import OracleTopK
from kvengine.pool import Pool
from kvengine.session import Call


@pytest.mark.parametrize("heads, group, softcap", [(2, 2, None), (3, 1, None), (1, 4, None), (1, 4, 1.0)])
def test_it_reads_the_tokens_of_largest_attention(heads: int, group: int, softcap: float | None) -> None:
    tokens, budget = draw(101, heads, group), 24
    tokens.q *= torch.linspace(1, 4, heads * group)[:, None, None]
    tokens.softcap = softcap
    found = run(f"oracle_topk(budget={budget})", tokens, 100)
    sealed = len(found.lane.pages)  # type: ignore[arg-type]
    seen = torch.zeros(1, heads, 101, dtype=torch.bool)
    seen[..., sealed:] = True
    for h in range(heads):
        logits = tokens.q[0, h * group : (h + 1) * group, 100] @ tokens.k[0, h, :sealed].T * tokens.scale
        seen[0, h, tokens.capped(logits).softmax(1).amax(0).topk(budget - (101 - sealed)).indices] = True
    torch.testing.assert_close(found.out[:, -1:], plain(tokens, 100, seen), atol=1e-5, rtol=1e-4)


def test_no_other_choice_of_as_many_tokens_is_nearer_on_average() -> None:
    tokens = draw(201, heads=1, group=1)
    tokens.q *= 3
    want = plain(tokens, 200)
    error = (run("oracle_topk(budget=40)", tokens, 200).out[:, -1:] - want).norm()
    chance = []
    for seed in range(20):
        seen = torch.zeros(1, 1, 201, dtype=torch.bool)
        seen[0, 0, torch.randperm(201, generator=torch.Generator().manual_seed(seed))[:40]] = True
        chance.append(float((plain(tokens, 200, seen) - want).norm()))
    assert error < min(chance)


def test_a_fraction_is_of_the_rows_own_prompt() -> None:
    tokens = draw(101)
    a, b = run("oracle_topk(budget=0.3)", tokens, 80), run("oracle_topk(budget=24)", tokens, 80)
    assert torch.equal(a.out, b.out)


def test_what_is_dead_takes_no_share_from_the_others() -> None:
    """A head that is all for a dead token would otherwise have little say in what else is read."""
    random = torch.Generator().manual_seed(0)
    q, k = 2 * torch.randn(4, 2, 8, generator=random), torch.randn(4, 30, 8, generator=random)
    alive = torch.rand(4, 30, generator=random) < 0.5
    k[:, :2] = 4 * q  # each is a head's own token
    alive[:, :2] = torch.tensor([True, False])
    at = Where(0, 1, lambda: torch.full((4,), 5), 5, lambda: k, 0.5, 30)
    found = OracleTopK().select(q, {}, alive, at)
    assert found is not None
    for row in range(4):
        there = alive[row].nonzero()[:, 0]
        share = (q[row] @ k[row, there].T * 0.5).softmax(1).amax(0)
        assert set(found[row].tolist()) == set(there[share.topk(5).indices].tolist())


@pytest.mark.parametrize("even", [False, True])
def test_the_best_units_of_each_row_are_those_that_sorting_finds(even: bool) -> None:
    """Of both signs, of equals the earlier; rows may read different numbers, and hold fewer than they may."""
    random, inf = torch.Generator().manual_seed(0), float("inf")
    want, alive = torch.randn(5, 20, generator=random).mul(4).round() / 4, torch.rand(5, 20, generator=random) < 0.8
    want[0, :4] = torch.tensor([-0.0, 0.0, -0.0, -inf])
    alive[3, 6:] = False
    counts = torch.tensor([9] * 5 if even else [9, 0, 4, 9, 1])
    at = Where(0, 1, lambda: counts, 9, lambda: want, 1.0, 0, even=even)
    for row, found in enumerate(best(want, alive, at).tolist()):
        units = [unit for unit in range(20) if alive[row, unit]]
        ranked = sorted(units, key=lambda unit: (-float(want[row, unit]), unit))[: int(counts[row])]
        assert sorted(x for x in found if x >= 0) == sorted(ranked) and len(found) == 9


@pytest.mark.parametrize("text", ["oracle_topk(budget=24)", "tidal(budget=24, start=0, reselect=0)"])
def test_keys_are_looked_at_some_at_a_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no kernel reads them in their pages: as floats, all of a long text's would be several times what the cache holds."""
    tokens, most, keys = draw(201), list[int](), Readable.keys

    def listening(self: Readable, *columns: slice) -> torch.Tensor:
        found = keys(self, *columns)
        most.append(found.shape[0] * found.shape[1])
        return found

    monkeypatch.setattr(Readable, "keys", listening)
    straight = run(text, tokens, 200).lane.units
    assert bool(most) is (library.load().library is None)
    monkeypatch.setattr(Readable, "logits", lambda *pages, **more: None)
    whole, at_once = run(text, tokens, 200).lane.units, max(most)
    monkeypatch.setattr(page_reads, "LAID", 64)
    most.clear()
    some = run(text, tokens, 200).lane.units
    assert max(most) <= 64 < at_once
    torch.testing.assert_close(some, whole)
    torch.testing.assert_close(straight, whole)


@pytest.mark.parametrize("stored", ["", "+kivi(group=8, residual=8)", "+lowrank(rank=8)", "+disk(device=0, host=0)"])
def test_keys_are_had_without_values(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where values lie apart, they are not read for a choice."""
    found, read, start = run("oracle_topk(budget=24)" + stored, draw(201), 200), list[str](), Pool.start

    def listening(self: Pool, *about: Any) -> Any:
        finish = start(self, *about)

        def finished() -> dict[str, torch.Tensor]:
            fields = finish()
            read.extend(fields)
            return fields

        return finished

    monkeypatch.setattr(Pool, "start", listening)
    pages = found.lane.pages
    assert pages is not None
    keys = pages.keys(slice(1, 3))
    assert "v" not in read
    torch.testing.assert_close(keys, pages.decoded(slice(1, 3))[0], rtol=0, atol=0)
    assert "v" in read or "kivi" in stored


def test_a_coarse_reading_chooses_by_what_it_reads_from_its_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """And one that is fine again, by fine keys: what a draft reads of its target's cache is not what that is judged by."""
    tokens, asked, logits = draw(107), list[bool](), Readable.logits
    found = run("oracle_topk(budget=24) + quantspec(group=8, residual=8)", tokens, 101)

    def listening(self: Readable, *more: Any, **by: Any) -> torch.Tensor | None:
        asked.append(self.coarse)
        return logits(self, *more, **by)

    monkeypatch.setattr(Readable, "logits", listening)
    turns = [False, True, True, False, False]
    for i, coarse in enumerate(turns):
        found.cache.session.coarse = coarse
        found.cache.forward(*tokens.part(101 + i, 102 + i), Call(tokens.scale))
    assert asked == turns
