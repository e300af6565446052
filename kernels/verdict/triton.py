"""The Triton kernels: what judges by place, what judges by the attention paid, and what becomes of a token that goes."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvengine.kernels.gpu import cdiv, next_power_of_2, scratch
from kvengine.kernels.gpu.again import launched_again
from kvengine.kernels.gpu.chain import chained, in_turn
from kvengine.kernels.gpu.select import MOST, best_placed, threshold, warps
from kvengine.kernels.step import Ends, Merged, Paid, Placed, Rule, Sealed
from kvengine.kernels.verdict import reference

BLOCK = 1024
"""Slots that a program looks at, where tokens are judged one by one."""


@launched_again
@triton.jit(do_not_specialize=["slots", "units", "tails", "position_row", "sealed_row", "alive_row"])
def ends_kernel(
    position, sealed, alive, first, recent, now, position_row, sealed_row, alive_row, slots, units, tails,
    UNIT: tl.constexpr, WIDE: tl.constexpr, UNITS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first `tails` programs of a row look at its tail, the others at UNITS units of what is sealed."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    in_turn(PDL)
    low, high = tl.load(first + row), tl.load(now) - tl.load(recent + row)
    if part < tails:
        s = part * BLOCK + tl.arange(0, BLOCK)
        at = position + row * position_row + s
        place = tl.load(at, mask=s < slots, other=-1)
        tl.store(at, -1, mask=(place >= 0) & (place >= low) & (place <= high))
    else:
        u, t = (part - tails) * UNITS + tl.arange(0, UNITS), tl.arange(0, WIDE)
        those = sealed + row * sealed_row + (u * UNIT)[:, None] + t[None, :]
        places = tl.load(those, mask=(u < units)[:, None] & (t < UNIT)[None, :], other=-1)
        goes = (places >= 0) & (places >= low) & (places <= high)
        tl.store(those, -1, mask=goes)
        stays = tl.max(((places >= 0) & (goes == 0)).to(tl.int32), 1)
        tl.store(alive + row * alive_row + u, stays != 0, mask=u < units)


@launched_again
@triton.jit(do_not_specialize=["slots", "position_row", "score_row"])
def paid_kernel(
    position, score, mass, gone, budget, recent, first, now, position_row, score_row, slots, group, share,
    TOGETHER: tl.constexpr, MOST_PAID: tl.constexpr, ADDS: tl.constexpr, SCORED: tl.constexpr, FIRST: tl.constexpr,
    GONE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    here = t < slots
    in_turn(PDL)
    place = tl.load(position + row * position_row + t, mask=here, other=-1)
    heads = row // TOGETHER * TOGETHER * group
    paid = tl.zeros([BLOCK], tl.float32)
    for head in range(0, group * TOGETHER):
        found = tl.load(mass + (heads + head) * slots + t, mask=here, other=0.0)
        paid = tl.maximum(paid, found) if MOST_PAID else paid + found
    paid *= share
    if ADDS:
        paid += tl.load(score + row * score_row + t, mask=here, other=0.0)
    tl.debug_barrier()  # where slots are few, several warps hold the same, and one may run ahead
    if SCORED:
        tl.store(score + row * score_row + t, paid, mask=here)
    worth = tl.where(place > tl.load(now) - tl.load(recent + row), 1e30, paid)
    if FIRST:
        early = place < tl.load(first + row)
        worth = tl.where(early, tl.where(worth == 1e30, 3e30, 2e30), worth)
    worth = tl.where(place < 0, -float("inf"), worth)
    goes = here & (place >= 0) & (best_placed(worth, tl.load(budget + row).to(tl.int32), place) == 0)
    tl.store(position + row * position_row + t, -1, mask=goes)
    if GONE:  # the first of them, or no slot
        tl.store(gone + row, tl.min(tl.where(goes, t, slots), 0))


@launched_again
@triton.jit(do_not_specialize=["slots", "position_row"])
def merge_kernel(
    keys, values, position, gone, threshold, first, keys_row, keys_slot, values_row, values_slot, position_row, slots, beta,
    DIM: tl.constexpr, BLOCK_D: tl.constexpr, DIM_V: tl.constexpr, BLOCK_V: tl.constexpr, SHRINKS: tl.constexpr,
    SPARES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A program looks through its row for the key most like the lost one's."""
    row = tl.program_id(0).to(tl.int64)
    in_turn(PDL)
    lost = tl.load(gone + row).to(tl.int64)
    if lost < slots:
        d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
        keys += row * keys_row
        values += row * values_row
        key = tl.load(keys + lost * keys_slot + d, mask=d < DIM, other=0.0).to(tl.float32)
        length = tl.maximum(tl.sqrt(tl.sum(key * key, 0)), 1e-12)
        low = tl.load(first + row) if SPARES else 0
        like, mate = tl.full([BLOCK], -2.0, tl.float32), tl.zeros([BLOCK], tl.int32)
        since = tl.zeros([BLOCK], tl.int32)  # the positions of these: of equals the earlier is taken
        for begin in range(0, slots, BLOCK):
            t = begin + tl.arange(0, BLOCK)
            place = tl.load(position + row * position_row + t, mask=t < slots, other=-1)
            there = (place >= 0) & (place >= low)
            at = keys + t.to(tl.int64)[:, None] * keys_slot + d[None, :]
            x = tl.load(at, mask=there[:, None] & (d < DIM)[None, :], other=0.0).to(tl.float32)
            own = tl.maximum(tl.sqrt(tl.sum(x * x, 1)), 1e-12)
            cosine = tl.sum(x * key[None, :], 1) / (own * length)
            better = there & ((cosine > like) | ((cosine == like) & (place < since)))
            like, mate, since = (
                tl.where(better, cosine, like),
                tl.where(better, t, mate),
                tl.where(better, place, since),
            )
        most = tl.max(like, 0)
        if most > -2.0:
            oldest = tl.min(tl.where(like == most, since, 2147483647), 0)
            slot = tl.min(tl.where((like == most) & (since == oldest), mate, slots), 0).to(tl.int64)
            before = tl.load(threshold + row)
            after = tl.where(before != before, most, beta * most + (1 - beta) * before)
            tl.debug_barrier()  # all warps must have read the threshold before one replaces it
            tl.store(threshold + row, after)
            if most >= after:
                own_part, weight, whole = 1.0, most, 2.0
                if not SHRINKS:
                    own_part, weight = 2.718281828459045, tl.exp(most)
                    whole = own_part + weight
                x = tl.load(keys + slot * keys_slot + d, mask=d < DIM, other=0.0).to(tl.float32)
                y = tl.load(values + slot * values_slot + e, mask=e < DIM_V, other=0.0).to(tl.float32)
                value = tl.load(values + lost * values_slot + e, mask=e < DIM_V, other=0.0).to(tl.float32)
                tl.debug_barrier()  # values may be a part of the keys
                tl.store(keys + slot * keys_slot + d, (own_part * x + weight * key) / whole, mask=d < DIM)
                tl.debug_barrier()
                tl.store(values + slot * values_slot + e, (own_part * y + weight * value) / whole, mask=e < DIM_V)


