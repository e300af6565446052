"""`kvengine cache`: look into a store, check it, move values in and out, clean up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from kvengine.command_errors import readable_errors
from kvengine.errors import CorruptBitstream, IncompatibleCache, KVEngineError, StoreError
from kvengine.offload import container as box

if TYPE_CHECKING:
    from kvengine.offload.stores.backend import Backend
    from kvengine.offload.stores.record import Entry

app = typer.Typer(help="Look into a store of encoded KV, check it, move values, clean up.", no_args_is_help=True)

Store = Annotated[
    str,
    typer.Option(
        "--store", "-s", envvar="KVENGINE_STORE", help="Folder, file://, redis://, s3://, gs:// or az:// URL.",
        show_default="the user's cache folder",
    ),
]  # fmt: skip
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table; times are seconds since 1970.")]


def home() -> str:
    """The store that is used when none is named: kvengine/store in the user's cache folder."""
    try:
        return str(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvengine" / "store")
    except RuntimeError:  # a user whom nobody knows, as containers have them
        raise typer.BadParameter("there is no home folder; name the store with --store") from None


@contextmanager
def opened(url: str, *, made: bool = False) -> Iterator[Backend]:
    """A store; what goes wrong with it ends the command with one line and status 2. Only `made` makes a folder of one."""
    from kvengine.offload.stores.urls import backend, parse, shown

    named, url = bool(url), url or home()
    with readable_errors():
        try:
            scheme, place = parse(url)
            if not scheme and not made:
                try:
                    os.stat(os.path.join(place, "objects"))
                except (FileNotFoundError, NotADirectoryError):  # what may not be looked into is told as that
                    how = "" if named else "; name yours with --store FOLDER|URL"
                    raise StoreError(f"there is no store at {place}{how}; `kvengine cache import` makes one") from None
            with closing(backend(url)) as store:
                yield store
        except KeyError as error:
            raise StoreError(f"{shown(url)} has no value {error.args[0]}") from error
        except KVEngineError:
            raise
        except ValueError as error:
            raise StoreError(str(error)) from error


@app.command("ls")
def list_values(store: Store = "", as_json: AsJson = False) -> None:
    """List what is stored, the least recently used first."""
    with opened(store) as source:
        entries = by_use(source)
    if as_json:
        typer.echo(json.dumps([_plain(entry) for entry in entries]))
        return
    rows = [("key", "bytes", "created", "used", "expires", "pinned")]
    for entry in entries:
        expires = _date(entry.expires) if entry.expires else "never"
        used, pinned = _date(entry.accessed), "yes" if entry.pinned else ""
        rows.append((entry.key[:16], f"{entry.size:,}", _date(entry.created), used, expires, pinned))
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:  # a value is a line, as wide as it needs: its key must not be cut
        typer.echo("  ".join(cell.ljust(n) for cell, n in zip(row, wide, strict=True)).rstrip())
    typer.echo(f"{len(entries)} values, {sum(entry.size for entry in entries):,} bytes")


def by_use(source: Backend) -> list[Entry]:
    """What is stored, the least recently used first."""
    return sorted(source.entries(), key=lambda entry: entry.accessed)


def _plain(entry: Entry) -> dict[str, Any]:
    fields = ("key", "size", "created", "expires", "accessed", "pinned")
    return {name: getattr(entry, name) for name in fields}


def _date(seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    except (ValueError, OverflowError, OSError):  # beyond all calendars
        return f"{seconds:g}"


@app.command()
def info(what: Annotated[str, typer.Argument(help="A key, the start of one, or a file.")], store: Store = "") -> None:
    """Print the header of one value as JSON: model, level, shapes, positions."""
    if Path(what).is_file():
        with opened_file(Path(what)) as payload:
            typer.echo(json.dumps(_describe(payload), indent=2))
        return
    with opened(store) as source:
        key = complete(source, what)
        payload = _read(source, key)
        if not payload.startswith(box.MAGIC):
            raise StoreError(f"{key[:12]}... has no header: it is {len(payload):,} bytes of a generation's pages")
        typer.echo(json.dumps(_describe(payload), indent=2))


@contextmanager
def opened_file(path: Path) -> Iterator[bytes]:
    """The payload of an exported record, or a bare container."""
    with readable_errors():
        try:
            from kvengine.offload.stores import record

            data = path.read_bytes()
            yield data[record.SIZE :] if data[:8] == record.MAGIC else data
        except (KVEngineError, OSError) as error:
            raise StoreError(f"{path}: {error}") from error


def _describe(payload: bytes) -> dict[str, Any]:
    held = box.read_bytes(payload)
    sizes = [length for _, length, _ in held.entries]
    return {"bytes": held.size, "sections": len(sizes), "largest_section": max(sizes, default=0), **held.header}


def complete(source: Backend, start: str) -> str:
    """The one key that begins so. Raises StoreError if none or several do."""
    from kvengine.offload.stores import keys

    if keys.KEY.fullmatch(start):
        return start
    found = [entry.key for entry in source.entries() if entry.key.startswith(start)]
    if len(found) != 1:
        raise StoreError(f"{len(found)} keys begin with {start!r}; `kvengine cache ls --json` prints them in full")
    return found[0]


def _read(source: Backend, key: str) -> bytes:
    size = source.size(key)
    if size is None:
        raise KeyError(key)
    try:
        into = bytearray(size)
    except (MemoryError, OverflowError):
        raise CorruptBitstream(f"{key[:12]}... says that it has {size} bytes, which fit into no memory") from None
    if source.read(key, memoryview(into)) != size:
        raise CorruptBitstream(f"{key[:12]}... changed while it was read")
    return bytes(into)


def _check(source: Backend, key: str, again: bool = True) -> None:
    """Raises what is wrong with a value, read twice: it may have been replaced while it was read."""
    try:
        payload = _read(source, key)
        if payload.startswith(box.MAGIC):  # or it is pages of a generation, of which the record says all
            box.read_bytes(payload).verify()
    except CorruptBitstream:
        if not again or source.size(key) is None:  # a store may have put it aside
            raise
        _check(source, key, again=False)


@app.command()
def verify(
    some: Annotated[list[str] | None, typer.Argument(help="Keys or their starts; all if none is given.")] = None,
    store: Store = "",
) -> None:
    """Read values and check every byte. Damaged ones are taken out of the store; the status is then 1, and 2 where the store
    could not be looked into."""
    bad, strange, gone, console = 0, 0, 0, Console(stderr=True)
    with opened(store) as source:
        moved = 0 if some else getattr(source, "damaged", 0)  # a folder is looked through when it is opened
        # In the order of their use, which reading them then leaves as it is: what makes room for others follows from it.
        every = list(dict.fromkeys(complete(source, name) for name in some or [])) or [e.key for e in by_use(source)]
        for key in track(every, "", console=console, transient=True, disable=not console.is_terminal):
            try:
                _check(source, key)
            except IncompatibleCache as error:
                strange += 1
                typer.echo(f"{key} is left as it is: {error}", err=True)
            except KeyError:
                bad, gone = bad + bool(some), gone + (not some)  # since it was listed it has expired, or made room
                if some:
                    typer.echo(f"{key} is not there", err=True)
            except CorruptBitstream as error:
                bad += 1
                typer.echo(f"{key} {error}", err=True)
                source.delete(key)
    told = f"; {moved} were found damaged when the store was opened" if moved else ""
    typer.echo(f"{len(every) - bad - strange - gone} of {len(every) - gone + moved} values are whole{told}")
    if bad or moved:
        raise typer.Exit(1)


@app.command("export")
def export_value(
    key: Annotated[str, typer.Argument(help="A key, or the start of one.")],
    file: Annotated[Path, typer.Argument(help="File to write; one that is there is replaced.")],
    store: Store = "",
) -> None:
    """Write one value to a file that `import` reads, here or on another machine."""
    from kvengine.offload.stores import record
    from kvengine.offload.stores.filesystem import replace_file

    with opened(store) as source:
        whole = complete(source, key)
        payload = _read(source, whole)
        replace_file(file, record.header(whole, [payload], None) + payload)
    typer.echo(f"{whole} {len(payload):,} bytes -> {file}", err=not file.is_file())  # which may be standard output


@app.command("import")
def import_values(
    files: Annotated[list[Path], typer.Argument(help="Files that `export` wrote.")],
    ttl: Annotated[float | None, typer.Option(help="Seconds to keep the values; for ever by default.")] = None,
    store: Store = "",
) -> None:
    """Put exported values into a store, after checking them."""
    target: Backend | None = None
    with readable_errors(), ExitStack() as open_store:
        for file in files:
            entry, payload = exported(file)
            # Behind the file: where that is none, no store is made either.
            target = target or open_store.enter_context(opened(store, made=True))
            target.put(entry.key, [payload], ttl)
            typer.echo(f"{entry.key} {entry.size:,} bytes <- {file}")


def exported(file: Path) -> tuple[Entry, memoryview]:
    """What a file that `export` wrote holds. Raises StoreError that names the file."""
    from kvengine.offload.stores import record

    try:
        data = memoryview(file.read_bytes())
        entry = record.parse(data[: record.SIZE])
        record.check_payload(entry, data[record.SIZE :])
    except (KVEngineError, OSError) as error:
        raise StoreError(f"{file} was not imported: {error}") from error
    return entry, data[record.SIZE :]


@app.command()
def gc(store: Store = "") -> None:
    """Remove what is expired, and what crashes left over."""
    with opened(store) as source:
        gone = source.gc() + getattr(source, "removed", 0)  # opening a folder removes them too
    typer.echo(f"{gone} values removed")
