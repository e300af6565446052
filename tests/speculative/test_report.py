"""What a report says, held against counts made beside it."""

from __future__ import annotations

import itertools
from dataclasses import fields, replace
from typing import Any

import pytest
from support_spec import llama, prompt
from torch import Tensor

import kvengine
from kvengine.errors import EvaluationError
from kvengine.speculative import bench
from kvengine.speculative.accept import rule
from kvengine.speculative.ahead import Round
from kvengine.speculative.clock import Watch
from kvengine.speculative.law import Law, Text
from kvengine.speculative.report import Report, TierReport, expected
from kvengine.speculative.run import prefill
from kvengine.speculative.triforce import TriForce


@pytest.fixture(scope="module")
def target() -> Any:
    return kvengine.patch(llama())


def weights(model: Any) -> int:
    """Bytes that a pass reads of them: all but the table of embeddings, of which it looks up some rows."""
    return 4 * sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)


def test_a_tree_is_worth_its_depth_and_not_its_nodes(target: Any) -> None:
    """A model drafts for itself: all stands, three tokens deep, of nine nodes drafted."""
    decoder = TriForce(target, target, None, gamma=(1, 3), widths=(3, 1, 1), draft_stack="full")
    decoder.generate(prompt(60), max_new_tokens=42, do_sample=False)
    report, top = decoder.report, decoder.report.tiers[0]
    assert top.drafted > 2 * sum(top.stood) and top.acceptance == 1.0 and sum(top.depths) == top.passes
    report.plain_pass = (top.seconds + top.draft_seconds) / top.passes  # then a round's tokens are the speed-up
    assert report.predicted_speedup == pytest.approx(top.tokens_per_pass) and top.tokens_per_pass > 3


def test_a_model_that_drafts_trees_is_reported(target: Any) -> None:
    seen: list[int] = []
    small = llama(1, layers=1)

    def note(_: Any, args: tuple[Tensor], __: Any) -> None:
        seen.append(args[0].shape[1])

    hook = small.register_forward_pre_hook(note, with_kwargs=True)
    decoder = TriForce(target, small, None, gamma=(1, 2), widths=(2, 1))
    decoder.generate(prompt(60), max_new_tokens=12, do_sample=False)
    hook.remove()
    top, draft = decoder.report.tiers
    assert (draft.name, draft.passes, draft.fed) == ("draft", len(seen) - 1, sum(seen[1:]))  # less the prompt's
    assert draft.bytes_read > draft.passes * weights(small) and draft.seconds == top.draft_seconds > 0


def test_weights_read_for_several_rows_count_once(target: Any) -> None:
    passes: list[int] = []
    hook = target.register_forward_pre_hook(lambda _, args: passes.append(args[0].shape[1]))
    decoder = TriForce(target, "lookup", None, gamma=(1, 3))
    decoder.generate(prompt(60, 4), max_new_tokens=10, do_sample=False)
    hook.remove()
    top = decoder.report.tiers[0]
    shared = len(passes) - 4  # less the prompts'
    assert shared < top.passes
    cache = top.bytes_read - shared * weights(target)
    assert 0 < cache < top.passes * 2 * 2 * 2 * 80 * 8 * 4  # layers, keys and values, heads, tokens, dim, fp32


def test_what_stood_behind_the_end_of_a_text_is_no_text(target: Any) -> None:
    free = target.generate(prompt(), max_new_tokens=30, do_sample=False)[0, 90:].tolist()
    end = next(token for at, token in enumerate(free) if at > 1 and token not in free[:at] and at % 7 not in (0, 6))
    decoder = TriForce(target, "lookup", "full", gamma=(1, 6))
    decoder.generate(prompt(), max_new_tokens=30, do_sample=False, eos_token_id=end, pad_token_id=0)
    report = decoder.report
    assert report.emitted == free.index(end) + 1
    assert report.tokens_per_target_pass == (report.emitted - 1) / report.tiers[0].passes


def test_bytes_are_those_of_decoded_tokens(target: Any) -> None:
    """Plain decoding reads weights and cache once for each; a row's first token came with its prompt, which is not counted."""
    decoder = TriForce(target, None, None)
    decoder.generate(prompt(60, 2), max_new_tokens=3, do_sample=False)
    report, one = decoder.report, decoder.report.tiers[0]
    assert (report.emitted, one.passes) == (6, 4) and report.bytes_per_token == one.bytes_read / 4 > weights(target) / 2


@pytest.mark.parametrize("middle", ["quest(budget=24, page=4)", "kivi(group=8, residual=8)"])
def test_rows_of_a_batch_hold_their_caches_at_the_same_time(target: Any, middle: str) -> None:
    decoder, held = TriForce(target, "lookup", middle, gamma=(1, 3)), []
    for rows in (1, 3):
        decoder.generate(prompt(60).repeat(rows, 1), max_new_tokens=8, do_sample=False)
        held.append([(tier.cache_bytes, tier.device_bytes) for tier in decoder.report.tiers])
    assert held[1] == [(3 * cache, 3 * device) for cache, device in held[0]]
    one, both = (Report(tiers=[TierReport("target", cache_bytes=7, device_bytes=5)]) for _ in range(2))
    both.add(one)  # of one call after the other
    assert (both.tiers[0].cache_bytes, both.tiers[0].device_bytes) == (7, 5)


