"""Gradients through a cache: right, or refused by the backward pass that would need what is lost.

A pass with gradients reads keys and values that the cache goes on writing into, and what the cache quantises or moves
away keeps no way back to what it was made of. Torch would name an in-place operation, or say nothing. Derivatives that go
forward with a pass (`torch.func.jvp`) are refused by it.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from kvengine.errors import CacheError
from kvengine.offload.placement import Flat

if TYPE_CHECKING:
    from kvengine.pages import Pages
    from kvengine.tail import Tail

Copied = TypeVar("Copied")
DO = (
    "Read what comes before under torch.no_grad(), give what is trained in one pass without follow_up(), and call backward() "
    "before the next one; or train with use_cache=False, or after kvengine.unpatch(model)"
)


def live(*given: Tensor) -> bool:
    """Whether gradients of what is computed from these may be asked for."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in given)


def tangents(*given: Tensor) -> bool:
    """Whether these carry derivatives of forward mode (`torch.func.jvp`, dual tensors), of which kernels know nothing."""
    inside = forward_ad._current_level >= 0  # one look at a number for each layer of a decoded token
    return inside and any(forward_ad.unpack_dual(x).tangent is not None for x in given)


def passes(pages: Pages) -> bool:
    """Whether gradients pass through what pages store: neither rounded nor moved off the device."""
    exact = pages.representation.lossless or pages.joint is not None
    return exact and all(type(shelf) is Flat for shelf in pages.pool.shelves)


def watched(out: Tensor, tail: Tail, pages: Pages | None = None) -> Tensor:
    """What queries have read of a tail and of pages; its backward pass refuses what it cannot know any more.

    Raises, in a backward pass:
        CacheError: the tail has been written into since, or the pages hold tokens whose gradients they do not know.
    """
    if out.requires_grad:
        read = [(x, x._version) for x in (tail.k.detach(), tail.v.detach())]  # one counter for all views of a memory
        cut = pages is not None and pages.cut and len(pages) > 0
        out.register_hook(partial(check, read=read, cut=cut))  # type: ignore[no-untyped-call]
    return out


def check(grad: Tensor, read: list[tuple[Tensor, int]], cut: bool) -> None:
    if cut:
        raise CacheError(
            "this gradient would pass through tokens of an earlier pass that the cache has quantised or moved away, where no "
            f"gradient passes. {DO}"
        )
    if any(x._version != then for x, then in read):
        raise CacheError(
            f"this gradient needs keys and values as a pass has read them, but the cache has written there since. {DO}"
        )


def copied(what: Copied, memo: dict[int, object], instead: str) -> Copied:
    """A deep copy of what a cache holds.

    Raises:
        CacheError: it holds tokens with gradients, of which torch makes no copy; `instead` ends the message with what to do.
    """
    try:
        return copy.deepcopy(what, memo)  # type: ignore[arg-type]
    except RuntimeError as error:
        if "graph leaves" not in str(error):
            raise
        raise CacheError(
            f"this cache holds keys and values of a pass with gradients, which cannot be copied{instead}"
        ) from error
