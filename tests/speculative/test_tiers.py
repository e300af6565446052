"""Whole hierarchies over laws read from a table: the text has the top tier's law, exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from support_spec import Outcomes, TableSession, enumerate_law, hashed_laws, llama, variation
from torch import Tensor

from kvengine.speculative.accept import Coupled, Draft, Rejection, Rule
from kvengine.speculative.adaptive import Adaptive
from kvengine.speculative.ahead import Fixed
from kvengine.speculative.branch import Branching
from kvengine.speculative.law import Law, Text
from kvengine.speculative.noise import Gumbel, Stream
from kvengine.speculative.propose import Lookup, Recycling
from kvengine.speculative.tier import Drafter, Tier
from kvengine.speculative.triforce import TriForce

SAMPLED = Law((), greedy=False)
PROMPT = [0, 1, 0]
QUEST = "quest(budget=24, page=4)"
Laws = Callable[[tuple[int, ...]], Tensor]


def three(vocab: int = 3) -> list[Laws]:
    """Top, middle and lowest laws, each like the one above."""
    top = hashed_laws(vocab, 1)
    middle = hashed_laws(vocab, 2, base=top, mix=0.3)
    return [top, middle, hashed_laws(vocab, 3, base=middle, mix=0.6)]


def chain(laws: list[Laws], gammas: tuple[int, ...], rule: Rule, law: Law = SAMPLED) -> Tier:
    """gammas[i]: how far tier i + 1 drafts for tier i."""
    below = chain(laws[1:], gammas[1:], rule, law) if len(laws) > 1 else None
    return Tier(TableSession(laws[0]), law, rule, below, Fixed(gammas[0]) if below else Fixed(1))


def prefill(drafter: Drafter | None, prompt: list[int]) -> None:
    if isinstance(drafter, Tier | Branching):
        drafter.session.prefill(prompt)
        prefill(getattr(drafter, "below", None), prompt)


def generate(top: Tier, new: int, prompt: list[int] = PROMPT) -> tuple[int, ...]:
    text = Text(prompt[:-1])
    prefill(top, prompt[:-1])
    text.tokens.append(prompt[-1])
    while len(text) < len(prompt) + new:
        text.tokens += top.step(text, (), len(prompt) + new - len(text) - 1)[0].tokens
        top.settle(text)
    return tuple(text.tokens[len(prompt) : len(prompt) + new])


@lru_cache
def plain_law(new: int, vocab: int = 3) -> dict:
    return enumerate_law(lambda chance: generate(chain(three(vocab)[:1], (1,), Rejection(chance)), new))


def drafter(kind: str, rule: Rule, law: Law = SAMPLED, vocab: int = 3) -> Drafter:
    if kind == "lookup":
        return Lookup(most=2)
    if kind == "recycling":
        return Recycling(vocab, nodes=20)
    widths = tuple(map(int, kind.split("x")))
    return Branching(TableSession(three(vocab)[2]), law, rule, widths)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("gammas", [(1,), (2,), (1, 1), (2, 1), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_chains_of_two_and_three_tiers(gammas: tuple[int, ...]) -> None:
    new = 4 if len(gammas) == 1 else 3
    law = enumerate_law(lambda chance: generate(chain(three()[: len(gammas) + 1], gammas, Rejection(chance)), new))
    assert variation(law, plain_law(new)) < 1e-12


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["lookup", "2", "3", "2x1", "1x2"])
@pytest.mark.parametrize("middle", [False, True])
def test_trees_and_lookup_below_the_top_or_the_middle(kind: str, middle: bool) -> None:
    new = 2 if middle else 3

    def run(chance: Outcomes) -> tuple[int, ...]:
        rule = Rejection(chance)
        below: Drafter = drafter(kind, rule)
        if middle:
            below = Tier(TableSession(three()[1]), SAMPLED, rule, below, Fixed(2))
        return generate(Tier(TableSession(three()[0]), SAMPLED, rule, below, Fixed(2)), new)

    assert variation(enumerate_law(run), plain_law(new)) < 1e-12


def test_the_middle_tiers_law_is_what_it_claims() -> None:
    """Not only the text: the proposals themselves have the law recorded beside them."""

    def run(chance: Outcomes) -> tuple[int, ...]:
        middle = chain(three()[1:], (1,), Rejection(chance))
        prefill(middle, PROMPT[:-1])
        return tuple(middle.propose(Text(PROMPT), (), lambda sure: len(sure) < 2).tokens[:2])

    expected = enumerate_law(lambda chance: generate(chain(three()[1:2], (1,), Rejection(chance)), 2))
    assert variation(enumerate_law(run), expected) < 1e-12


KINDS = ["lookup", "recycling", "3", "2x2x1", "3x2x1x1"]


@pytest.mark.parametrize("gammas", [(1,), (5,), (1, 6), (6, 1), (3, 2)], ids=str)
def test_coupled_text_is_plain_text(gammas: tuple[int, ...]) -> None:
    for seed in range(5):
        rule = Coupled(Gumbel(seed))
        expected = generate(chain(three(12)[:1], (1,), rule), 40)
        assert generate(chain(three(12)[: len(gammas) + 1], gammas, rule), 40) == expected


@pytest.mark.sampled(3)
@pytest.mark.parametrize("law", [SAMPLED, Law()], ids=["coupled", "greedy"])
@pytest.mark.parametrize("middle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_leaves_coupled_and_greedy_text_alone(kind: str, middle: bool, law: Law) -> None:
    for seed in range(3):
        rule = Coupled(Gumbel(seed)) if law is SAMPLED else Rejection(Stream(seed))
        expected = generate(chain(three(12)[:1], (1,), rule, law), 40)
        below: Drafter = drafter(kind, rule, law, 12)
        if middle:
            below = Tier(TableSession(three(12)[1]), law, rule, below, Fixed(4))
        top = Tier(TableSession(three(12)[0]), law, rule, below, Fixed(4))
        assert generate(top, 40) == expected
        assert len(top.rounds) < 40 or kind == "lookup"


def test_adaptive_lengths_leave_coupled_text_alone() -> None:
    rule = Coupled(Gumbel(3))
    tiers = chain(three(12), (1, 1), rule)
    tiers.ahead = Adaptive()
    assert generate(tiers, 60) == generate(chain(three(12)[:1], (1,), rule), 60)


def test_a_drafter_with_the_judges_law_is_always_right_and_one_disjoint_never() -> None:
    same = chain([three(12)[0], three(12)[0]], (4,), Rejection(Stream(0)))
    generate(same, 40)
    assert all(r.stood == r.drafted for r in same.rounds)
    left, right = (lambda p: torch.eye(4)[0].double()), (lambda p: torch.eye(4)[3].double())
    never = chain([left, right], (4,), Rejection(Stream(0)))
    assert generate(never, 5) == (0,) * 5
    assert all(r.stood == 0 for r in never.rounds)


@pytest.mark.parametrize("kind", ["alone", "drafted for", "as if alone"])
def test_a_chain_has_the_law_of_each_token_and_how_sure_its_model_was(kind: str) -> None:
    """Also where several come in a round; and it ends with a token that ends the text."""
    own, rule = three(12)[1], Coupled(Gumbel(6))
    tier = chain([own] if kind == "alone" else [own, own], (3,), rule)
    prefill(tier, PROMPT[:-1])
    ends = generate(chain([own], (1,), rule), 3)[-1:] if kind == "as if alone" else ()
    tier.ends = frozenset(ends)
    draft = tier.propose(Text(PROMPT), (), lambda sure: len(sure) < 5)
    assert draft.is_chain and draft.tokens == list(generate(chain([own], (1,), rule), len(draft)))
    assert len(draft) >= 5 if not ends else draft.tokens.index(ends[0]) == len(draft) - 1
    for node, token in enumerate(draft.tokens):
        law = own((*PROMPT, *draft.tokens[:node]))
        torch.testing.assert_close(draft.laws[node], law)
        assert draft.confidence[node] == pytest.approx(float(law[token]), rel=1e-5)


def test_three_tiers_of_one_law_agree_behind_what_the_middle_drafted() -> None:
    """The lowest goes on from there, with what its processors see of it."""
    rule, law, own = Coupled(Gumbel(2)), Law((not_again,), greedy=False), three(12)[0]
    top = chain([own] * 3, (6, 2), rule, law)
    generate(top, 40)
    for tier in (top, top.below):
        assert isinstance(tier, Tier) and all(r.stood == r.drafted > 0 for r in tier.rounds[:-1])


@dataclass
class Listener:
    """A drafter that is wrong, and notes what it hears."""

    heard: list[tuple[list[int], Tensor]] = field(default_factory=list)
    settled: int = 0

    def propose(self, text: Text, tail: Sequence[int], more: Callable[..., bool]) -> Draft:
        return Draft.chain([3, 3], [None, None])

    def settle(self, text: Text) -> None:
        self.settled = len(text)

    def observe(self, tokens: Sequence[int], logits: Tensor) -> None:
        self.heard.append((list(tokens), logits))


@pytest.mark.parametrize("middle", [False, True])
def test_a_drafter_hears_what_follows_each_token_and_what_falls_is_forgotten(middle: bool) -> None:
    never = lambda prefix: torch.tensor([0.5, 0.3, 0.2 if len(prefix) % 2 else 0.1, 0]).double()  # noqa: E731
    listener, rule = Listener(), Coupled(Gumbel(4))
    below: Drafter = Tier(TableSession(never), SAMPLED, rule, listener, Fixed(1)) if middle else listener
    top = Tier(TableSession(never), SAMPLED, rule, below, Fixed(1))
    text = Text(PROMPT[:-1])
    prefill(top, PROMPT[:-1])
    text.tokens += [PROMPT[-1], 2]  # two tokens that were not read yet
    verdict = top.step(text, ())[0]
    assert top.session.open == [PROMPT[-1], 2, *verdict.tokens[:-1]] and top.rounds[0].stood == middle
    if isinstance(below, Tier):
        assert below.session.open == [PROMPT[-1], 2] and below.rounds[0].stood == 0
    for tokens, logits in listener.heard:
        assert tokens[0] == 2 and len(tokens) == len(logits) in (2, 3)
        for i, row in enumerate(logits):
            torch.testing.assert_close(row, never((*PROMPT, 2, *tokens[1 : i + 1])).log())
    assert len(listener.heard) == 1 + middle
    text.tokens += verdict.tokens
    top.settle(text)
    assert listener.settled == len(text)


class Unwilling(Fixed):
    def more(self, confidence: Sequence[float]) -> bool:
        return False


@pytest.mark.parametrize(
    ("ahead", "limit"), [(Fixed(4), 0), (Fixed(4), 1), (Fixed(4), 3), (Fixed(4), None), (Unwilling(4), None)]
)
def test_no_more_is_drafted_than_asked_and_who_is_not_asked_reads_nothing(ahead: Fixed, limit: int | None) -> None:
    top, prepared, drafted = chain(three(12)[:2], (4,), Rejection(Stream(0))), [], 4 if limit is None else limit
    drafted = 0 if isinstance(ahead, Unwilling) else drafted
    top.ahead, text = ahead, Text(PROMPT)
    prefill(top, PROMPT[:-1])
    assert top.reader is not None
    top.reader.session.prepare = prepared.append  # type: ignore[method-assign]
    top.step(text, (), limit)
    assert (top.rounds[0].drafted, len(prepared)) == (drafted, bool(drafted))


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 6])
def test_nor_is_anything_read_beyond_that_by_a_middle_whose_rounds_give_several_tokens(limit: int) -> None:
    top, furthest = chain([three(12)[0]] * 3, (6, 4), Coupled(Gumbel(1))), [0]
    assert isinstance(top.below, Tier)
    prefill(top, PROMPT[:-1])
    for session in (top.session, top.below.session):
        real = session.feed

        def feed(tokens: list[int], real: Callable = real, session: Any = session) -> Tensor:
            out = real(tokens)
            furthest[0] = max(furthest[0], len(session.cached))
            return out

        session.feed = feed  # type: ignore[method-assign]
    top.step(Text(PROMPT), (), limit)
    assert top.rounds[0].stood == top.rounds[0].drafted == limit and furthest == [len(PROMPT) + limit]


def not_again(ids: Tensor, scores: Tensor) -> Tensor:
    """A processor that looks at the tokens: the last two are not to come again."""
    return scores.scatter(1, ids[:, -2:], -torch.inf)


@pytest.mark.parametrize("rule", [Coupled(Gumbel(2)), Rejection(Stream(2))], ids=["coupled", "rejection"])
@pytest.mark.parametrize("middle", [False, True])
def test_a_tree_of_the_judges_own_law_stands_to_its_depth(middle: bool, rule: Rule) -> None:
    law, own = Law((not_again,), greedy=False), three(12)[0]
    below: Drafter = Branching(TableSession(own), law, rule, (2, 2, 1))
    if middle:
        below = Tier(TableSession(own), law, rule, below, Fixed(3))
    top = Tier(TableSession(own), law, rule, below, Fixed(5))
    generate(top, 30)
    for tier in (top, below) if isinstance(below, Tier) else (top,):
        assert max(r.depth for r in tier.rounds) >= 3 and all(r.stood == r.depth for r in tier.rounds)


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
def test_a_greedy_tree_has_the_likeliest_tokens_of_each_node(levels: int) -> None:
    laws, widths = three(12)[0], (3, 20)  # of which there are twelve
    drafter = Branching(TableSession(laws), Law(), Coupled(Gumbel(0)), widths)
    drafter.session.prefill(PROMPT[:-1])
    draft = drafter.propose(Text(PROMPT), (), lambda sure: len(sure) < levels and set(sure) <= {1.0})  # a tree hedges
    assert draft.levels == ((), (3,), (3, 39), (3, 39))[levels]
    for node in range(-1, 3 if levels > 1 else 0 if levels else -1):
        law, mine = laws((*PROMPT, *draft.path(node))), draft.children(node)
        assert [draft.tokens[x] for x in mine] == law.topk(12 if node >= 0 else 3).indices.tolist()
        assert [draft.confidence[x] for x in mine] == pytest.approx(law.topk(len(mine)).values.tolist())
    drafter.settle(Text([*PROMPT, 7]))  # what was read on the way is history: nothing is kept to go back to
    assert drafter.session.settled == len(PROMPT) - (not levels) and not drafter.session.open


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gammas", [(2,), (1, 2)], ids=str)
def test_frequencies_of_sampled_pairs(gammas: tuple[int, ...]) -> None:
    check_frequencies(lambda rule: generate(chain(three(4)[: len(gammas) + 1], gammas, rule), 2), 1000, 4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["chain", "three", "tree"])
def test_frequencies_of_many_sampled_pairs(kind: str) -> None:
    def run(rule: Rule) -> tuple[int, ...]:
        if kind == "tree":
            return generate(Tier(TableSession(three(6)[0]), SAMPLED, rule, drafter("3x2", rule, vocab=6), Fixed(2)), 2)
        return generate(chain(three(6)[: 2 + (kind == "three")], (2, 1), rule), 2)

    check_frequencies(run, 60_000, 6)


@pytest.mark.slow
@pytest.mark.parametrize("widths", [None, (2, 2)], ids=["chain", "tree"])
def test_frequencies_of_a_small_models_text(widths: tuple[int, ...] | None) -> None:
    """The laws are those of random Llamas, read once for every text; 60 000 samples of three tokens."""
    models = [model_laws(llama(seed, vocab=4)) for seed in (0, 1)]

    def run(rule: Rule) -> tuple[int, ...]:
        below = TableSession(models[1])
        draft = Tier(below, SAMPLED, rule) if widths is None else Branching(below, SAMPLED, rule, widths)
        return generate(Tier(TableSession(models[0]), SAMPLED, rule, draft, Fixed(2)), 2)

    expected = enumerate_law(lambda c: generate(Tier(TableSession(models[0]), SAMPLED, Rejection(c)), 2))
    compare_frequencies(run, 60_000, expected)


@pytest.mark.slow
@pytest.mark.parametrize("middle", ["quest(budget=12, page=4)", "streaming(sinks=1, recent=9)"])
def test_frequencies_through_the_real_caches(middle: str) -> None:
    """Everything in place, prefill to settling; fewer samples, as each costs a dozen passes."""
    target = llama(vocab=4)
    ids = torch.tensor([[1, 2, 3, 0, 1, 1, 2, 0, 3, 3, 2, 1, 0, 1, 2, 3]])
    decoder = TriForce(target, "lookup", middle, gamma=(1, 2))
    laws = model_laws(target)
    top = lambda c: Tier(TableSession(laws), SAMPLED, Rejection(c))  # noqa: E731
    expected = enumerate_law(lambda c: generate(top(c), 3, ids[0].tolist()))
    seeds = iter(range(10**9))
    draw = lambda _: decoder.generate(ids, max_new_tokens=3, do_sample=True, seed=next(seeds))  # noqa: E731
    compare_frequencies(lambda rule: tuple(draw(rule)[0, 16:].tolist()), 3000, expected)


@pytest.mark.parametrize("middle", [None, "quest(budget=12, page=4)"])
def test_frequencies_of_some_tokens_of_long_texts(middle: str | None) -> None:
    check_long_texts(middle, rows=8, new=30)


@pytest.mark.slow
@pytest.mark.parametrize("middle", [QUEST, "streaming(sinks=2, recent=22)"])
def test_frequencies_of_tokens_of_long_texts(middle: str) -> None:
    """Through the real caches, prompt to settling: 51 200 tokens."""
    check_long_texts(middle, rows=64, new=800)


def check_long_texts(middle: str | None, rows: int, new: int) -> None:
    """Each token's place in its law given the text before it is uniform, and independent of the one before.

    A token drawn from p falls, on a line of the tokens each as long as its probability, on a uniform point (its own
    length being cut at random); the points of a text are independent. The laws are those of the model without a cache.
    Squares of neighbouring points are counted; laws a tenth warmer must be told apart.
    """
    target = llama(2, layers=1, vocab=16)
    ids = torch.randint(16, (rows, 24), generator=torch.Generator().manual_seed(5))
    decoder = TriForce(target, "lookup", middle, gamma=(1, 3))
    out = decoder.generate(ids, max_new_tokens=new, temperature=0.6, top_k=0, seed=11)
    top = decoder.report.tiers[0]
    assert top.acceptance is not None and 0.1 < top.acceptance < 0.9  # both branches of the rule are taken
    with torch.no_grad():
        logits = torch.cat([target(row[None], use_cache=False).logits[:, 23:-1] for row in out]).double()
    side = 8 if rows * new > 10_000 else 4
    for temperature in (0.6, 0.66):
        points = places_in(logits.div(temperature).softmax(-1), out[:, 24:]).unflatten(1, (-1, 2))
        cells = (points * side).long().clamp(max=side - 1)
        counts = torch.bincount((cells[..., 0] * side + cells[..., 1]).flatten(), minlength=side**2)
        name = f"{middle}, {rows * new} tokens against the law at temperature {temperature}"
        p = judged(name, counts.tolist(), [rows * new / 2 / side**2] * side**2)
        if temperature == 0.6 or side == 8:
            assert (p > THRESHOLD) == (temperature == 0.6)


def places_in(laws: Tensor, tokens: Tensor) -> Tensor:
    """[row, token]: where on the line of its law a token falls, likelier tokens first."""
    sorted_, order = laws.sort(-1, descending=True)
    at = (order == tokens[..., None]).double().argmax(-1, keepdim=True)
    cut = torch.rand(at.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mine = sorted_.gather(-1, at)
    return (sorted_.cumsum(-1).gather(-1, at) - cut * mine)[..., 0]


def model_laws(model: Any) -> Laws:
    """A model's law after every text, each computed once."""

    @cache
    @torch.no_grad()
    def law(prefix: tuple[int, ...]) -> Tensor:
        return model(torch.tensor([prefix]), use_cache=False).logits[0, -1].double().softmax(-1)

    return law


