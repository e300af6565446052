"""What a policy's methods return of pages, looked at where it comes in, as in `kvengine.answers`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.answers import ask, here, refuse, shown, version
from kvengine.errors import KernelError, PolicyError
from kvengine.kernels import codecs
from kvengine.offload.placement import Placement, Shelf
from kvengine.policies import ours
from kvengine.policies.representation import Fields, Representation
from kvengine.policies.selection import Selection, Where

Forms = Mapping[str, tuple[torch.dtype, torch.Size]]
"""What each named tensor holds of a page, or of a unit."""


def summary(
    selection: Selection,
    k: Float[Tensor, "page token dim"],
    there: Bool[Tensor, "page unit _"] | None,
    per: int,
    before: Fields | None = None,
) -> Fields:
    """`Selection.summarise` of the units of pages, `per` to a page; `there`: None if each of their slots holds a token. `before`:
    what is remembered of units so far, by row and unit. Raises PolicyError."""
    if type(selection).summarise is Selection.summarise:
        return {}
    units = k if per == 1 else k.unflatten(1, (per, -1)).flatten(0, 1)
    valid = None if there is None else there.flatten(0, 1)
    if valid is None and not ours(type(selection).__module__):  # those of the package know what None means
        valid = units.new_ones(units.shape[:2], dtype=torch.bool)
    found = named(selection, "summarise", ask(selection, "summarise", units, valid), len(k) * per, "unit", k)
    if before and not ours(type(selection).__module__):
        kept = {name: x for name, x in found.items() if name in before or name not in selection.spare}
        alike(selection, "summarise", kept, {name: (x.dtype, x.shape[2:]) for name, x in before.items()}, "unit")
    return found


def fields(representation: Representation, k: Tensor, v: Tensor, score: Tensor, before: Forms) -> Fields:
    """`Representation.encode`, of which pages so far have the forms `before`. Raises PolicyError, also if `decode` does not lead
    back from it."""
    found = named(representation, "encode", ask(representation, "encode", k, v, score), len(k), "page", k)
    if ours(type(representation).__module__):
        return found
    if not found:
        raise refuse(representation, "encode", found, "a tensor or more for each page")
    alike(representation, "encode", found, before, "page")
    try:
        if representation.codec:
            codecs.check(representation.codec, found)
    except KernelError as error:
        raise PolicyError(
            f"{type(representation).__name__}: kernels cannot read its pages by codec={representation.codec!r}: {error}; "
            "without a codec they are decoded"
        ) from error
    returns(representation, found, k, v, score)
    return found


def returns(representation: Representation, found: Fields, k: Tensor, v: Tensor, score: Tensor) -> None:
    """That `Representation.decode` leads back from what `encode` made of tokens. Raises PolicyError."""
    pages = slice(None) if k.is_cpu else slice(1)
    back = decoded(representation, {name: x[pages] for name, x in found.items()})
    there = (score[pages] > float("-inf"))[..., None]
    for was, x in list(zip((k[pages], v[pages]), back, strict=True))[representation.joint :]:
        if x.shape != was.shape or not x.is_floating_point() or x.dtype.itemsize < 2:
            wanted = f"floats of 16 bits or more, as `encode` was given them, {shown((k[:1], v[:1]))} for one page"
            raise refuse(representation, "decode", tuple(x[:1] for x in back), wanted)
        here(representation, "decode", x, was)
        if x.is_cpu and bool((x.isnan() & ~was.isnan() & there).any()):
            raise PolicyError(
                f"{type(representation).__name__}.decode returned NaN for tokens that `encode` was given as numbers: look for a "
                "division by zero, such as the range of numbers that are all alike"
            )


def alike(policy: object, method: str, found: Fields, before: Forms, what: str) -> None:
    """That it has the names, dtypes and shapes of what is held. Raises PolicyError."""
    forms = {name: (x.dtype, x.shape[1:]) for name, x in found.items()}
    if before and forms != before:
        told = [", ".join(f"{n!r}: {str(t)[6:]} {list(s)}" for n, (t, s) in each.items()) for each in (forms, before)]
        raise PolicyError(
            f"{type(policy).__name__}.{method} returned, for each {what}, {{{told[0]}}}, and for earlier ones {{{told[1]}}}: "
            f"names, dtypes and shapes must be the same for all {what}s"
        )


def named(policy: object, method: str, found: Any, count: int, what: str, like: Tensor) -> Fields:
    wanted = f"tensors by name, with {count} {what}s as the first axis of each"
    if not isinstance(found, dict):
        raise refuse(policy, method, found, f"a dict of {wanted}")
    for name, x in found.items():
        if not isinstance(x, Tensor) or not x.ndim or len(x) != count:
            raise refuse(policy, f"{method} ({name!r})", x, wanted)
        here(policy, method, x, like)
    return found


def decoded(representation: Representation, given: Fields) -> tuple[Tensor, Tensor]:
    """`Representation.decode`. Raises PolicyError."""
    found: Any = ask(representation, "decode", given)
    pages = len(next(iter(given.values()), ()))
    right = isinstance(found, tuple) and len(found) == 2 and all(isinstance(x, Tensor) and x.ndim == 3 for x in found)
    if not right or given and {len(x) for x in found} != {pages}:
        wanted = f"keys [page, token, dim] and values [page, token, dim_v] of {pages} pages"
        raise refuse(representation, "decode", found, wanted)
    return found


def joined(representation: Representation, k: Float[Tensor, "seq head token dim"]) -> Fields:
    """`Representation.join`. Raises PolicyError."""
    return named(representation, "join", ask(representation, "join", k), len(k), "sequence", k)


def keys(
    representation: Representation, joined: Fields, token: Int[Tensor, "row chosen"]
) -> Float[Tensor, "row chosen dim"]:
    """`Representation.keys`. Raises PolicyError."""
    found: Any = ask(representation, "keys", joined, token)
    if (
        not isinstance(found, Tensor)
        or not found.is_floating_point()
        or found.ndim != 3
        or found.shape[:2] != token.shape
    ):
        raise refuse(
            representation, "keys", found, f"floats [{len(token)}, {token.shape[1]}, dim], a key for each place"
        )
    return found


def chosen(
    selection: Selection,
    q: Float[Tensor, "row group dim"],
    summary: Fields,
    alive: Bool[Tensor, "row unit"],
    at: Where,
) -> Int[Tensor, "row chosen"] | None:
    """`Selection.select`: units of each row. Raises PolicyError, on CPUs also where a caller's own wrote into a summary."""
    own, (rows, most) = not ours(type(selection).__module__), alive.shape
    # That is looked at as numbers: it may reshape a view of what it is given in place, which counts as if it had written.
    lent = [(name, x, x.clone(), version(x)) for name, x in summary.items() if own and x.is_cpu]
    found: Any = selection.select(*((q.clone(), summary, alive.clone()) if own else (q, summary, alive)), at)
    for name, x, before, written in lent:
        if version(x) != written and x.shape == before.shape and not torch.equal(x, before):
            raise PolicyError(
                f"{type(selection).__name__}.select wrote into the summary {name!r}, which is the cache's: write into a .clone()"
            )
    if found is None:
        return None
    wanted = f"int32 or int64 [{rows}, chosen]: units from 0 to {most - 1}, or -1; or None"
    right = isinstance(found, Tensor) and found.dtype in (torch.int32, torch.int64) and found.ndim == 2
    if not right or len(found) != rows:
        raise refuse(selection, "select", found, wanted)
    here(selection, "select", found, alive)
    if own and found.is_cpu and found.numel():
        some = found.sort(1).values
        for wrong in (int(some[:, -1].max()), int(some[:, 0].min())):
            if not -1 <= wrong < most:
                raise PolicyError(f"{type(selection).__name__}.select returned unit {wrong}, expected {wanted}")
        twice = (some[:, 1:] == some[:, :-1]) & (some[:, 1:] >= 0)
        if bool(twice.any()):
            raise PolicyError(
                f"{type(selection).__name__}.select returned unit {int(some[:, 1:][twice][0])} twice in a row, whose tokens "
                f"would count twice; expected {wanted}, each once"
            )
    return found


def shelves(placement: Placement, found: Any) -> list[Shelf]:
    """What `Placement.open` returned. Raises PolicyError."""
    if not isinstance(found, list) or not found or not all(isinstance(shelf, Shelf) for shelf in found):
        raise PolicyError(
            f"{type(placement).__name__}.open returned {found!r}, expected a list of shelves that together keep every field, "
            "each with all that `kvengine.offload.placement.Shelf` has; `Flat` is one to derive from"
        )
    return found
