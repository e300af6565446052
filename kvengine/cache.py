"""A layer's cache: its KV heads, split into lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from kvengine import answers
from kvengine.errors import CacheError, UnsupportedPolicy
from kvengine.gradients import watched
from kvengine.heads import Heads, check_batch, check_layer_back, check_settled, in_head_order, quick
from kvengine.lane import Lane
from kvengine.readers import Nodes, Prompt, Readers, Taken
from kvengine.replay import answer, check_known, judge_together
from kvengine.resuming import goes_on, part_of, resume, singles
from kvengine.session import BROKEN, HELD, Call, Session
from kvengine.stack import Stack
from kvengine.tokens import ordered

if TYPE_CHECKING:
    from kvengine.fixed import FixedLayer

Stock = Callable[[Tensor, Tensor], Tensor]


class LayerCache:
    """What one layer keeps of every sequence, and how a query reads it.

    Row r of a lane is KV head `r % heads` of sequence `r // heads`, counted within the lane.
    """

    inner: int | None = None
    """Values are so many first channels of the keys (set before the first token; an attribute of the layers it is for)."""
    named = False
    """The model names the tokens that are read (`Call.named`)."""

    def __init__(self, stack: Stack, layer: int, layers: int, session: Session | None = None, readers: int = 0) -> None:
        """`readers`: later layers of the model that read what this one holds (`kvengine.readers`)."""
        self.stack, self.layer, self.layers = stack, layer, layers
        self.session = session or Session()
        self.readers = Readers(readers)
        self.parts: list[Heads] = []
        self.fixed: FixedLayer | None = None  # while held still
        self.seen = 0
        self.sequences = self.heads = 0

    def open(self, k: Float[Tensor, "seq head token dim"], v: Float[Tensor, "seq head token dim_v"]) -> None:
        if (found := (k.shape[3], v.shape[3], self.inner is not None)) not in self.session.channels:
            self.stack.check_channels(*found)  # where the model could not be tried when it was patched
            self.session.channels.add(found)
        self.sequences, self.heads = k.shape[:2]
        parts, routing, at = [], self.stack.routing, (self.layer, self.layers)
        groups = routing.lanes(*(at if routing.numbered else self.session.place(*at)), self.heads)
        for number, (members, retention) in enumerate(answers.lanes(routing, groups, self.heads)):
            index = None if len(members) == self.heads else torch.tensor(members, device=k.device)
            run = slice(members[0], members[-1] + 1)
            mine = (k, v) if index is None else (k[:, index], v[:, index])
            choice = self.stack.retention if retention is None else retention
            stack, prefill = self.stack.within(choice), self.stack.routing.prefill(retention)
            stack = stack if prefill is None else replace(stack, prefill=prefill)
            rows, part = (mine[0].flatten(0, 1), mine[1].flatten(0, 1)), len(members) / self.heads
            lane = Lane(
                stack, choice, self.layer, self.layers, number, self.session, *rows, len(members), part, self.inner
            )
            parts.append(Heads(lane, index, run if run.stop - run.start == len(members) else None))
        self.parts = parts  # not one by one: if that breaks off, the next pass makes them all

    def forward(
        self,
        q: Float[Tensor, "seq q_head token dim"],
        k: Float[Tensor, "seq head token dim"],
        v: Float[Tensor, "seq head token dim_v"],
        call: Call,
        valid: Bool[Tensor, "seq token"] | None = None,
        stock: Stock | None = None,
    ) -> Float[Tensor, "seq token q_head dim_out"]:
        """Add tokens, and attend to what is held as their queries would; dim_out is dim_v, unless `stock` answers.

        Args:
            q, k, v: the new tokens' queries, keys and values, rotated as the model wants them.
            call: scale, softcap and sink logits ([head, group]).
            valid: which of the new tokens are tokens, not padding; None if all are.
            stock: the model's own attention of `q` over given keys and values [seq, head, held, dim], with its own
                mask; used wherever everything seen is still there in order, so that a prompt costs and gives the same.
                Of latents it makes values that may have another width than they: dim_out is theirs then.
        """
        if self.fixed is not None:
            return self.fixed.step(q, k, v, call)
        if call.bare and q.shape[2] == 1 and valid is None:
            out = self.quick(q, k, v, call.scale)
            if out is not None:
                return out
        if not self.parts:
            self.open(k, v)
        check_batch(self, k)
        if self.session.again is not None:
            return answer(self, q, k, v, call, self.session.again)
        self.session.begin(self.layer, self.seen)
        self.readers.begin(part.lane for part in self.parts)
        out = self.answer(q, k, v, call, valid, stock)
        self.session.torn = self.session.due is not None
        return out

    def answer(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, valid: Tensor | None, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_out"]:
        if self.session.tree is not None:
            if self.named:
                raise UnsupportedPolicy(
                    "drafts that are trees cannot look where the model names what is read; use chains"
                )
            return self.branch(q, k, v, call, valid, self.session.tree.to(k.device))
        n = k.shape[2]
        prompt = self.prompt_tokens(n)
        if prompt:
            check_known(self, n)
        parts = self.session.parts
        if parts is not None and parts.single is not None:
            return part_of(self, q, k, v, call, valid, parts.single.to(k.device), parts)
        single = singles(self, valid) if prompt == n else None
        if single is not None and valid is not None:
            return resume(self, q, k, v, call, valid, single)
        if not 0 < prompt < n:
            return self.enter(q, k, v, call, valid, stock) if prompt else self.take(q, k, v, call, valid, stock)
        found = []
        for part, run in ((slice(0, prompt), self.enter), (slice(prompt, n), self.take)):
            if self.session.waiting:
                raise UnsupportedPolicy(
                    f"'{self.stack}' judges a prompt when every layer has read it, so what follows must come in a pass of "
                    "its own, and an assistant's or a look-up's first draft does not. Generate without these, or let the "
                    "policy divide its budget evenly (d2o(shares='even'))"
                )
            tokens = q[:, :, part], k[:, :, part], v[:, :, part]
            found.append(run(*tokens, call.of(part), None if valid is None else valid[:, part], None))
        return torch.cat(found, 1)

    def quick(
        self,
        q: Float[Tensor, "seq q_head 1 dim"],
        k: Float[Tensor, "seq head 1 dim"],
        v: Float[Tensor, "seq head 1 dim_v"],
        scale: float,
    ) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
        """`forward` for a decoded token, by the shortest way; None, with nothing taken, where that is not open.

        On a CPU it is one call of the C kernels, and needs one lane that holds all heads under a policy that C knows. On a GPU
        (`decode`) it saves the host's time alone, and is open to every policy, unless later layers read this one's keys.
        """
        session = self.session
        if not self.parts or self.fixed is not None or session.tree is not None or session.again is not None:
            return None
        if not k.is_cpu:
            return self.decode(q, k, v, scale)
        first, lane, end = self.parts[0], self.parts[0].lane, session.prompt_end
        if first.index is not None or (end is not None and self.seen < end):
            return None
        alone = lane.plain or ((lane.rolls or lane.pays or lane.reads) and not self.readers.count)
        if not alone or k.shape[0] != self.sequences:
            return None
        session.begin(self.layer, self.seen)
        self.readers.begin([lane])
        out = lane.quick(q, k, v, scale)
        self.seen += out is not None  # before the pass counts as whole: Control-C may come in between
        session.torn = out is not None and session.due is not None
        return out

    def decode(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Float[Tensor, "seq 1 q_head dim_v"] | None:
        """`quick` on a GPU."""
        held = self.parts[0].lane.tail.k
        other = k.shape[:2] != (self.sequences, self.heads) or (k.dtype, k.device) != (held.dtype, held.device)
        if other or self.readers.count or self.prompt_tokens(1):
            return None
        self.session.begin(self.layer, self.seen)
        out = quick(self.parts, q, k, v, scale)
        self.seen += out is not None
        out = self.take(q, k, v, Call(scale), None, None) if out is None else out
        self.session.torn = self.session.due is not None
        return out

    def prompt_tokens(self, n: int) -> int:
        """How many of the next `n` tokens belong to a prompt."""
        if self.session.prompt_end is not None and self.seen < self.session.prompt_end:
            # What comes with a prompt is part of it, as a soft prompt's vectors are, unless drafts are to be taken back.
            return min(n, self.session.prompt_end - self.seen) if self.session.recording else n
        if self.seen == 0:
            return n
        return 0 if n == 1 or self.session.following or self.session.recording else n

    def ends_prompt(self) -> bool:
        return self.session.prompt_end is None or self.seen >= self.session.prompt_end

    def enter(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        call: Call,
        valid: Tensor | None,
        stock: Stock | None,
        resumed: Bool[Tensor, "seq"] | None = None,
    ) -> Float[Tensor, "seq token q_head dim_out"]:
        """Tokens of a prompt. Sequences that have `resumed` took one already."""
        out, dense, asked = None, None, self.each(q, call)
        masks = [None if valid is None else self.by_row(valid, part) for part in self.parts]
        orders = [part.lane.order_for(mask) for part, mask in zip(self.parts, masks, strict=True)]
        # The model's own attention reads what is there before any of it moves.
        moved = any(order is not None for order in orders)
        moved = moved or any(part.lane.shifts(mask) for part, mask in zip(self.parts, masks, strict=True))
        if stock is not None and self.exact and (moved if self.whole else not self.seen):
            out = stock(*(dense := self.with_new(k, v)))
        self.seen += k.shape[2]
        for i, ((part, grouped, rows), mask, order) in enumerate(zip(asked, masks, orders, strict=True)):
            asked[i] = part, ordered(grouped, order), rows
            mask = mask if mask is None or order is None else mask.gather(1, order)
            took = None if resumed is None else self.by_row(resumed[:, None], part)[:, 0]
            part.lane.enter(ordered(part.pick(k), order), ordered(part.pick(v), order), mask, order is not None, took)
            part.lane.observe(asked[i][1], rows, mask)
        if out is None and stock is not None and self.whole and self.exact:
            out = watched(stock(*(dense := self.contents())), self.parts[0].lane.tail)
        if out is None:
            # In one expression: what lanes answered is as large as the queries, and would stay while they judge.
            out = self.gather(
                q,
                [
                    ordered(part.lane.read(grouped, rows), order if order is None else order.argsort(1))
                    for (part, grouped, rows), order in zip(asked, orders, strict=True)
                ],
            )
        if self.readers.count:
            self.readers.moments.append(Prompt(self, k.shape[2], dense, orders))
        if self.ends_prompt():
            for part, grouped, rows in asked:
                part.lane.finish(grouped, rows)
            if self.session.waiting and self.session.last in (None, self.layer):
                judge_together(self.session)
        self.session.passed(k, v)
        return out

    def hide(self, hidden: Bool[Tensor, "seq earlier"]) -> None:
        """Tokens among those seen are none, by a later mask: rows of a batch that had ended while others were generated.

        Raises:
            CacheError: it is not known any more which of those that are held these are; or an earlier pass broke off.
        """
        for part, gone in zip(self.parts, self.gone(hidden), strict=False):
            if gone is not None:
                part.lane.hide(gone)

    def gone(self, hidden: Bool[Tensor, "seq earlier"]) -> list[Bool[Tensor, "row slot"] | None]:
        """What `hide` would drop of each lane, or its refusal, with nothing done."""
        if self.session.torn:
            raise CacheError(BROKEN)
        if goes_on(self):  # and was told before; by its mask, what was taken already is yet to come
            return []
        return [part.lane.gone(self.by_row(hidden, part)) for part in self.parts]

    def store(self, k: Tensor, v: Tensor, valid: Bool[Tensor, "seq token"] | None) -> None:
        """Tokens of a cache that keeps everything, whose queries are answered elsewhere."""
        if not self.parts:
            self.open(k, v)
        check_batch(self, k)
        self.session.begin(self.layer, self.seen)
        self.seen += k.shape[2]
        for part in self.parts:
            part.lane.enter(part.pick(k), part.pick(v), None if valid is None else self.by_row(valid, part))
        self.session.passed(k, v)
        self.session.torn = False

    def take(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, valid: Tensor | None, stock: Stock | None
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        """Tokens taken as in decoding."""
        self.seen += k.shape[2]
        out, steps = [], self.steps()
        for (part, grouped, rows), mine in zip(self.each(q, call), steps, strict=True):
            mask = None if valid is None else self.by_row(valid, part)
            out.append(part.lane.take(grouped, part.pick(k), part.pick(v), mask, rows, steps=mine))
        if self.readers.count:
            self.readers.moments.append(Taken(steps))
        return self.gather(q, out)

    def steps(self) -> list[Any]:
        """For each lane, where to leave the states that its steps have read, if somebody will read them."""
        return [[] if self.readers.count else None for _ in self.parts]

    def branch(
        self, q: Tensor, k: Tensor, v: Tensor, call: Call, valid: Tensor | None, tree: Bool[Tensor, "node node"]
    ) -> Float[Tensor, "seq token q_head dim_v"]:
        """Take the tokens before the nodes of a tree, and let the nodes look: they are not added."""
        n = k.shape[2] - len(tree)
        first = [self.take(q[:, :, :n], k[:, :, :n], v[:, :, :n], call, valid, None)] if n else []
        last = [
            part.lane.look(grouped, part.pick(k[:, :, n:]), part.pick(v[:, :, n:]), tree, rows)
            for part, grouped, rows in self.each(q[:, :, n:], call)
        ]
        if self.readers.count:
            self.readers.moments.append(Nodes(k[:, :, n:], v[:, :, n:], tree))
        return torch.cat([*first, self.gather(q[:, :, n:], last)], 1)

    def follow(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> None:
        """Add tokens that another cache of the same model attends for: `forward` without the attention of a prompt."""
        if not self.parts:
            self.open(k, v)
        if self.prompt_tokens(k.shape[2]):
            self.enter(q, k, v, call, None, lambda k, v: v)
        else:
            self.take(q, k, v, call, None, None)
        self.session.torn = self.session.due is not None
        self.readers.end(part.lane for part in self.parts)

    def each(self, q: Tensor, call: Call) -> list[tuple[Heads, Tensor, Call]]:
        """Every lane with its queries [row, group, token, dim] and its call."""
        grouped = q.unflatten(1, (self.heads, -1))
        found = []
        for part in self.parts:
            sinks = call.sinks
            if sinks is not None:
                mine = sinks if part.index is None else sinks[part.index]
                sinks = mine.repeat(self.sequences, 1)
            named = None if call.named is None else self.by_row(call.named, part)
            found.append((part, part.pick(grouped), Call(call.scale, call.softcap, sinks, named)))
        return found

    def by_row(self, x: Shaped[Tensor, "seq token *more"], part: Heads) -> Shaped[Tensor, "row token *more"]:
        return x.repeat_interleave(part.lane.heads, 0)

    def gather(self, q: Tensor, outs: list[Tensor]) -> Float[Tensor, "seq token q_head dim_v"]:
        """The lanes' outputs, heads back in their places."""
        b, hq, n, _ = q.shape
        if n > 1:  # as models read it: laid out otherwise, they copied it once more
            apart = [out.unflatten(0, (b, -1)).permute(0, 3, 1, 2, 4) for out in outs]
            if len(apart) == 1:
                return apart[0].flatten(2, 3).contiguous()
            whole = q.new_empty(b, n, self.heads, hq // self.heads, outs[0].shape[-1], dtype=outs[0].dtype)
            for part, out in zip(self.parts, apart, strict=True):
                whole[:, :, part.run or part.index] = out
            return whole.flatten(2, 3)
        if len(outs) == 1:
            return outs[0].reshape(b, hq, 1, outs[0].shape[-1]).transpose(1, 2)
        return in_head_order(self.parts, outs, b, self.heads).flatten(1, 2).transpose(1, 2)

    @property
    def exact(self) -> bool:
        """Whether a prompt is read as the model reads it."""
        return all(part.lane.stack.prefill.exact for part in self.parts)

    @property
    def whole(self) -> bool:
        """Whether one lane holds everything seen, in order."""
        return len(self.parts) == 1 and self.parts[0].lane.whole

    def contents(self) -> tuple[Float[Tensor, "seq head token dim"], Float[Tensor, "seq head token dim_v"]]:
        """Keys and values of everything seen, in order; only while every lane is whole."""
        held = [part.lane.tail.held()[:2] for part in self.parts]
        k, v = (in_head_order(self.parts, list(x), self.sequences, self.heads) for x in zip(*held, strict=True))
        return k, v

    def with_new(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """`contents`, and behind them these."""
        if not self.seen:
            return k, v
        before = self.contents()
        return torch.cat([before[0], k], 2), torch.cat([before[1], v], 2)

    def commit(self) -> None:
        for part in self.parts:
            part.lane.commit()

    def rollback(self, n: int) -> None:
        """Forget the last `n` tokens.

        Raises:
            CacheError: they were not recorded, and the policy has acted on them.
        """
        check_layer_back(self, n)
        if n == self.seen:  # of a text of which nothing stays, whatever a policy has dropped
            self.parts = []
        for part in self.parts:
            part.lane.rollback(n)
        self.seen -= n

    def check_free(self) -> None:
        """Refuse what would move its tensors, or copy them, while it is held still."""
        if self.fixed is not None:
            raise CacheError(HELD)

    def rows(self, sequences: Int[Tensor, "chosen"]) -> None:
        """Become the given sequences, in that order."""
        check_settled(self)
        for part in self.parts:
            heads = part.lane.heads
            index = (sequences[:, None] * heads + torch.arange(heads, device=sequences.device)).flatten()
            part.lane.rows(index)
        self.sequences = len(sequences)
