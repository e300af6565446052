"""How the commands say what went wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.markup import escape

from kvengine.errors import KVEngineError


@contextmanager
def readable_errors() -> Iterator[None]:
    """An error of ours, or of the file system, is one line on standard error and exit code 2, not a traceback."""
    try:
        yield
    except (KVEngineError, OSError) as error:
        told = Console(stderr=True)
        told.print(f"[red]{type(error).__name__}[/red]: {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(2) from error
