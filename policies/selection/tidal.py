"""TidalDecode (Yang et al., ICLR 2025, arXiv:2410.05076): choose tokens at two layers, read the same ones elsewhere.

    layers below `start`                       read everything
    layer `start`, and layer `reselect`        read everything, and choose: the tokens with the largest q . k
    the layers after each                      read what it chose, and the open tail

Each KV head hands its choice to the head of the same number in the layers below. `budget` is what the layers that
follow read; the `start` + 2 dense layers read all (so 4 of 32 layers set a floor of an eighth of the cache's traffic).

Defaults: start 2 and, as layer 13 of 32 in the paper's runs of Llama 3, reselect at 0.4 of the
depth; 512 tokens (its runs read 128 to 4096).

Text generated so has keys and values that come from sparse attention. `EngineCache.correct` computes them anew.

Differs from the official code: one choice per KV head, by the best of its query group, so that a token is read once for
the group (it chooses per query head); the newest tokens are always read and count (its mask may drop even the current
one); batches, and prompts in chunks (it takes a chunk for decoding); cache correction, which its repository does not
contain; layer numbers follow the model's depth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError, UnsupportedPolicy
from kvengine.policies import name_of
from kvengine.policies._budget import Budget, check_budget, check_choice, check_count
from kvengine.policies.retention.full import Full
from kvengine.policies.routing.uniform import Uniform
from kvengine.policies.selection import Fields, Selection, Where, best
from kvengine.policies.selection._chunks import Reduce

if TYPE_CHECKING:
    from kvengine.stack import Stack


@dataclass(frozen=True)
class Choice:
    """What a layer chose."""

    layer: int
    units: Int[Tensor, "row chosen"]


@dataclass(frozen=True)
class _Memo:
    """The choices of one lane, by token; those of earlier passes go when a new one begins."""

    choices: dict[int, Choice]

    def find(self, at: Where, chooser: int) -> Choice | None:
        """The choice for this token, if a layer of this part of the model has made it in this pass."""
        found = self.choices.get(at.token)
        return found if found is not None and chooser <= found.layer < at.layer else None

    def put(self, at: Where, units: Int[Tensor, "row chosen"]) -> None:
        for old in [token for token in self.choices if token < at.since]:
            del self.choices[old]
        self.choices[at.token] = Choice(at.layer, units)


@dataclass(frozen=True)
class Tidal(Selection):
    """Read in most layers the tokens that one of two layers chose.

    Args:
        budget: tokens read per decoded token and KV head in a layer that follows a choice, the open tail included, or a
            fraction of the prompt.
        start: the first layer that chooses; those before it read everything.
        reselect: the layer that chooses again: its number, or that as a fraction of the layers; 0 never.
        reduce: how the heads of a query group agree.

    Raises:
        UnsupportedPolicy: for a model without a layer behind `start`, or without layer `reselect`.
    """

    budget: Budget = 512
    start: int = 2
    reselect: int | float = 0.4
    reduce: Reduce = "max"

    def __post_init__(self) -> None:
        check_budget(self, budget=self.budget)
        check_count(self, start=self.start)
        check_choice(self, reduce=(self.reduce, ("max", "mean")))
        number = isinstance(self.reselect, int | float) and not isinstance(self.reselect, bool)
        if not number or not 0 <= self.reselect <= (1 if isinstance(self.reselect, float) else math.inf):
            raise PolicyError(
                f"Tidal: reselect={self.reselect!r} must be a layer's number (int) or a fraction of the depth (float)"
            )

    def check(self, stack: Stack) -> None:
        own = "drops tokens in each layer for itself", "gives each layer's heads tokens of their own"
        for policy, plain, does in zip((stack.retention, stack.routing), (Full, Uniform), own, strict=True):
            if not isinstance(policy, plain):
                raise UnsupportedPolicy(
                    f"'tidal' reads the same tokens in all layers, but {name_of(policy)!r} {does}; use "
                    f"{name_of(plain())!r}, or a selection that chooses in every layer (quest)"
                )

    def check_depth(self, layers: int) -> None:
        if self.start + 1 >= layers:
            lower = f"Use tidal(start={layers - 2}), or" if layers > 1 else "Use"
            raise UnsupportedPolicy(
                f"'tidal' chooses at layer {self.start} what the layers behind it read, and this model, of {layers} layers, has "
                f"none there: all would read everything. {lower} a selection that chooses in every layer (quest)"
            )
        if isinstance(self.reselect, int) and self.reselect >= layers:
            raise UnsupportedPolicy(
                f"tidal(reselect={self.reselect}): this model's layers are 0 to {layers - 1}; 0 chooses once, and a float is a "
                "fraction of the depth"
            )

    @property
    def reads(self) -> Budget:
        return self.budget

    def again(self, layers: int) -> int:
        """The layer that chooses again."""
        return self.reselect if isinstance(self.reselect, int) else round(self.reselect * layers)

    def chooser(self, layer: int, layers: int) -> int:
        """The layer whose choice this one follows, if it is one of the engine's; else the next that is."""
        again = self.again(layers)
        return again if self.start < again <= layer else self.start

    def scans(self, layer: int, layers: int) -> bool:
        return layer == self.chooser(layer, layers)

    def select(
        self, q: Float[Tensor, "row group dim"], summary: Fields, alive: Bool[Tensor, "row unit"], at: Where
    ) -> Int[Tensor, "row chosen"] | None:
        if at.layer < self.start:
            return None
        memo: _Memo = at.memo.setdefault(("tidal", at.lane), _Memo({}))
        found = memo.find(at, self.chooser(at.layer, at.layers))
        if found is not None:
            return found.units.to(q.device)  # a model may be split over several
        memo.put(at, best(self.wanted(q, at), alive, at))
        return None

    def wanted(self, q: Float[Tensor, "row group dim"], at: Where) -> Float[Tensor, "row unit"]:
        logits = found if (found := at.scan(q)) is not None else at.logits(q)
        if self.reduce == "max":  # a cap on logits (Gemma 2) keeps their order
            return logits.amax(1)
        return (logits if at.softcap is None else at.softcap * (logits / at.softcap).tanh()).mean(1)
