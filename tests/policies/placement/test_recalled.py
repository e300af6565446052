"""What the last step read and the device still has: pieces are those that were written, whatever happened in between."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import greedy, patched, prompts

import kvengine
from kvengine.fixed import refusal
from kvengine.kernels.fetch_kept import MOST
from kvengine.offload.placement.host import Fetched, Recalled
from kvengine.stack import Stack

LIKE = {"a": torch.zeros(0, 3), "b": torch.zeros(0, 2, dtype=torch.int16)}
PIECES = 12
ids = st.integers(0, PIECES - 1)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("read"), st.lists(ids, min_size=1, max_size=10)),
        st.tuples(st.just("part"), st.lists(ids, min_size=1, max_size=4)),
        st.tuples(st.just("write"), st.lists(ids, min_size=1, max_size=4, unique=True)),
        st.tuples(st.just("run"), st.lists(st.integers(0, PIECES - 3), min_size=1, max_size=1)),
        st.tuples(st.just("copy"), st.just([0])),
    ),
    max_size=12,
)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the model is on a device: on a CPU pages are read in place."""
    monkeypatch.setattr(Fetched, "resident", lambda *_: None)


def rows(values: list[int]) -> dict[str, torch.Tensor]:
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    return {"a": x.expand(-1, 3).contiguous(), "b": x.expand(-1, 2).to(torch.int16)}


def shelf(of_rows: int, slots: int) -> Recalled:
    made = Recalled(LIKE, of_rows, slots)
    made.reserve(PIECES)
    return made


@settings(max_examples=60)
@given(steps, st.integers(1, 2), st.integers(1, 5))
def test_a_shelf_is_a_dictionary_whatever_happens(
    script: list[tuple[str, list[int]]], of_rows: int, slots: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Fetched, "resident", lambda *_: None)
        one, want, clock = shelf(of_rows, slots), dict.fromkeys(range(PIECES), 0), 0
        one.write(torch.arange(PIECES), rows([0] * PIECES))
        for what, at in script:
            clock += 100
            if what == "copy":
                one = copy.deepcopy(one)
            elif what in ("write", "run"):
                at = at if what == "write" else list(range(at[0], at[0] + 3))
                where = torch.tensor(at) if what == "write" else slice(at[0], at[0] + 3)
                one.write(where, rows([clock + i for i in at]))
                want.update({i: clock + i for i in at})
            else:  # of a part of the fields nothing is kept: the other would be an older page's
                found = one.read(torch.tensor(at), ("b",) if what == "part" else ())
                expected = rows([want[i] for i in at])
                assert set(found) == ({"a"} if what == "part" else {"a", "b"})
                assert all(torch.equal(x, expected[name]) for name, x in found.items())


@pytest.mark.usefixtures("fetched")
def test_what_the_last_read_had_is_not_fetched_and_counts_as_there() -> None:
    one = shelf(2, 2)
    one.write(torch.arange(PIECES), rows(list(range(PIECES))))
    for store in one.stores.values():
        store.data.clamp_(max=-1)  # what is fetched from now on shows it
    fresh = rows([-1] * 6)
    assert torch.equal(one.read(torch.tensor([0, 1, 2, 6, 7, 8]))["a"], fresh["a"])
    one.reserve(2 * PIECES)  # what is kept stays where there is more room
    for store in one.stores.values():
        store.data.fill_(-2)
    found = one.read(torch.tensor([1, 3, 0, 8, 6, 9]))["a"][:, 0]  # of a row's three, the first two were kept
    assert found.tolist() == [-1, -2, -1, -2, -1, -2] and one.served == {"device": 3, "host": 9}
    here, kept = one.nbytes()["device"], one.kept
    assert kept is not None and here["a"] == 4 * 3 * 4 and here["kept"] == kept.ids.nbytes + kept.counts.nbytes
    one.write(slice(1, 2), rows([7]))
    assert one.read(torch.tensor([1, 3, 8, 8]))["a"][:, 0].tolist() == [7, -2, -2, -2]


@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize("many", [3, 2 * MOST + 2])
def test_what_cannot_be_looked_for_is_fetched(many: int) -> None:
    """As many of each row, and not too many."""
    one = shelf(2, 4)
    one.write(torch.arange(PIECES), rows(list(range(PIECES))))
    at = torch.arange(many) % PIECES
    assert one.read(at)["a"][:, 0].tolist() == at.tolist() and one.served == {"host": many}


def test_on_a_cpu_nothing_is_kept() -> None:
    one = shelf(1, 4)
    assert one.resident() is not None and one.kept is None and set(one.nbytes()) == {"host"}


TEXT = "landmarks(budget=24, chunk=4) + host(resident=24)"
SHADOW = "lowrank(rank=8) + landmarks(budget=24, chunk=4, local=4) + host(fields=('v',), resident=24)"


@pytest.mark.sampled(6)
@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize("text", [TEXT, SHADOW, "quest(budget=24, page=4) + host(resident=8)"])
@pytest.mark.parametrize("how", ["eager", "trace"])
def test_recorded_steps_keep_what_they_read(text: str, how: str) -> None:
    model = patched(text)
    want = greedy(model, prompts(), 40)
    for _ in range(2):
        cache = kvengine.EngineCache(model)
        decoder = kvengine.compile_decode(model, how=how)  # type: ignore[arg-type]
        got = model.generate(
            **prompts(), max_new_tokens=40, min_new_tokens=40, do_sample=False, custom_generate=decoder, cache=cache
        )
        assert got[:, -40:].tolist() == want[:, -40:].tolist()
        stats = cache.stats()
        assert stats.hits > 0 < stats.misses and stats.hits + stats.misses == sum(stats.served.values())


def test_what_the_host_keeps_track_of_is_refused() -> None:
    assert refusal(Stack.parse("shadowkv(budget=64)")) is None
    assert "keeps track on the host" in str(refusal(Stack.parse("shadowkv(budget=64, keep='lru')")))
