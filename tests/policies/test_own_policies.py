"""Policies of one's own: found in folders that the environment names, and told by method what they did wrong."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from layout import ROOT
from support import llama

import kvengine
from kvengine import policies
from kvengine.cache import LayerCache
from kvengine.errors import CacheError, PolicyError, UnknownPolicy, UnsupportedPolicy
from kvengine.evals.policies import arms
from kvengine.policies import ours
from kvengine.policies.prefill import Prefill
from kvengine.policies.representation import Representation
from kvengine.policies.representation.lowrank import LowRank
from kvengine.policies.retention import Retention
from kvengine.policies.retention.streaming import Streaming
from kvengine.policies.routing import Routing
from kvengine.policies.selection import Selection
from kvengine.saved import load, save
from kvengine.session import Call
from kvengine.stack import Stack

IDS = torch.arange(3, 103)[None].repeat(2, 1)


@pytest.fixture(scope="module")
def model() -> Any:
    return llama()


def of(interface: type[Any], **methods: Any) -> Any:
    """A policy of this axis with these methods; a plain value becomes a property."""
    named = {name: x if callable(x) else property(lambda self, x=x: x) for name, x in methods.items()}
    return dataclass(frozen=True)(type("Mine", (interface,), named))()


def mean(self: Any, k: torch.Tensor, valid: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"mean": k.mean(1)}


def dense(self: Any, k: torch.Tensor, v: torch.Tensor, score: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"k": k, "v": v}


MERGES: dict[str, Any] = {
    "merges": True, "remerges": True, "decodes": True, "fold": lambda s, seen, keep: seen.read(),
}  # fmt: skip
SHARES: dict[str, Any] = {"measure": lambda s, seen: seen.first[:: seen.heads].float()}
RETENTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "a slot short": ({"keep": lambda s, seen: seen.valid[:, 1:]}, r"Mine\.keep returned bool .* expected bool"),
    "no rows": ({"keep": lambda s, seen: seen.valid[0]}, r"Mine\.keep returned bool \[\d+\], expected bool"),
    "numbers": ({"keep": lambda s, seen: seen.valid.long()}, r"Mine\.keep returned int64"),
    "a list": ({"keep": lambda s, seen: seen.valid.tolist()}, r"Mine\.keep returned list"),
    "scores by group": ({"score": lambda s, seen: seen.score[..., None]}, r"Mine\.score returned float32 .* expected floats"),
    "scores that are ranks": ({"score": lambda s, seen: seen.position}, r"Mine\.score returned int32"),
    "a share of nothing": (
        {"score": lambda s, seen: seen.score / seen.score.sum(1, keepdim=True)},
        r"Mine\.score returned NaN for 400 of 400 tokens",
    ),
    "merged tokens alone": (
        MERGES | {"fold": lambda s, seen, keep: tuple(x[:, :20] for x in seen.read())},
        r"Mine\.fold returned \(float32 .* expected \(keys, values\) of all slots, floats \[4, 100, \d+\]",
    ),
    "keys alone": (MERGES | {"fold": lambda s, seen, keep: seen.read()[0]}, r"Mine\.fold returned float32"),
    "slots as floats": (
        MERGES | {"refold": lambda s, seen, keep: (seen.first.float(), *(x[:, 0] for x in seen.read()))},
        r"Mine\.refold returned .* expected \(slot, key, value\): whole numbers \[4\], floats",
    ),
    "nothing merged": (MERGES | {"refold": lambda s, seen, keep: ()}, r"Mine\.refold returned \(\), expected \(slot"),
    "a slot of one row": (
        MERGES | {"refold": lambda s, seen, keep: (seen.first[:1], *(x[:, 0] for x in seen.read()))},
        r"Mine\.refold returned",
    ),
    "shares of one layer": (
        SHARES | {"share": lambda s, seen, measures: [seen[0].count(40)]},
        r"Mine\.share returned list, expected 2 tensors of whole numbers, \[4\] each",
    ),
    "one share for all rows": (SHARES | {"share": lambda s, seen, measures: [x.first[:1] for x in seen]}, r"Mine\.share"),
    "shares in parts": (SHARES | {"share": lambda s, seen, measures: [x.first / 2 for x in seen]}, r"Mine\.share returned"),
    "a limit in parts": (
        {"decodes": True, "limit": lambda s, seen: 20.5, "keep": lambda s, seen: seen.recent(20)},
        r"Mine\.limit returned float, expected a number of tokens, or None",
    ),
    "a limit of which keep knows nothing": (
        {"decodes": True, "limit": lambda s, seen: 20, "keep": lambda s, seen: seen.valid},
        r"Mine\.keep left 100 tokens in a row, but its `limit` says that 20 are the most",
    ),
    "a limit of the prompt alone": (
        {"decodes": True, "limit": lambda s, seen: 20, "keep": lambda s, seen: seen.recent(20) if seen.prompt else None},
        r"Mine\.keep left 21 tokens in a row",
    ),
    "a limit that nothing keeps": (
        {"limit": lambda s, seen: 20, "keep": lambda s, seen: seen.recent(20)},
        r"Mine\.limit says that a row holds no more than 20 tokens .* set it to True",
    ),
    "positions written": ({"score": lambda s, seen: seen.position.fill_(7).float()}, r"Mine\.score wrote into seen\.position"),
    "keys written": ({"keep": lambda s, seen: seen.read()[0].zero_()[..., 0] == 0}, r"Mine\.keep wrote into .* its keys"),
    "values written": ({"keep": lambda s, seen: seen.read()[1].zero_()[..., 0] == 0}, r"Mine\.keep wrote into .* its values"),
}  # fmt: skip
SELECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no score": ({}, r"Mine defines no `score`; the docstring of `Selection`"),
    "scores without group": ({"score": lambda s, q, m, at: m["mean"].sum(-1)}, r"Mine\.score returned .* \[row, group, unit\]"),
    "scores of one row": ({"score": lambda s, q, m, at: (q @ m["mean"].mT)[:1]}, r"Mine\.score returned .* \[1, 2, .* \[4, 2,"),
    "a score short": ({"score": lambda s, q, m, at: (q @ m["mean"].mT)[..., 1:]}, r"Mine\.score returned float32"),
    "scores of one query": ({"score": lambda s, q, m, at: (q @ m["mean"].mT)[:, :1]}, r"Mine\.score returned float32"),
    "scores of numpy": ({"score": lambda s, q, m, at: (q @ m["mean"].mT).numpy()}, r"Mine\.score returned ndarray, expected"),
    "scores that are no numbers": ({"score": lambda s, q, m, at: (q @ m["mean"].mT) * torch.nan}, r"Mine\.score returned NaN"),
    "scores that are ranks": ({"score": lambda s, q, m, at: (q @ m["mean"].mT).long()}, r"Mine\.score returned int64"),
    "a tensor for a summary": ({"summarise": lambda s, k, v: k}, r"Mine\.summarise returned .* expected a dict"),
    "one summary for all": ({"summarise": lambda s, k, v: {"mean": k.mean((0, 1))}}, r"Mine\.summarise \('mean'\) returned"),
    "units that are not there": (
        {"select": lambda s, q, m, alive, at: torch.full((len(q), 2), alive.shape[1])},
        r"Mine\.select returned unit \d+, expected .* units from 0 to \d+, or -1",
    ),
    "units as floats": ({"select": lambda s, q, m, alive, at: torch.zeros(len(q), 2)}, r"Mine\.select returned float32"),
    "units of one row": ({"select": lambda s, q, m, alive, at: torch.zeros(1, 2).long()}, r"Mine\.select returned int64"),
}  # fmt: skip
REPRESENTATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "no encode": ({}, r"Mine defines no `encode`"),
    "no decode": ({"encode": dense}, r"Mine defines no `decode`"),
    "a tuple of fields": ({"encode": lambda s, k, v, score: (k, v)}, r"Mine\.encode returned \(float32 .* a dict"),
    "no page axis": ({"encode": lambda s, k, v, score: {"k": k[0], "v": v}}, r"Mine\.encode \('k'\) returned .* \d+ pages"),
    "a token short": (
        {"encode": dense, "decode": lambda s, f: (f["k"][:, 1:], f["v"])},
        r"Mine\.decode returned \(float32 \[1, \d+, \d+\], .* as `encode` was given them",
    ),
    "a channel short": ({"encode": dense, "decode": lambda s, f: (f["k"], f["v"][..., 1:])}, r"Mine\.decode .* as `encode` was"),
    "whole numbers": ({"encode": dense, "decode": lambda s, f: (f["k"].int(), f["v"])}, r"Mine\.decode returned \(int32 "),
    "one page": ({"encode": dense, "decode": lambda s, f: (f["k"], f["v"][:1])}, r"Mine\.decode returned .* of \d+ pages"),
    "keys alone": ({"encode": dense, "decode": lambda s, f: f["k"]}, r"Mine\.decode returned float32 .* expected keys"),
}  # fmt: skip
PREFILLS: dict[str, tuple[dict[str, Any], str]] = {
    "no choose": ({"chooses": True}, r"Mine defines no `choose`"),
    "positions written": (
        {"visible": lambda s, query, token, first: query[:, None] >= token.fill_(3)[:, None]},
        r"Mine\.visible wrote into what it was given, int32 \[4, 100\], which may be the cache's",
    ),
    "no rows": ({"visible": lambda s, query, token, first: query[:, None] >= token[0]}, r"Mine\.visible returned bool"),
}  # fmt: skip
ROUTINGS: dict[str, tuple[Any, str]] = {
    "a head left out": (
        [((0,), None)],
        r"Mine\.lanes returned \[\(\(0,\), None\)\], expected groups .* from 0 to 1 once",
    ),
    "a head twice": ([((0, 1), None), ((1,), Streaming())], r"Mine\.lanes returned .* from 0 to 1 once"),
    "a head too many": ([((0, 1, 2), None)], r"Mine\.lanes returned"),
    "no head in a group": ([((0, 1), None), ((), Streaming())], r"Mine\.lanes returned"),
    "no group": ([], r"Mine\.lanes returned \[\], expected groups"),
    "heads alone": ([(0, 1)], r"Mine\.lanes returned"),
    "a name": ([((0, 1), "streaming")], r"Mine\.lanes returned .*, expected groups \(heads, retention or None\)"),
    "a policy of another axis": (
        [((0, 1), Selection())],
        r"Mine\.lanes returned .*, expected groups \(heads, retention or None\)",
    ),
}


def newest(self: Any, seen: Any) -> torch.Tensor:
    return seen.recent(20)  # type: ignore[no-any-return]


def told(model: Any, axis: str, make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message), kvengine.patched(model, kvengine.Stack(**{axis: make()})):
        model.generate(IDS, max_new_tokens=4, do_sample=False)


@pytest.mark.parametrize("mistake", RETENTIONS)
def test_a_retention_that_is_wrong_is_told_which_method(model: Any, mistake: str) -> None:
    methods, message = RETENTIONS[mistake]
    told(model, "retention", lambda: of(Retention, **{"keep": newest} | methods), message)


@pytest.mark.parametrize("mistake", SELECTIONS)
def test_a_selection_that_is_wrong_is_told_which_method(model: Any, mistake: str) -> None:
    methods, message = SELECTIONS[mistake]
    told(model, "selection", lambda: of(Selection, **{"unit": 8, "reads": 32, "summarise": mean} | methods), message)


@pytest.mark.parametrize(
    "wrong",
    [lambda found: found[:, 1:], lambda found: found.long(), lambda found: found[0]],
    ids=["short", "long", "row"],
)
def test_what_a_selection_leaves_exact_is_looked_at(model: Any, wrong: Any) -> None:
    ways = {"unit": 8, "reads": 32, "summarise": mean, "exact": lambda s, k, position, prompt: wrong(position >= 0)}
    stack = kvengine.Stack(selection=of(Selection, **ways), representation=LowRank(rank=8))
    with pytest.raises(PolicyError, match=r"Mine\.exact returned .* expected bool \[4, 100\]"):
        with kvengine.patched(model, stack):
            model.generate(IDS, max_new_tokens=4, do_sample=False)


def test_a_selection_may_reshape_what_it_is_given(model: Any) -> None:
    """The next token's is what it would have been."""

    def select(self: Any, q: torch.Tensor, summary: Any, alive: torch.Tensor, at: Any) -> torch.Tensor:
        mean, there = summary.pop("mean"), alive
        want = (q.amax(1, keepdim=True) @ mean.mT)[:, 0].masked_fill(~there, -torch.inf)
        mean.transpose_(1, 2), there.unsqueeze_(1), q.unsqueeze_(0)
        return want.topk(2).indices

    def plain(self: Any, q: torch.Tensor, summary: Any, alive: torch.Tensor, at: Any) -> torch.Tensor:
        return select(self, q[:], {"mean": summary["mean"][:]}, alive[:], at)

    found = []
    for way in (select, plain):
        mine = of(Selection, unit=4, reads=32, summarise=mean, select=way)
        with kvengine.patched(model, kvengine.Stack(selection=mine)):
            found.append(model.generate(IDS, max_new_tokens=20, do_sample=False))
    assert torch.equal(*found)


