"""Pages on the device, the host, disk and a remote store: same outputs, caps kept, faults survived."""

from __future__ import annotations

import copy
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support_layer import Tokens, draw, rope, run
from support_offload import deleted

from kvengine.cache import LayerCache
from kvengine.errors import CorruptBitstream, PolicyError, StoreError
from kvengine.offload.placement import Site
from kvengine.offload.placement._ahead import Ahead
from kvengine.offload.placement._file import File
from kvengine.offload.placement._levels import Layout, Memory
from kvengine.offload.placement._packed import PENDING
from kvengine.offload.placement._remote import Remote as Values
from kvengine.offload.placement._tiered import Tiered
from kvengine.offload.placement.disk import Disk
from kvengine.offload.placement.remote import Remote
from kvengine.offload.stores.record import Buffer, Entry
from kvengine.session import Call, Session
from kvengine.stack import Stack
from kvengine.stats import measure

PAGE = 2 * 16 * 16 * 4  # bytes: keys and values of 16 tokens of 16 channels in fp32
POLICIES = ["quest(budget=40, page=8)", "full", "kivi(group=8, residual=16)", "zipcache(block=16)", "h2o(budget=40)"]
TIERS = [
    f"disk(device={2 * PAGE}, host={3 * PAGE})",
    "disk(host=0)",
    f"remote(url='memory://', device={PAGE}, host={PAGE}, disk={2 * PAGE})",
    "remote(url='memory://', host=0)",
]


@pytest.mark.parametrize("policy", POLICIES)
def test_where_pages_live_changes_nothing_else(policy: str) -> None:
    tokens = draw(104)
    want = run(policy, tokens, 80).out
    host = run(f"{policy} + host", tokens, 80).out
    torch.testing.assert_close(host, want, rtol=1e-5, atol=1e-6)  # by another kernel
    for placement in TIERS:
        out = run(f"{policy} + {placement}", tokens, 80).out
        if "zipcache" in policy:  # where all is in reach, tokens of two widths are attended to in another order
            torch.testing.assert_close(out, host, rtol=1e-5, atol=1e-6)
        else:
            assert torch.equal(out, host)


@pytest.mark.parametrize("placement", ["disk(host=0, fields=('v',))", "remote(url='memory://', host=0, fields=('v',))"])
def test_fields_that_are_not_moved_stay_on_the_device(placement: str) -> None:
    tokens, policy = draw(104), "quest(budget=40, page=8)"
    host = run(f"{policy} + host(fields=('v',))", tokens, 80).out
    found = run(f"{policy} + {placement}", tokens, 80)
    assert torch.equal(found.out, host)
    here = measure([found.cache]).bytes["device"]
    assert here["page.k"] and not here.get("page.v")


def two_layers(policy: str) -> tuple[list[LayerCache], Session]:
    session = Session(rope=rope(16), prompt_end=160, ours=(0, 1))
    return [LayerCache(Stack.parse(policy), i, 2, session) for i in range(2)], session


def flush(caches: list[LayerCache]) -> None:
    """Wait until what is on its way down is there."""
    for shelf in (s for cache in caches for part in cache.parts for s in part.lane.pages.pool.shelves):  # type: ignore[union-attr]
        if isinstance(shelf, Tiered):
            shelf.flush()


def feed(caches: list[LayerCache], tokens: Tokens, a: int, b: int) -> None:
    for cache in caches:
        cache.forward(*tokens.part(a, b), Call(tokens.scale))


def test_no_tier_ever_holds_more_than_its_cap(tmp_path: Path) -> None:
    caps = {"host": 6 * PAGE, "disk": 12 * PAGE}
    policy = f"quest(budget=64) + remote(url='memory://', device={4 * PAGE}, folder='{tmp_path}', "
    caches, _ = two_layers(policy + ", ".join(f"{name}={cap}" for name, cap in caps.items()) + ")")
    tokens = draw(220)
    feed(caches, tokens, 0, 160)
    for i in range(160, 220):
        feed(caches, tokens, i, i + 1)
        held = measure(caches).bytes
        assert sum(b for name, b in held["device"].items() if name in ("page.k", "page.v")) <= 4 * PAGE
        assert sum(b for name, b in held["host"].items() if name in ("page.k", "page.v")) <= caps["host"]
        assert held["host"].get("page.behind", 0) <= PENDING
        assert sum(held["disk"].values()) <= caps["disk"]
    every = sum(len(set(c.parts[0].lane.pages.pages_in_use())) for c in caches)  # type: ignore[union-attr]
    assert every * PAGE > 4 * PAGE + sum(caps.values()) and sum(held["remote"].values()) > 0


