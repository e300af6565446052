"""Which implementation of the inner loops runs: the compiled one, or numpy where nothing can be compiled."""

from __future__ import annotations

import logging
from functools import cache
from subprocess import SubprocessError
from types import ModuleType
from typing import Literal

from kvengine.errors import StoreError
from kvengine.offload.cachegen import native, reference
from kvengine.offload.cachegen.reference import U32
from kvengine.offload.cachegen.tables import shared

Backend = Literal["auto", "native", "reference"]
log = logging.getLogger(__name__)


def backend(name: Backend = "auto") -> ModuleType:
    """The module with choose, encode, decode, rebuild. Where the compiled one cannot run, "native" raises StoreError;
    "auto" takes the reference, about 50 times slower, and logs why once."""
    return reference if name == "reference" else _native(name == "native")


@cache
def _native(strict: bool) -> ModuleType:
    try:
        native.load()
    except (StoreError, OSError, SubprocessError) as error:
        if strict:
            raise
        log.warning("cache codec runs in numpy, slowly: %s", error)
        return reference
    return native


@cache
def shared_slots() -> U32:
    """The decoder's look-up tables of the shared statistics, 1 MiB, built once per process."""
    return reference.slot_tables(shared().freq)
