"""R-KV against a loop that follows the paper, token by token."""

import pytest
import torch
from support import Bare
from support_retention import Case, attended, best, output, positions, same_source
from torch import Tensor
from torch.nn import functional as F

from kvengine.errors import CacheError, PolicyError
from kvengine.lane import Lane
from kvengine.policies import load
from kvengine.policies.retention import Seen, rkv
from kvengine.policies.retention.rkv import RKV, newest_alike, redundancy
from kvengine.stack import Stack

OPTIONS = {"budget": 14, "buffer": 6, "window": 4, "kernel": 3, "mix": 0.3, "alike": 0.4}
TEXT = "rkv(" + ", ".join(f"{name}={value}" for name, value in OPTIONS.items()) + ")"


def importance(case: Case, row: int, newest: int, tokens: list[int], window: int, kernel: int) -> dict[int, float]:
    """I of a row's tokens but the newest `window`."""
    q, k, _, pad = case.row(row)
    others = [t for t in tokens if t <= newest - window]
    asked = [t for t in range(newest - window + 1, newest + 1) if t >= pad]
    logits = [(q[:, t] @ k[others].T) * case.call.scale for t in asked]
    if (cap := case.call.softcap) is not None:
        logits = [cap * (x / cap).tanh() for x in logits]
    paid = [x.amax(0).softmax(0) for x in logits]
    mean = torch.stack(paid).mean(0).tolist() if others else []
    half = kernel // 2
    return {t: max(mean[max(0, i - half) : i + half + 1]) for i, t in enumerate(others)}


def redundant(keys: torch.Tensor, alike: float) -> torch.Tensor:
    """R of tokens from the oldest to the newest, by the matrix of pairs."""
    unit = F.normalize(keys, dim=-1)
    pairs = (unit @ unit.T).fill_diagonal_(0)
    for i in range(len(pairs)):
        same = [j for j in range(len(pairs)) if j != i and pairs[i, j] > alike]
        if same:
            pairs[i, same[-1]] = 0
    return pairs.mean(0).softmax(0)


def verdict(case: Case, row: int, tokens: list[int], newest: int, options: dict[str, float]) -> list[int]:
    o = OPTIONS | options
    paid = importance(case, row, newest, tokens, o["window"], o["kernel"])  # type: ignore[arg-type]
    said = redundant(case.row(row)[1][tokens], o["alike"]).tolist()
    score = {t: o["mix"] * paid.get(t, 0) - (1 - o["mix"]) * r for t, r in zip(tokens, said, strict=True)}
    return best(score, int(o["budget"]), lambda t: t > newest - o["window"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (25, 0), 2)])
@pytest.mark.parametrize("length, budget, mix", [(37, 14, 0.3), (9, 14, 0.3), (37, 30, 0.0), (37, 14, 1.0)])
def test_it_judges_where_a_row_is_full(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, length: int, budget: int, mix: float
) -> None:
    pads = tuple(min(p, length - 2) for p in pads)
    case = Case(heads, group, length, steps=41, pads=pads)
    case.call = case.call._replace(softcap=1.5 if mix == 1 else None)
    layer = case.prompt(TEXT.replace("budget=14", f"budget={budget}").replace("mix=0.3", f"mix={mix}"), chunks)
    want, verdicts, options = {}, 0, {"budget": budget, "mix": mix}
    for row in range(case.rows):
        want[row] = verdict(case, row, list(range(case.row(row)[3], length)), length - 1, options)
        assert positions(layer, row) == want[row]
    for t, out in case.decode(layer):
        for row in range(case.rows):
            torch.testing.assert_close(output(case, out, row), attended(case, row, t, [*want[row], t]))
            want[row] = [*want[row], t]
            if len(want[row]) == budget + OPTIONS["buffer"]:
                want[row], verdicts = verdict(case, row, want[row], t, options), verdicts + 1
            assert positions(layer, row) == want[row]
    assert verdicts
    same_source(case, layer)


