"""KV-cache management for long contexts, on any Hugging Face decoder model."""

from kvengine.hf import patch as patch
from kvengine.hf import patched as patched
from kvengine.hf import unpatch as unpatch
from kvengine.hf_cache import EngineCache as EngineCache
from kvengine.hf_compiled import compile_decode as compile_decode
from kvengine.stack import Stack as Stack

__all__ = ["EngineCache", "Stack", "compile_decode", "patch", "patched", "unpatch"]


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("kvengine")
    raise AttributeError(f"module 'kvengine' has no attribute {name!r}")
