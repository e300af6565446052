"""The open tail: a row's newest tokens, exact, in preallocated slots.

    slots      0 . . . . start . . . . . . . end . . . . capacity
               (sealed)  |  tokens and holes  |   free

`position` tells what a slot holds: the token's index in its sequence, or -1 for none (padding, dropped). Positions are
stored only where they are not told by the order of slots, or by no more of it than is asked (`replace`). Slots outside
[start, end) are never read. Scores are stored only if they are `scored`; else they read as 0.

A tail is copied shallowly to remember a state (`copy.copy`). Appending writes only beyond `end`, where no remembered
state looks; every other change replaces tensors instead of writing into them when `shared` is set.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.graph import increment_version

from kvengine.kernels.gpu import step as gpu
from kvengine.kernels.gpu.fetched import Fetched
from kvengine.kernels.put_token import put_token
from kvengine.kernels.step import Merged, Rule, Slots, ready
from kvengine.tokens import moved, take

GROWTH = 8  # slots: the least that a tail grows by
PART = 64  # of its length: what a longer one grows by


class Tail:
    """Slots of all rows of a lane: k [row, slot, dim], v [row, slot, dim_v], position and score [row, slot].

    `scored`: whether somebody will read the scores of what is held. `placed`: whether positions are stored; if not,
    tokens come one after the other from position 0 on, and positions follow from the order of slots until they cannot.
    """

    def __init__(
        self,
        k: Float[Tensor, "row token dim"],
        v: Float[Tensor, "row token dim_v"],
        scored: bool = True,
        placed: bool = True,
    ) -> None:
        self.k, self.v = k[:, :0], v[:, :0]
        self._position = torch.empty(k.shape[0], 0, dtype=torch.int32, device=k.device)
        self.placed = placed
        self.lead = self.next = 0  # while not placed: slots of the row's first tokens, and the tokens that came so far
        self.exact = True  # positions are those of the text, for every slot
        self.score = torch.empty(k.shape[0], 0, dtype=torch.float32, device=k.device)
        self.start = self.end = 0
        self.scored = scored
        self.clean = True  # every slot in [start, end) holds a token
        self.shared = False  # a remembered state refers to these tensors
        self.strays = False  # some slots before a row's open tokens hold others (`kvengine.strays`)
        self.paged_slots = 0  # slots of pages beside these, where these grow for as long as tokens come
        self.ready: Slots | gpu.Slots | None = None  # these slots as `step` last saw them

    def __len__(self) -> int:
        return self.end - self.start

    @property
    def capacity(self) -> int:
        return self.k.shape[1]

    @property
    def span(self) -> slice:
        return slice(self.start, self.end)

    def held(self) -> tuple[Tensor, Tensor, Int[Tensor, "row token"], Float[Tensor, "row token"]]:
        """Views of k, v, position and score over the used slots."""
        s = self.span
        return self.k[:, s], self.v[:, s], self.position[:, s], self.scores(s)

    @property
    def position(self) -> Int[Tensor, "row slot"]:
        """The positions of all slots: those stored, or those that follow from the order."""
        if self.placed:
            return self._position
        # The last used slot holds the newest token, whose number is `next - 1`, and those before it come one by one; but for the
        # `lead` first ones, which a verdict has left in front of a gap.
        new, ahead = dict(dtype=torch.int32, device=self.k.device), self.next - self.end
        at = torch.arange(ahead, ahead + self.capacity, **new)  # type: ignore[call-overload]
        if self.lead:
            at[self.start : self.start + self.lead] = torch.arange(self.lead, **new)  # type: ignore[call-overload]
        return at.expand(len(self.k), -1)

    def count(self) -> Int[Tensor, "row"]:
        """Tokens held."""
        if self.clean:
            return torch.full((len(self.k),), len(self), device=self.k.device)
        return (self.position[:, self.span] >= 0).sum(1)

    def place(self) -> None:
        """Store positions from now on."""
        if not self.placed:
            self._position, self.placed = self.position.contiguous(), True

    def scores(self, span: slice) -> Float[Tensor, "row token"]:
        if self.scored:
            return self.score[:, span]
        return self.score.new_zeros(()).expand(len(self.score), span.stop - span.start)

    def reserve(self, more: int, spare: bool = False) -> None:
        """Room for `more` tokens: if there is none, move to the front of larger slots, with some to spare, or of these, if sealed
        tokens have left as many.

        The first tokens, a prompt as a rule, get the slots they need, and some to `spare` where more will come. Growing by a part
        of the length, that of pages `beside` them included, a token is moved `PART` times on average at most, however long the
        text becomes, and what is spare stays below that part (or `GROWTH` slots).
        """
        if self.end + more <= self.capacity:
            return
        need = len(self) + more
        some = max(GROWTH, (need + self.paged_slots) // PART)
        if need <= self.capacity and self.start >= some and not (self.shared or self.k.requires_grad):
            self.restart()
            return
        slots = need + some - 1 if spare or len(self) else need
        s = self.span
        self.keep(self.k[:, s], self.v[:, s], slots)
        if self.placed:
            self._position = moved(self._position[:, s], slots)
        if self.scored:
            self.score = moved(self.score[:, s], slots)
        self.start, self.end, self.shared = 0, need - more, False

    def restart(self) -> None:
        """Move to the front of these slots, which what was sealed has left free: so they stay where they are."""
        n, s = len(self), self.span
        unstored = {"position": not self.placed, "score": not self.scored}
        for name, x in self.tensors().items():  # each once, where one is a part of another
            if not unstored.get(name):
                x[:, :n] = x[:, s] if n <= self.start else x[:, s].clone()
        self.start, self.end = 0, n

    def keep(self, k: Tensor, v: Tensor, slots: int) -> None:
        """Have copies of these at the front of `slots` slots."""
        self.k, self.v = moved(k, slots), moved(v, slots)
        self.ready = None  # it would keep what was there until the next token is decoded, through a prompt

    def append(
        self,
        k: Float[Tensor, "row token dim"],
        v: Float[Tensor, "row token dim_v"],
        position: Int[Tensor, "row token"],
        full: bool,
    ) -> None:
        """Put tokens behind the used slots. `full`: no position is -1. The first ones stay where they are."""
        n = k.shape[1]
        if not full:
            self.place()
        self.reserve(n)
        if n == 1:  # a decoded token: one launch of a GPU instead of four
            self.put(k, v, position, self.end)
        else:
            s = slice(self.end, self.end + n)
            self.k[:, s], self.v[:, s] = k, v
            if self.placed:
                self._position[:, s] = position
            if self.scored:
                self.score[:, s] = 0
        self.end += n
        self.next += n
        self.clean &= full

    def step(
        self,
        q: Float[Tensor, "seq q_head 1 dim"],
        k: Float[Tensor, "seq *head 1 dim"],
        v: Float[Tensor, "seq *head 1 dim_v"],
        at: int | Int[Tensor, "1"],
        scale: float,
        fill: bool = False,
        rule: Rule | None = None,
        far: int | gpu.Far | Fetched | None = None,
        judged: int | Tensor | None = None,
    ) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
        """Append a token of position `at` and attend from it to all that is held: one call of the C kernels; on a GPU, where
        `at` lies there, launches that are remembered.

        Sequences with their heads, or rows: then q is [row, group, 1, dim], k and v have no axis of heads, and what comes
        back is [row, 1, group, dim_v].

        `fill`: put it into a free slot instead, as `fill` does. `rule`: then drop what that does not keep. `far`: pages to
        read too, see `Slots.step`. `judged`, on a GPU: the mean of what each token gets, its score, goes on, see `ongoing`.
        None, with nothing done, where they cannot.
        """
        writes = rule is not None or judged is not None
        if fill or isinstance(rule, Merged):
            self.own()
        elif writes:
            self.own_small()
        if fill or writes:
            self.place()
        if self.end == self.k.shape[1] and not fill:
            self.reserve(1)
        slots = self.slots()
        if slots is None:
            return None
        more = () if judged is None else (judged,)
        score = self.score if self.scored else None
        run: Any = slots.step  # at and far as the slots are
        out: Tensor | None = run(
            q, k, v, self.start, self.end, at, not self.clean, scale, fill, rule, far, score, *more
        )
        if out is not None:
            if fill or isinstance(rule, Merged):
                self.written()
            self.end += not fill
            self.next += 1
            self.clean &= rule is None
        return out

    def slots(self) -> Slots | gpu.Slots | None:
        """The slots, described to the C kernels, or for a GPU; None if they cannot serve them."""
        slots, position = self.ready, self._position if self.placed else None
        if slots is None or slots.keys is not self.k or slots.values is not self.v or slots.position is not position:
            slots = self.ready = (ready if self.k.is_cpu else gpu.Slots)(self.k, self.v, position)
        return slots

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether `step` can take this token."""
        slots = self.slots()
        return slots is not None and slots.takes(q, k, v)

    def fill(
        self, k: Float[Tensor, "row 1 dim"], v: Float[Tensor, "row 1 dim_v"], position: Int[Tensor, "row 1"]
    ) -> None:
        """Put one token into a free slot of each row; every row must have one."""
        self.place()
        self.own()
        self.put(k, v, position)
        self.written()
        self.next += 1

    def put(self, k: Tensor, v: Tensor, position: Tensor, slot: int | None = None) -> None:
        """Write one token into this slot, or into each row's first free one of those in use."""
        keys, values = self.k, self.v
        held, score = self._position if self.placed else None, self.score if self.scored else None
        if slot is None:
            s = self.span
            keys, values, held = keys[:, s], values[:, s], self._position[:, s]
            score = score if score is None else score[:, s]
        put_token(k, v, keys, values, held, position[:, 0], slot=slot, score=score)

    def written(self) -> None:
        """Used slots were written into by a kernel, which torch does not see; `watched` has to."""
        increment_version([self.k, self.v])

    def settle(self, tokens: int, slots: int, front: bool) -> int:
        """Take `slots` slots, all of them in use: those behind the newest `tokens` hold none. Where the free ones begin.

        `front`: move to the first slots whatever came before; if not, the slots in use stay in their order.
        """
        n = tokens if front else len(self)
        k, v, position, score = (x[:, x.shape[1] - n :] for x in self.held())
        self.replace(k, v, position, score, self.clean, slots)
        self.position[:, n:] = -1
        self.k[:, n:], self.v[:, n:] = 0, 0
        if self.scored:
            self.score[:, n:] = 0
        self.end = self.capacity
        return n

    def own(self) -> None:
        """Before writing into used slots: part from tensors that a remembered state refers to."""
        if self.shared:
            self.keep(self.k, self.v, self.capacity)
            self._position, self.score = self._position.clone(), self.score.clone()
            self.shared = False

    def judge(self, score: Float[Tensor, "row token"], keep: Bool[Tensor, "row token"] | None) -> None:
        """Set the scores of the used slots, and empty those that are not kept."""
        self.own_small()
        span = self.span
        if self.scored:
            self.score[:, span] = score
        if keep is not None:
            self.place()
            self._position[:, span].masked_fill_(~keep, -1)
            self.clean = False

    def own_small(self) -> None:
        if self.shared:
            self._position, self.score = self._position.clone(), self.score.clone()

    def move(self, by: Int[Tensor, "row"]) -> None:
        """Count each row's tokens as that many positions later."""
        self.place()
        at = self._position
        self._position = torch.where(at >= 0, at + by[:, None].to(at.dtype), at)

    def sort(self) -> None:
        """Have the used slots lie by the age of their tokens, behind those without one."""
        self.place()
        held = self.held()
        order = held[2].argsort(dim=1)
        k, v, position, score = (take(x, order) for x in held)
        self.replace(k, v, position, score, self.clean, self.capacity)

    def line_up(self, padding: Bool[Tensor, "row new"]) -> None:
        """Have each row's other slots move on over those of the newest that are padding, which then come first."""
        self.place()
        fresh = torch.zeros(len(padding), len(self), dtype=torch.bool, device=padding.device)
        fresh[:, len(self) - padding.shape[1] :] = padding
        order = (~fresh).to(torch.int8).argsort(dim=1, stable=True)
        held = [take(x, order) for x in self.held()]
        self.own()
        for x, new in zip((self.k, self.v, self._position, self.score), held, strict=True):
            if x is not self.score or self.scored:
                x[:, self.span] = new

    def rewrite(self, slot: Int[Tensor, "row"], k: Float[Tensor, "row dim"], v: Float[Tensor, "row dim_v"]) -> None:
        """A new key and value for one of each row's used slots."""
        self.own()
        at = torch.arange(len(k), device=k.device), self.start + slot
        self.k[at], self.v[at] = k.to(self.k.dtype), v.to(self.v.dtype)

    def replace(
        self,
        k: Tensor,
        v: Tensor,
        position: Tensor | None,
        score: Tensor,
        clean: bool,
        slots: int,
        lead: int = 0,
    ) -> None:
        """Hold these tokens instead, with room for `slots` in all.

        Without `position`, their order is all that is remembered: the first `lead` of them count as the row's first
        tokens, the others as its newest, one after the other, which puts none of them earlier than it was.
        """
        slots = max(slots, k.shape[1])
        self.keep(k, v, slots)
        self.placed, self.lead, self.exact = position is not None, lead, position is not None and self.exact
        self._position = self._position[:, :0] if position is None else moved(position.to(torch.int32), slots)
        if self.scored:
            self.score = moved(score.float(), slots)
        self.start, self.end, self.clean, self.shared = 0, k.shape[1], clean, False

    def shorten(self, n: int) -> None:
        """Forget the tokens of the last `n` slots."""
        self.end -= n
        self.next -= n

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given rows."""
        self.k, self.v, self._position, self.score = (x[index] for x in (self.k, self.v, self._position, self.score))
        self.shared, self.ready = False, None

    def tensors(self) -> dict[str, Tensor]:
        return {"k": self.k, "v": self.v, "position": self._position, "score": self.score}
