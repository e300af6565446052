"""What found heads are worth: retrieval when the best heads are kept whole, against random ones and the worst.

The context is read by all heads; the questions come afterwards, token by token, when streaming heads hold their window
alone. A question counts if the greedy answer is right to the last token.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.evals.duo.data import Passkeys, Sample
from kvengine.evals.statistics import interval, paired
from kvengine.hf.cache import EngineCache
from kvengine.hf.names import passed
from kvengine.hf.patching import patched
from kvengine.policies.routing.duo import write_pattern

Alpha = Sequence[Sequence[float]]


def compare(
    model: Any,
    data: Passkeys,
    alpha: Alpha,
    *,
    sparsity: float = 0.5,
    sinks: int = 16,
    recent: int = 64,
    length: int = 1000,
    samples: int = 20,
    draws: int = 10,
    seed: str = "compare",
    report: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """One row for each way to choose the heads that stay whole: score, 95 % interval, and difference to the best.

    Args:
        alpha: the found gates, [layer][head].
        sparsity: share of the heads that stream.
        sinks, recent: what those hold, in tokens.
        length: of the contexts, in tokens.
        samples: contexts; each is asked about all its keys.
        draws: random choices of heads.
        seed: of contexts and choices; must not be one that was trained on.
        report: called with a line for each choice.
    """
    drawn = [data.draw(f"{seed}/{i}", length) for i in range(samples)]
    found: dict[str, dict[tuple[str, int], float]] = {}
    for name, pattern in choices(alpha, draws, seed):
        found[name] = right_answers(model, drawn, pattern, sparsity, sinks, recent)
        report(f"{name}: {sum(found[name].values()) / len(found[name]):.3f}")
    whole = {name: found.pop(name) for name in list(found) if name.startswith("random")}
    pooled = {at: sum(one[at] for one in whole.values()) / len(whole) for at in next(iter(whole.values()))}
    return [row(name, values, found["best"]) for name, values in (found | {"random": pooled}).items()]


def choices(alpha: Alpha, draws: int, seed: str) -> Iterator[tuple[str, Alpha | None]]:
    """Gates to keep the best, the worst and random heads by; None keeps all."""
    yield "all", None
    yield "best", alpha
    yield "worst", [[-x for x in row] for row in alpha]
    for i in range(draws):
        source = Random(f"{seed}/heads/{i}")
        order = source.sample(range(sum(map(len, alpha))), sum(map(len, alpha)))
        yield f"random {i}", [[order.pop() for _ in row] for row in alpha]


def right_answers(
    model: Any, drawn: list[Sample], alpha: Alpha | None, sparsity: float, sinks: int, recent: int
) -> dict[tuple[str, int], float]:
    """1 for each right answer, 0 for a wrong one, by (sample, question)."""
    with tempfile.TemporaryDirectory() as folder:
        policy = "full"
        if alpha is not None:
            write_pattern(Path(folder), ranked(alpha), sinks, recent)
            policy = f"duo(sparsity={sparsity}, pattern={folder!r}, sinks={sinks}, recent={recent})"
        with patched(model, policy), torch.no_grad():
            return {(str(i), j): float(found) for i, one in enumerate(drawn) for j, found in enumerate(ask(model, one))}


def ranked(alpha: Alpha) -> list[list[float]]:
    """The same order, as values in [0, 1] that no two heads share."""
    flat = sorted((a, i, j) for i, row in enumerate(alpha) for j, a in enumerate(row))
    rank = {(i, j): n / max(1, len(flat) - 1) for n, (_, i, j) in enumerate(flat)}
    return [[rank[i, j] for j in range(len(row))] for i, row in enumerate(alpha)]


def ask(model: Any, sample: Sample) -> Iterator[bool]:
    """Each question about a context, on a copy of its cache."""
    device, cache = next(model.parameters()).device, EngineCache(model)
    model(input_ids=sample.context[None].to(device), **passed(model, cache), logits_to_keep=1)
    cache.follow_up()
    for question, answer in sample.turns:
        copied = copy.deepcopy(cache)
        yield greedy(model, copied, question.to(device), len(answer)) == answer.tolist()


def greedy(model: Any, cache: EngineCache, question: Int[Tensor, "token"], count: int) -> list[int]:
    ids, found = question[None], []
    for _ in range(count):
        ids = model(input_ids=ids, **passed(model, cache), logits_to_keep=1).logits[:, -1:].argmax(-1)
        found.append(int(ids))
    return found


def row(name: str, values: dict[tuple[str, int], float], best: dict[tuple[str, int], float]) -> dict[str, Any]:
    """A result, with the paired difference of the best heads to it."""
    mean = interval(list(values.values()), [sample for sample, _ in values])
    found = {"heads": name, "score": mean.mean, "low": mean.low, "high": mean.high, "questions": mean.n}
    more = paired(best, values)
    return found | ({} if more is None else {"ahead": more.mean, "ahead_low": more.low, "ahead_high": more.high})