def check_frequencies(run: Callable[[Rule], tuple[int, ...]], draws: int, vocab: int) -> None:
    compare_frequencies(run, draws, plain_law(2, vocab))


def compare_frequencies(run: Callable[[Rule], tuple[int, ...]], draws: int, law: dict) -> None:
    """Chi-square against an exact law."""
    counts = dict.fromkeys(law, 0)
    for seed in range(draws):
        counts[run(Rejection(Stream(seed)))] += 1
    expected = {outcome: draws * value for outcome, value in law.items()}
    common = [pair for pair, value in expected.items() if value >= 5]
    rest = (draws - sum(counts[p] for p in common), draws - sum(expected[p] for p in common))
    cells = [(counts[p], expected[p]) for p in common] + ([rest] if rest[1] >= 5 else [])
    assert judged(f"{draws} samples", *zip(*cells, strict=True)) > THRESHOLD


TESTS = 12  # chi-square tests in this file, whose laws are right
THRESHOLD = 0.001 / TESTS  # Bonferroni: one false alarm among all of them once in a thousand runs


def judged(name: str, seen: Sequence[float], expected: Sequence[float]) -> float:
    """Print Pearson's statistic, its degrees of freedom and its p-value; return the last."""
    chi2 = sum((a - b) ** 2 / b for a, b in zip(seen, expected, strict=True))
    free = len(seen) - 1
    p = float(torch.special.gammaincc(torch.tensor(free / 2).double(), torch.tensor(chi2 / 2).double()))
    print(f"\n{name}: chi-square {chi2:.1f}, {free} degrees of freedom, p = {p:.3g} (threshold {THRESHOLD:.2g})")
    return p
