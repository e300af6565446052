"""Sessions of models some of whose layers keep states: linear attention, state spaces, convolutions (Qwen3-Next, Falcon-H1 …).

A recurrent state has absorbed a draft when it is rejected, and nothing gets it out again. So the states of the last settled
token are kept beside the cache, and whatever is taken back is taken back to there. The tokens among it that stood are missing
again then, and are read in front of the next draft: in the same pass, whose weights are read once for four tokens or for eight.
When LATE of them are missing they are read by themselves, lest every pass grow longer than the one before.

Against this, a pass for the tokens that stood after every draft that fell would read the weights twice a round.

A middle cannot take a target's states: by the time that a draft is judged they have absorbed all of it. So it has states and a
cache of its own, filled while the target reads the prompt, and reads for itself what stands from then on, as a small model does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from kvengine.hf.cache import EngineCache
from kvengine.hf.replay import given
from kvengine.hf.rewind import adopt, all_back
from kvengine.hf.states import Kept, has_states, take_over
from kvengine.speculative.echo import Ear
from kvengine.speculative.law import Text
from kvengine.speculative.session import LATE, Logits, Session


@dataclass
class StatefulSession(Session):
    """kept: the states after the last settled token."""

    settles_by_reading: ClassVar[bool] = True
    kept: Kept = field(default_factory=lambda: Kept([]), init=False, repr=False)

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Logits:
        logits = super().prefill(prompt)
        self.kept = Kept(self.cache.layers)
        return logits

    def forget(self, count: int) -> None:
        """Take back the last `count` open tokens, and for their sake all others that are open."""
        super().forget(len(self.open) if 0 < count <= len(self.open) else count)

    @torch.no_grad()
    def settle(self, text: Text) -> None:
        super().settle(text)
        missing = text.tokens[self.settled : -1]
        if len(missing) >= LATE:
            self.count(len(missing))
            self.forward(missing, logits_to_keep=1)
            self._commit()
            self.settled += len(missing)

    def _record(self) -> None:
        super()._record()
        for layer in self.cache.layers:
            if has_states(layer):  # these are kept instead
                layer.record_past = False  # type: ignore[union-attr]

    def _rollback(self, count: int) -> None:
        all_back(self.cache.layers, self.cache.session, count, self.cache.seen, self.kept)

    def _commit(self) -> None:
        super()._commit()
        self.kept.take()


@dataclass
class Apart(StatefulSession):
    """The target's weights behind a cheaper cache, and states of its own."""

    whole: Session = field(kw_only=True)

    def __post_init__(self) -> None:
        self.ear = Ear(self.whole.cache)
        self.ear.followers = self.cache

    def prefill(self, prompt: Sequence[int]) -> None:  # type: ignore[override]
        """To be called when the target has read the prompt: nothing is left to compute."""
        self.ear.leave()
        for mine, its in zip(self.cache.layers, self.whole.cache.layers, strict=True):
            if has_states(its):
                take_over(mine, its)
            else:
                adopt(mine, its, 0)
        given(self.model, self.cache, torch.tensor([list(prompt)], device=self.device))
        self._record()
        self.settled, self.kept = len(prompt), Kept(self.cache.layers)


def session_of(model: Any, cache: EngineCache) -> Session:
    """One for this model, with a cache of its own that is empty."""
    kind = StatefulSession if any(map(has_states, cache.layers)) else Session
    return kind(model, cache)
