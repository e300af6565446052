"""`kvengine duo …`: find the heads that need the whole context, look at them, and see what they are worth."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvengine.command_errors import readable_errors, resumable, writable

if TYPE_CHECKING:
    from kvengine.evals.duo.data import Passkeys
    from kvengine.evals.duo.train import Recipe

app = typer.Typer(help="DuoAttention: which heads need the whole context.", no_args_is_help=True)
console = Console()

Model = Annotated[str, typer.Argument(help="folder, hub id, or 'bundled'")]
Pattern = Annotated[str, typer.Argument(help="pattern folder or .tsv file, or the name of a bundled one")]
Out = Annotated[Path, typer.Option(help="pattern folder to write")]
Style = Annotated[str, typer.Option(help="wording of the passkeys: passkey (as published) or magic (RULER's)")]
Keys = Annotated[int, typer.Option(help="passkeys in a context")]
Text = Annotated[
    Path | None, typer.Option(help="file or folder of prose to hide them in; default: a bundled novel", exists=True)
]
Sinks = Annotated[int, typer.Option(help="first tokens that a streaming head sees")]
Recent = Annotated[int, typer.Option(help="newest tokens that it sees")]
Sparsity = Annotated[float, typer.Option(help="share of the heads that stream")]


@app.command()
def train(
    model: Model,
    out: Out,
    steps: Annotated[int, typer.Option(help="optimisation steps, one context each")] = 2000,
    rate: Annotated[float, typer.Option(help="learning rate")] = 0.02,
    reg: Annotated[float, typer.Option(help="weight of the L1 penalty")] = 0.05,
    shortest: Annotated[int, typer.Option(help="tokens of the shortest contexts")] = 1000,
    longest: Annotated[int, typer.Option(help="tokens of the longest contexts")] = 32000,
    lengths: Annotated[int, typer.Option(help="different lengths")] = 50,
    style: Style = "passkey",
    keys: Keys = 10,
    text: Text = None,
    sinks: Sinks = 128,
    recent: Recent = 256,
    seed: Annotated[int, typer.Option(help="of the data")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    restart: Annotated[
        bool, typer.Option("--restart", help="do not go on with a training that was interrupted")
    ] = False,
) -> None:
    """Optimise the gates of a model's KV heads and write them as a pattern folder. The same command goes on where one was
    interrupted."""
    from kvengine.evals.claim import claimed
    from kvengine.evals.duo.data import Passkeys
    from kvengine.evals.duo.train import Recipe
    from kvengine.evals.loading import load

    with readable_errors():
        recipe = Recipe(
            steps=steps, rate=rate, reg=reg, sinks=sinks, recent=recent,
            shortest=shortest, longest=longest, lengths=lengths, seed=seed,
        )  # fmt: skip
        with claimed(out):
            network, tokenizer = load(model, dtype=dtype)
            optimise(network, Passkeys(tokenizer, style, keys, text), recipe, out, restart)
    show(str(out))


def optimise(model: Any, data: Passkeys, recipe: Recipe, out: Path, restart: bool) -> None:
    """Train gates and write their pattern, going on from what is there of an interrupted training unless told to `restart`."""
    from kvengine.evals.duo.checkpoint import Checkpoint, asked
    from kvengine.evals.duo.train import train as train_gates
    from kvengine.policies.routing.duo import write_pattern

    checkpoint = Checkpoint(out, asked(model, data, recipe), restart=restart)
    if checkpoint.steps:
        console.print(
            f"goes on behind step {checkpoint.steps} of {recipe.steps}, from {checkpoint.path}", highlight=False
        )
    how = "the same command without --restart" if restart else "the same command"
    with resumable(checkpoint.path, how), Progress(console=console) as progress, checkpoint.kept():
        bar = progress.add_task("training", total=recipe.steps, completed=checkpoint.steps)
        report = lambda step, loss, alpha: progress.update(  # noqa: E731
            bar, completed=step + 1, description=f"loss {loss:.4f}, mean alpha {float(alpha.mean()):.2f}"
        )
        alpha = train_gates(model, data, recipe, report, checkpoint)
        write_pattern(out, alpha.tolist(), recipe.sinks, recipe.recent)


@app.command()
def show(pattern: Pattern, sparsity: Sparsity = 0.5) -> None:
    """Print the gates of a pattern; heads that would stream are dim."""
    from kvengine.policies.routing.duo import Duo, read_pattern

    with readable_errors():
        alpha = read_pattern(pattern)
        duo = Duo(sparsity=sparsity, pattern=pattern)
        table = Table("layer", *(f"head {h}" for h in range(len(alpha[0]))), title=f"{pattern}, sparsity {sparsity}")
        for i, line in enumerate(alpha):
            streaming = duo.streaming(i, len(alpha), len(line))
            table.add_row(
                str(i), *(f"[dim]{a:.3f}[/dim]" if h in streaming else f"{a:.3f}" for h, a in enumerate(line))
            )
        console.print(table)


@app.command()
def compare(
    model: Model,
    pattern: Pattern,
    sparsity: Sparsity = 0.5,
    length: Annotated[int, typer.Option(help="tokens of a context")] = 1000,
    samples: Annotated[int, typer.Option(min=1, help="contexts")] = 20,
    draws: Annotated[int, typer.Option(min=1, help="random choices of heads")] = 10,
    style: Style = "passkey",
    keys: Keys = 10,
    text: Text = None,
    sinks: Sinks = 64,
    recent: Recent = 256,
    seed: Annotated[str, typer.Option(help="of contexts and random choices")] = "compare",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    out: Annotated[Path | None, typer.Option(help="JSON file to write", dir_okay=False)] = None,
) -> None:
    """Retrieval with the best, random and worst heads kept whole."""
    from kvengine.evals.duo.compare import compare as compare_heads
    from kvengine.evals.duo.data import Passkeys
    from kvengine.evals.loading import load
    from kvengine.policies.routing.duo import Duo, read_pattern

    with readable_errors():
        if out is not None:
            writable(out.parent)
        Duo(sparsity=sparsity, sinks=sinks, recent=recent)  # refuses what cannot be, before anything is measured
        alpha = read_pattern(pattern)
        network, tokenizer = load(model, dtype=dtype)
        rows = compare_heads(
            network, Passkeys(tokenizer, style, keys, text), alpha, sparsity=sparsity, sinks=sinks,
            recent=recent, length=length, samples=samples, draws=draws, seed=seed, report=console.print,
        )  # fmt: skip
        console.print_json(data=rows)
        if out is None:
            return
        command = f"kvengine duo compare {model} {pattern} --style {style} --keys {keys} --length {length}"
        command += f" --samples {samples} --draws {draws} --sinks {sinks} --recent {recent} --sparsity {sparsity}"
        out.write_text(json.dumps(result(command, rows), indent=1) + "\n")


def result(command: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """As the documentation wants it."""
    import torch

    columns = {
        "Heads kept whole": "heads", "Right answers": "score:.3f", "from": "low:.3f", "to": "high:.3f",
        "Questions": "questions", "Best ahead by": "ahead:.3f", "at least": "ahead_low:.3f",
    }  # fmt: skip
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    return {"command": command, "machine": machine, "columns": columns, "rows": rows}
