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

from typing import Any, cast

import torch
from jaxtyping import Shaped
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from kvengine.errors import CacheError, ModelError
from kvengine.fixed import check_kind
from kvengine.hf.brought import Brought
from kvengine.hf.cache import STATE, EngineCache
from kvengine.hf.devices import wraps
from kvengine.hf.fused import Fused
from kvengine.hf.generate import Decoder, check_mode
from kvengine.hf.held_window import can_hold
from kvengine.hf.names import CACHE
from kvengine.hf.recordable import check_model
from kvengine.hf.steps import How, Steps

ROOM = 1024
"""Tokens that `generate` holds a cache still for at a time: room for all that may come could be more than the prompt takes."""


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
    cache = EngineCache(model)
    for layer in cache.engines:
        check_kind(layer)
    check_model(model, cache)
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
