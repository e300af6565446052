"""What a lane holds: its newest tokens, the open tail, and before them what is sealed in pages (`kvengine.sealing`)."""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import answers
from kvengine.attending import Tally
from kvengine.beside import Beside
from kvengine.errors import CacheError
from kvengine.kernels.step import Rule
from kvengine.nested import Nested
from kvengine.pages import Pages
from kvengine.policies.retention import Notes, Retention, Seen
from kvengine.reach import Reach, reached
from kvengine.saliency import Saliency
from kvengine.session import Call, Session, weakly
from kvengine.stack import Stack
from kvengine.tail import Tail
from kvengine.tokens import grouped


class Holding:
    def __init__(
        self,
        stack: Stack,
        retention: Retention,
        layer: int,
        layers: int,
        number: int,
        session: Session,
        k: Tensor,
        v: Tensor,
        heads: int = 1,
        part: float = 1.0,
        inner: int | None = None,
    ):
        """`k` [row, token, dim] and `v` [row, token, dim_v] say the shapes, dtypes and device to come. `inner`: the values
        are so many first channels of the keys (latents), and are held once where they stay as they are."""
        self.heads = heads  # rows of a sequence
        self.part = part  # of the layer's heads
        self.stack, self.retention = stack, answers.at(retention, layer, layers)
        self.layer, self.layers, self.number, self.session = layer, layers, number, session
        self.inner = inner
        scored = self.retention.remembers or stack.representation.probes > 0
        tail = Tail if inner is None else partial(Nested, inner)
        self.tail: Tail = tail(k, v, scored, placed=False)
        self.pages: Pages | None = None
        self.seen = self.since = 0  # tokens seen, and those before the current pass
        self.firm = 0  # tokens that shortening the tail does not take back: what came as a prompt, or with padding
        self.whole = True  # the tail holds every token seen, each at its position
        self.limit: int | None = None
        self.tally = Tally()  # of prompts, if a prefill method leaves something out
        self.due = 0  # tokens seen before which no row is full, if the retention waits for that
        self.notes: Notes = {}  # the retention's
        self.lengths: list[tuple[int, Tensor | None]] = [(0, None)]  # tokens in the tail, and their rows
        self.first = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.prompt_length = torch.zeros(len(k), dtype=torch.long, device=k.device)
        self.begin = self.first  # position of each row's first token of the last prompt
        self.former = self.first  # and of the one before, while that is read
        self.reading = False  # a prompt, whose end is still to come
        self.turn = 0  # tokens seen before the last prompt
        self.past: Notes = {}  # the retention's notes before it
        self.ahead: Tensor | None = None  # by how many positions the tokens that come are later than their number
        self.padded = False  # rows may have seen different numbers of tokens
        self.moved = False  # positions are no longer the tokens' numbers in the text with its padding
        self.prompt_most = 0  # the longest row's prompt
        self.window: Tensor | None = None  # the prompt's last queries
        self.mass: Tensor | None = None  # attention received so far in this prompt
        self.repeated: Tensor | None = None  # the most that a replay has paid to each slot, while there is one
        self.saliency: Saliency | None = None  # of this prompt's tokens, for a representation that asks
        self.judged: int | Tensor = 0  # tokens at the end of the last prompt; [row, 1] where rows differ
        self.units: Tensor | None = None  # what the last query read; None: everything
        self.asked: Tensor | None = None  # what the model named for it to read (`kvengine.named`)
        self.cached_rule: tuple[Tensor, Tensor, Rule | None] | None = None  # `Lane.rule`, and what it was made from
        self.beside = Beside()
        self.saw: Reach | None = None  # that as it was, where some of it has been sealed since

    @property
    def stored(self) -> Pages | None:
        """The pages, if there is anything in them."""
        pages = self.pages
        return pages if pages is not None and pages.columns else None

    @property
    def clean(self) -> bool:
        """Whether every slot holds a token."""
        return self.tail.clean and (self.pages is None or self.pages.clean)

    def everything(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys, values, positions and scores of all slots, sealed ones first."""
        return (*self.laid_out(), self.position, self.score)

    def laid_out(self, dtype: torch.dtype | None = None, values: bool = True) -> tuple[Tensor, Tensor]:
        """Keys and values of all slots, sealed ones first; without `values`, none of these.

        `dtype`: what codes become, which are decoded in more than the model has and are not all there at once; None: the least
        that holds them.
        """
        pages, span = self.stored, self.tail.span
        k, v = self.tail.k[:, span], self.tail.v[:, span] if values else self.tail.v[:, span, :0]
        return (k, v) if pages is None else pages.in_front_of(k, v, dtype)

    @property
    def position(self) -> Int[Tensor, "row token"]:
        """Of what all slots hold, sealed ones first; -1 for no token."""
        position = self.tail.position[:, self.tail.span]
        return position if self.pages is None else torch.cat([self.pages.position, position], 1)

    @property
    def score(self) -> Float[Tensor, "row token"]:
        """Of all slots, sealed ones first."""
        score = self.tail.scores(self.tail.span)
        return score if self.pages is None else torch.cat([self.pages.score, score], 1)

    def show(self, queries: Tensor, mass: Tensor | None, call: Call, prompt: bool) -> Seen:
        return Seen(
            position=self.position, score=self.score, first=self.first, begin=self.begin, newest=self.seen - 1, prompt=prompt,
            prompt_length=self.prompt_length, queries=queries, scale=call.scale,
            jumbled=(self.filling and not prompt) or self.tail.strays,
            read=weakly(self.laid_out), rope=self.session.rope, softcap=call.softcap, sink_logits=call.sinks,
            heads=self.heads, mass=mass, notes=self.notes, place=self.session.place(self.layer, self.layers),
        )  # fmt: skip

    def judge(self, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> None:
        """Write scores and drop what is not kept, in place."""
        n = 0
        if self.pages is not None and (n := len(self.pages)):
            self.pages.judge(seen.score[:, :n], None if keep is None else keep[:, :n])
        self.tail.judge(seen.score[:, n:], None if keep is None else keep[:, n:])
        self.whole &= keep is None

    def gone(self, hidden: Bool[Tensor, "row earlier"]) -> Bool[Tensor, "row slot"] | None:
        """Which of what is held are those of the tokens seen that are `hidden`; None if none are. Padding is hidden anyway.

        Raises:
            CacheError: it is not known any more which these are.
        """
        position = self.position
        gone = (position >= 0) & hidden.gather(1, position.clamp(min=0).long())
        judged = self.judged if isinstance(self.judged, int) else int(self.judged.max())
        if self.moved:
            unknown = bool((hidden.shape[1] - hidden.sum(1) < self.seen - self.first).any())
        else:
            unknown = not self.tail.exact and bool(hidden[:, :judged].any())
        if unknown:
            raise CacheError(
                f"attention_mask hides tokens that this cache has seen, and '{self.stack}' no longer knows which of those that "
                "it holds they are. Keep ones in the mask for what was seen, or call cache.reset() and give the text anew"
            )
        return None if self.moved or not bool(gone.any()) else gone

    def hide(self, gone: Bool[Tensor, "row slot"]) -> None:
        """Drop these of what is held."""
        tail, pages = self.tail, self.stored
        n = 0 if pages is None else len(pages)
        if pages is not None:
            pages.judge(pages.score, ~gone[:, :n])
        tail.judge(tail.scores(tail.span), ~gone[:, n:])
        self.padded = True

    @property
    def filling(self) -> bool:
        """Whether the next token takes a slot that became free: slots do not lie by age any more."""
        return self.limit is not None and not self.stack.paged and len(self.tail) > self.limit

    def reach(self) -> Int[Tensor, "row token"]:
        """The positions of what the last query read and is still held; -1 for none."""
        return (self.saw or reached(self.units, self.stored, self.tail)).positions()

    def note_reach(self, position: Int[Tensor, "row slot"] | None = None) -> None:
        """Before tokens move from the tail, whose `position` may be at hand, to pages: remember which the last query read."""
        if self.units is not None and self.saw is None:
            self.saw = reached(self.units, self.stored, self.tail, position)

    def open(self) -> Int[Tensor, "row"] | int:
        """Slots of each row's tail."""
        if len(self.lengths) == 1:
            return self.lengths[0][0]
        out = torch.empty_like(self.first)
        for n, rows in self.lengths:
            out.index_fill_(0, torch.arange(len(out), device=out.device) if rows is None else rows, n)
        return out

    def rows(self, index: Int[Tensor, "chosen"]) -> None:
        """Become the given rows (beam search, batch selection)."""
        self.due = 0
        self.beside.forget(self.tail)
        self.tail.rows(index)
        count = self.open()
        if isinstance(count, Tensor):
            self.lengths = grouped(count[index])
        if self.pages is not None:
            self.pages.rows(index)
        self.first, self.prompt_length = self.first[index], self.prompt_length[index]
        self.begin, self.former = self.begin[index], self.former[index]
        self.judged = self.judged[index] if isinstance(self.judged, Tensor) else self.judged
        self.notes, self.past = ({name: x[index] for name, x in some.items()} for some in (self.notes, self.past))
        self.window, self.mass, self.units, self.asked = (
            None if x is None else x[index] for x in (self.window, self.mass, self.units, self.asked)
        )
        self.saw = None if self.saw is None else self.saw.told(index)
        if self.saliency is not None and self.saliency.mass is not None:
            self.saliency.mass = self.saliency.mass[index]
