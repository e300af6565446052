"""`kvengine bench decode`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kvengine.command_errors import readable_errors, writable
from kvengine.errors import EvaluationError
from kvengine.speculative.commands import Device, Dtype, Model, Out, check_room, contents, load, prompt_lengths

if TYPE_CHECKING:
    from torch import Tensor

console = Console()
POLICIES = "full;snapkv(budget=1024);quest(budget=1024);kivi(bits=4);quest(budget=1024) + kivi(bits=4)"


def decode(
    model: Model,
    policies: Annotated[str, typer.Option(help="separated by ';'")] = POLICIES,
    contexts: Annotated[str, typer.Option(help="prompt lengths in tokens, separated by commas")] = "2048,8192",
    batch: Annotated[int, typer.Option(min=1, help="prompts that are decoded together")] = 1,
    new: Annotated[int, typer.Option("--new", min=2, help="tokens that are timed, after four that are not")] = 32,
    steps: Annotated[
        str, typer.Option(help="eager, recorded, fused, or several with commas; auto: eager, on a GPU recorded too")
    ] = "auto",
    text: Annotated[
        Path | None, typer.Option(help="text file that prompts are cut from; else random", exists=True, dir_okay=False)
    ] = None,
    out: Out = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
) -> None:
    """What a decoded token costs on this machine under each policy, beside stock transformers."""
    with readable_errors():
        lengths, ways = prompt_lengths(contexts), chosen(steps)
        asked = checked(policies)
        with writable(out):
            target, tokenizer = load(model, device, dtype)
            ways = ways or (("eager", "recorded") if target.device.type == "cuda" else ("eager",))
            check_room(target, max(lengths), len(ways) * (new + 4))
            tokens = None if text is None else tokenizer(contents(text), verbose=False).input_ids
            prompts = {length: prompts_of(length, batch, tokens, target, tokenizer) for length in lengths}
            measure(target, prompts, asked, new, ways, out, model)


def measure(
    target: Any,
    prompts: dict[int, Tensor],
    asked: list[str],
    new: int,
    ways: tuple[str, ...],
    out: Path | None,
    name: str,
) -> None:
    """All lengths, with a bar, and the files after each row: the next may be interrupted. What was measured is shown then too."""
    from kvengine.evals.speed import report
    from kvengine.evals.speed.measure import Cost, costs

    found: list[Cost] = []
    columns = BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            bar = progress.add_task("", total=len(prompts) * (2 + len(asked) * len(ways)))
            for length, ids in prompts.items():
                begin = partial(describe, progress, bar, length)
                for cost in costs(target, ids, asked, new, ways, begin):
                    found.append(cost)
                    progress.advance(bar)
                    if out is not None:
                        report.save(found, out, name, target)
    finally:
        if found:
            console.print(report.table(found), highlight=False, markup=False, soft_wrap=True)
        if found and out is not None:
            console.print(f"{out}/decode.json, .md, .png", highlight=False, markup=False)


def describe(progress: Progress, bar: TaskID, length: int, policy: str) -> None:
    progress.update(bar, description=f"{length} tokens, {policy}")


def chosen(text: str) -> tuple[str, ...]:
    """The ways that were asked for; none: by the device. Raises EvaluationError."""
    from kvengine.evals.speed.measure import WAYS

    if text == "auto":
        return ()
    ways = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    if set(ways) - set(WAYS):
        raise EvaluationError(f"--steps are {', '.join(WAYS)}, several with commas between them, or auto, not {text!r}")
    return ways


def checked(text: str) -> list[str]:
    """The policies, each once; stock transformers is measured anyhow. Raises PolicyError, before a model is loaded, and
    EvaluationError if there is none."""
    from kvengine.evals.policies import STOCK, arms, split

    return [arm.policy for arm in arms(split(text), ceiling=False, oracle=False) if arm.policy != STOCK]


def prompts_of(length: int, batch: int, tokens: list[int] | None, model: Any, tokenizer: Any) -> Tensor:
    """[batch, length] on the model's device: cut from a text, evenly over it, or random tokens that are no special ones.

    Raises EvaluationError if the text is too short.
    """
    import torch

    if tokens is None:
        special = set(tokenizer.all_special_ids)
        known = [i for i in range(model.get_input_embeddings().num_embeddings) if i not in special]
        rng = torch.Generator().manual_seed(length)
        ids = torch.tensor(known)[torch.randint(len(known), (batch, length), generator=rng)]
        return ids.to(model.device)
    from kvengine.speculative.bench import windows

    if not (found := windows(tokens, length, batch)):
        raise EvaluationError(f"the text has {len(tokens)} tokens, fewer than a context of {length}")
    return torch.cat((found * batch)[:batch]).to(model.device)
