"""Bring pages from host memory to the compute device, while it works on what it has.

    pending = start({"k": host_k, "v": host_v}, at, device)      # nothing waits
    ...                                                         # attend to the resident pages
    fields = pending.wait()                                     # the stream waits, the host does not

On a GPU the pages are named by a tensor that lives there, so the host never learns which they are: one kernel per
field reads them out of pinned host memory over the bus, on a stream of its own. Where fields are not pinned, or Triton
is missing, the ids travel to the host and the pages are copied from there, which waits. On a CPU it is an indexed copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from kvengine.errors import KernelError
from kvengine.kernels.dispatch import BACKENDS, interpreted, pick, triton_refusal


@dataclass(frozen=True)
class Pending:
    """Pages on their way. Keeps what the copy reads alive until somebody has waited."""

    fields: dict[str, Tensor]
    stream: torch.cuda.Stream | None
    sources: tuple[Tensor, ...]

    def wait(self) -> dict[str, Tensor]:
        """The pages, in the order asked for; work queued from now on sees them. The host goes on."""
        if self.stream is not None:
            current = torch.cuda.current_stream(self.stream.device)
            current.wait_stream(self.stream)
            for x in (*self.fields.values(), *self.sources):
                if x.is_cuda:  # the other stream's memory must not be given away before this one is done with it
                    x.record_stream(current)
        return self.fields


def start(
    fields: Mapping[str, Tensor],
    at: Int[Tensor, "page"],
    device: torch.device,
    *,
    stream: torch.cuda.Stream | None = None,
    backend: str | None = None,
) -> Pending:
    """Begin to fetch pages `at` of every field ([pages, ...], on the host) to the device.

    `at`: on the device, or on the host; each within the fields. `stream`: what the copies run on (CUDA; default: the
    current one, which overlaps with nothing). Raises KernelError for a field that is not in host memory, or not
    contiguous.
    """
    return begun(lambda at: fetch_pages(fields, at, device, backend=backend), fields, at, device, stream)


def begun(
    fetch: Callable[[Tensor], dict[str, Tensor]],
    fields: Mapping[str, Tensor],
    at: Tensor,
    device: torch.device,
    stream: torch.cuda.Stream | None,
) -> Pending:
    """What `fetch` begins to bring of these fields, given the ids on the device, on this stream."""
    for name, x in fields.items():
        if x.device.type != "cpu" or not x.is_contiguous():
            raise KernelError(
                f"field {name!r} must be contiguous in host memory; it is on {x.device}, {list(x.stride())}"
            )
    at = at.to(device) if device.type == "cuda" else at
    if stream is None:
        return Pending(fetch(at), None, (at,))
    stream.wait_stream(torch.cuda.current_stream(device))  # the ids are made there
    with torch.cuda.stream(stream):
        return Pending(fetch(at), stream, (at,))


def fetch_pages(
    fields: Mapping[str, Tensor], at: Int[Tensor, "page"], device: torch.device, *, backend: str | None = None
) -> dict[str, Tensor]:
    """Pages `at` of every field, on the device, in that order; on the current stream."""
    chosen = backend_for("fetch_pages", fields, at, device, backend)
    run = pick("fetch_pages", (at,), chosen, native=False)
    return {name: run.fetch(x, at, device) for name, x in fields.items()}


def backend_for(name: str, fields: Mapping[str, Tensor], at: Tensor, device: torch.device, backend: str | None) -> str:
    """Which backend fetches: Triton's where a kernel reaches the host's memory.

    Raises KernelError for one that there is not, or that cannot.
    """
    if backend not in (None, *BACKENDS):
        pick(name, (at,), backend)  # says what there is
    reachable = all(x.is_pinned() for x in fields.values()) if device.type == "cuda" else interpreted()
    ours = device.type == "cuda" and reachable and not triton_refusal((at,))
    chosen = ("triton" if ours else "reference") if backend is None else backend
    if chosen == "triton" and not reachable:
        raise KernelError("backend='triton' reads pinned host memory, and a field is not pinned")
    return chosen
