"""What a lane holds after another prompt: what a row holds alone, each token once, and no page without one."""

from typing import Any

import pytest
import torch
from support import Bare, held

from kvengine import page_answers, page_reads
from kvengine.holding import Holding
from kvengine.policies.retention.elastic import Elastic

LOSSLESS = [
    "h2o(budget=24) + host",
    "expected_attention(budget=24) + quest(budget=16, page=4)",
    "snapkv(budget=30, window=8) + landmarks(budget=16, chunk=4, local=4)",
]
CODES = [
    "snapkv(budget=30, window=8) + kivi(bits=4, group=8, residual=8)",
    "expected_attention(budget=24) + turboquant(residual=8)",
    "elastic(budget=24, offset=-3) + kivi(bits=4, group=8, residual=8)",
]
PADS, LATER = (0, 21, 39), (30, 0, 11)  # the first row says nothing in the second turn


def two_turns(bare: Bare, rows: list[int], more: int) -> torch.Tensor:
    """Outputs of what is decoded after the second; a row that is alone comes without padding."""
    alone, at = len(rows) == 1, torch.arange(60)
    first, later = ((at[:n] >= torch.tensor(pads)[rows, None]) for n, pads in ((60, PADS), (30, LATER)))
    if alone:
        first, later = first[:, first[0]], later[:, later[0]]
    bare.feed(first.shape[1], first)
    for _ in range(7):
        bare.feed(1)
    if later.shape[1]:
        bare.feed(later.shape[1], later)
    return torch.cat([bare.feed(1) for _ in range(more)], 1)


def single(bare: Bare, row: int) -> Bare:
    one, now = Bare(str(bare.cache.stack), tokens=0), [*range(PADS[row], 67), *range(67 + LATER[row], bare.k.shape[2])]
    one.q, one.k, one.v = (x[row : row + 1, :, now] for x in (bare.q, bare.k, bare.v))
    return one


def lane_of(bare: Bare) -> Holding:
    return bare.cache.parts[0].lane


@pytest.mark.parametrize(
    "text", [*LOSSLESS, *CODES, "kivi(bits=2, group=8, residual=0)", "zipcache(block=8, probes=0.5)"]
)
def test_rows_beside_one_that_says_nothing_are_as_alone(text: str) -> None:
    whole = Bare(text, rows=3, tokens=97 + 20)
    got = two_turns(whole, [0, 1, 2], 20)
    for row in range(3):
        torch.testing.assert_close(got[row : row + 1], two_turns(single(whole, row), [row], 20), rtol=1e-4, atol=1e-5)


