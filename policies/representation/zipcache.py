"""ZipCache (He et al., NeurIPS 2024, arXiv:2405.14256): more bits for the tokens that attention singles out.

    saliency_i   =  sum over probes k >= i of A_ki  /  number of probes k >= i               (A summed over the group)
    salient      =  the `salient` share of each block with most saliency: `high` bits; the others: `low` bits
    key          of channel c, over the block's tokens of one width:    code = round((x - min) / s)
    value        y_tc = x_tc / sqrt(max_t |x_tc|),  then of token t, over its channels:    the same
                 s = (max - min) / (2^b - 1)

Probes are `probes` of the prompt's queries: half of them the last ones, half spread over the rest. While decoding, a
token's saliency goes on as the mean attention it receives among the tokens not yet quantised.

Effective bits, with b = salient high + (1 - salient) low: b + 64 / block + 1 / dim for keys, b + 32 / dim + 16 / block
for values. With 60 % of 4 and 40 % of 2 bits, blocks of 128 and 128 channels: 3.71 and 3.58.

Defaults: 4 and 2 bits, 60 % salient and 5 % + 5 % probes as in the official demo; blocks of 128 tokens (it re-quantises
every 100).

Differs from the official code: saliency is divided by the number of probes that see a token, as in the paper, where the
code divides by the number of all queries that do, and so understates early tokens up to tenfold; a block is quantised
once, where the code decodes and re-quantises everything each 100 tokens; the salient share is taken of each block, not
of the whole prompt, so that pages have one size; which tokens are salient costs one bit, not two lists of integers;
ranges are never shared between heads or sequences; spread probes follow a fixed sequence instead of chance. With a
retention that accumulates attention while decoding (H2O), its evidence takes the place of saliency.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels.quantise import pack, unpack
from kvengine.policies._budget import check_choice, check_count, top
from kvengine.policies.representation import Fields, Representation

TINY = 1e-8


@dataclass(frozen=True)
class ZipCache(Representation):
    """Codes of two widths, the wider ones for salient tokens; keys by channel, values by token and channel.

    Args:
        high: bits of a salient token's codes.
        low: bits of the other tokens' codes.
        salient: share of the tokens that are salient. A fraction.
        block: tokens quantised together. A multiple of 8.
        probes: share of the prompt's queries that decide saliency. A fraction.
    """

    high: int = 4
    low: int = 2
    salient: float = 0.6
    block: int = 128
    probes: float = 0.1

    def __post_init__(self) -> None:
        widths = (1, 2, 4, 8)
        check_choice(self, high=(self.high, widths), low=(self.low, widths))
        check_count(self, least=8, block=self.block)
        if self.block % 8:
            raise PolicyError(
                f"ZipCache: block={self.block} must be a multiple of 8, so that its mask fills whole bytes"
            )
        for name, value in (("salient", self.salient), ("probes", self.probes)):
            if not 0 <= value <= 1:
                raise PolicyError(f"ZipCache: {name}={value!r} must be a fraction between 0 and 1")
        if not self.probes:
            raise PolicyError("ZipCache: probes=0 leaves nobody to decide saliency; give a fraction such as 0.1")

    @property
    def multiple(self) -> int:
        return self.block

    def best(self, page: int) -> int:
        """Salient tokens of a page."""
        return round(self.salient * page)

    def encode(
        self,
        k: Float[Tensor, "page token dim"],
        v: Float[Tensor, "page token dim_v"],
        score: Float[Tensor, "page token"],
    ) -> Fields:
        count = torch.full((len(k),), self.best(k.shape[1]), device=k.device)
        salient = top(score.float(), count)
        channel = v.float().abs().amax(1).sqrt().clamp(min=TINY).half()
        scaled = v.float() / channel.float().clamp(min=TINY)[:, None]
        fields = {"mask": pack(salient.to(torch.uint8), 1), "v_channel": channel}
        for name, bits, chosen in (("high", self.high, salient), ("low", self.low, ~salient)):
            at = places(chosen)
            if not at.shape[1]:
                continue
            fields |= {f"k_{name}_{x}": y for x, y in codes(rows(k.float(), at), bits, 1).items()}
            fields |= {f"v_{name}_{x}": y for x, y in codes(rows(scaled, at), bits, 2).items()}
        return fields

    def decode(self, fields: Fields) -> tuple[Float[Tensor, "page token dim"], Float[Tensor, "page token dim_v"]]:
        salient = unpack(fields["mask"], 1).bool()
        order = (~salient).to(torch.uint8).argsort(dim=1, stable=True).argsort(1)  # salient ones first, without a wait
        found = []
        for side in ("k", "v"):
            widths = ((f"{side}_high_", self.high), (f"{side}_low_", self.low))
            parts = [values(fields, name, bits) for name, bits in widths if f"{name}code" in fields]
            found.append(rows(torch.cat(parts, 1), order))
        return found[0], found[1] * fields["v_channel"].float()[:, None]


def places(chosen: Bool[Tensor, "page token"]) -> Int[Tensor, "page n"]:
    """Where the chosen tokens of each page are; every page has as many."""
    return chosen.nonzero()[:, 1].view(len(chosen), -1)


def rows(x: Float[Tensor, "page token dim"], at: Int[Tensor, "page n"]) -> Float[Tensor, "page n dim"]:
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[2]))


def codes(x: Float[Tensor, "page n dim"], bits: int, axis: int) -> Fields:
    """Codes of whole pages, with one range for all that lies along `axis`.

    Codes are taken against the range as it is stored, in half precision, so that its rounding does not add up.
    """
    if x.shape[2] * bits % 8:
        raise PolicyError(f"ZipCache: {x.shape[2]} channels of {bits} bits do not fill whole bytes; use more bits")
    least, most = x.amin(axis), x.amax(axis)
    least, step = least.half(), ((most - least.half().float()) / (2**bits - 1)).half()
    offset, scale = least.float().unsqueeze(axis), step.float().clamp(min=TINY).unsqueeze(axis)
    code = ((x - offset) / scale).round().clamp(0, 2**bits - 1).to(torch.uint8)
    return {"code": pack(code, bits), "min": least, "step": step}


def values(fields: Fields, name: str, bits: int) -> Float[Tensor, "page n dim"]:
    code = unpack(fields[f"{name}code"], bits).float()
    least, step = fields[f"{name}min"].float(), fields[f"{name}step"].float()
    axis = 1 if name.startswith("k") else 2
    return code * step.unsqueeze(axis) + least.unsqueeze(axis)
