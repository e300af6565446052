"""Kernels launched by our own key (kernels/gpu/again.py) are those that Triton launches, with what it gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support_driver import needed, said

from kvengine.errors import KernelError

CASES = [
    "tail, 1 query", "tail and pages, joined", "units of 16", "kivi, 4 bits", "turboquant, 4 bits", "bounds", "shares",
    "top 128 of 8192", "best 1024 of 1025", "put a token", "put a token into a free slot", "verdict by ends",
    "verdict by attention", "merge of 4", "quantise keys", "places of units", "fetch",
    "fetch what is new",
]  # fmt: skip
"""What a decoded token launches."""
WATCH = """
from triton import knobs
from triton.runtime.jit import JITFunction
from kvengine.kernels.gpu import again

seen, by_triton = [], []

def launching(self, source, metadata, make=CudaLauncher.__init__):
    make(self, source, metadata)
    launch, kinds = self.launch, source.signature.values()

    def run(*given):
        (x, y, z, stream, function, *how), arguments = opened(given)
        numbers = [a for a, kind in zip(arguments, kinds, strict=True) if kind != "constexpr"]
        numbers = [(str(a.dtype), list(a.shape), a.data_ptr() % 16) if torch.is_tensor(a) else a for a in numbers]
        seen.append([function, x, y, z, stream, *how, numbers])
        launch(*given)

    self.launch = run

def running(self, *given, run=JITFunction.run, **named):
    by_triton.append(self.__name__)
    return run(self, *given, **named)

CudaLauncher.__init__, JITFunction.run = launching, running
"""
RUN = """
from kvengine.kernels.gpu import compiling_for
from kvengine.kernels.gpu.ahead import cases

found = {}
compiling_for.set(90)
for name, call in cases().items():
    if not given or name in given:
        told = []
        for i in range(3):
            seen.clear(), by_triton.clear()
            call()
            told.append((seen[:], by_triton[:]))
        found[name] = {"launches": [x for x, _ in told], "by Triton": told[-1][1]}
print(json.dumps(found))
"""
ARGUMENTS = """
import triton
import triton.language as tl

@again.launched_again
@triton.jit(do_not_specialize=["free"])
def a_kernel(x, out, n, free, scale, SIZE: tl.constexpr, WIDE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, tl.load(x + i, mask=i < n + free, other=0).to(out.dtype.element_ty) * scale)

floats, halves = torch.zeros(1024), torch.zeros(1024, dtype=torch.bfloat16)
usual = dict(x=floats, out=floats, n=32, free=32, scale=0.5, SIZE=64, WIDE=False)
others = [
    {}, {"x": floats[1:]}, {"x": floats[2:]}, {"x": floats[4:]}, {"out": floats[1:]}, {"x": halves}, {"x": halves[8:]},
    {"x": halves[1:]}, {"n": 48}, {"n": 17}, {"n": 1}, {"n": True}, {"n": 0}, {"n": 1 << 31}, {"n": -(1 << 31)},
    {"n": -(1 << 31) - 1}, {"n": 1 << 63}, {"free": 1}, {"free": 17}, {"free": True}, {"free": (1 << 31) - 1},
    {"free": 1 << 31}, {"free": -(1 << 31)}, {"free": 1 << 63}, {"scale": 1.0}, {"scale": 1}, {"scale": 16}, {"SIZE": 128},
    {"WIDE": True}, {"num_warps": 8}, {"out": torch.nn.Parameter(floats)}, {"n": 32, "free": 16},
]  # fmt: skip

def launch(kernel, x, out, n, free, scale, **named):
    seen.clear(), by_triton.clear()
    kernel[(2, 3)](x, out, n, free, scale, **named)
    return json.loads(json.dumps(seen)), len(by_triton)

found = {}
for turn in range(2):
    for other in others:
        values = usual | other
        launch(a_kernel, **values)
        plain, ours = launch(a_kernel.kernel, **values), launch(a_kernel, **values)
        what = {name: "a parameter" if isinstance(x, torch.nn.Parameter) else str(x)[:20] for name, x in other.items()}
        found[f"{len(found)}: {what}"] = plain, ours
functions = {found[name][1][0][0][0] for name in found}
named = launch(a_kernel, **dict(reversed(usual.items())))[0][0][0] == launch(a_kernel, **usual)[0][0][0]
driver.active.get_current_device = lambda: 1
elsewhere = launch(a_kernel, **usual)[0][0][0]
driver.active.get_current_device = lambda: 0
told, hook = [], lambda metadata: told.append(metadata.get()["name"])
knobs.runtime.launch_enter_hook.add(hook)
hooked = launch(a_kernel, **usual)[1]
knobs.runtime.launch_enter_hook.remove(hook)
knobs.runtime.debug = True
checked = launch(a_kernel, **usual)[1]
knobs.runtime.debug = False
last = launch(a_kernel, **usual)[1]
for n in range(2, 3 * again.MOST):
    launch(a_kernel, **usual | {"n": n})
print(json.dumps({
    "found": found, "functions": len(functions), "named": named, "elsewhere": elsewhere in functions, "told": told,
    "by Triton": [hooked, checked, last], "kept": len(a_kernel.ready) <= again.MOST,
}))
"""

pytestmark = needed


def same(found: dict[str, Any]) -> None:
    for name, case in found.items():
        first, *others = case["launches"]
        assert first and all(other == first for other in others), name
        assert case["by Triton"] == [], name


@pytest.mark.parametrize("cases", [CASES[::5], pytest.param(CASES, marks=pytest.mark.slow)], ids=["some", "all"])
def test_kernels_are_launched_again_as_triton_did(cases: list[str], tmp_path: Path) -> None:
    found = said(WATCH + RUN, cases, tmp_path)
    assert set(found) == set(cases)
    same(found)


def test_arguments_that_triton_tells_apart_are_told_apart(tmp_path: Path) -> None:
    told = said(WATCH + ARGUMENTS, None, tmp_path)
    for what, (plain, ours) in told["found"].items():
        assert ours[0] == plain[0], what
        assert ours[1] == ("a parameter" in what), what
    assert told["functions"] > 12 and told["named"] and not told["elsewhere"]
    assert told["told"] == ["a_kernel"] and told["by Triton"] == [1, 1, 0] and told["kept"]


def test_launches_of_another_triton_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    import triton

    from kvengine.kernels.gpu import again
    from kvengine.kernels.put_token.triton import put_kernel

    assert type(put_kernel) is type(again.launched_again(put_kernel.kernel)) is again.Again
    monkeypatch.setattr(triton, "__version__", "3.10.0")
    other = again.launched_again(put_kernel.kernel)
    assert type(other) is again.Noted and other.kernel is put_kernel.kernel


def test_more_blocks_than_cuda_takes_are_refused_by_name() -> None:
    """As 65536 rows of sequences and heads; the driver's refusal names neither."""
    from kvengine.kernels.put_token.triton import put_kernel

    put_kernel[(65536, 65535)]
    for grid in ((1, 65536), (1, 1, 65536)):
        with pytest.raises(KernelError, match=rf"put_kernel would be launched in {' x '.join(map(str, grid))} blocks"):
            put_kernel[grid]