@pytest.mark.parametrize("mistake", REPRESENTATIONS)
def test_a_representation_that_is_wrong_is_told_which_method(model: Any, mistake: str) -> None:
    methods, message = REPRESENTATIONS[mistake]
    told(model, "representation", lambda: of(Representation, **methods), message)


@pytest.mark.parametrize("mistake", PREFILLS)
def test_a_prefill_that_is_wrong_is_told_which_method(model: Any, mistake: str) -> None:
    methods, message = PREFILLS[mistake]
    told(model, "prefill", lambda: of(Prefill, exact=False, **methods), message)


@pytest.mark.parametrize("mistake", ROUTINGS)
def test_a_routing_that_is_wrong_is_told(model: Any, mistake: str) -> None:
    groups, message = ROUTINGS[mistake]
    told(model, "routing", lambda: of(Routing, lanes=lambda s, layer, layers, heads: groups), message)


@pytest.mark.parametrize(
    ("retention", "rest", "message"),
    [
        ("d2o(budget=24)", "kivi", "'d2o' rewrites tokens that it keeps while decoding, but 'kivi'"),
        ("h2o(budget=24)", "quest", "'h2o' counts the attention .* but 'quest' reads only some"),
        ("kvzip(budget=24)", "full", "'kvzip' reads the prompt a second time, .* gives it to some"),
    ],
)
def test_a_retention_of_some_heads_is_refused_as_that_of_all(
    model: Any, retention: str, rest: str, message: str
) -> None:
    """It ended in an error of torch in the midst of an answer, or in a cache that had broken off."""
    groups = [((0,), None), ((1,), Stack.parse(retention).retention)]
    routing = of(Routing, lanes=lambda s, layer, layers, heads: groups)
    with kvengine.patched(model, replace(Stack.parse(rest), routing=routing)):
        with pytest.raises(UnsupportedPolicy, match=message):
            model.generate(IDS, max_new_tokens=20, do_sample=False)


