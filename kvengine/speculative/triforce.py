"""Generation with a hierarchy of drafts (TriForce, arXiv:2404.11912, with any stack in the middle).

target    the model with its full cache: the text has its law, whatever is below
middle    the same model behind a cheaper stack: a view of the target's cache, or a cache that follows it
draft     a small model with a streaming cache, a look-up, or nothing
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import StoppingCriteriaList, StopStringCriteria

from kvengine.errors import ModelError, PolicyError, unknown
from kvengine.hf import check_model, patch
from kvengine.hf_cache import EngineCache, engine_layers
from kvengine.speculative.accept import Rule, rule
from kvengine.speculative.ahead import Adaptive, Ahead, Fixed
from kvengine.speculative.branch import Branching
from kvengine.speculative.echo import Echo, Refresh
from kvengine.speculative.law import Law, Text
from kvengine.speculative.propose import Lookup, Recycling
from kvengine.speculative.report import Clock, Report
from kvengine.speculative.session import Session
from kvengine.speculative.tier import Drafter, Tier
from kvengine.speculative.view import ViewCache, can_view, complete
from kvengine.stack import Stack

DRAFTS = ("lookup", "recycling")
Gamma = tuple[int, int] | Literal["auto"]


class TriForce:
    """Decodes `target` losslessly with drafts.

        decoder = TriForce(model, draft="lookup", middle="retrieval(budget=4096)", gamma=(1, 6))
        out = decoder.generate(input_ids, max_new_tokens=256, temperature=0.6, top_p=0.9)
        print(decoder.report)

    Args:
        target: the model; it is patched if it is not yet, which changes nothing for other callers.
        draft: a small model with the same tokenizer, "lookup" (what followed these tokens before), "recycling"
            (successors the model rated highly before, as a tree), or None.
        middle: the policy under which the target drafts for itself; None leaves that tier out.
        gamma: tokens drafted for the middle, and for the target; "auto" decides by measured cost and acceptance.
        stack: the target's own cache. "full" keeps the model's law; under another stack that is kept instead.
        draft_stack: the small model's cache.
        widths: let the small model draft a tree with so many children per node at each depth, instead of a chain.
        refresh: when a view chooses anew.
        tokenizers: the target's and the draft's, to be compared; without them only sizes and special tokens are.

    Raises:
        ModelError: models that cannot be used, or with different tokenizers.
        PolicyError: a policy that is wrong, gamma below 1, or a cache too small for the drafts.
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
    ) -> None:
        self.target, self.draft, self.gamma, self.widths = target, draft, gamma, widths
        self.stack, self.middle = Stack.of(stack), None if middle is None else Stack.of(middle)
        self.draft_stack = Stack.of(draft_stack)
        self.refresh = refresh or Refresh()
        self.report = Report()
        self.memory: Recycling | None = None
        check_gamma(gamma)
        check_models(target, draft, self.middle, tokenizers)
        self._check_room()
        for model in (target, draft):
            if isinstance(model, torch.nn.Module) and not hasattr(model, "_kvengine"):
                patch(model, "full")
        if draft == "recycling":
            self.memory = Recycling(target.config.get_text_config(decoder=True).vocab_size)

    def generate(self, input_ids: Int64[Tensor, "row token"], **options: Any) -> Int64[Tensor, "row token"]:
        """The prompts and what follows them, rows padded on the right once they have ended.

        Takes what `model.generate` takes (a `streamer` too), and: seed (default: from torch's generator), coupled
        (position-keyed noise: the text of a seed is then the same whatever drafts it). A `temperature`, `top_k`,
        `top_p` or `min_p` asks for sampling; temperature 0 for the likeliest token.
        """
        own = {name: options.pop(name) for name in ("seed", "coupled", "streamer") if name in options}
        if options.get("temperature") == 0:
            options |= {"do_sample": False, "temperature": None}
        elif any(options.get(name) is not None for name in ("temperature", "top_k", "top_p", "min_p")):
            options.setdefault("do_sample", True)
        stop, tokenizer = options.pop("stop_strings", None), options.pop("tokenizer", None)
        if stop is not None:  # transformers would lose the tokenizer on the way
            criteria = options.get("stopping_criteria") or ()
            options["stopping_criteria"] = StoppingCriteriaList([*criteria, StopStringCriteria(tokenizer, stop)])
        if own.get("streamer") is not None:
            own["streamer"].put(input_ids.cpu())
        out: Tensor = self.target.generate(input_ids, custom_generate=partial(self, **own), **options)
        return out

    @torch.no_grad()
    def __call__(
        self,
        model: Any,
        input_ids: Int64[Tensor, "row token"],
        logits_processor: Sequence[Any] = (),
        stopping_criteria: Callable[..., Tensor] | None = None,
        generation_config: Any = None,
        seed: int | None = None,
        coupled: bool = False,
        streamer: Any = None,
        **kwargs: Any,
    ) -> Int64[Tensor, "row token"]:
        """What `model.generate(..., custom_generate=decoder)` calls, its preparations made.

        Raises:
            ModelError: another model than the target, a streamer for several rows, beams, or a cache already in use.
        """
        self._check_call(model, input_ids, generation_config, streamer, kwargs)
        seed = int(torch.randint(1 << 62, ())) if seed is None else seed
        law = Law(list(logits_processor), greedy=not generation_config.do_sample)
        ends = frozenset(end_tokens(generation_config))
        self.report = Report()
        rows = []
        for row, text in enumerate(texts(input_ids, kwargs.get("attention_mask"))):
            top = self.tiers(law, rule(seed, row, coupled), ends)
            run = Run(top, stopping_criteria, generation_config.max_length)
            rows.append(run(text, None if streamer is None else streamer.put))
            self.report.add(run.report)
        if streamer is not None:
            streamer.end()
        return padded(rows, generation_config, input_ids.device)

    def tiers(self, law: Law, rule: Rule, ends: frozenset[int] = frozenset()) -> Tier:
        """A fresh hierarchy for one sequence, topmost tier first."""
        cache = EngineCache(self.target, self.stack)
        top = Session(self.target, cache)
        below = self._drafter(law, rule, ends)
        if self.middle is not None:
            echo = self._echo(top, self.middle)
            below = Tier(echo, law, rule, below, self._ahead(0), ends, "middle")
        return Tier(top, law, rule, below, self._ahead(1), ends, "target")

    def _echo(self, top: Session, middle: Stack) -> Echo:
        if can_view(middle) and complete(self.stack):
            cache: EngineCache = ViewCache(self.target, top.cache, middle)
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
        session = Session(self.draft, EngineCache(self.draft, self.draft_stack))
        if self.widths is not None:
            return Branching(session, law, rule, self.widths)
        return Tier(session, law, rule, ends=ends, name="draft")

    def _ahead(self, level: int) -> Ahead:
        return Adaptive() if self.gamma == "auto" else Fixed(self.gamma[level])

    def _check_room(self) -> None:
        """A cheap cache must hold the tokens drafted on it."""
        ahead = 16 if self.gamma == "auto" else sum(self.gamma) + 1
        stacks = {"middle": self.middle, "draft_stack": self.draft_stack}
        for name, stack in stacks.items():
            if stack is None or name == "draft_stack" and not isinstance(self.draft, torch.nn.Module):
                continue
            budget = stack.selection.reads if stack.selects else stack.retention.limit(1 << 30)
            if isinstance(budget, int) and budget <= ahead:
                raise PolicyError(
                    f"{name}='{stack}' holds {budget} tokens, and gamma={self.gamma} drafts up to {ahead} on it: the draft "
                    "would push out what it is to be read with. Give it a larger budget, or a smaller gamma"
                )

    def _check_call(self, model: Any, ids: Tensor, config: Any, streamer: Any, kwargs: dict[str, Any]) -> None:
        cache = kwargs.get("past_key_values")
        if model is not self.target:
            raise ModelError("this decoder was made for another model; make one with TriForce(model, ...)")
        if streamer is not None and len(ids) > 1:
            raise ModelError(f"a streamer prints one row, and there are {len(ids)}; generate them one by one")
        if config.num_beams not in (None, 1) or config.return_dict_in_generate:
            raise ModelError(
                "speculative decoding returns one sequence of tokens: no beams, no return_dict_in_generate"
            )
        if cache is not None and cache.get_seq_length() > 0:
            raise ModelError("past_key_values holds tokens already; speculative decoding starts from the whole prompt")


