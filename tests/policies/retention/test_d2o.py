"""D2O against a loop: scores, layers' sizes, thresholds and merges, at the prompt's end and token by token."""

import math
from dataclasses import dataclass, field

import pytest
import torch
from support import greedy, llama, one, patched
from support_retention import Case, best, held, output, positions, probabilities
from torch import Tensor
from torch.nn.functional import cosine_similarity

from kvengine.cache import LayerCache
from kvengine.errors import PolicyError, UnsupportedPolicy
from kvengine.policies.retention import Seen
from kvengine.policies.retention.d2o import D2O, sizes
from kvengine.session import Session
from kvengine.stack import Stack
from kvengine.stats import measure


@dataclass
class Row:
    """One row of the method, written as a loop."""

    case: Case
    row: int
    size: int
    official: bool = False
    recent: float = 0.25
    sinks: int = 2
    beta: float = 0.7
    reduce: str = "mean"
    tau: float = math.nan
    merges: int = 0
    kv: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    score: dict[int, float] = field(default_factory=dict)

    def read(self, tokens: list[int]) -> Tensor:
        _, k, v, _ = self.case.row(self.row)
        for t in tokens:
            self.kv[t], self.score[t] = (k[t], v[t]), 0.0
        got: dict[int, Tensor] = {}
        for t in tokens:
            held = [p for p in sorted(self.kv) if p <= t]
            q = self.case.row(self.row)[0][:, t]
            paid = (q @ torch.stack([self.kv[p][0] for p in held]).T * self.case.call.scale).softmax(-1)
            for p, x in zip(held, paid.T, strict=True):
                got[p] = got.get(p, torch.zeros(len(x))) + x
            out = paid @ torch.stack([self.kv[p][1] for p in held])
        for p, x in got.items():
            self.score[p] += float(x.amax() if self.reduce == "max" else x.mean())
        self.drop(tokens[-1])
        return out

    def drop(self, now: int) -> None:
        pad = self.case.row(self.row)[3]
        newest, sinks = max(1, int(self.size * self.recent)), min(self.sinks, self.size - 1)
        rank = lambda p: 2 * (p < pad + sinks) + (p > now - newest)  # noqa: E731
        kept = sorted(sorted(self.score, key=lambda p: (rank(p), self.score[p], p), reverse=True)[: self.size])
        gone = [p for p in self.score if p not in kept]
        if gone:
            self.merge(gone, [p for p in kept if self.official or p >= pad + sinks])
        for p in gone:
            del self.kv[p], self.score[p]

    def merge(self, gone: list[int], targets: list[int]) -> None:
        like = {i: {j: float(cosine_similarity(self.kv[i][0], self.kv[j][0], dim=0)) for j in targets} for i in gone}
        mate = {i: max(targets, key=lambda j: like[i][j]) for i in gone}
        most = {i: like[i][mate[i]] for i in gone}
        mean = sum(most.values()) / len(most)
        fresh = mean if self.official else max(most.values())
        self.tau = mean if math.isnan(self.tau) else self.beta * fresh + (1 - self.beta) * self.tau
        for j in targets:
            mine = [i for i in gone if mate[i] == j and most[i] >= self.tau - 1e-7]
            if mine:
                self.merges += len(mine)
                self.kv[j] = self.official_mean(j, mine, most) if self.official else self.convex(j, mine, most)

    def convex(self, j: int, mine: list[int], like: dict[int, float]) -> tuple[Tensor, Tensor]:
        weight = [math.e, *(math.exp(like[i]) for i in mine)]
        weight = [w / sum(weight) for w in weight]
        assert min(weight) > 0 and abs(sum(weight) - 1) < 1e-9
        k, v = (sum(w * self.kv[p][x] for w, p in zip(weight, [j, *mine], strict=True)) for x in (0, 1))
        return k, v

    def official_mean(self, j: int, mine: list[int], like: dict[int, float]) -> tuple[Tensor, Tensor]:
        k, v = ((self.kv[j][x] + sum(like[i] * self.kv[i][x] for i in mine)) / (1 + len(mine)) for x in (0, 1))
        return k, v


