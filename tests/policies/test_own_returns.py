"""What methods of one's own return is refused by name where it would have been read otherwise than it was meant, or not."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from support import llama
from torch import Tensor

import kvengine
from kvengine.errors import PolicyError
from kvengine.offload.placement import Flat, Placement
from kvengine.policies.prefill import Choice, Prefill
from kvengine.policies.representation import Representation
from kvengine.policies.retention import Replay, Retention
from kvengine.policies.selection import Selection
from kvengine.speculative.echo import Refresh
from kvengine.speculative.triforce import TriForce

IDS = torch.arange(3, 103)[None].repeat(2, 1)
CONSTANTS = ("decodes", "chooses", "codec", "joint", "wants_mass")


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def of(interface: type[Any], **methods: Any) -> Any:
    """A policy of this axis with these methods; a plain value becomes a property, where it is no constant of the class."""
    plain = {
        name: x if callable(x) or name in CONSTANTS else property(lambda self, x=x: x) for name, x in methods.items()
    }
    return dataclass(frozen=True)(type("Mine", (interface,), plain))()


def newest(s: Any, seen: Any) -> Tensor:
    return seen.recent(20)  # type: ignore[no-any-return]


def mean(s: Any, k: Tensor, valid: Tensor) -> dict[str, Tensor]:
    return {"mean": k.mean(1)}


def dense(s: Any, k: Tensor, v: Tensor, score: Tensor) -> dict[str, Tensor]:
    return {"k": k, "v": v}


def noted(x: Any) -> Any:
    """A verdict that notes this on the way."""
    return lambda s, seen: (seen.notes.update(mine=x), seen.recent(20))[1]


def wrote(name: str) -> Any:
    """A verdict that writes into what it is shown."""
    return lambda s, seen: (getattr(seen, name).zero_(), seen.recent(20))[1]


def counting(s: Any, seen: Any) -> Tensor:
    seen.notes.setdefault("count", torch.zeros(len(seen.first))).add_(1)
    return seen.recent(20)  # type: ignore[no-any-return]


def wanted(s: Any, q: Tensor, m: Any, at: Any) -> Tensor:
    return q @ m["mean"].mT


def units(*chosen: int) -> Any:
    return lambda s, q, m, alive, at: torch.tensor(chosen).expand(len(q), -1)


def fewer(x: Tensor, some: Any, many: Any) -> Any:
    """The one where a whole prompt comes, the other behind it."""
    return many if len(x) > 16 else some


def choice(*spans: list[int], block: int = 16, columns: int | None = None) -> Any:
    def choose(s: Any, q: Tensor, k: Tensor, scale: float, softcap: float | None = None) -> Choice:
        blocks = -(-k.shape[1] // 16)
        found = torch.tensor(spans, dtype=torch.int32).expand(len(q), blocks, -1, 2)
        return Choice(found, block, None if columns is None else torch.full((len(q), 3), columns))

    return choose


def back(s: Any, f: Any) -> Any:
    return f["k"], f["v"]


JOINT = {
    "joint": True, "needs_rope": True, "decode": lambda s, f: (f["v"][..., :0], f["v"]),
    "encode": lambda s, k, v, score: {"v": v},
}  # fmt: skip
INTERFACES = {
    "retention": Retention, "selection": Selection, "representation": Representation, "prefill": Prefill, "placement": Placement,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    "a verdict elsewhere": (
        "retention", {"keep": lambda s, seen: seen.valid.to("meta")},
        r"Mine\.keep returned a tensor on meta, expected one on cpu",
    ),
    "a number noted": ("retention", {"keep": noted(3)}, r"Mine\.keep set seen\.notes\['mine'\] to int, expected .* 4 rows"),
    "one note for all": ("retention", {"keep": noted(torch.zeros(1))}, r"Mine\.keep set .* to float32 \[1\]"),
    "a note written": (
        "retention", {"keep": counting, "decodes": True}, r"Mine\.keep wrote into seen\.notes\['count'\]"
    ),
    "first tokens written": ("retention", {"keep": wrote("first")}, r"Mine\.keep wrote into seen\.first"),
    "queries written": ("retention", {"keep": wrote("queries")}, r"Mine\.keep wrote into seen\.queries"),
    "no retention for a layer": (
        "retention", {"keep": newest, "at": lambda s, layer, layers: None}, r"Mine\.at returned NoneType, expected a"
    ),
    "one bound for all rows": (
        "retention", {"keep": newest, "decodes": True, "full": lambda s, seen: 30}, r"Mine\.full returned int, expected"
    ),
    "a rule that is a number": (
        "retention", {"keep": newest, "decodes": True, "wants_mass": True, "rule": lambda s, *a: 3},
        r"Mine\.rule returned int, expected a Paid, or a Merged, or a Placed, or None",
    ),
    "nobody is due": (
        "retention", {"keep": newest, "replay": Replay(16, 0, (1,), (), 4), "due": lambda s, seen: None},
        r"Mine\.due returned NoneType, expected bool \[2\]",
    ),
    "keys turned by one number": (
        "retention", {"keep": newest, "needs_rope": True, "shift": lambda s, position, first: 3},
        r"Mine\.shift returned int, expected whole numbers \[4, \d+\]",
    ),
    "keys joined by nothing": (
        "representation", JOINT | {"join": lambda s, k: {}, "keys": lambda s, joined, token: None},
        r"Mine\.keys returned NoneType, expected floats \[4, \d+, dim\]",
    ),
    "keys joined in a tuple": (
        "representation", JOINT | {"join": lambda s, k: (k,)}, r"Mine\.join returned \(float32 .* with 2 sequences as"
    ),
    "a band of two numbers": ("prefill", {"band": lambda s, first: (4, 16)}, r"Mine\.band returned \(int, int\), expected a"),
    "scores elsewhere": ("selection", {"score": lambda *a: wanted(*a).to("meta")}, r"Mine\.score .* on meta"),
    "units elsewhere": (
        "selection", {"select": lambda s, q, m, alive, at: torch.zeros(4, 2, device="meta").long()}, r"Mine\.select .* on meta"
    ),
    "a unit twice": ("selection", {"select": units(2, 0, 2)}, r"Mine\.select returned unit 2 twice in a row"),
    "a unit before the first": ("selection", {"select": units(1, -2)}, r"Mine\.select returned unit -2, expected"),
    "summaries that grow short": (
        "selection", {"score": wanted, "summarise": lambda s, k, v: {"mean": k.mean(1)[:, : fewer(k, 8, 16)]}},
        r"Mine\.summarise returned, for each unit, \{'mean': float32 \[8\]\}, and for earlier ones \{'mean': float32 \[16\]\}",
    ),
    "a summary that is missing": (
        "selection", {"score": wanted, "summarise": lambda s, k, v: {"mean": k.mean(1)} | fewer(k, {}, {"more": k.amax(1)})},
        r"Mine\.summarise returned, .*: names, dtypes and shapes must be the same for all units",
    ),
    "a key that is divided by nothing": (
        "representation", {"encode": dense, "decode": lambda s, f: (f["k"] * (0 / f["k"].new_zeros(1)), f["v"])},
        r"Mine\.decode returned NaN for tokens",
    ),
    "codes written over keys": (
        "representation", {"encode": lambda s, k, v, score: dense(s, k.round_(), v, score), "decode": back},
        r"Mine\.encode wrote into what it was given",
    ),
    "pages written as they are read": (
        "representation", {"encode": dense, "decode": lambda s, f: (f["k"].mul_(2), f["v"])},
        r"Mine\.decode wrote into what it was given, float32 \[\d+, 16, 16\], which may be the cache's",
    ),
    "summaries written": (
        "selection", {"score": lambda s, q, m, at: q @ m["mean"].mul_(2).mT},
        r"Mine\.select wrote into the summary 'mean', which is the cache's",
    ),
    "keys written by a choice": (
        "prefill", {"choose": lambda s, q, k, *more: choice([0, 100])(s, q, k.mul_(2), *more)},
        r"Mine\.choose wrote into what it was given, float32 \[4, 100, 16\]",
    ),
    "queries written as they come": (
        "retention", {"keep": newest, "watch": lambda s, notes, q, *more: q.mul_(2)}, r"Mine\.watch wrote into what it was given"
    ),
    "no field": ("representation", {"encode": lambda s, k, v, score: {}}, r"Mine\.encode returned dict, expected a"),
    "as many outliers as there are": (
        "representation", {"encode": lambda s, k, v, c: dense(s, k, v, c) | {"odd": k[:, : fewer(k, 2, 3)]}, "decode": back},
        r"Mine\.encode returned, for each page, .*: names, dtypes and shapes must be the same for all pages",
    ),
    "a codec of its own": (
        "representation", {"encode": dense, "decode": back, "codec": "mine"},
        r"Mine: kernels cannot read its pages by codec='mine': .* without a codec they are decoded",
    ),
    "no choice": ("prefill", {"choose": lambda *a: None}, r"Mine\.choose returned NoneType, expected a Choice"),
    "blocks of nothing": ("prefill", {"choose": choice([0, 100], block=0)}, r"Mine\.choose .* a block of 0, expected"),
    "spans before the first token": ("prefill", {"choose": choice([-7, 100])}, r"Mine\.choose returned spans that begin"),
    "spans that overlap": ("prefill", {"choose": choice([40, 80], [0, 50])}, r"Mine\.choose returned spans .* overlap"),
    "blocks too few": ("prefill", {"choose": choice([0, 100], block=8)}, r"Mine\.choose returned spans .* 13 or more"),
    "columns beyond": ("prefill", {"choose": choice([0, 100], columns=100)}, r"Mine\.choose .* tokens 0 to 99"),
    "no shelf": ("placement", {"open": lambda s, like, site: Flat(like, None, "mine")}, r"Mine\.open returned .* a list of"),
}  # fmt: skip
ALWAYS: dict[str, dict[str, Any]] = {
    "selection": {"unit": 4, "reads": 32, "summarise": mean}, "prefill": {"exact": False, "chooses": True},
}  # fmt: skip


@pytest.mark.parametrize("mistake", CASES)
def test_what_is_wrong_is_told_by_method(model: Any, mistake: str) -> None:
    axis, methods, message = CASES[mistake]
    stack = kvengine.Stack(**{axis: of(INTERFACES[axis], **ALWAYS.get(axis, {}) | methods)})
    with pytest.raises(PolicyError, match=message), kvengine.patched(model, stack):
        model.generate(IDS, max_new_tokens=24, do_sample=False)


@pytest.mark.parametrize(("axis", "methods", "message"), [
    ("selection", {"unit": 0, "reads": 32}, r"Mine: unit=0 must be a whole number of at least 1"),
    ("selection", {"unit": 4, "reads": 2.5}, r"Mine: reads=2\.5 must be"),
    ("selection", {"unit": 4, "reads": 0}, r"Mine: reads=0 must be"),
    ("representation", {"multiple": 8.0}, r"Mine: multiple=8\.0 must be a whole number"),
    ("representation", {"room": -3}, r"Mine: room=-3 must be"),
    ("retention", {"observes": 2.5}, r"Mine: observes=2\.5 must be"),
    ("retention", {"shift": lambda s, position, first: position}, r"turns keys \(`shift`\), so its `needs_rope` must say"),
    ("retention", {"order": 4.5}, r"Mine: order=4\.5 must be a whole number"),
    ("retention", {"ends": 4}, r"Mine: ends=4 must be a pair \(first, newest\)"),
    ("retention", {"ends": (4, "16")}, r"Mine: newest='16' must be 1 to"),
    ("retention", {"replay": 512}, r"Mine: replay=512 must be a kvengine\.policies\.retention\.Replay, or None"),
    ("retention", {"replay": Replay(0, 0, (), (), 4)}, r"Mine: chunk=0 must be a whole number of at least 1"),
    ("retention", {"replay": Replay(16, 0, "ab", (), 4)}, r"Mine: the replay's prompt='ab' must be a tuple of token ids"),
    ("retention", {"keep": 20}, r"Mine: keep=20, but `keep` is a method of Retention"),
    ("retention", {"observes": lambda s: 32}, r"`observes` is a value of Retention, not a method: put @property above"),
    ("retention", {"decodes": lambda s: False}, r"`decodes` is a value of Retention, not a method"),
    ("representation", {"codec": 3}, r"Mine: codec=3 must be a text"),
    ("representation", {"joint": True}, r"before their rotation \(`joint`\), so its `needs_rope` must be True"),
])  # fmt: skip
def test_what_cannot_be_counted_by_is_refused_with_the_stack(axis: str, methods: dict[str, Any], message: str) -> None:
    """Some were read as something else: a budget of 2.5 as everything, keys that `shift` turns as they were."""
    with pytest.raises(PolicyError, match=message):
        kvengine.Stack(**{axis: of(INTERFACES[axis], **methods)})


def test_a_selection_that_writes_into_queries_changes_no_attention(model: Any) -> None:
    """It scales and rounds what it was given; attention then read by the scaled queries."""
    found = []
    for score in (lambda s, q, m, at: (3 * q) @ m["mean"].mT, lambda s, q, m, at: q.mul_(3) @ m["mean"].mT):
        with kvengine.patched(model, kvengine.Stack(selection=of(Selection, **ALWAYS["selection"], score=score))):
            found.append(model.generate(IDS, max_new_tokens=20, do_sample=False))
    assert torch.equal(*found)


def test_a_selection_that_writes_down_which_units_it_wants_no_more_hides_none_from_later_tokens(model: Any) -> None:
    """Units that it had crossed out were dead to every token that followed."""

    def select(s: Any, q: Tensor, m: Any, alive: Tensor, at: Any) -> Tensor | None:
        alive = alive.clone() if s.copies else alive
        alive[:, at.token % 3 :: 3] = False
        return Selection.select(s, q, m, alive, at)

    found = []
    for copies in (True, False):
        mine = of(Selection, **ALWAYS["selection"], score=wanted, select=select, copies=copies)
        with kvengine.patched(model, kvengine.Stack(selection=mine)):
            found.append(model.generate(IDS, max_new_tokens=20, do_sample=False))
    assert torch.equal(*found)


@dataclass(frozen=True)
class Remembering(Selection):
    """Keeps a memo beside the pages, of which not all is tensors."""

    budget: int = 32
    memo: list[int] = field(default_factory=list, compare=False)

    @property
    def reads(self) -> int:
        return self.budget

    def summarise(self, k: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"mean": k.mean(1)}

    def score(self, q: Tensor, summary: dict[str, Tensor], at: Any) -> Tensor:
        at.beside.update(key=at.stamps().tobytes(), centres=q.new_zeros(10))
        return wanted(self, q, summary, at)


def test_what_a_selection_keeps_beside_is_counted_where_it_has_bytes(model: Any) -> None:
    """`cache.stats()` and a decoder's report ended in an AttributeError."""
    stack = kvengine.Stack(selection=Remembering())
    with kvengine.patched(model, stack):
        cache = kvengine.EngineCache(model)
        model.generate(IDS, max_new_tokens=8, do_sample=False, cache=cache)
        assert cache.stats().bytes["host"]["pages.index"] == 2 * 40
    with kvengine.patched(model):
        decoder = TriForce(model, middle=stack)
        decoder.generate(IDS[:1], max_new_tokens=8, do_sample=False)
        assert "key" not in str(decoder.report)