class Run:
    """One sequence, from its prompt to its end."""

    def __init__(self, top: Tier, criteria: Callable[..., Tensor] | None, limit: int) -> None:
        """criteria: as in transformers; limit: tokens of the longest text, padding included."""
        self.top, self.criteria, self.limit = top, criteria, limit
        self.report = Report()

    def __call__(self, text: Text, put: Callable[[Tensor], None] | None = None) -> list[int]:
        """The text to its end, padding included; `put` gets the new tokens of each round."""
        prompt, clock = len(text), Clock()
        new = [self._first(text)]
        prefill = clock.lap()
        while not self._append(text, new, put):
            new = self.top.step(text, (), self.limit - len(text.padding) - len(text) - 1)[0].tokens
        self.report = Report.of(self.top, prompt, len(text) - prompt, prefill, clock.lap())
        return [*text.padding, *text.tokens]

    def _first(self, text: Text) -> int:
        """Read the prompt with every model, and draw the first token."""
        logits = self.top.session.prefill(text.tokens)
        prefill(self.top.below, text.tokens)
        law = self.top.law(text, [()], logits)[0]
        return self.top.rule.judge(law, None, (), len(text))[1]

    def _append(self, text: Text, new: Sequence[int], put: Callable[[Tensor], None] | None) -> bool:
        """Add tokens up to where the text ends; whether it does."""
        begin, done = len(text), False
        for token in new:
            text.tokens.append(token)
            done = self._ends(text)
            if done:
                break
        if put is not None:
            put(text.ids()[0, len(text.padding) + begin :].clone())
        if not done:
            self.top.settle(text)
        return done

    def _ends(self, text: Text) -> bool:
        if len(text.padding) + len(text) >= self.limit:
            return True
        return self.criteria is not None and bool(self.criteria(text.ids(), None).all())


