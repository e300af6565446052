"""Decoding by replaying one recorded step: on a GPU the host's work is one launch for a token.

    decoder = kvengine.compile_decode(model)
    model.generate(**inputs, custom_generate=decoder)       # or decoder.generate(**inputs)

The prompt is read as ever. Then the cache is held still (`kvengine.fixed`) for as many tokens as may come, one step of
the whole model is recorded into a CUDA graph, and every further token replays it. When generation ends, the cache is as
decoding without a recording would have left it. On a CPU a recording saves nothing, and each step runs as it is, over a
cache held still all the same; `how="trace"` records its torch operations, for tests.

Recording takes some steps' time, and is done anew for every call of `generate`, as the cache of each lies elsewhere, and
where more tokens come than there was made room for (ROOM). `kvengine.patch(model, policy, record=True)` has every
`generate` of the model do so by itself, where the model is on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, Literal, cast

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvengine import latent
from kvengine.errors import CacheError, ModelError, UnsupportedPolicy
from kvengine.fixed import FixedLayer, check_kind, refusal
from kvengine.hf.brought import Brought
from kvengine.hf.cache import EngineCache
from kvengine.hf.devices import uncollected, wraps
from kvengine.hf.fused import Fused
from kvengine.hf.generate import STATE, Decoder, check_mode
from kvengine.hf.held_index import HeldIndex, held_index
from kvengine.hf.held_window import HeldWindow, can_hold
from kvengine.hf.names import CACHE
from kvengine.hf.places import takes_places
from kvengine.hf.recordable import check_model, check_places
from kvengine.hf.states import held_states
from kvengine.kernels import dispatch
from kvengine.kernels.streams import side_stream
from kvengine.rope import Rope
from kvengine.session import BROKEN

How = Literal["graph", "trace", "eager"]
Step = Callable[[], Tensor]
ROOM = 1024
"""Tokens that `generate` holds a cache still for at a time: room for all that may come could be more than the prompt takes."""
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
        """Record the step's torch operations while it runs; kernels in C would leave no trace."""
        from torch.fx.experimental.proxy_tensor import make_fx

        state, first = self.state(), []

        def step(*state: Tensor) -> Tensor:
            first.append(self.run())
            return first[0]

        try:
            with dispatch.torch_only():
                recorded = make_fx(step)(*state)
        except RuntimeError as error:
            if "value out of a tracing tensor" not in str(error):
                raise
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


