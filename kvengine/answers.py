"""What a policy's methods return, looked at where it comes in.

A shape that is wrong by one slot would end in an error of torch somewhere in the engine, a missing axis would be broadcast, and
a number that is no unit would have a kernel read memory that is not the cache's. The message names the method instead. Nothing
here waits for a device: numbers themselves are looked at on CPUs alone, and of policies that did not come with the package.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import index
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.policies import ours
from kvengine.policies.prefill import Choice, Prefill
from kvengine.policies.retention import Retention, Seen
from kvengine.policies.routing import Routing
from kvengine.policies.selection import Selection

Group = tuple[tuple[int, ...], Retention | None]
"""KV heads, and the retention that replaces the stack's for them."""


def shown(x: object) -> str:
    """A value as messages name it.

    >>> shown(torch.zeros(2, 3)), shown((torch.zeros(1), None)), shown([True])
    ('float32 [2, 3]', '(float32 [1], NoneType)', 'list')
    """
    if isinstance(x, Tensor):
        return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
    return f"({', '.join(map(shown, x))})" if isinstance(x, tuple) else type(x).__name__


def refuse(policy: object, method: str, found: object, expected: str) -> PolicyError:
    return PolicyError(f"{type(policy).__name__}.{method} returned {shown(found)}, expected {expected}")


def here(policy: object, method: str, found: Tensor, like: Tensor) -> None:
    """That it is where that is which the method was given. Raises PolicyError."""
    if found.device != like.device:
        raise PolicyError(
            f"{type(policy).__name__}.{method} returned a tensor on {found.device}, expected one on {like.device}, where what it "
            "was given is"
        )


def lanes(routing: Routing, found: Any, heads: int) -> list[Group]:
    """`Routing.lanes`: every KV head in one group, in order within it. Raises PolicyError."""
    groups = found if isinstance(found, list | tuple) and all(map(is_group, found)) else ()
    if sorted(head for members, _ in groups for head in members) != list(range(heads)):
        raise PolicyError(
            f"{type(routing).__name__}.lanes returned {found!r}, expected groups (heads, retention or None) that have each of "
            f"the KV heads from 0 to {heads - 1} once"
        )
    return [(tuple(sorted(members)), retention) for members, retention in groups]


def is_group(x: Any) -> bool:
    if not (isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], tuple) and x[0]):
        return False
    return all(type(head) is int for head in x[0]) and (x[1] is None or isinstance(x[1], Retention))


class Lent:
    """What a retention of the caller's own is shown, to be looked at: what it writes into that would be the cache's.

    A tensor that was made under `torch.inference_mode()` does not count what is written into it.
    """

    def __init__(self, retention: Retention, seen: Seen) -> None:
        own = {f"seen.{name}": x for name, x in vars(seen).items() if isinstance(x, Tensor)}
        own |= {f"seen.notes[{name!r}]": x for name, x in seen.notes.items()}
        self.retention, self.lent = retention, [(name, x, version(x)) for name, x in own.items()]
        self.read, self.notes = seen.read, seen.notes

    def show(self, seen: Seen) -> Seen:
        """What it is shown. Not kept here: a circle would keep all that was read until garbage is collected."""
        return replace(seen, read=self.reading)

    def reading(self) -> tuple[Tensor, Tensor]:
        found = self.read()
        self.lent += [
            (f"what seen.read() gave, its {name}", x, version(x))
            for name, x in zip(("keys", "values"), found, strict=True)
        ]
        return found

    def check(self, method: str) -> None:
        """Raises PolicyError if `method` wrote into anything, or noted what could not be kept for each row."""
        rows = len(self.lent[0][1])
        for name, x in self.notes.items():
            if not isinstance(x, Tensor) or x.shape[:1] != (rows,):
                raise PolicyError(
                    f"{type(self.retention).__name__}.{method} set seen.notes[{name!r}] to {shown(x)}, expected a tensor of "
                    f"{rows} rows, [{rows}, ...]: rows go to other places, and notes with them"
                )
        if written := [name for name, x, before in self.lent if version(x) != before]:
            raise PolicyError(
                f"{type(self.retention).__name__}.{method} wrote into {written[0]}, which is the cache's: write into a .clone()"
            )


def version(x: Tensor) -> int:
    """How often a tensor was written into; 0 where that is not counted."""
    return 0 if x.is_inference() else x._version


