"""The controller against its promises, against fixed levels and recomputing on the same traces, and over a socket."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from support_offload import cache, stack

from kvengine.errors import StoreError
from kvengine.offload import cachegen
from kvengine.offload.links import Server, SimulatedLink, SocketLink, Trace
from kvengine.offload.streaming import TEXT, Bandwidth, Chunk, Controller, Fetched, Outcome, expected, stream

SIZES = {"lossless": 11_000, "high": 4_000, "low": 2_000, "extreme": 1_300}
SCORE = {"lossless": 1.0, "high": 0.99, "low": 0.95, "extreme": 0.8, TEXT: 1.0}
OPTIONS = [*SIZES, TEXT]


def play(options: Sequence[str], trace: Trace, deadline: float, chunks: Sequence[Chunk], prior: float) -> Outcome:
    controller = Controller(deadline, options, 1e7, Bandwidth(prior))
    return stream(chunks, controller, SimulatedLink(trace), expected(chunks, controller))


def test_constant_bandwidth_and_slack_give_the_best_level() -> None:
    chunks = [Chunk(SIZES, 1.0)] * 8
    assert set(play(OPTIONS, Trace((0,), (1e6,)), 10, chunks, 1e6).options) == {"lossless"}


def test_no_bandwidth_gives_text() -> None:
    chunks = [Chunk(SIZES, 0.05)] * 8
    outcome = play(OPTIONS, Trace((0,), (0,)), 1.0, chunks, 1e5)
    assert set(outcome.options) == {TEXT} and outcome.seconds <= 1.0


@settings(max_examples=100, deadline=None)
@given(st.floats(2e3, 1e6), st.integers(1, 12), st.floats(0.2, 20))
def test_the_deadline_is_met_whenever_the_lowest_level_can(rate: float, count: int, deadline: float) -> None:
    chunks = [Chunk(SIZES)] * count
    lowest = count * SIZES["extreme"] / rate + SIZES["extreme"] / 1e7
    outcome = play(list(SIZES), Trace((0,), (rate,)), deadline, chunks, rate)
    assert outcome.seconds <= max(deadline, lowest) + 1e-6


def test_it_adapts_when_bandwidth_drops_and_recovers() -> None:
    chunks = [Chunk(SIZES)] * 20
    outcome = play(list(SIZES), Trace((0, 0.3, 1.0), (1e5, 1.2e4, 2e5)), 3.0, chunks, 1e5)
    assert outcome.seconds <= 3.0 and len(set(outcome.options)) > 1
    fixed = play(["lossless"], Trace((0, 0.3, 1.0), (1e5, 1.2e4, 2e5)), 3.0, chunks, 1e5)
    assert outcome.nbytes < fixed.nbytes


def test_a_stalled_transfer_is_given_up_in_time_to_recompute() -> None:
    chunks = [Chunk(SIZES, 0.1)] * 6
    outcome = play(OPTIONS, Trace((0, 0.25), (1e5, 0)), 2.0, chunks, 1e5)
    assert outcome.given_up >= 1 and outcome.options[-1] == TEXT and outcome.seconds <= 2.0


def test_what_costs_nothing_to_recompute_takes_nothing_off_the_patience_of_others() -> None:
    controller = Controller(10.0, OPTIONS, 1e7, Bandwidth(1e3), margin=0.0)
    for free, waits in ((0.0, 9.0), (2.0, 3.0), (None, 5.1)):
        rest = [Chunk(SIZES, free)] * 3
        assert controller.patience(Chunk(SIZES, 1.0), "extreme", rest, now=0.0) == pytest.approx(waits)


def wide_traces(count: int) -> list[Trace]:
    """Links whose mean differs a hundredfold, as CacheGen simulates (0.1 to 10 Gbit/s), each fluctuating by half."""
    scales = [5e3 * 100 ** (seed / (count - 1)) for seed in range(count)]
    return [Trace.random(i, low=0.5 * s, high=1.5 * s, step=0.2) for i, s in enumerate(scales)]


def test_better_than_any_fixed_choice_on_the_same_traces() -> None:
    """As rarely late as the smallest level (but for the first chunk's guess), and better than every choice that is."""
    chunks, deadline, traces = [Chunk(SIZES, 0.25)] * 10, 1.5, wide_traces(80)
    late: dict[str, set[int]] = {}
    quality: dict[str, float] = {}
    for name, options in {"adaptive": OPTIONS, **{level: [level] for level in OPTIONS}}.items():
        outcomes = [play(options, trace, deadline, chunks, 4e4) for trace in traces]
        late[name] = {i for i, o in enumerate(outcomes) if o.seconds > deadline}
        quality[name] = sum(o.quality(SCORE) for o in outcomes) / len(outcomes)
    assert len(late["adaptive"]) <= len(late["extreme"]) + 1 <= 12
    assert quality["adaptive"] > quality["extreme"] + 0.1
    for level in ("lossless", "high", "low", TEXT):
        assert len(late[level]) > 1.5 * len(late["adaptive"]), level


def test_greedy_choice_agrees_with_brute_force_under_constant_bandwidth() -> None:
    """With the bandwidth known, the plan is one level for all or none better fits: enumerate all plans."""
    chunks, rate, deadline = [Chunk(SIZES)] * 4, 1e4, 1.3
    controller = Controller(deadline, list(SIZES), 1e7, Bandwidth(rate), margin=0.0, doubt=1.0)
    outcome = stream(chunks, controller, SimulatedLink(Trace((0,), (rate,))), expected(chunks, controller))
    plans = itertools.product(SIZES, repeat=4)
    fitting = [p for p in plans if sum(SIZES[o] for o in p) / rate + SIZES[p[-1]] / 1e7 <= deadline]
    best_worst = max(min(SCORE[o] for o in plan) for plan in fitting)
    assert outcome.seconds <= deadline and min(SCORE[o] for o in outcome.options) == best_worst


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(0, 50_000), min_size=1, max_size=8))
def test_the_link_lets_through_what_the_trace_allows(seed: int, sizes: list[int]) -> None:
    trace = Trace.random(seed, low=0, high=1e5, step=0.1)
    link = SimulatedLink(trace)
    for size in sizes:
        got = link.fetch(0, "", size, 50.0)
        assert got.complete == (got.nbytes == size)
    ticks = int(link.now() / 0.1) + 1
    allowed = sum(trace.rates[i] * min(0.1, max(link.now() - trace.starts[i], 0)) for i in range(ticks))
    assert sum(sizes) <= allowed + 1 + len(sizes)


