"""Generation that outlives the tier its pages were on: what is lost is computed again.

    tokens = recover.generate(model, inputs, "quest(budget=1024) + remote(url='redis://...')", max_new_tokens=200)

A page that is only in a store which does not answer, or whose file does not read, is a StoreError in the middle of a
step. Everything it held follows from the tokens so far, so a new cache is filled with those, and generation goes on where
it was. A tier that is still down then costs its room only: pages stay in memory.

The tokens so far are a prompt to the new cache, and prompts are read as the stack reads prompts. Under `full` the text is
that of an undisturbed run; a stack that approximates approximates anew, so from there on its text may be another.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from kvengine.errors import ModelError, StoreError
from kvengine.hf.cache import EngineCache
from kvengine.hf.ended import Ended, Padding, ended
from kvengine.hf.names import CACHE, NAMES, cache_among
from kvengine.stack import Stack

log = logging.getLogger(__name__)


class Said:
    """Collects tokens as `generate` streams them, and passes them on; the first that an attempt gives is its prompt."""

    def __init__(self, streamer: Any) -> None:
        self.streamer, self.told = streamer, False
        self.steps: list[Tensor] | None = None

    def again(self) -> None:
        """Another attempt: its prompt is what was passed on already."""
        self.steps = None

    def put(self, tokens: Tensor) -> None:
        if prompt := self.steps is None:
            self.steps = []
        else:
            self.steps.append(tokens if tokens.ndim == 2 else tokens[:, None])
        if self.streamer is not None and not (prompt and self.told):
            self.streamer.put(tokens)
        self.told = True

    def end(self) -> None:
        if self.streamer is not None:
            self.streamer.end()


def generate(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    stack: str | Stack | None = None,
    *,
    max_new_tokens: int,
    attempts: int = 3,
    streamer: Any = None,
    **options: Any,
) -> Int[Tensor, "sequence token"]:
    """`model.generate` with caches of its own; prompt and new tokens.

    Args:
        model: a patched model.
        inputs: `input_ids` [sequence, token] and, if any is padding, `attention_mask`.
        stack: of the caches; None takes that of the model.
        max_new_tokens: as for `generate`, over all attempts.
        attempts: how many caches may be lost, less one, before the StoreError is raised.
        streamer: as for `generate`; it hears the prompt and each token once, whatever is lost.
        options: for `model.generate`; not beams, whose tokens so far change.

    Raises StoreError when the last attempt fails too, ModelError for arguments that cannot go on after a loss.
    """
    check(model, inputs, options, max_new_tokens)
    ids: Tensor = inputs["input_ids"]
    mask, prompt = inputs.get("attention_mask"), ids.shape[1]
    mask = torch.ones_like(ids) if mask is None else mask
    options = {name: value for name, value in options.items() if name not in NAMES}  # which may be None
    most, given, said = prompt + max_new_tokens, options, Said(streamer)
    limit, begun = asked(model, given, "max_time"), time.monotonic()
    while True:
        if limit is not None:
            options["max_time"] = max(0.0, limit - time.monotonic() + begun)
        attempts, cache = attempts - 1, EngineCache(model, stack)  # type: ignore[arg-type]
        cache.session.heeded = True
        said.again()
        try:
            found: Tensor = model.generate(  # type: ignore[operator]
                input_ids=ids, attention_mask=mask, streamer=said, max_new_tokens=most - ids.shape[1],
                **options, **{CACHE: cache},
            )  # fmt: skip
            return found
        except StoreError as error:
            if attempts <= 0:
                raise
            log.warning("%d tokens are computed again: %s", cache.seen, str(error))  # itself it would keep the cache
        if not said.steps:
            continue
        new = torch.cat(said.steps, 1).to(ids.device)
        several = len(new) // len(ids)  # num_return_sequences: each goes on with what it has said
        ids, mask = (x.repeat_interleave(several, 0) for x in (ids, mask))
        ids, mask = torch.cat([ids, new], 1), torch.cat([mask, torch.ones_like(new)], 1)
        rows, padding = ended(model, ids[:, prompt:], given, cache.session)
        if ids.shape[1] >= most or bool(rows.all()):
            said.end()
            return ids
        options = {**given, **later(model, given, ids, prompt)}
        options["stopping_criteria"] = [*(given.get("stopping_criteria") or []), Ended(rows)]
        if padding is not None:
            options["logits_processor"] = [*(given.get("logits_processor") or []), Padding(rows, padding)]


def asked(model: Any, options: Mapping[str, Any], name: str) -> Any:
    """What `generate` takes for a setting."""
    config = options.get("generation_config") or model.generation_config
    value = options.get(name)
    return getattr(config, name, None) if value is None else value


def later(model: Any, given: Mapping[str, Any], ids: Int[Tensor, "sequence token"], prompt: int) -> dict[str, Any]:
    """The settings that `generate` counts from its prompt's end, where that prompt has the tokens said so far in it."""
    new, found = ids[:, prompt:], dict[str, Any](num_return_sequences=1)
    if least := asked(model, given, "min_new_tokens"):
        found["min_new_tokens"] = max(0, least - new.shape[1])
    if asked(model, given, "begin_suppress_tokens"):
        found["begin_suppress_tokens"] = []
    if decay := asked(model, given, "exponential_decay_length_penalty"):
        found["exponential_decay_length_penalty"] = (decay[0] - new.shape[1], decay[1])
    if asked(model, given, "guidance_scale") not in (None, 1):
        before, mask = (given.get(f"negative_prompt_{name}") for name in ("ids", "attention_mask"))
        # without one, transformers begins with the prompt's last token
        found["negative_prompt_ids"] = torch.cat([ids[:, prompt - 1 : prompt] if before is None else before, new], 1)
        if mask is not None:
            found["negative_prompt_attention_mask"] = torch.cat([mask, torch.ones_like(new)], 1)
    return found


