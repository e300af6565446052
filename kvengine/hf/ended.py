"""Rows of a batch that have ended before others.

`generate` gives them padding until the last one has. To a policy that is no token: it would fill windows, leave with what
is evicted, and count in what is quantised together. And where a second call of `generate` goes on with the others, after a
loss, they are kept at their end.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor
from transformers import LogitsProcessor, StoppingCriteria, StoppingCriteriaList

from kvengine.session import Session


class Ends(StoppingCriteriaList):
    """A `generate`'s criteria, which tell the session of its cache who has ended.

    The token that ends a row is fed like any other, and what follows it is not one. The host waits for the answer, as the
    loop that asks does right after, to know whether all have ended.
    """

    def __init__(self, criteria: StoppingCriteriaList, session: Session, pauses: bool) -> None:
        super().__init__(criteria)
        self.session, self.pauses, self.rows = session, pauses, [False]

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Shaped[Tensor, "sequence"]:
        done: Tensor = super().__call__(input_ids, scores, **kwargs)
        if len(done) == 1 and not self.session.heeded:
            return done
        if self.pauses and len(done) > 1:
            self.session.paused = self.session.ended
        if self.session.aside is not None and self.session.ended is not None:
            self.session.aside.keep(self.session.ended)
        told = done if done.dtype == torch.bool else (done & 1).bool()  # as the loop does, whose `~` takes numbers too
        rows = [a or b for a, b in zip_longest(told.tolist(), self.rows, fillvalue=False)]
        if any(rows) and rows != self.rows:  # else it is the very tensor of before
            self.rows, self.session.ended = rows, torch.tensor(rows, device=done.device)
            before = self.session.ends or [None] * len(rows)
            self.session.ends = [
                (input_ids.shape[1] if row and end is None else end) for row, end in zip(rows, before, strict=True)
            ]
        return done


class Padding(LogitsProcessor):
    """Lets rows that had ended before a loss say nothing but padding."""

    def __init__(self, rows: Bool[Tensor, "sequence"], token: int) -> None:
        self.rows, self.token = rows, token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        said = scores.clone()
        said[self.rows] = -torch.inf
        said[self.rows, self.token] = 0.0
        return said


class Ended(StoppingCriteria):
    """And keeps nobody waiting for them."""

    def __init__(self, rows: Bool[Tensor, "sequence"]) -> None:
        self.rows = rows

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self.rows


def behind(
    ends: list[int | None], length: int, mask: Shaped[Tensor, "sequence token"]
) -> Shaped[Tensor, "sequence token"]:
    """A mask of a text that is `length` ids long by now, without what was given to rows behind their ends.

    >>> behind([None, 3], 5, torch.ones(2, 6, dtype=torch.long)).tolist()
    [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]]
    """
    given = torch.tensor([0 if end is None else length - end for end in ends], device=mask.device)
    place = torch.arange(mask.shape[1], device=mask.device)
    return mask.masked_fill(place >= mask.shape[1] - given[:, None], 0)


def ended(
    model: Any, new: Int[Tensor, "sequence token"], options: Mapping[str, Any], session: Session
) -> tuple[Bool[Tensor, "sequence"], int | None]:
    """Rows that need no more tokens, and the token that `generate` fills them with; None: they go on with what they say."""
    config = options.get("generation_config") or model.generation_config
    end, padding = (options.get(name, getattr(config, name)) for name in ("eos_token_id", "pad_token_id"))
    ends = torch.as_tensor([] if end is None else end, device=new.device).flatten()
    rows = torch.isin(new, ends).any(1)
    if session.ended is not None:  # also by what cannot be asked again
        rows = rows | session.ended.to(rows.device)
    return rows, None if not len(ends) else int(ends[0]) if padding is None else int(padding)
