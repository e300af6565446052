"""How many launches a layer makes for a decoded token: on a GPU each takes its microseconds, whatever it computes.

Counted on a pretended device, where Triton's launches compute nothing: operations of torch that would be a kernel, and Triton's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from layout import ROOT
from support_device import CUDA, Device, there
from torch.utils._python_dispatch import TorchDispatchMode

from kvengine.cache import LayerCache
from kvengine.fixed import FixedLayer
from kvengine.fixed_lane import FixedLane
from kvengine.replay import rerun, tell
from kvengine.rope import Rope
from kvengine.session import Call
from kvengine.stack import Stack

HEADS, GROUP, DIM, PROMPT, MORE = 4, 4, 64, 400, 3
LONG = 1200
"""Tokens of a prompt so long that memory grows by some pages at a time."""
NOTHING = {
    "view", "_unsafe_view", "expand", "slice", "select", "unsqueeze", "squeeze", "transpose", "permute", "as_strided",
    "alias", "t", "detach", "empty", "empty_like", "empty_strided", "new_empty", "split", "unbind", "split_with_sizes",
    "new_empty_strided", "_reshape_alias", "lift_fresh", "unfold", "diagonal", "promote_types",
}  # fmt: skip
"""Operations that launch nothing."""
DOCUMENT = (ROOT / "docs/gpu.md").read_text()
COUNTED = {
    stack: {"recorded": int(recorded), "eager": int(eager)}
    for stack, recorded, eager in re.findall(r"^\| `([^`]+)` \| (\d+) \| (\d+) \|$", DOCUMENT, re.MULTILINE)
}
"""What the documentation says."""
SEALING = {
    stack: (int(other), int(now))
    for stack, other, now in re.findall(r"^ *\| `([^`]+)` \| (\d+) \| \d+ \| (\d+) \|$", DOCUMENT, re.MULTILINE)
}
"""The same of the token before one that seals a page, and of that one, in steps that are not recorded."""


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found[func.overloadpacket.__name__] += not self.paused
        return func(*args, **(kwargs or {}))

    def unwritten(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """What makes memory that a kernel is to write: of zeros, as none of them writes here, and not counted."""

        def run(*given: Any, **options: Any) -> Any:
            self.paused = True
            try:
                return make(*given, **options)
            finally:
                self.paused = False

        return run


@pytest.fixture
def patch(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Without what fills unwritten memory in tests, as that would be counted."""
    monkeypatch.undo()
    return monkeypatch


def launches(
    text: str, patch: pytest.MonkeyPatch, way: str = "recorded", prompt: int = PROMPT, more: int = MORE
) -> Counter[str]:
    """What a layer launches in its last step, by name; slots have grown before. `more`: steps."""
    jit = pytest.importorskip("triton.runtime.jit")
    counting = Counting()

    def launch(kernel: Any, grid: Any) -> Callable[..., None]:
        return lambda *given, **options: counting.found.update([kernel.__name__])

    patch.setattr(jit.JITFunction, "__getitem__", launch)
    zeros = {name: getattr(torch, name.replace("empty", "zeros")) for name in ("empty", "empty_like")}
    rng = torch.Generator().manual_seed(0)
    shapes = [(1, h, prompt + more, DIM) for h in (HEADS * GROUP, HEADS, HEADS)]
    qkv = [torch.randn(shape, generator=rng).to(torch.bfloat16) for shape in shapes]
    device = Device(patch)
    device.watching = False
    with device, torch.no_grad():  # in inference mode torch does not say what an operation is made of
        for name, make in zeros.items():
            patch.setattr(torch, name, counting.unwritten(make))
        qkv = [there(x) for x in qkv]
        cache = LayerCache(Stack.parse(text), 0, 1)
        cache.session.rope = Rope(there(10000.0 ** -(torch.arange(DIM // 2, device="cpu") * 2 / DIM)))
        tell(cache, 0, prompt)
        cache.forward(*(x[:, :, :prompt] for x in qkv), Call(0.125))
        rerun([cache], [qkv], Call(0.125))
        now = torch.tensor([cache.seen], device=CUDA)
        fixed = FixedLayer(cache, more, now) if way == "recorded" else None
        for i in range(more):
            q, k, v = (x[:, :, prompt + i : prompt + i + 1].contiguous() for x in qkv)
            counting.found.clear()
            with counting:
                (cache.forward if fixed is None else fixed.step)(q, k, v, Call(0.125))
            made = counting.found.copy()
            if fixed is not None:
                now.add_(1)
                fixed.advance()
    return Counter({name: n for name, n in made.items() if name not in NOTHING})


@pytest.mark.sampled(8)
@pytest.mark.parametrize("way", ["recorded", "eager"])
@pytest.mark.parametrize("text", COUNTED)
def test_a_step_launches_what_the_documentation_says(text: str, way: str, patch: pytest.MonkeyPatch) -> None:
    found = launches(text, patch, way)
    assert found.total() == COUNTED[text][way], dict(found)


@pytest.mark.sampled(7)
@pytest.mark.parametrize("text", SEALING)
def test_a_token_that_seals_a_page_launches_what_the_documentation_says(text: str, patch: pytest.MonkeyPatch) -> None:
    """The third page of decoded tokens: for the first two, memory has grown."""
    stack = Stack.parse(text)
    more = 3 * stack.page - (LONG - stack.room) % stack.page
    found = [launches(text, patch, "eager", LONG, n) for n in (more - 1, more)]
    assert tuple(x.total() for x in found) == SEALING[text], found


def test_operations_of_torch_are_counted(patch: pytest.MonkeyPatch) -> None:
    """The control: judged as a retention says it of itself, a token of `h2o` is many launches."""
    patch.setattr(FixedLane, "lasting_rule", lambda self: None)
    found = launches("h2o(budget=64)", patch)
    assert (
        found.total() > 2 * COUNTED["h2o(budget=64)"]["recorded"] and found["put_kernel"] == found["masked_fill_"] == 1
    )
