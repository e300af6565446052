"""A draft that is the target itself behind a cheaper cache, and hears what the target computes.

While the target reads the prompt, its queries, keys and values pass layer by layer through an `Ear`, so that the
cheaper cache fills without a pass of its own. While the target judges a draft, the ear keeps those of the few tokens
at hand; of the ones that stand, the cheaper cache then takes the target's keys and values in place of its own. It
takes them when it is next drafted on, and until then a round leaves a note of where they are and copies nothing: a
target that finds drafting not worth it pays next to nothing for having a draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast
from weakref import ref

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.hf.cache import EngineCache
from kvengine.hf.layer import EngineLayer, Heard
from kvengine.hf.replay import given
from kvengine.hf.rewind import adopt
from kvengine.session import Call
from kvengine.speculative.law import Text
from kvengine.speculative.places import LayerPlaces, judged
from kvengine.speculative.session import Session
from kvengine.speculative.view import SLACK, ViewCache

Note = tuple[dict[int, Heard], int]
"""What a pass of the target computed, by layer, and how many of its first tokens stand."""


@dataclass
class Refresh:
    """When a view chooses anew among the target's tokens.

    every: at the latest after so many rounds. below: when the share of drafted tokens that stand (a moving average)
    falls under this. patience: but not within so many rounds of the last choice.
    """

    every: int = 32
    below: float = 0.6
    patience: int = 4
    rounds: int = field(default=0, init=False)
    share: float = field(default=1.0, init=False)
    choices: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if self.every < 1 or self.patience < 1 or not 0 <= self.below <= 1:
            raise PolicyError(
                f"refresh needs every >= 1, patience >= 1 and below within [0, 1], not every={self.every}, "
                f"patience={self.patience}, below={self.below}"
            )

    def due(self, stood: int, drafted: int) -> bool:
        """Take note of a round; whether to choose anew after it."""
        self.rounds += 1
        if drafted:
            self.share = 0.8 * self.share + 0.2 * stood / drafted
        return self.rounds >= self.every or (self.rounds >= self.patience and self.share < self.below)

    def chosen(self) -> None:
        self.rounds, self.share, self.choices = 0, 1.0, self.choices + 1


class Ear:
    """Listens to every layer of a cache: while it reads its prompt, and from then on."""

    def __init__(self, cache: EngineCache) -> None:
        self.cache = ref(cache)  # whose layers hold this until the prompt is read, or for good where that breaks off
        self.followers: EngineCache | None = None
        self.heard: dict[int, Heard] = {}
        for number, layer in self.layers():
            layer.listener = partial(self.hear, number)

    def layers(self) -> Iterator[tuple[int, EngineLayer]]:
        cache = self.cache()
        every = [] if cache is None else cache.layers
        return ((i, layer) for i, layer in enumerate(every) if isinstance(layer, EngineLayer))

    def hear(self, layer: int, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        if self.followers is not None:
            follower(self.followers, layer).cache.follow(q, k, v, call)
        else:
            last = (x[:, :, -1:].clone() for x in (q, k, v))  # a view would hold on to the whole prompt's
            self.heard[layer] = (*last, call)  # type: ignore[assignment]

    def wait(self) -> None:
        """The prompt has been read. What comes is left in `heard`: a call for each layer and token would take longer."""
        for _, layer in self.layers():
            layer.listener, layer.heard = None, self.heard

    def leave(self) -> None:
        """The prompt has been read, and what comes is of no interest."""
        for _, layer in self.layers():
            layer.listener = None


def follower(cache: EngineCache, layer: int) -> EngineLayer:
    return cast(EngineLayer, cache.layers[layer])


@dataclass
class Echo(Session):
    """A session of the target's model on a cheaper cache: a view of the target's, or a cache that follows it."""

    whole: Session = field(kw_only=True)
    refresh: Refresh = field(kw_only=True, default_factory=Refresh)
    late: int = field(default=0, init=False)  # tokens that the target has let through and this cache not yet taken
    notes: list[Note] = field(default_factory=list, init=False, repr=False)  # where those are
    stale: bool = field(default=False, init=False)  # another choice is due

    def __post_init__(self) -> None:
        self.ear = Ear(self.whole.cache)
        if not isinstance(self.cache, ViewCache):
            self.ear.followers = self.cache
        elif judged(self.cache.choice):  # another cache reads the prompt, to see which tokens it keeps
            self.ear.followers = EngineCache(self.model, self.cache.choice, positions=True)

    def prefill(self, prompt: Sequence[int]) -> None:  # type: ignore[override]
        """To be called when the target has read the prompt: nothing is left to compute but a view's first choice."""
        self.ear.wait()
        self._record()
        self.settled = len(prompt)
        self._adopt()
        if self.ear.followers is not None:
            self._adopt(self.ear.followers)
            given(self.model, self.ear.followers, torch.tensor([list(prompt)], device=self.device))
        if isinstance(self.cache, ViewCache) and self.ear.followers is not None:
            for number, view in self.cache.views.items():
                cast(LayerPlaces, view).begin(kept(self.ear.followers, number))
            self.ear.followers = None
        elif isinstance(self.cache, ViewCache):
            self.notes.append((dict(self.ear.heard), 1))
            self._choose(self.cache)
            self.notes.clear()

    def settle(self, text: Text) -> None:
        """Take the target's keys and values of the tokens that it has let through."""
        drafted, fresh = len(self.open), self.whole.settled - self.settled
        self.forget(drafted)
        self.settled = self.whole.settled
        if fresh:  # the token that the draft began behind, and what stood of it; its last token was never read here
            self.stale |= self.refresh.due(fresh - 1, drafted)
            self._remember(fresh)

    def _remember(self, fresh: int) -> None:
        """Note which tokens stand of those heard last, and listen for others."""
        self.late += fresh
        self.notes.append((dict(self.ear.heard), fresh))
        self.ear.heard.clear()
        if self.late <= SLACK:
            return
        if isinstance(self.cache, ViewCache):
            del self.notes[:-1]  # a choice is due, and all it needs is the last query
        else:
            self.ready()

    def ready(self) -> None:
        """Take the target's keys and values of the tokens let through since the last draft."""
        if not self.late:
            return
        late, self.late = self.late, 0
        self._adopt()
        if not isinstance(self.cache, ViewCache):
            for layer in self.notes[-1][0]:
                follower(self.cache, layer).cache.follow(*self._lacking(layer))
            self._commit()
        elif self.stale or any(view.due(late) for view in self.cache.views.values()):
            self._choose(self.cache)
        else:
            for number, view in self.cache.views.items():
                view.catch_up(*self._lacking(number)[1:3])
        self.notes.clear()

    def _adopt(self, cache: EngineCache | None = None) -> None:
        """Layers with a window are the target's: they hold little, and see what it has seen."""
        late = self.whole.cache.seen - self.settled
        for mine, its in zip((cache or self.cache).others, self.whole.cache.others, strict=True):
            adopt(mine, its, late)

    def _lacking(self, layer: int) -> Heard:
        """What a layer computed for the tokens that stand, as if it had been in one pass."""
        return joined([standing(heard[layer], fresh) for heard, fresh in self.notes])

    def prepare(self, text: Text) -> None:
        self.ready()

    def _choose(self, cache: ViewCache) -> None:
        """With the query of the last token that stands."""
        cache.session.memo.clear()
        heard, fresh = self.notes[-1]
        for number, view in cache.views.items():
            q, _, _, call = heard[number]
            view.choose(q[:, :, fresh - 1], call)
        self.stale = False
        self.refresh.chosen()


def kept(cache: EngineCache, layer: int) -> Int[Tensor, "row chosen"]:
    """The positions of the tokens that a layer holds, in order; -1 before them in rows that hold fewer."""
    return follower(cache, layer).cache.parts[0].lane.position.sort(1).values


def standing(heard: Heard, fresh: int) -> Heard:
    """Of the first `fresh` tokens of a pass."""
    q, k, v, call = heard
    return q[:, :, :fresh], k[:, :, :fresh], v[:, :, :fresh], call


def joined(heard: Sequence[Heard]) -> Heard:
    """What was heard in several passes, as if it had been one."""
    if len(heard) == 1:
        return heard[0]
    q, k, v = (torch.cat([part[i] for part in heard], 2) for i in range(3))  # type: ignore[misc]
    return q, k, v, heard[0][3]
