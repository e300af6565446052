"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): all heads read one vector per token.

    latent     of a token:  [c | r],  c [rank] made of it, r [rope] its rotated part
    key        of head h:   [U_h c | r]                value:  W_h c
    as the model has it:    softmax(q_h . key_h) value_h,     for which every token's keys and values are made, of all heads
    absorbed:               W_h (softmax([U_h^T q_h | r_h] . [c | r]) c)

Absorbed, the heads are queries of one key head, whose keys are the latents and whose values are their first channels: a
decoded token reads each latent once, nothing is made of it, and every policy knows what to do. A prompt's queries are so
many that making keys and values costs less.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional as F

from kvengine import readers
from kvengine.cache import LayerCache, Stock
from kvengine.errors import UnsupportedPolicy
from kvengine.kernels.attention import attention
from kvengine.kernels.dispatch import DENSE_DIM, beyond, chosen
from kvengine.nested import nested, valueless
from kvengine.session import Call
from kvengine.stack import Stack

UNKNOWN = (
    "only 'full' works here, and no recording: the weights that make keys of latents are quantised, off-loaded or have "
    "an adapter"
)


def is_latent(module: Any) -> bool:
    """Whether this attention caches latents, and makes keys and values of them by a method of its own."""
    return hasattr(type(module), "expand_kv")


def configured(config: Any) -> bool:
    """Whether a model of this configuration caches latents, in some of its layers at least."""
    layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
    return any(getattr(layer, "kv_lora_rank", None) for layer in layers)


def channels(module: Any) -> tuple[int, int, bool]:
    """Of a latent; its first ones, which are read as a value; and that these are held once."""
    return module.kv_lora_rank + module.qk_rope_head_dim, module.kv_lora_rank, True


def expanded(module: Any, latents: Float[Tensor, "seq 1 token latent"]) -> tuple[Tensor, Tensor]:
    """Keys [seq, head, token, dim] and values [seq, head, token, dim_v], as the model makes them."""
    c, r = latents.split([module.kv_lora_rank, latents.shape[-1] - module.kv_lora_rank], -1)
    found: tuple[Tensor, Tensor] = module.expand_kv(c, r)
    return found


def known(module: Any) -> bool:
    """Whether the weights are as they seem, and here: what is quantised, off-loaded or has an adapter only its layer knows."""
    layer: Any = getattr(module, "kv_b_proj", None)
    return type(layer) is nn.Linear and layer.bias is None and not layer.weight.is_meta


def pays(module: Any, queries: int) -> bool:
    """Whether so many queries cost less absorbed than keys and values would."""
    rank, wide = module.kv_lora_rank, module.qk_nope_head_dim + module.v_head_dim
    return known(module) and bool(queries * (2 * rank - wide) < rank * wide)


def weights(module: Any) -> tuple[Float[Tensor, "head nope rank"], Float[Tensor, "head dim_v rank"]]:
    """U and W, views of the model's own."""
    u, w = module.kv_b_proj.weight.unflatten(0, (-1, module.qk_nope_head_dim + module.v_head_dim)).split(
        [module.qk_nope_head_dim, module.v_head_dim], 1
    )
    return u, w


def absorb(module: Any, query: Float[Tensor, "seq head token dim"]) -> Float[Tensor, "seq head token latent"]:
    """Queries that ask latents what `query` asks keys."""
    nope = module.qk_nope_head_dim
    return torch.cat([query[..., :nope] @ weights(module)[0], query[..., nope:]], -1)


