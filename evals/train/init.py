"""Initial weights that hold a lookup circuit: heads that look a fixed number of tokens back, and heads that match.

From an ordinary random start, lookup by a key of several tokens sits on a plateau for millions of tokens; small CPU
runs do not leave it. Here the plateau is laid aside: layer 0 writes the identity of the last few tokens into separate
parts of the hidden state, layers 1 and 2 compare such runs of tokens and copy what followed. Nothing is frozen and the
result is a plain `LlamaForCausalLM`; a model made this way is a test instrument, no evidence about learning.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

EMBEDDING_STD = 0.02


@dataclass(frozen=True)
class Gains:
    """Strengths of the circuit's parts (dimensionless factors on weights)."""

    constant: float = 0.25  # channel 0 of every embedding, in units of EMBEDDING_STD * sqrt(hidden)
    offset_logit: float = 30.0  # score at the offset's peak
    inside: float = 1.8  # embeddings within the part that is copied
    outside: float = 0.5  # and in the rest, where other tokens are written
    write: float = 0.02  # what layer 0 writes
    match: float = 1.1  # query and key of a matching head
    copy: float = 0.08  # what a matching head writes
    suppress: float = 0.06  # what the heads write that keep a list from repeating itself
    mlp: float = 0.3  # factor on the random down projections
    final: float = 5.0  # the last norm: tied embeddings this small could not be told apart otherwise


def tiny_config(
    vocab: int, *, hidden: int, layers: int, heads: int, kv_heads: int, ff: int, **extra: Any
) -> LlamaConfig:
    """A standard Llama configuration: head size 64, tied embeddings, RoPE base 1e7."""
    return LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ff,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
        max_position_embeddings=16384,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=EMBEDDING_STD,
        **extra,
    )


def frequencies(config: Any) -> Tensor:
    """Angle per position of each rotary pair, float32[head_dim / 2]."""
    half = config.head_dim // 2
    base = float(config.rope_parameters["rope_theta"])
    return base ** -(torch.arange(half) / half)  # type: ignore[no-any-return]


@torch.enable_grad()
def pair_weights(omega: Tensor, total: float, length: int = 8192, steps: int = 300) -> Tensor:
    """Non-negative weights w of the rotary pairs, sum `total`, whose score sum_i w_i cos(omega_i x) over distances x
    in (-32, length) is peaked as sharply as can be at x = 0 after softmax."""
    distance = torch.arange(-32, length).float()
    waves = torch.cos(omega[:, None] * distance)
    raw = torch.zeros(len(omega), requires_grad=True)
    optimiser = torch.optim.Adam([raw], lr=0.1)
    for _ in range(steps):
        score = total * raw.softmax(0) @ waves
        loss = score.logsumexp(0) - score[32]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return (total * raw.softmax(0)).detach()