def test_a_view_looks_at_what_a_selection_remembers_and_lends_it_as_pages_do(model: Any) -> None:
    """It took whatever was said of units, and what a choice had taken out or turned round was so at the next."""

    def select(s: Any, q: Tensor, summary: dict[str, Tensor], alive: Tensor, at: Any) -> Tensor:
        held = summary.pop("mean").transpose_(1, 2)
        return (q @ held).amax(1).masked_fill(~alive, -torch.inf).topk(2).indices

    def draft(**methods: Any) -> Tensor:
        stack = kvengine.Stack(
            selection=of(Selection, unit=4, reads=32, **{"summarise": mean, "select": select} | methods)
        )
        decoder = TriForce(model, middle=stack, refresh=Refresh(every=1))
        return decoder.generate(IDS[:1], max_new_tokens=20, do_sample=False)

    with kvengine.patched(model):
        assert torch.equal(draft(), model.generate(IDS[:1], max_new_tokens=20, do_sample=False))
        with pytest.raises(
            PolicyError, match=r"Mine\.summarise \('mean'\) returned float32 \[16\], .* units as the first axis"
        ):
            draft(summarise=lambda s, k, v: {"mean": k.mean((0, 1))})


def test_a_policy_of_a_script_goes_by_the_name_of_its_class() -> None:
    """Of every one, messages said '__main__'."""
    mine = of(Retention, keep=newest)
    type(mine).__module__ = "__main__"
    assert str(kvengine.Stack(retention=mine)) == "Mine"