def test_what_is_expected_of_a_link_is_the_mean_of_its_last_transfers() -> None:
    link = Bandwidth(50.0)
    assert link.estimate() == 50
    for nbytes, seconds in ((10_000, 1.0), (100, 1.0), (100, 4.0), (900, 1.0), (5, 0.0)):
        link.observe(nbytes, seconds)
    assert link.estimate() == (100 + 100 + 900) / (1 + 4 + 1)  # of three; not of one that took no time
    link.observe(100, 1.0)
    assert link.estimate() == 100  # no more than the newest


def test_traces_replay(tmp_path: object) -> None:
    trace = Trace.random(3, low=1, high=9, step=0.5, count=20)
    trace.save(f"{tmp_path}/t.json")
    assert Trace.load(f"{tmp_path}/t.json") == trace
    with pytest.raises(ValueError, match="grow from 0"):
        Trace((1.0,), (2.0,))


@pytest.mark.parametrize("deadline", [20.0, 0.6])
def test_over_a_real_socket(deadline: float) -> None:
    """Chunks of a real cache at three levels, throttled to 400 kB/s: all arrive, decode, and a short deadline gets
    lower levels."""
    whole = cache(layers=2, heads=2, tokens=512, dim=32)
    parts = [cachegen.KV([(k[:, a : a + 128], v[:, a : a + 128]) for k, v in whole.layers]) for a in range(0, 512, 128)]
    stored = {(i, level): cachegen.encode(kv, level) for i, kv in enumerate(parts) for level in ("lossless", "low")}
    chunks = [Chunk({level: len(stored[i, level]) for level in ("lossless", "low")}) for i in range(4)]
    server = Server(lambda i, level: stored[i, level], Trace((0,), (4e5,)))
    link = SocketLink(server.address)
    decoded: dict[int, torch.Tensor] = {}

    def work(i: int, option: str, payload: bytes | None) -> None:
        assert payload is not None
        decoded[i] = stack(cachegen.decode(payload))

    outcome = stream(chunks, Controller(deadline, ["lossless", "low"], 1e8, Bandwidth(4e5)), link, work)
    server.close()
    link.close()
    back = torch.cat([decoded[i] for i in range(4)], dim=3)
    if deadline > 10:
        assert set(outcome.options) == {"lossless"} and torch.equal(back, stack(whole))
        assert outcome.nbytes / outcome.seconds < 5e5
    else:
        assert "low" in outcome.options
    assert (back.float() - stack(whole).float()).abs().max() < 3


