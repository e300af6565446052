"""The `kvengine` command."""

from __future__ import annotations

import typer

from kvengine.evals.commands import app as eval_app

app = typer.Typer(help="KV-cache management for long contexts.", no_args_is_help=True)
app.add_typer(eval_app, name="eval")


@app.callback()
def root() -> None:
    """KV-cache management for long contexts."""


def main() -> None:
    """Run the command line."""
    app()
