"""The `kvengine` command."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from codecs import lookup
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import kvengine
from kvengine.command_errors import readable_errors, resumable
from kvengine.evals.commands import app as eval_app
from kvengine.evals.duo.commands import app as duo_app
from kvengine.evals.speed.commands import decode
from kvengine.offload.commands import app as cache_app
from kvengine.speculative.commands import bench_app, generate


class Interruptible(TyperGroup):
    """Ctrl-C ends any command with one line and exit code 130."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (KeyboardInterrupt, ImportError) as error:
            if not interrupted(error):
                raise
            typer.echo("interrupted", err=True)
            raise SystemExit(130) from None


def interrupted(error: BaseException | None) -> bool:
    """Whether it was Ctrl-C; transformers, which imports as it goes, makes an ImportError of one that comes meanwhile."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__ or error.__context__
    return error is not None


app = typer.Typer(cls=Interruptible, help="KV-cache management for long contexts.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")
app.add_typer(duo_app, name="duo")
app.add_typer(cache_app, name="cache")
bench_app.command("decode")(decode)
app.add_typer(bench_app, name="bench")
app.command()(generate)


def say_version(wanted: bool) -> bool:
    if wanted:
        typer.echo(f"kvengine {kvengine.__version__}")
        raise typer.Exit
    return wanted


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=say_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """KV-cache management for long contexts."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="run folder; one that exists is continued")] = Path("runs/demo"),
    minutes: Annotated[float, typer.Option(help="about how long to measure")] = 5.0,
    model: Annotated[str, typer.Option(help="folder, hub id, or 'bundled'")] = "bundled",
) -> None:
    """Compare every policy on the bundled model: a table, and a report with pictures."""
    from kvengine.evals.records import ROWS

    with readable_errors(), resumable(out / ROWS):
        from kvengine.evals.demo import main as run

        code = run(out, minutes, model=model)
    raise typer.Exit(code)


def forgive(stream: Any) -> None:
    """Let letters that the encoding of a terminal or a file does not have (Latin 1, ASCII) be question marks, and end no run."""
    fails = isinstance(stream, TextIOWrapper) and stream.errors in ("strict", "surrogateescape")
    if fails and lookup(stream.encoding).name != "utf-8":
        stream.reconfigure(errors="replace")


def main() -> None:
    """Run the command line."""
    forgive(sys.stdout)
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # as Ctrl-C: what was done is kept, what was begun cleared away
    try:
        app()
    except KeyboardInterrupt:  # before any command began
        raise SystemExit(130) from None
    except OSError as error:  # as where what is said finds no room
        with contextlib.suppress(OSError):
            typer.echo(f"{type(error).__name__}: {error}", err=True)
        raise SystemExit(2) from None
    finally:
        drop_unwritable(sys.stdout)


def drop_unwritable(stream: Any) -> None:
    """What found no room, or no reader, is given up: Python would try once more as it ends, and tell of an ignored exception."""
    try:
        if stream is not None:  # closed before the command began
            stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
