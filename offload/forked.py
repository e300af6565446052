"""A process that was forked off has copies of all objects, and of the threads that serve them only the one that forked."""

from __future__ import annotations

import os

from kvengine.errors import StoreError


def check_process(maker: int, made: str, instead: str) -> None:
    """Refuse to go on with what another process made, where this one would wait for threads that it has not, or write where that
    one does.

    Args:
        maker: `os.getpid()` where it was made.
        made: what was made, and how, as in "the store was opened".
        instead: what to do.

    Raises StoreError.
    """
    if os.getpid() != maker:
        raise StoreError(f"{made} by process {maker}, of which this one is a fork; {instead}")