def ask(policy: object, method: str, *given: Any) -> Any:
    """What a method says of what it is given, of which the caller's own writes into nothing; to give that another shape in place
    is no harm. Raises PolicyError."""
    run = getattr(policy, method)
    if ours(type(policy).__module__):
        return run(*given)
    lent = [x for one in given for x in (one.values() if isinstance(one, dict) else (one,)) if isinstance(x, Tensor)]
    before = [(version(x), x.shape, x.stride()) for x in lent]
    found = run(*given)
    for x, (written, *form) in zip(lent, before, strict=True):
        if version(x) != written and [x.shape, x.stride()] == form:
            raise PolicyError(
                f"{type(policy).__name__}.{method} wrote into what it was given, {shown(x)}, which may be the cache's: write "
                "into a .clone()"
            )
    return found


def by_age(seen: Seen) -> tuple[Seen, Int[Tensor, "row token"] | None]:
    """What a method sees at a prompt's end, oldest token first, and the slots in that order; None: they lie so.

    A method may ask which tokens are neighbours, and whether strays have left their page must not matter to that.
    """
    if not (seen.jumbled and seen.prompt):
        return seen, None
    order = seen.position.argsort(dim=1, stable=True)
    by_group, read = order[:, None].expand(-1, seen.queries.shape[1], -1), seen.read

    def reading() -> tuple[Tensor, Tensor]:
        k, v = (x.gather(1, order[..., None].expand(-1, -1, x.shape[2])) for x in read())
        return k, v

    found = replace(
        seen, position=seen.position.gather(1, order), score=seen.score.gather(1, order), read=reading, jumbled=False,
        mass=None if seen.mass is None else seen.mass.gather(2, by_group),
        repeated=None if seen.repeated is None else seen.repeated.gather(1, order),
    )  # fmt: skip
    return found, order


def by_slot(x: Tensor, order: Int[Tensor, "row token"] | None) -> Tensor:
    return x if order is None else torch.empty_like(x).scatter_(1, order, x)


def score(retention: Retention, seen: Seen) -> Float[Tensor, "row token"]:
    """`Retention.score`, of every slot. Raises PolicyError."""
    seen, order = by_age(seen)
    lent = None if ours(type(retention).__module__) else Lent(retention, seen)
    found: Any = retention.score(seen if lent is None else lent.show(seen))
    if not isinstance(found, Tensor) or found.shape != seen.position.shape or not found.is_floating_point():
        raise refuse(retention, "score", found, f"floats {list(seen.position.shape)}, one for each slot")
    here(retention, "score", found, seen.position)
    if lent is not None:
        lent.check("score")
    return by_slot(found, order)


def numbers(retention: Retention, seen: Seen) -> None:
    """That the scores of tokens are numbers: any order would do for NaN. Raises PolicyError."""
    if seen.score.is_cpu and not ours(type(retention).__module__):
        wrong = int((seen.score.isnan() & seen.valid).sum())
        if wrong:
            raise PolicyError(
                f"{type(retention).__name__}.score returned NaN for {wrong} of {int(seen.valid.sum())} tokens, expected numbers: "
                "look for a division by zero, or the logarithm of one"
            )


def keep(retention: Retention, seen: Seen) -> Bool[Tensor, "row token"] | None:
    """`Retention.keep`, of every slot. Raises PolicyError."""
    seen, order = by_age(seen)
    lent = None if ours(type(retention).__module__) else Lent(retention, seen)
    if lent is not None:
        numbers(retention, seen)
    found: Any = retention.keep(seen if lent is None else lent.show(seen))
    if found is not None and (
        not isinstance(found, Tensor) or found.shape != seen.position.shape or found.dtype != torch.bool
    ):
        raise refuse(retention, "keep", found, f"bool {list(seen.position.shape)}, one for each slot, or None")
    if lent is not None:
        lent.check("keep")
    if found is None:
        return None
    here(retention, "keep", found, seen.position)
    return by_slot(found, order)


def at(retention: Retention, layer: int, layers: int) -> Retention:
    """`Retention.at`. Raises PolicyError."""
    found: Any = retention.at(layer, layers)
    if not isinstance(found, Retention):
        raise refuse(retention, "at", found, "a retention: the method as this layer uses it, or self")
    return found


def full(retention: Retention, seen: Seen) -> Int[Tensor, "row"] | None:
    """`Retention.full`. Raises PolicyError."""
    found: Any = retention.full(seen)
    if found is not None and not whole(found, seen.first):
        raise refuse(retention, "full", found, f"whole numbers {list(seen.first.shape)}, one for each row, or None")
    return found  # type: ignore[no-any-return]


