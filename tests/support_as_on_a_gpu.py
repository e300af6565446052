"""A plugin of pytest: the kernels' tests as a GPU would run them, whose tensors are pretended to be there.

What compares something of the host's with something of the device's fails, as it would there. References stand in for the
Triton kernels, so of what these compute nothing is tested.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support_device import Device
from torch import Tensor

from kvengine.kernels import dispatch
from kvengine.kernels.attention import reference


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
    ) -> Any:
        if lengths is not None:  # Triton's takes them, and makes no mask of them
            here = torch.arange(k.shape[1], device=k.device) < lengths[:, None]
            visible = here[:, None].expand(-1, q.shape[2], -1)
        return attention(q, k, v, visible, scale, softcap, sinks, probs)

    dispatch.info = lambda: dict.fromkeys(("reference", "native", "triton"), "available")  # type: ignore[assignment]
    dispatch._module = lambda op, name: module(op, "reference" if name == "triton" else name)  # type: ignore[assignment]
    dispatch._triton_refusal = lambda inputs: None  # type: ignore[assignment]
    reference.attention = within  # type: ignore[assignment]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call() -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    device = Device(patch)
    device.watching = False
    with device:
        yield
    patch.undo()
