"""The public names. Adding one is a decision, removing one a breaking change: both edit this list."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import llama

import kvengine
from kvengine import saved, speculative
from kvengine.errors import ModelError, StoreError
from kvengine.offload.stores import Files, Store
from kvengine.prefix import Prefix

PUBLIC = ["EngineCache", "Stack", "compile_decode", "patch", "patched", "unpatch"]


def test_the_public_names_are_these() -> None:
    assert kvengine.__all__ == PUBLIC


def test_the_public_names_are_sorted_and_exist() -> None:
    assert sorted(PUBLIC) == PUBLIC
    assert all(hasattr(kvengine, name) for name in PUBLIC)


def test_the_decoder_is_found_by_its_package() -> None:
    from kvengine import speculative
    from kvengine.speculative.triforce import TriForce

    assert speculative.TriForce is TriForce


def test_a_submodule_is_there_without_an_import_of_its_own() -> None:
    """`except kvengine.errors.PolicyError` after a plain `import kvengine`, which imports nothing of it by itself."""
    code = "import kvengine, sys; assert 'torch' not in sys.modules; kvengine.errors.PolicyError; kvengine.stack.Stack"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)


def test_a_name_that_does_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'pacth'"):
        kvengine.pacth  # noqa: B018
    assert set(PUBLIC) <= set(dir(kvengine))


NO_MODEL: dict[str, Callable[[Any, Path], Any]] = {
    "patch": lambda no, _: kvengine.patch(no),
    "patch, swapped": lambda no, _: kvengine.patch(no, llama()),  # type: ignore[arg-type]
    "patched": lambda no, _: kvengine.patched(no).__enter__(),
    "unpatch": lambda no, _: kvengine.unpatch(no),
    "EngineCache": lambda no, _: kvengine.EngineCache(no),
    "compile_decode": lambda no, _: kvengine.compile_decode(no),
    "load": lambda no, path: saved.load(no, path / "session.kv"),
    "save": lambda no, path: saved.save(kvengine.EngineCache(kvengine.patch(llama())), path / "session.kv", no),
    "Prefix": lambda no, path: Prefix(no, Store(Files(path))),
}


@pytest.mark.parametrize("name", NO_MODEL)
def test_what_is_no_model_is_told(name: str, tmp_path: Path) -> None:
    model = kvengine.patch(llama())
    saved.save(kvengine.EngineCache(model), tmp_path / "session.kv", model)
    for no in ("full", None):
        with pytest.raises(ModelError, match=r"[mM]odel.*(got|not to a|not of a) (str|NoneType)|needs a patched model"):
            NO_MODEL[name](no, tmp_path)


@pytest.mark.parametrize("store", ["./chunks", None])
def test_what_is_no_store_is_told(store: Any) -> None:
    with pytest.raises(StoreError, match="chunks live in a Store, not in a"):
        Prefix(kvengine.patch(llama()), store)


def test_a_batch_of_no_rows_is_told() -> None:
    with pytest.raises(ModelError, match=r"input_ids are a tensor .* not a tensor of torch.int64 \[0, 5\]"):
        speculative.TriForce(llama()).generate(torch.zeros(0, 5, dtype=torch.long), max_new_tokens=2)


@pytest.mark.parametrize("policy", ["snapkv(budget=48)", None])
def test_a_model_that_is_unpatched_inside_is_as_before_outside(policy: str | None) -> None:
    model = llama() if policy is None else kvengine.patch(llama(), policy)
    with kvengine.patched(model, "kivi"):
        kvengine.unpatch(model)
    if policy is None:
        assert model.config._attn_implementation == "sdpa"
    else:
        assert str(kvengine.EngineCache(model).stack) == policy
