"""A draft that is the target itself behind a cheaper cache, and hears what the target computes.

While the target reads the prompt, its queries, keys and values pass layer by layer through an `Ear`, so that the
cheaper cache fills without a pass of its own. While the target judges a draft, the ear keeps those of the few tokens
at hand; of the ones that stand, the cheaper cache then takes the target's keys and values in place of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from jaxtyping import Float
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.hf_cache import EngineCache, EngineLayer
from kvengine.session import Call
from kvengine.speculative.law import Text
from kvengine.speculative.session import Session
from kvengine.speculative.view import ViewCache

Heard = tuple[Tensor, Tensor, Tensor, Call]


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
    """Listens to every layer of a cache."""

    def __init__(self, cache: EngineCache) -> None:
        self.prompt = True
        self.followers: EngineCache | None = None
        self.heard: dict[int, Heard] = {}
        for number, layer in enumerate(cache.layers):
            cast(EngineLayer, layer).listener = partial(self.hear, number)

    def hear(self, layer: int, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        if self.prompt and self.followers is not None:
            follower(self.followers, layer).cache.follow(q, k, v, call)
        elif self.prompt:
            last = (x[:, :, -1:].clone() for x in (q, k, v))  # a view would hold on to the whole prompt's
            self.heard[layer] = (*last, call)  # type: ignore[assignment]
        else:
            self.heard[layer] = (q, k, v, call)


def follower(cache: EngineCache, layer: int) -> EngineLayer:
    return cast(EngineLayer, cache.layers[layer])


@dataclass
class Echo(Session):
    """A session of the target's model on a cheaper cache: a view of the target's, or a cache that follows it."""

    whole: Session = field(kw_only=True)
    refresh: Refresh = field(kw_only=True, default_factory=Refresh)

    def __post_init__(self) -> None:
        self.ear = Ear(self.whole.cache)
        if not isinstance(self.cache, ViewCache):
            self.ear.followers = self.cache

    def prefill(self, prompt: Sequence[int]) -> None:  # type: ignore[override]
        """To be called when the target has read the prompt: nothing is left to compute but a view's first choice."""
        self.ear.prompt = False
        self._record()
        self.settled = len(prompt)
        if isinstance(self.cache, ViewCache):
            self._choose(self.cache, 1)

    def settle(self, text: Text) -> None:
        """Take the target's keys and values of the tokens that it has let through."""
        drafted = len(self.open)
        self.align(text, ())
        stood, fresh = len(self.open), self.whole.settled - self.settled
        self.forget(stood)
        if fresh:
            self._adopt(fresh, stood, drafted)
        self.settled = self.whole.settled

    def _adopt(self, fresh: int, stood: int, drafted: int) -> None:
        if not isinstance(self.cache, ViewCache):
            for layer, (q, k, v, call) in self.ear.heard.items():
                follower(self.cache, layer).cache.follow(q[:, :, :fresh], k[:, :, :fresh], v[:, :, :fresh], call)
            self._commit()
        elif self.refresh.due(stood, drafted) or any(view.due for view in self.cache.views):
            self._choose(self.cache, fresh)
        else:
            for number, view in enumerate(self.cache.views):
                _, k, v, _ = self.ear.heard[number]
                view.catch_up(k[:, :, :fresh], v[:, :, :fresh])

    def _choose(self, cache: ViewCache, fresh: int) -> None:
        """With the query of the last token that stands."""
        cache.session.memo.clear()
        for number, view in enumerate(cache.views):
            q, _, _, call = self.ear.heard[number]
            view.choose(query(q, fresh - 1), call)
        self.refresh.chosen()


def query(q: Float[Tensor, "seq q_head token dim"], token: int) -> Float[Tensor, "seq q_head dim"]:
    return q[:, :, token]