def test_a_tail_with_holes_that_stays_is_not_read_as_if_it_were_full() -> None:
    """Where another row's turn leaves that as many tokens as this one has slots."""
    text = "h2o(budget=0.5) + turboquant(residual=8)"
    whole, alone = Bare(text, heads=1, rows=2, tokens=60), Bare(text, heads=1, tokens=0)
    now = [*range(47), *range(49, 60)]
    alone.q, alone.k, alone.v = (x[:1, :, now] for x in (whole.q, whole.k, whole.v))
    for bare in (whole, alone):
        bare.feed(40)
        for _ in range(7):
            bare.feed(1)
    whole.feed(2, torch.tensor([[False, False], [True, True]]))
    tail = lane_of(whole).tail
    assert (tail.position[:, tail.span] < 0).any(1).tolist() == [True, False]
    for _ in range(4):
        torch.testing.assert_close(whole.feed(1)[:1], alone.feed(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("text", LOSSLESS + CODES)
def test_pages_hold_each_token_once_and_none_is_empty(text: str) -> None:
    """Without codes, where all is written anew, none has a hole."""
    bare = Bare(text, rows=2)
    for turn in range(4):
        bare.feed(40)
        for row in held(bare.cache):
            assert all(len(set(head)) == len(head) <= 41 for head in row)
        pages = lane_of(bare).pages
        if turn and pages is not None and pages.columns:
            there = (pages.position >= 0).unflatten(1, (-1, pages.page))[pages.table >= 0]
            assert there.any(1).all() and (there.all() or text in CODES)
        for _ in range(5):
            bare.feed(1)


def test_codes_of_what_stays_are_not_written_again() -> None:
    """Each time more would be lost."""
    bare = Bare(CODES[0])
    told: list[dict[int, torch.Tensor]] = []
    for tokens in (60, 9):
        bare.feed(tokens)
        pages = lane_of(bare).pages
        assert pages is not None
        k, v = pages.decoded()
        both = torch.cat([k, v], 2)[0]
        told.append({p: x for p, x in zip(pages.position[0].tolist(), both, strict=True) if p >= 0})
    stay = set(told[0]) & set(told[1])
    assert len(stay) > 4 and all(torch.equal(told[0][p], told[1][p]) for p in stay)


def test_what_another_prompt_drops_is_merged_though_there_are_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    folded: list[tuple[torch.Tensor, torch.Tensor]] = []
    fold = Elastic.fold

    def noting(self: Elastic, seen: Any, keep: Any) -> Any:
        out = fold(self, seen, keep)
        k, v = seen.read()
        assert not torch.equal(out[1], v)
        folded.append((seen.position[0], out[1]))
        return out

    monkeypatch.setattr(Elastic, "fold", noting)
    bare = Bare(CODES[2])
    for turn in range(3):
        bare.feed(60)
        assert len(folded) == turn + 1
        position, v = folded[-1]
        tail = lane_of(bare).tail
        near = tail.position[0, tail.span]
        at = (position == near[near >= 0][:, None]).int().argmax(1)
        torch.testing.assert_close(tail.v[:, tail.span][:, near >= 0], v[:, at])


@pytest.mark.parametrize(
    "text", [*LOSSLESS, *CODES, "h2o(budget=24)", "zipcache(block=8, probes=0.5)", "lowrank(rank=8)"]
)
def test_rows_that_are_chosen_are_as_if_nobody_else_had_been_there(text: str) -> None:
    """Behind a second prompt, whose rows are of different lengths."""
    order, at = torch.tensor([2, 0, 1, 2]), torch.arange(60)
    first, later = ((at[:n] >= torch.tensor(pads)[:, None]) for n, pads in ((60, PADS), (30, LATER)))
    out = []
    for begin in (True, False):
        bare, some = Bare(text, rows=3, tokens=97 + 30), slice(None)
        if begin:
            bare.q, bare.k, bare.v, some = bare.q[order], bare.k[order], bare.v[order], order
        found = []
        bare.feed(60, first[some])
        for _ in range(7):
            bare.feed(1)
        bare.feed(30, later[some])
        for step in range(30):
            if step == 3 and not begin:
                bare.cache.rows(order)
                bare.q, bare.k, bare.v = bare.q[order], bare.k[order], bare.v[order]
            found.append(bare.feed(1)[:, 0])
        out.append(torch.stack(found[3:]))
    torch.testing.assert_close(*out, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "text", ["snapkv(budget=30, window=20)", "snapkv(budget=30, window=20) + kivi(bits=4, group=8, residual=8)"]
)
def test_padding_in_a_later_chunk_counts_as_if_it_had_come_before(text: str) -> None:
    """To a row whose turn is shorter than the window: queries of the turn before do not ask."""
    bare, valid = Bare(text, rows=2, tokens=110), torch.ones(2, 24, dtype=torch.bool)
    valid[1, 12:22] = False  # in the second chunk, behind twelve tokens
    bare.feed(60)
    bare.feed(7)
    bare.cache.session.prompt_end = 67 + 24
    for chunk in valid.split(12, 1):
        bare.feed(12, chunk)
    got = torch.cat([bare.feed(1) for _ in range(10)], 1)
    one, now = Bare(text, tokens=0), [*range(79), *range(89, 110)]
    one.q, one.k, one.v = (x[1:, :, now] for x in (bare.q, bare.k, bare.v))
    one.feed(60)
    one.feed(7)
    one.cache.session.prompt_end = 67 + 14
    one.feed(12)
    one.feed(2)
    want = torch.cat([one.feed(1) for _ in range(10)], 1)
    torch.testing.assert_close(got[1:], want, rtol=1e-4, atol=1e-5)


def test_a_row_that_says_nothing_is_not_merged_whatever_a_method_makes_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method of one's own may change what it has not been asked to merge into."""
    monkeypatch.setattr(Elastic, "fold", lambda self, seen, keep: tuple(x + 1 for x in seen.read()))
    bare, silent = Bare("elastic(budget=16, offset=-3)", rows=2), torch.tensor([[True], [False]]).expand(-1, 9)
    found = []
    for n, valid in ((40, None), (9, silent)):
        bare.feed(n, valid)
        k, v, position, _ = lane_of(bare).everything()
        found.append([torch.cat([k, v], 2)[rows][position[rows] >= 0] for rows in (slice(0, 2), slice(2, 4))])
    (talks, mute), (talked, muted) = found
    assert torch.equal(mute, muted) and not torch.equal(talks, talked)


KIVI = "kivi(bits=4, group=8, residual=8)"
ALONE = [KIVI, f"{KIVI} + disk(host=0)", "quest(budget=16, page=4) + host", "turboquant(residual=8)"]


@pytest.mark.parametrize(
    "text", [*ALONE, *CODES, "lowrank(rank=4)", "zipcache(block=8)", "disk(device=2048, host=2048)"]
)
def test_a_later_prompt_has_pages_decoded_some_at_a_time(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are decoded in float32, which of all pages at once would be twice what a cache in bfloat16 would hold."""
    most, decoded = 0, page_answers.decoded

    def listening(representation: Any, given: Any) -> Any:
        nonlocal most
        k, v = decoded(representation, given)
        most = max(most, v.shape[0] * v.shape[1])
        return k, v

    whole, parts = (Bare(text, rows=2, heads=2, tokens=200) for _ in range(2))
    want = [whole.feed(n) for n in (90, 30, 25, 1)]  # with gradients all are decoded at once
    monkeypatch.setattr(page_reads, "LAID", 64)
    monkeypatch.setattr(page_reads.page_answers, "decoded", listening)
    with torch.no_grad():
        for n, out in zip((90, 30, 25, 1), want, strict=True):
            most = 0
            torch.testing.assert_close(parts.feed(n), out, rtol=1e-4, atol=1e-5)
            assert n in (90, 1) or text not in ALONE or 0 < most <= 64  # others look at what is held once more