class Circuit:
    """Writes the circuit into a model made from `tiny_config`."""

    def __init__(self, model: LlamaForCausalLM, seed: int, gains: Gains | None = None) -> None:
        self.config = cast(Any, model.config)
        self.gains = gains or Gains()
        self.layers = [layer.self_attn for layer in model.model.layers]
        self.generator = torch.Generator().manual_seed(seed)
        self.size = self.config.head_dim
        self.offsets = self.config.num_attention_heads
        self.rank = min(self.size // 2, self.config.hidden_size // (self.offsets + 2))
        self.omega = frequencies(self.config)
        self.weights = pair_weights(self.omega[: self.size // 4], self.gains.offset_logit)
        self._split_space()
        self._embed(model)

    def _split_space(self) -> None:
        """Orthogonal parts of the hidden state (without channel 0): own token, one per offset, what is left."""
        hidden, rank = self.config.hidden_size, self.rank
        square = torch.randn(hidden - 1, hidden - 1, generator=self.generator)
        basis = torch.cat([torch.zeros(hidden - 1, 1), torch.linalg.qr(square)[0]], 1)
        parts = basis[: (self.offsets + 1) * rank].view(self.offsets + 1, rank, hidden)
        self.parts = list(parts)
        own = [*parts[0], *basis[(self.offsets + 1) * rank :]][: self.size]
        self.own = torch.stack(own)
        low = self.size // 2 - len(self.slow)
        self.codes = [self._projection(self.size - 2 * low, rank) for _ in range(2 * self.offsets)]

    @property
    def slow(self) -> list[int]:
        """Rotary pairs that turn by less than two radians or so in 8192 positions: nearly blind to position."""
        return [pair for pair, angle in enumerate(self.omega.tolist()) if angle * 8192 < 2.5]

    def _projection(self, rows: int, columns: int) -> Tensor:
        """A random map that keeps lengths as well as it can."""
        square = torch.randn(max(rows, columns), min(rows, columns), generator=self.generator)
        tall = torch.linalg.qr(square)[0]
        return tall if rows >= columns else tall.T

    def _embed(self, model: LlamaForCausalLM) -> None:
        table = model.model.embed_tokens.weight
        table.normal_(0, EMBEDDING_STD, generator=self.generator)
        inside = table @ self.own.T @ self.own
        table.copy_(self.gains.outside * (table - inside) + self.gains.inside * inside)
        table[:, 0] = self.gains.constant * EMBEDDING_STD * math.sqrt(self.config.hidden_size)
        normal = table / table.pow(2).mean(-1, keepdim=True).sqrt()
        self.constant = normal[:, 0].mean().item()
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(self.gains.mlp)

    def _rows(self, head: int) -> slice:
        return slice(head * self.size, (head + 1) * self.size)

    def look_back(self, layer: int, head: int, offset: int, constant: float) -> None:
        """Make the query head (and its KV head's keys) attend `offset` tokens back whatever the content."""
        attention, count, half = self.layers[layer], len(self.weights), self.size // 2
        amplitude = (self.weights * math.sqrt(self.size)).sqrt()
        key, query = torch.zeros(self.size), torch.zeros(self.size)
        key[:count] = amplitude
        query[:count] = amplitude * torch.cos(self.omega[:count] * offset)
        query[half : half + count] = -amplitude * torch.sin(self.omega[:count] * offset)
        kv_head = head * self.config.num_key_value_heads // self.config.num_attention_heads
        for weight, rows, column in (
            (attention.q_proj.weight, self._rows(head), query),
            (attention.k_proj.weight, self._rows(kv_head), key),
        ):
            weight[rows, 1:] *= 0.05 if weight[rows, 1:].std() > 0.2 * EMBEDDING_STD else 1.0
            weight[rows, 0] = column / constant

    def lay_offsets(self) -> None:
        """Layer 0: head h writes the token h + 1 places back into part h + 1."""
        attention = self.layers[0]
        for head in range(self.offsets):
            self.look_back(0, head, head + 1, self.constant)
        for kv_head in range(self.config.num_key_value_heads):
            attention.v_proj.weight[self._rows(kv_head)] *= 0.05
            attention.v_proj.weight[self._rows(kv_head)][: self.rank] = self.parts[0]
        for head in range(self.offsets):
            columns = attention.o_proj.weight[:, self._rows(head)]
            columns *= 0.05
            columns[:, : self.rank] = self.gains.write * self.parts[head + 1].T

    def _side(self, terms: Sequence[tuple[int, int, float]]) -> Tensor:
        """Weights that read, for each (offset, code, gain), the token `offset` places back through that code."""
        half, low = self.size // 2, self.slow
        rows = torch.tensor([*low, *(half + pair for pair in low)])
        weight = torch.zeros(self.size, self.config.hidden_size)
        for offset, code, gain in terms:
            weight[rows] += self.gains.match * gain * self.codes[code] @ self.parts[offset]
        return weight

    def match_keys(self, layer: int, kv_head: int, terms: Sequence[tuple[int, int, float]]) -> None:
        """Keys of a KV head, and its values: the token at the key's own place."""
        attention = self.layers[layer]
        attention.k_proj.weight[self._rows(kv_head)] = self._side(terms)
        attention.v_proj.weight[self._rows(kv_head)][: len(self.own)] = self.own

    def match_query(self, layer: int, head: int, terms: Sequence[tuple[int, int, float]]) -> None:
        """Query of a head that copies the value it finds to where the token's own identity is."""
        attention = self.layers[layer]
        attention.q_proj.weight[self._rows(head)] = self._side(terms)
        attention.o_proj.weight[:, self._rows(head)][:, : len(self.own)] = self.gains.copy * self.own.T

    def lay_list_heads(self, model: LlamaForCausalLM, offsets: Sequence[int] = (3, 7, 11)) -> None:
        """Last layer: heads of the last KV head make what stands there less likely to come again.

        Values of three tokens and commas between them: at a comma, earlier values begin 3, 7 and 11 tokens back.
        """
        layer, kv_head = len(self.layers) - 1, self.config.num_key_value_heads - 1
        ids = torch.randint(0, self.config.vocab_size, (2, 256), generator=self.generator)
        states = model(ids, output_hidden_states=True).hidden_states[layer]
        constant = (states[..., 0] / states.pow(2).mean(-1).sqrt()).mean().item()
        attention = self.layers[layer]
        attention.v_proj.weight[self._rows(kv_head)][: len(self.own)] = self.own
        for place, offset in enumerate(offsets):
            head = self.config.num_attention_heads - 1 - place
            self.look_back(layer, head, offset, constant)
            columns = attention.o_proj.weight[:, self._rows(head)]
            columns[:, : len(self.own)] = -self.gains.suppress * self.own.T


@torch.no_grad()
def lay_circuit(model: LlamaForCausalLM, seed: int = 0, gains: Gains | None = None) -> LlamaForCausalLM:
    """Write the circuit into the model's weights, in place.

    Layer 0 gets one look-back head per query head. In layers 1 and 2, heads of KV head 0 find the token that follows a
    needle's key and ` is:`, by the last tokens of the key; a head of the last KV head is an ordinary induction head
    over the last three tokens.
    """
    circuit = Circuit(model, seed, gains)
    circuit.lay_offsets()
    model.model.norm.weight.fill_(circuit.gains.final)
    heads, kv_heads, most = circuit.offsets, circuit.config.num_key_value_heads, circuit.offsets
    ahead = [(3 + n, n, 1.0 - 0.1 * n) for n in range(4) if 3 + n <= most]  # where a value starts, its key ended 3 back
    behind = [(n, n, 1.0) for n in range(len(ahead))]
    before = [(n + 1, 8 - n - 1, 1.0) for n in range(3) if 2 * most >= 8]
    here = [(n, 8 - n - 1, (1.6, 0.9, 0.6)[n]) for n in range(len(before))]
    for layer in range(1, min(3, circuit.config.num_hidden_layers)):
        circuit.match_keys(layer, 0, ahead)
        circuit.match_query(layer, 0, behind)
        if most >= 6:
            circuit.match_query(layer, 1, [(6, 0, 2.0)])  # at the end of the prefix, the key ended 6 tokens back
        if kv_heads > 1:
            circuit.match_keys(layer, kv_heads - 1, before)
            circuit.match_query(layer, heads - 1, here)
    if kv_heads > 1 and heads >= 6 and circuit.config.num_hidden_layers > 3:
        circuit.lay_list_heads(model)
    return model
