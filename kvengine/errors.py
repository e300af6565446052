"""Every error the engine raises on purpose, but for what the codec and the stores say of arguments that cannot be (ValueError).

    KVEngineError
    ├── PolicyError (ValueError)          a policy string or option is wrong
    │   ├── UnknownPolicy                 no policy, option or axis of that name
    │   └── UnsupportedPolicy             understood, but this combination or model cannot do it; the message says why
    ├── ModelError (ValueError)           the model cannot be patched, or is of the wrong kind
    ├── KernelError (ValueError)          shapes, dtypes or a backend that a kernel cannot run
    ├── CacheError (RuntimeError)         a cache is used against its contract: rolled back too far, another model's
    ├── StoreError (OSError)              a store or tier failed; what was stored before is still there
    │   ├── CorruptBitstream              stored bytes are torn, truncated or not ours
    │   └── IncompatibleCache             stored for another model, tokenizer, dtype or version
    └── EvaluationError (ValueError)      an unknown task, a bad configuration, a run that cannot be resumed

Each is also the built-in named beside it, so code that catches `ValueError` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KVEngineError(Exception):
    """Base of all errors below."""


class PolicyError(KVEngineError, ValueError):
    """A policy string, option or value is wrong."""


class UnknownPolicy(PolicyError):
    """No policy or option has that name."""


class UnsupportedPolicy(PolicyError):
    """Two choices, or a choice and a model, exclude each other."""


class ModelError(KVEngineError, ValueError):
    """The model cannot be used this way."""


class KernelError(KVEngineError, ValueError):
    """A kernel was given shapes, dtypes or a backend it cannot run."""


class CacheError(KVEngineError, RuntimeError):
    """A cache was used against its contract."""


class StoreError(KVEngineError, OSError):
    """A store or tier failed."""


class CorruptBitstream(StoreError):
    """Stored bytes are torn, truncated or not ours."""


class IncompatibleCache(StoreError):
    """Stored for another model, tokenizer, dtype or version."""


class EvaluationError(KVEngineError, ValueError):
    """A task, configuration or run is wrong."""


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for a name that does not exist.

    >>> unknown("policy", "quset", ["quest", "full"])
    "no policy is called 'quset'. Did you mean 'quest'? Known: full, quest"

    >>> unknown("policy", "Expected-Attention", ["expected_attention"])
    "no policy is called 'Expected-Attention'. Did you mean 'expected_attention'? Known: expected_attention"
    """
    names = sorted(known)
    plain = {one.lower().replace("-", "_"): one for one in names}
    close = [plain[one] for one in difflib.get_close_matches(name.lower().replace("-", "_"), plain, 1)]
    hint = f" Did you mean {close[0]!r}?" if close else ""
    return f"no {kind} is called {name!r}.{hint} Known: {', '.join(names)}"


def out_of_memory(error: BaseException) -> bool:
    """Whether memory was: torch has a class for devices, and words for hosts.

    >>> out_of_memory(MemoryError()), out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "can't allocate memory" in str(error)


def refusal(error: Exception) -> str | None:
    """What we, memory, or torch's compiler refused, in a line; None for all other errors.

    >>> refusal(PolicyError("no")), refusal(MemoryError()), refusal(RuntimeError("shapes differ"))
    ('no', 'out of memory', None)
    """
    if out_of_memory(error):
        return "out of memory"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return str(error).partition("\n")[0]
    return str(error) if isinstance(error, KVEngineError) else None


def missing(policy: object, method: str) -> PolicyError:
    """The error for a method that an interface names and a policy has not written, though the engine asks for it."""
    interface = type(policy).__mro__[-2].__name__
    return PolicyError(
        f"{type(policy).__name__} defines no `{method}`; the docstring of `{interface}` says what it returns"
    )
