"""A retention of one's own that looks at all that it is shown while decoding: a row of a batch is judged as it is alone."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from support import held, one, patched
from test_ragged_turns import ragged, talk
from torch import Tensor

import kvengine
from kvengine import EngineCache
from kvengine.cache import LayerCache
from kvengine.errors import UnsupportedPolicy
from kvengine.policies.retention import Retention, Seen
from kvengine.policies.retention.h2o import H2O
from kvengine.policies.retention.streaming import Streaming
from kvengine.policies.retention.tova import TOVA
from kvengine.session import Call


@dataclass(frozen=True)
class Since(Retention):
    """Keeps every fifth token, counted from where the last prompt began, and the newest."""

    decodes: ClassVar[bool] = True

    def keep(self, seen: Seen) -> Tensor:
        assert seen.begin is not None and (seen.begin >= seen.first).all()
        assert seen.prompt or (seen.asking == seen.newest).all()
        return seen.recent(6) | (seen.valid & ((seen.position - seen.begin[:, None]) % 5 == 0))


@dataclass(frozen=True)
class Picky(Since):
    """Drops what the last query hardly looks at."""

    def score(self, seen: Seen) -> Tensor:
        return torch.einsum("rgd,rtd->rgt", seen.queries[:, :, -1], seen.read()[0]).amax(1) * seen.scale

    def keep(self, seen: Seen) -> Tensor:
        return seen.recent(6) | (seen.valid & (seen.score > -0.3))


@dataclass(frozen=True)
class Counting(Since):
    """Drops another token, of each seven, at every verdict."""

    def keep(self, seen: Seen) -> Tensor:
        number = seen.notes.get("number", torch.zeros_like(seen.first))
        seen.notes["number"] = number + 1
        return seen.recent(6) | (seen.valid & ((seen.position - seen.first[:, None] + number[:, None]) % 7 != 0))


OWN = [Since(), Picky(), Counting()]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("later", [(9, 0, 5), (9, 14, 0), (9, 13, 0)], ids=["all", "one silent", "one token"])
@pytest.mark.parametrize("own", OWN, ids=lambda own: type(own).__name__)
def test_a_row_of_ragged_turns_is_judged_as_alone(own: Retention, later: tuple[int, ...]) -> None:
    model = patched(kvengine.Stack(retention=own)).double()
    together = talk(model, [0, 1, 2], False, (), later, 20)
    for row in range(3):
        alone = talk(model, [row], False, (), later, 20)[0]
        said = ~alone.isnan()  # of a turn without a token, nothing
        torch.testing.assert_close(together[row][said], alone[said], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("own", OWN, ids=lambda own: type(own).__name__)
def test_a_row_that_pauses_while_others_decode_is_judged_as_alone(own: Retention) -> None:
    model, (ids, mask), more = patched(kvengine.Stack(retention=own)).double(), ragged(2, 40, (0, 7), 1), 30
    new = ragged(2, more, (0, 0), 2)[0]
    takes = torch.arange(more) % 5 < 3  # of the second row
    out = []
    for rows in ([0, 1], [1]):
        cache, seen, found = EngineCache(model), mask[rows], []
        with torch.no_grad():
            model(ids[rows], attention_mask=seen, cache=cache)
            for i in range(more):
                if len(rows) == 1 and not takes[i]:
                    continue
                real = torch.tensor([[True], [bool(takes[i])]])[rows]
                seen = torch.cat([seen, real.long()], 1)
                at = (seen.cumsum(1) - 1)[:, -1:]
                logits = model(new[rows, i : i + 1], attention_mask=seen, position_ids=at, cache=cache).logits[-1, -1]
                if takes[i]:
                    found.append(logits)
        out.append(torch.stack(found))
    torch.testing.assert_close(*out, rtol=1e-6, atol=1e-6)


def test_a_step_at_whose_verdict_the_host_looks_is_not_traced() -> None:
    """It ended in torch's own words, and the cache could only be reset."""
    model = patched(kvengine.Stack(retention=Since()))
    caches, more = [kvengine.EngineCache(model) for _ in range(2)], {"max_new_tokens": 3, "do_sample": False}
    found = [model.generate(**one(), **more, cache=cache) for cache in caches]
    with pytest.raises(UnsupportedPolicy, match="cannot be traced.*take how='eager'"):
        kvengine.compile_decode(model, "trace").generate(found[0], **more, cache=caches[0])
    with torch.no_grad():
        model(found[0][:, -1:], cache=caches[1])
        after = [model(found[0][:, :1], cache=cache).logits for cache in caches]
    assert torch.equal(*after)


@pytest.mark.parametrize("kind", [H2O, Streaming, TOVA], ids=lambda kind: kind.__name__)
def test_what_is_derived_from_a_method_keeps_its_own_way_where_the_prompt_alone_is_judged(
    kind: type[Retention],
) -> None:
    """`decode=False` is another class of the same method."""

    @dataclass(frozen=True)
    class Mine(kind):  # type: ignore[misc, valid-type]
        every: int = 3

        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "derived", self.every * 10)

        def keep(self, seen: Seen) -> Tensor:
            return seen.valid & (seen.position % self.every == 0)

    mine = Mine(decode=False, every=4)
    once = mine.at(0, 1)
    assert (once.decodes, once.remembers, mine.decodes, type(once) is type(mine.at(1, 2))) == (False, False, True, True)
    assert vars(once) == vars(mine) and isinstance(once, Mine)
    model = patched(kvengine.Stack(retention=mine))
    cache = EngineCache(model)
    with torch.no_grad():
        model(torch.arange(40)[None], cache=cache)
        model(torch.arange(3)[None, :1], cache=cache)
    assert set(cache.stats().held.flatten().tolist()) == {10 + 1}


@dataclass(frozen=True)
class Some(Retention):
    """Of a prompt every row's even positions, but all of the first row; or all of all."""

    every: bool = False

    def keep(self, seen: Seen) -> Tensor | None:
        return (
            None
            if self.every
            else seen.valid & ((seen.position % 2 == 0) | (torch.arange(len(seen.first)) == 0)[:, None])
        )


@pytest.mark.parametrize("every", [True, False])
def test_what_one_row_drops_goes_where_another_keeps_all(every: bool) -> None:
    cache = LayerCache(kvengine.Stack(retention=Some(every)), 0, 1)
    for n in (12, 1):
        cache.forward(*(torch.randn(2, 1, n, 8) for _ in range(3)), Call(0.3))
    assert [head for (head,) in held(cache)] == [[*range(13)], [*range(13)] if every else [*range(0, 12, 2), 12]]