def same(layer: LayerCache, row: Row) -> None:
    found = held(layer, row.row)
    assert sorted(found) == sorted(row.kv)
    for p in found:
        torch.testing.assert_close(found[p], row.kv[p], rtol=1e-4, atol=1e-5)
        if torch.equal(row.kv[p][0], row.case.row(row.row)[1][p]):  # it took nothing in, and is what came
            assert torch.equal(found[p][0], row.kv[p][0]) and torch.equal(found[p][1], row.kv[p][1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("heads, group, pads, chunks", [(2, 2, (0, 5), 3), (3, 1, (0,), 1), (1, 4, (4, 0), 2)])
@pytest.mark.parametrize("form, reduce", [("paper", "mean"), ("official", "mean"), ("paper", "max")])
def test_every_step_is_that_of_the_loop(
    heads: int, group: int, pads: tuple[int, ...], chunks: int, form: str, reduce: str
) -> None:
    case = Case(heads, group, pads=pads, steps=24, layer=2, layers=4)  # the official form spares others
    layer = case.prompt(f"d2o(budget=12, sinks=2, form='{form}', shares='even', reduce='{reduce}')", chunks)
    official = form == "official"
    rows = [Row(case, row, 12, official, beta=0.5 if official else 0.7, reduce=reduce) for row in range(case.rows)]
    for row in rows:
        row.read(list(range(case.row(row.row)[3], case.length)))
        same(layer, row)
    for t, out in case.decode(layer):
        for row in rows:
            torch.testing.assert_close(output(case, out, row.row), row.read([t]), rtol=1e-4, atol=1e-5)
            same(layer, row)
    assert all(row.merges > 5 for row in rows)
    found = layer.parts[0].lane.notes["threshold"]
    torch.testing.assert_close(found, torch.tensor([row.tau for row in rows]), rtol=1e-4, atol=1e-5)
    assert any(not torch.equal(k, case.k[0, 0, p]) for p, (k, _) in held(layer, 0).items())  # the control


@pytest.mark.parametrize("form", ["paper", "official"])
def test_a_step_in_one_call_of_the_kernels_is_that_of_the_loop(form: str) -> None:
    """As it is taken where no row has padding."""
    case, official = Case(1, 2, pads=(0,), steps=8, layer=2, layers=4), form == "official"
    layer = case.prompt(f"d2o(budget=12, sinks=2, form='{form}', shares='even')", 1)
    row = Row(case, 0, 12, official, beta=0.5 if official else 0.7)
    row.read(list(range(case.length)))
    for t, out in case.decode(layer):
        torch.testing.assert_close(output(case, out, 0), row.read([t]), rtol=1e-4, atol=1e-5)
        same(layer, row)
    assert row.merges > 5


@pytest.mark.parametrize("form", ["paper", "official"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_size_within_the_sinks_holds_the_first_of_them_and_the_newest(size: int, form: str) -> None:
    """The last of them stayed instead of the first, no decoded token did, and nothing was merged."""
    case, official = Case(pads=(0, 5), steps=24, layer=2, layers=4), form == "official"
    layer = case.prompt(f"d2o(budget={size}, sinks=4, form='{form}', shares='even')", 2)
    rows = [Row(case, row, size, official, sinks=4, beta=0.5 if official else 0.7) for row in range(case.rows)]
    for row in rows:
        row.read(list(range(case.row(row.row)[3], case.length)))
        same(layer, row)
    for t, _ in case.decode(layer):
        for row in rows:
            row.read([t])
            same(layer, row)
            pad = case.row(row.row)[3]
            assert positions(layer, row.row) == [*range(pad, pad + size - 1), t]
    assert all(row.merges > 5 for row in rows)


@pytest.mark.parametrize("recent, sinks", [(1.0, 3), (0.9, 2), (1.0, 0)])
def test_the_newest_stay_while_there_is_room(recent: float, sinks: int) -> None:
    """Sinks and newest tokens together are more than the size: it is an older one that goes, at every step."""
    case = Case(pads=(0, 5), steps=30)
    layer = case.prompt(f"d2o(budget=12, sinks={sinks}, recent={recent})")
    for t, _ in case.decode(layer):
        for row in range(case.rows):
            pad = case.row(row)[3]
            newest = min(int(12 * recent), 12 - sinks)
            always = [*range(pad, pad + sinks), *range(t + 1 - newest, t + 1)]
            assert set(always) <= set(positions(layer, row)) and len(positions(layer, row)) == 12


def test_merged_vectors_stay_within_those_they_come_from() -> None:
    """Weights are convex: no coordinate leaves the range of the sources. The official form's weights are not."""
    case = Case(length=61, layer=2, layers=4)
    case.v = case.v + 5
    for form, inside in (("paper", True), ("official", False)):
        layer = case.prompt(f"d2o(budget=12, form='{form}', shares='even')")
        values = torch.stack([v for _, v in held(layer, 0).values()])
        source = case.v[0, 0, :61]
        bounded = bool((values >= source.amin(0) - 1e-5).all() and (values <= source.amax(0) + 1e-5).all())
        assert bounded == inside


def concentration(case: Case, b: int, spread: bool = False) -> float:
    """F: the variance over tokens of the attention received, per query head; their mean, officially of [0, 1]."""
    pad, found = case.pads[b], []
    for row in range(b * case.heads, (b + 1) * case.heads):
        total = torch.zeros(case.group, case.length - pad, dtype=torch.float64)
        for i in range(pad, case.length):
            total[:, : i + 1 - pad] += probabilities(case, row, i, list(range(pad, i + 1))).double()
        found += total.var(1, correction=0).tolist()
    if spread:
        found = [(x - min(found)) / (max(found) - min(found)) for x in found]
    return sum(found) / len(found)


def layers_of(policy: str, count: int = 4, pads: tuple[int, ...] = (0, 9)) -> tuple[list[Case], list[LayerCache]]:
    """A model's layers, each sharper than the one before, that have read a prompt in two chunks, layer by layer."""
    session = Session(prompt_end=61, ours=tuple(range(count)))
    cases = [Case(length=61, pads=pads, seed=i, spread=0.6 * (i + 1), layer=i, layers=count) for i in range(count)]
    layers = [LayerCache(Stack.parse(policy), i, count, session) for i in range(count)]
    for a, b in ((0, 30), (30, 61)):
        for case, layer in zip(cases, layers, strict=True):
            case.feed(layer, a, b)
    return cases, layers


def test_layers_share_the_budget_by_concentration() -> None:
    cases, layers = layers_of("d2o(budget=16, least=0.2, shares='measured')")
    for b, pad in enumerate((0, 9)):
        F = torch.tensor([[concentration(case, b)] for case in cases])
        want = sizes(F, torch.tensor([16]), torch.tensor([61 - pad]), 0.2)[:, 0].tolist()
        found = [len(positions(layer, b * 2)) for layer in layers]
        assert found == want and sum(found) == 64 and found[0] > found[-1]
    assert measure(layers).held.sum() == 2 * 2 * 64
    before = [len(positions(layer, row)) for layer in layers for row in range(4)]
    for _ in zip(*(case.decode(layer) for case, layer in zip(cases, layers, strict=True)), strict=True):
        assert [len(positions(layer, row)) for layer in layers for row in range(4)] == before


def test_in_the_official_form_no_layer_is_far_from_another() -> None:
    cases, layers = layers_of("d2o(budget=16, form='official')", count=6)
    for b, pad in enumerate((0, 9)):
        F = torch.tensor([[concentration(case, b, spread=True)] for case in cases])
        want = sizes(F, torch.tensor([16]), torch.tensor([61 - pad]), 0.05)[:, 0].tolist()
        assert [len(positions(layer, b * 2)) for layer in layers[2:5]] == want[2:5] and len(set(want)) > 2


def test_until_the_last_layer_has_read_the_prompt_nothing_goes() -> None:
    session = Session(prompt_end=61, ours=(0, 1))
    cases = [Case(length=61, seed=i) for i in range(2)]
    layers = [LayerCache(Stack.parse("d2o(budget=16, shares='measured')"), i, 2, session) for i in range(2)]
    cases[0].feed(layers[0], 0, 61)
    assert len(positions(layers[0], 0)) == 61
    cases[1].feed(layers[1], 0, 61)
    assert sum(len(positions(layer, 0)) for layer in layers) == 32 and not session.waiting


def test_sizes_go_as_the_exponential_of_the_measure() -> None:
    """As long as no bound is met, each within the token that rounding takes."""
    F = [0.1, 1.3, 0.0, 2.2, 0.7]
    weight = [math.exp(-x) for x in F]
    found = sizes(torch.tensor(F)[:, None], torch.tensor([300]), torch.tensor([1000]), 0.05)[:, 0].tolist()
    assert all(abs(n - 1500 * w / sum(weight)) <= 1 for n, w in zip(found, weight, strict=True))


def test_equal_layers_get_the_same() -> None:
    assert sizes(torch.full((5, 1), 3.0), torch.tensor([30]), torch.tensor([100]), 0.05).unique().tolist() == [30]


@pytest.mark.parametrize("budget, prompt", [(30, 100), (99, 100), (1, 50)])
def test_sizes_add_up_within_their_bounds(budget: int, prompt: int) -> None:
    F = torch.tensor([[0.1], [700.0], [3.0], [2.5], [90.0]])
    found = sizes(F, torch.tensor([budget]), torch.tensor([prompt]), 0.05)[:, 0]
    assert found.sum() == 5 * budget and found.max() <= prompt and found.min() >= min(1, budget)


@pytest.mark.parametrize("budget, shares", [(16, "measured"), (16, "even"), (62, "measured")])
def test_the_official_form_leaves_some_layers_alone(budget: int, shares: str) -> None:
    """Not only at the prompt's end: what they hold grows with every token, and stays as it came."""
    cases, layers = layers_of(f"d2o(budget={budget}, form='official', shares='{shares}')", count=5, pads=(0,))
    sizes = [len(positions(layer, 0)) for layer in layers]
    assert all(5 < n < 40 for n in sizes[2:4]) if budget < 61 else sizes[2:4] == [61, 61]
    for i in (0, 1, 4):
        assert positions(layers[i], 0) == list(range(61))
        for t, _ in cases[i].decode(layers[i]):
            assert positions(layers[i], 0) == list(range(t + 1))
        for p, (key, value) in held(layers[i], 0).items():
            assert torch.equal(key, cases[i].k[0, 0, p]) and torch.equal(value, cases[i].v[0, 0, p])


@dataclass(frozen=True)
class Own(D2O):
    """With an option more, and a measure of its own."""

    weight: float = 2.0

    def measure(self, seen: Seen) -> Tensor | None:
        found = super().measure(seen)
        return None if found is None else found * self.weight


def test_a_layer_that_is_left_alone_is_still_of_the_class_that_a_user_made() -> None:
    """Its options are there, and what it says of the layer counts where the others share."""
    method, case = Own(budget=16, form="official", weight=3.0), Case(length=61, layers=6)
    session = case.session
    session.prompt_end, session.ours = 61, tuple(range(6))
    layer = LayerCache(Stack(retention=method), 0, 6, session)
    case.feed(layer, 0, 61)
    _, seen, measure = session.waiting[0]
    torch.testing.assert_close(measure, 3 * D2O(form="official").measure(seen))
    assert positions(layer, 0) == list(range(61)) and method.at(2, 6) is method
    first = method.at(0, 6)
    assert isinstance(first, Own) and first == method.at(5, 6) != method and str(first) == str(method)


def test_a_budget_beyond_the_prompt_keeps_all_as_it_came() -> None:
    cases, layers = layers_of("d2o(budget=61, shares='measured')")
    for case, layer in zip(cases, layers, strict=True):
        for row in range(4):
            _, k, _, pad = case.row(row)
            assert positions(layer, row) == list(range(pad, 61))
            assert all(torch.equal(x, k[p]) for p, (x, _) in held(layer, row).items())


def test_the_threshold_starts_anew_with_each_prompt() -> None:
    case = Case()
    layer = case.prompt("d2o(budget=12)")
    first = layer.parts[0].lane.notes["threshold"].clone()
    for _ in case.decode(layer):
        pass
    assert not torch.equal(layer.parts[0].lane.notes["threshold"], first)
    again = case.prompt("d2o(budget=12)")
    assert torch.equal(again.parts[0].lane.notes["threshold"], first)


def test_a_later_turn_has_a_threshold_of_its_own() -> None:
    """Scores go on in the same cache, and merged tokens; the first prompt's threshold is not carried over."""
    case = Case(heads=1, pads=(0, 5))
    layer = case.prompt("d2o(budget=12, sinks=2)")
    rows = [Row(case, row, 12) for row in range(case.rows)]
    for row in rows:
        row.read(list(range(case.row(row.row)[3], 37)))
    for turn in ([37], [38], [39], list(range(40, 53)), [53], [54]):
        case.feed(layer, turn[0], turn[-1] + 1)
        for row in rows:
            row.tau = math.nan if len(turn) > 1 else row.tau
            row.read(turn)
            same(layer, row)
    found = layer.parts[0].lane.notes["threshold"]
    torch.testing.assert_close(found, torch.tensor([row.tau for row in rows]), rtol=1e-4, atol=1e-5)


def test_tokens_that_are_all_as_alike_are_all_merged() -> None:
    """The mean of equal cosines may be rounded to more than each of them: none was merged then, and all were lost."""
    case = Case(heads=8, group=1, length=20, pads=(0, 3))
    case.k[:] = case.k[:, :, :1]
    layer = case.prompt("d2o(budget=8, sinks=2)")
    for row in range(case.rows):
        _, _, v, pad = case.row(row)
        stay = positions(layer, row)
        gone = [p for p in range(pad, 20) if p not in stay]
        torch.testing.assert_close(held(layer, row)[stay[2]][1], v[[stay[2], *gone]].mean(0))


def test_what_it_refuses() -> None:
    for other in ("kivi", "quest", "host"):
        with pytest.raises(UnsupportedPolicy):
            Stack.parse(f"d2o + {other}")
    for wrong in ("recent=1.5", "least=-0.1", "beta=2", "form='thesis'", "shares='some'", "sinks=-1"):
        with pytest.raises(PolicyError):
            Stack.parse(f"d2o({wrong})")


def test_scores_are_those_of_h2o() -> None:
    """Without merging, and with all of the size for the best, the prompt's survivors are the heaviest hitters."""
    case = Case(heads=1, group=1)
    row = Row(case, 0, 12, recent=0.0, sinks=0)
    row.read(list(range(37)))
    score = {p: 0.0 for p in range(37)}
    for i in range(37):
        for p, x in enumerate(probabilities(case, 0, i, list(range(i + 1)))[0].tolist()):
            score[p] += x
    assert positions(case.prompt("d2o(budget=12, recent=0.0, sinks=0)"), 0) == best(score, 12, lambda p: p == 36)


def test_a_prompt_and_a_draft_in_one_pass() -> None:
    """What follows the prompt needs the verdict, and with measured shares there is none before the last layer."""
    assistant = llama(seed=0)
    with pytest.raises(UnsupportedPolicy, match="must come in a pass of its own.*shares='even'"):
        greedy(patched("d2o(budget=24, shares='measured')"), one(), assistant_model=assistant)
    model = patched("d2o(budget=24)")
    assert torch.equal(greedy(model, one(), assistant_model=assistant), greedy(model, one()))
