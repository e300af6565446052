"""`kvengine duo …`: find the heads that need the whole context, look at them, and see what they are worth."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from kvengine.command_errors import readable_errors, resumable, writable
from kvengine.errors import EvaluationError

if TYPE_CHECKING:
    from kvengine.evals.duo.data import Passkeys
    from kvengine.evals.duo.train import Recipe

app = typer.Typer(help="DuoAttention: which heads need the whole context.", no_args_is_help=True)
console, notes = Console(), Console(stderr=True)

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
KEYS_FIT = "1000, or what the keys take twice"
USUAL, LONGEST = 1000, 32000
Sparsity = Annotated[float, typer.Option(help="share of the heads that stream")]


@app.command()
def train(
    model: Model,
    out: Out,
    steps: Annotated[int, typer.Option(help="optimisation steps, one context each")] = 2000,
    rate: Annotated[float, typer.Option(help="learning rate")] = 0.02,
    reg: Annotated[float, typer.Option(help="weight of the L1 penalty")] = 0.05,
    shortest: Annotated[int | None, typer.Option(help="tokens of the shortest contexts", show_default=KEYS_FIT)] = None,
    longest: Annotated[
        int | None, typer.Option(help="tokens of the longest contexts", show_default="32000, or what the model knows")
    ] = None,
    lengths: Annotated[int, typer.Option(help="different lengths")] = 50,
    style: Style = "passkey",
    keys: Keys = 10,
    text: Text = None,
    sinks: Sinks = 128,
    recent: Recent = 256,
    seed: Annotated[int, typer.Option(help="of the data")] = 0,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    restart: Annotated[
        bool, typer.Option("--restart", help="train from the start, whatever is there of the same training")
    ] = False,
) -> None:
    """Optimise the gates of a model's KV heads and write them as a pattern folder. The same command goes on where one was
    interrupted, and does nothing again that is done."""
    from kvengine.evals.claim import claimed
    from kvengine.evals.duo.data import Passkeys
    from kvengine.evals.duo.train import Recipe
    from kvengine.evals.loading import load

    with readable_errors():
        recipe = Recipe(
            steps=steps, rate=rate, reg=reg, sinks=sinks, recent=recent,
            shortest=USUAL if shortest is None else shortest, longest=LONGEST if longest is None else longest,
            lengths=lengths, seed=seed,
        )  # fmt: skip
        hidden = Passkeys(None, style, keys, text)  # refuses what cannot be before a model is loaded
        with claimed(out):
            network, tokenizer = load(model, dtype=dtype)
            data = replace(hidden, tokenizer=tokenizer)
            low = fitting(data, shortest)
            recipe = replace(recipe, shortest=low, longest=known(data, network, longest, low))
            check_window(sinks, recent, recipe.longest)
            optimise(network, data, recipe, out, restart)
    show(str(out))


def fitting(data: Passkeys, given: int | None) -> int:
    """Tokens of a context: what was given, else the usual, or twice what the keys take where they do not fit, and said."""
    keys = data.needs(0)[0]
    if given is not None or 1.1 * keys < USUAL:  # other contexts' keys take a little more, or less
        return USUAL if given is None else given
    notes.print(
        f"contexts have {2 * keys} tokens at the least: {data.keys} keys take some {keys}",
        highlight=False,
        soft_wrap=True,
    )
    return 2 * keys


def known(data: Passkeys, model: Any, given: int | None, least: int) -> int:
    """Tokens of the longest contexts: what was given, else the usual, or as many as the model has positions for, and said."""
    from kvengine.evals.manifest import positions

    most, asked = positions(model), data.needs(0)[1]
    if given is not None or most is None or LONGEST + asked <= most:
        return LONGEST if given is None else given
    longest = most - round(1.1 * asked)
    if longest < least:
        raise EvaluationError(
            f"the model has {most} positions, too few for contexts of {least} tokens and {asked} of questions behind them; give "
            "fewer --keys, a lower --shortest, or --longest all the same"
        )
    notes.print(
        f"contexts have {longest} tokens at the most: with {asked} of questions the model knows {most}",
        highlight=False,
        soft_wrap=True,
    )
    return longest


def check_window(sinks: int, recent: int, longest: int) -> None:
    """Raises EvaluationError where heads that stream see whole contexts: none would be found to need more."""
    if sinks + recent >= longest:
        raise EvaluationError(
            f"{sinks} sinks and {recent} recent tokens are all of a context of {longest}: streaming heads would lack "
            "nothing. Give fewer --sinks and --recent, or longer contexts (--longest, --length)"
        )


def optimise(model: Any, data: Passkeys, recipe: Recipe, out: Path, restart: bool) -> None:
    """Train gates and write their pattern, going on from what is there of an interrupted training unless told to `restart`.
    One that came to its end is not done again either."""
    from kvengine.evals.duo.checkpoint import Checkpoint, asked, trained
    from kvengine.evals.duo.train import train as train_gates
    from kvengine.policies.routing.duo import write_pattern

    wanted = asked(model, data, recipe)
    checkpoint = Checkpoint(out, wanted, restart=restart)
    if not restart and not checkpoint.steps and trained(out, wanted):
        console.print(
            f"{out} is what this training came to; --restart does it again",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return
    if checkpoint.steps:
        console.print(
            f"goes on behind step {checkpoint.steps} of {recipe.steps}, from {checkpoint.path}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    how = "the same command without --restart" if restart else "the same command"
    with resumable(checkpoint.path, how), Progress(console=console) as progress, checkpoint.kept():
        bar = progress.add_task("training", total=recipe.steps, completed=checkpoint.steps)
        report = lambda step, loss, alpha: progress.update(  # noqa: E731
            bar, completed=step + 1, description=f"loss {loss:.4f}, mean alpha {float(alpha.mean()):.2f}"
        )
        alpha = train_gates(model, data, recipe, report, checkpoint)
        write_pattern(out, alpha.tolist(), recipe.sinks, recipe.recent, wanted)


@app.command()
def show(pattern: Pattern, sparsity: Sparsity = 0.5) -> None:
    """Print the gates of a pattern; those of heads that would stream are in brackets."""
    from kvengine.policies.routing.duo import Duo, read_pattern

    with readable_errors():
        alpha = read_pattern(pattern)
        duo = Duo(sparsity=sparsity, pattern=pattern)
        lines = [
            f"{pattern}: {len(alpha)} layers of {len(alpha[0])} KV heads; at sparsity {sparsity:g} those in brackets stream"
        ]
        for i, line in enumerate(alpha):
            streaming = duo.streaming(i, len(alpha), len(line))
            told = [f"({a:.3f})" if h in streaming else f" {a:.3f} " for h, a in enumerate(line)]
            lines.append(f"layer {i:>{len(str(len(alpha) - 1))}} {' '.join(told)}".rstrip())
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


@app.command()
def compare(
    model: Model,
    pattern: Pattern,
    sparsity: Sparsity = 0.5,
    length: Annotated[int | None, typer.Option(min=1, help="tokens of a context", show_default=KEYS_FIT)] = None,
    samples: Annotated[int, typer.Option(min=1, help="contexts")] = 20,
    draws: Annotated[int, typer.Option(min=1, help="random choices of heads")] = 10,
    style: Style = "passkey",
    keys: Keys = 10,
    text: Text = None,
    sinks: Sinks = 64,
    recent: Recent = 256,
    seed: Annotated[
        str, typer.Option(help="of contexts and random choices: a word, as numbers are those of trainings")
    ] = "compare",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16")] = "float32",
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write; one that is there is replaced", dir_okay=False)
    ] = None,
) -> None:
    """Retrieval with the best, random and worst heads kept whole, as JSON."""
    from kvengine.evals.duo.compare import compare as compare_heads
    from kvengine.evals.duo.data import Passkeys
    from kvengine.evals.duo.train import kv_heads
    from kvengine.evals.loading import load
    from kvengine.offload.stores.filesystem import replace_file
    from kvengine.policies.routing.duo import Duo, read_pattern

    with readable_errors(), writable(out and out.parent):
        if seed.lstrip("+-").isdecimal():
            raise EvaluationError(f"--seed {seed} draws contexts that a training may have seen; give a word instead")
        duo = Duo(
            sparsity=sparsity, pattern=pattern, sinks=sinks, recent=recent
        )  # refuses what cannot be, before all else
        alpha = read_pattern(pattern)
        hidden = Passkeys(None, style, keys, text)
        network, tokenizer = load(model, dtype=dtype)
        config = network.config.get_text_config(decoder=True)
        duo.streaming(0, config.num_hidden_layers, kv_heads(config))
        data = replace(hidden, tokenizer=tokenizer)
        length = fitting(data, length)
        check_window(sinks, recent, length)
        rows = compare_heads(
            network, data, alpha, sparsity=sparsity, sinks=sinks,
            recent=recent, length=length, samples=samples, draws=draws, seed=seed, report=notes.print,
        )  # fmt: skip
        console.print_json(data=rows)
        if out is None:
            return
        options = {
            "style": style, "keys": keys, "length": length, "samples": samples, "draws": draws, "sinks": sinks,
            "recent": recent, "sparsity": sparsity, "seed": seed, "dtype": dtype, **({"text": text} if text else {}),
        }  # fmt: skip
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        command = shlex.join(["kvengine", "duo", "compare", model, pattern, *words])
        replace_file(out, (json.dumps(result(command, rows, network), indent=1) + "\n").encode())


def result(command: str, rows: list[dict[str, Any]], model: Any) -> dict[str, Any]:
    """As the documentation wants it."""
    from kvengine.speculative.bench import conditions

    columns = {
        "Heads kept whole": "heads", "Right answers": "score:.3f", "from": "low:.3f", "to": "high:.3f",
        "Questions": "questions", "Best ahead by": "ahead:.3f", "at least": "ahead_low:.3f",
    }  # fmt: skip
    return {"command": command, **conditions(model), "columns": columns, "rows": rows}