class CompiledDecode(Decoder):
    """What `compile_decode` returns: give it to `generate` as `custom_generate`, or call its own `generate`."""

    def __init__(self, model: PreTrainedModel, how: How, fused: Fused | None = None) -> None:
        self.model, self.how, self.fused = model, how, fused

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate`, with decode steps replayed. Takes what it takes, for greedy decoding and sampling."""
        return self.model.generate(*args, custom_generate=self, **kwargs)  # type: ignore[operator]

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        tokenizer: Any = None,
        assistant_model: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """What `generate` calls in place of its own loop: the same loop, over a model whose decode steps are replayed."""
        if model is not self.model:
            raise ModelError("this decoder was compiled for another model; call kvengine.compile_decode on this one")
        check_mode("a compiled decoder", generation_config, assistant_model)
        if generation_config.is_assistant:
            raise ModelError("an assistant's tokens are taken back, which a recorded step's cannot be")
        if generation_config.output_hidden_states or generation_config.output_attentions:
            raise ModelError("a recorded step yields logits only; leave out output_hidden_states and output_attentions")
        # Of the ids alone: vectors that stand for a prompt, or before it, are not among those that the length counts.
        stand_in = StandIn(model, self, int(generation_config.max_length) - input_ids.shape[1])
        with torch.inference_mode(False), torch.no_grad():  # a recording made in inference mode says other things
            try:
                found = cast(Any, type(model))._sample(
                    stand_in, input_ids, logits_processor, stopping_criteria, generation_config,
                    synced_gpus=synced_gpus, streamer=streamer, **model_kwargs,
                )  # fmt: skip
                stand_in.close()
            except BaseException:  # Control-C, also where that was about to begin
                stand_in.close()
                raise
            return found

    def open(
        self, cache: EngineCache, max_new_tokens: int, attention_mask: Shaped[Tensor, "seq token"] | None = None
    ) -> Steps:
        """Hold a cache still for so many tokens; for a loop of one's own. Close it at the end.

        `attention_mask`: which tokens so far are tokens, if some are padding. Layers with a sliding window ask.

        Raises:
            UnsupportedPolicy: the stack's step cannot be recorded, or the model's.
            CacheError: the cache is in the middle of a prompt, or records states to return to; or there is padding, a layer
                with a window, and no mask of all tokens so far.
        """
        check_model(self.model, cache)
        real = None if attention_mask is None else attention_mask.bool()
        windows = any(can_hold(cache.config, layer) for layer in cache.layers)
        if real is None and windows and any(part.lane.padded for layer in cache.engines for part in layer.parts):
            raise CacheError(
                "there is padding in the batch, and layers with a sliding window have to be told where: give attention_mask"
            )
        return Steps(self.model, cache, max_new_tokens, self.how, self.fused, real)


class StandIn:
    """The model as `generate`'s loop sees it: its steps of one token are replayed, all else is the model's own."""

    def __init__(self, model: Any, decoder: CompiledDecode, more: int) -> None:
        self._model, self._decoder, self._more = model, decoder, more
        self._steps: Steps | None = None
        self._brought = Brought()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, **inputs: Any) -> Any:
        ids, cache, position = (inputs.get(x) for x in ("input_ids", CACHE, "position_ids"))
        if isinstance(cache, EngineCache) and ids is not None and ids.shape[1] > 1 and not cache.seen:
            self.close()  # the text has outgrown a rotation, and is read from its first token on (Phi-3)
            self._more -= 1
            return self._model(**inputs)
        if not isinstance(cache, EngineCache) or ids is None or ids.shape[1] != 1:
            raise ModelError(
                "a recorded step takes one token by its id, over the engine's cache; use model.generate without it"
            )
        self._brought.hold(inputs)
        mask = inputs.get("attention_mask")
        if position is None:  # as where PEFT takes them out, and the model counts what is cached, padding included
            position = torch.full_like(ids, cache.seen)
        if self._steps is not None and not self._steps.left:
            self.close()
        if self._steps is None:
            real = ids.new_ones(len(ids), cache.seen) if mask is None else mask  # `generate` leaves out one of ones
            self._steps = self._decoder.open(cache, max(1, min(self._more, ROOM)), real)
            self._steps.beside = self._brought.held
            self._steps.unplaced |= inputs.get("position_ids") is None
        if cache.session.paused is not None:
            self._steps.pause(cache.session.paused)
        self._more -= 1
        return CausalLMOutputWithPast(**{"logits": self._steps(ids, position), CACHE: cache})  # type: ignore[arg-type]

    def close(self) -> None:
        if self._steps is not None:
            self._steps.close()
            self._steps = None


def compile_decode(model: PreTrainedModel, how: How | None = None, fuse: bool = False) -> CompiledDecode:
    """A decoder that records one step of a patched model, and replays it for every token.

    Args:
        model: a patched model. Its policy may change afterwards; what counts is the cache that is decoded with.
        how: "graph" captures a CUDA graph (needs CUDA); "trace" records torch operations; "eager" runs each step, over a
            cache held still all the same. By default "graph" on a GPU, "eager" elsewhere.
        fuse: whether `torch.compile` fuses what a layer does beside attention and products of matrices, so that a recorded
            step launches less than half as much. It takes a while at the first step (tens of seconds), and rounds as the model
            does. Without a GPU it gains nothing.

    Returns:
        A `CompiledDecode`, for `model.generate(..., custom_generate=decoder)`.

    Raises:
        ModelError: the model is not patched, or `how` cannot be here, or not with `fuse`, or the model has nothing to fuse.
        UnsupportedPolicy: a step under the model's policy cannot be recorded; the message says why.
    """
    if not hasattr(model, STATE):
        raise ModelError("a compiled decoder needs a patched model; call kvengine.patch(model) first")
    if STATE not in vars(model):
        raise ModelError(f"{type(model).__name__} wraps a patched model; give {wraps(model)}")
    stack = getattr(model, STATE).chosen.stack
    if (why := refusal(stack)) is not None:
        raise UnsupportedPolicy(f"a decode step of '{stack}' cannot be recorded: {why}. Decode without it")
    check_model(model, cache := EngineCache(model))
    for layer in cache.engines:
        check_kind(layer)
    cuda = model.device.type == "cuda"
    how = how or ("graph" if cuda else "eager")
    if how not in ("graph", "trace", "eager"):
        raise ModelError(f"how={how!r} must be 'graph', 'trace' or 'eager'")
    if how == "graph" and not cuda:
        raise ModelError(
            f"how='graph' captures a CUDA graph, but the model is on {model.device}; use 'trace' or 'eager'"
        )
    if fuse and how == "trace":
        raise ModelError("how='trace' records torch operations one by one; leave out fuse, or take 'graph' or 'eager'")
    return CompiledDecode(model, how, Fused(model) if fuse else None)