def as_one_head(
    module: Any,
    query: Float[Tensor, "seq head token dim"],
    c: Float[Tensor, "seq 1 token rank"],
    r: Float[Tensor, "seq 1 token rope"],
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the one head that latents are.

    Raises UnsupportedPolicy if the weights that make keys and values of them are not known.
    """
    if not known(module):
        raise UnsupportedPolicy(UNKNOWN)
    return absorb(module, query), torch.cat([c, r], -1), c


def plainly_held(model: nn.Module, stack: Stack, layers: Sequence[LayerCache]) -> list[tuple[LayerCache, Any]]:
    """Layers whose latents are held for the model's own attention, as 'full' does, and the modules that read them.

    Where the model names what is read, latents are held as policies read them from the first on.
    """
    found: dict[Any, Any] = {module.layer_idx: module for module in model.modules() if is_latent(module)}
    pairs = [(layer, found[layer.layer]) for layer in layers if stack == Stack() and layer.layer in found]
    return [(layer, module) for layer, module in pairs if not (layer.named and known(module))]


def with_values(cache: LayerCache, module: Any) -> None:
    """Have latents that 'full' holds for the model's own attention read as policies read them: their first channels are values.

    Raises UnsupportedPolicy as `as_one_head`.
    """
    if not known(module):
        raise UnsupportedPolicy(UNKNOWN)
    cache.inner = module.kv_lora_rank
    for part in cache.parts:
        part.lane.inner, part.lane.tail = cache.inner, nested(part.lane.tail, module.kv_lora_rank)


def without_values(cache: LayerCache) -> None:
    """As they were."""
    vars(cache).pop("inner", None)
    for part in cache.parts:
        part.lane.inner, part.lane.tail = None, valueless(part.lane.tail)


def restore(module: Any, found: Float[Tensor, "seq token head rank"]) -> Float[Tensor, "seq token head dim_v"]:
    """What heads make of the latents that they have read."""
    return (found.transpose(1, 2) @ weights(module)[1].transpose(1, 2)).transpose(1, 2)


def forward(
    cache: LayerCache,
    module: Any,
    query: Float[Tensor, "seq head token latent"],
    k: Float[Tensor, "seq 1 token latent"],
    v: Float[Tensor, "seq 1 token rank"],
    call: Call,
    valid: Bool[Tensor, "seq token"] | None,
    stock: Stock,
) -> Float[Tensor, "seq token head dim_v"]:
    """`LayerCache.forward` for what `as_one_head` says."""
    answered: list[Tensor] = []

    def prompt(k: Tensor, v: Tensor) -> Tensor:
        answered.append(stock(k, v))
        return answered[0]

    out = cache.forward(query, k, v, call, valid, prompt)
    return out if answered else restore(module, out)


def read(
    cache: LayerCache,
    module: Any,
    query: Float[Tensor, "seq head token dim"],
    call: Call,
    stock: Stock,
    where: torch.device,
) -> Float[Tensor, "seq token head dim_v"]:
    """`readers.read` for a later layer, whose weights are here, of latents that are there.

    Raises UnsupportedPolicy as `as_one_head`.
    """
    if not known(module):
        raise UnsupportedPolicy(UNKNOWN)
    answered: list[Tensor] = []

    def prompt(k: Tensor, v: Tensor) -> Tensor:
        answered.append(stock(k.to(query.device), v.to(query.device)))
        return answered[0]

    named = None if call.named is None else call.named.to(where)
    out = readers.read(cache, absorb(module, query).to(where), call._replace(named=named), prompt)
    return out if answered else restore(module, out.to(query.device))


def attend(
    module: Any,
    query: Float[Tensor, "seq head token dim"],
    latents: Float[Tensor, "seq 1 all latent"],
    mask: Bool[Tensor, "seq 1 token all"] | None,
    scale: float,
) -> Float[Tensor, "seq token head dim_v"]:
    """Absorbed attention of the newest tokens over all latents. `mask`: what each sees; None: all up to its own."""
    heads, tokens = query.shape[1:3]
    if mask is None and tokens > 1:
        earlier = latents.shape[2] - tokens
        mask = torch.ones(tokens, latents.shape[2], dtype=torch.bool, device=query.device).tril(earlier)[None, None]
    asked, k = absorb(module, query), latents[:, 0]
    v = k[..., : module.kv_lora_rank]
    wide = k.shape[-1]
    if chosen((asked, k), None, wide <= DENSE_DIM, 0 if beyond(k, v) else wide) != "reference":
        visible = None if mask is None else mask[:, 0].expand(len(k), -1, -1)
        return restore(module, attention(asked, k, v, visible, scale).out.to(query.dtype).transpose(1, 2))
    if mask is not None and tokens > 1:
        mask = mask.expand(-1, heads, -1, -1).flatten(1, 2)[:, None]  # query rows of one key head: (head, token)
    asked = asked.flatten(1, 2)[:, None]
    # Values as wide as the keys, of which the first channels count: kernels want one width, and nothing is copied.
    found = F.scaled_dot_product_attention(asked, latents, latents, mask, scale=scale)[..., : module.kv_lora_rank]
    return restore(module, found[:, 0].unflatten(1, (heads, tokens)).transpose(1, 2))
