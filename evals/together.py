"""Many policies on the same contexts, at the price of reading each context once.

The model reads a context with the full cache. What its layers made of it (queries, keys and values) is then given to the
cache of each policy, which judges and stores it as if it had read the context itself: with exact attention in the prompt
these tensors are the same for all. The attention that every token receives, which several methods want, is computed once
too. Questions are asked on copies. A policy whose prompt attention is not exact reads for itself.

Same cells, rows and journal as `kvengine.evals.runner`; only the order of work differs: contexts outermost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvengine.errors import EvaluationError
from kvengine.evals.engine import CacheSession, Session, Usage
from kvengine.evals.protocol import Answer
from kvengine.evals.protocol import Protocol as Asking
from kvengine.evals.records import Row
from kvengine.evals.runner import GIVEN_UP, Cell, Observer, Run, about, outcome
from kvengine.evals.tasks import Sample


@dataclass
class Reading:
    """What the model made of a context: per layer its queries, keys, values and call; and the logits at its end."""

    ids: list[int]
    layers: list[Any]
    logits: Tensor
    masses: dict[Any, Tensor] = field(default_factory=dict)

    def shared(self, ids: list[int]) -> int:
        """How many tokens at the start of `ids` are the context's; one less than all of `ids` if it goes on there."""
        same = next((i for i, (a, b) in enumerate(zip(ids, self.ids, strict=False)) if a != b), None)
        n = min(len(ids), len(self.ids)) if same is None else same
        return n if n < len(ids) or n == len(self.ids) else n - 1


@torch.inference_mode()
def read(model: Any, ids: list[int]) -> Reading:
    """Read a context. Raises `EvaluationError` for a model of which the engine does not serve every layer."""
    import kvengine
    from kvengine.hf_cache import EngineLayer

    with kvengine.patched(model, "full"):
        cache = kvengine.EngineCache(model)
        kept: list[Any] = [None] * len(cache.layers)
        for i, layer in enumerate(cache.layers):
            if not isinstance(layer, EngineLayer):
                raise EvaluationError("contexts cannot be shared on a model with sliding or recurrent layers")
            layer.listener = lambda *found, i=i: kept.__setitem__(i, found)
        cache.announce(len(ids))
        tokens = torch.tensor([ids], device=model.device)
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return Reading(ids, kept, out.logits[0].float())


def give(cache: Any, reading: Reading, n: int) -> None:
    """Put the first `n` tokens of a reading into an empty cache, as the prompt or its beginning."""
    for i, (layer, (q, k, v, call)) in enumerate(zip(cache.engines, reading.layers, strict=True)):
        layer.open(k, v)
        for part in layer.parts:
            heads = None if part.index is None else tuple(part.index.tolist())
            part.lane.column_mass = remembered(part.lane.column_mass, reading.masses, (i, heads))
        layer.follow(q[:, :, :n], k[:, :, :n], v[:, :, :n], call)
        for part in layer.parts:
            del part.lane.column_mass


def remembered(compute: Callable[..., Tensor], masses: dict[Any, Tensor], where: Any) -> Callable[..., Tensor]:
    """A lane's `column_mass` that asks first whether the same queries of the same heads were counted before."""

    def mass(q: Tensor, at: Tensor, real: Tensor, call: Any, before: Tensor | None) -> Tensor:
        if before is not None:
            return compute(q, at, real, call, before)
        key = where, at.cpu().numpy().tobytes(), real.cpu().numpy().tobytes()
        if key not in masses:
            masses[key] = compute(q, at, real, call, None)
        return masses[key]

    return mass


@dataclass
class Fed:
    """A session that is given the context instead of reading it."""

    inner: CacheSession
    reading: Reading

    @torch.inference_mode()
    def read(self, ids: list[int], *, every: bool = False) -> Tensor:
        cache = self.inner.cache
        if cache.seen:
            return self.inner.read(ids, every=every)
        n = self.reading.shared(ids)
        cache.announce(len(ids))
        give(cache, self.reading, n)
        return self.inner.read(ids[n:], every=every) if n < len(ids) else self.reading.logits

    def follow_up(self) -> None:
        self.inner.follow_up()

    def branch(self) -> Session:
        return self.inner.branch()

    def usage(self) -> Usage:
        return self.inner.usage()


def execute(run: Run, observer: Observer, questions: int) -> None:
    """Do what the journal lacks: per task as many contexts as it takes to ask `questions` questions."""
    cells, place = run.cells(), lambda cell: (cell.task.name, cell.length)
    for index in range(run.config.samples):
        for _, group in groupby(cells, key=place):
            some = list(group)
            try:
                samples = run.samples(some[0])
            except tuple(GIVEN_UP) as error:
                for cell in some:
                    run._give_up(cell, run.key(cell), error, observer)
                continue
            if index < min(len(samples), -(-questions // len(samples[0].turns))):
                fill(run, some, samples[index], observer)


def fill(run: Run, cells: list[Cell], sample: Sample, observer: Observer) -> None:
    """Do what the journal lacks of one context."""
    reading: Reading | None = None
    for cell in cells:
        key = run.key(cell)
        if run.journal.holds(key, sample) or (key, None) in run.journal.done:
            continue
        reading = reading or read(run.model, run.prompter.of(sample).context(sample))
        try:
            rows = list(ask(run, cell, key, sample, reading))
        except tuple(GIVEN_UP) as error:
            run._give_up(cell, key, error, observer)
            continue
        run.journal.append(rows)
        observer.sample(cell, rows)


def ask(run: Run, cell: Cell, key: str, sample: Sample, reading: Reading) -> Iterator[Row]:
    """The rows of one cell on one context. In multi-turn mode every question is alone with the context."""
    asking = Asking(prompter=run.prompter, mode=cell.mode, stop=run.stop, golden=run.config.golden)
    with run.opener(run.model, cell.arm.policy) as engine:
        for index, answer in enumerate(answers(asking, engine, sample, reading)):
            turn = sample.turns[index]
            measured = outcome(cell.task, turn, answer)
            yield {**run._place(cell, key), **about(sample, index), **measured, "peak_bytes": None}


def answers(asking: Asking, engine: Any, sample: Sample, reading: Reading) -> Iterator[Answer]:
    if asking.mode != "multi-turn":
        yield from asking.play(opened(engine, reading), sample)
        return
    for turn in sample.turns:
        yield from asking.play(opened(engine, reading), replace(sample, turns=(turn,), opening=None))


def opened(engine: Any, reading: Reading) -> Session:
    """A session that is fed, if the policy reads a prompt as the full cache does."""
    session: Session = engine.session()
    stack = getattr(engine, "stack", None)
    fed = isinstance(session, CacheSession) and stack is not None and stack.prefill.exact
    return Fed(session, reading) if fed else session  # type: ignore[arg-type]
