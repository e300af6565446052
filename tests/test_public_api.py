"""The public names. Adding one is a decision, removing one a breaking change: both edit this list."""

import subprocess
import sys

import pytest

import kvengine

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
