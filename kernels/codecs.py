"""How pages hold keys and values: the layouts that `paged_attention` reads.

`P` pages of `page` slots; the fields of one pool share the page axis.

* "dense": `k` [P, page, D], `v` [P, page, Dv], in float32, bfloat16 or float16.
* "kivi" (arXiv 2402.02750): keys grouped per channel over runs of `g` tokens, values per token over runs of `h`
  channels: `k_code` uint8 [P, page, D * bits / 8], `k_scale`, `k_zero` [P, page / g, D]; `v_code` uint8
  [P, page, Dv * bits / 8], `v_scale`, `v_zero` [P, page, Dv / h]. Keys and values may differ in bits (1, 2, 4, 8).
* "quantspec" (arXiv 2502.10424): "kivi" with 4 bits, and `k_low`, `v_low` uint8 [P, page, D / 2], nibbles that refine
  it: a value is `zero + (code + (low - 8) / 16) * scale`. Without them it reads as "kivi".
* "turboquant" (arXiv 2504.19874): codes of turned vectors, and a scale for each: `k_code` uint8 [P, page, D * bits / 8]
  (bits 1 to 4), `k_scale` [P, page, 1]; `v_code`, `v_scale` alike. See `kvengine.kernels.turboquant`.
* "zipcache" (arXiv 2405.14256): `n` tokens of each page are salient and have more bits; `mask` uint8 [P, page / 8] has
  a bit for each slot, set for those. `k_high` uint8 [P, n, D * bits / 8] holds their codes, `k_low` [P, page - n, ...]
  the others', each in the order of their slots; `k_scale`, `k_zero` [P, 2, D], per channel for the salient and the
  other tokens of the page; `v_high`, `v_low` alike; `v_scale`, `v_zero` [P, page, 1] per slot, over values divided by
  `v_channel` [P, Dv] (the square root of each channel's largest magnitude in the page).

Scales and zeros are float16, bfloat16 or float32. Codes are packed as in `kvengine.kernels.quantise`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from kvengine.errors import KernelError, unknown
from kvengine.kernels import turboquant
from kvengine.kernels.dispatch import chosen, pick
from kvengine.kernels.quantise import Quantised, dequantise, laid, pack, quantise, unpack

FIELDS = {
    "dense": ("k", "v"),
    "kivi": ("k_code", "k_scale", "k_zero", "v_code", "v_scale", "v_zero"),
    "quantspec": ("k_code", "k_scale", "k_zero", "k_low", "v_code", "v_scale", "v_zero", "v_low"),
    "turboquant": ("k_code", "k_scale", "v_code", "v_scale"),
    "zipcache": ("mask", "k_high", "k_low", "k_scale", "k_zero", "v_high", "v_low", "v_scale", "v_zero", "v_channel"),
}

Fields = Mapping[str, Tensor]


def check(codec: str, fields: Fields) -> None:
    """Raises KernelError if the codec is unknown or one of its fields is missing."""
    if codec not in FIELDS:
        raise KernelError(unknown("codec", codec, FIELDS))
    missing = [name for name in FIELDS[codec] if name not in fields]
    if missing:
        raise KernelError(
            f"codec {codec!r} needs the fields {list(FIELDS[codec])}; {missing} missing of {list(fields)}"
        )


def encode_kivi(
    k: Float[Tensor, "pages page dim"],
    v: Float[Tensor, "pages page dim_v"],
    bits: int | tuple[int, int],
    group: int,
    *,
    alive: Bool[Tensor, "pages page"] | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:
    """The "kivi" fields of whole pages. `bits`: of both, or (keys, values). `group`: tokens per key group and channels
    per value group; it must divide the page and the value dimension."""
    k_bits, v_bits = bits if isinstance(bits, tuple) else (bits, bits)
    keys = quantise(k, k_bits, group, "tokens", alive=alive, scale_dtype=scale_dtype)
    values = quantise(v, v_bits, group, "channels", alive=alive, scale_dtype=scale_dtype)
    return {f"{side}_{name}": x for side, q in (("k", keys), ("v", values)) for name, x in q._asdict().items()}


def encode_zipcache(
    k: Float[Tensor, "pages page dim"],
    v: Float[Tensor, "pages page dim_v"],
    bits: tuple[int, int],
    salient: Bool[Tensor, "pages page"],
    *,
    count: int | None = None,
    alive: Bool[Tensor, "pages page"] | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:
    """The "zipcache" fields of whole pages. `bits`: (salient, others). `salient`: as many in every page, which are
    `count`; without it they are counted, for which the host waits. `alive`: tokens that count in ranges (None: all).

    Differs from the paper in that ranges are taken per page, so a page never has to be quantised again when others
    arrive. Raises KernelError if the counts differ, or a page does not fill whole bytes of the mask.
    """
    counts = {count} if count is not None else set(salient.sum(1).tolist())
    if k.shape[1] % 8 or len(counts) != 1:
        raise KernelError(
            f"a mixed page needs a multiple of 8 slots and as many salient tokens as every other; got {k.shape[1]} slots "
            f"and counts {sorted(counts)}"
        )
    channel = v.to(torch.float32).abs().amax(1).sqrt().to(scale_dtype)
    channel = torch.where(channel > 0, channel, 1)  # as it is kept: what is too small for the dtype divides nothing
    even = v.to(torch.float32) / channel[:, None].to(torch.float32)
    keys, values = [], []
    for at, width in zip(slots := places(salient, counts.pop()), bits, strict=True):
        seen = None if alive is None else alive.gather(1, at)
        keys.append(_quantised(rows(k, at), width, "tokens", scale_dtype, seen))
        values.append(_quantised(rows(even, at), width, "channels", scale_dtype, None))
    back = torch.cat(slots, 1).argsort(1)
    mask = torch.zeros_like(salient, dtype=torch.uint8).scatter_(1, slots[0], 1)
    fields = {"mask": pack(mask, 1), "v_channel": channel}
    for name, i in (("scale", 1), ("zero", 2)):
        fields[f"k_{name}"] = torch.cat([part[i] for part in keys], 1)
        fields[f"v_{name}"] = rows(torch.cat([part[i] for part in values], 1), back)
    for side, parts in (("k", keys), ("v", values)):
        fields |= {f"{side}_high": parts[0].code, f"{side}_low": parts[1].code}
    return fields


def _quantised(
    x: Float[Tensor, "pages n dim"],
    bits: int,
    over: Literal["tokens", "channels"],
    scale_dtype: torch.dtype,
    alive: Bool[Tensor, "pages n"] | None,
) -> Quantised:
    """Codes with one range along an axis; of no tokens, no codes."""
    pages, n, dim = x.shape
    if n:
        return quantise(x, bits, n if over == "tokens" else dim, over, alive=alive, scale_dtype=scale_dtype)
    scale = x.new_zeros((pages, 1, dim) if over == "tokens" else (pages, 0, 1), dtype=scale_dtype)
    return Quantised(x.new_zeros(pages, 0, dim * bits // 8, dtype=torch.uint8), scale, scale)


def places(salient: Bool[Tensor, "pages page"], n: int) -> tuple[Int[Tensor, "pages n"], Int[Tensor, "pages m"]]:
    """The slots of each page's `n` salient tokens, and those of the others, in order."""
    order = (~salient).to(torch.uint8).argsort(dim=1, stable=True)
    return order[:, :n], order[:, n:]


