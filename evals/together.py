"""Many policies on the same contexts, at the price of reading each context once.

The model reads contexts with the full cache. What its layers made of them (queries, keys and values) is then given to the
cache of each policy, which judges and stores it as if it had read them itself: with exact attention in the prompt these
tensors are the same for all. The attention that every token receives, which several methods want, is computed once too.
A policy whose prompt attention is not exact reads for itself. Samples with texts of equal size go in lockstep.

Same cells, rows and journal as `kvengine.evals.runner`, but for times and peak memory: these are taken from the first
sample of every length, mode and policy, which is asked as `runner` does.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import groupby
from math import inf
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kvengine.errors import EvaluationError
from kvengine.evals import lockstep
from kvengine.evals.aggregate import MARGIN
from kvengine.evals.engine import CacheSession, Usage
from kvengine.evals.policies import STOCK
from kvengine.evals.records import Row
from kvengine.evals.runner import GIVEN_UP, Cell, NotTelling, Observer, Run, about, outcome, parts
from kvengine.evals.tasks import Sample
from kvengine.evals.tasks._fit import TooShort

OUT_OF_MEMORY = torch.OutOfMemoryError, MemoryError


@dataclass
class Reading:
    """What the model made of contexts of one size: per layer its queries, keys, values and call; the logits at the end.

    beside: what layers with a window or states held then, by their number.
    """

    ids: list[list[int]]
    layers: list[Any]
    logits: Tensor
    masses: dict[Any, Tensor] = field(default_factory=dict)
    beside: dict[int, Any] = field(default_factory=dict)

    def shared(self, prompts: list[list[int]]) -> int:
        """How many tokens at the start of all prompts are the contexts'; one less than a prompt if the context goes on. All or
        none where layers have windows or states, which are those of the end."""
        size = len(self.ids[0])
        n = min(lockstep.common(*pair) for pair in zip(prompts, self.ids, strict=True))
        n = n if n < len(prompts[0]) or n == size else n - 1
        return n if n == size or not self.beside else 0


@torch.inference_mode()
def read(model: Any, contexts: list[list[int]]) -> Reading:
    """Read contexts of one size. Raises `EvaluationError` for a model whose layers read another layer's tokens, or none of
    which the engine serves."""
    import kvengine
    from kvengine.hf.layer import EngineLayer
    from kvengine.hf.states import states_of
    from kvengine.prefix_beside import held_beside, strange

    if strange(model.config.get_text_config(decoder=True)):
        raise EvaluationError(
            "contexts cannot be shared on a model whose layers read another layer's tokens, or all have windows; run with "
            "--no-shared"
        )
    with kvengine.patched(model, "full"):
        cache = kvengine.EngineCache(model)
        kept: list[Any] = [None] * len(cache.engines)
        for i, layer in enumerate(layer for layer in cache.layers if isinstance(layer, EngineLayer)):
            layer.listener = lambda *found, i=i: kept.__setitem__(i, found)
        cache.announce(len(contexts[0]))
        tokens = torch.tensor(contexts, device=model.device)
        out = model(input_ids=tokens, **CacheSession(model, cache).passed(tokens), use_cache=True, logits_to_keep=1)
    beside = {i: SimpleNamespace(**states_of(layer)) for i, layer in enumerate(cache.layers) if held_beside(layer)}
    return Reading(contexts, kept, out.logits[:, -1].float(), beside=beside)


def give(model: Any, cache: Any, reading: Reading, n: int) -> None:
    """Put the first `n` tokens of a reading into an empty cache, as the prompt or its beginning."""
    from kvengine.hf.replay import given
    from kvengine.hf.states import take_over

    for i, its in reading.beside.items():
        take_over(cache.layers[i], its)
    for i, (layer, (q, k, v, call)) in enumerate(zip(cache.engines, reading.layers, strict=True)):
        layer.open(k, v)
        for part in layer.parts:
            heads = None if part.index is None else tuple(part.index.tolist())
            part.lane.column_mass = remembered(part.lane.column_mass, reading.masses, (i, heads))
        try:
            layer.follow(q[:, :, :n], k[:, :, :n], v[:, :, :n], call)
        finally:  # also where memory is short: no lane is to be left in a circle, which would keep what it holds
            for part in layer.parts:
                del part.lane.column_mass
    given(model, cache, torch.tensor(reading.ids, device=model.device)[:, :n])


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
    """Conversations that are given their contexts instead of reading them."""

    inner: CacheSession
    reading: Reading

    @torch.inference_mode()
    def rows(self, tokens: Tensor) -> Tensor:
        cache = self.inner.cache
        n = 0 if cache.seen else self.reading.shared(tokens.tolist())
        if not n:
            return self.inner.rows(tokens)
        cache.announce(tokens.shape[1])
        give(self.inner.model, cache, self.reading, n)
        return self.inner.rows(tokens[:, n:]) if n < tokens.shape[1] else self.reading.logits

    def follow_up(self) -> None:
        self.inner.follow_up()

    def branch(self) -> lockstep.Rows:
        return self.inner.branch()

    def usages(self) -> list[Usage]:
        return self.inner.usages()


def execute(
    run: Run, observer: Observer, *, end: float = inf, questions: int | None = None, timed: bool = True
) -> None:
    """Do what the journal lacks in rounds: so many samples of every cell at a time (`config.batch`).

    Args:
        end: when to stop, on `time.monotonic`'s clock. A round that would not end in time, as the one before took, is not
            begun; what is begun is finished for all policies of its place.
        questions: ask about so many questions of each task instead of all samples: as many rounds as batches hold them. A round
            asks whole samples, as many as a batch holds questions of and one at the least, so it may ask fewer or more.
        timed: ask the first sample of each length, mode and policy alone, and measure its times.
    """
    places = [list(group) for _, group in groupby(run.cells(), key=lambda cell: (cell.task.name, cell.length))]
    took, batch, number = 0.0, run.config.batch, 0
    while number * batch < (questions or run.config.samples_per_cell):
        start = time.monotonic()
        if start + took > end:
            break
        for cells in places:
            samples = drawn(run, cells, observer)
            size = batch if questions is None else max(1, batch // len(samples[0].turns)) if samples else batch
            some = samples[number * size : (number + 1) * size]
            if some and time.monotonic() < end and tells(run, cells, samples, observer):
                fill(run, cells, some, observer, timed)
        took, number = time.monotonic() - start, number + 1


def drawn(run: Run, cells: list[Cell], observer: Observer) -> list[Sample]:
    """The samples of a place; none if there are none, which its cells are told."""
    try:
        return run.samples(cells[0])
    except tuple(GIVEN_UP) as error:
        for cell in cells:
            run.give_up(cell, run.key(cell), error, observer)
        return []


def tells(run: Run, cells: list[Cell], samples: list[Sample], observer: Observer) -> bool:
    """Whether policies can differ here. Asks the full cache `config.few` samples, and gives up the other cells where it
    hardly beats guessing. The first sample is left for the clock, which wants it alone."""
    ceilings = [cell for cell in cells if cell.arm.role == "ceiling"]
    if run.config.few is None or not ceilings:
        return True
    fill(run, ceilings, samples[1 : 1 + run.config.few] or samples, observer, timed=False)
    task, keys = cells[0].task, {run.key(cell) for cell in ceilings}
    found = [row for row in run.journal.rows if row["key"] in keys and row["status"] == "ok"]
    if not found or found[0]["metric"] == "nll" or max(means(found).values()) >= task.floor + MARGIN:
        return True
    for cell in cells:
        if cell not in ceilings:
            text = "the full cache hardly beats guessing, so nothing else was asked"
            run.give_up(cell, run.key(cell), NotTelling(text), observer)
    return False


def means(rows: list[Row]) -> dict[str, float]:
    """Mean score by mode."""
    modes = dict.fromkeys(row["mode"] for row in rows)
    return {mode: fmean(row["score"] for row in rows if row["mode"] == mode) for mode in modes}


def fill(run: Run, cells: list[Cell], samples: list[Sample], observer: Observer, timed: bool) -> None:
    """Do what the journal lacks of some samples, those of one shape together."""
    groups: dict[Any, list[Sample]] = defaultdict(list)
    scripts = {sample.id: {cell.mode: written(run, cell, sample) for cell in cells} for sample in samples}
    for sample in samples:
        groups[shape(scripts[sample.id])].append(sample)
    for cell in cells:
        missing = run.missing(cell, samples)
        observer.cell(cell, len(samples) - len(missing) + run.absent(cell))
        if timed and missing[:1] == samples[:1] and not run.journal.timed(*clock(cell), cell.arm.code):
            run.attempt(cell, missing[:1], observer)
    for group in groups.values():
        reading: Reading | None = None
        for mode in dict.fromkeys(cell.mode for cell in cells):
            acts = [scripts[sample.id][mode] for sample in group]
            mine = [cell for cell in cells if cell.mode == mode]
            reading = fill_group(run, mine, group, acts, reading, observer)


Acts = list[lockstep.Script] | None
"""What is read in each session of a sample; None if it is not known beforehand."""


def written(run: Run, cell: Cell, sample: Sample) -> Acts:
    """The scripts of a sample, one for each session."""
    try:
        asking = run.asking(cell, sample)
    except TooShort:  # told where it is asked alone
        return None
    found = [lockstep.script(asking, part) for part in parts(cell, sample)]
    return None if None in found else found  # type: ignore[return-value]


def shape(scripts: dict[str, Acts]) -> tuple[Any, ...]:
    """What samples must have in common to be asked together."""
    return tuple(one.shape for acts in scripts.values() for one in acts or ())


def clock(cell: Cell) -> tuple[int, str, str]:
    """Cells of equal length, mode and policy take equal times."""
    return cell.length, cell.mode, cell.arm.spelled


def fill_group(
    run: Run, cells: list[Cell], group: list[Sample], acts: list[Acts], reading: Reading | None, observer: Observer
) -> Reading | None:
    """Do what the journal lacks of samples of one shape in one mode. Returns the reading, for the next mode.

    The whole group is asked if one of its samples is missing: an answer must not depend on where a run was cut off.
    """
    for cell in cells:
        missing = run.missing(cell, group)
        if not missing:
            continue
        scripts = [one for one in acts if one is not None]
        if len(scripts) < len(group) or cell.arm.policy == STOCK or cell.arm.refused:
            run.attempt(cell, missing, observer)
            continue
        try:
            contexts = [one[0].context for one in scripts]
            reading = reading if reading is not None and reading.ids == contexts else read(run.model, contexts)
            rows = ask(run, cell, group, scripts, reading)
        except OUT_OF_MEMORY:
            rows = None
        except tuple(GIVEN_UP) as error:
            run.give_up(cell, run.key(cell), error, observer)
            continue
        if rows is None:  # not where the error is caught, which keeps what had no room until it goes
            run.attempt(cell, missing, observer)  # one after the other, each with its own context
            continue
        for sample in missing:
            run.journal.append(rows[sample.id])
            observer.sample(cell, rows[sample.id])
    return reading


def ask(
    run: Run, cell: Cell, group: list[Sample], acts: list[list[lockstep.Script]], reading: Reading
) -> dict[str, list[Row]]:
    """The rows of one cell on samples of one shape, by sample."""
    asking = run.asking(cell, group[0])
    rows: dict[str, list[Row]] = {sample.id: [] for sample in group}
    with run.opener(run.model, cell.arm.policy) as engine:
        for scripts in zip(*acts, strict=True):
            for answers in lockstep.play(asking, opened(engine, reading), list(scripts)):
                for sample, answer in zip(group, answers, strict=True):
                    index = len(rows[sample.id])
                    measured = outcome(cell.task, sample.turns[index], answer)
                    row = {**run.place(cell, run.key(cell)), **about(sample, index), **measured}
                    rows[sample.id].append({**row, "peak_bytes": None, "together": len(group)})
    return rows


def opened(engine: Any, reading: Reading) -> lockstep.Rows:
    """Sessions that are fed, if the policy reads a prompt as the full cache does."""
    session: CacheSession = engine.session()
    return Fed(session, reading) if engine.stack.prefill.exact else session
