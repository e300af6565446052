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
    copy: float = 0.03  # what a matching head writes
    gate: float = 12.0  # how sharply a tag is written at one place only
    tag: float = 0.04  # what is written there
    tags: float = 2.0  # the keys that read it, in units of `match`
    sink: float = 13.0  # score of the first token for heads that match
    gather: float = 2.0  # query of the head that gathers what was found at the question's keys
    nearest: float = 20.0  # its score for nearness
    itself: float = 0.04  # what takes a token's own identity away from its prediction
    suppress: float = 0.02  # what the heads write that keep a list from repeating itself
    mlp: float = 0.3  # factor on the random down projections
    free: float = 0.1  # factor on the random output projections of heads that nothing is laid into
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
        self.omega = frequencies(self.config)
        room = self.config.hidden_size - 2 - 2 * len(self.slow)
        self.rank = min(self.size // 2, room // (self.offsets + 2))
        self.weights = pair_weights(self.omega[: self.size // 4], self.gains.offset_logit)
        self._split_space()
        self._embed(model)

    def _split_space(self) -> None:
        """Orthogonal parts of the hidden state (without channel 0): own token, one per offset, tags, what is left."""
        hidden, rank = self.config.hidden_size, self.rank
        square = torch.randn(hidden - 1, hidden - 1, generator=self.generator)
        basis = torch.cat([torch.zeros(hidden - 1, 1), torch.linalg.qr(square)[0]], 1)
        parts = basis[: (self.offsets + 1) * rank].view(self.offsets + 1, rank, hidden)
        self.parts = list(parts)
        tag = 2 * len(self.slow)
        self.sink, self.tag = basis[-1], basis[-1 - tag : -1]
        own = [*parts[0], *basis[(self.offsets + 1) * rank : -1 - tag]][: self.size]
        self.own = torch.stack(own)
        self.codes = [self._projection(tag, rank) for _ in range(2 * self.offsets)]

    @property
    def slow(self) -> list[int]:
        """Rotary pairs that turn by less than two radians or so in 8192 positions: nearly blind to position.

        The slowest is kept for the sink.
        """
        return [pair for pair, angle in enumerate(self.omega.tolist()) if angle * 8192 < 2.5][:-1]

    def _projection(self, rows: int, columns: int) -> Tensor:
        """A random map that keeps lengths as well as it can."""
        square = torch.randn(max(rows, columns), min(rows, columns), generator=self.generator)
        tall = torch.linalg.qr(square)[0]
        return tall if rows >= columns else tall.T

    def _embed(self, model: LlamaForCausalLM) -> None:
        table = model.model.embed_tokens.weight
        table.normal_(0, EMBEDDING_STD, generator=self.generator)
        inside = table @ self.own.T @ self.own
        rest = table - inside - table @ self.tag.T @ self.tag  # no embedding looks like a tag
        table.copy_(self.gains.outside * rest + self.gains.inside * inside)
        table[self.config.bos_token_id] = EMBEDDING_STD * math.sqrt(self.config.hidden_size) * self.sink
        table[:, 0] = self.gains.constant * EMBEDDING_STD * math.sqrt(self.config.hidden_size)
        normal = table / table.pow(2).mean(-1, keepdim=True).sqrt()
        self.constant = normal[:, 0].mean().item()
        for layer in model.model.layers:
            layer.mlp.down_proj.weight.mul_(self.gains.mlp)
            layer.self_attn.o_proj.weight.mul_(self.gains.free)

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

    def lay_tags(self, model: LlamaForCausalLM, marker: int, sides: Sequence[Sequence[tuple[int, int, float]]]) -> None:
        """MLP of layer 0: on the n-th token after the marker, and only there, write `sides[n - 1]` into the tags.

        Keys that hold something at few places are what real models have, and what page bounds can tell apart.
        """
        mlp = model.model.layers[0].mlp
        ids = torch.randint(0, self.config.vocab_size, (2, 256), generator=self.generator)
        ids[:, 200:216] = marker
        kept: list[Tensor] = []
        hook = mlp.register_forward_hook(lambda module, given, out: kept.append(given[0]))
        model(ids)
        hook.remove()
        states, count = kept[0], len(self.tag)
        constant = states[..., 0].mean()
        for place, side in enumerate(sides, 1):
            units = slice((place - 1) * count, place * count)
            sought = states[:, 200 + place : 216].mean((0, 1)) @ self.parts[place].T @ self.parts[place]
            sought = sought / sought.square().sum()  # 1 where the marker stood, about 0 elsewhere
            mlp.gate_proj.weight[units] = self.gains.gate * sought
            mlp.gate_proj.weight[units, 0] = -0.65 * self.gains.gate / constant
            read = sum(gain * self.codes[code] @ self.parts[offset] for offset, code, gain in side)
            mlp.up_proj.weight[units] = cast(Tensor, read)
            mlp.down_proj.weight[:, units] = self.gains.tag * self.tag.T / (0.35 * self.gains.gate)

    def match_keys(self, layer: int, kv_head: int, terms: Sequence[tuple[int, int, float]]) -> None:
        """Keys of a KV head, and its values: the token at the key's own place."""
        attention = self.layers[layer]
        attention.k_proj.weight[self._rows(kv_head)] = self._side(terms)
        attention.v_proj.weight[self._rows(kv_head)][: len(self.own)] = self.own

    def match_tags(self, layer: int, kv_head: int, factor: float) -> None:
        """Keys of a KV head are the tags, and its values the token at the key's own place."""
        attention, half, low = self.layers[layer], self.size // 2, self.slow
        weight = torch.zeros(self.size, self.config.hidden_size)
        rows = torch.tensor([*low, *(half + pair for pair in low)])
        weight[rows] = factor * self.gains.match * self.gains.tags * self.tag
        attention.k_proj.weight[self._rows(kv_head)] = weight
        attention.v_proj.weight[self._rows(kv_head)][: len(self.own)] = self.own

    def match_query(self, layer: int, head: int, terms: Sequence[tuple[int, int, float]]) -> None:
        """Query of a head that copies the value it finds to where the token's own identity is."""
        attention = self.layers[layer]
        attention.q_proj.weight[self._rows(head)] = self._side(terms)
        attention.o_proj.weight[:, self._rows(head)][:, : len(self.own)] = self._copy(layer) * self.own.T

    def _copy(self, layer: int) -> float:
        """What a matching head writes: little where a later layer still has to look things up."""
        return self.gains.copy * layer

    def lay_sink(self, model: LlamaForCausalLM, layer: int, heads: Sequence[int]) -> None:
        """Heads that find no match look at the first token, which holds nothing, and not at what is least unlike."""
        attention, constant, slowest = self.layers[layer], self.constant_at(model, layer), self.size // 2 - 1
        strength = math.sqrt(self.gains.sink * math.sqrt(self.size))
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        first = self.entering(model, layer, torch.tensor([[self.config.bos_token_id]]))[0, 0]
        away = torch.outer(self.own @ first, self.sink) / (self.sink @ first)
        for kv_head in {head // groups for head in heads}:
            attention.v_proj.weight[self._rows(kv_head)][: len(self.own)] -= away
            row = kv_head * self.size + slowest
            attention.k_proj.weight[row] = strength / math.sqrt(self.config.hidden_size) * self.sink
        for head in heads:
            attention.q_proj.weight[head * self.size + slowest, 0] = strength / constant

    def constant_at(self, model: LlamaForCausalLM, layer: int) -> float:
        """Mean of channel 0 of the normalised state that enters a layer."""
        ids = torch.randint(0, self.config.vocab_size, (2, 256), generator=self.generator)
        return self.entering(model, layer, ids)[..., 0].mean().item()

    def entering(self, model: LlamaForCausalLM, layer: int, ids: Tensor) -> Tensor:
        """Normalised states that enter a layer."""
        states = model(ids, output_hidden_states=True).hidden_states[layer]
        return cast(Tensor, states / states.pow(2).mean(-1, keepdim=True).sqrt())

    def lay_gathering(self, model: LlamaForCausalLM, layer: int, marker: int, pairs: range = range(5, 11)) -> None:
        """A head of the last KV head reads the nearest places just after the marker: what was found for each key."""
        attention, kv_head = self.layers[layer], self.config.num_key_value_heads - 1
        head, half = self.config.num_attention_heads - 3, self.size // 2
        constant = self.constant_at(model, layer)
        image = model.model.embed_tokens.weight[marker]
        image = image / image.pow(2).mean().sqrt()
        low = self.slow
        rows = torch.tensor([*low, *(half + pair for pair in low)])
        query = torch.zeros(self.size)
        query[rows] = self.gains.gather * (self.codes[5] @ (self.parts[0] @ image))
        near = torch.zeros(self.size)
        near[list(pairs)] = math.sqrt(self.gains.nearest * math.sqrt(self.size) / len(pairs))
        attention.k_proj.weight[self._rows(kv_head), 0] += near / constant
        attention.q_proj.weight[self._rows(head)] *= 0.05
        attention.q_proj.weight[self._rows(head), 0] = (query + near) / constant
        attention.o_proj.weight[:, self._rows(head)][:, : len(self.own)] = self._copy(layer) * self.own.T

    def lay_list_heads(self, model: LlamaForCausalLM, offsets: Sequence[int] = (0, 3, 7, 11)) -> None:
        """Last layer: heads of the last KV head make what stands there less likely to come again.

        Values of three tokens and commas between them: at a comma, earlier values begin 3, 7 and 11 tokens back.
        """
        layer, kv_head = len(self.layers) - 1, self.config.num_key_value_heads - 1
        constant = self.constant_at(model, layer)
        attention = self.layers[layer]
        attention.v_proj.weight[self._rows(kv_head)][: len(self.own)] = self.own
        for place, offset in enumerate(offsets):
            head = self.config.num_attention_heads - 1 - place
            self.look_back(layer, head, offset, constant)
            columns = attention.o_proj.weight[:, self._rows(head)]
            strength = self.gains.suppress if offset else self.gains.itself
            columns[:, : len(self.own)] = -strength * self.own.T


@torch.no_grad()
def lay_circuit(
    model: LlamaForCausalLM,
    seed: int = 0,
    gains: Gains | None = None,
    dash: int | None = None,
    colon: int | None = None,
) -> LlamaForCausalLM:
    """Write the circuit into the model's weights, in place.

    Layer 0 gets one look-back head per query head. With eight of them and the `colon` before a value, its MLP marks the
    value's tokens with the words of the key. In layers 1 and 2, heads of KV head 0 look these up: from the key in a
    question, from the end of the answer's prefix, and from the value's first two tokens. Heads of the last KV head go on
    with what was begun: an induction head over the last three tokens, and one over the last token and the key. With the
    `dash` within every key, a head of layer 2 gathers what layer 1 found at the keys of the question. Heads of the last
    layer take a token's own identity, and values already said, away from the prediction.
    """
    circuit = Circuit(model, seed, gains)
    circuit.lay_offsets()
    model.model.norm.weight.fill_(circuit.gains.final)
    heads, kv_heads, most = circuit.offsets, circuit.config.num_key_value_heads, circuit.offsets
    # Codes 0 to 4: noun and adjective for a value's first, second and third token; 5 to 8: the last tokens, the noun.
    within = [(0, 0, 1.0), (2, 1, 0.9)]
    after = [[(6, 0, 1.3), (8, 1, 1.1)], [(7, 2, 1.6)], [(8, 4, 1.6)]]
    before = [(1, 5, 1.0), (2, 6, 1.0), (3, 7, 1.0), (4, 8, 1.0)]
    here = [(0, 5, 1.6), (1, 6, 0.9), (2, 7, 0.6)]
    tagged = False
    if most >= 8 and colon is not None:
        tagged = True
        circuit.lay_tags(model, colon, [[(3, 0, 1.0), (5, 1, 0.9)], [(4, 2, 1.0), (6, 3, 0.9)], [(5, 4, 1.0)]])
    for layer in range(1, min(3, circuit.config.num_hidden_layers)):
        if tagged:
            circuit.match_tags(layer, 0, float(min(layer, 2)))
        else:
            circuit.match_keys(layer, 0, [term for term in ((3, 0, 1.0), (5, 1, 0.9)) if term[0] <= most])
        circuit.match_query(layer, 0, within)
        for place, terms in enumerate(after):
            if all(term[0] <= most for term in terms) and (tagged or not place):
                circuit.match_query(layer, 1 + place, terms)
        if kv_heads > 1:
            circuit.match_keys(layer, kv_heads - 1, before)
            circuit.match_query(layer, heads - 1, here)
            if most >= 7:
                circuit.match_query(layer, heads - 2, [(0, 5, 1.3), (7, 8, 1.2)])
        if tagged:
            circuit.lay_sink(model, layer, [0, 1, 2, 3, heads - 2, heads - 1])
    if dash is not None and kv_heads > 1 and circuit.config.num_hidden_layers > 2:
        circuit.lay_gathering(model, 2, dash)
    if kv_heads > 1 and heads >= 6 and circuit.config.num_hidden_layers > 3:
        circuit.lay_list_heads(model)
    return model