def test_tokens_per_second_are_those_that_the_seconds_went_into() -> None:
    """A row's first token came with its prompt, whose seconds are said apart."""
    for emitted, said in ((2, "2 tokens in 0.500 s (0.0 per second)"), (6, "6 tokens in 0.500 s (8.0 per second)")):
        assert said in str(Report(rows=2, emitted=emitted, seconds=0.5))


def test_a_share_of_what_stood_is_said_with_what_it_is_of() -> None:
    """Of 33 drafted tokens 26 were judged, as those behind one that falls are not: 25 of 33 are not 0.96."""
    tier = TierReport("target", passes=6, drafted=33, tested=[6, 20], stood=[5, 20])
    assert "33 drafted for it, 25 of 26 that it judged stood (0.96; by place 0.83 1.00)" in str(Report(tiers=[tier]))


def test_reports_that_are_summed_stay_as_they_are() -> None:
    one, total = Report(tiers=[TierReport("target", passes=3, tested=[2], stood=[1])]), Report()
    for _ in range(2):
        total.add(one)
    assert (total.tiers[0].passes, total.tiers[0].tested) == (6, [4])
    assert one == Report(tiers=[TierReport("target", passes=3, tested=[2], stood=[1])])


def test_a_tier_sums_its_rounds_and_a_report_its_rows() -> None:
    tier = TierReport("target")
    for what in (
        Round(3, 3, 1, (), 4, 0.5, 1.0, 0.25, (1, 2, 3)),
        Round(2, 5, 2, (), 6, 1.0, 2.0, 0.0, (3, 5)),
        Round(0, 0, 0, (), 1, 0.0, 4.0),
    ):
        tier._count(what)
    summed = TierReport("target", 3, 11, 8, 7.25, 1.5, tested=[2, 2], stood=[2, 1], depths=[1, 0, 1, 1])
    assert tier == summed and (tier.tokens_per_pass, tier.acceptance) == (2.0, 0.75)
    total, one = Report(), Report(1, 10, 4, 0.5, 2.0, 1.0, [tier])
    for _ in range(2):
        total.add(one)
    twice = TierReport("target", 6, 22, 16, 14.5, 3.0, tested=[4, 4], stood=[4, 2], depths=[2, 0, 2, 2])
    assert total == Report(2, 20, 8, 1.0, 4.0, 2.0, [twice]) and expected(twice) == pytest.approx(
        (1 + 2.3125 + 2.734375) / 3
    )


def test_seconds_of_a_round_are_counted_once(target: Any) -> None:
    """A tick for each look at the clock: one lies between the draft's preparation and its end, and is not the draft's own."""
    text, clock = Text(prompt()[0].tolist()), itertools.count()
    tier = TriForce(target, llama(1, layers=1), None).tiers(Law(), rule(0, 0, False), frozenset(), Watch())
    prefill(tier, text.tokens)
    assert tier.reader is not None and tier.reader.session.settled == len(text)  # read as a prompt, by both
    text.tokens.append(2)
    tier.clock, tier.other = lambda: float(next(clock)), 7.0
    tier.step(text, ())
    (what,) = tier.rounds
    assert (what.draft_seconds, what.judge_seconds, what.other_seconds, tier.other) == (2.0, 1.0, 8.0, 0.0)


def test_a_picture_names_budgets_that_are_no_part_of_the_context_in_tokens() -> None:
    row = bench.Result(*(0,) * len(fields(bench.Result)))
    names = {
        "quest(budget=64, page=4)": "quest(budget=1/16, page=4)",
        "retrieval(budget=4096)": "retrieval(budget=4096)",
        "tova(budget=64, recent=0)": "tova(budget=1/16, recent=0)",
    }
    for middle, name in names.items():
        given = replace(row, context=1024, middle=middle, draft="none", gamma="(1, 6)")
        assert bench.label(given) == f"{name}, γ=(1, 6)"


def test_seconds_of_one_clock_are_held_against_seconds_of_the_same() -> None:
    """On a busy machine a second on the wall is half a second of computing; tiers count the latter."""
    plain = Report(1, 10, 11, 0.0, 20.0, 10.0, [TierReport("target", 10, 10, seconds=10.0, depths=[10])])
    tier = TierReport("target", 5, 10, 5, 6.0, 4.0, tested=[5], stood=[5], depths=[0, 5])
    report = Report(1, 10, 11, 0.0, 20.0, 10.0, [tier])
    report.against(plain)
    assert report.measured_speedup == pytest.approx(1.0)
    assert report.predicted_speedup == pytest.approx(1.0)


def test_nothing_to_compare(target: Any) -> None:
    with pytest.raises(EvaluationError, match="one token.*ask for more"):
        bench.compare(target, [prompt(20)], [bench.Setting("lookup")], new=1)
    first = int(target.generate(prompt(20), max_new_tokens=1, do_sample=False)[0, -1])
    with pytest.raises(EvaluationError, match="one token.*the model ended there"):
        bench.compare(target, [prompt(20)], [bench.Setting("lookup")], new=8, do_sample=False, eos_token_id=first)
