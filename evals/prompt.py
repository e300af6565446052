"""From a sample's texts to token ids: the chat wrapper, the answer prefix after its header, one opening token.

A prompt is `head + context + question + tail + prefix`; the turn that follows in the same conversation is
`answer + between + question + tail + lead + prefix`. Without a chat template head, tail and lead are empty, `between` a
blank line.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Sample, Turn

MARKS = ("[SepSepSep-1]", "[SepSepSep-2]", "[SepSepSep-3]")
TODAY = datetime(2024, 7, 26)
"""What a template that writes the date is told (Llama 3.1's own, where it knows none): prompts are the same every day."""
SPELLED = "".join(f" | replace('%{letter}', '{TODAY.strftime(f'%{letter}')}')" for letter in "aAbBdHIjmMpSyY")
CLOCK = f"{{%- macro strftime_now(format) -%}}{{{{ format{SPELLED} }}}}{{%- endmacro %}}"
"""It stands before such a template, and in place of the function that transformers brings."""


@dataclass(frozen=True)
class Wrapper:
    """The fixed texts around what is said."""

    head: str = ""
    between: str = "\n\n"
    tail: str = ""


def wrapper(tokenizer: Any) -> Wrapper:
    """Cut the tokenizer's chat template at what the user and the assistant say.

    Raises `EvaluationError` for a template that does not carry the messages through unchanged, or if there is none.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise EvaluationError("the tokenizer has no chat template; run with the template off (--chat off)")
    roles = zip(("user", "assistant", "user"), MARKS, strict=True)
    text = _render(tokenizer, [{"role": role, "content": mark} for role, mark in roles])
    first = _render(tokenizer, [{"role": "user", "content": MARKS[0]}])
    pieces = [text.partition(mark) for mark in MARKS]
    if any(text.count(mark) != 1 for mark in MARKS) or first.count(MARKS[0]) != 1:
        raise EvaluationError("the chat template drops or changes messages; run with the template off (--chat off)")
    head, _, tail = first.partition(MARKS[0])
    return Wrapper(head, pieces[1][2].partition(MARKS[2])[0], tail)


def _render(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    try:
        template = tokenizer.get_chat_template()
        more: dict[str, Any] = {"chat_template": CLOCK + template} if "strftime_now" in template else {}
        more["enable_thinking"] = False  # an answer's tokens are for the answer (Qwen 3, GLM 4.5, SmolLM 3 …)
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **more))
    except (TemplateError, TypeError, ValueError) as error:  # the latter of several templates without a default
        raise EvaluationError(
            f"the chat template cannot be used ({type(error).__name__}: {error}); run with the template off (--chat off)"
        ) from error


@dataclass(frozen=True)
class Prompter:
    """Builds token ids with one tokenizer. `chat`: wrap in the tokenizer's chat template."""

    tokenizer: Any
    chat: bool = False

    @functools.cached_property
    def wrapper(self) -> Wrapper:
        """What is put around the texts."""
        return wrapper(self.tokenizer) if self.chat else Wrapper()

    @functools.cached_property
    def bos(self) -> int | None:
        """The beginning-of-sequence token, if this tokenizer starts its texts with one."""
        bos = self.tokenizer.bos_token_id
        if bos is None:
            return None
        starts = self.tokenizer("a").input_ids[:1] == [bos]
        return bos if starts or self.wrapper.head.startswith(str(self.tokenizer.bos_token)) else None

    def of(self, sample: Sample) -> Prompter:
        """The prompter for this sample: without the template if it is raw."""
        return Prompter(self.tokenizer) if sample.raw and self.chat else self

    def ids(self, text: str) -> list[int]:
        """Token ids of a text in the middle of a conversation: nothing is added."""
        return list(self.tokenizer(text, add_special_tokens=False).input_ids)

    def first(self, text: str) -> list[int]:
        """Token ids of a text at the start: exactly one beginning-of-sequence token, or none if the model has none."""
        ids = self.ids(text)
        if self.bos is None:
            return ids
        while ids[:1] == [self.bos]:
            ids = ids[1:]
        return [self.bos, *ids]

    def context(self, sample: Sample) -> list[int]:
        """The context alone, without any question."""
        return self.first(self.wrapper.head + sample.context)

    def asked(self, turn: Turn) -> list[int]:
        """A question after the context, up to where the model speaks."""
        return self.ids(turn.question + self.wrapper.tail + turn.prefix)

    def whole(self, sample: Sample) -> list[int]:
        """Context and first question in one text."""
        turn = sample.turns[0]
        opening = sample.context + turn.question if sample.opening is None else sample.opening
        return self.first(self.wrapper.head + opening + self.wrapper.tail + turn.prefix)

    def follow(self, answer: str, turn: Turn, most: int | None = None) -> list[int]:
        """The given answer to the turn before, and the next question. What makes an answer longer than `most` tokens is left
        out at its end: a model's own, read from its text, may take more tokens than it was said in."""
        lead = turn.lead if self.chat else ""
        rest = self.wrapper.between + turn.question + self.wrapper.tail + lead + turn.prefix
        ids = self.ids(answer + rest)
        while most is not None and answer and (over := len(ids) - most - len(self.ids(rest))) > 0:
            answer = answer[:-over]
            ids = self.ids(answer + rest)
        return ids

    def measure(self, sample: Sample) -> int:
        """Tokens of its longest prompt: the first one, or any question asked on its own of the context. Of the same text the
        latter may take more tokens, as it comes in two pieces."""
        one = self.of(sample)
        context = len(one.context(sample))
        return max(len(one.whole(sample)), *(context + len(one.asked(turn)) for turn in sample.turns))

    def conversation(self, sample: Sample, golden: bool = True) -> int:
        """Tokens read until the last turn's answer, where right answers stand between the turns, or the model's own, as long
        as they may become."""
        one = self.of(sample)
        return len(one.whole(sample)) + one.later(sample, golden)

    def later(self, sample: Sample, golden: bool) -> int:
        """Those of them that follow the first prompt."""
        pairs = itertools.pairwise(sample.turns)
        if golden:
            return sum(len(self.follow(a.answers[0], b)) for a, b in pairs)
        return sum(a.max_new_tokens + len(self.follow("", b)) for a, b in pairs)

    def text(self, ids: list[int]) -> str:
        """What was generated."""
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))

    def digest(self) -> str:
        """Hash of vocabulary, merges and wrapper: data fitted with another tokenizer are other data."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else repr(sorted(self.tokenizer.get_vocab().items()))
        return hashlib.sha256(f"{text}|{self.wrapper}|{self.bos}".encode()).hexdigest()[:16]


def middle_cut(ids: list[int], limit: int) -> list[int]:
    """Keep the first and the last half of `limit` tokens.

    >>> middle_cut([1, 2, 3, 4, 5, 6], 4)
    [1, 2, 5, 6]
    """
    if len(ids) <= limit:
        return ids
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]