def rows(x: Float[Tensor, "pages page dim"], at: Int[Tensor, "pages n"]) -> Float[Tensor, "pages n dim"]:
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))


def decode(codec: str, fields: Fields, dim: int, dim_v: int) -> tuple[Tensor, Tensor]:
    """Keys [P, page, dim] and values [P, page, dim_v] of whole pages, float32 (the stored dtype for "dense")."""
    check(codec, fields)
    if codec == "dense":
        return fields["k"], fields["v"]
    stored = {name: fields[name] for name in FIELDS[codec]}
    if chosen(tuple(stored.values()), None, laid(dim, dim_v)) == "native":
        run = pick("quantise", tuple(stored.values()), "native")
        k, v = run.decode(codec, stored, "k", dim), run.decode(codec, stored, "v", dim_v)
        return (turboquant.turned(k), turboquant.turned(v)) if codec == "turboquant" else (k, v)
    if codec == "turboquant":
        k, v = (
            turboquant.decode(fields[f"{side}_code"], fields[f"{side}_scale"], d)
            for side, d in (("k", dim), ("v", dim_v))
        )
        return k, v
    if codec == "kivi":
        return _plain(fields, "k", dim), _plain(fields, "v", dim_v)
    if codec == "quantspec":
        return _fine(fields, "k", dim), _fine(fields, "v", dim_v)
    keys, values = _mixed(fields, "k", dim), _mixed(fields, "v", dim_v)
    return keys, values * fields["v_channel"].to(torch.float32)[:, None]