def limit(retention: Retention, seen: Seen, keep: Bool[Tensor, "row token"] | None) -> int | None:
    """`Retention.limit`, behind a prompt of which this is kept. Raises PolicyError."""
    found: Any = retention.limit(seen)
    if found is None or ours(type(retention).__module__):
        return found  # type: ignore[no-any-return]
    try:
        most = index(found)
    except TypeError:
        raise refuse(retention, "limit", found, "a number of tokens, or None") from None
    if not retention.decodes:
        raise PolicyError(
            f"{type(retention).__name__}.limit says that a row holds no more than {most} tokens while decoding, and with "
            "decodes = False nothing is dropped then: set it to True, or leave limit out"
        )
    within(retention, seen, keep, most)
    return most


def within(retention: Retention, seen: Seen, keep: Bool[Tensor, "row token"] | None, limit: int | None) -> None:
    """That a verdict leaves no more than the limit: the next token takes a slot that is free. Raises PolicyError."""
    if limit is None or not seen.position.is_cpu or ours(type(retention).__module__):
        return
    if (most := int((seen.valid if keep is None else keep).sum(1).max())) > limit:
        raise PolicyError(
            f"{type(retention).__name__}.keep left {most} tokens in a row, but its `limit` says that {limit} are the most: have "
            "it drop more, return a larger limit, or None"
        )


def of_kind(policy: object, method: str, found: Any, *kinds: type[Any]) -> Any:
    """What is an object of one of these classes, or None. Raises PolicyError."""
    if found is not None and not isinstance(found, kinds):
        raise refuse(policy, method, found, f"a {', or a '.join(kind.__qualname__ for kind in kinds)}, or None")
    return found


def due(retention: Retention, seen: Sequence[Seen]) -> Bool[Tensor, "sequence"]:
    """`Retention.due`. Raises PolicyError."""
    found: Any = retention.due(seen)
    sequences = len(seen[0].first) // seen[0].heads
    if not isinstance(found, Tensor) or found.dtype != torch.bool or list(found.shape) != [sequences]:
        raise refuse(retention, "due", found, f"bool [{sequences}], one for each sequence")
    return found


def shift(
    retention: Retention, position: Int[Tensor, "row token"], first: Int[Tensor, "row"]
) -> Int[Tensor, "row token"] | None:
    """`Retention.shift`. Raises PolicyError."""
    found: Any = ask(retention, "shift", position, first)
    if found is not None and (not isinstance(found, Tensor) or found.shape != position.shape):
        raise refuse(retention, "shift", found, f"whole numbers {list(position.shape)}, one for each slot, or None")
    return found


def folded(
    retention: Retention, seen: Seen, keep: Bool[Tensor, "row token"], dims: Sequence[int]
) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
    """`Retention.fold`, of every slot; `dims`: channels of a key and of a value. Raises PolicyError."""
    found, shapes = retention.fold(seen, keep), [[*seen.position.shape, dim] for dim in dims]
    if not floats(found, shapes):
        raise refuse(retention, "fold", found, f"(keys, values) of all slots, floats {shapes[0]} and {shapes[1]}")
    return found


def refolded(
    retention: Retention, seen: Seen, keep: Bool[Tensor, "row token"], dims: Sequence[int]
) -> tuple[Int[Tensor, "row"], Float[Tensor, "row dim"], Float[Tensor, "row dim_v"]]:
    """`Retention.refold`. Raises PolicyError."""
    found: Any = retention.refold(seen, keep)
    shapes = [[len(seen.first), dim] for dim in dims]
    right = isinstance(found, tuple) and floats(found[1:], shapes)
    if not right or not whole(found[0], seen.first):
        wanted = f"(slot, key, value): whole numbers {list(seen.first.shape)}, floats {shapes[0]} and {shapes[1]}"
        raise refuse(retention, "refold", found, wanted)
    return found  # type: ignore[no-any-return]


def floats(found: Any, shapes: Sequence[list[int]]) -> bool:
    """Whether these are floats of these shapes."""
    if not isinstance(found, tuple) or len(found) != len(shapes):
        return False
    pairs = zip(found, shapes, strict=True)
    return all(isinstance(x, Tensor) and x.is_floating_point() and list(x.shape) == shape for x, shape in pairs)