def test_what_stats_say_is_on_disk_and_in_the_store(tmp_path: Path) -> None:
    caches, session = two_layers(
        f"quest(budget=64) + remote(url='memory://', folder='{tmp_path}', host={4 * PAGE}, disk={8 * PAGE})"
    )
    tokens = draw(200)
    feed(caches, tokens, 0, 160)
    for i in range(160, 200):
        feed(caches, tokens, i, i + 1)
    flush(caches)
    stats = measure(caches)
    files = list(tmp_path.iterdir())
    assert len(files) == 2 and sum(f.stat().st_size for f in files) == stats.tier("disk") > 0
    stored = list(session.ahead.backends["memory://"].entries())
    assert sum(entry.size for entry in stored) == stats.tier("remote") > 0
    assert stats.faults == 0 and stats.hits == stats.served.get("device", 0)
    backend = session.ahead.backends["memory://"]
    del caches, session, stats
    gc.collect()
    deleted()
    assert not list(tmp_path.iterdir()) and not list(backend.entries())  # gone with the cache


def test_what_the_last_step_read_is_fetched_ahead() -> None:
    """The same query again and again: after the first step nothing is waited for that was not under way."""
    tokens = draw(160 + 12)
    q = tokens.q.clone()
    q[:, :, 160:] = q[:, :, 160:161]
    caches, _ = two_layers("quest(budget=96) + disk(host=0)")
    feed(caches, Tokens(q, tokens.k, tokens.v), 0, 160)
    waited = []
    for i in range(160, 172):
        feed(caches, Tokens(q, tokens.k, tokens.v), i, i + 1)
        served = measure(caches).served
        waited.append(served.get("disk", 0))
    assert waited[0] > 0 and waited[-1] == waited[1] and served["ahead"] > 10 * waited[0] / 2


def tiered(levels: Sequence[Any]) -> Tiered:
    like = {"a": torch.zeros(0, 3), "b": torch.zeros(0, 2, dtype=torch.int16)}
    made = Tiered(like, [level(like) for level in levels], Site(ahead=Ahead()))
    made.reserve(24)
    return made


def in_memory(name: str, capacity: int) -> Any:
    return lambda like: Memory(name, like, None, capacity)


def in_file(capacity: int, folder: str = "") -> Any:
    return lambda like: File(Layout.of(like), folder, capacity)


def in_store(backend: Any, capacity: int = 1 << 40) -> Any:
    return lambda like: Values(Layout.of(like), backend, capacity, 100.0)


def rows(values: Sequence[float]) -> dict[str, torch.Tensor]:
    x = torch.tensor(values, dtype=torch.float32)[:, None]
    return {"a": x.expand(-1, 3).contiguous(), "b": x.expand(-1, 2).to(torch.int16)}


steps = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "write", "forget"]), st.lists(st.integers(0, 23), min_size=1, max_size=9)
    ),
    max_size=25,
)


@settings(max_examples=80, deadline=None)
@given(steps, st.integers(1, 5), st.integers(0, 5), st.sampled_from([0, 1, 3, 24]))
@example(
    [("write", [0, 2, 1]), ("read", [2]), ("read", [0]), ("read", [2]), ("read", [1]), ("write", [0, 1, 2])],
    1,
    0,
    24,
)
def test_a_shelf_is_a_dictionary_whatever_happens(
    script: list[tuple[str, list[int]]], device: int, host: int, store: int
) -> None:
    """As long as all tiers together have room, which `store` decides."""
    shelf = tiered([in_memory("device", device), in_memory("host", host), in_file(4), in_store(Plain(), store)])
    want: dict[int, float] = {}
    for number, (what, ids) in enumerate(script):
        if what == "write":
            ids = list(dict.fromkeys(ids))
            if len(want.keys() | set(ids)) > device + host + 4 + store:
                continue
            shelf.write(torch.tensor(ids), rows([100 * number + i for i in ids]))
            want.update({i: 100 * number + i for i in ids})
        elif what == "forget":
            shelf.forget(np.unique(ids))
            want = {i: x for i, x in want.items() if i not in ids}
        else:
            found = shelf.read(torch.tensor(ids))
            expected = rows([want.get(i, 0) for i in ids])
            assert all(torch.equal(found[name], expected[name]) for name in expected)
            shelf.fetch_ahead()
        for level, cap in zip(shelf.levels, (device, host, 4, store), strict=True):
            assert level.slots.used <= cap
            assert level.slots.used == (shelf.slot[shelf.levels.index(level)] >= 0).sum()  # none is held for nobody
        assert set(np.flatnonzero((shelf.slot >= 0).any(0)).tolist()) == set(want)


