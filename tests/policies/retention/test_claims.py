"""What a retention says of itself is so: whether it reads scores that are stored, and which of its verdicts the kernels know."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from support import SMALL, Bare, llama
from torch import Tensor

import kvengine
from kvengine import answers
from kvengine.errors import UnsupportedPolicy
from kvengine.kernels.step import Rule
from kvengine.policies.retention import Retention, Seen, keep_top
from kvengine.policies.retention.d2o import D2O
from kvengine.policies.retention.elastic import Elastic
from kvengine.policies.retention.h2o import H2O
from kvengine.policies.retention.streaming import Streaming
from kvengine.policies.retention.tova import TOVA
from kvengine.policies.selection.quest import Quest
from kvengine.stack import Stack

ONCE = ["h2o(budget=24, decode=False)", "tova(budget=24, decode=False)", "streaming(sinks=2, recent=14, decode=False)"]
JUDGES = [text for text in (*SMALL.values(), *ONCE) if type(Stack.parse(text).retention).keep is not Retention.keep]


@pytest.mark.parametrize("text", JUDGES)
def test_scores_are_stored_only_where_they_are_read(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that says the same whatever was stored needs no memory for it."""
    score, differs = answers.score, []

    def twice(retention: Retention, seen: Seen) -> Tensor:
        other = replace(seen, score=seen.score + torch.rand(seen.score.shape), notes=dict(seen.notes))
        differ = not torch.equal(score(retention, other), found := score(retention, seen))
        differs.append(differ and type(retention).score is not Retention.score)
        return found

    monkeypatch.setattr(answers, "score", twice)
    fed = Bare(text)
    for n in (60, 1, 1, 20, 1):
        fed.feed(n)
    lane = fed.cache.parts[0].lane
    assert differs and lane.tail.scored == lane.retention.remembers <= any(differs)


CHANGED = [
    *((cls, name) for cls in (H2O, TOVA) for name in ("keep", "score")),
    *(
        (D2O, name)
        for name in ("score", "keep", "newest", "first", "early", "refold", "targets", "threshold", "merged")
    ),
    *((Elastic, name) for name in ("score", "keep", "place")),
    (Streaming, "keep"),
]


@pytest.mark.parametrize("cls, name", CHANGED, ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_the_kernels_know_no_verdict_of_a_method_that_is_changed(cls: type[Any], name: str) -> None:
    """Of a subclass that says otherwise in one of these, the verdict is asked for."""
    own = type("Own", (cls,), {name: lambda self, *given: getattr(cls, name)(self, *given)})
    assert known(cls()) is not None and known(own()) is None


def known(retention: Retention) -> Rule | tuple[Any, ...] | None:
    first, length = torch.zeros(2, dtype=torch.long), torch.full((2,), 60)
    notes = {"size": torch.full((2,), 24), "threshold": torch.zeros(2), "left": torch.full((2,), 24)}
    return retention.ends or retention.rule(first, length, 2, notes)


@pytest.mark.parametrize("name", ["h2o", "tova"])
def test_a_method_that_counts_what_each_token_gets_needs_all_of_them_read_while_it_judges(name: str) -> None:
    """Judged once, at the prompt's end, it goes with a selection."""
    assert not Stack.parse(f"{name}(decode=False) + quest").retention.at(0, 2).counts
    with pytest.raises(UnsupportedPolicy, match="counts the attention"):
        Stack.parse(f"{name} + quest")


def test_one_layer_that_counts_is_enough_to_refuse_a_selection() -> None:
    class Later(H2O):
        def at(self, layer: int, layers: int) -> Retention:
            return self if layer else H2O(self.budget, decode=False).at(layer, layers)

    stack = Stack(retention=Later(budget=24), selection=Quest(budget=16, page=4))
    with pytest.raises(UnsupportedPolicy, match="counts the attention"):
        kvengine.patch(llama(), stack)


def shown(position: list[list[int]], queries: int = 1, **more: Any) -> Seen:
    at, rows = torch.tensor(position), len(position)
    first = at.masked_fill(at < 0, 1 << 20).amin(1)
    q, nothing = torch.zeros(rows, 1, queries, 4), torch.zeros(at.shape)
    return Seen(at, nothing, first, int(at.max()), True, first, None, q, 1.0, lambda: (q[:, 0], q[:, 0]), **more)


@pytest.mark.parametrize("jumbled, kept", [(False, [4, 6]), (True, [6, 7])])
def test_of_equals_the_later_tokens_stay_wherever_they_lie(jumbled: bool, kept: list[int]) -> None:
    """By position, which the order of slots tells unless it is said not to."""
    seen = shown([[7, 5, -1, 4, 6]], jumbled=jumbled)
    found = keep_top(seen, seen.score, 2, torch.zeros_like(seen.valid))
    assert sorted(seen.position[found].tolist()) == kept


def test_who_asks_is_the_first_query_that_is_a_token_of_this_prompt() -> None:
    """Of three queries, those of tokens 7 to 9: the last row's is the newest alone, by where its prompt begins."""
    seen = shown([[0, 7, 8, 9], [-1, -1, 8, 9], [0, 1, 2, 9]], queries=3)
    assert seen.query_position.tolist() == [7, 8, 9] and seen.asking.tolist() == [7, 8, 7]
    assert replace(seen, begin=torch.tensor([0, 8, 9])).asking.tolist() == [7, 8, 9]
