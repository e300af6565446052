"""The Llama forward pass for training: the same mathematics, with the work left out that only answers need."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM


def _block(length: int) -> int:
    """Rows per block: small blocks waste less above the diagonal, large ones multiply faster."""
    return 256 if length <= 1024 else 512


class BlockAttention(torch.autograd.Function):
    """Causal attention in blocks of query rows by plain matrix products: on CPUs with fast bfloat16 products, about
    twice as fast as the fused kernel of torch. Keeps the probabilities (T * T / 2 numbers per head) for the backward.

    queries [N, G, T, D], already scaled; keys and values [N, T, D]; returns [N, G, T, D].
    """

    @staticmethod
    def forward(context: Any, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        outputs, kept, size = [], [], _block(queries.shape[2])
        for start in range(0, queries.shape[2], size):
            stop = min(start + size, queries.shape[2])
            probabilities = _block_scores(queries[:, :, start:stop], keys[:, :stop], start).softmax(-1)
            kept.append(probabilities)
            outputs.append((probabilities @ values[:, :stop]).unflatten(1, (queries.shape[1], stop - start)))
        context.save_for_backward(queries, keys, values, *kept)
        return torch.cat(outputs, 2)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        queries, keys, values, *kept = context.saved_tensors
        d_queries, d_keys, d_values = torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(values)
        d_keys, d_values = d_keys.float(), d_values.float()
        size = _block(queries.shape[2])
        for block, probabilities in enumerate(kept):
            start, stop = block * size, min((block + 1) * size, queries.shape[2])
            rows, out = queries[:, :, start:stop].flatten(1, 2), gradient[:, :, start:stop].flatten(1, 2)
            d_values[:, :stop] += probabilities.mT @ out
            d_probabilities = out @ values[:, :stop].mT
            d_scores = torch._softmax_backward_data(d_probabilities, probabilities, -1, probabilities.dtype)
            d_queries[:, :, start:stop] = (d_scores @ keys[:, :stop]).unflatten(1, (queries.shape[1], stop - start))
            d_keys[:, :stop] += d_scores.mT @ rows
        return d_queries, d_keys.to(keys.dtype), d_values.to(values.dtype)


def _block_scores(rows: Tensor, keys: Tensor, start: int) -> Tensor:
    """Scores of a block of query rows [N, G, B, D] with all keys up to its end, [N, G * B, stop], future ones -inf."""
    size = rows.shape[2]
    scores = rows.flatten(1, 2) @ keys.mT
    future = torch.ones(size, size, dtype=torch.bool, device=rows.device).triu(1)
    scores.unflatten(1, rows.shape[1:3])[..., start:].masked_fill_(future, float("-inf"))
    return scores


def causal_attention(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """queries [B, H, T, D], keys and values [B, KV, T, D]; the fused kernel on GPUs, the block one on CPUs."""
    if queries.is_cuda:
        return F.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
    batch, heads, length, size = queries.shape
    kv_heads = keys.shape[1]
    rows = (queries * size**-0.5).view(batch * kv_heads, heads // kv_heads, length, size)
    mixed: Tensor = BlockAttention.apply(rows, keys.flatten(0, 1), values.flatten(0, 1))
    return mixed.view(batch, heads, length, size)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in half-split layout; the tables are float32 and broadcast over heads."""
    first, second = states.chunk(2, -1)
    turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
    return turned.to(states.dtype)


class Network:
    """Hidden states at chosen places of a batch, computed with the modules of a `LlamaForCausalLM`.

    All layers but the last run at every position; the last layer's queries, output and MLP only at the chosen places,
    as nothing else reads them. `tests/evals/test_train.py` compares with the model's own forward.
    """

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.model, self.config = model, cast(Any, model.config)
        half = self.config.head_dim // 2
        base = self.config.rope_parameters["rope_theta"]
        self.omega = (base ** -(torch.arange(half, dtype=torch.float64) / half)).to(model.device)

    def tables(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, float32[..., head_dim / 2], for positions int64[...]."""
        angles = places[..., None].double() * self.omega
        return angles.cos().float(), angles.sin().float()

    def heads(self, states: Tensor) -> Tensor:
        """[B, T, n * D] to [B, n, T, D]."""
        return states.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def __call__(self, ids: Tensor, places: Tensor) -> Tensor:
        """ids int64[B, T], places int64[B, N] (repeat one to fill up): normalised states [B, N, hidden]."""
        states = self.model.model.embed_tokens(ids)
        cos, sin = self.tables(torch.arange(ids.shape[1], device=ids.device))
        *layers, last = self.model.model.layers
        for layer in layers:
            attention, normal = layer.self_attn, _norm(layer.input_layernorm, states)
            queries, keys = (rotate(self.heads(f(normal)), cos, sin) for f in (attention.q_proj, attention.k_proj))
            mixed = causal_attention(queries, keys, self.heads(attention.v_proj(normal)))
            states = states + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            states = states + self._mlp(layer, states)
        return _norm(self.model.model.norm, self._last(last, states, places, cos, sin))

    def _last(self, layer: Any, states: Tensor, places: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attention, normal = layer.self_attn, _norm(layer.input_layernorm, states)
        keys, values = rotate(self.heads(attention.k_proj(normal)), cos, sin), self.heads(attention.v_proj(normal))
        index = places[..., None].expand(-1, -1, states.shape[-1])
        chosen = states.gather(1, index)
        own_cos, own_sin = self.tables(places)
        queries = self.heads(attention.q_proj(normal.gather(1, index)))
        queries = rotate(queries, own_cos[:, None], own_sin[:, None])
        reach = torch.arange(states.shape[1], device=places.device) <= places[..., None]
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        rows = queries.unflatten(1, (-1, groups)).flatten(2, 3) * self.config.head_dim**-0.5
        scores = (rows @ keys.mT).unflatten(2, (groups, -1))
        scores = scores.masked_fill(~reach[:, None, None], float("-inf"))
        mixed = scores.softmax(-1).to(values.dtype).flatten(2, 3) @ values
        mixed = mixed.unflatten(2, (groups, -1)).flatten(1, 2)
        chosen = chosen + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        return chosen + self._mlp(layer, chosen)

    def _mlp(self, layer: Any, states: Tensor) -> Tensor:
        normal = _norm(layer.post_attention_layernorm, states)
        wide = F.silu(layer.mlp.gate_proj(normal)) * layer.mlp.up_proj(normal)
        return layer.mlp.down_proj(wide)  # type: ignore[no-any-return]


def _norm(module: Any, states: Tensor) -> Tensor:
    return F.rms_norm(states, (states.shape[-1],), module.weight, module.variance_epsilon)
