"""Streams of a CUDA device beside the current one, by what they are for.

Each thread has its own. While one captures a graph, its stream for fetches takes part in that, and for what is captured no
other thread may wait. They are kept, as torch gives out thirty-two by turns: of streams made anew for each recording, some
would be the one that fetches, and the graph would do one after the other.
"""

from __future__ import annotations

import functools
import threading
from typing import Literal

import torch

For = Literal["fetches", "recordings"]


def side_stream(device: torch.device, purpose: For) -> torch.cuda.Stream:
    """This thread's stream there for this purpose."""
    return _kept(device, purpose, threading.get_ident())


@functools.cache
def _kept(device: torch.device, purpose: For, thread: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
