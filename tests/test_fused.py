"""Recorded steps whose layers torch's compiler fuses: the same text, and the model is as it was."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from families import configs
from support import llama, one, patched, prompts
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedModel

import kvengine
from kvengine.errors import ModelError
from kvengine.hf.cache import STATE
from kvengine.hf.fused import Fused

POLICY = "quest(budget=24, page=4) + kivi(bits=4, group=8, residual=8)"


@pytest.fixture(autouse=True)
def _forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    """What was compiled for one test's model would count in the next one's."""
    if request.config.getoption("jaxtyping_packages", None):
        pytest.skip("the compiler meets what checks signatures")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> CompileCounter:
    """A compiler that leaves operations as they are, and counts graphs."""
    counter = CompileCounter()
    monkeypatch.setattr("kvengine.hf.compiled.Fused", partial(Fused, backend=counter))
    return counter


def say(model: Any, batch: Any, count: int = 12, **options: Any) -> Any:
    return model.generate(**batch, max_new_tokens=count, do_sample=False, **options)


def test_the_text_is_the_same_and_the_layers_are_as_before(counter: CompileCounter) -> None:
    model, batch = patched(POLICY, num_hidden_layers=4), prompts()
    want = say(model, batch)
    own = model.model.layers[1].forward
    model.model.layers[1].forward = lambda *args, **kwargs: own(*args, **kwargs)  # as those put it who wrap a layer
    mine = model.model.layers[1].forward
    decoder = kvengine.compile_decode(model, fuse=True)
    assert torch.equal(say(model, batch, custom_generate=decoder), want)
    assert [vars(x).get("forward") for x in model.model.layers] == [None, mine, None, None]
    seen = counter.frame_count
    assert 0 < seen <= 8
    again = kvengine.compile_decode(
        model, fuse=True
    )  # as each `generate` of a model patched with record=True makes one
    assert torch.equal(say(model, batch, custom_generate=again), want)
    assert counter.frame_count == seen


def test_layers_are_as_before_where_a_step_fails(counter: CompileCounter, monkeypatch: pytest.MonkeyPatch) -> None:
    model = patched("full")
    fused = Fused(model, backend=counter)
    with pytest.raises(RuntimeError, match="this one"), fused.inside():
        assert all("forward" in vars(x) for x in model.model.layers)
        raise RuntimeError("this one")
    assert not any("forward" in vars(x) for x in model.model.layers)


@pytest.mark.slow
def test_layers_are_compiled_once_for_all(counter: CompileCounter) -> None:
    found = []
    for layers in (3, 12):
        torch._dynamo.reset()
        counter.clear()
        model = patched("full", num_hidden_layers=layers)
        say(model, one(), 4, custom_generate=kvengine.compile_decode(model, fuse=True))
        found.append(counter.frame_count)
    assert found[0] == found[1]


def test_every_generate_of_a_model_patched_so(counter: CompileCounter) -> None:
    model, batch = patched(POLICY), one()
    want = say(model, batch)
    with kvengine.patched(model, POLICY, record="eager", fuse=True):
        assert torch.equal(say(model, batch), want) and counter.frame_count
        kvengine.patch(model, POLICY, record="eager")
        assert not getattr(model, STATE).fuse
    assert (getattr(model, STATE).record, getattr(model, STATE).fuse) == (False, False)


def test_what_cannot_be_fused_says_what_to_do() -> None:
    model = llama()
    with pytest.raises(ModelError, match="give record=True"):
        kvengine.patch(model, "full", fuse=True)
    kvengine.patch(model, "full")
    with pytest.raises(ModelError, match="leave out fuse"):
        kvengine.compile_decode(model, "trace", fuse=True)
    with pytest.raises(ModelError, match="leave out fuse"):
        Fused(torch.nn.Linear(2, 2))
    assert isinstance(model, PreTrainedModel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3", "full"), ("mixtral", "full"), ("gemma3n", "full"), ("gpt_oss", "full"), ("mistral_window", "full"),
        ("gpt2", "full"), ("gptj", "full"), ("deepseek_v3", "quest(budget=12, page=4)"),
    ],
)  # fmt: skip
def test_models_of_other_kinds(name: str, text: str, counter: CompileCounter) -> None:
    if not configs.exists(name):
        pytest.skip(f"this transformers has no {name}")
    model, batch = kvengine.patch(configs.build(name), text), configs.padded_batch()
    decoder = kvengine.compile_decode(model, fuse=True)
    assert torch.equal(say(model, batch, 8, custom_generate=decoder), say(model, batch, 8))
    assert counter.frame_count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own, as it sets its compiler up
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_compiler_makes_rounds_as_the_model_does(dtype: torch.dtype) -> None:
    model, batch = patched("full", num_hidden_layers=3).to(dtype), prompts()
    decoder = kvengine.compile_decode(model, fuse=True)
    given = {"output_logits": True, "return_dict_in_generate": True}
    want, got = say(model, batch, **given), say(model, batch, custom_generate=decoder, **given)
    assert torch.equal(got.sequences, want.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", ["full", POLICY])
def test_a_graph_of_fused_steps_speaks_the_same_text(text: str) -> None:
    model, batch = llama().cuda(), {name: x.cuda() for name, x in prompts(2).items()}
    with kvengine.patched(model, text):
        want = say(model, batch)
        decoder = kvengine.compile_decode(model, fuse=True)
        assert decoder.how == "graph" and torch.equal(say(model, batch, custom_generate=decoder), want)
    with kvengine.patched(model, text, record=True, fuse=True):
        assert torch.equal(say(model, batch), want)
