"""The engine as a transformers cache."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from kvengine.cache import LayerCache
from kvengine.errors import CacheError, ModelError
from kvengine.gradients import copied
from kvengine.hf import indexed, shared_index, states, window
from kvengine.hf.cross import engine_layers, show_empty, stock_layers
from kvengine.hf.fitting import check_stack
from kvengine.hf.held_window import HeldWindow
from kvengine.hf.layer import BREAKS, COPIED, EngineLayer, compiling
from kvengine.hf.names import passed
from kvengine.hf.places import placed
from kvengine.hf.rewind import all_back, changing_rows, check_even, chosen_rows, emptied, repeat, settle
from kvengine.hf.rope import needs_rope, rope_for
from kvengine.readers import sources
from kvengine.rope import Rope
from kvengine.session import FOREIGN, Session
from kvengine.stack import Channels, Stack
from kvengine.stats import Stats, measure

THAWED = (
    ", as what it took in torch's inference mode has to be outside of it; give it all passes under torch.no_grad() or in "
    "inference mode, and call cache.reset() to begin anew"
)
NAME = "kvengine"  # of the engine's attention, as models' configurations know it
STATE = "_kvengine"  # the one attribute a patched model carries: the stack, and how to undo


@dataclass
class Chosen:
    """The policy of a patched model, and the rotation that was found, if some policy has needed it."""

    stack: Stack
    known: dict[str, Rope | None] = field(default_factory=dict)
    told: set[str] = field(default_factory=set)  # why the policy is not applied, as was said once
    lone: int = 0  # passes in a row whose cache nobody went on with
    channels: Channels = frozenset()  # as far as they are known


class EngineCache(Cache):
    """A cache under a policy, to pass as `cache`, or by its older name, as `past_key_values`.

    Layers that hold little by themselves (sliding windows, recurrent states) stay transformers' own.

        cache = EngineCache(model, "snapkv(budget=1024)")
        model.generate(ids, cache=cache)          # the prompt is judged at its end
        model.generate(longer_ids, cache=cache)   # the next turn of the same conversation

    Args:
        model: a patched model.
        stack: a policy string or a `Stack`; by default the one that the model was patched with.
        positions: whether to remember where in the text the tokens stood that a prompt's verdict left, for
            `kvengine.evals.maps` and the like, even where the policy, reading them in order, can do without.

    Raises:
        ModelError: the model is not patched.
        PolicyError: the policy is wrong, or this model cannot do it.
    """

    max_cache_len = -1  # no limit, to PEFT, which asks before it puts a prefix in
    nameless = False  # made by `generate` because it was given none
    unread: Callable[[EngineCache], None] | None = None  # told if it goes, and nobody went on with it or looked at it

    def __init__(self, model: nn.Module, stack: str | Stack | None = None, *, positions: bool = False) -> None:
        if not hasattr(model, STATE):
            raise ModelError("an engine cache needs a patched model; call kvengine.patch(model) first")
        config = cast(PreTrainedModel, model).config  # of a model, or of one that a wrapper hands through
        chosen, text = getattr(model, STATE).chosen, config.get_text_config(decoder=True)
        stack = chosen.stack if stack is None else Stack.of(stack)
        check_stack(stack, text, chosen.channels)
        self.fill(stack, text, rope_for(stack, model, chosen.known), positions)

    @classmethod
    def under(cls, chosen: Chosen, text: Any) -> EngineCache:
        """A cache under the policy that a model was patched with, whose text model has this configuration."""
        cache = object.__new__(cls)
        cache.fill(chosen.stack, text, chosen.known.get("rope") if needs_rope(chosen.stack) else None)
        return cache

    def fill(self, stack: Stack, text: Any, rope: Rope | None, positions: bool = False) -> None:
        self.stack, self.config = stack, text
        self.session = Session(rope=rope, positions=positions)
        stock = stock_layers(self.config)
        ours = engine_layers(self.config)
        self.session.ours = tuple(i for i, served in enumerate(ours) if served)
        self.sources = sources(self.config)
        readers = Counter(self.sources.values())
        layers = [
            states.engine_layer(layer, self.stack, i, len(stock), self.session, readers[i]) if ours[i] else layer
            for i, layer in enumerate(stock)
        ]
        show_empty(layers)
        shared_index.share(layers, self.sources)
        super().__init__(layers=layers)

    def __del__(self) -> None:
        if self.unread is not None and not sys.is_finalizing():
            self.unread(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> EngineCache:
        """A cache that goes on by itself, for the same model: a prompt read once serves many questions."""
        self.unread = None
        memo.setdefault(id(self.config), self.config)  # a cache knows its model by this very object
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(copied(vars(self), memo, "; run what is to be copied under torch.no_grad()"))
        states.put_back(twin)
        twin.session.inferred = torch.is_inference_mode_enabled()
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise CacheError(
            "a cache belongs to a model in this process, so it is not pickled; kvengine.saved.save writes it to a file, and "
            "copy.deepcopy makes a second one"
        )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """New keys and values of a layer; without what transformers offers for layers that are its own to move."""
        if torch.compiler.is_compiling():  # which would compile for each layer's number
            return aside(self, key_states, value_states, layer_idx, *args, **kwargs)  # type: ignore[no-any-return]
        layer: Any = self.layers[layer_idx]
        if type(layer) in (EngineLayer, states.StatefulLayer) and layer.layer != layer_idx:
            raise ModelError(f"layer {layer_idx} of this cache is a copy of layer {layer.layer}{COPIED}")
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if getattr(layer, "sliding_window", None) is None:
            return keys, values
        return window.handed_over(layer, keys, values, key_states.shape[2])

    update_indexer = indexed.update_indexer

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Asked for before any layer has run, so by then it must be the engine's attention that will; by some models (Inkling)
        before each layer too."""
        if self.config._attn_implementation != NAME:
            raise ModelError(
                f"an engine cache was given to a model whose attention is {self.config._attn_implementation!r}, which would "
                "see the newest tokens only: the model is not patched, or set_attn_implementation() has undone it. Call "
                "kvengine.patch(model)"
            )
        self.thaw()
        if self.session.ours is None or len(self.session.ours) < len(self.layers):  # else layers notice by themselves
            check_even(self.layers[layer_idx:])  # those before it may have taken this pass's tokens
        return super().get_mask_sizes(query_length, layer_idx)  # type: ignore[no-any-return]

    def thaw(self) -> None:
        """Tensors made in torch's inference mode must not be changed outside of it: once there, go on with copies."""
        if compiling():
            apart(self)
            return
        session = self.session
        if torch.is_inference_mode_enabled():
            session.inferred = True
        elif session.inferred:
            memo = {id(session): session, id(session.ahead): session.ahead}
            for layer in self.layers:
                if isinstance(layer, EngineLayer):
                    layer.cache = copied(layer.cache, memo, THAWED)
                if states.has_states(layer):
                    states.thaw(layer)
            session.inferred = False

    def layer_for(self, module: nn.Module) -> EngineLayer | None:
        """The layer that an attention module is to use; None if it is one of transformers' own."""
        if getattr(module, "config", None) is not self.config:
            raise CacheError(FOREIGN)
        index = getattr(module, "layer_idx", None)
        layer = self.layers[index] if isinstance(index, int) and index < len(self.layers) else None
        if not isinstance(layer, EngineLayer):
            return None
        layer.incoming = None  # of a pass that broke off before this layer had taken them
        return layer

    def beside(self, module: nn.Module) -> EngineLayer | HeldWindow | None:
        """What answers for a module without a layer of the engine's, by the model's configuration: whose keys it reads, or its
        window held still. Keys know it too, unless they were copied from one device to another."""
        index: int = getattr(module, "layer_idx", -1)
        index = self.sources.get(index, index)
        found = self.layers[index] if 0 <= index < len(self.layers) else None
        return found if isinstance(found, EngineLayer | HeldWindow) else None

    @property
    def engines(self) -> list[LayerCache]:
        """The engine's layers, in order."""
        return [layer.cache for layer in self.layers if isinstance(layer, EngineLayer)]

    @property
    def others(self) -> list[Any]:
        """The layers that are transformers' own, in order."""
        return [layer for layer in self.layers if not isinstance(layer, EngineLayer)]

    @property
    def seen(self) -> int:
        """Tokens seen, padding included."""
        engines = self.engines
        return engines[0].seen if engines else int(self.get_seq_length())

    @property
    def half_read(self) -> bool:
        """Whether a prompt was read in part, and its end is still to come."""
        return self.stack != Stack() and any(part.lane.reading for layer in self.engines for part in layer.parts)

    def announce(self, total: int | None, drafting: bool = False) -> None:
        """The next tokens, up to `total` in all, are one prompt, in however many chunks they come.

        Unless they follow up on a context, or a single token resumes where decoding stopped: the only one of all, or of
        a row, in a batch whose turn comes in one pass. (Behind a part of a prompt, a single token ends that.) `drafting`:
        for another model, so they are what that has accepted, and only the first are a prompt.

        Raises:
            CacheError: no token is new, or an earlier pass broke off.
        """
        check_even(self.layers)
        self.session.check_judged(self.seen)
        if total is not None and 0 < total <= self.seen and not drafting:
            raise CacheError(
                f"generate() was given {total} tokens, but this cache has seen {self.seen}; give the whole text so far and "
                "what is new (what is cached is not computed again), or call cache.reset() for another text"
            )
        if self.session.lent:
            self.deactivate_past_recording()
        elif self.session.recording and self.seen:
            self.commit()
        vars(self.session).update(turn=self.seen, ended=None, ends=None, paused=None, judging=None)
        new, half = 0 if total is None else total - self.seen, self.half_read
        prompt = self.seen == 0 or half or (new > 1 and not drafting)
        end = self.seen + 1 if half and total is None else total
        self.session.prompt_end = end if prompt and not self.session.following else None
        if self.session.prompt_end is not None and drafting:
            self.session.prompt_end -= 1  # an assistant is asked to forget the prompt's last token

    def adopt(self, given: Cache) -> None:
        """Begin with what a cache of transformers' holds, as the first tokens of the prompt: keys and values without a text.

        In `generate`, prefixes that PEFT has tuned come so by themselves; for a loop of one's own:

            cache.adopt(peft_model.get_prompt(rows))
            peft_model.get_base_model()(ids, cache=cache)

        Raises:
            ModelError: the model caches latents, or has an index of its own.
        """
        indexed.check_prefix(self.config)
        layers: list[Any] = given.layers
        for i, layer in enumerate(layers):
            if isinstance(mine := self.layers[i], EngineLayer):
                mine.cache.store(layer.keys, layer.values, None)
                mine.is_initialized = True
            else:
                self.layers[i] = layer
        self.session.without_ids = True
        end = self.session.prompt_end  # one token ends the prompt, if more are not announced
        self.session.prompt_end = self.seen + (1 if end is None else end)
        self.session.turn = self.seen

    def follow_up(self, following: bool = True) -> None:
        """Take all further tokens as decoding does, one by one, instead of as a prompt to judge; False ends that.

        For a question on a context that is compressed already: it may come in one forward pass, yet nothing is
        dropped that decoding would not drop, and a selection chooses for each of its tokens.

        Raises:
            CacheError: a prompt was read in part only, so that the policy has not acted on it.
        """
        half = self.half_read
        if half and following:
            raise CacheError(
                f"a prompt was read in part only ({self.seen} tokens were seen), and '{self.stack}' has yet to act on it. Give "
                "the rest of it first, one token at the least"
            )
        self.session.following, self.session.prompt_end = following, self.session.prompt_end if half else None

    def reset(self) -> None:
        """Forget everything, what was announced of a prompt or asked of its reading included."""
        fresh = stock_layers(self.config)
        self.layers = [emptied(layer, new) for layer, new in zip(self.layers, fresh, strict=True)]
        kept = {name: getattr(self.session, name) for name in ("rope", "ours", "positions")}
        vars(self.session).update(vars(Session(**kept)))

    def activate_past_recording(self) -> None:
        """Remember the states between the tokens to come, so that `crop` or `rollback` can return to any of them."""
        self.session.lent &= not self.session.recording  # whoever asks again has a use of their own
        super().activate_past_recording()
        self.session.recording = True

    def deactivate_past_recording(self) -> None:
        """What was recorded is history, and what comes is not recorded. An assisted turn of `generate` ends so."""
        self.commit()
        self.session.recording = self.session.lent = False
        for layer in self.layers:
            if getattr(layer, "record_past", False):
                layer.record_past = False  # type: ignore[union-attr]

    def rollback(self, n: int) -> None:
        """Forget the last `n` tokens and all that they changed; earlier ones may still be taken back.

        Raises:
            CacheError: they were not recorded, and some layer has acted on them; or there are not as many.
        """
        if not 0 <= n <= self.seen:
            raise CacheError(f"cannot take back {n} tokens of {self.seen} seen")
        self.thaw()
        all_back(self.layers, self.session, n, self.seen)

    def crop(self, tokens_to_remove: int | Int[Tensor, ""]) -> None:
        """Forget the last `-tokens_to_remove` tokens; what was recorded before them is history. (Positive: keep that many.)

        Raises:
            CacheError: as `rollback`.
        """
        count = int(tokens_to_remove)  # transformers 5.17 counts matches on the device
        self.rollback(-count if count <= 0 else max(0, self.seen - count))
        self.commit()

    def reorder_cache(self, beam_idx: Int[Tensor, "chosen"] | Bool[Tensor, "seq"] | Sequence[int]) -> None:
        """Keep these rows, in this order."""
        beam_idx = chosen_rows(self.layers, beam_idx)
        self.session.inferred |= torch.is_inference_mode_enabled()
        with changing_rows(self.layers, self.session):
            super().reorder_cache(beam_idx)  # type: ignore[arg-type]
            self.session.text.rows(beam_idx)
            self.session.shifts.rows(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep these rows, in this order; or those that a mask names."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row, `repeats` times."""
        if repeats < 1:
            raise CacheError(f"repeats={repeats} would leave no row; give 1 or more, or call cache.reset()")
        self.session.inferred |= torch.is_inference_mode_enabled()
        with changing_rows(self.layers, self.session):
            for layer in self.layers:
                layer.batch_repeat_interleave(repeats) if isinstance(layer, EngineLayer) else repeat(layer, repeats)
            self.session.text.repeat(repeats)
            self.session.shifts.repeat(repeats)

    def commit(self) -> None:
        """What was recorded is history."""
        self.thaw()
        for layer in self.layers:
            if isinstance(layer, EngineLayer):
                layer.cache.commit()
            settle(layer)

    def correct(self, model: PreTrainedModel, ids: Int[Tensor, "seq token"], **inputs: Any) -> Any:
        """Compute the last tokens' keys and values anew, with queries that read everything (TidalDecode's correction).

        Text that was generated under a selection has keys and values that come from sparse attention, and the errors
        add up. Call this now and then, after `activate_past_recording()` before the first token to be corrected:

            cache.correct(model, generated[:, -64:])

        Args:
            model: the patched model.
            ids: the last tokens in the cache.
            inputs: what else the model's forward pass takes (attention_mask, position_ids) for a padded batch.

        Returns:
            The model's output for these tokens: what it would have said with the full cache.

        Raises:
            CacheError: the tokens were not recorded, and the policy has acted on them.
        """
        session = self.session
        before = session.following, session.recording
        self.crop(-ids.shape[1])
        session.dense, session.following, session.recording = True, True, False
        try:
            at = placed(model, self.seen, ids.shape[1], len(ids))
            return model(input_ids=ids, **passed(model, self), use_cache=True, **{**at, **inputs})
        finally:
            session.dense, (session.following, session.recording) = False, before

    def stats(self) -> Stats:
        """What the cache holds and reads, counted on its tensors."""
        self.unread = None
        read = Counter(i for i in self.sources.values() if i not in (self.session.ours or ()))  # by later layers too
        stock = [x for i, layer in enumerate(self.layers) for x in states.stock_tensors(layer) * (1 + read[i])]
        return measure(self.engines, stock, self.seen)


apart: Any = torch.compiler.disable(EngineCache.thaw, reason=BREAKS)
aside: Any = torch.compiler.disable(EngineCache.update, reason=BREAKS)
