"""What the layers of a cache share, and what an attention call brings along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakMethod, ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import memory
from kvengine.errors import CacheError
from kvengine.offload.placement._ahead import Ahead
from kvengine.policies.retention import Seen
from kvengine.rope import Rope
from kvengine.shifts import Shifts
from kvengine.text import Again, Text

if TYPE_CHECKING:
    from kvengine.lane import Lane

BROKEN = (
    "the last pass through the model, or a change of this cache since, broke off (interrupted, or out of memory) or goes on in "
    "another thread, and some layers took part in it while others did not. Give each thread a cache of its own; after a pass "
    "that broke off, call cache.reset() and give the whole text again"
)
FOREIGN = "this cache was made for another model; make one with EngineCache(model)"
UNJUDGED = (
    "an assisted turn broke off (interrupted, or out of memory) behind drafts that were still to be judged, and this cache holds "
    "them beside its text; call cache.reset() and give the whole text again"
)
HELD = (
    "this cache is held still for recorded steps (kvengine.compile_decode) and takes one token after the other; close() these "
    "steps first. If that broke off, call cache.reset() and give the whole text again"
)


class Call(NamedTuple):
    """One attention call's constants."""

    scale: float
    softcap: float | None = None
    sinks: Float[Tensor, "row group"] | None = None  # a logit that takes part in the softmax, without a value
    # The tokens that the model has each query read (`kvengine.named`).
    named: Int[Tensor, "row query chosen"] | None = None

    @property
    def bare(self) -> bool:
        """Whether it is the plain softmax."""
        return self.softcap is None and self.sinks is None and self.named is None

    @property
    def constants(self) -> tuple[float, float | None, Float[Tensor, "row group"] | None]:
        return self[:3]

    def of(self, tokens: slice) -> Call:
        """The call of some of its queries."""
        return self if self.named is None else self._replace(named=self.named[:, tokens])


class Parts(NamedTuple):
    """What a part of a pass is told of the others."""

    start: int  # tokens seen before the pass
    padding: Int[Tensor, "seq"]  # of each sequence, that comes in later parts
    single: Bool[Tensor, "seq"] | None = None  # whose only token is taken by itself, before the parts
    at: Int[Tensor, "seq"] | None = None  # where that is in the pass, while it is taken


