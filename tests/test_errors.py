"""The tree of errors is public: what is raised where may change, what catches it may not."""

import inspect

import pytest

from kvengine import errors

TREE = {
    "PolicyError": (errors.KVEngineError, ValueError),
    "UnknownPolicy": (errors.PolicyError, ValueError),
    "UnsupportedPolicy": (errors.PolicyError, ValueError),
    "ModelError": (errors.KVEngineError, ValueError),
    "KernelError": (errors.KVEngineError, ValueError),
    "CacheError": (errors.KVEngineError, RuntimeError),
    "StoreError": (errors.KVEngineError, OSError),
    "CorruptBitstream": (errors.StoreError, OSError),
    "IncompatibleCache": (errors.StoreError, OSError),
    "EvaluationError": (errors.KVEngineError, ValueError),
}


def classes() -> dict[str, type]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__module__ == errors.__name__
    }


def test_the_tree_is_complete() -> None:
    assert set(classes()) == {"KVEngineError", *TREE}


@pytest.mark.parametrize("name", TREE)
def test_each_error_is_the_builtin_that_people_catch(name: str) -> None:
    assert all(issubclass(getattr(errors, name), parent) for parent in TREE[name])


def test_the_drawing_shows_every_error() -> None:
    drawing = errors.__doc__ or ""
    assert all(name in drawing for name in classes())


def test_an_unknown_name_is_answered_by_the_nearest_and_by_all() -> None:
    message = errors.unknown("policy", "quset", ["quest", "full"])
    assert message == "no policy is called 'quset'. Did you mean 'quest'? Known: full, quest"


def test_a_name_like_no_other_gets_no_guess() -> None:
    assert errors.unknown("axis", "zzz", {"retention"}) == "no axis is called 'zzz'. Known: retention"
