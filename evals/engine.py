"""The one place of the evaluation that touches a model: a session reads tokens, branches, and says what it holds."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a cache holds and reads. Tokens are means over layers, sequences and KV heads; bytes are totals."""

    held: float
    attended: float
    bytes_held: int
    read_per_token: int
    tiers: dict[str, int] = field(default_factory=dict)


@runtime_checkable
class Session(Protocol):
    """One conversation with its cache."""

    def read(self, ids: list[int], *, every: bool = False) -> Tensor:
        """Logits [token vocabulary] after the last token, or after each one with `every`."""

    def follow_up(self) -> None:
        """What was read so far was the prompt; what follows is not compressed as one."""

    def branch(self) -> Session:
        """A copy that can be thrown away: what it reads does not touch this session."""

    def usage(self) -> Usage:
        """What the cache holds now."""


@runtime_checkable
class Engine(Protocol):
    """Opens sessions on a model under one policy."""

    def session(self) -> Session:
        """A new, empty session."""


@dataclass
class CacheSession:
    """A session on any cache that Hugging Face models take.

    `judge_every`: a prompt is read in parts of so many tokens, as `kvengine.patch` has it for `generate`.
    """

    model: Any
    cache: Any
    judge_every: int | None = None

    @cached_property
    def told(self) -> bool:
        from kvengine.hf.places import is_told

        return is_told(self.model)

    def passed(self, ids: Tensor) -> dict[str, Any]:
        """What a pass over these tokens is given beside them: the cache, and where they stand."""
        from kvengine.hf.names import passed
        from kvengine.hf.places import placed

        seen = self.cache.seen if hasattr(self.cache, "seen") else self.cache.get_seq_length()
        return passed(self.model, self.cache) | placed(self.model, seen, ids.shape[1], len(ids), self.told)

    @torch.inference_mode()
    def read(self, ids: list[int], *, every: bool = False) -> Tensor:
        if self.judge_every is None or len(ids) <= self.judge_every:
            return self._read(ids, every)
        from kvengine.hf.parts import ends

        stops = ends(0, len(ids), self.judge_every)
        found = [self._read(ids[a:b], every) for a, b in zip([0, *stops], stops, strict=False)]
        return torch.cat(found) if every else found[-1]

    def _read(self, ids: list[int], every: bool) -> Tensor:
        tokens = torch.tensor([ids], device=self.model.device)
        out = self.model(input_ids=tokens, **self.passed(tokens), use_cache=True, logits_to_keep=0 if every else 1)
        logits: Tensor = out.logits[0].float()
        return logits if every else logits[-1:]  # some models give all the same

    @torch.inference_mode()
    def rows(self, tokens: Tensor) -> Tensor:
        """Logits [sequence vocabulary] after the last of these tokens [sequence token]: several conversations at once."""
        ids = tokens.to(self.model.device)
        out = self.model(input_ids=ids, **self.passed(ids), use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[:, -1].float()
        return logits

    def follow_up(self) -> None:
        if hasattr(self.cache, "follow_up"):
            self.cache.follow_up()

    def branch(self) -> CacheSession:
        made = replace(self, cache=copy.deepcopy(self.cache))
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)  # the copy is not to be timed as part of what is read next
        return made

    def usage(self) -> Usage:
        return stock_usage(self.cache) if not hasattr(self.cache, "stats") else engine_usage(self.cache.stats())

    def usages(self) -> list[Usage]:
        """What the engine's cache holds now, by conversation: tokens of each, bytes divided evenly."""
        return engine_usages(self.cache.stats())


def stock_usage(cache: Any) -> Usage:
    """A stock cache holds everything and reads all of it for every token."""
    from kvengine.hf.states import stock_tensors

    size = sum(x.nbytes for layer in cache.layers for x in stock_tensors(layer))
    tokens = float(cache.get_seq_length())
    return Usage(held=tokens, attended=tokens, bytes_held=size, read_per_token=size, tiers={"device": size})


def engine_usage(stats: Any) -> Usage:
    """From `EngineCache.stats()`."""
    return Usage(
        held=float(stats.held.float().mean()),
        attended=float(stats.attended.float().mean()),
        bytes_held=int(stats.bytes_held),
        read_per_token=int(stats.read_per_token),
        tiers={tier: int(sum(fields.values())) for tier, fields in stats.bytes.items()},
    )


def engine_usages(stats: Any) -> list[Usage]:
    """From `EngineCache.stats()`, one per sequence."""
    n = stats.held.shape[1]
    tiers = {tier: int(sum(fields.values())) // n for tier, fields in stats.bytes.items()}
    return [
        Usage(
            held=float(stats.held[:, i].float().mean()),
            attended=float(stats.attended[:, i].float().mean()),
            bytes_held=int(stats.bytes_held) // n,
            read_per_token=int(stats.read_per_token) // n,
            tiers=tiers,
        )
        for i in range(n)
    ]


@dataclass(frozen=True)
class StockEngine:
    """The model as it is, with transformers' own cache: the null of every comparison, and the runner's test double."""

    model: Any

    def session(self) -> Session:
        from transformers import DynamicCache

        return CacheSession(self.model, DynamicCache())


@dataclass(frozen=True)
class PolicyEngine:
    """The model patched with a stack; sessions use `kvengine.EngineCache`."""

    model: Any
    stack: Any
    judge_every: int | None = None

    def session(self) -> Session:
        import kvengine

        return CacheSession(self.model, kvengine.EngineCache(self.model, self.stack), self.judge_every)


@contextlib.contextmanager
def opened(model: Any, policy: str, judge_every: int | None = None) -> Iterator[Engine]:
    """The model under a policy for the length of the block; "stock" leaves it alone. `judge_every`: as `kvengine.patch` has it.

    Raises the errors of `kvengine.patch`: `UnknownPolicy`, `UnsupportedPolicy`, `ModelError`.
    """
    if policy == "stock":
        yield StockEngine(model)
        return
    import kvengine

    with kvengine.patched(model, policy, judge_every=judge_every):
        yield PolicyEngine(model, kvengine.Stack.parse(policy), judge_every)