@dataclass
class Session:
    """What the layers of one cache share."""

    prompt_end: int | None = None  # tokens after which the announced prompt ends
    turn: int | None = None  # tokens seen before the announced turn, whose first pass may hide some of them
    options: ref[Any] | None = None  # the last `generate`'s, which live as long as it runs
    following: bool = False  # tokens are taken one by one, not judged as a prompt
    recording: bool = False  # states are remembered, to roll back to
    lent: bool = False  # transformers' assisted decoding begins to record, which it never ends: the next turn does
    judging: int | None = None  # tokens seen before a pass that judges a draft, until that is taken back or stands
    dense: bool = False  # queries read everything, whatever the selection
    positions: bool = True  # positions of what a prompt's verdict left are remembered, even where a policy needs none
    without_ids: bool = False  # some tokens are none that ids name: a tuned prefix, vectors, what stands for an image
    coarse: bool = False  # sealed pages are read without what their representation calls fine
    rope: Rope | None = None
    ours: tuple[int, ...] | None = None  # the layers that the engine serves; None: each layer is alone
    ahead: Ahead = field(default_factory=Ahead)  # what tiers below the device share
    channels: set[tuple[int, int, bool]] = field(default_factory=set)  # of keys and values, that pages can hold
    # Prompts that are judged once all layers have read them, with what they measure. Lanes hold a session, and it none of them.
    waiting: list[tuple[ref[Lane], Seen, Tensor | None]] = field(default_factory=list)
    shifts: Shifts = field(default_factory=Shifts)  # of positions behind images, as the model has said
    text: Text = field(default_factory=Text)  # for a retention that has tokens read again: what they were made of
    due: Bool[Tensor, "seq"] | None = None  # the sequences that are to be replayed before those that wait are judged
    rest: dict[str, Any] | None = None  # of a pass that ends a prompt: what waits until that is judged
    again: Again | None = None  # while a replay runs: what its pass feeds
    heeded: bool = False  # somebody asks which sequences `generate` has ended, when it is over
    # Sequences that the running `generate` has ended: one more token is theirs, the one that ended them.
    ended: Bool[Tensor, "seq"] | None = None
    ends: list[int | None] | None = None  # of these, after how many ids of the text
    paused: Bool[Tensor, "seq"] | None = None  # those that were given it: what comes for them now is padding
    aside: Any = None  # what layers' states were when rows had been given it (`kvengine.hf.states.Aside`)
    # States to put back behind a part of a pass, what comes then, and where the pass began (`kvengine.hf.ragged`).
    ragged: Any = None
    parts: Parts | None = None  # of a pass that is read in parts: what is known of the others
    mask: list[bytes] | None = None  # of each row, which tokens are tokens, as the last pass on a CPU was told
    tree: Bool[Tensor, "node node"] | None = None  # the last tokens of a pass only look, each at these of the others
    memo: dict[Any, Any] = field(default_factory=dict)  # what a selection leaves for later layers, per pass
    loose: int = 0  # bytes of prompts' keys and values since what they left in the heap was handed back
    inferred: bool = False  # a pass ran in torch's inference mode; what it has written cannot be changed outside of it
    torn: bool = False  # a layer has begun to change, and not ended
    stepping: bool = False  # a pass is one of the steps for which the cache is held still
    reached: int = 1 << 30  # the last layer that began; so high that any layer begins the first pass
    before: int = 0  # tokens seen when the pass began
    led: int | None = (
        None  # the same, where tokens are taken that no layer has counted (`kvengine.hf.interrupted`, `.ragged`)
    )
    next: Int[Tensor, "1"] | None = None  # `position`, as it was last asked for
    next_of: tuple[int, torch.device] | None = None

    @property
    def generating(self) -> bool:
        """Whether `generate` runs, which adds ones to the mask."""
        return self.options is not None and self.options() is not None

    def taking(self, device: torch.device) -> Bool[Tensor, "seq 1"] | None:
        """The sequences whose token a decode step brings, where `generate` has ended others; None: all."""
        return None if self.paused is None or not self.generating else ~self.paused[:, None].to(device)

    def position(self, seen: int, device: torch.device) -> Int[Tensor, "1"]:
        """Where a token is that comes behind so many: one launch for all layers of a pass. Nobody writes into it."""
        if self.next is None or self.next_of != (seen, device):
            self.next, self.next_of = torch.arange(seen, seen + 1, dtype=torch.int32, device=device), (seen, device)
        return self.next

    def place_of(self, seen: int, k: Tensor) -> int | Int[Tensor, "1"]:
        """Where such a token of a decode step is, as `Tail.step` takes it: on a GPU it is told on the device."""
        return seen if k.is_cpu else self.position(seen, k.device)

    @property
    def last(self) -> int | None:
        """The last layer that the engine serves; None: each layer is alone."""
        return self.ours[-1] if self.ours else None

    def place(self, layer: int, layers: int) -> tuple[int, int]:
        """Which of the layers that the engine serves this one of so many is, and how many they are."""
        return (self.ours.index(layer), len(self.ours)) if self.ours else (layer, layers)

    def check_judged(self, seen: int) -> None:
        """Refuse to go on behind so many tokens if drafts of an assisted turn that broke off are among them."""
        if self.judging is not None and seen != self.judging:
            raise CacheError(UNJUDGED)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Layer after layer changes, outside of a pass. If that breaks off, the next pass notices."""
        torn, self.torn = self.torn, True
        yield
        self.torn = torn

    def begin(self, layer: int, seen: int) -> None:
        """A layer is about to take tokens.

        Raises:
            CacheError: an earlier pass broke off, and the layers no longer hold the same tokens.
        """
        if layer <= self.reached:
            self.check_judged(seen)
            self.before = seen
        sound = not self.torn and seen == self.before
        self.reached, self.torn = layer, True
        if not sound:
            raise CacheError(BROKEN)

    def passed(self, k: Tensor, v: Tensor) -> None:
        """A layer has taken these of a prompt into memory of its own, or dropped them."""
        if not k.is_cpu:
            return
        self.loose += k.nbytes + v.nbytes
        if self.loose >= memory.LOOSE:
            memory.trim()
            self.loose = 0


def weakly(read: Callable[[], tuple[Tensor, Tensor]]) -> Callable[[], tuple[Tensor, Tensor]]:
    """Reads keys and values of what a lane holds by then, and does not keep the lane."""
    found: Any = WeakMethod(read)
    return lambda: found()()  # type: ignore[no-any-return]
