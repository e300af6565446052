"""Index arithmetic on rows of tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine import memory


def pack(keep: Bool[Tensor, "row token"]) -> Int[Tensor, "row chosen"]:
    """The indices where `keep` holds, per row and in order, flush right; -1 before them in shorter rows.

    >>> pack(torch.tensor([[True, False, True], [False, True, False]])).tolist()
    [[0, 2], [-1, 1]]
    """
    count = keep.sum(1)
    most = int(count.max())
    order = keep.to(torch.int8).argsort(dim=1, stable=True)[:, keep.shape[1] - most :]
    return order.masked_fill(torch.arange(most, device=keep.device) < most - count[:, None], -1)


def narrowed(x: Float[Tensor, "*any"], dtype: torch.dtype) -> Float[Tensor, "*any"]:
    """What is kept, in the model's dtype. Codes of a float16 near its end may decode to more than it has: then that is its last,
    as infinity would take the whole attention of a row.

    >>> narrowed(torch.tensor([7e4, -3.0]), torch.float16).tolist()
    [65504.0, -3.0]
    """
    if dtype == torch.float16 and x.dtype != dtype:
        x = x.clamp(-65504, 65504)
    return x.to(dtype)


@dataclass(frozen=True)
class Parted:
    """Where each row's tokens go: its oldest into so many whole `pages`, those at `front`; the others, at `back`, stay.

    `front` is flush left, `back` flush right, and -1 stands where a row has fewer. Without any page there is no `front`.
    """

    pages: Int[Tensor, "row"]
    front: Int[Tensor, "row slot"] | None
    back: Int[Tensor, "row other"]


def part(
    alive: Bool[Tensor, "row token"],
    room: int,
    page: int,
    left: Bool[Tensor, "row token"] | None = None,
    free: Bool[Tensor, "row"] | None = None,
) -> Parted:
    """Whole pages of each row's oldest tokens, so that less than a page beyond `room` of them is left.

    `left`: tokens that stay and do not count. `free`: the rows that may fill pages (None: all).

    >>> parts = part(torch.tensor([[True, True, True, True, True], [False, True, True, False, True]]), room=1, page=2)
    >>> parts.pages.tolist(), parts.front.tolist(), parts.back.tolist()
    ([2, 1], [[0, 1, 2, 3], [1, 2, -1, -1]], [[4], [4]])
    """
    nth = (own := alive if left is None else alive & ~left).cumsum(1)
    pages = ((nth[:, -1] - room) // page).clamp(min=0)
    pages = pages if free is None else pages * free
    going = own & (nth <= (pages * page)[:, None])
    front, most = None, int(pages.max()) * page
    if most:
        token = torch.arange(alive.shape[1], device=alive.device).expand_as(nth)
        front = nth.new_full((len(nth), most + 1), -1)  # the last place takes those that go nowhere
        front = front.scatter_(1, torch.where(going, nth - 1, most), token)[:, :-1]
    return Parted(pages, front, pack(alive & ~going))


def take(x: Tensor, index: Int[Tensor, "row chosen"], empty: int | float = 0) -> Tensor:
    """Gather along the token axis; where the index is -1 there is `empty`.

    >>> take(torch.tensor([[5, 6, 7]]), torch.tensor([[-1, 2]]), empty=-1).tolist()
    [[-1, 7]]
    """
    return taken(index, (x, empty))[0]


def in_order(position: Int[Tensor, "row token"]) -> Int[Tensor, "row held"]:
    """The slots of each row's tokens, oldest first, flush right; -1 before them in rows that hold fewer.

    >>> in_order(torch.tensor([[7, -1, 3], [-1, 4, -1]])).tolist()
    [[2, 0], [-1, 1]]
    """
    order = position.argsort(dim=1, stable=True)
    index = pack(position.gather(1, order) >= 0)
    return take(order, index, -1)


def taken(index: Int[Tensor, "row chosen"], *these: tuple[Tensor, int | float]) -> list[Tensor]:
    """`take` for several tensors, each with what is `empty`."""
    at, none = index.clamp(min=0), index < 0
    row = torch.arange(len(index), device=index.device)[:, None]
    # whole vectors are copied as such: three times as fast as a gather of their numbers
    found = [x.gather(1, at) if x.dim() == 2 else x[row, at] for x, _ in these]
    if not none.is_cuda and not bool(none.any()):  # a GPU's host does not wait to know
        return found
    return [
        x.masked_fill_(none.view(*at.shape, *[1] * (x.dim() - 2)), empty)
        for x, (_, empty) in zip(found, these, strict=True)
    ]


def breaks(valid: Bool[Tensor, "row token"]) -> list[int]:
    """Where padding follows a token, in any row.

    >>> breaks(torch.tensor([[False, True, True, False], [True, True, True, True]]))
    [3]
    """
    return ((valid[:, :-1] & ~valid[:, 1:]).any(0).nonzero()[:, 0] + 1).tolist()


def padding_first(valid: Bool[Tensor, "row token"]) -> Int[Tensor, "row token"] | None:
    """The order in which each row's padding comes before its tokens; None if it does anyway.

    >>> padding_first(torch.tensor([[False, True, True, False], [True, True, True, True]])).tolist()
    [[0, 3, 1, 2], [0, 1, 2, 3]]
    """
    return valid.to(torch.int8).argsort(dim=1, stable=True) if breaks(valid) else None


def ordered(x: Float[Tensor, "row *group token dim"], order: Int[Tensor, "row token"] | None) -> Tensor:
    """The tokens in that order; None: as they are."""
    if order is None:
        return x
    index = order.view(len(x), *[1] * (x.ndim - 3), -1, 1)
    return x.gather(-2, index.expand(x.shape))


def behind(
    earlier: Float[Tensor, "row *group before dim"], new: Tensor, valid: Bool[Tensor, "row token"] | None
) -> Float[Tensor, "row *group all dim"]:
    """New tokens behind earlier ones, but padding among them (not `valid`) before all."""
    found = torch.cat([earlier, new], -2)
    if valid is None:
        return found
    return ordered(found, padding_first(torch.cat([valid.new_ones(len(valid), earlier.shape[-2]), valid], 1)))


def grouped(count: Int[Tensor, "row"]) -> list[tuple[int, Tensor | None]]:
    """Each count, and the rows that have it."""
    found = sorted(set(count.tolist()))
    return [(n, (count == n).nonzero()[:, 0]) for n in found] if len(found) > 1 else [(found[0], None)]


def moved(x: Tensor, size: int) -> Tensor:
    """A copy at the front of `size` places along axis 1, in memory of the cache's own."""
    out = memory.empty((x.shape[0], size, *x.shape[2:]), x.dtype, x.device)
    out[:, : x.shape[1]] = x
    return out


def wider(x: Tensor, size: int, empty: int | float) -> Tensor:
    """`x` in front of `empty` up to `size` along axis 1."""
    if x.shape[1] == size:
        return x
    out = moved(x, size)
    out[:, x.shape[1] :] = empty
    return out


class Views:
    """Views of the first places of some tensors along axis 1, made once, for who asks for them at every token."""

    def __init__(self) -> None:
        self.forget()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy makes views of its own."""
        return type(self), ()

    def forget(self) -> None:
        """Let go of the tensors, which have been replaced by others: else they stay until somebody asks again."""
        self.size, self.of, self.made = 0, tuple[Tensor, ...](), tuple[Tensor, ...]()

    def first(self, size: int, *of: Tensor) -> tuple[Tensor, ...]:
        """`x[:, :size]` of each, the same as at the last call where that had these tensors."""
        same = size == self.size and len(of) == len(self.of)
        if not same or any([a is not b for a, b in zip(of, self.of, strict=True)]):
            self.size, self.of, self.made = size, of, tuple([x[:, :size] for x in of])
        return self.made
