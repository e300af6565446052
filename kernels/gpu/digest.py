"""Which code a Triton kernel will have, without making it.

The same code before any of Triton's passes, with the same options and the same Triton, becomes the same machine code. So a
digest of these tells whether a kernel is the one whose registers and shared memory were noted, in a twentieth of the time that
compiling takes.
"""

from __future__ import annotations

import hashlib
from typing import Any

from triton._C.libtriton import ir


class Digests(list[str]):
    """Of kernels, 16 hexadecimal digits each."""

    def __init__(self) -> None:
        self.known = dict[str, str]()
        """By source and options: a kernel that is met again is not translated again."""

    def note(
        self, kernel: Any, key: Any, signature: Any, device: int, constants: Any, options: Any, attributes: Any, *_: Any
    ) -> None:
        """Note what would be compiled. The arguments are those of `JITFunction._do_compile`, in Triton 3.6."""
        _, _, target, backend, _ = kernel.device_caches[device]
        source = kernel.ASTSource(kernel, signature, constants, attributes)
        how = sorted((name, str(x)) for name, x in vars(options).items() if name != "extern_libs")  # paths
        whole = f"{source.hash()}{how}"
        if whole not in self.known:
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            made_by = backend.get_codegen_implementation(options), backend.get_module_map()
            code = source.make_ir(target, options, *made_by, context).str_nodebug()
            self.known[whole] = hashlib.sha256(f"{code}{how}".encode()).hexdigest()[:16]
        self.append(self.known[whole])
