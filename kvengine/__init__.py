"""KV-cache management for long contexts, on any Hugging Face decoder model.

    a model        hf/ patches it and is the cache that it sees; text.py and replay.py have a prompt read again
    a layer        cache.py splits its KV heads (heads.py) into lanes, by policy (stack.py, presets.py); shared keys: readers.py,
                   latent.py; session.py: what layers share
    a lane         lane.py takes tokens. Its bases, one upon the other: holding.py (what it holds), padding.py, sealing.py (how
                   that becomes pages), recall.py (how it goes back), evidence.py (what queries say), verdicts.py (when it
                   judges), choosing.py (what is read; named.py: what a model names itself), quick.py (a token in one call)
    what it holds  tail.py (of latents: nested.py), the newest tokens, exact; pages.py, what is sealed, in pool.py; compaction.py,
                   strays.py close holes
    reading it     attending.py: what lies side by side; page_reads.py and beside.py: pages; reach.py says what was read
    its methods    answers.py and page_answers.py look at what a policy's methods return
    recorded       fixed.py and fixed_lane.py hold a cache still, so that a step can be replayed
    afterwards     stats.py counts, saved.py keeps sessions (saved_state.py writes them down), prefix.py prompts' beginnings,
                   recover.py survives lost pages

`speculative/` drafts and judges; cli.py is the command.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvengine.hf.cache import EngineCache as EngineCache
    from kvengine.hf.compiled import compile_decode as compile_decode
    from kvengine.hf.patching import patch as patch
    from kvengine.hf.patching import patched as patched
    from kvengine.hf.patching import unpatch as unpatch
    from kvengine.stack import Stack as Stack

__all__ = ["EngineCache", "Stack", "compile_decode", "patch", "patched", "unpatch"]

HOMES = {
    "EngineCache": "hf.cache",
    "Stack": "stack",
    "compile_decode": "hf.compiled",
    "patch": "hf.patching",
    "patched": "hf.patching",
    "unpatch": "hf.patching",
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
