"""Which code a Triton kernel will have, without making it.

The same code before any of Triton's passes, with the same options and the same Triton, becomes the same machine code. So a
digest of these tells whether a kernel is the one whose registers and shared memory were noted, in a twentieth of the time that
compiling takes. And the same source becomes the same code, by the digest that Triton keeps compiled kernels by, with all that the
source calls: where that is as it was noted, nothing need be translated either. A line more above a kernel makes another source.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from triton._C.libtriton import ir


class Given(NamedTuple):
    """What the compiler would be given, 16 hexadecimal digits each."""

    source: str
    """As it is written, and with which options."""
    given: str
    """As Triton translates it, and with which options."""


class Digests(list[Given]):
    """Of kernels."""

    def __init__(self, known: Mapping[str, str] | None = None) -> None:
        self.known = dict(known or {})
        """Translated, by source: a kernel that is met again is not translated again."""

    def note(
        self, kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:
        """Note what would be compiled. The arguments are those of `JITFunction._do_compile`, in Triton 3.6."""
        _, _, target, backend, _ = kernel.device_caches[device]
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        how = sorted((name, str(x)) for name, x in vars(options).items() if name != "extern_libs")  # paths
        whole = digest(f"{source.hash()}{how}")
        if whole not in self.known:
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            made_by = backend.get_codegen_implementation(options), backend.get_module_map()
            code = source.make_ir(target, options, *made_by, context).str_nodebug()
            self.known[whole] = digest(f"{code}{how}")
        self.append(Given(whole, self.known[whole]))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