def test_the_longest_unused_goes_down_first() -> None:
    """Against an ordered list, as the textbook has it."""
    shelf = tiered([in_memory("device", 5), in_memory("host", 100)])
    shelf.write(torch.arange(20), rows(range(20)))
    order = list(range(15, 20))
    dice = np.random.default_rng(0)
    for _ in range(200):
        wanted = np.unique(dice.integers(0, 20, 2)).tolist()
        shelf.read(torch.tensor(wanted))
        order = [i for i in order if i not in wanted] + wanted
        order = order[-5:]
        assert set(np.flatnonzero(shelf.slot[0] >= 0)) == set(order)
    for new in range(20, 24):  # what is new was used just now
        shelf.write(torch.tensor([new]), rows([new]))
        order = [*order[1:], new]
        assert set(np.flatnonzero(shelf.slot[0] >= 0)) == set(order)


def test_reading_more_than_fits_pushes_nothing_out() -> None:
    shelf = tiered([in_memory("device", 5), in_memory("host", 100)])
    shelf.write(torch.arange(20), rows(range(20)))
    for _ in range(3):
        shelf.read(torch.arange(20))
    assert shelf.served == {"device": 15, "host": 45}


def test_what_is_given_up_below_stays_above() -> None:
    """A full tier gave up a page as being above too, from where it was sent down, as being below too: it was read as zeros."""
    shelf = tiered([in_memory("device", 2), in_memory("host", 3)])
    shelf.write(torch.arange(3), rows([10, 11, 12]))
    shelf.read(torch.tensor([0]))
    shelf.write(torch.tensor([3]), rows([13]))
    shelf.read(torch.tensor([1, 2]))
    assert shelf.read(torch.arange(4))["a"][:, 0].tolist() == [10, 11, 12, 13]


def test_caps_that_are_too_small_are_an_error_and_change_no_output() -> None:
    """Pages were lost where all tiers together were too small by little, and what was read in their place were zeros."""
    tokens, outcomes = draw(200), list[str]()
    want = run("quest(budget=40, page=8)", tokens, 120).out
    for disk in (12, 16, 20):
        try:
            found = run(
                f"quest(budget=40, page=8) + disk(device={2 * PAGE}, host={3 * PAGE}, disk={disk * PAGE})", tokens, 120
            )
        except StoreError as error:
            outcomes.append("full" if "every tier down to 'disk' is full" in str(error) else str(error))
        else:
            outcomes.append("same" if torch.equal(found.out, want) else "other")
    assert outcomes == ["full", "full", "same"]


def test_pages_that_are_there_twice_are_no_reason_to_be_full() -> None:
    shelf = tiered([in_memory("device", 2), in_memory("host", 2), in_file(2)])
    shelf.write(torch.arange(5), rows(range(5)))
    shelf.read(torch.tensor([1, 2]))  # on the host, and now on the device too
    shelf.read(torch.tensor([0]))
    shelf.write(torch.tensor([5]), rows([5]))
    assert shelf.read(torch.arange(6))["a"][:, 0].tolist() == list(range(6))


def test_where_every_tier_is_full_pages_are_read_where_they_are() -> None:
    """There is no room to bring one up in the place of another, which was an error of reading."""
    shelf = tiered([in_memory("device", 2), in_memory("host", 2), in_file(3)])
    shelf.write(torch.arange(7), rows(range(7)))
    for wanted in ([0], [1, 5], [2, 3, 4], list(range(7))):
        assert shelf.read(torch.tensor(wanted))["a"][:, 0].tolist() == wanted
    with pytest.raises(StoreError, match="every tier down to 'disk' is full"):
        shelf.write(torch.tensor([7]), rows([7]))
    shelf.forget(np.array([6]))
    assert shelf.read(torch.tensor([0]))["a"][:, 0].tolist() == [0] and shelf.slot[0, 0] >= 0


