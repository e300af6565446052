"""One run at a time in a folder: two would do every sample twice.

The lock is the kernel's, on `run.lock`, so it ends with its process, however that ends; a file that a killed run has left
stands in nobody's way. What only reads a folder needs no lock.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from kvengine.errors import EvaluationError
from kvengine.offload.stores.filesystem import made_folder

log = logging.getLogger(__name__)
LOCK = "run.lock"
TAKEN = (errno.EACCES, errno.EAGAIN, errno.EWOULDBLOCK)


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other runs out of a folder, which is made if it is missing, and removed again if nothing was put into it.

    Raises EvaluationError that names the process which runs there, OSError if the folder cannot be made or written. Where
    there are no locks (Windows, some file systems) a warning says that nothing is kept out.
    """
    with made_folder(folder):
        path = folder / LOCK
        handle = _take(path)
        try:
            yield
        finally:
            with suppress(OSError):  # its name goes first: whoever opens it in between finds that it has none (`_take`)
                path.unlink()
            os.close(handle)


def _take(path: Path) -> int:
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            if not _lock(handle):
                raise EvaluationError(
                    f"{path.parent} is in use by a run, {_holder(handle)}: wait for its end, or choose another --out"
                )
            if _is_at(handle, path):
                _sign(handle)
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the run that had it ended meanwhile, and removed it


def _lock(handle: int) -> bool:
    """False if another has it."""
    try:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in TAKEN:
            return False
        log.warning("the folder cannot be kept to one run (%s); a second one would do every sample twice", error)
    return True


def _is_at(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def _sign(handle: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    os.ftruncate(handle, 0)
    os.write(handle, f"process {os.getpid()} on {platform.node()} since {since}".encode())


def _holder(handle: int) -> str:
    return os.read(handle, 1000).decode(errors="replace") or "which has just begun"
