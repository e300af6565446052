"""A lane of a layer that is held still: its step changes tensors in place and nothing else (`kvengine.fixed`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import page_answers
from kvengine.kernels.attention import attention
from kvengine.kernels.put_token import Limit, put_token
from kvengine.kernels.state import State
from kvengine.lane import Lane
from kvengine.pages import Pages
from kvengine.policies._budget import tokens, tokens_by_row
from kvengine.policies.retention import Seen
from kvengine.session import Call
from kvengine.strays import part
from kvengine.tokens import grouped


class Asleep(NamedTuple):
    """Rows of a lane that take no tokens any more."""

    rows: Int[Tensor, "some"]
    length: int  # slots of their tail
    taken: int  # tokens that had come when they fell asleep
    held: dict[int, Tensor]  # of the pinned tensors, by number, what steps to come would change for these rows


class FixedLane(Lane):
    """A lane whose step changes tensors in place and nothing else."""

    whole_tail = False

    def hold(self, more: int, now: Int[Tensor, "1"]) -> None:
        """Make room for `more` tokens. `now`: the position of the next one."""
        self.now, tail, stack = now, self.tail, self.stack
        self.clean_before, self.order_before, self.taken = tail.clean, (tail.placed, tail.lead, tail.next), 0
        tail.place()
        sealing = stack.paged and not stack.representation.joint
        self.fills = not stack.paged and self.limit is not None
        self.ring = stack.room + stack.page if sealing else 0
        self.counted = tail.clean and not (sealing or self.retention.decodes)
        if not stack.paged:  # of slots that an earlier hold has left, some have never held a token
            self.lengths = [(min(len(tail), self.seen), None)]
        self.longest, self.more, self.last = max(n for n, _ in self.lengths), more, int(now) + more
        self.end = self.lay_out(more)
        self.origin = None if self.fills else int(now) - self.end  # the position of what lies in slot 0
        if self.ring:
            self.sealed().spread(-(-(more + self.longest) // stack.page), tail.k, tail.v, spare=self.waits)
        if self.retention.decodes or self.ring:
            self.whole = False
        tail.clean = False
        self.counts = torch.zeros(len(self.first), dtype=torch.int32, device=now.device) + self.open()
        reads, self.limit_of_units = stack.selection.reads, None
        if reads is not None:
            budget = tokens_by_row(reads, self.prompt_length).contiguous()
            self.limit_of_units = Limit(budget, stack.selection.unit, torch.ones_like(budget))
        self.lasting_rule()  # is made here, and not in the step
        self.pins = list(self.pinned())
        self.asleep: list[Asleep] = []

    def lay_out(self, more: int) -> int:
        """Lay out the slots until they are let go: those of strays, to which no token comes, are the last. Where the next token's
        place is."""
        tail, self.strays = self.tail, part(self)
        before = [x[:, : self.strays] for x in tail.held()]
        end = tail.settle(self.longest, self.slots_for(more), self.ring > 0)
        if self.strays:
            self.behind = torch.arange(len(tail), device=self.now.device) >= self.ring
            for x, held in zip(tail.held()[: 3 + tail.scored], before, strict=False):
                x[:, self.ring :] = held
        return end

    def slots_for(self, more: int) -> int:
        """Slots that the tail needs until it is let go."""
        if self.ring:
            return self.ring + self.strays
        return max(len(self.tail), (self.limit or 0) + 1) if self.fills else len(self.tail) + more

    def pinned(self) -> Any:
        """(owner, name, tensor) of all that lasts from step to step."""
        for name in ("k", "v", "_position", "score"):
            if name not in vars(self.tail):  # a part of the keys
                continue
            yield vars(self.tail), name, vars(self.tail)[name]
        for name, x in self.notes.items():
            yield self.notes, name, x
        if self.pages is not None:
            held = vars(self.pages)
            for name in ("_table", "_position", "_score", "_alive"):
                yield held, name, held[name]
            for name, x in held["_summary"].items():
                yield held["_summary"], name, x

    def state(self) -> list[Tensor]:
        """Every tensor that a step reads and changes."""
        return [self.counts, *(x for _, _, x in self.pins)]

    def lasting(self) -> list[Tensor]:
        """Those of them that the same step would not leave alike if it were taken again.

        Keys and values it would, a token being written to the same place, unless it also merges others.
        """
        noted = [x for owner, _, x in self.pins if owner is self.notes and x.dim() > 2]
        return noted + [x for x in self.state() if self.retention.remerges or x.dim() < 3]

    def pin(self) -> None:
        """Where the step has put a new tensor in a place, copy it into the one that was there."""
        for owner, name, held in self.pins:
            if (new := owner[name]) is not held:
                held.copy_(new)
                owner[name] = held

    # what `Lane.step` asks, answered from the device

    def add(self, k: Tensor, v: Tensor, valid: Tensor | None) -> None:
        tail = self.tail
        put_token(
            k, v, tail.k, tail.v, tail.position, self.now, origin=self.origin, ring=self.ring, counts=self.counts,
            score=tail.score if tail.scored else None, limit=self.limit_of_units,
        )  # fmt: skip

    def at_once(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
        """A recorded step goes the general way."""

    @property
    def numbered(self) -> int:
        """Those to come too: slots tell which there are."""
        return self.last

    def newest(self, n: int) -> Int[Tensor, "query"]:
        return self.now

    def open_positions(self) -> Int[Tensor, "row slot"]:
        return self.tail.position.masked_fill(self.behind, -1) if self.strays else self.tail.position

    def judge_step(self, q: Tensor, valid: Tensor | None, mass: Tensor | None, call: Call) -> None:
        self.call = call
        if self.waits:
            self.ask(q, valid)  # `advance` judges
        else:
            super().judge_step(q, valid, mass, call)

    def moving(self) -> Float[Tensor, "row"]:
        """The note itself: there is no state to go back to."""
        return self.notes["threshold"]

    def near(self, q: Tensor, k: Tensor, v: Tensor, call: Call, mass: bool) -> State:
        if not self.counted or call.named is not None:
            return super().near(q, k, v, call, mass)
        more = {"softcap": call.softcap, "want_probs": mass, "lengths": self.counts, "wait": True}
        return attention(q, k, v, None, call.scale, **more)  # type: ignore[arg-type]

    def show(self, queries: Tensor, mass: Tensor | None, call: Call, prompt: bool) -> Seen:
        seen = super().show(queries, mass, call, prompt)
        return replace(seen, newest=self.now[0], jumbled=seen.jumbled and not self.ring)

    def select(self, pages: Pages, q: Tensor, call: Call) -> Int[Tensor, "row chosen"] | None:
        if call.named is not None:
            return super().select(pages, q, call)
        selection, limit = self.stack.selection, self.limit_of_units
        if selection.reads is None or limit is None or self.session.dense:
            return None
        budget, unit = tokens(selection.reads, self.prompt_most), selection.unit
        shortest = min(n for n, _ in self.lengths)
        least = min(shortest, self.stack.room) + 1 if self.ring else shortest + 1
        most = self.ring or self.longest + self.more
        if (isinstance(selection.reads, int) or not self.padded) and (budget - most) // unit >= pages.units:
            return None
        where = self.where(pages, call, lambda: limit.units, max(1, (budget - least) // unit), False)
        return page_answers.chosen(selection, q[:, :, 0], pages.summary, pages.alive, where)

    def seal(self) -> None:
        """Not here: `advance` seals."""

    # between two steps

    def pause(self, rows: Bool[Tensor, "row"]) -> None:
        """From now on these rows take no tokens: what steps write for them is undone by `release`."""
        tail, awake = vars(self.tail), []
        summary = None if self.pages is None else vars(self.pages)["_summary"]
        for n, some in self.lengths:
            every = torch.arange(len(rows), device=rows.device) if some is None else some
            awake.append((n, every[~rows[every]]))
            if not len(mine := every[rows[every]]):
                continue
            held = {}
            for i, (owner, name, x) in enumerate(self.pins):
                if not x.numel() or owner is summary:  # scores that nobody reads; what only sealing changes
                    continue
                if owner is tail and self.ring:
                    held[i] = x[mine][:, self.slots_in_order(self.ring)]
                elif owner is not tail or self.fills or name not in ("k", "v"):
                    held[i] = x[mine]
            self.asleep.append(Asleep(mine, n, self.taken, held))
        if self.ring:
            self.lengths = [(n, some) for n, some in awake if len(some)]

    def newest_slots(self, n: int) -> Int[Tensor, "slot"]:
        """Where the newest tokens of a ring lie, in order."""
        return (self.end - n + torch.arange(n, device=self.now.device)) % self.ring

    def slots_in_order(self, n: int) -> Int[Tensor, "slot"]:
        """Those of strays, which no token comes to, and of the newest tokens behind them."""
        return torch.cat([self.ring + torch.arange(self.strays, device=self.now.device), self.newest_slots(n)])

    def wake(self, k: Tensor, v: Tensor, position: Tensor, score: Tensor) -> None:
        """In the tensors of a tail: what rows that pause had there."""
        new = {"k": k, "v": v, "_position": position, "score": score}
        for one in self.asleep:
            for i, x in one.held.items():
                owner, name, _ = self.pins[i]
                if owner is vars(self.tail):
                    n = new[name].shape[1] - self.strays
                    new[name][one.rows] = torch.cat([x[:, : self.strays], x[:, x.shape[1] - n :]], 1)

    def skip(self) -> None:
        """What came for the rows that pause was padding."""
        by = torch.zeros_like(self.first)
        for one in self.asleep:
            by[one.rows] = self.taken - one.taken
        self.padded, self.due = True, 0
        if self.placing:
            self.move(by)
        if self.stack.paged and not self.ring:  # how much of the pages a row reads depends on what its tail holds
            self.tail.line_up(torch.arange(self.taken, device=by.device) >= self.taken - by[:, None])
            self.lengths = grouped(self.open() - by)

    def advance(self) -> None:
        """A token was taken: count it on the host too, and seal what is full."""
        self.since = self.seen
        self.seen += 1
        self.taken += 1
        self.end += 1
        self.lengths = [(n + 1, rows) for n, rows in self.lengths]
        self.saw = None
        if self.waits and self.seen >= self.due:
            self.judge_full(self.call)
            self.pin()
        if not self.ring:
            return
        if any(n >= self.ring for n, _ in self.lengths):
            self.note_reach()
            self.saw = None if self.saw is None else self.saw.told()  # the next step writes over its units
        page = self.stack.page
        for n, rows in self.lengths:
            if n >= self.ring:
                self.seal_ring(n, rows)
        self.lengths = [(n - page if n >= self.ring else n, rows) for n, rows in self.lengths]

    def seal_ring(self, length: int, rows: Int[Tensor, "row"] | None) -> None:
        tail, page = self.tail, self.stack.page
        rows = torch.arange(len(self.first), device=self.now.device) if rows is None else rows
        slots = (self.end - length + torch.arange(page, device=self.now.device)) % self.ring
        at = rows[:, None], slots
        score = tail.score[at] if tail.scored else tail.k.new_zeros(len(rows), page, dtype=torch.float32)
        self.sealed().place(rows, [tail.k[at], tail.v[at], tail.position[at], score])
        tail.position[at] = -1
        self.counts[rows] -= page

    def release(self) -> None:
        """As an eager step would have left it."""
        tail = self.tail
        for one in self.asleep:
            for i, x in one.held.items():
                if not self.ring or self.pins[i][0] is not vars(tail):
                    self.pins[i][2][one.rows] = x
        if self.ring:
            self.lengths += [(one.length, one.rows) for one in self.asleep]
            slots = self.slots_in_order(max(n for n, _ in self.lengths))
            k, v, position = (x[:, slots] for x in (tail.k, tail.v, tail.position))
            score = tail.score[:, slots] if tail.scored else tail.k.new_zeros(position.shape, dtype=torch.float32)
            self.wake(k, v, position, score)
            clean = self.clean_before and len(self.lengths) == 1 and not self.retention.decodes
            tail.replace(k, v, position, score, clean, self.stack.room + 2 * self.stack.page)
            self.sealed().gather_columns()
            if self.retention.decodes:
                self.tidy()
        elif not self.fills:
            tail.end, tail.clean = self.end, self.clean_before and not (self.retention.decodes or self.asleep)
        placed, lead, count = self.order_before
        tail.next = count + self.taken
        if self.asleep:
            self.skip()
        elif not placed and self.counted:
            tail.placed, tail.lead, tail._position = False, lead, tail._position[:, :0].clone()
