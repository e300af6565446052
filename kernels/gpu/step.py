"""One decoded token over contiguous slots on a GPU, and over pages beside them: its launches, made again for the next one.

The counterpart of what is described to C on a CPU (`kvengine.kernels.step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from kvengine.kernels import codecs
from kvengine.kernels.attention import attention
from kvengine.kernels.gpu import Notes, noted
from kvengine.kernels.gpu.fetched import Fetched
from kvengine.kernels.merge_states import merge_states, ongoing, received
from kvengine.kernels.paged_attention import paged_attention
from kvengine.kernels.put_token import put_token
from kvengine.kernels.state import State
from kvengine.kernels.step import Ends, Merged, Paid, Placed, Rule, Sealed
from kvengine.kernels.verdict import verdict

if TYPE_CHECKING:
    from kvengine.kernels.gpu.launches import Launches

END, LONG, FAR = 0, 1, 2
"""What changes from token to token: the slot that is written, how many are read, and how many slots of pages."""
LATER = Paid, Merged, Placed
"""Rules by which a token goes for each that comes, once there are as many as may be: for those before, nothing is noted."""
KINDS = 32
"""Of tokens, that are remembered at once: how many units are chosen goes to and fro as the tail is filled and sealed, and by
single tokens where these are the units."""


class Far:
    """Sealed pages that a token reads too, for as long as their memory is the same; `table` and `position` may have room left.

    `rebuilt`: what attends to them instead of `paged_attention`, where their keys are rebuilt (`Joint.reader`); it reads no other
    tensors than `fields`.
    """

    def __init__(
        self, fields: Mapping[str, Tensor], table: Tensor, position: Tensor, page: int, codec: str, dim_v: int,
        rebuilt: Callable[..., State] | None = None,
    ) -> None:  # fmt: skip
        self.fields, self.table, self.position = fields, table, position
        self.page, self.codec, self.dim_v, self.rebuilt = page, codec, dim_v, rebuilt
        self.units: Tensor | None = None
        self.columns, self.unit = 0, page

    def reading(self, columns: int, units: Tensor | None, unit: int) -> Far:
        """With these units of so many columns to read next (None: all pages)."""
        self.columns, self.units, self.unit = columns, units, self.page if units is None else unit
        return self

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides how it is launched, beside the number of slots; of chosen units nothing depends on how many there are."""
        return (id(self),) if self.units is None else (id(self), self.units.shape, self.units.dtype)

    @property
    def slots(self) -> int:
        """How many are read; 0 where they are chosen."""
        return self.columns * self.page if self.units is None else 0

    def attend(self, q: Tensor, scale: float) -> State:
        table, position = self.table[:, : self.columns], self.position[:, : self.columns * self.page]
        if self.rebuilt is not None:
            which = {"page": self.page, "units": self.units, "unit": self.unit}
            return self.rebuilt(q, self.fields["v"], table, position, **which, scale=scale, wait=True)
        return paged_attention(
            q, self.fields, table, position, page=self.page, scale=scale, units=self.units, unit=self.unit,
            codec=self.codec, dim_v=self.dim_v, wait=True,
        )  # fmt: skip

    def tensors(self) -> list[Tensor]:
        names = self.fields if self.rebuilt is not None else codecs.FIELDS[self.codec]
        return [self.table, self.position, *(self.fields[name] for name in names)]


class Token(NamedTuple):
    """What comes, where it goes, and what is asked of it: see `kvengine.kernels.step`. `at` lies on the device."""

    q: Tensor
    k: Tensor
    v: Tensor
    at: Tensor
    start: int
    end: int
    holes: bool
    scale: float
    fill: bool
    rule: Rule | None
    far: Far | Fetched | None
    score: Tensor | None
    judged: int | Tensor | None
    """Up to where what came before counts once in the mean of what each token gets, which is the `score`; None: it is not."""

    @property
    def slots(self) -> int:
        """How many are read."""
        return self.end - self.start + (not self.fill)

    @property
    def pages(self) -> int:
        """How many of pages."""
        return self.far.slots if isinstance(self.far, Far) else 0

    @property
    def kind(self) -> tuple[Any, ...]:
        """What decides how it is launched, beside the numbers of slots."""
        q, k, v = self.q, self.k, self.v
        rule: tuple[Any, ...] = (id(self.rule),)
        if isinstance(self.rule, Merged):  # its threshold is another at each time
            rule = id(self.rule.paid), self.rule.beta, self.rule.shrinks, self.rule.spares
        elif isinstance(self.rule, Sealed):
            alive = self.rule.alive
            rule = id(self.rule.ends), self.rule.position.data_ptr(), alive.data_ptr(), alive.shape[1]
        return (
            q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape, v.stride(), v.dtype, self.holes, self.scale,
            self.fill and self.start, rule, id(self.score), None if self.far is None else self.far.kind,
            self.judged if isinstance(self.judged, int) else id(self.judged),
        )  # fmt: skip

    @property
    def named(self) -> tuple[Any, ...]:
        """What the kind names by number, and so must not go."""
        return self.rule, self.far, self.score, self.judged


