"""Likelihoods of continuations under a policy, for multiple choice and perplexities that other tools ask for.

A text that comes in one pass is read exactly, and what a policy keeps of it is for what follows. So logits of a whole text,
which is how lm-evaluation-harness and most scripts for perplexity score it, are the full cache's under nearly every policy.
Here the context is read and compressed, and the continuation is taken token by token, as decoding would take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import torch

from kvengine.errors import EvaluationError
from kvengine.evals.engine import CacheSession
from kvengine.hf.cache import STATE, EngineCache


def loglikelihoods(
    model: Any, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], longest: int | None = None
) -> list[tuple[float, bool]]:
    """Of each context and continuation, in tokens: the continuation's log-likelihood, and whether greedy decoding says it.

    The context's last token is taken by decoding too, so that a continuation's first token is said by what the policy has
    left. A context that comes several times in a row is read once.

    Args:
        model: a patched model; with `judge_every` it reads contexts in parts, as its `generate` does.
        pairs: token ids of contexts (at least one token) and of continuations (at least one).
        longest: tokens that the model can take; longer contexts lose their beginning.

    Returns:
        Sums of natural logarithms over the continuation's tokens, in fp32, and whether each token was the likeliest.

    Raises:
        EvaluationError: a context or continuation is empty, or a continuation longer than `longest`.
        ModelError: the model is not patched.
    """
    found = []
    for prompt, group in groupby((split(*pair, longest) for pair in pairs), key=lambda parts: parts[0]):
        same = list(group)
        session = CacheSession(model, EngineCache(model), getattr(model, STATE).judge_every)
        logits = session.read(prompt)
        session.follow_up()
        for i, (_, before, said) in enumerate(same):
            branch = session.branch() if i < len(same) - 1 else session
            rest = before + said[:-1]
            every = branch.read(rest, every=True)[len(before) - 1 :] if before else logits
            if not before and rest:
                every = torch.cat([logits, branch.read(rest, every=True)])
            ids = torch.tensor(said, device=every.device)[:, None]
            sums = every.log_softmax(-1).gather(1, ids).sum()
            found.append((float(sums), bool((every.argmax(-1) == ids[:, 0]).all())))
    return found


def split(
    context: Sequence[int], continuation: Sequence[int], longest: int | None
) -> tuple[list[int], list[int], list[int]]:
    """What is read as a prompt, what of the context is decoded (its last token, if it has others), and what is said."""
    said = list(continuation)
    if not len(context) or not said:
        raise EvaluationError(
            "a context and its continuation need a token each; begin with the model's first token (bos)"
        )
    if longest is not None and len(said) > longest:
        raise EvaluationError(f"a continuation of {len(said)} tokens does not fit into {longest}")
    before = list(context) if longest is None else list(context)[-(longest + 1 - len(said)) :]
    return before[:-1] or before, before[-1:] if len(before) > 1 else [], said