def test_heads_of_a_group_may_be_named_in_any_order() -> None:
    """What belongs to heads, as the logits of sinks do, goes to them all the same."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 9, 8, generator=generator) for n in (8, 4, 4))
    call, found = Call(0.3, sinks=torch.randn(4, 2, generator=generator)), []
    for heads in ((0, 1, 2, 3), (0, 2, 1, 3)):
        groups = [(heads, None), ((4,), Streaming())]
        stack = kvengine.Stack(routing=of(Routing, lanes=lambda s, layer, layers, heads, groups=groups: groups))
        more = (torch.cat([x, x[:, : x.shape[1] // 4]], 1) for x in (q, k, v))
        found.append(
            LayerCache(stack, 0, 1).forward(*more, call._replace(sinks=torch.cat([call.sinks, call.sinks[:1]])))
        )
    assert torch.equal(*found)


@pytest.mark.parametrize(("axis", "given", "message"), [
    ("retention", Retention, "retention takes an object of a class derived from Retention, got the class Retention: call it"),
    ("selection", Retention(), r"selection takes .* Selection, got Retention\(\)"),
    ("retention", "snapkv", "retention takes .* got 'snapkv'"),
    ("prefill", of(Prefill, visible=lambda s, q, t, f: None), "its `exact` must be False"),
    ("selection", of(Selection, score=lambda s, q, m, at: None), "its `reads` says that all is read"),
])  # fmt: skip
def test_a_stack_takes_policies_of_its_axes(axis: str, given: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        kvengine.Stack(**{axis: given})


SOURCE = """
from dataclasses import dataclass
from kvengine.policies.retention import Retention