class Known(NamedTuple):
    """How tokens of a kind are launched that read more than `least` slots, and up to `most`; the same of pages."""

    least: int
    most: int
    far: tuple[int, int]
    launches: Launches | None
    named: tuple[Any, ...]

    def reads(self, n: int, far: int) -> bool:
        return self.least < n <= self.most and self.far[0] < far <= self.far[1]


class Done(NamedTuple):
    """What the general way has launched."""

    out: Tensor
    given: list[Tensor]
    """Tensors that are others at each time, in the order of `Slots.given`."""
    late: list[Tensor]
    """And those that come while the first of the launches run."""
    parts: list[State]
    mass: Tensor | None
    weighed: list[State]
    """What the token pays to the slots alone, if somebody asked."""


class Slots:
    """Slots that one token after the other is put into.

    What is launched for a token is noted. As long as the next ones are of its kind, and their number takes as many blocks, only
    slots and counts differ, and the memory of what comes and goes.
    """

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor | None) -> None:
        self.keys, self.values, self.position = keys, values, position
        self.rows, _, self.dim = keys.shape
        self.dtype, self.dim_v = keys.dtype, values.shape[2]
        self.sizes = self.rows * self.dim, self.rows * self.dim_v
        self.known: dict[tuple[Any, ...], Known] = {}
        self.missed = 0  # kinds in a row that did not come again: noting does not pay where each token has its own
        self.since, self.there = -1, [keys]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """None, to who copies what holds this: a copy has other slots, and notes for those."""
        return type(None), ()

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether this token can be put here."""
        dtype = self.dtype
        alike = q.dtype is dtype and k.dtype is dtype and v.dtype is dtype
        return alike and (k.numel(), v.numel()) == self.sizes and q.shape[-1] == self.dim and not self.learns(q, k, v)

    def learns(self, *given: Tensor) -> bool:
        return torch.is_grad_enabled() and any(x.requires_grad for x in (*given, self.keys, self.values))

    def here(self, start: int) -> list[Tensor]:
        """Keys, values and, if they are told, positions from this slot on."""
        if self.since != start:
            told = [] if self.position is None else [self.position]
            self.since, self.there = start, [x[:, start:] for x in (self.keys, self.values, *told)]
        return self.there

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, start: int, end: int, at: Tensor, holes: bool, scale: float,
        fill: bool = False, rule: Rule | None = None, far: Far | Fetched | None = None, score: Tensor | None = None,
        judged: int | Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """See `kvengine.kernels.step`. None, with nothing done, for what goes another way. `judged`: see `Token`."""
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # of a product's parts, rows lie apart
        token = Token(q, k, v, at, start, end, holes, scale, fill, rule, far, score, judged)
        kind, n = token.kind, token.slots
        known, pages = self.known.get(kind), token.pages
        new = known is None or not known.reads(n, pages)
        if isinstance(rule, LATER) and (far is not None or not fill):
            return None
        if not self.takes(q, k, v) if new else self.learns(q, k, v):
            return None
        if known is not None and not new and known.launches is not None:
            out = q.new_empty(q.shape[0], 1, q.shape[1], self.dim_v)
            late = far.arrive if isinstance(far, Fetched) else None
            if known.launches.again(self.given(token, q, k, v, out), (end, n, pages), late):
                self.missed = 0
                return out
        with noted() as notes:
            done = self.plainly(token)
        if new and self.missed < KINDS:
            self.missed += 1
            if len(self.known) >= KINDS:
                self.known.clear()
            self.known[kind] = self.remember(notes, done, token)
        return done.out

    def given(self, token: Token, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
        """What is another at each time: these of a token, and what lies elsewhere for another start or choice."""
        far = token.far
        units = [] if far is None or far.units is None else [far.units]
        moving = [token.rule.threshold] if isinstance(token.rule, Merged) else []
        there, weighing = self.here(token.start), []
        if token.judged is not None and token.score is not None:
            weighing = [there[1], token.score[:, token.start :]]
        return [q, k, v, token.at, out, *there, *units, *moving, *weighing]

    def plainly(self, token: Token) -> Done:
        """The general way."""
        q, start, n, at = token.q, token.start, token.slots, token.at
        asked, key = q.reshape(self.rows, -1, 1, self.dim), token.k.reshape(self.rows, 1, -1)
        value, there = token.v.reshape(self.rows, 1, -1), self.here(start)
        score = token.score if token.score is None or not token.fill else token.score[:, start : start + n]
        keys, values, *told = [x[:, :n] for x in there]
        place = told[0] if told else None
        if token.fill:
            put_token(key, value, keys, values, place, at, score=score)
        else:
            put_token(key, value, self.keys, self.values, self.position, at, slot=token.end, score=score)
        where = place if token.holes else None
        pays = isinstance(token.rule, Paid | Merged)
        parts = [attention(asked, keys, values, None, token.scale, want_probs=pays, position=where, wait=True)]
        late: list[Tensor] = []
        if isinstance(token.far, Fetched):
            late = token.far.arrive()
            parts.insert(0, token.far.attend(asked, token.scale, late))
        elif token.far is not None:
            parts.insert(0, token.far.attend(asked, token.scale))
        whole = merge_states(parts, dtype=q.dtype)
        mass = received(parts, whole) if pays else None
        if token.rule is not None and place is not None:
            # A score that no verdict asks for is that of all slots.
            verdict(token.rule, place, at, mass=mass, score=score if pays else None, keys=keys, values=values)
        out = whole.out.to(q.dtype).reshape(q.shape[0], 1, q.shape[1], self.dim_v)
        given, weighed = self.given(token, asked, key, value, whole.out), list[State]()
        given[5 : 5 + len(there)] = [keys, values, *told]
        if token.judged is not None and token.score is not None and place is not None:
            first, mean = values[..., :1], token.score[:, start : start + n]
            part = attention(asked, keys, first, None, token.scale, want_probs=True, position=place, wait=True)
            ongoing(part, merge_states([part]), mean, place, at, token.judged)
            weighed = [part]
            given[-2:] = [first, mean]
        return Done(out, given, late, parts, mass, weighed)

    def remember(self, notes: Notes, done: Done, token: Token) -> Known:
        """How to launch these again, if they are all that was done."""
        n, rule, far = token.slots, token.rule, token.far
        waiting = [x.waiting for x in (*done.parts, *done.weighed) if x.waiting is not None]
        count, weighs, pays = len(done.parts), bool(done.weighed), done.mass is not None
        more = (rule is not None) + pays + isinstance(rule, Merged) + 3 * weighs
        pages, beside = token.pages, (-1, 0)
        if len(notes) != 2 + count + more or len(waiting) != count + weighs:
            return Known(n - 1, n, (pages - 1, pages), None, token.named)
        from kvengine.kernels.gpu.launches import remembered  # which needs Triton

        held = [self.keys, self.values, self.position, token.score, *(() if far is None else far.tensors())]
        held += [w.turn for w in waiting]
        if isinstance(rule, Sealed):
            held, rule = [*held, rule.position, rule.alive], rule.ends
        numbers = [(1, "columns", LONG), (1 + count, "columns2", LONG)]
        numbers.append((0, "slots", LONG) if token.fill else (0, "at", END))
        if far is None:
            numbers.append((1 + count, "columns", LONG))
        if pages:
            numbers += [(2, "columns", FAR), (1 + count, "columns", FAR)]
            first = (pages - 1) // (size := notes[2].named["BLOCK"]) * size
            beside = first, first + size
        rule = rule.paid if isinstance(rule, Merged) else rule
        if rule is not None:
            held += [x for x in rule if isinstance(x, Tensor)]
        block = 1 if isinstance(rule, LATER) else notes[1].named["BLOCK"]  # their own memory is by the number of slots
        if isinstance(rule, Ends):
            numbers.append((2 + count, "slots", LONG))
        if weighs:
            held += [token.judged] if isinstance(token.judged, Tensor) else []
            last = len(notes) - 3
            numbers += [(last, "columns", LONG), (last + 2, "columns", LONG)]
            numbers += [(last + 1, name, LONG) for name in ("columns", "columns2")]
            block = math.gcd(block, notes[last].named["BLOCK"], notes[last + 2].named["BLOCK"])
        least = (n - 1) // block * block
        scores = waiting[-1].scores if weighs else None
        most = {} if scores is None else {id(scores): scores.numel() // n * (least + block)}
        launches = remembered(notes, done.given, [x for x in held if x is not None], numbers, most, done.late)
        return Known(least, least + block, beside, launches, token.named)
