"""Generation with a hierarchy of drafts (TriForce, arXiv:2404.11912, with any stack in the middle).

target    the model with its full cache: the text has its law, whatever is below
middle    the same model behind a cheaper stack: a view of the target's cache, or a cache that follows it
draft     a small model with a streaming cache, a look-up, or nothing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvengine.errors import KVEngineError, ModelError
from kvengine.hf.cache import STATE, EngineCache
from kvengine.hf.generate import Decoder
from kvengine.hf.patching import patch, unpatch
from kvengine.speculative.accept import Rule, rule
from kvengine.speculative.adaptive import Adaptive
from kvengine.speculative.ahead import Ahead, Fixed
from kvengine.speculative.branch import Branching
from kvengine.speculative.check import (
    Gamma,
    check_arguments,
    check_gamma,
    check_models,
    check_no_middle,
    check_nodes,
    check_places,
    check_places_given,
    check_processors,
    check_prompt,
    check_room,
    check_seed,
    check_stop,
    has_latents,
    is_read_again,
)
from kvengine.speculative.clock import Watch
from kvengine.speculative.echo import Echo, Refresh
from kvengine.speculative.law import Law, for_row
from kvengine.speculative.noise import remembered
from kvengine.speculative.places import LayerPlaces
from kvengine.speculative.propose import Lookup, Recycling
from kvengine.speculative.report import Report
from kvengine.speculative.run import Run, end_tokens, ended, padded, texts
from kvengine.speculative.session import Guest, Session
from kvengine.speculative.stateful import Apart, StatefulSession, session_of
from kvengine.speculative.tier import Drafter, Tier
from kvengine.speculative.together import together
from kvengine.speculative.view import ViewCache, can_view, complete
from kvengine.stack import Stack


def coarse_of(middle: Stack, stack: Stack) -> bool:
    """Whether the target's cache, read coarsely, is the middle's."""
    other = [axis.name for axis in fields(Stack) if axis.name != "representation"]
    same = all(getattr(middle, name) == getattr(stack, name) for name in other)
    return same and middle.representation.coarse_of(stack.representation)


def check_caches(model: PreTrainedModel, *stacks: Stack) -> None:
    """Patch a model that is not patched yet, unless it is refused a cache under one of these."""
    new = not hasattr(model, STATE)
    if new:
        patch(model, "full")
    try:
        for stack in stacks:
            EngineCache(model, stack)
    except KVEngineError:
        if new:
            unpatch(model)
        raise


class TriForce(Decoder):
    """Decodes `target` losslessly with drafts.

        decoder = TriForce(model, draft="lookup", middle="retrieval(budget=4096)", gamma=(1, 6))
        out = decoder.generate(input_ids, max_new_tokens=256, temperature=0.6, top_p=0.9)
        print(decoder.report)

    Args:
        target: the model; it is patched if it is not yet, which changes nothing for other callers.
        draft: a small model with the same tokenizer, "lookup" (what followed these tokens before), "recycling"
            (successors the model rated highly before, as a tree), or None.
        middle: the policy under which the target drafts for itself; None leaves that tier out.
        gamma: tokens drafted for the middle, and for the target; "auto" decides by measured cost and acceptance, and
            remembers from call to call. As it goes by the clock, only greedy or coupled text repeats for a seed then.
        stack: the target's own cache. "full" keeps the model's law; under another stack that one's law is kept instead:
            `stack="quantspec", middle="quantspec(bits=4)"` judges with eight bits and drafts with four of them.
        draft_stack: the small model's cache. The prompt is read at its true positions, so the model must be made for texts as
            long. (The official code's reads 64 tokens at a time, which see 16 sinks and the newest 240 or so, with positions
            counted in the cache; `streaming(sinks=16, recent=240, positions="in-cache")` is that from the prompt's end on.)
        widths: let the small model draft a tree with so many children per node at each depth, instead of a chain.
        refresh: when a view chooses anew.
        tokenizers: the target's and the draft's, to be compared; without them only sizes are.
        in_place: the middle holds the numbers of the target's tokens that it reads, four bytes each, and gathers them
            at every pass; by default it holds a copy of them, or of what its policy makes of them.

    Raises:
        ModelError: models that cannot be used, or with different tokenizers.
        PolicyError: a policy that is wrong, gamma below 1, or a cache too small for the drafts.
        UnsupportedPolicy: what the middle reads is no set of the target's tokens, so it cannot read them in place; or the
            target's stack does more with a token than add it, and the draft is a tree.
    """

    def __init__(
        self,
        target: Any,
        draft: Any = None,
        middle: str | Stack | None = "retrieval(budget=4096)",
        gamma: Gamma = (1, 6),
        *,
        stack: str | Stack = "full",
        draft_stack: str | Stack = "streaming",
        widths: tuple[int, ...] | None = None,
        refresh: Refresh | None = None,
        tokenizers: tuple[Any, Any] | None = None,
        in_place: bool = False,
    ) -> None:
        self.target, self.draft, self.gamma, self.widths = target, draft, gamma, widths
        self.stack = Stack.of(stack)
        self.middle = None if middle is None else Stack.of(middle)
        self.draft_stack = Stack.of(draft_stack)
        self.refresh = refresh or Refresh()
        self.report = Report()
        self.memory: Recycling | None = None
        self.ahead: list[Ahead] = [Adaptive(), Adaptive()] if gamma == "auto" else []
        self.in_place = in_place
        check_gamma(gamma)
        check_models(target, draft, tokenizers, widths)
        check_nodes(target, draft, widths, self.middle, self.stack)
        if self.middle is None:
            check_no_middle(in_place, refresh)
        else:
            check_room("middle", self.middle, gamma)
            check_places(self.middle, self.stack, target, in_place)
        if isinstance(draft, torch.nn.Module):
            check_room("draft_stack", self.draft_stack, gamma)
        check_caches(target, self.stack, *([] if self.middle is None else [self.middle]))
        if isinstance(draft, PreTrainedModel):
            check_caches(draft, self.draft_stack)
        if draft == "recycling":
            self.memory = Recycling(target.config.get_text_config(decoder=True).vocab_size)

    def generate(
        self, input_ids: Int64[Tensor, "row token"] | None = None, **options: Any
    ) -> Int64[Tensor, "text all"]:
        """The prompts and what follows them, rows padded on the right once they have ended.

        Takes what `model.generate` takes, or refuses it, and: seed (default: from torch's generator), coupled
        (position-keyed noise: the text of a seed is then the same whatever drafts it). A `temperature`, `top_k`,
        `top_p` or `min_p` asks for sampling; temperature 0 for the likeliest token.

        `model.generate(ids, custom_generate=decoder, ...)` is the same, but for the last sentence.
        """
        ids = check_prompt(input_ids, options)
        if options.get("temperature") == 0:
            options |= {"do_sample": False, "temperature": None}
        elif any(options.get(name) is not None for name in ("temperature", "top_k", "top_p", "min_p")):
            options.setdefault("do_sample", True)
        if options.get("stop_strings") is not None:
            check_stop(options["stop_strings"], options.get("tokenizer"))
        out: Tensor = self.target.generate(ids, custom_generate=self, **options)
        return out

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Int64[Tensor, "row token"],
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Any = None,
        generation_config: Any = None,
        seed: int | None = None,
        coupled: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Int64[Tensor, "row all"]:
        """What `model.generate(..., custom_generate=decoder)` calls, its preparations made.

        Raises:
            ModelError: another model than the target, a streamer for several rows, processors that remember earlier calls
                (guidance, SynthID), or any argument that would make no difference here: beams, another way of drafting, a
                cache, positions, embeddings or images for a prompt.
        """
        self._check_call(model, input_ids, generation_config, streamer, kwargs)
        seed = int(torch.randint(1 << 62, ())) if seed is None else check_seed(seed)
        check_processors(logits_processor)
        ends = frozenset(end_tokens(generation_config))
        self.report = Report()
        put = None if streamer is None else streamer.put
        runs, rows, made = [], [], remembered()
        for row, text in enumerate(texts(input_ids, kwargs.get("attention_mask"))):
            watch = Watch()
            mine = [for_row(processor, row, len(input_ids)) for processor in logits_processor]
            law = Law(mine, greedy=not generation_config.do_sample)
            begin = partial(self.tiers, law, rule(seed, row, coupled, made), ends, watch)
            done = partial(ended, stopping_criteria, row, len(input_ids))
            runs.append(Run(begin, done, generation_config.max_length, watch))
            rows.append((runs[-1].going(text, put), watch))
        found = together(rows)
        for run in runs:
            self.report.add(run.report, beside=True)
        if streamer is not None:
            streamer.end()
        return padded(found, generation_config, input_ids.device)

    def tiers(self, law: Law, rule: Rule, ends: frozenset[int], watch: Watch) -> Tier:
        """A fresh hierarchy for one sequence, topmost tier first; its rounds are timed by the watch."""
        # One thread on the CPU: its own time is the time on the wall of a quiet machine, and steady on a busy one.
        steady = self.target.device.type == "cpu" and torch.get_num_threads() == 1
        clock = watch.cpu if steady else watch.wall
        cache = EngineCache(self.target, self.stack)
        top = session_of(self.target, cache)
        below = self._drafter(law, rule, ends)
        if self.middle is not None:
            below = Tier(self._echo(top, self.middle), law, rule, below, self._ahead(0), ends, "middle", clock=clock)
        return Tier(top, law, rule, below, self._ahead(1), ends, "target", clock=clock)

    def _echo(self, top: Session, middle: Stack) -> Session:
        if isinstance(top, StatefulSession):
            return Apart(self.target, EngineCache(self.target, middle), whole=top)
        if coarse_of(middle, self.stack):
            return Guest(self.target, top.cache, whole=top)
        if self.in_place:
            cache: EngineCache = ViewCache(self.target, top.cache, middle, LayerPlaces)
        elif can_view(middle) and complete(self.stack) and not (has_latents(self.target) or is_read_again(self.target)):
            cache = ViewCache(self.target, top.cache, middle)
        else:
            cache = EngineCache(self.target, middle)
        r = self.refresh
        return Echo(self.target, cache, whole=top, refresh=Refresh(r.every, r.below, r.patience))

    def _drafter(self, law: Law, rule: Rule, ends: frozenset[int]) -> Drafter | None:
        if self.draft is None:
            return None
        if self.draft == "lookup":
            return Lookup()
        if self.memory is not None:
            return self.memory
        session = session_of(self.draft, EngineCache(self.draft, self.draft_stack))
        if self.widths is not None:
            return Branching(session, law, rule, self.widths)
        return Tier(session, law, rule, ends=ends, name="draft")

    def _ahead(self, level: int) -> Ahead:
        return self.ahead[level] if self.gamma == "auto" else Fixed(self.gamma[level])

    def _check_call(self, model: Any, ids: Tensor, config: Any, streamer: Any, kwargs: dict[str, Any]) -> None:
        check_prompt(ids, kwargs)
        if model is not self.target:
            raise ModelError("this decoder was made for another model; make one with TriForce(model, ...)")
        for each in (model, self.draft):
            if isinstance(each, PreTrainedModel) and not hasattr(each, STATE):
                raise ModelError(
                    f"{type(each).__name__} has been unpatched since; call kvengine.patch, or make another decoder"
                )
        if getattr(model, STATE).judge_every is not None:
            raise ModelError("speculative decoding reads a prompt in one pass; patch the model without judge_every")
        if streamer is not None and len(ids) > 1:
            raise ModelError(f"a streamer prints one row, and there are {len(ids)}; generate them one by one")
        check_arguments(config, kwargs)
        check_places_given(kwargs.get("position_ids"), ids, kwargs.get("attention_mask"))
