"""The public names. Adding one is a decision, removing one a breaking change: both edit this list."""

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
