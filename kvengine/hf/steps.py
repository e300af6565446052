"""Decode steps over a cache that is held still: recorded at the first, and replayed from then on (`kvengine.hf.compiled`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from kvengine import latent
from kvengine.errors import CacheError, UnsupportedPolicy
from kvengine.fixed import FixedLayer
from kvengine.hf.cache import EngineCache
from kvengine.hf.devices import uncollected
from kvengine.hf.fused import Fused
from kvengine.hf.held_index import HeldIndex, held_index
from kvengine.hf.held_window import HeldWindow, can_hold
from kvengine.hf.names import CACHE
from kvengine.hf.places import takes_places
from kvengine.hf.recordable import check_places
from kvengine.hf.states import held_states
from kvengine.kernels import dispatch
from kvengine.kernels.streams import side_stream
from kvengine.rope import Rope
from kvengine.session import BROKEN

How = Literal["graph", "trace", "eager"]
Step = Callable[[], Tensor]
WARM = 3
"""Steps before a CUDA graph is captured: kernels are compiled and memory is found in these."""


class Steps:
    """Decode steps over one cache, recorded at the first and replayed from then on.

    Args:
        model: a patched model.
        cache: has read its prompt.
        more: tokens it will take at most.
        how: "graph" captures a CUDA graph, "trace" records torch operations, "eager" runs the step each time.
        fused: the model's layers, if they are to run compiled.
        real: which tokens so far are tokens, [seq, token]; None: all. Layers with a sliding window ask.

    Raises:
        UnsupportedPolicy: the stack's step cannot be recorded, or the model's.
        CacheError: the cache is in the middle of something, or torch in inference mode.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: EngineCache,
        more: int,
        how: How,
        fused: Fused | None = None,
        real: Bool[Tensor, "seq token"] | None = None,
    ) -> None:
        if torch.is_inference_mode_enabled():
            raise CacheError("a step cannot be recorded in torch.inference_mode(); leave it, torch.no_grad() will do")
        self.model, self.cache, self.left, self.how, self.fused = model, cache, more, how, fused
        cache.thaw()
        device = model.device
        self.now = torch.tensor([cache.seen], device=device)
        self.rope = cache.session.rope
        if self.rope is not None:  # a copy from the host is not allowed in a graph
            cache.session.rope = Rope(self.rope.frequency.to(device), self.rope.interleaved)
        self.layers: list[FixedLayer | HeldWindow | HeldIndex] = []
        self.states = [x for layer in cache.layers for x in held_states(layer)]  # change in place already
        self.latent = latent.plainly_held(model, cache.stack, cache.engines)
        try:
            for layer, module in self.latent:
                latent.with_values(layer, module)
            for layer in cache.engines:
                self.layers.append(still := FixedLayer(layer, more, self.now))
                still.driven = True
            for i, window in enumerate(cache.layers):
                if can_hold(cache.config, window):
                    held = cache.layers[i] = HeldWindow(window, real, self.now)
                    self.layers.append(held)
            self.layers += held_index(cache.layers, more, self.now)
        except BaseException:  # Control-C too
            self.close()
            raise
        self.ids: Tensor | None = None
        self.position: Tensor | None = None
        self.unplaced = not takes_places(model)  # who drives the steps may know that it is told nothing all the same
        self.replay: Step | None = None
        self.paused: Tensor | None = None
        self.beside: dict[str, Tensor] = {}  # what else the model is given, held still by who drives the steps

    def pause(self, rows: Bool[Tensor, "seq"]) -> None:
        """These sequences have ended: what steps bring for them is no token of theirs."""
        if rows is self.paused:
            return
        new = rows if self.paused is None else rows & ~self.paused
        self.paused = rows
        for layer in self.layers:
            if isinstance(layer, FixedLayer):
                layer.pause(new)

    def __call__(self, ids: Int[Tensor, "seq 1"], position: Int[Tensor, "*any seq 1"]) -> Float[Tensor, "seq 1 vocab"]:
        """The logits after one more token of each sequence; overwritten by the next call on a GPU.

        Raises CacheError if there is no room for another, or an earlier pass broke off; UnsupportedPolicy as `check_places`.
        """
        if self.left < 1:
            raise CacheError("the cache was held still for fewer tokens; ask for more, or close() and go on without")
        session, seen = self.cache.session, self.cache.seen
        if session.torn or session.led == seen or any(x.fixed is None or x.seen != seen for x in self.cache.engines):
            raise CacheError(BROKEN)
        session.memo.clear()
        if self.ids is None or self.position is None:
            self.ids, self.position = ids.clone(), position.clone()
        self.ids.copy_(ids)
        self.position.copy_(position)
        if self.replay is None and self.unplaced:
            check_places(self)
        if self.cache.stack.retention.replay is not None:
            session.text.add(seen, ids, position, None)
        if self.states:  # they take a token before anything counts it
            session.led = seen
        if self.replay is None:
            self.replay, logits = {"graph": self.graph, "trace": self.trace, "eager": self.eager}[self.how]()
        else:
            session.torn = True  # until the layers have counted the token
            logits = self.replay()
        for layer in self.layers:
            layer.advance()
        session.torn = False
        self.left -= 1
        return logits

    def run(self) -> Tensor:
        """The step itself: reads and changes tensors that stay where they are."""
        given: dict[str, Any] = {
            "input_ids": self.ids,
            "position_ids": self.position,
            CACHE: self.cache,
            "use_cache": True,
        }
        for index in (x for x in self.layers if isinstance(x, HeldIndex)):
            given["attention_mask"] = index.mask()
        self.cache.session.stepping = True
        try:
            with nullcontext() if self.fused is None else self.fused.inside():
                out: Any = self.model(**self.beside, **given, return_dict=True)
        finally:
            self.cache.session.stepping = False
        self.now.add_(1)
        logits: Tensor = out.logits
        return logits

    def state(self) -> list[Tensor]:
        """Every tensor that a step reads or changes, and that outlives it."""
        if self.ids is None or self.position is None:
            raise CacheError("no step has been taken yet")
        steady = [self.ids, self.position, self.now, *self.beside.values(), *self.states]
        return [*steady, *(x for layer in self.layers for x in layer.state())]

    def changed(self) -> list[Tensor]:
        """Those of them that a step taken twice would change twice."""
        return [self.now, *self.states, *(x for layer in self.layers for x in layer.lasting())]

    def eager(self) -> tuple[Step, Tensor]:
        return self.run, self.run()

    def trace(self) -> tuple[Step, Tensor]:
        """Record the step's torch operations while it runs; kernels in C would leave no trace. One that is refused is undone."""
        from torch.fx.experimental.proxy_tensor import make_fx

        state, changed, first = self.state(), self.changed(), []
        before = [x.clone() for x in changed]

        def step(*state: Tensor) -> Tensor:
            first.append(self.run())
            return first[0]

        try:
            with dispatch.torch_only():
                recorded = make_fx(step)(*state)
        except RuntimeError as error:
            if "value out of a tracing tensor" not in str(error):
                raise
            for x, old in zip(changed, before, strict=True):
                x.copy_(old)
            self.cache.session.torn, self.cache.session.led = False, None
            raise UnsupportedPolicy(
                f"a decode step of '{self.cache.stack}' cannot be traced: the host looks at what it computes, as it does on a "
                "CPU at what a policy of one's own returns; take how='eager'"
            ) from error
        return lambda: recorded(*state), first[0]

    def graph(self) -> tuple[Step, Tensor]:
        """Capture a CUDA graph. The steps that warm up are undone."""
        changed = self.changed()
        before = [x.clone() for x in changed]
        side, here = side_stream(self.now.device, "recordings"), torch.cuda.current_stream(self.now.device)
        side.wait_stream(here)
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.run()
                for x, old in zip(changed, before, strict=True):
                    x.copy_(old)
        here.wait_stream(side)
        captured = torch.cuda.CUDAGraph()
        # On this stream, as the one by default is of the GPU that was current first; and whatever other threads do. What
        # becomes garbage meanwhile may hold memory that CUDA cannot give back now. Torch stays on the stream of a capture
        # that cannot be ended.
        with uncollected(), torch.cuda.stream(here):
            with torch.cuda.graph(captured, stream=side, capture_error_mode="thread_local"):
                logits = self.run()

        def replay() -> Tensor:
            captured.replay()
            return logits

        return replay, replay()

    def close(self) -> None:
        """Let the cache go on as it would have without. Closing twice is harmless."""
        with self.cache.session.changing():
            while self.layers:  # none twice, if this breaks off and is called again
                self.layers.pop(0).release()
            for one, _ in self.latent:
                latent.without_values(one)
            self.cache.layers = [x.layer if isinstance(x, HeldWindow) else x for x in self.cache.layers]
            self.latent, self.replay = [], None
            self.cache.session.rope = self.rope
