"""When a lane's retention judges: at a prompt's end, and while decoding.

Most methods that judge while decoding do so after every token. One that `waits` does where a row is full
(`Retention.full`), by the last queries, which are noted as they come. Whether a row is full is a matter of what it holds
and of nothing else; that none can be before `due` saves looking.

    a prompt's end   finish -> conclude -> settle      (`kvengine.sealing`: what is dropped, merged, compacted, sealed)
                            |  waits for all layers, where they share a budget or replay (`kvengine.replay`), then conclude
    a decoded token  judge_step -> judge, or drop      by `keep`, or in place by a rule that kernels know
                     judge_step -> judge_full -> judge, compact        of one that waits
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, cast
from weakref import ref

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import answers
from kvengine.compaction import fill_up
from kvengine.evidence import Evidence
from kvengine.kernels.step import Ends, Merged, Paid, Placed, Rule, Sealed
from kvengine.kernels.verdict import verdict
from kvengine.policies._budget import tokens_by_row
from kvengine.policies.retention import Retention, Seen
from kvengine.session import Call
from kvengine.tokens import behind

if TYPE_CHECKING:
    from kvengine.lane import Lane
    from kvengine.pages import Pages


def waits(retention: Retention) -> bool:
    """Whether it judges where a row is full, not after every decoded token."""
    return retention.decodes and type(retention).full is not Retention.full


class Verdicts(Evidence):
    """The part of a lane that has its retention judge."""

    @property
    def judges(self) -> bool:
        return type(self.retention).keep is not Retention.keep

    def finish(self, q: Float[Tensor, "row group query dim"], call: Call) -> None:
        """The prompt has ended: judge it, and seal what overflows the tail."""
        self.prompt_most, idle = int(self.prompt_length.max()), self.idle
        if self.judges:
            # Not a view: it would hold the whole prompt's queries for as long as this layer waits for the others.
            window = self.window if self.window is not None else q[:, :, -1:].clone()
            seen, replays = self.show(window, self.mass, call, prompt=True), self.retention.replay is not None
            seen = seen if replays else self.scored(seen)
            measure = None if replays else self.retention.measure(seen)
            if measure is None and not replays:
                self.conclude(seen)
            else:
                self.session.waiting.append((ref(cast("Lane", self)), seen, measure))
        elif self.stack.paged:
            self.settle(self.weighed(self.show(q, None, call, prompt=True)), None)
        self.window = self.mass = self.units = self.asked = self.saw = None
        self.end_judged(idle)
        self.reading = False

    def scored(self, seen: Seen) -> Seen:
        """With the retention's score; rows without a token in this prompt keep what they had."""
        known, idle = seen, self.idle
        if not self.retention.remembers:  # saliency may be stored, of which the retention knows nothing
            known = replace(seen, score=torch.zeros_like(seen.score))
        score = answers.score(self.retention, known)
        return replace(seen, score=score if idle is None else torch.where(idle[:, None], seen.score, score))

    def conclude(self, seen: Seen) -> None:
        keep, idle = answers.keep(self.retention, seen), self.idle
        if keep is not None and idle is not None:
            keep = torch.where(idle[:, None], seen.valid, keep)
        self.restore(idle, self.past)
        self.limit = answers.limit(self.retention, seen, keep)
        self.begin_waiting(seen, keep)
        self.settle(self.weighed(seen), keep)
        self.restore(idle, self.past)
        self.end_begun(idle)
        self.past = {}

    def judge_step(
        self,
        q: Float[Tensor, "row group query dim"],
        valid: Bool[Tensor, "row query"] | None,
        mass: Float[Tensor, "row group token"] | None,
        call: Call,
    ) -> None:
        """After decoded tokens, with these queries and the attention that they paid."""
        if self.waits:
            self.ask(q, valid)
            if self.seen >= self.due:
                self.judge_full(call)
            return
        rule = self.lasting_rule() if valid is None else None
        if rule is not None:
            self.drop(rule, mass)
            return
        if mass is not None and valid is not None:  # padding says nothing
            mass = mass * valid[:, :1, None]
        seen, before = self.show(q, mass, call, prompt=False), dict(self.notes)
        judged = replace(seen, score=answers.score(self.retention, seen))
        keep = answers.keep(self.retention, judged)
        if valid is not None:  # a row of which none came is not judged, by a query that is padding's
            others = ~valid[:, 0]
            judged = replace(judged, score=torch.where(others[:, None], seen.score, judged.score))
            keep = None if keep is None else torch.where(others[:, None], seen.valid, keep)
            self.restore(others, before)
        answers.within(self.retention, seen, keep, self.limit)
        if keep is not None and self.retention.remerges:
            dims = self.tail.k.shape[2], self.tail.v.shape[2]
            self.tail.rewrite(*answers.refolded(self.retention, judged, keep, dims))
        self.judge(seen if self.weighs else judged, keep)  # saliency goes on as it was

    def rule(self) -> Rule | None:
        """What the retention keeps of each row when a token is decoded, for C to know; None if it does not say so."""
        cached = self.cached_rule
        if cached is None or cached[0] is not self.first or cached[1] is not self.prompt_length:
            rule: Rule | None = None
            if self.pays:
                found = answers.ask(self.retention, "rule", self.first, self.prompt_length, self.heads, self.notes)
                rule = answers.of_kind(self.retention, "rule", found, Paid, Merged, Placed)
            elif self.retention.ends is not None:
                first, recent = self.retention.ends
                rule = Ends((self.first + first).contiguous(), tokens_by_row(recent, self.prompt_length).contiguous())
            self.cached_rule = cached = self.first, self.prompt_length, rule
        rule = cached[2]
        return rule._replace(threshold=self.moving()) if isinstance(rule, Merged) else rule

    def moving(self) -> Float[Tensor, "row"]:
        """The threshold of what merges, to be written: a state to go back to may have the note that is there."""
        self.notes["threshold"] = found = self.notes["threshold"].clone()
        return found

    def lasting_rule(self) -> Rule | None:
        """`rule`, where it is not followed in C: a kernel does it in place."""
        return self.rule() if self.rolls or self.pays or self.thins else None

    def paged_rule(self, pages: Pages | None) -> Rule | None:
        """`rule`, for what is sealed too, if there is any."""
        rule = self.rule() if self.thins else None
        if pages is None or not isinstance(rule, Ends):
            return rule
        return Sealed(rule, pages.position, pages.alive)

    def drop(self, rule: Rule, mass: Float[Tensor, "row group token"] | None) -> None:
        """Judge what is held by a rule, in place."""
        tail, pages, span = self.tail, self.stored, self.tail.span
        if pages is not None:
            pages.own()
            rule, pages.clean = self.paged_rule(pages) or rule, False
        merges = isinstance(rule, Merged)
        tail.own() if merges else tail.own_small()
        tail.place()
        verdict(
            rule, tail.position[:, span], self.newest(1), mass=None if mass is None else mass.detach(),
            score=tail.score[:, span] if tail.scored else None, keys=tail.k[:, span], values=tail.v[:, span],
        )  # fmt: skip
        if merges:
            tail.written()
        self.whole = tail.clean = False

    # one that waits

    @cached_property
    def waits(self) -> bool:
        return waits(self.retention)

    def begin_waiting(self, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> None:
        """After a prompt. The verdicts to come have other queries than its own."""
        most = answers.full(self.retention, seen) if self.waits else None
        if most is not None:
            rows, group, _, dim = seen.queries.shape
            self.notes["asked"] = seen.queries.new_zeros(rows, group, self.retention.observes, dim)
            self.wait(most, seen.valid if keep is None else keep)

    def wait(self, most: Int[Tensor, "row"], held: Bool[Tensor, "row token"]) -> None:
        """Rows hold these tokens: none has `most` before so many more have come. The host waits for the device here."""
        self.due = self.seen + max(1, int((most - held.sum(1)).min()))

    def ask(self, q: Float[Tensor, "row group query dim"], valid: Bool[Tensor, "row query"] | None) -> None:
        """Note the queries of decoded tokens, as many as a verdict asks."""
        asked, n = self.notes["asked"], self.retention.observes
        found = torch.cat([asked[:, :, q.shape[2] :], q], 2) if valid is None else behind(asked, q, valid)
        self.notes["asked"] = found[:, :, -n:].contiguous()
        self.whole = False  # what was noted is not forgotten with a token

    @property
    def still_waits(self) -> bool:
        """Whether the next token makes no row full, and is added to the tail, which is all there is."""
        return self.waits and not self.stack.paged and self.seen + 1 < self.due and not self.tail.shared

    def patience(self) -> int:
        """Tokens that may come together: up to the next verdict, and one where they go to slots that became free."""
        if self.session.recording or self.filling:
            return 1
        return max(1, self.due - self.seen)

    def judge_full(self, call: Call) -> None:
        """Judge the rows that are full."""
        seen = Verdicts.show(self, self.notes["asked"], None, call, prompt=False)
        seen = replace(seen, begin=None)  # of a row without a token in the last turns, queries are from before those
        most = answers.full(self.retention, seen)
        if most is None:
            return
        held, full = seen.valid, seen.valid.sum(1) >= most
        if bool(full.any()):
            judged = replace(seen, score=answers.score(self.retention, seen))
            keep = answers.keep(self.retention, judged)
            if keep is not None:
                held = torch.where(full[:, None], keep, held)
                score = seen.score if self.weighs else torch.where(full[:, None], judged.score, seen.score)
                self.judge(replace(seen, score=score), held)
                self.compact(full)
        self.wait(most, held)

    def compact(self, rows: Bool[Tensor, "row"]) -> None:
        """After a verdict of these rows, whose pages a selection reads: what it left in them moves together.

        Here and not where somebody makes room (`Sealing.tidy`), as what is read later follows from it.
        """
        if self.pages is not None and self.stack.selects:
            self.note_reach()
            self.saw = None if self.saw is None else self.saw.told()
            fill_up(self.pages, rows)
