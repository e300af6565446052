"""How the commands say what went wrong, and what an interrupted one has kept."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape

from kvengine.errors import KVEngineError, out_of_memory, refusal


@contextmanager
def readable_errors() -> Iterator[None]:
    """An error of ours, or of the file system, is one line on standard error and exit code 2, not a traceback; so are words
    that are no text, memory that ran out, and what torch's compiler lacks. Who reads what is said may leave (`| head`): then
    there is nothing to say, unless an interrupted run was kept."""
    try:
        yield
    except (KVEngineError, OSError) as error:
        notes = getattr(error, "__notes__", [])
        if isinstance(error, BrokenPipeError) and not notes:
            raise
        tell(type(error).__name__, "; ".join([str(error), *notes]))
        raise SystemExit(2) from error
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            if (said := refusal(error)) is None:
                raise
            tell(type(error).__name__, said)
            raise SystemExit(2) from error
        wanted = re.search(r"ried to allocate ([\d.]+ \w+)", str(error))
        more = f"{wanted[1]} more were needed; " if wanted else ""
        tell("out of memory", f"{more}give it less at once, or a device that has more")
        raise SystemExit(2) from error
    except UnicodeEncodeError as error:  # bytes that are no UTF-8 arrive as halves of surrogate pairs
        if "surrogates" not in error.reason:
            raise
        typer.echo(f"{error.object[:80]!r} is not UTF-8 text; convert it first", err=True)
        raise SystemExit(2) from error


def tell(name: str, said: str) -> None:
    told = f"[red]{escape(name)}[/red]: {escape(said)}"
    Console(stderr=True).print(told, highlight=False, soft_wrap=True)


@contextmanager
def resumable(kept: Path, command: str = "the same command") -> Iterator[None]:
    """What stops a command, Ctrl-C or a full disk, is told with which `command` goes on, if a file of what was done is there."""
    try:
        yield
    except (KeyboardInterrupt, OSError) as error:
        if not (kept.is_file() and kept.stat().st_size):
            raise
        how = f"what was done is kept in {kept.parent}; {command} goes on from there"
        if isinstance(error, OSError):
            error.add_note(how)
            raise
        Console(stderr=True).print(f"interrupted: {escape(how)}", highlight=False, soft_wrap=True)
        raise SystemExit(130) from None


@contextmanager
def writable(folder: Path | None) -> Iterator[None]:
    """A folder for what the block writes, which is made if it is missing; one that stays empty goes again. Whether files may be
    written there is seen before the block, which may take hours, and not after it. None: nothing is to be written.

    Raises OSError.
    """
    from kvengine.offload.stores.filesystem import made_folder

    if folder is None:
        yield
        return
    with made_folder(folder):
        with tempfile.TemporaryFile(dir=folder):
            pass
        yield
