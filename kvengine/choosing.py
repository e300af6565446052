"""How a lane chooses which of its sealed units a query reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine import named, page_answers
from kvengine.kernels.attention import attention
from kvengine.kernels.state import State
from kvengine.pages import Pages
from kvengine.policies._budget import Budget, tokens, tokens_by_row
from kvengine.policies.selection import Where, logits
from kvengine.session import Call
from kvengine.verdicts import Verdicts

SCANNED = 1 << 19
"""Numbers of a row's keys from which on they are read once for a choice and attention."""
PART = 1 << 12
"""Keys of a row that are made floats at a time."""


class Choosing(Verdicts):
    """The part of a lane that asks its selection."""

    scanned: State | None = None  # attention to all sealed tokens, found on the way to a choice

    def scans(self, pages: Pages | None) -> bool:
        """Whether one reading is to serve a choice and attention: of pages in tiers, which would be brought twice; of others
        where C can, and a long one, as a short one, made twice, takes less than a step in parts."""
        if pages is None or not self.stack.selection.scans(self.layer, self.layers):
            return False
        return pages.pool.once or (self.first.is_cpu and len(pages) * self.tail.k.shape[-1] >= SCANNED)

    def scan(self, pages: Pages, call: Call, q: Tensor) -> Float[Tensor, "row group token"] | None:
        """Logits of all sealed keys; what attention finds in the same reading is `scanned`. None if they are read twice."""
        found = None
        if not self.scans(pages):
            pass
        elif pages.pool.once:
            found = self.bring(pages, call, q)
        elif call.softcap is None:
            found = pages.scan(q, call.scale, self.tail.v.shape[-1])
        self.scanned, every = found or (None, None)
        return every

    def bring(self, pages: Pages, call: Call, q: Tensor) -> tuple[State, Float[Tensor, "row group token"]]:
        """The same of pages that are not where a kernel could read them."""
        k, v = pages.decoded()
        position = None if pages.clean else pages.position
        state = attention(q[:, :, None], k, v, None, call.scale, softcap=call.softcap, position=position)
        return state, logits(q, k.split(PART, 1), call.scale)

    def select(self, pages: Pages, q: Tensor, call: Call) -> Int[Tensor, "row chosen"] | None:
        if call.named is not None:
            return named.slots(call.named[:, 0], pages.position, self.numbered)
        selection = self.stack.selection
        if selection.reads is None or self.session.dense:
            return None
        budget, lengths = tokens(selection.reads, self.prompt_most), [n for n, _ in self.lengths]
        same = isinstance(selection.reads, int) or not self.padded  # every row has that budget
        if same and (budget - max(lengths)) // selection.unit >= pages.units:
            return None
        most, even = max(1, (budget - min(lengths)) // selection.unit), same and len(lengths) == 1
        asks = q.reshape(len(self.first), -1, q.shape[-1])  # of one token; heads may be rows, or several in a row
        choose = partial(self.choose, pages, asks, call, selection.reads, most, even)
        if not (even and self.launched):
            return choose()
        of, kind = (pages._alive, *pages._summary.values()), (call.scale, call.softcap)
        return pages.bounds.remembered.top(asks, of, pages.units, most, kind, choose)

    @property
    def numbered(self) -> int:
        """Tokens that may have been named: those so far."""
        return self.seen

    def reach(self) -> Int[Tensor, "row token"]:
        found = super().reach()
        if self.asked is None:
            return found
        return found.masked_fill(~named.among(self.asked[:, None], found, self.numbered)[:, 0], -1)

    def near_named(self, q: Tensor, k: Tensor, v: Tensor, call: Call, asked: Int[Tensor, "row query chosen"]) -> State:
        """Attention over what the model names of the open tail."""
        self.asked = asked[:, -1]
        position = self.tail.position[:, self.tail.span]
        if q.shape[2] == 1 and k.shape[1] > named.FEW * asked.shape[2]:
            at = named.slots(asked[:, 0], position, self.numbered)
            slot, row = at.clamp(min=0), torch.arange(len(at), device=at.device)[:, None]
            k, position = k[row, slot], position.gather(1, slot).masked_fill_(at < 0, -1)
            v = k[..., : self.inner] if self.inner is not None else v[row, slot]
            return attention(q, k, v, None, call.scale, softcap=call.softcap, position=position, wait=True)
        visible = self.visible(self.newest(q.shape[2]), position, False) & named.among(asked, position, self.numbered)
        return attention(q, k, v, visible, call.scale, softcap=call.softcap, wait=True)

    def choose(
        self, pages: Pages, asks: Tensor, call: Call, budget: Budget, most: int, even: bool
    ) -> Int[Tensor, "row chosen"] | None:
        selection = self.stack.selection
        by_row = partial(tokens_by_row, budget, self.prompt_length)
        counts = lambda: ((by_row() - self.open()) // selection.unit).clamp(min=1)  # noqa: E731
        where = self.where(pages, call, counts, most, even)
        return page_answers.chosen(selection, asks, pages.summary, pages.alive, where)

    def where(self, pages: Pages, call: Call, counts: Callable[[], Tensor], most: int, even: bool) -> Where:
        return Where(
            layer=self.layer, layers=self.layers, counts=counts, most=most, even=even, scale=call.scale,
            keys=pages.keys, straight=partial(pages.logits, scale=call.scale, dim_v=self.tail.v.shape[-1]),
            scan=partial(self.scan, pages, call),
            token=self.seen - 1, lane=self.number, memo=self.session.memo, since=self.since, joint=pages.joint is not None,
            stamps=lambda: pages.stamps, beside=pages.beside, bounds=pages.bounds, softcap=call.softcap,
            parts=pages.parts if self.first.is_cpu else list,
        )  # fmt: skip