def test_a_server_that_stalls_or_dies() -> None:
    server = Server(lambda i, level: bytes(100_000), Trace((0, 0.1), (1e6, 0)))
    link = SocketLink(server.address)
    start = time.monotonic()
    outcome = stream([Chunk({"x": 100_000}, 0.01)] * 3, Controller(0.5, ["x", TEXT], 1e9, Bandwidth(2e6)), link,
                     lambda i, option, payload: None)  # fmt: skip
    assert time.monotonic() - start < 5 and outcome.options[-1] == TEXT and outcome.given_up >= 1
    link.close()
    server.close()
    with pytest.raises(StoreError, match="no chunk server"):
        SocketLink(server.address)


def test_what_is_no_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="2 starts need as many rates"):
        Trace((0, 1), (5,))
    with pytest.raises(ValueError, match="of at least 0"):
        Trace((0,), (-1,))


def test_a_transfer_that_can_never_end_is_an_error() -> None:
    with pytest.raises(StoreError, match="ends at rate 0"):
        SimulatedLink(Trace((0, 1), (10, 0))).fetch(0, "low", 100, float("inf"))


def test_a_link_that_is_used_again_has_the_whole_time_again() -> None:
    """Its clock went on, so that the second stream was late before it began."""
    chunks, link = [Chunk(SIZES)] * 4, SimulatedLink(Trace((0,), (1e5,)))
    for _ in range(3):
        controller = Controller(1.0, list(SIZES), 1e7, Bandwidth(1e5))
        outcome = stream(chunks, controller, link, expected(chunks, controller))
        assert set(outcome.options) == {"lossless"} and outcome.seconds == pytest.approx(0.44, abs=0.01)


class Stalled(SimulatedLink):
    """Gives up every transfer, however long it may take."""

    def fetch(self, chunk: int, level: str, size: int, patience: float) -> Fetched:
        return Fetched(1.0, 0, False)


def test_a_chunk_that_cannot_be_recomputed_and_does_not_arrive_is_an_error() -> None:
    """Work was asked to recompute it."""
    asked, chunks = [], [Chunk(SIZES, 1.0), Chunk(SIZES)]
    controller = Controller(60.0, list(SIZES), 1e7, Bandwidth(1e5))
    with pytest.raises(StoreError, match="chunk 1 at 'extreme' did not arrive, and it cannot be recomputed"):
        stream(chunks, controller, Stalled(Trace((0,), (1.0,))), lambda i, option, payload: asked.append((i, option)))
    assert asked == [(0, TEXT)]


def test_a_link_of_which_nothing_is_expected_takes_for_ever() -> None:
    """A ZeroDivisionError."""
    assert Controller(1.0, OPTIONS, 1e7, Bandwidth(0.0)).choose([Chunk(SIZES, 0.5)], now=0.0) == TEXT


def test_a_chunk_without_any_of_the_options_is_refused() -> None:
    with pytest.raises(ValueError, match="none of the options"):
        Controller(1.0, ["unheard"], 1e7, Bandwidth(1e5)).choose([Chunk(SIZES, 1.0)], now=0.0)
