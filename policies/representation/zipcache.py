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
retention that judges by attention while decoding (H2O, TOVA), or by a second reading of the prompt (KVzip), its evidence
takes the place of saliency; KVzip has none of tokens that come after the prompt: of a block of these the newest are salient.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import PolicyError
from kvengine.kernels import codecs
from kvengine.kernels.best_tokens import best_tokens
from kvengine.policies._budget import TOGETHER, check_choice, check_count, check_share
from kvengine.policies.representation import Fields, Representation


@dataclass(frozen=True)
class ZipCache(Representation):
    """Codes of two widths, the wider ones for salient tokens; keys by channel, values by token and channel.

    Args:
        high: bits of a salient token's codes: 1, 2, 4 or 8.
        low: bits of the other tokens' codes, no more than `high`.
        salient: share of the tokens that are salient. A fraction.
        block: tokens quantised together; several blocks are one where a page is larger: of 16 tokens at least, and of
            whole units that a selection reads. A multiple of 8.
        probes: share of the prompt's queries that decide saliency. A fraction.
    """

    codec: ClassVar[str] = "zipcache"
    high: int = 4
    low: int = 2
    salient: float = 0.6
    block: int = 128
    probes: float = 0.1

    def __post_init__(self) -> None:
        widths = (1, 2, 4, 8)
        check_choice(self, high=(self.high, widths), low=(self.low, widths))
        if self.low > self.high:
            raise PolicyError(
                f"ZipCache: low={self.low} must not exceed high={self.high}: salient tokens get the finer codes"
            )
        check_count(self, least=8, most=TOGETHER, block=self.block)
        if self.block % 8:
            raise PolicyError(
                f"ZipCache: block={self.block} must be a multiple of 8, so that its mask fills whole bytes"
            )
        check_share(self, salient=self.salient, probes=self.probes)
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
        count = self.best(k.shape[1])
        for side, x in (("keys", k), ("values", v)):
            if x.shape[2] * self.low % 8:
                raise PolicyError(
                    f"ZipCache: {x.shape[2]} channels of {self.low} bits do not fill whole bytes "
                    f"({side}); use more bits"
                )
        alive, least = score > float("-inf"), torch.finfo(torch.float32).min
        salient = best_tokens(score.float().clamp(min=least), torch.full((len(k),), count, device=k.device))
        return codecs.encode_zipcache(k, v, (self.high, self.low), salient, count=count, alive=alive)

    def decode(self, fields: Fields) -> tuple[Float[Tensor, "page token dim"], Float[Tensor, "page token dim_v"]]:
        dim, dim_v = fields["k_scale"].shape[2], fields["v_channel"].shape[1]
        return codecs.decode("zipcache", fields, dim, dim_v)