def prefill(drafter: Drafter | None, prompt: Sequence[int]) -> None:
    """Let every model below the top read the prompt, the uppermost first."""
    session = getattr(drafter, "session", None)
    if session is not None:
        session.prefill(prompt)
    if isinstance(drafter, Tier):
        prefill(drafter.below, prompt)


def texts(ids: Int64[Tensor, "row token"], mask: Int64[Tensor, "row token"] | None) -> Iterator[Text]:
    """The rows without their left padding."""
    for row, line in enumerate(ids.tolist()):
        pad = 0 if mask is None else int((mask[row] == 0).sum())
        if pad and bool((mask[row, :pad] != 0).any()):  # type: ignore[index]
            raise ModelError("a batch for generation is padded on the left; set tokenizer.padding_side = 'left'")
        if pad == len(line):
            raise ModelError(f"row {row} of the batch has no token that is not padding")
        yield Text(line[pad:], line[:pad])


def padded(rows: list[list[int]], config: Any, device: torch.device) -> Int64[Tensor, "row token"]:
    """Rows as one tensor, the shorter ones continued by the padding token (or the end token, if there is none)."""
    pad = config.pad_token_id
    if pad is None:
        pad = next(iter(end_tokens(config)), 0)
    longest = max(map(len, rows))
    return torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)


def end_tokens(config: Any) -> list[int]:
    ends = config.eos_token_id
    return [] if ends is None else [int(ends)] if isinstance(ends, int) else [int(end) for end in ends]


def check_gamma(gamma: Gamma) -> None:
    if gamma == "auto":
        return
    if not isinstance(gamma, tuple) or len(gamma) != 2 or any(not isinstance(g, int) or g < 1 for g in gamma):
        raise PolicyError(
            f"gamma is 'auto' or two counts of at least 1 (drafted for the middle, drafted for the target), not {gamma!r}"
        )


def check_models(target: Any, draft: Any, middle: Stack | None, tokenizers: tuple[Any, Any] | None) -> None:
    """Refuse models that the tiers cannot be built of, before anything is computed."""
    check_model(target)
    whole = all(engine_layers(target.config.get_text_config(decoder=True)))
    if not whole:
        raise ModelError(
            f"{type(target).__name__} has layers with a sliding window or a recurrent state: a rejected draft cannot be "
            "taken back from those yet. Use a model whose layers all have a plain key-value cache"
        )
    if isinstance(draft, str) and draft not in DRAFTS:
        raise PolicyError(unknown("draft", draft, DRAFTS))
    if isinstance(draft, torch.nn.Module):
        check_model(draft)
        check_tokenizers(target, draft, tokenizers)
    elif draft is not None and not isinstance(draft, str):
        raise ModelError(f"a draft is a model, one of {', '.join(DRAFTS)}, or None, not {type(draft).__name__}")


def check_tokenizers(target: Any, draft: Any, tokenizers: tuple[Any, Any] | None) -> None:
    sizes = [model.config.get_text_config(decoder=True).vocab_size for model in (target, draft)]
    if sizes[0] != sizes[1]:
        raise ModelError(
            f"the draft has another tokenizer: its vocabulary has {sizes[1]} entries, the target's {sizes[0]}. A draft must "
            "speak the target's tokens; use draft='lookup', which needs no model"
        )
    if tokenizers is not None and tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise ModelError("the draft has another tokenizer: the same ids stand for other tokens. Use draft='lookup'")
