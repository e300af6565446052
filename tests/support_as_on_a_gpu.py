"""A plugin of pytest: the kernels' tests as a GPU would run them, whose tensors are pretended to be there.

What compares something of the host's with something of the device's fails, as it would there. References stand in for the
Triton kernels, so of what these compute nothing is tested.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support_device import Device
from torch import Tensor

from kvengine.kernels import dispatch
from kvengine.kernels.attention import reference
from kvengine.kernels.lowrank_attention import reference as lowrank
from kvengine.kernels.paged_attention import reference as paged


def pytest_configure() -> None:
    module, attention = dispatch._module, reference.attention

    def within(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        visible: Any,
        scale: Any,
        softcap: Any,
        sinks: Any,
        probs: Any,
        lengths: Any = None,
        position: Any = None,
        wait: bool = False,
    ) -> Any:
        if lengths is not None:  # Triton's takes them and positions, and makes no mask of them
            here = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
            visible = here[:, None].expand(-1, q.shape[2], -1)
        if position is not None:
            there = (position >= 0)[:, None].expand(-1, q.shape[2], -1)
            visible = there if visible is None else visible & there
        return attention(q, k, v, visible, scale, softcap, sinks, probs)

    def at_once(operation: Callable[..., Any], count: int) -> Callable[..., Any]:
        return lambda *given: operation(*given[:count])  # what is behind them may wait to be joined, and need not

    dispatch.info = lambda: dict.fromkeys(("reference", "native", "triton"), "available")  # type: ignore[assignment]
    dispatch._module = lambda op, name: module(op, "reference" if name == "triton" else name)  # type: ignore[assignment]
    dispatch.triton_refusal = lambda inputs: None  # type: ignore[assignment]
    reference.attention = within  # type: ignore[assignment]
    for other, name in ((paged, "paged_attention"), (lowrank, "lowrank_attention")):
        original = getattr(other, name)
        setattr(other, name, at_once(original, len(inspect.signature(original).parameters)))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    device = Device(patch)
    device.watching = False
    with device:
        yield
    patch.undo()
