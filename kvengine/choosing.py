"""How a lane chooses which of its sealed units a query reads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from jaxtyping import Int
from torch import Tensor

from kvengine import answers
from kvengine.pages import Pages
from kvengine.policies._budget import Budget, tokens, tokens_by_row
from kvengine.policies.selection import Where
from kvengine.session import Call
from kvengine.verdicts import Verdicts


class Choosing(Verdicts):
    """The part of a lane that asks its selection."""

    def select(self, pages: Pages, q: Tensor, call: Call) -> Int[Tensor, "row chosen"] | None:
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

    def choose(
        self, pages: Pages, asks: Tensor, call: Call, budget: Budget, most: int, even: bool
    ) -> Int[Tensor, "row chosen"] | None:
        selection = self.stack.selection
        by_row = partial(tokens_by_row, budget, self.prompt_length)
        counts = lambda: ((by_row() - self.open()) // selection.unit).clamp(min=1)  # noqa: E731
        where = self.where(pages, call, counts, most, even)
        chosen = selection.select(asks, pages.summary, pages.alive, where)
        return answers.units(selection, chosen, len(self.first), pages.units)

    def where(self, pages: Pages, call: Call, counts: Callable[[], Tensor], most: int, even: bool) -> Where:
        return Where(
            layer=self.layer, layers=self.layers, counts=counts, most=most, even=even, scale=call.scale,
            keys=pages.keys, straight=partial(pages.logits, scale=call.scale, dim_v=self.tail.v.shape[-1]),
            token=self.seen - 1, lane=self.number, memo=self.session.memo, since=self.since, joint=pages.joint is not None,
            stamps=lambda: pages.stamps, beside=pages.beside, bounds=pages.bounds, softcap=call.softcap,
            parts=pages.parts if self.first.is_cpu else list,
        )  # fmt: skip
