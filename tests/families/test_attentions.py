"""Attention matrices: given where the model's own attention runs, as before the patch, and refused where the engine answers."""

from typing import Any

import pytest
import torch
from families.configs import build, padded_batch

import kvengine
from kvengine.errors import ModelError

MODELS = ("llama", "gpt2", "opt", "gemma3")  # those of GPT-2 and OPT never tell their attention; one has windows


def eager(name: str, always: bool) -> Any:
    model = build(name)
    model.set_attn_implementation("eager")
    model.config.output_attentions = always
    return model


@torch.no_grad()
def matrices(model: Any, always: bool, **options: Any) -> Any:
    asked = {} if always else {"output_attentions": True}
    return model(**padded_batch(), **asked, **options).attentions


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_matrices_are_given_or_refused(name: str, always: bool) -> None:
    want, model = matrices(eager(name, always), always), kvengine.patch(eager(name, always))
    for options in ({}, {"cache": kvengine.EngineCache(model)}):
        with pytest.raises(ModelError, match="never forms the attention matrix. Pass use_cache=False"):
            matrices(model, always, **options)
    found = matrices(model, always, use_cache=False)
    assert len(found) == len(want) and all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_a_configuration_that_always_asks_for_them_does_not_keep_a_model_from_generating() -> None:
    model, options = eager("gpt2", True), {"max_new_tokens": 4, "do_sample": False}
    want = model.generate(**padded_batch(), **options)
    assert torch.equal(kvengine.patch(model).generate(**padded_batch(), **options), want)
