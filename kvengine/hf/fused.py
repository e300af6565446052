"""What stands between one layer's attention and the next, fused by torch's compiler in recorded steps.

A decoded token's norms, rotations, activations and residual sums are some thirty operations a layer beside seven products
of matrices, and each takes a GPU some microseconds whatever it computes, in a CUDA graph too. `torch.compile` makes a few
kernels of them. The engine's attention is left out, as caches do their work between two compiled pieces.

What is fused is rounded to the model's dtype wherever the model's own operations round (`emulate_precision_casts`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from kvengine.errors import ModelError

ROUNDED: dict[str, Any] = {"emulate_precision_casts": True}


class Fused:
    """A model whose layers run compiled while it is asked inside.

    Args:
        model: of transformers. Layers are compiled when they are first asked for tokens of a shape, alike ones once.
        backend: of `torch.compile`.

    Raises:
        ModelError: the model is not made of layers as transformers' models are.
    """

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        self.layers = [x for x in model.modules() if isinstance(x, GradientCheckpointingLayer)]
        if not self.layers:
            raise ModelError(f"{type(model).__name__} has no layers of transformers' kind to compile; leave out fuse")
        options = ROUNDED if backend == "inductor" else None
        self.forwards: list[Any] = [torch.compile(x.forward, backend=backend, options=options) for x in self.layers]

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Layers are as they were afterwards, whatever happens."""
        before = [vars(layer).get("forward") for layer in self.layers]
        try:
            for layer, forward in zip(self.layers, self.forwards, strict=True):
                layer.forward = forward
            # The number of a layer, an attribute of its attention, is no reason to compile each.
            with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
                yield
        finally:
            for layer, forward in zip(self.layers, before, strict=True):
                if forward is None:
                    vars(layer).pop("forward", None)
                else:
                    layer.forward = forward