def check(model: Any, inputs: Any, options: Mapping[str, Any], most: Any) -> None:
    """Refuse what could not go on after a loss, before anything is computed."""
    what = "recover.generate"
    if not all(hasattr(model, name) for name in ("generate", "generation_config")):
        raise ModelError(f"{what} needs a patched model that generates, not a {type(model).__name__}")
    if not isinstance(most, Integral | Tensor) or most < 1:
        raise ModelError(f"{what} counts max_new_tokens over all attempts: a whole number from 1 on, not {most!r}")
    check_inputs(what, inputs)
    if cache_among(options) is not None:
        raise ModelError(f"{what} makes caches of its own from the whole text; leave out the one that is given")
    if own := sorted(options.keys() & {"input_ids", "attention_mask", "inputs", "inputs_embeds"}):
        raise ModelError(f"{what} does not take {own[0]} as an option: input_ids and attention_mask go in `inputs`")
    config = options.get("generation_config") or model.generation_config
    beams, records = (options.get(name, getattr(config, name)) for name in ("num_beams", "return_dict_in_generate"))
    if (beams or 1) > 1:
        raise ModelError(
            f"beam search takes back what it has said, so {what} cannot go on with it; leave num_beams out"
        )
    for name, nothing in (("encoder_repetition_penalty", 1), ("encoder_no_repeat_ngram_size", 0)):
        if asked(model, options, name) not in (None, nothing):
            raise ModelError(
                f"{name} is about the prompt, which after a loss has what was said in it; leave it out of {what}"
            )
    if records:
        raise ModelError(f"{what} returns tokens and nothing else; leave return_dict_in_generate out")


def check_inputs(what: str, inputs: Any) -> None:
    """Refuse inputs that are no tokens and mask, or have more in them, which later attempts would be without."""
    ids, mask = (inputs.get(x) if isinstance(inputs, Mapping) else None for x in ("input_ids", "attention_mask"))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point() or not ids.shape[1]:
        raise ModelError(f"{what} begins with tokens: input_ids are a tensor [sequence, token] in `inputs`")
    if more := sorted(
        inputs.keys() - {"input_ids", "attention_mask"} - {name for name, x in inputs.items() if x is None}
    ):
        raise ModelError(f"{what} goes on from input_ids and attention_mask alone; leave {more[0]} out of `inputs`")
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        got = list(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ModelError(f"{what} takes an attention_mask of input_ids' shape, {list(ids.shape)}, not {got}")