def shares(
    retention: Retention, seen: Sequence[Seen], measures: Sequence[Float[Tensor, "sequence ..."]]
) -> Sequence[Int[Tensor, "_"]]:
    """`Retention.share`, of the layers that wait. Raises PolicyError."""
    found: Any = retention.share(seen, measures)
    right = isinstance(found, list | tuple) and len(found) == len(seen)
    if not right or not all(whole(x, one.first) for x, one in zip(found, seen, strict=True)):
        raise refuse(
            retention, "share", found, f"{len(seen)} tensors of whole numbers, {list(seen[0].first.shape)} each"
        )
    return found  # type: ignore[no-any-return]


def whole(x: Any, rows: Tensor) -> bool:
    """Whether it is a whole number for each of these rows."""
    return isinstance(x, Tensor) and x.shape == rows.shape and not x.is_floating_point() and x.dtype != torch.bool


def exact(
    selection: Selection, k: Tensor, position: Int[Tensor, "row token"], prompt: Int[Tensor, "row"]
) -> Bool[Tensor, "row token"] | None:
    """`Selection.exact`. Raises PolicyError."""
    found: Any = ask(selection, "exact", k, position, prompt)
    if found is not None and (
        not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != position.shape
    ):
        raise refuse(selection, "exact", found, f"bool {list(position.shape)}, one for each token, or None")
    return found


def visible(
    prefill: Prefill, query: Int[Tensor, "query"], position: Int[Tensor, "row token"], first: Int[Tensor, "row"]
) -> Bool[Tensor, "row query token"] | None:
    """`Prefill.visible`. Raises PolicyError."""
    found: Any = ask(prefill, "visible", query, position, first)
    shape = (len(position), len(query), position.shape[1])
    if found is None:
        return None
    if not isinstance(found, Tensor) or found.dtype != torch.bool or found.shape != shape:
        raise refuse(prefill, "visible", found, f"bool {list(shape)}, [row, query, token], or None")
    here(prefill, "visible", found, position)
    return found


def choice(prefill: Prefill, found: Any, q: Tensor, some: int, tokens: int) -> Choice:
    """What `Prefill.choose` said of the last of so many tokens, of whose queries the first `some` read as it says. Raises
    PolicyError: spans beside the tokens would have a kernel read memory that is not theirs."""
    if ours(type(prefill).__module__):
        return found  # type: ignore[no-any-return]
    rows, group, queries, _ = q.shape
    name = f"{type(prefill).__name__}.choose returned"
    if not isinstance(found, tuple) or len(found) != 3 or type(found[1]) is not int or found[1] < 1:
        given = f", a block of {found[1]!r}" if isinstance(found, tuple) and len(found) == 3 else ""
        raise PolicyError(
            f"{name} {shown(found)}{given}, expected a Choice(spans, block, columns), with one query or more to a block"
        )
    spans, block, columns = found
    blocks, wide = -(-((tokens - queries) % block + some) // block), tokens
    for x in (spans,) if columns is None else (spans, columns):
        if not isinstance(x, Tensor) or x.dtype not in (torch.int32, torch.int64) or x.device != q.device:
            raise PolicyError(f"{name} {shown(x)}, expected spans and columns of int32 or int64 on {q.device}")
    if columns is not None:
        wide += columns.shape[-1]
        outside = columns.is_cpu and bool(((columns < 0) | (columns >= tokens)).any())
        if columns.ndim != 2 or len(columns) != rows or outside:
            raise PolicyError(
                f"{name} columns {list(columns.shape)}, expected [{rows}, column] of tokens 0 to {tokens - 1}"
            )
    wanted = f"[1, {rows} or {rows * group}, {blocks} or more, span, 2]: [start, end) of tokens 0 to {wide}, none in two spans"
    if spans.ndim != 4 or len(spans) not in (1, rows, rows * group) or spans.shape[1] < blocks or spans.shape[3] != 2:
        raise PolicyError(f"{name} spans {list(spans.shape)}, expected {wanted}")
    if spans.is_cpu:
        start, end = spans.clamp(max=wide).masked_fill((spans[..., :1] >= spans[..., 1:]), wide).unbind(-1)
        order = start.argsort(-1)
        start, end = start.gather(-1, order), end.gather(-1, order)
        if bool((start < 0).any()) or bool((end[..., :-1] > start[..., 1:]).any()):
            raise PolicyError(f"{name} spans that begin before 0 or overlap, expected {wanted}")
    return Choice(spans, block, columns)