def test_padding_of_a_turn_shorter_than_the_window_asks_nothing() -> None:
    """The second row has two tokens in it, beside four of padding, and a window of four: they alone are asked."""
    case = Case(length=37, steps=6, pads=(0, 0))
    layer = case.prompt(TEXT)
    before = [positions(layer, row) for row in range(case.rows)]
    case.valid[1, 37:41] = False
    case.q[1, :, 37:41] *= 50
    case.feed(layer, 37, 43)
    for row in range(2, 4):
        q, k, _, _ = case.row(row)
        tokens = [*before[row], 41, 42]  # 16, the last four of which are the window
        paid = torch.stack([(q[:, t] @ k[tokens[:-4]].T * case.call.scale).amax(0).softmax(0) for t in (41, 42)])
        attention = F.max_pool1d(F.pad(paid.mean(0), (0, 4))[None], 3, 1, 1)[0]
        score = 0.3 * attention - 0.7 * redundant(k[tokens], 0.4)
        kept = best(dict(enumerate(score.tolist())), 14, lambda i: i >= 12)
        moved = [t + 4 if t < 37 else t for t in tokens]  # padding counts as if it had come before them
        assert positions(layer, row) == [moved[i] for i in kept]


@pytest.mark.parametrize("block, span", [(3, 4), (512, 1024)])
@pytest.mark.parametrize("alike", [0.0, 0.4, 0.99])
def test_redundancy_needs_no_matrix(block: int, span: int, alike: float, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvengine.policies.retention import rkv

    monkeypatch.setattr(rkv, "BLOCK", block)
    monkeypatch.setattr(rkv, "SPAN", span)
    random = torch.Generator().manual_seed(3)
    keys = torch.randn(3, 17, 4, generator=random)
    keys[:, 5] = keys[:, 11]
    there = torch.ones(3, 17, dtype=torch.bool)
    there[1, :6], there[2] = False, False
    found = redundancy(keys.masked_fill(~there[..., None], float("nan")).nan_to_num(7), there, alike)
    for row, mine in enumerate(there):
        assert (found[row, ~mine] == 0).all()
        if mine.any():
            torch.testing.assert_close(found[row, mine], redundant(keys[row, mine], alike))


@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_a_token_has_the_score_that_it_has_alone_whatever_other_rows_hold(mix: float) -> None:
    """The second row lacks tokens; what stands in their slots is no token, to no query and no key."""
    random, method = torch.Generator().manual_seed(0), RKV(budget=8, buffer=4, window=2, kernel=3, mix=mix)
    keys, queries = torch.randn(2, 10, 8, generator=random), torch.randn(2, 2, 2, 8, generator=random)
    position = torch.arange(10).repeat(2, 1)
    position[1, [0, 1, 2, 6]] = -1

    def score(rows: slice, slots: Tensor) -> Tensor:
        at, k = position[rows][:, slots], keys[rows][:, slots]
        first = at.masked_fill(at < 0, 99).amin(1)
        seen = Seen(at, torch.zeros(at.shape), first, 9, True, 10 - first, None, queries[rows], 0.3, lambda: (k, k))
        return method.score(seen)

    both, alone = score(slice(0, 2), torch.arange(10)), score(slice(1, 2), position[1] >= 0)
    assert (both[1, position[1] < 0] == 0).all() and (both[1, position[1] >= 0] != 0).any()
    torch.testing.assert_close(both[1, position[1] >= 0], alone[0])


def test_of_tokens_that_are_alike_the_newest_stays() -> None:
    """Two keys that say the same, and no query that cares: the older one goes."""
    case = Case(heads=1, group=1, length=12, dim=16)
    case.q *= 0
    case.k[0, 0, 6] = case.k[0, 0, 2] * 3
    layer = case.prompt("rkv(budget=11, buffer=4, window=2, mix=0.5)")
    assert positions(layer, 0) == [t for t in range(12) if t != 2]


@pytest.mark.parametrize("alike", [0.0, 0.5])
def test_nothing_alike_has_no_newest(alike: float) -> None:
    """A cosine must exceed the threshold, which 0 does not where that is 0."""
    one = torch.eye(4)[None]
    assert newest_alike(one, torch.ones(1, 4, dtype=torch.bool), alike).tolist() == [[-1] * 4]


@pytest.mark.parametrize("pads", [(0,), (0, 11)])
def test_verdicts_leave_saliency_alone(pads: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What ZipCache weighs tokens by is the attention they got, whenever and in whichever row R-KV judges."""
    case, told, judge = Case(length=20, steps=40, pads=pads), [], Lane.judge
    layer = case.prompt("rkv(budget=14, buffer=7, window=3) + zipcache(block=8, probes=0.5)")
    lane = layer.parts[0].lane

    def judged(self: Lane, seen: Seen, keep: Tensor) -> None:
        before = self.tail.scores(self.tail.span).clone()
        judge(self, seen, keep)
        told.append(((seen.valid & ~keep).any(1).tolist(), torch.equal(self.tail.scores(self.tail.span), before)))

    monkeypatch.setattr(Lane, "judge", judged)
    for _ in case.decode(layer):
        pass
    assert len(told) > 2 and all(same for _, same in told)
    assert lane.pages is not None and len(lane.pages)
    assert len(pads) == 1 or any(len(set(rows)) == 2 for rows, _ in told)  # one row is judged, and the other is not


@pytest.mark.parametrize("together", [1, 2])
def test_a_decoded_token_is_not_taken_back_unless_a_state_was_remembered(together: int) -> None:
    """Its query is noted for the next verdict, also where nothing has been dropped yet."""
    plain, recorded = (Bare("rkv(budget=24, buffer=7, window=4)") for _ in range(2))
    recorded.cache.session.recording = True
    for fed in (plain, recorded):
        fed.feed(10)
        fed.cache.session.following = True
        fed.feed(together)
    with pytest.raises(CacheError, match="cannot go back"):
        plain.back(1)
    recorded.back(1)


@pytest.mark.parametrize("recording", [False, True])
def test_tokens_that_come_together_are_judged_one_by_one(recording: bool) -> None:
    """Verdicts fall between them, also where every step can be taken back."""
    together, apart = (Bare("rkv(budget=10, buffer=4, window=3)", seed=2) for _ in range(2))
    for fed in (together, apart):
        fed.feed(9)
        fed.cache.session.following, fed.cache.session.recording = True, recording
    torch.testing.assert_close(
        together.feed(30), torch.cat([apart.feed(1) for _ in range(30)], 1), rtol=1e-4, atol=1e-5
    )


def test_a_verdict_before_the_first_page_is_that_without_a_selection() -> None:
    """Which has nothing to choose from yet: all that is held is read."""
    plain, chosen = (Bare("rkv(budget=10, buffer=4, window=3)" + more) for more in ("", " + quest(budget=6, page=4)"))
    for n in (12, 1, 1, 1, 1, 1):
        torch.testing.assert_close(plain.feed(n), chosen.feed(n), rtol=1e-4, atol=1e-5)
    lane = chosen.cache.parts[0].lane
    assert lane.pages is None and lane.tail.count().tolist() == [11, 11]


def test_saliency_counts_what_was_paid_before_a_verdict() -> None:
    """Tokens that come together ask before the verdict on the last of them, as they do one by one."""
    text = "zipcache(salient=0.3, block=24) + rkv(budget=10, buffer=13, window=3)"
    together, apart = Bare(text, seed=3), Bare(text, seed=3)
    for one in (together, apart):
        one.feed(8)
        one.cache.session.following = True
    torch.testing.assert_close(
        together.feed(40), torch.cat([apart.feed(1) for _ in range(40)], 1), rtol=1e-4, atol=1e-5
    )


def test_what_is_held_stays_below_budget_and_buffer() -> None:
    case = Case(length=20, steps=100, pads=(0, 3))
    layer, most = case.prompt(TEXT), 0
    for _ in case.decode(layer):
        most = max(most, *(len(positions(layer, row)) for row in range(case.rows)))
    assert most == OPTIONS["budget"] + OPTIONS["buffer"] - 1
    assert layer.parts[0].lane.tail.capacity == OPTIONS["budget"] + OPTIONS["buffer"]


@pytest.mark.parametrize(
    "text, said",
    [
        ("rkv(budget=8)", "must exceed window=8"),
        ("rkv(buffer=7)", "buffer=7 must not be less than window=8"),
        ("rkv(kernel=4)", "must be odd"),
        ("rkv(alike=1.0)", "is a cosine"),
        ("rkv(mix=2)", "between 0 and 1"),
        ("rkv(buffer=0)", "buffer=0"),
    ],
)
def test_what_cannot_be_is_refused(text: str, said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        Stack.parse(text)


def test_it_is_found_by_its_name() -> None:
    assert load("rkv")[0] == "retention"


def test_tokens_that_have_found_one_are_not_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each block of 512 looks for those that are left among all tokens: 1.4 s of 131072, 72 s of a million."""
    sorted_ones, packed = list[int](), rkv.pack
    monkeypatch.setattr(rkv, "pack", lambda keep: (sorted_ones.append(keep.numel()), packed(keep))[1])
    unit = F.normalize(torch.randn(1, 1, 4), dim=-1).repeat(1, 8 * 512, 1)
    found = newest_alike(unit, torch.ones(1, 8 * 512, dtype=torch.bool), 0.5)
    assert found.tolist() == [[8 * 512 - 1] * (8 * 512 - 1) + [8 * 512 - 2]]
    assert sum(sorted_ones) <= 2 * 8 * 512