@dataclass(frozen=True)
class Newest(Retention):
    recent: int = 16

    def keep(self, seen):
        return seen.recent(self.recent)
"""


def keep_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    for axis in policies.AXES:
        package = policies.package(axis)
        monkeypatch.setattr(package, "__path__", list(package.__path__))


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the policy `own_newest`, which the environment names; forgotten afterwards."""
    keep_paths(monkeypatch)
    monkeypatch.setenv("KVENGINE_POLICIES", str(tmp_path))
    (tmp_path / "retention").mkdir()
    (tmp_path / "retention" / "own_newest.py").write_text(SOURCE)
    monkeypatch.delitem(sys.modules, "kvengine.policies.retention.own_newest", raising=False)
    return tmp_path


def test_a_policy_in_a_folder_of_ones_own_goes_by_its_name(elsewhere: Path, model: Any) -> None:
    assert policies.catalogue()["own_newest"] == "retention"
    stack = kvengine.Stack.parse("own_newest(recent=20) + kivi")
    assert str(stack) == "own_newest(recent=20) + kivi" and stack.lasting() == stack.spelled()
    with kvengine.patched(model, "own_newest(recent=20)"):
        cache = kvengine.EngineCache(model)
        model.generate(IDS, max_new_tokens=1, do_sample=False, cache=cache)
        assert (cache.stats().held == 20).all()
        save(cache, elsewhere / "session.kv", model)
        assert load(model, elsewhere / "session.kv").stack == cache.stack


