"""Finding the gates.

    loss  =  |h - h_full|^2 / |h_full|^2   over the places that predict an answer  +  reg * mean |alpha|
    alpha starts at 1, is clamped to [0, 1] after each step; the model itself is frozen

h are the last hidden states, after the final norm. AdamW without weight decay; the rate rises and falls over a fifth of
the steps at each end. Defaults for large models as published (rate 0.02, 2000 steps, reg 0.05, 128 sinks, 256 recent);
small ones need fewer steps and windows far shorter than the context.

Differs from the official code: the penalty is weighed against the *relative* squared error, so that `reg` means the
same for any width and scale of hidden states; only the places that predict passkeys count, as in the paper (the code
takes the questions too); full and streaming attention are mixed on the same input; windows are exact to the token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvengine.errors import EvaluationError
from kvengine.evals.duo.checkpoint import Checkpoint
from kvengine.evals.duo.data import Passkeys, Sample
from kvengine.evals.duo.gates import Gates, gated


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Attributes:
        steps: optimisation steps, one context each.
        rate: of learning.
        reg: weight of the L1 penalty.
        sinks: first tokens that a streaming head sees.
        recent: newest tokens that it sees.
        shortest, longest: contexts, in tokens.
        lengths: how many different ones there are, equally far apart.
        seed: of the data.
    """

    steps: int = 2000
    rate: float = 0.02
    reg: float = 0.05
    sinks: int = 128
    recent: int = 256
    shortest: int = 1000
    longest: int = 32000
    lengths: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        counts = min(self.steps, self.lengths, self.recent, self.shortest, self.sinks + 1)
        if counts < 1 or self.longest < self.shortest:
            raise EvaluationError(f"{self}: counts must be positive (sinks may be 0), and longest at least shortest")
        if not 0 < self.rate < inf:
            raise EvaluationError(f"rate={self.rate}: must be a positive number")
        if not 0 <= self.reg < inf:
            raise EvaluationError(f"reg={self.reg}: must be 0 or a positive number")

    def length(self, step: int) -> int:
        """The length of a step's context: all of them come equally often, in mixed order."""
        place = (step * 0.6180339887498949) % 1
        spread = (self.longest - self.shortest) / max(1, self.lengths - 1)
        return self.shortest + round(int(place * self.lengths) * spread)

    def factor(self, step: int) -> float:
        """Of the learning rate."""
        part = self.steps / 5
        return min(1.0, max((step + 1) / part, 0.1), max((self.steps - step) / part, 0.1))


def train(
    model: Any,
    data: Passkeys,
    recipe: Recipe,
    report: Callable[[int, float, Tensor], None] = lambda *_: None,
    checkpoint: Checkpoint | None = None,
) -> Float[Tensor, "layer head"]:
    """The gates of a model, [layer, KV head], each in [0, 1]: the larger, the more the head needs the whole context.

    Args:
        model: a causal language model of transformers; frozen meanwhile, otherwise left as it is.
        data: where contexts come from.
        recipe: how to train.
        report: called after each step with its number, the loss and the gates.
        checkpoint: where the training goes on from, and what is told of each step.

    Raises:
        ModelError: a model whose attention is not plain causal attention.
        EvaluationError: the loss is no number, as where the model's own states are none in float16.
    """
    text = model.config.get_text_config(decoder=True)
    device = next(model.parameters()).device
    alpha = torch.ones(text.num_hidden_layers, kv_heads(text), device=device, dtype=torch.float32, requires_grad=True)
    gates = Gates(alpha, recipe.sinks, recipe.recent)
    optimiser = torch.optim.AdamW([alpha], lr=recipe.rate, weight_decay=0.0)
    done = 0 if checkpoint is None else checkpoint.restore(alpha, optimiser)
    frozen = [(p, p.requires_grad) for p in model.parameters()]
    model.requires_grad_(False)
    try:
        with gated(model, gates):
            for step in range(done, recipe.steps):
                optimiser.param_groups[0]["lr"] = recipe.rate * recipe.factor(step)
                sample = data.draw(f"{recipe.seed}/{step}", recipe.length(step))
                loss = distillation(model, gates, sample) + recipe.reg * alpha.abs().mean()
                if not loss.isfinite():
                    raise EvaluationError(
                        f"the loss is {float(loss.detach())} at step {step}, which finds no head; take dtype float32, or a "
                        "lower rate"
                    )
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                with torch.no_grad():
                    alpha.clamp_(0, 1)
                if checkpoint is not None:
                    checkpoint.note(step + 1, alpha, optimiser)
                report(step, float(loss.detach()), alpha.detach())
    finally:
        for parameter, before in frozen:
            parameter.requires_grad_(before)
    return alpha.detach().cpu()


def kv_heads(text: Any) -> int:
    """KV heads of a layer; where the configuration does not count them, each query head has its own."""
    found: int = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return found


def distillation(model: Any, gates: Gates, sample: Sample) -> Float[Tensor, ""]:
    """How far the gated model's hidden states are from the ungated one's, where answers are predicted."""
    ids, places = sample.ids.to(gates.alpha.device)[None], sample.predicts.to(gates.alpha.device)
    gates.applied = False
    with torch.no_grad():
        want = hidden(model, ids)[0, places].float()
    gates.applied = True
    found = hidden(model, ids)[0, places].float()
    return (found - want).square().sum() / want.square().sum()


def hidden(model: Any, ids: Int[Tensor, "seq token"]) -> Float[Tensor, "seq token width"]:
    """The last hidden states, after the final norm."""
    out: Tensor = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    return out
