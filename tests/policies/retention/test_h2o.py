"""H2O against a loop that follows the paper, token by token; and the mean in place of the sum."""

import pytest
import torch
from support_layer import Tokens, draw, run, stacked
from support_retention import Case, attended, best, output, positions, probabilities, same_source

SHAPES = pytest.mark.parametrize(
    "heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (4, 0), 2), (2, 2, (30,), 5)]
)


def received(case: Case, row: int, queries: range, tokens: list[int], reduce: str = "mean") -> dict[int, float]:
    """Attention that each token gets from these queries, one value per group; no query sees what comes after it."""
    total = {token: [0.0] * case.group for token in tokens}
    for i in queries:
        seen = [t for t in tokens if t <= i]
        for head, paid in enumerate(probabilities(case, row, i, seen).tolist()):
            for token, share in zip(seen, paid, strict=True):
                total[token][head] += share
    part = case.group if reduce == "mean" else 1
    return {token: max(by_head) if reduce == "max" else sum(by_head) / part for token, by_head in total.items()}


def verdict(score: dict[int, float], now: int, budget: int, recent: float, average: bool) -> list[int]:
    newest = max(1, int(budget * recent))
    ranked = {p: s / (now - p + 1) for p, s in score.items()} if average else score
    return best(ranked, budget, lambda p: p > now - newest)


@pytest.mark.sampled(6)
@SHAPES
@pytest.mark.parametrize("recent", [0.5, 0, 1])
@pytest.mark.parametrize("average, reduce", [(False, "mean"), (True, "mean"), (False, "max"), (True, "sum")])
def test_it_keeps_what_received_most(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, recent: float, average: bool, reduce: str
) -> None:
    case = Case(heads, group, pads=pads)
    layer = case.prompt(f"h2o(budget=11, recent={recent}, average={average}, reduce={reduce!r})", chunks)
    score: dict[int, dict[int, float]] = {}
    for row in range(case.rows):
        tokens = list(range(case.row(row)[3], case.length))
        score[row] = received(case, row, range(tokens[0], case.length), tokens, reduce)
        kept = verdict(score[row], case.length - 1, 11, recent, average)
        assert positions(layer, row) == kept
        score[row] = {p: score[row][p] for p in kept}
    for t, out in case.decode(layer):
        for row, before in score.items():
            tokens = [*before, t]
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, tokens))
            paid = received(case, row, range(t, t + 1), tokens, reduce)
            now = {p: before.get(p, 0.0) + paid[p] for p in tokens}
            score[row] = {p: now[p] for p in verdict(now, t, 11, recent, average)}
            assert positions(layer, row) == list(score[row])
    same_source(case, layer)


@pytest.mark.parametrize("room", [0, 3])
def test_a_prompt_of_which_all_stays_leaves_its_scores(room: int) -> None:
    """They are what decides once tokens have to go."""
    case = Case(heads=1, group=2, pads=(0,))
    budget = case.length + room
    layer, tokens = case.prompt(f"h2o(budget={budget}, recent=0.1)", 1), list(range(case.length))
    score = received(case, 0, range(case.length), tokens)
    assert positions(layer, 0) == tokens
    for t, _ in case.decode(layer):
        tokens = [*score, t]
        paid = received(case, 0, range(t, t + 1), tokens)
        now = {p: score.get(p, 0.0) + paid[p] for p in tokens}
        score = {p: now[p] for p in verdict(now, t, budget, 0.1, False)}
        assert positions(layer, 0) == list(score)
    assert len(score) == budget < t + 1


