"""Examples in docstrings run, and what docs/build.py writes is what the files hold."""

import doctest
import importlib

import pytest
from layout import modules


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    """One import per module, under its real name: `pytest --doctest-modules` would import it twice."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0