@launched_again
@triton.jit(do_not_specialize=["slots", "position_row"])
def placed_kernel(position, budget, wanted, position_row, slots, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    t = tl.arange(0, BLOCK)
    in_turn(PDL)
    place = tl.load(position + row * position_row + t, mask=t < slots, other=-1)
    there = place >= 0
    key = tl.where(there, -place, -2147483647)
    least = threshold(key, tl.load(wanted + row).to(tl.int32) + 1)
    gone = tl.min(tl.where(there & (key >= least), key, 2147483647), 0)
    full = tl.sum(there.to(tl.int32), 0) > tl.load(budget + row)
    tl.debug_barrier()  # where slots are few, several warps hold the same, and one may run ahead
    tl.store(position + row * position_row + t, -1, mask=full & there & (key == gone))


def verdict(
    rule: Rule, position: Tensor, now: Tensor, mass: Tensor | None, score: Tensor | None, keys: Tensor | None,
    values: Tensor | None,
) -> None:  # fmt: skip
    """See `kvengine.kernels.verdict`. More tokens than a program holds are judged by torch."""
    rows, slots = position.shape
    block = next_power_of_2(max(slots, 16))
    if not rows * slots or (slots > MOST and not isinstance(rule, Ends | Sealed)):
        return reference.verdict(rule, position, now, mass, score, keys, values)
    if isinstance(rule, Ends | Sealed):
        ends = rule.ends if isinstance(rule, Sealed) else rule
        sealed, alive = (rule.position, rule.alive) if isinstance(rule, Sealed) else (position[:, :0], position[:, :0])
        units = alive.shape[1]
        unit = sealed.shape[1] // units if units else 1
        wide, tails = next_power_of_2(unit), cdiv(slots, BLOCK)
        some = max(1, BLOCK // wide)
        ends_kernel[(rows, tails + cdiv(units, some))](
            position, sealed, alive, ends.first, ends.recent, now, position.stride(0), sealed.stride(0), alive.stride(0),
            slots, units, tails, UNIT=unit, WIDE=wide, UNITS=some, BLOCK=BLOCK,
            **chained(position.device),
        )  # fmt: skip
    elif isinstance(rule, Placed):
        placed_kernel[(rows,)](
            position, rule.budget, rule.place, position.stride(0), slots, BLOCK=block, num_warps=warps(block),
            **chained(position.device),
        )  # fmt: skip
    elif isinstance(rule, Paid) and mass is not None:
        _paid(rule, position, now, mass, score, None)
    elif isinstance(rule, Merged) and mass is not None and keys is not None and values is not None:
        gone = scratch(rows, dtype=torch.int32, device=position.device)
        _paid(rule.paid, position, now, mass, score, gone)
        first, (dim, dim_v) = rule.paid.first, (keys.shape[2], values.shape[2])
        block_d = next_power_of_2(dim)
        merge_kernel[(rows,)](
            keys, values, position, gone, rule.threshold, gone if first is None else first, keys.stride(0), keys.stride(1),
            values.stride(0), values.stride(1), position.stride(0), slots, rule.beta, DIM=dim, BLOCK_D=block_d, DIM_V=dim_v,
            BLOCK_V=next_power_of_2(dim_v), SHRINKS=rule.shrinks, SPARES=rule.spares and first is not None,
            BLOCK=max(16, 8192 // block_d), num_warps=8, **chained(position.device),
        )  # fmt: skip


def _paid(rule: Paid, position: Tensor, now: Tensor, mass: Tensor, score: Tensor | None, gone: Tensor | None) -> None:
    rows, slots = position.shape
    block = next_power_of_2(max(slots, 16))
    share = 1 / (mass.shape[1] * rule.together) if rule.reduce == "mean" else 1.0
    paid_kernel[(rows,)](
        position, position if score is None else score, mass, position if gone is None else gone, rule.budget, rule.recent,
        rule.budget if rule.first is None else rule.first, now, position.stride(0), 0 if score is None else score.stride(0),
        slots, mass.shape[1], share, TOGETHER=rule.together, MOST_PAID=rule.reduce == "max", ADDS=rule.adds,
        SCORED=score is not None, FIRST=rule.first is not None, GONE=gone is not None, BLOCK=block, num_warps=warps(block),
        **chained(position.device),
    )  # fmt: skip
