"""KV-cache management for long contexts, on any Hugging Face decoder model."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvengine.hf import patch as patch
    from kvengine.hf import patched as patched
    from kvengine.hf import unpatch as unpatch
    from kvengine.hf_cache import EngineCache as EngineCache
    from kvengine.hf_compiled import compile_decode as compile_decode
    from kvengine.stack import Stack as Stack

__all__ = ["EngineCache", "Stack", "compile_decode", "patch", "patched", "unpatch"]

HOMES = {
    "EngineCache": "hf_cache",
    "Stack": "stack",
    "compile_decode": "hf_compiled",
    "patch": "hf",
    "patched": "hf",
    "unpatch": "hf",
}


def __getattr__(name: str) -> Any:
    """A public name or a submodule, imported when it is first asked for: torch takes seconds, `kvengine --help` should not."""
    if name == "__version__":
        from importlib.metadata import version

        return version("kvengine")
    if name in HOMES:
        globals()[name] = found = getattr(import_module(f"kvengine.{HOMES[name]}"), name)
        return found
    if not name.startswith("_") and find_spec(f"kvengine.{name}"):
        return import_module(f"kvengine.{name}")
    raise AttributeError(f"module 'kvengine' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