def test_a_file_that_cannot_be_loaded_is_told(elsewhere: Path) -> None:
    """A command ended in a traceback through importlib, and for one letter of Latin 1 in a comment in one through pathlib."""
    file = elsewhere / "retention" / "own_newest.py"
    for said, why in (
        ("def (:", "SyntaxError: invalid syntax (own_newest.py, line 1)"),
        ("import nowhere", "ModuleNotFound"),
    ):
        file.write_text(said)
        importlib.invalidate_caches()
        with pytest.raises(
            PolicyError, match=re.escape(f"own_newest.py among the retention methods cannot be loaded: {why}")
        ):
            policies.load("own_newest")
    file.write_bytes(b"# -*- coding: latin-1 -*- \xf6\n" + SOURCE.encode())
    importlib.invalidate_caches()
    assert policies.load("own_newest")[0] == "retention"


def test_own_policies_are_told_from_those_of_the_package(elsewhere: Path) -> None:
    mine = policies.load("own_newest")[1]
    assert not ours(mine.__module__) and not ours(__name__)
    assert all(ours(policies.load(name)[1].__module__) for name in ("quest", "retrieval", "oracle_topk"))


def test_a_folder_without_policies_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVENGINE_POLICIES", str(tmp_path / "nowhere"))
    with pytest.raises(PolicyError, match=r"KVENGINE_POLICIES names .*nowhere, which has none of the folders routing"):
        kvengine.Stack.parse("full")


@pytest.mark.parametrize(("source", "message"), [
    ("", "must hold one public class derived from Retention, has none"),
    (SOURCE + SOURCE.replace("Newest", "Other"), "has Newest, Other"),
    (SOURCE.replace("@dataclass(frozen=True)\n", ""), r"Newest in .*own_newest\.py is no dataclass"),
    (SOURCE.replace("keep", "kepe"), r"Newest defines nothing that a Retention has.*may have .*decodes.*keep.*score"),
])  # fmt: skip
def test_a_file_that_is_no_policy_is_told(elsewhere: Path, source: str, message: str) -> None:
    (elsewhere / "retention" / "own_newest.py").write_text(source)
    with pytest.raises(PolicyError, match=message):
        kvengine.Stack.parse("own_newest")


