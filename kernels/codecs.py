"""How pages hold keys and values: the layouts that `paged_attention` reads.

`P` pages of `page` slots; the fields of one pool share the page axis.

* "dense": `k` [P, page, D], `v` [P, page, Dv], in float32, bfloat16 or float16.
* "kivi" (arXiv 2402.02750): keys grouped per channel over runs of `g` tokens, values per token over runs of `h`
  channels: `k_code` uint8 [P, page, D * bits / 8], `k_scale`, `k_zero` [P, page / g, D]; `v_code` uint8
  [P, page, Dv * bits / 8], `v_scale`, `v_zero` [P, page, Dv / h]. Keys and values may differ in bits (1, 2, 4, 8).
* "zipcache" (arXiv 2405.14256): the first slots of each page are salient and have more bits. `k_high` uint8
  [P, n, D * bits / 8], `k_low` [P, page - n, ...]; `k_scale`, `k_zero` [P, 2, D], per channel for the salient and the
  other tokens of the page; `v_high`, `v_low` alike; `v_scale`, `v_zero` [P, page, 1] per token, over values divided by
  `v_channel` [P, Dv] (the square root of each channel's largest magnitude in the page). As a token carries its
  position, a page may order its tokens by salience, which spares a mask.

Scales and zeros are float16, bfloat16 or float32. Codes are packed as in `kvengine.kernels.quantise`.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import KernelError, unknown
from kvengine.kernels.quantise import Quantised, dequantise, quantise

FIELDS = {
    "dense": ("k", "v"),
    "kivi": ("k_code", "k_scale", "k_zero", "v_code", "v_scale", "v_zero"),
    "zipcache": ("k_high", "k_low", "k_scale", "k_zero", "v_high", "v_low", "v_scale", "v_zero", "v_channel"),
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
    salient: int,
    *,
    alive: Bool[Tensor, "pages page"] | None = None,
    scale_dtype: torch.dtype = torch.float16,
) -> dict[str, Tensor]:
    """The "zipcache" fields of whole pages, whose first `salient` slots hold the salient tokens.

    `bits`: (salient, others). Differs from the paper in that ranges are taken per page, so a page never has to be
    quantised again when others arrive.
    """
    page = k.shape[1]
    if not 0 < salient < page:
        raise KernelError(f"a mixed page needs tokens of both kinds; got salient={salient} of {page} slots")
    live = torch.ones_like(k[..., 0], dtype=torch.bool) if alive is None else alive
    largest = v.to(torch.float32).abs().masked_fill(~live[..., None], 0).amax(1)
    channel = torch.where(largest > 0, largest.sqrt(), 1).to(scale_dtype)
    even = v.to(torch.float32) / channel[:, None].to(torch.float32)
    parts = []
    for part, width in ((slice(0, salient), bits[0]), (slice(salient, page), bits[1])):
        seen = live[:, part]
        parts.append(
            (
                quantise(k[:, part], width, k[:, part].shape[1], "tokens", alive=seen, scale_dtype=scale_dtype),
                quantise(even[:, part], width, v.shape[-1], "channels", alive=seen, scale_dtype=scale_dtype),
            )
        )
    (k_high, v_high), (k_low, v_low) = parts
    return {
        "k_high": k_high.code,
        "k_low": k_low.code,
        "k_scale": torch.cat([k_high.scale, k_low.scale], 1),
        "k_zero": torch.cat([k_high.zero, k_low.zero], 1),
        "v_high": v_high.code,
        "v_low": v_low.code,
        "v_scale": torch.cat([v_high.scale, v_low.scale], 1),
        "v_zero": torch.cat([v_high.zero, v_low.zero], 1),
        "v_channel": channel,
    }


def decode(codec: str, fields: Fields, dim: int, dim_v: int) -> tuple[Tensor, Tensor]:
    """Keys [P, page, dim] and values [P, page, dim_v] of whole pages, float32 (the stored dtype for "dense")."""
    check(codec, fields)
    if codec == "dense":
        return fields["k"], fields["v"]
    if codec == "kivi":
        return _plain(fields, "k", dim), _plain(fields, "v", dim_v)
    keys, values = _mixed(fields, "k", dim), _mixed(fields, "v", dim_v)
    return keys, values * fields["v_channel"].to(torch.float32)[:, None]


def gather(
    codec: str, fields: Fields, where: Int[Tensor, "row token"], page: int, dim: int, dim_v: int
) -> tuple[Float[Tensor, "row token dim"], Float[Tensor, "row token dim_v"]]:
    """Keys and values of the named slots (indices into the pool seen as one run of slots)."""
    if codec == "dense":
        return fields["k"].flatten(0, 1)[where], fields["v"].flatten(0, 1)[where]
    pages, inverse = (where // page).unique(return_inverse=True)
    k, v = decode(codec, {name: fields[name][pages] for name in FIELDS[codec]}, dim, dim_v)
    local = inverse * page + where % page
    return k.flatten(0, 1)[local], v.flatten(0, 1)[local]


def _plain(fields: Fields, side: str, dim: int) -> Tensor:
    code = fields[f"{side}_code"]
    return dequantise(Quantised(code, fields[f"{side}_scale"], fields[f"{side}_zero"]), width(code, dim))


def _mixed(fields: Fields, side: str, dim: int) -> Tensor:
    high, low, scale, zero = (fields[f"{side}_{name}"] for name in ("high", "low", "scale", "zero"))
    if side == "k":  # one scale per channel for each kind
        cuts = (slice(0, 1), slice(1, 2))
    else:  # one scale per token
        cuts = (slice(0, high.shape[1]), slice(high.shape[1], None))
    parts = [
        dequantise(Quantised(code, scale[:, cut], zero[:, cut]), width(code, dim))
        for code, cut in ((high, cuts[0]), (low, cuts[1]))
    ]
    return torch.cat(parts, 1)


def width(code: Tensor, dim: int) -> int:
    """Bits per code, from the packed size. Raises KernelError if it is not one that can be packed."""
    bits, rest = divmod(code.shape[-1] * 8, dim)
    if rest or bits not in (1, 2, 4, 8):
        raise KernelError(f"{code.shape[-1]} bytes for {dim} channels is not 1, 2, 4 or 8 bits per code; check dim_v")
    return bits
