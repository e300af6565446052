"""Models on a pretended GPU, with the Triton kernels that would run there, interpreted and watched, or compiled and run on the
CPU: what they say is what the CPU says. test_triton.py runs this both ways."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import support_kernels  # noqa: F401 - it mends the interpreter, and watches what is launched
import torch
from families import configs
from support import MIXED, SMALL, greedy, llama, one, prompts
from support_device import Device, Pretended, there

import kvengine
from kvengine.errors import PolicyError
from kvengine.fixed import refusal
from kvengine.hf.compiled import CompiledDecode
from kvengine.speculative.triforce import TriForce
from kvengine.stack import Stack

# A machine with a GPU may not have faiss, without which `ann` is refused.
STACKS = list(
    dict.fromkeys(text for name, text in [*SMALL.items(), *enumerate(MIXED)] if name != "ann" or find_spec("faiss"))
)
RECORDED = [text for text in STACKS if not refusal(Stack.parse(text))]
EVERY_WAY = ["h2o(budget=24)", "d2o(budget=24)", "quest(budget=24, page=4)", "zipcache(block=16)"]
MIDDLES = [SMALL["quest"], SMALL["streaming"]]
COMPILED = "TRITON_COMPILED" in os.environ
pytestmark = pytest.mark.skipif(
    not COMPILED and os.environ.get("TRITON_INTERPRET") != "1", reason="kernels run interpreted, or as compiled"
)


@pytest.fixture
def launched() -> set[str]:
    """The names of the kernels so far."""
    return set()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, launched: set[str]) -> Device:
    from triton.runtime import JITFunction, interpreter

    if COMPILED:
        launcher = JITFunction.__getitem__

        def launch_compiled(self: Any, grid: Any) -> Callable[..., None]:
            launched.add(self.fn.__name__)
            launch = launcher(self, grid)
            return lambda *given, **options: launch(
                *numbers(given), **{name: numbers(x) for name, x in options.items()}
            )

        monkeypatch.setattr(JITFunction, "__getitem__", launch_compiled)
        return Device(monkeypatch)
    launch = interpreter.GridExecutor.__call__

    def run(self: Any, *given: Any, **options: Any) -> None:
        launched.add(self.fn.__name__)
        launch(self, *numbers(given), **{name: numbers(x) for name, x in options.items()})

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run)
    return Device(monkeypatch)


def numbers(x: Any) -> Any:
    if isinstance(x, tuple):
        return type(x)(*map(numbers, x)) if hasattr(x, "_fields") else tuple(map(numbers, x))
    return x.inner if isinstance(x, Pretended) else x


def both(model: Any, batch: dict[str, Any], text: str, device: Device, count: int) -> tuple[Any, Any]:
    """What the CPU says, and what the device does: texts, and logits of each token."""
    options = {"return_dict_in_generate": True, "output_logits": True, "max_new_tokens": count, "do_sample": False}
    with kvengine.patched(model, text):
        want = model.generate(**batch, **options)
    with device, kvengine.patched(there(model), text):
        got = model.generate(**{name: there(x) for name, x in batch.items()}, **options)
        return (want.sequences, torch.stack(want.logits)), (got.sequences.cpu(), torch.stack(got.logits).cpu())


@pytest.mark.parametrize("text", STACKS)
def test_triton_logits_are_those_of_the_cpu(text: str, device: Device, launched: set[str]) -> None:
    (want, logits), (got, there_) = both(llama(), prompts(2), text, device, 12)
    assert got.tolist() == want.tolist() and launched
    torch.testing.assert_close(there_, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", RECORDED)
def test_triton_a_recorded_step_says_what_the_cpu_says(text: str, device: Device, launched: set[str]) -> None:
    recorded(llama(), prompts(2), text, device)
    assert "put_kernel" in launched


def recorded(model: Any, batch: dict[str, Any], text: str, device: Device) -> None:
    with kvengine.patched(model, text):
        want = greedy(model, batch, 12).tolist()
    with device, kvengine.patched(there(model), text):
        step = CompiledDecode(model, "eager")
        assert greedy(model, {name: there(x) for name, x in batch.items()}, 12, custom_generate=step).tolist() == want


@pytest.mark.parametrize("text, how", [(text, "eager") for text in STACKS] + [(text, "recorded") for text in EVERY_WAY])
def test_triton_latents(text: str, how: str, device: Device) -> None:
    model, batch = configs.build("minicpm3"), configs.padded_batch(61)
    try:
        kvengine.unpatch(kvengine.patch(model, text))
    except PolicyError as error:
        pytest.skip(str(error))
    if how == "recorded":
        recorded(model, batch, text, device)
        return
    (want, logits), (got, there_) = both(model, batch, text, device, 12)
    assert got.tolist() == want.tolist()
    torch.testing.assert_close(there_, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", ["full", "h2o(budget=12)", "quest(budget=12, page=4)", SMALL["kivi"]])
@pytest.mark.parametrize("name", ["llama_mqa", "gemma2", "gpt_oss", "gemma3n", "phi", "minicpm3", "glm"])
def test_triton_families(name: str, text: str, device: Device) -> None:
    model = configs.build(name)
    if name == "gpt_oss":
        model.set_experts_implementation("eager")  # the other asks for a histogram that only a real GPU has
    (want, logits), (got, there_) = both(model, configs.padded_batch(), text, device, 8)
    assert got.tolist() == want.tolist()
    torch.testing.assert_close(there_, logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("text", ["full", *MIXED[:3], "zipcache(block=16)", "lowrank(rank=8)"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_triton_narrow_numbers(dtype: torch.dtype, text: str, device: Device) -> None:
    (want, logits), (got, there_) = both(llama().to(dtype), prompts(2), text, device, 4)
    same = (want == got)[:, -4:].cumprod(1).sum(1).min() + 1  # logits that follow the same text
    worst = (there_ - logits)[:same].float().abs().max() / logits.float().std()
    assert same > 1 and worst <= 0.25  # dense keys in bfloat16 come to 0.05, those in 4 bits to 0.13


@pytest.mark.parametrize("middle", MIDDLES)
@pytest.mark.parametrize("stack", ["full", "host"])
def test_triton_speculation_says_what_the_model_says(stack: str, middle: str, device: Device) -> None:
    model, batch = llama(), one()
    want = greedy(model, batch, 16).tolist()
    with device:
        ids = there(batch["input_ids"])
        decoder = TriForce(there(model), "lookup", middle, gamma=(2, 4), stack=stack)
        found = decoder.generate(ids, max_new_tokens=16, do_sample=False)
        assert found[:, ids.shape[1] :].tolist() == want