def test_who_has_not_said_where_a_policy_of_ones_own_is_hears_how() -> None:
    """As in a process that loads a session of one; a misspelt name has one that is meant."""
    with pytest.raises(UnknownPolicy, match=r"If it is your own, put its file where .*KVENGINE_POLICIES"):
        kvengine.Stack.parse("own_newest + kivi")
    with pytest.raises(UnknownPolicy) as caught:
        kvengine.Stack.parse("snapvk")
    assert "KVENGINE_POLICIES" not in str(caught.value)


@pytest.mark.parametrize("axis", ["retention", "selection"])
def test_a_name_of_the_tree_is_refused_in_a_folder_of_ones_own(elsewhere: Path, axis: str) -> None:
    """A changed copy of a method beside the method: the package's ran, and nobody said so."""
    (elsewhere / axis).mkdir(exist_ok=True)
    (elsewhere / axis / "snapkv.py").write_text(SOURCE)
    with pytest.raises(UnknownPolicy, match="'snapkv' is .*; rename one"):
        kvengine.Stack.parse("snapkv(budget=64)")


def test_the_folder_of_the_package_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_paths(monkeypatch)
    monkeypatch.setenv("KVENGINE_POLICIES", str(ROOT / "policies"))
    assert policies.catalogue()["snapkv"] == "retention"


def test_a_file_that_was_changed_after_it_was_loaded_is_told(elsewhere: Path) -> None:
    """As in a notebook: what was loaded runs on, and is what rows of the evaluation are of."""
    file = elsewhere / "retention" / "own_newest.py"
    (code,) = [arm.code for arm in arms(["own_newest"], ceiling=False)]
    file.write_text(SOURCE.replace("16", "32"))
    with pytest.warns(UserWarning, match=r"own_newest\.py or a file beside it was changed after it was loaded"):
        assert [arm.code for arm in arms(["own_newest"], ceiling=False)] == [code]
    file.write_text(SOURCE)
    assert kvengine.Stack.parse("own_newest")


def test_a_file_that_was_mended_after_it_was_refused_is_told(elsewhere: Path) -> None:
    file = elsewhere / "retention" / "own_newest.py"
    file.write_text("")
    with pytest.raises(PolicyError, match="has none"):
        policies.load("own_newest")
    file.write_text(SOURCE)
    with pytest.warns(UserWarning, match="start Python anew"), pytest.raises(PolicyError, match="has none"):
        policies.load("own_newest")


def test_a_session_that_could_not_be_loaded_is_not_saved(model: Any, tmp_path: Path) -> None:
    """An object's class may stand anywhere, and a file knows it by name alone."""
    with kvengine.patched(model, kvengine.Stack(retention=of(Retention, keep=lambda s, seen: seen.recent(20)))):
        cache = kvengine.EngineCache(model)
        model(IDS, cache=cache)
        with pytest.raises(PolicyError, match=r"cannot be named in a file: .*KVENGINE_POLICIES"):
            save(cache, tmp_path / "session.kv", model)
    assert not (tmp_path / "session.kv").exists()


def test_a_cache_whose_pass_broke_off_is_not_saved(model: Any, tmp_path: Path) -> None:
    with kvengine.patched(model, "kivi"), torch.no_grad():
        cache = kvengine.EngineCache(model)
        model(IDS, cache=cache)
        cache.session.torn = True
        with pytest.raises(CacheError, match="broke off"):
            save(cache, tmp_path / "session.kv", model)


def test_an_object_that_goes_by_the_name_of_another_policy_is_not_named_in_a_file() -> None:
    """What reads the name would make the tree's own method of it."""

    @dataclass(frozen=True)
    class Other(Retention):
        def keep(self, seen: Any) -> Any:
            return seen.valid

    Other.__module__ = "mine.tova"
    with pytest.raises(PolicyError, match="that is the name of another policy"):
        Stack(retention=Other()).lasting()
