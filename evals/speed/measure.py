"""Time, and bytes held and read, of a decoded token: stock transformers, and each policy, eager and recorded.

One after the other, as the caches of all at once may not fit; stock transformers comes first and again at the end, which shows
how much the machine changed meanwhile. Each is warmed up on a short prompt, on a GPU on the whole of it, so that no kernel is
compiled for the first time while a prompt is timed, and on a few tokens after the prompt.
"""

from __future__ import annotations

import gc
import inspect
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

import kvengine
from kvengine.errors import EvaluationError, KVEngineError, refusal
from kvengine.evals.policies import STOCK
from kvengine.hf.names import CACHE
from kvengine.hf.states import stock_tensors

WAYS = ("eager", "recorded", "fused")
"""How steps may be made: by the model's own forward pass; recorded once and replayed; so, and fused by torch's compiler."""
WARM, SHORT = 4, 256  # tokens that are not timed; tokens of the prompt before
Token = Int64[Tensor, "seq 1"]
Step = Callable[[Token, int], Tensor]
"""A token of each sequence and its position; the logits."""


@dataclass(frozen=True)
class Cost:
    """What was measured of one policy at one length, or why nothing was (`problem`; then all numbers are None).

    Attributes:
        policy: as it was given; "stock" is transformers without us. steps: one of `WAYS`.
        context: tokens of each of the `batch` prompts.
        prompt_seconds: from the prompt to the first token.
        ms, p20, p80: milliseconds of a step, which is a token of each sequence: the median, and the middle of all.
        held, read: bytes of the cache after the steps, and those that another token reads; of stock transformers all it holds,
            once, also where later layers read it again.
        peak: bytes of device memory, at most, beyond what was there before, the prompt included; None on a CPU.
    """

    context: int
    batch: int
    policy: str
    steps: str
    prompt_seconds: float | None = None
    ms: float | None = None
    p20: float | None = None
    p80: float | None = None
    held: int | None = None
    read: int | None = None
    peak: int | None = None
    problem: str = ""

    @property
    def tokens_per_second(self) -> float | None:
        return None if self.ms is None else 1e3 * self.batch / self.ms


def costs(
    model: Any, ids: Int64[Tensor, "seq token"], policies: Sequence[str], new: int = 32, ways: Sequence[str] = ("eager",),
    begin: Callable[[str], None] = lambda text: None,
) -> Iterator[Cost]:  # fmt: skip
    """Stock transformers, each policy in each of the ways, and stock transformers again.

    Args:
        model: a Hugging Face model that is not patched. ids: the prompts, without padding, on its device.
        new: steps that are timed. begin: told what comes next.

    Raises:
        EvaluationError: fewer than two steps are asked for, or in a way that there is not. What a policy, the model, memory or
            torch's compiler refuses is a `Cost` with a `problem` instead, and the others go on.
    """
    if new < 2 or not ways or set(ways) - set(WAYS):
        raise EvaluationError(f"two steps or more can be timed, {', '.join(WAYS)}, not {new} {', '.join(ways)}")
    for policy in (STOCK, *policies, STOCK):
        begin(policy)
        mine = WAYS[:1] if policy == STOCK else ways
        found: list[Cost] = []
        try:
            for cost in _measured(model, ids, policy, new, mine):
                found.append(cost)
                yield cost
        except (KVEngineError, RuntimeError, MemoryError) as error:
            if (said := refusal(error)) is None:
                raise
            for way in mine[len(found) :]:
                yield Cost(ids.shape[1], len(ids), policy, way, problem=said)
        gc.collect()
        if ids.is_cuda:
            torch.cuda.empty_cache()


@torch.no_grad()
def _measured(model: Any, ids: Tensor, policy: str, new: int, ways: Sequence[str]) -> Iterator[Cost]:
    with nullcontext() if policy == STOCK else kvengine.patched(model, policy):
        cache = _cache(model, policy)
        short = (
            ids if ids.is_cuda else ids[:, :SHORT]
        )  # a kernel of Triton's is made when it is needed, those in C are all there
        timed(plain(model, cache), first_token(model, short, cache), short.shape[1], 1)
        del cache
        before = _memory(ids.device)
        cache = _cache(model, policy)
        began = time.perf_counter()
        token = first_token(model, ids, cache)
        wait(token)
        prompt, seen = time.perf_counter() - began, ids.shape[1]
        for way in ways:
            if way == "eager":
                ms = timed(plain(model, cache), token, seen, new)
            else:
                ms = _replayed(model, cache, token, seen, new, way == "fused")
            seen += WARM + new
            cuts = statistics.quantiles(ms, n=5, method="inclusive")
            held, read = _bytes(cache)
            peak = None if before is None else torch.cuda.max_memory_allocated(ids.device) - before
            yield Cost(
                ids.shape[1], len(ids), policy, way, prompt, statistics.median(ms), cuts[0], cuts[3], held, read, peak
            )


def _cache(model: Any, policy: str) -> Any:
    from transformers import DynamicCache

    return DynamicCache(config=model.config) if policy == STOCK else kvengine.EngineCache(model)


def _memory(device: torch.device) -> int | None:
    """What is there, from where on the peak is counted anew."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def first_token(model: Any, ids: Tensor, cache: Any) -> Token:
    """The token behind the prompts, greedily."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    logits = model(ids, **{CACHE: cache}, use_cache=True, **last).logits
    return logits[:, -1:].argmax(-1)  # type: ignore[no-any-return]


def plain(model: Any, cache: Any) -> Step:
    """The model's own forward pass."""

    def step(token: Tensor, at: int) -> Tensor:
        return model(token, position_ids=torch.full_like(token, at), **{CACHE: cache}, use_cache=True).logits  # type: ignore[no-any-return]

    return step


def _replayed(model: Any, cache: Any, token: Tensor, seen: int, new: int, fuse: bool) -> list[float]:
    decoder = kvengine.compile_decode(model, fuse=fuse).open(cache, WARM + new)
    try:
        return timed(lambda token, at: decoder(token, torch.full_like(token, at)), token, seen, new)
    finally:
        decoder.close()


def timed(step: Step, token: Token, at: int, steps: int) -> list[float]:
    """Milliseconds of each step after the first few, the device waited for at each. `at`: tokens seen so far."""
    taken = []
    for i in range(WARM + steps):
        began = time.perf_counter()
        token = step(token, at + i)[:, -1:].argmax(-1)
        wait(token)
        taken.append(1e3 * (time.perf_counter() - began))
    return taken[WARM:]


def wait(x: Tensor) -> None:
    """Until it is there."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def _bytes(cache: Any) -> tuple[int, int]:
    """Held, and read by another token; by stock transformers, all that is held."""
    if not isinstance(cache, kvengine.EngineCache):
        own = sum(x.nbytes for layer in cache.layers for x in stock_tensors(layer))
        return own, own
    stats = cache.stats()
    return stats.bytes_held, stats.read_per_token
