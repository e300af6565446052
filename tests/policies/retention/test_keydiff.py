"""KeyDiff against a loop."""

import pytest
from support_retention import Case, best, positions, same_source
from torch.nn.functional import cosine_similarity


def scores(case: Case, row: int) -> dict[int, float]:
    _, k, _, pad = case.row(row)
    anchor = sum(k[t] / k[t].norm() for t in range(pad, case.length)) / (case.length - pad)
    return {t: -float(cosine_similarity(k[t], anchor, dim=0)) for t in range(pad, case.length)}


@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (4, 0), 2)])
@pytest.mark.parametrize("budget", [9, 0.5])
def test_it_keeps_the_keys_least_like_the_average(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, budget: int | float
) -> None:
    case = Case(heads, group, pads=pads)
    layer = case.prompt(f"keydiff(budget={budget})", chunks)
    for row in range(case.rows):
        n = budget if isinstance(budget, int) else int((case.length - case.row(row)[3]) * budget)
        assert positions(layer, row) == best(scores(case, row), n)
    same_source(case, layer)
    before = [positions(layer, row) for row in range(case.rows)]
    for t, _ in case.decode(layer):
        assert positions(layer, 0) == before[0] + list(range(case.length, t + 1))
    same_source(case, layer)


def test_repeated_keys_go_first() -> None:
    """The negative control: the same score with its sign turned keeps the repeated ones."""
    case = Case(heads=1, group=1)
    case.k[:, :, 5:30] = case.k[:, :, 5:6]
    kept = positions(case.prompt("keydiff(budget=12)"), 0)
    assert not set(kept) & set(range(5, 30))
    assert set(best({p: -s for p, s in scores(case, 0).items()}, 12)) <= set(range(5, 30))


def test_recent_tokens_stay_if_asked() -> None:
    case = Case()
    assert positions(case.prompt("keydiff(budget=6, recent=4)"), 0)[-4:] == [33, 34, 35, 36]
