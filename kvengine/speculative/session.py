"""A session is one model reading one cache, with a record of which tokens are in it.

Tokens are fed tentatively; `forget` takes back the last ones, `settle` makes the rest history. The cache is the
engine's, under any stack.

A session does not run the model itself: it asks for a `Pass`, and whoever drives it sends the logits back. `drive` runs
one sequence's passes as they come; `together.py` runs those of many sequences at once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, TypeVar
from weakref import ref

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from kvengine.errors import CacheError
from kvengine.hf.cache import EngineCache
from kvengine.hf.devices import first_device
from kvengine.hf.names import CACHE, PLACES
from kvengine.hf.places import is_told, placed
from kvengine.hf.recordable import knows_places
from kvengine.speculative.accept import ROOT, Draft
from kvengine.speculative.law import Text

Logits = Float[Tensor, "token vocab"]
Out = TypeVar("Out")
LATE = 8  # tokens; so many missing ones are read before drafting, fewer with the first token drafted


@dataclass
class Pass:
    """Read `tokens` with a session's model and cache.

    places: their positions, where these are not simply the next ones; sees: the last of them are the nodes of a tree,
    which look at these of each other and leave no trace. keep: logits of so many of the last ones are wanted, and those
    of others need not come (0: all are).
    """

    session: Session
    tokens: list[int]
    places: list[int] | None = None
    sees: Bool[Tensor, "node node"] | None = None
    keep: int = 0

    @torch.no_grad()
    def run(self) -> Logits:
        """The logits after each token that are wanted, in a pass of its own."""
        more: dict[str, Any] = {} if self.keep in (0, len(self.tokens)) else {"logits_to_keep": self.keep}
        if self.places is not None:
            more[PLACES] = torch.tensor([self.places], device=self.session.device)
        self.session.count(len(self.tokens))
        with self.session.reading(self.sees):
            return self.session.forward(self.tokens, **more)


Asks = Generator[Pass, Logits, Out]
"""Work that asks for passes on its way to a result."""


def drive(work: Asks[Out]) -> Out:
    """Run every pass by itself, as it is asked for."""
    try:
        ask = next(work)
        while True:
            ask = work.send(ask.run())
    except StopIteration as end:
        result: Out = end.value
        return result


@dataclass
class Session:
    """model: a decoder with a language-model head; cache: its own, empty at first.

    settled: how many tokens of the text are history in the cache; open: tokens fed since, still to be judged.
    passes: those asked for, fed: tokens in them; shares: the passes, one for several sessions being divided among them.
    settles_by_reading: whether to settle may take a pass.
    """

    settles_by_reading: ClassVar[bool] = False
    model: PreTrainedModel
    cache: EngineCache
    settled: int = 0
    open: list[int] = field(default_factory=list)
    guest: ref[Guest] | None = field(default=None, repr=False)  # no circle: it holds the cache
    passes: int = field(default=0, init=False)
    fed: int = field(default=0, init=False)
    shares: float = field(default=0.0, init=False)

    @torch.no_grad()
    def prefill(self, prompt: Sequence[int]) -> Logits:
        """Read the prompt in one pass; the logits after its last token, [1, vocab]."""
        logits = self.forward(prompt, logits_to_keep=1)
        self._record()
        self.settled = len(prompt)
        return logits

    def feed(self, tokens: Sequence[int]) -> Logits:
        """Append tokens tentatively; the logits after each."""
        return drive(self.feeding(tokens, len(tokens)))

    def feeding(self, tokens: Sequence[int], wanted: int) -> Asks[Logits]:
        """`feed` in steps, with the logits after so many of the last ones."""
        self.ready()
        self.open += tokens
        return (yield Pass(self, list(tokens), keep=wanted))[-wanted:]

    def feed_tree(self, tokens: Sequence[int], draft: Draft) -> Logits:
        return drive(self.feeding_tree(tokens, draft))

    def feeding_tree(self, tokens: Sequence[int], draft: Draft) -> Asks[Logits]:
        """Append `tokens` as a chain and read a tree under the last of them; the logits after that one and each node.

        Without `tokens` the tree hangs under what was fed last, and the logits are those after each node. The tree
        leaves no trace in the cache: the nodes that stand are fed again with the next pass, which costs a few more
        rows in a pass that runs anyway and works for every policy.
        """
        self.ready()
        known = self.settled + len(self.open)
        depths = [len(tokens) + draft.depth(node) for node in range(len(draft))]
        places = [*range(known, known + len(tokens)), *(known + depth for depth in depths)]
        wanted = len(draft) + bool(tokens)
        logits = yield Pass(self, [*tokens, *draft.tokens], places, ancestors(draft).to(self.device), wanted)
        self.open += tokens
        return logits[-wanted:]

    def align(self, text: Text, tail: Sequence[int]) -> list[int]:
        """Forget what is not on the way to text + tail, and return what is missing: one token at the least."""
        if self.guest is not None and (guest := self.guest()) is not None:
            guest.leave()
        wanted = text.since(self.settled, tail)
        same = 0
        while same < min(len(self.open), len(wanted) - 1) and self.open[same] == wanted[same]:
            same += 1
        self.forget(len(self.open) - same)
        return wanted[len(self.open) :]

    def forget(self, count: int) -> None:
        """Take back the last `count` open tokens."""
        if not 0 <= count <= len(self.open):
            raise CacheError(f"cannot take back {count} tokens: {len(self.open)} are open, the rest is settled")
        if count:
            self._rollback(count)
            del self.open[-count:]

    def settle(self, text: Text) -> None:
        """Make history of the open tokens that the text confirms."""
        if not self.open:
            return
        self.align(text, ())
        self._commit()
        self.settled += len(self.open)
        self.open = []

    def count(self, tokens: int, sessions: int = 1) -> None:
        """Take note of a pass over so many tokens of this session, and for so many sessions."""
        self.passes, self.fed, self.shares = self.passes + 1, self.fed + tokens, self.shares + 1 / sessions

    def ready(self) -> None:
        """Called before tokens are fed."""

    @torch.no_grad()
    def prepare(self, text: Text) -> None:
        """Called before this session drafts. What it missed of the text while it did not is read as a prompt is."""
        if self.open or len(text) - 1 - self.settled < LATE:
            return
        self.cache.session.recording = False  # what is not to be taken back needs no steps of one token
        self.forward(text.tokens[self.settled : -1], logits_to_keep=1)
        self._record()
        self._commit()
        self.settled = len(text) - 1

    @contextmanager
    def reading(self, sees: Bool[Tensor, "node node"] | None) -> Iterator[None]:
        """How the cache is read during a pass."""
        self.cache.session.tree = sees
        try:
            yield
        finally:
            self.cache.session.tree = None

    @property
    def device(self) -> torch.device:
        return first_device(self.model)

    @cached_property
    def placed(self) -> bool:
        """Whether the model goes by the places that a pass is told."""
        return knows_places(self.model)

    @cached_property
    def told(self) -> bool:
        """Whether every pass says where its tokens stand."""
        return is_told(self.model)

    def forward(self, tokens: Sequence[int], **options: Any) -> Logits:
        ids = torch.tensor([list(tokens)], device=self.device)
        if PLACES not in options:
            options |= placed(self.model, self.cache.seen, len(tokens), told=self.told)
        logits: Tensor = self.model(ids, **{CACHE: self.cache}, use_cache=True, **options).logits[0]
        return logits[-options.get("logits_to_keep", 0) :]  # some models (Qwen-Omni) pass over it

    def _record(self) -> None:
        self.cache.activate_past_recording()

    def _rollback(self, count: int) -> None:
        self.cache.rollback(count)

    def _commit(self) -> None:
        self.cache.commit()


@dataclass
class Guest(Session):
    """A session that drafts on another's cache, reading it more coarsely; its tokens are gone before the other's turn.

    The host's cache is the guest's: nothing is held twice, and the host's tokens replace the drafted ones by themselves.
    """

    whole: Session = field(kw_only=True)

    def __post_init__(self) -> None:
        self.whole.guest = ref(self)

    def prefill(self, prompt: Sequence[int]) -> None:  # type: ignore[override]
        """To be called when the host has read the prompt."""
        self.settled = len(prompt)

    def prepare(self, text: Text) -> None:
        """The host has read everything."""

    def leave(self) -> None:
        """Take back all that was drafted."""
        self.forget(len(self.open))

    def settle(self, text: Text) -> None:
        """The host has settled already."""
        self.settled = self.whole.settled

    @contextmanager
    def reading(self, sees: Bool[Tensor, "node node"] | None) -> Iterator[None]:
        self.cache.session.coarse = True
        try:
            with super().reading(sees):
                yield
        finally:
            self.cache.session.coarse = False


def ancestors(draft: Draft) -> Bool[Tensor, "node node"]:
    """[i, j]: node j is node i or above it.

    >>> ancestors(Draft(tokens=[5, 6, 7], parents=[-1, -1, 0])).int().tolist()
    [[1, 0, 0], [0, 1, 0], [1, 0, 1]]
    """
    sees = np.eye(len(draft), dtype=bool)
    for node, parent in enumerate(draft.parents):
        if parent != ROOT:
            sees[node] |= sees[parent]
    return torch.from_numpy(sees)
