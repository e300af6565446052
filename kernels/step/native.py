"""The C version on the CPU (`kv_step` in `kvengine/kernels/cpu/step.c`)."""

from __future__ import annotations

import ctypes
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.cpu import library


class Ends(NamedTuple):
    """Which tokens stay, if where they are decides: of each row those before position `first`, and the `recent` newest."""

    first: Tensor  # int64 [row]
    recent: Tensor  # int64 [row]


class Paid(NamedTuple):
    """How a decoded token's attention judges: of each row the `recent` newest tokens stay, and the best others, `budget` in all.

    A token's score is what its row's queries paid to it, on top of the score that it had if this `adds`. Of equal ones the
    later are better.
    """

    budget: Tensor  # int64 [row]
    recent: Tensor  # int64 [row]
    reduce: Literal["mean", "max", "sum"] = "mean"  # over the queries of a row
    adds: bool = False
    together: int = 1  # rows, one after the other, that judge by the mean over all of them; with "mean" only
    first: Tensor | None = None  # int64 [row]: tokens before this position go last, after those that are recent


class Sealed(NamedTuple):
    """`Ends`, for sealed tokens too, which are written to."""

    ends: Ends
    position: Tensor  # int32 [row, token]: tokens may lie apart from row to row
    alive: Tensor  # bool [row, unit]: whether a unit of them, of as many tokens as make them all, still holds one


class Merged(NamedTuple):
    """A verdict, and the token that goes is merged into that of those left whose key is most `like` its own, by the cosine;
    into the earliest of several that are as like.

    `threshold` moves on, to like if it was NaN, else to beta like + (1 - beta) threshold; a token is merged if like reaches
    it. Keys and values then are (e x + exp(like) gone) / (e + exp(like)), or, if this `shrinks`, (x + like gone) / 2.
    """

    paid: Paid
    threshold: Tensor  # float32 [row], written to
    beta: float
    shrinks: bool = False
    spares: bool = True  # tokens before `paid.first` take none in


class Placed(NamedTuple):
    """Of each row that holds more than `budget` tokens, that goes which comes `place`-th by position, counted from 0."""

    budget: Tensor  # int64 [row]
    place: Tensor  # int64 [row]


Rule = Ends | Sealed | Paid | Merged | Placed
DTYPES = {torch.float32: 0, torch.bfloat16: 1}


class Step(ctypes.Structure):
    """One call; mirrors step.h."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in (
            "rows", "group", "dim", "dim_v", "dtype", "slots", "start", "end", "at", "holes", "threads", "fill",
        )),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in (
            "q", "k", "v", "keys", "values", "position", "out", "first", "recent", "far", "budget", "place",
            "score", "threshold",
        )),
        *((name, ctypes.c_int64) for name in ("adds", "together", "most", "shrinks", "spares")),
        ("part", ctypes.c_float),
        ("beta", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("sealed", "alive")),
        *((name, ctypes.c_int64) for name in ("sealed_row", "alive_row", "units", "unit")),
    ]  # fmt: skip


class Slots:
    """Slots that one token after the other is put into, looked at and described to C once.

    Raises KernelError where the C kernels are not there.
    """

    def __init__(self, keys: Tensor, values: Tensor, position: Tensor | None) -> None:
        self.keys, self.values, self.position = keys, values, position
        rows, slots, self.dim = keys.shape
        self.dtype, self.dim_v = keys.dtype, values.shape[2]
        self.sizes = rows * self.dim, rows * self.dim_v
        self.call = Step(
            rows=rows, dim=self.dim, dim_v=self.dim_v, dtype=DTYPES[self.dtype], slots=slots, keys=keys.data_ptr(),
            values=values.data_ptr(), position=None if position is None else position.data_ptr(),
        )  # fmt: skip
        self.where, self.run = ctypes.byref(self.call), library.needed().kv_step

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """None, to who copies what holds this: a copy has other slots, and describes those."""
        return type(None), ()

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether the C version can run on this token."""
        dtype = self.dtype
        return (
            q.dtype is dtype and k.dtype is dtype and v.dtype is dtype
            and q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
            and (k.numel(), v.numel()) == self.sizes and q.shape[-1] == self.dim and q.is_cpu
            and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, self.keys, self.values)))
        )  # fmt: skip

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, start: int, end: int, at: int, holes: bool, scale: float,
        fill: bool = False, rule: Rule | None = None, far: int | None = None, score: Tensor | None = None,
    ) -> Tensor | None:  # fmt: skip
        """See `kvengine.kernels.step`; None, with nothing done, if the C version cannot run on this token.

        `far`: where the description of sealed pages lies that are read too (`kvengine.kernels.paged_attention.Described`).
        """
        if not self.takes(q, k, v):
            return None
        seq, heads = q.shape[:2]
        out = q.new_empty(seq, 1, heads, self.dim_v)
        call = self.call
        call.group, call.start, call.end, call.at, call.holes = q.numel() // self.sizes[0], start, end, at, holes
        call.q, call.k, call.v, call.out = q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr()
        call.scale, call.threads, call.fill = scale, torch.get_num_threads(), fill
        call.far, call.score = far, None if score is None else score.data_ptr()
        self.follow(rule)
        failed = self.run(self.where)
        if failed == 1:
            raise KernelError("the native step kernel could not allocate its buffers")
        return None if failed else out

    def follow(self, rule: Rule | None) -> None:
        """Describe what stays."""
        call = self.call
        call.first = call.budget = call.place = call.threshold = call.sealed = None
        if isinstance(rule, Sealed):
            position, alive, rule = rule.position, rule.alive, rule.ends
            call.sealed, call.sealed_row = position.data_ptr(), position.stride(0)
            call.alive, call.alive_row, call.units = alive.data_ptr(), alive.stride(0), alive.shape[1]
            call.unit = position.shape[1] // alive.shape[1]
        if isinstance(rule, Merged):
            call.threshold, call.beta = rule.threshold.data_ptr(), rule.beta
            call.shrinks, call.spares, rule = rule.shrinks, rule.spares, rule.paid
        if isinstance(rule, Paid):
            call.budget, call.recent, call.adds = rule.budget.data_ptr(), rule.recent.data_ptr(), rule.adds
            call.first = None if rule.first is None else rule.first.data_ptr()
            call.together, call.most = rule.together, rule.reduce == "max"
            call.part = 1 / (call.group * rule.together) if rule.reduce == "mean" else 1
        elif isinstance(rule, Placed):
            call.budget, call.place = rule.budget.data_ptr(), rule.place.data_ptr()
        elif rule is not None:
            call.first, call.recent = rule.first.data_ptr(), rule.recent.data_ptr()


def step(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, position: Tensor | None, start: int, end: int,
    at: int, holes: bool, scale: float, fill: bool, rule: Rule | None, score: Tensor | None,
) -> Tensor:  # fmt: skip
    """See `kvengine.kernels.step`."""
    out = Slots(keys, values, position).step(q, k, v, start, end, at, holes, scale, fill, rule, None, score)
    if out is None:
        raise KernelError("the native step kernel cannot run on this token")
    return out