class Plain:
    """A store in a dictionary, which can be told to fail."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.down = False
        self.gate = threading.Event()
        self.gate.set()

    def meet(self) -> None:
        self.gate.wait(30)
        if self.down:
            raise ConnectionError("nobody answers")

    def put(self, key: str, payload: Sequence[Buffer], ttl: float | None = None) -> None:
        self.meet()
        self.values[key] = b"".join(payload)

    def read(self, key: str, into: memoryview, offset: int = 0) -> int:
        self.meet()
        part = self.values[key][offset : offset + len(into)]
        into[: len(part)] = part
        return len(part)

    def size(self, key: str) -> int | None:
        return len(self.values[key]) if key in self.values else None

    def delete(self, key: str) -> bool:
        self.meet()
        return self.values.pop(key, None) is not None

    def entries(self) -> list[Entry]:
        return [Entry(key, len(value), 0) for key, value in self.values.items()]

    def pin(self, key: str, pinned: bool = True) -> None: ...

    def verify(self, key: str) -> None: ...

    def gc(self) -> int:
        return 0

    def close(self) -> None: ...


def generation(store: Plain, fail_at: int, back_at: int = 10**9, extra: str = "") -> tuple[torch.Tensor, LayerCache]:
    """Outputs of 60 decoded tokens over a store that is down from one token to another."""
    tokens = draw(220)
    session = Session(rope=rope(16), prompt_end=160)
    session.ahead.backends["./test"] = store
    policy = f"quest(budget=64) + remote(url='./test', host={4 * PAGE}{extra})"
    cache = LayerCache(Stack.parse(policy), 0, 1, session)
    outs = [cache.forward(*tokens.part(0, 160), Call(tokens.scale))]
    for i in range(160, 220):
        store.down = fail_at <= i < back_at
        outs.append(cache.forward(*tokens.part(i, i + 1), Call(tokens.scale)))
    return torch.cat(outs, 1), cache


def test_a_store_that_dies_is_a_typed_error_where_pages_are_only_there() -> None:
    store = Plain()
    with pytest.raises(StoreError, match="could not be read from the remote tier: nobody answers"):
        generation(store, 180)
    assert store.values  # what was stored is there


def test_a_store_that_cannot_be_written_costs_room_not_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Down before anything went there: the host keeps everything, the text is the same, and the fault is counted."""
    monkeypatch.setattr("kvengine.offload.placement._packed.PAUSE", 0.0)
    want, healthy = generation(Plain(), 10**9)
    store = Plain()
    store.down = True
    session = Session(rope=rope(16), prompt_end=160)
    session.ahead.backends["./test"] = store
    tokens = draw(220)
    cache = LayerCache(Stack.parse(f"quest(budget=64) + remote(url='./test', host={4 * PAGE})"), 0, 1, session)
    outs = [cache.forward(*tokens.part(0, 160), Call(tokens.scale))]
    outs += [cache.forward(*tokens.part(i, i + 1), Call(tokens.scale)) for i in range(160, 190)]
    assert measure([cache]).faults > 0 and not store.values
    assert measure([cache]).tier("host") > 4 * PAGE
    store.down = False
    outs += [cache.forward(*tokens.part(i, i + 1), Call(tokens.scale)) for i in range(190, 220)]
    assert torch.equal(torch.cat(outs, 1), want) and store.values and measure([healthy]).faults == 0


def test_a_page_that_is_elsewhere_too_is_read_there() -> None:
    store = Plain()
    shelf = tiered([in_memory("host", 4), in_file(100), in_store(store)])
    shelf.write(torch.arange(12), rows(range(12)))
    shelf.flush()
    shelf.read(torch.tensor([0, 1]))  # now on the host, and still in the file
    shelf.levels[1].get = broken  # type: ignore[attr-defined]
    assert shelf.read(torch.tensor([0, 1]))["a"][:, 0].tolist() == [0, 1] and shelf.faults == 0
    with pytest.raises(StoreError, match="from the disk tier: broken"):
        shelf.read(torch.tensor([3]))
    both = tiered([in_file(100), in_store(store)])
    both.write(torch.arange(3), rows(range(3)))
    slots = both.levels[1].slots.take(3)
    both.levels[1].write(slots, rows(range(3)))
    both.flush()
    both.slot[1, :3] = slots
    both.levels[0].get = broken  # type: ignore[attr-defined]
    assert both.read(torch.arange(3))["a"][:, 0].tolist() == [0, 1, 2] and both.faults == 1


def broken(*_: object) -> None:
    raise OSError("broken")