def test_what_a_second_prompt_pays_is_added_to_the_scores() -> None:
    """Of the first prompt, of its answer and of the second one: what is held has one sum, which decides."""
    case = Case(length=30, steps=25, pads=(0, 5))
    layer, score, forgetful = case.prompt("h2o(budget=12)"), dict[int, dict[int, float]](), 0
    for row in range(case.rows):
        tokens = list(range(case.row(row)[3], 30))
        now = received(case, row, range(tokens[0], 30), tokens)
        score[row] = {p: now[p] for p in verdict(now, 29, 12, 0.5, False)}
    for turn in ([30], [31], [32], list(range(33, 50)), [50], [51], [52]):
        case.feed(layer, turn[0], turn[-1] + 1)
        for row, before in score.items():
            paid = received(case, row, range(turn[0], turn[-1] + 1), [*before, *turn])
            now = {p: before.get(p, 0.0) + x for p, x in paid.items()}
            kept, others = (verdict(x, turn[-1], 12, 0.5, False) for x in (now, paid))
            score[row], forgetful = {p: now[p] for p in kept}, forgetful + (len(turn) > 1 and kept != others)
            assert positions(layer, row) == kept
    assert forgetful  # the control: by the second prompt's queries alone others would stay


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_second_prompt_counts_its_own_queries(chunks: int) -> None:
    """Judged once, a token's score is of the last prompt alone, and so is the number of queries."""
    apart = 0
    for seed in range(8):
        case = Case(heads=1, group=2, length=30, steps=21, spread=1.0, seed=seed)
        layer = case.prompt("h2o(budget=9, recent=0, average=True, decode=False)", chunks)
        kept = positions(layer, 0)
        score = received(case, 0, range(30), list(range(30)))
        assert kept == verdict(score, 29, 9, 0, True)
        case.session.prompt_end = 51
        case.feed(layer, 30, 51)
        later = received(case, 0, range(30, 51), kept + list(range(30, 51)))
        right, one_more, all_of_them = (
            best({p: s / min(51 - p, n) for p, s in later.items()}, 9, lambda p: p == 50) for n in (21, 22, 51)
        )
        assert positions(layer, 0) == right
        apart += (right != one_more) + (right != all_of_them)
    assert apart > 2  # the control: with other numbers of queries it would keep others


def test_saliency_is_no_evidence_for_a_later_verdict() -> None:
    """Judged once, it remembers nothing; what `zipcache` stores with the tokens meanwhile is not its own."""
    held = []
    for store in ("", " + zipcache(block=128)"):  # of which no block is full
        case = Case(length=30, steps=24)
        layer = case.prompt(f"h2o(budget=14, recent=0, decode=False){store}")
        for _, _ in zip(range(21), case.decode(layer), strict=False):
            pass
        case.session.prompt_end = 54
        case.feed(layer, 51, 54)
        held.append([positions(layer, row) for row in range(case.rows)])
    assert held[0] == held[1]


def test_what_a_prefill_method_leaves_out_counts_unless_it_is_a_band() -> None:
    case = Case(length=61, pads=(0, 5))
    alone, flex, band = (
        [positions(case.prompt(f"{prefill} + h2o(budget=20)"), row) for row in range(case.rows)]
        for prefill in ("exact", "flexprefill(gamma=0.3, tau=0, min_budget=8, block=8)", "ashape(sinks=2, local=9)")
    )
    assert flex == alone != band


@pytest.mark.parametrize("text", ["h2o(budget=24)", "tova(budget=24)"])
def test_a_chunk_that_is_all_padding_to_a_row_pays_nothing(text: str) -> None:
    """Nor is what earlier chunks have paid counted once more."""
    short, other, real = draw(70, seed=1), draw(90, seed=2), torch.ones(2, 90, dtype=torch.bool)
    real[0, 30:50] = False
    longer = Tokens(
        *(torch.cat([x[:, :, :30], x[:, :, :20] * 3, x[:, :, 30:]], 2) for x in (short.q, short.k, short.v))
    )
    alone, both = run(text, short, 60), run(text, stacked(longer, other), 80, valid=real, chunks=(30, 50))
    torch.testing.assert_close(both.out[:1, real[0]], alone.out, atol=1e-5, rtol=1e-4)