def gather(
    codec: str, fields: Fields, where: Int[Tensor, "row token"], run: int, page: int, dim: int, dim_v: int
) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
    """Keys and values of the named slots (indices into the pool seen as one run of slots), `run` of a page at a time.

    Shapes follow from those given, so that the step that asks can be recorded.
    """
    if codec == "dense":
        return fields["k"].flatten(0, 1)[where], fields["v"].flatten(0, 1)[where]
    if run < page and codec != "zipcache":  # whose tokens lie by their salience
        each = {name: _each(fields[name], where.flatten(), page) for name in FIELDS[codec]}
        k, v = decode(codec, each, dim, dim_v)
        return k.view(*where.shape, dim), v.view(*where.shape, dim_v)
    pages = (where[:, ::run] // page).flatten()
    k, v = decode(codec, {name: fields[name][pages] for name in FIELDS[codec]}, dim, dim_v)
    local = torch.arange(len(pages), device=where.device).repeat_interleave(run).view(where.shape) * page + where % page
    return k.flatten(0, 1)[local], v.flatten(0, 1)[local]


def _each(
    x: Shaped[Tensor, "pages n *more"], where: Int[Tensor, "token"], page: int
) -> Shaped[Tensor, "token 1 *more"]:
    """Of a field that has something for each token of a page, or for so many tokens: what is of these, as pages of one token."""
    return x[where // page, where % page // (page // x.shape[1])][:, None]


def bytes_of(
    codec: str, fields: Fields, where: Int[Tensor, "row token"], there: Bool[Tensor, "row token"], page: int
) -> int:
    """Bytes that attention to these slots reads (those that are `there`; indices into the pool seen as one run of slots): of each
    field what belongs to one of them, or to the key group or the page of one, once for each row."""
    size, (row, at) = 0, (there.nonzero()[:, 0], where[there].long())
    for name, number in _numbers(codec, fields, at, page).items():
        x = fields[name]
        numbers = (row * len(x) * page + number)[number >= 0].unique()
        size += numbers.numel() * x.shape[-1] * x.element_size()
    return size


def _numbers(codec: str, fields: Fields, at: Int[Tensor, " token"], page: int) -> dict[str, Int[Tensor, " token"]]:
    """For each field, the number of what belongs to each of these slots; -1 where nothing does."""
    if codec != "zipcache":
        return {name: at // (page // x.shape[1]) for name, x in fields.items()}
    plain = 1 - (fields["mask"].flatten()[at // 8] >> (at % 8).to(torch.uint8) & 1).long()
    ranges = {"k_scale": 2 * (at // page) + plain, "k_zero": 2 * (at // page) + plain, "v_scale": at, "v_zero": at}
    codes = {"high": at.masked_fill(plain == 1, -1), "low": at.masked_fill(plain == 0, -1)}
    own = {f"{side}_{name}": number for side in "kv" for name, number in codes.items()}
    return {"mask": at // page, "v_channel": at // page, **ranges, **own}


def _plain(fields: Fields, side: str, dim: int) -> Tensor:
    code = fields[f"{side}_code"]
    return dequantise(Quantised(code, fields[f"{side}_scale"], fields[f"{side}_zero"]), width(code, dim))


def _fine(fields: Fields, side: str, dim: int) -> Tensor:
    upper = _plain(fields, side, dim)
    return upper + (unpack(fields[f"{side}_low"], 4).float() - 8) * spread(fields[f"{side}_scale"], upper) / 16


def spread(scale: Float[Tensor, "pages groups channels"], like: Float[Tensor, "pages page dim"]) -> Tensor:
    """The scale of each number, in float32."""
    tokens, channels = (size // parts for size, parts in zip(like.shape[1:], scale.shape[1:], strict=True))
    return scale.float().repeat_interleave(tokens, 1).repeat_interleave(channels, 2)


def _mixed(fields: Fields, side: str, dim: int) -> Tensor:
    high, low, scale, zero = (fields[f"{side}_{name}"] for name in ("high", "low", "scale", "zero"))
    at = places(unpack(fields["mask"], 1).bool(), high.shape[1])
    parts = []
    for i, code in enumerate((high, low)):
        if not code.shape[1]:
            continue
        ranges = (x[:, i : i + 1] if side == "k" else rows(x, at[i]) for x in (scale, zero))
        parts.append(dequantise(Quantised(code, *ranges), width(code, dim)))
    return rows(torch.cat(parts, 1), torch.cat(at, 1).argsort(1))


def width(code: Tensor, dim: int) -> int:
    """Bits per code, from the packed size. Raises KernelError if it is not one that can be packed."""
    bits, rest = divmod(code.shape[-1] * 8, dim)
    if rest or bits not in (1, 2, 4, 8):
        raise KernelError(f"{code.shape[-1]} bytes for {dim} channels is not 1, 2, 4 or 8 bits per code; check dim_v")
    return bits