@pytest.mark.parametrize("device", [0, 2], ids=["host", "device and host"])
def test_what_is_read_is_not_brought_up_while_nothing_goes_down(device: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read put as much more into memory as it brought up, whatever the cap, until everything was there."""
    monkeypatch.setattr("kvengine.offload.placement._packed.PAUSE", 1e6)
    store = Plain()
    shelf = tiered([*([in_memory("device", device)] if device else []), in_memory("host", 4), in_store(store)])
    shelf.write(torch.arange(16), rows(range(16)))
    shelf.flush()
    shelf.levels[-1].put = broken  # type: ignore[attr-defined]
    shelf.write(torch.arange(16, 20), rows(range(16, 20)))
    shelf.flush()
    told = shelf.faults
    for a in [*range(0, 16, 2), *range(0, 16, 2)]:
        assert shelf.read(torch.tensor([a, a + 1]))["a"][:, 0].tolist() == [a, a + 1]
        assert sum(level.slots.used for level in shelf.levels[:-1]) <= device + 4 + 4
    assert shelf.faults == told  # or each token would say so again
    assert shelf.read(torch.arange(20))["a"][:, 0].tolist() == list(range(20))


def test_what_cannot_be_read_to_go_down_stays_where_it_is() -> None:
    """Whoever read another page, from a tier in order, was told that this one could not be read."""
    store = Plain()
    shelf = tiered([in_memory("host", 2), in_file(4), in_store(store)])
    shelf.write(torch.arange(8), rows(range(8)))
    shelf.flush()
    get = shelf.levels[1].get  # type: ignore[attr-defined]
    shelf.levels[1].get = broken  # type: ignore[attr-defined]
    assert shelf.read(torch.tensor([0]))["a"][:, 0].tolist() == [0]
    shelf.write(torch.tensor([8]), rows([8]))
    assert shelf.faults > 0
    shelf.levels[1].get = get  # type: ignore[attr-defined]
    assert shelf.read(torch.arange(9))["a"][:, 0].tolist() == list(range(9))


def test_a_slow_store_is_waited_for_on_another_thread() -> None:
    """What has been fetched ahead is read while the store does not move."""
    store = Plain()
    shelf = tiered([in_store(store)])
    shelf.write(torch.arange(8), rows(range(8)))
    shelf.flush()
    shelf.read(torch.arange(8))  # its own successor: fetches ahead what it read
    shelf.settle()
    store.gate.clear()
    assert shelf.read(torch.arange(8))["a"][:, 0].tolist() == list(range(8))
    assert shelf.served == {"remote": 8, "ahead": 8} and shelf.staged is not None
    assert shelf.nbytes()["host"] == {"ahead": 8 * shelf.piece_bytes}
    store.gate.set()
    shelf.settle()


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_a_changed_byte_is_noticed(tier: str, tmp_path: Path) -> None:
    store = Plain()
    shelf = tiered([in_file(100, str(tmp_path)) if tier == "disk" else in_store(store)])
    shelf.write(torch.arange(8), rows(range(8)))
    shelf.flush()
    if tier == "disk":
        (path,) = tmp_path.iterdir()
        with path.open("r+b") as file:
            file.seek(5 * shelf.piece_bytes + 1)
            file.write(b"\xff")
    else:
        key = next(iter(store.values))
        value = bytearray(store.values[key])
        value[5 * shelf.piece_bytes + 1] ^= 1
        store.values[key] = bytes(value)
    assert shelf.read(torch.tensor([4, 6]))["a"][:, 0].tolist() == [4, 6]
    shelf.settle()
    with pytest.raises(CorruptBitstream, match=f"a page on the {tier} tier is not what was written"):
        shelf.read(torch.tensor([5]))


def test_a_value_that_the_store_lost_is_a_typed_error() -> None:
    store = Plain()
    shelf = tiered([in_store(store)])
    shelf.write(torch.arange(8), rows(range(8)))
    shelf.flush()
    store.values.clear()
    with pytest.raises(StoreError, match="could not be read from the remote tier, which has them no more.*recover"):
        shelf.read(torch.tensor([5]))


def test_when_every_tier_is_full_the_message_says_what_to_do() -> None:
    with pytest.raises(StoreError, match="every tier down to 'disk' is full .* raise a cap, or add a tier below"):
        run(f"quest(budget=40) + disk(host={2 * PAGE}, disk={2 * PAGE})", draw(160), 160)


def test_a_full_disk_keeps_pages_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = draw(160)
    want = run("quest(budget=40) + disk(host=4096)", tokens, 120).out
    monkeypatch.setattr(os, "pwrite", no_space)
    found = run("quest(budget=40) + disk(host=4096)", tokens, 120)
    stats = measure([found.cache])
    assert torch.equal(found.out, want) and stats.faults > 0 and stats.tier("disk") == 0 < stats.tier("host")
    with pytest.raises(StoreError, match="not written to the disk tier: .*space"):
        run("quest(budget=40) + disk(host=0)", tokens, 120)


def no_space(*_: object) -> int:
    raise OSError(28, "no space left")


def test_files_of_a_killed_process_are_swept(tmp_path: Path) -> None:
    receive, send = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads of this process are idle
        child = os.fork()
    if child == 0:
        kept = in_file(4, str(tmp_path))({"a": torch.zeros(0, 3)})
        os.write(send, b"!")
        time.sleep(60)
        os._exit(kept.slots.used)
    assert os.read(receive, 1) == b"!"
    mine = in_file(4, str(tmp_path))({"a": torch.zeros(0, 3)})
    assert len(list(tmp_path.iterdir())) == 2  # the living one's stays
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(receive), os.close(send)
    another = in_file(4, str(tmp_path))({"a": torch.zeros(0, 3)})
    assert len(list(tmp_path.iterdir())) == 2
    del mine, another
    gc.collect()
    assert not list(tmp_path.iterdir())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("policy", [
    f"quest(budget=64) + disk(device={2 * PAGE}, host={2 * PAGE})",
    f"quest(budget=64) + remote(url='memory://', device={PAGE}, host={PAGE}, disk={2 * PAGE})",
    "ann(budget=64, index='hnsw') + host(resident=64)",
    "ann(budget=64, index='ivf') + disk(host=4096)",
])  # fmt: skip
def test_a_copied_cache_goes_its_own_way(policy: str) -> None:
    """As the evaluation does for each question on one context: the copy may go first, or outlive what it came from."""

    def read() -> tuple[list[LayerCache], Session]:
        caches, session = two_layers(policy)
        session.prompt_end = 300
        feed(caches, draw(340), 0, 300)
        return caches, session

    def go_on(caches: list[LayerCache], a: int, b: int, seed: int = 0) -> list[torch.Tensor]:
        tokens = draw(340, seed=seed)
        return [c.forward(*tokens.part(i, i + 1), Call(tokens.scale)) for i in range(a, b) for c in caches]

    first, want, other = read(), go_on(read()[0], 300, 322), go_on(read()[0], 300, 310, seed=5)
    copied = copy.deepcopy(first)
    assert all(map(torch.equal, go_on(copied[0], 300, 310, seed=5), other))
    del copied
    gc.collect()
    assert all(map(torch.equal, go_on(first[0], 300, 310), want[:20]))
    second = copy.deepcopy(first)
    assert all(map(torch.equal, go_on(first[0], 310, 316), want[20:32]))
    assert measure(first[0]).faults == 0
    del first
    gc.collect()
    assert all(map(torch.equal, go_on(second[0], 310, 322), want[20:])) and measure(second[0]).faults == 0


def test_options_are_checked() -> None:
    for make, words in (
        (lambda: Disk(host=-1), "Disk: host=-1 must be a number of bytes"),
        (lambda: Disk(device=None), "Disk: device=None"),
        (
            lambda: Remote(disk=None),
            "Remote: disk=None must be a number of bytes",
        ),  # nothing would ever reach the store
        (lambda: Remote(url=""), "must say where the store is"),
        (lambda: Remote(url="foo"), r"write redis://foo:6379/0 for a server, \./foo for a new folder"),
        (lambda: Remote(url="localhost:6379"), "no URL and hardly a path"),
        (lambda: Remote(url="ftp://x"), "no store is known for 'ftp://x'"),
        (lambda: Remote(ttl=0), "positive number of seconds"),
        (lambda: Disk(fields="v"), "must be a tuple of field names"),
    ):
        with pytest.raises(PolicyError, match=words):
            make()
    for text, known in (
        ("quest(budget=40) + disk(fields=('w',))", "k, v"),
        ("kivi + host(fields=('v',))", "k_code, k_scale, k_zero, v_code, v_scale, v_zero"),
        ("remote(fields=('v_low',)) + quantspec(bits=4)", "k_code"),
        ("lowrank + host(fields=('k',))", "v"),
        ("zipcache + host(fields=('v_code',))", "k_high"),
    ):
        with pytest.raises(PolicyError, match=f"no page field is called '.*Known: {known}.*leave fields=.* out"):
            Stack.parse(text)
    with pytest.raises(StoreError, match="pages cannot be kept in /proc/no: .*give another folder"):
        run("quest(budget=40) + disk(folder='/proc/no')", draw(80), 80)
