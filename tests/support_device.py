"""A CUDA device pretended on a machine without one: tensors that say they are there, and refuse to meet those that are not.

A pretended tensor holds its numbers in host memory, so what runs gives real results; what a GPU would refuse raises, and
what crosses between host and device is noted. Kernels' references run in place of Triton's, or Triton's interpreter.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support_sync import ours
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from kvengine.hf.steps import Steps
from kvengine.kernels.gpu import chip
from kvengine.kernels.streams import _kept

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
CHIP = {
    "name": "pretended",
    "major": 8,
    "minor": 6,
    "multi_processor_count": 3,
    "shared_memory_per_block_optin": 99 << 10,
}
SCALARS_TOO = {
    "cat", "stack", "matmul", "__matmul__", "bmm", "mm", "linear", "embedding", "gather", "index_select", "scatter_",
    "scatter", "scatter_add_", "scaled_dot_product_attention", "take_along_dim", "index_add", "index_add_", "addmm",
    "baddbmm", "einsum", "concat", "hstack", "vstack",
}  # fmt: skip
"""Operations that do not take a number from the host even as a tensor without axes."""
HOST = {
    "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__len__", "__repr__", "__format__",
    "__hash__", "size", "dim", "numel", "stride", "is_contiguous", "data_ptr", "element_size", "storage_offset", "nelement",
    "is_floating_point", "is_complex", "ndimension", "allclose", "equal", "is_nonzero", "get_device", "__iter__",
}  # fmt: skip
"""Operations whose answer is the host's."""
WAITS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "equal", "allclose", "is_nonzero",
    "masked_select", "unique", "unique_consecutive", "__repr__", "__format__",
}  # fmt: skip
"""Operations for which the host waits until the device has come so far."""


class Elsewhere(RuntimeError):
    """A GPU would have refused this."""


class Pretended(Tensor):
    """A tensor "on" the device; `inner` holds its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Pretended:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        made.inner = inner
        return made

    def record_stream(self, stream: Any) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mode = Device.now
        if mode is None:
            raise Elsewhere("a pretended tensor outlived its device")
        return mode.run(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise Elsewhere(f"{func} reached a pretended tensor below Python's functions")


class Stream:
    """Which has nothing to wait for."""

    device = CUDA
    # To `isinstance`. A real one asks for a driver, where torch is built for CUDA.
    __class__ = torch.cuda.Stream  # type: ignore[assignment]

    def __init__(self, *given: Any, **how: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class Device(TorchFunctionMode):
    """While entered, `cuda` can be asked for. `moved`: copies between host and device, and waits of the
    one for the other, by the line of ours that asked for them."""

    now: Device | None = None

    def __init__(self, patch: pytest.MonkeyPatch, **has: Any) -> None:
        """`has`: properties that differ from those of an RTX 3090."""
        super().__init__()
        self.moved: Counter[str] = Counter()
        self.pinned: set[int] = set()
        self.watching = True
        for name, value in {
            "is_available": lambda: True,
            "_lazy_init": lambda: None,
            "Stream": Stream,
            "current_stream": lambda *a: Stream(),
            "stream": lambda *a: nullcontext(),
            "synchronize": lambda *a: None,
            "get_device_properties": lambda *a: SimpleNamespace(**CHIP | has),
            "is_current_stream_capturing": lambda: False,
            "current_device": lambda: 0,
            "device_count": lambda: 1,
        }.items():
            patch.setattr(torch.cuda, name, value)
        chip.cache_clear()
        _kept.cache_clear()

    def __enter__(self) -> Device:
        Device.now = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        Device.now = None
        chip.cache_clear()
        _kept.cache_clear()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def note(self, what: str) -> None:
        lines = [x for x in traceback.extract_stack() if ours(x.filename) and "support_device" not in x.filename]
        if self.watching and lines:
            self.moved[f"{what} at {lines[-1].filename.rsplit('/', 2)[-1]}:{lines[-1].lineno} {lines[-1].line}"] += 1

    def run(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """A function of torch, on tensors of either place."""
        with torch._C.DisableTorchFunction():
            name = getattr(func, "__name__", "")
            if (special := getattr(self, f"on_{name}", None)) is not None:
                return special(func, args, kwargs)
            flat, spec = tree_flatten((args, kwargs))
            there = any(isinstance(x, Pretended) for x in flat)
            if name == "__get__":
                return self.get(func, args[0])
            asked = kwargs.get("device")
            to = None if asked is None else torch.device(asked).type
            if not there and to != "cuda":
                if kwargs.get("pin_memory"):
                    return self.pin(func(*args, **(kwargs | {"pin_memory": False})))
                return func(*args, **kwargs)
            if to == "cuda" and not there and any(isinstance(x, Tensor) for x in flat):
                self.note(f"{name}, host to device")
            if to is None:
                self.check(name, flat)
                if there and name in WAITS:
                    self.note(f"{name}, which waits")
            elif to == "cpu" and there:
                self.note(f"{name}, device to host")
            flat = [CPU if isinstance(x, torch.device) or x is asked and asked is not None else x for x in flat]
            return self.real(func, *tree_unflatten(flat, spec), host=name in HOST or to == "cpu")

    def real(self, func: Callable[..., Any], args: Any, kwargs: Any, host: bool = False) -> Any:
        """The function on the numbers; what it gives is on the device unless `host`."""
        known = {}

        def inner(x: Any) -> Any:
            if isinstance(x, Pretended):
                known[id(x.inner)] = x
                return x.inner
            if isinstance(x, slice):  # of numbers that lie on the device: the host waits for them
                return slice(*(inner(i) for i in (x.start, x.stop, x.step)))
            return x

        out = func(*tree_map(inner, args), **tree_map(inner, kwargs))
        if host:
            return out
        back = lambda x: known[id(x)] if id(x) in known else Pretended(x)  # noqa: E731
        return tree_map(lambda x: back(x) if isinstance(x, Tensor) else x, out)

    def check(self, name: str, flat: list[Any]) -> None:
        """Refuse tensors of the host beside those of the device."""
        for x in flat:
            if isinstance(x, Tensor) and not isinstance(x, Pretended) and (x.dim() or name in SCALARS_TOO):
                raise Elsewhere(f"{name} of a tensor on the device and one {list(x.shape)} on the host")

    def get(self, func: Any, x: Any) -> Any:
        """An attribute."""
        attribute = func.__self__.__name__ if hasattr(func, "__self__") else ""
        if not isinstance(x, Pretended):
            return func(x)
        answers = {"device": CUDA, "is_cuda": True, "is_cpu": False, "is_meta": False}
        if attribute in answers:
            return answers[attribute]
        found = getattr(x.inner, attribute)
        return Pretended(found) if isinstance(found, Tensor) else found

    def pin(self, x: Tensor) -> Tensor:
        self.pinned.add(x.untyped_storage().data_ptr())
        return x

    # what tensors of both places may do

    def on_to(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, *rest = args
        x_there, target = isinstance(x, Pretended), kwargs.pop("device", None)
        plain = []
        for a in rest:
            if isinstance(a, Tensor):
                target, dtype = a, a.dtype
                plain.append(a.inner.dtype if isinstance(a, Pretended) else dtype)
            elif isinstance(a, (str, torch.device, int)) and not isinstance(a, bool):
                target = a
            else:
                plain.append(a)
        if isinstance(target, Tensor):
            there = isinstance(target, Pretended)
        else:
            there = x_there if target is None else torch.device(target).type == "cuda"
        source = x.inner if x_there else x
        if "dtype" in kwargs or plain:
            kwargs.pop("non_blocking", None)
            source_to = source.to(*plain, **kwargs)
        else:
            source_to = source
        if there == x_there:
            return x if source_to is source else Pretended(source_to) if there else source_to
        self.note("to, host to device" if there else "to, device to host")
        out = source_to.clone() if source_to is source else source_to
        return Pretended(out) if there else out

    def on___deepcopy__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Which is given all that was copied before, of either place."""
        x, memo = args
        return Pretended(func(x.inner, memo)) if isinstance(x, Pretended) else func(x, memo)

    def on_cpu(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.on_to(func, (args[0], "cpu"), {})

    def on_cuda(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        return self.on_to(func, (args[0], "cuda"), {})

    def on_copy_(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], Pretended) != isinstance(args[1], Pretended):
            self.note("copy_ between host and device")
        into = args[0].inner if isinstance(args[0], Pretended) else args[0]
        into.copy_(args[1].inner if isinstance(args[1], Pretended) else args[1])
        return args[0]

    def on___getitem__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, index = args
        self.indices(x, index)
        return self.real(func, args, kwargs, host=not isinstance(x, Pretended))

    def on___setitem__(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        x, index, value = args
        by_tensor = self.indices(x, index)
        masks = [
            i.dtype == torch.bool for i in (index if isinstance(index, tuple) else (index,)) if isinstance(i, Tensor)
        ]
        plain = not isinstance(value, Tensor) or not (isinstance(value, Pretended) or value.dim())
        if isinstance(x, Pretended) and plain and by_tensor and not all(masks):
            self.note("a number set by an index, host to device")  # torch makes a tensor of it, and copies that
        if isinstance(value, Tensor) and isinstance(value, Pretended) != isinstance(x, Pretended):
            if by_tensor and value.dim():
                raise Elsewhere("index_put_ of values that are elsewhere")
            self.note("set a slice between host and device")
        self.real(func, args, kwargs, host=True)

    def indices(self, x: Tensor, index: Any) -> bool:
        every = index if isinstance(index, tuple) else (index,)
        tensors = [i for i in every if isinstance(i, Tensor)]
        if isinstance(x, Pretended) and any(isinstance(i, (list, range, np.ndarray)) for i in every):
            self.note("an index, host to device")  # torch makes a tensor of it, and copies that
        for i in tensors:
            if isinstance(i, Pretended) and not i.dim() and i.dtype != torch.bool:
                self.note("an index that is a number, which waits")
            if isinstance(i, Pretended) and not isinstance(x, Pretended):
                raise Elsewhere("a tensor of the host, indexed by one on the device")
            if isinstance(x, Pretended) and not isinstance(i, Pretended):
                self.note("an index, host to device")
        return any(i.dim() for i in tensors)

    def on_tensor(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        there = torch.device(kwargs.pop("device", None) or "cpu").type == "cuda"
        made = func(*args, **kwargs)
        if there:
            self.note("torch.tensor, host to device")
        return Pretended(made) if there else made

    on_as_tensor = on_tensor

    def on_new_tensor(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], Pretended):
            self.note("new_tensor, host to device")
        return self.real(func, args, kwargs, host=not isinstance(args[0], Pretended))

    def filled(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """With a number that the host must know."""
        if any(isinstance(x, Pretended) and not x.dim() for x in (*args[1:], *kwargs.values())):
            self.note(f"{func.__name__} with a number on the device, which waits")
        return self.real(func, args, kwargs, host=not isinstance(args[0], Pretended))

    on_masked_fill = on_masked_fill_ = on_index_fill = on_index_fill_ = on_new_full = filled

    def on_pin_memory(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if isinstance(args[0], Pretended):
            raise Elsewhere("only memory of the host is pinned")
        return self.pin(args[0].clone(memory_format=torch.contiguous_format))

    def on_is_pinned(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        return not isinstance(args[0], Pretended) and args[0].untyped_storage().data_ptr() in self.pinned


def moved_by_steps(device: Device, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Has what each step moves that a graph would record, or waits for, added to this list."""
    run, found = Steps.run, list[dict[str, int]]()

    def watched(self: Steps) -> Tensor:
        device.moved.clear()
        logits: Tensor = run(self)
        found.append(dict(device.moved))
        return logits

    monkeypatch.setattr(Steps, "run", watched)
    return found


def there(x: Any) -> Any:
    """A tensor, or a model with all that is in it, on the pretended device."""
    if isinstance(x, Tensor):
        return x if isinstance(x, Pretended) else Pretended(x.detach())
    for module in x.modules():
        for held in (module._parameters, module._buffers):
            held.update({name: there(t) for name, t in held.items() if t is not None})
    return x


def fetch(field: Tensor, at: Tensor, device: torch.device) -> Tensor:
    """What the kernel does that reads the host's memory over the bus."""
    assert field.is_pinned() and isinstance(at, Pretended) and device.type == "cuda"
    return there(field[at.inner])


def fetch_kept(
    kept: Any, fields: dict[str, Tensor], at: Tensor, device: torch.device, remember: bool
) -> dict[str, Tensor]:
    """What its kernels do: no more than the reference, but that the host's memory is read over the bus."""
    from kvengine.kernels.fetch_kept import Kept, reference

    assert all(x.is_pinned() for x in fields.values()) and device.type == "cuda"
    inner = Kept({name: x.inner for name, x in kept.data.items()}, kept.ids.inner, kept.counts.inner)
    found = reference.fetch(inner, fields, at.inner, torch.device("cpu"), remember)  # type: ignore[attr-defined]
    return {name: there(x) for name, x in found.items()}


def pretended(monkeypatch: pytest.MonkeyPatch) -> Device:
    """The device, with what only a GPU could run replaced."""
    monkeypatch.setattr("kvengine.kernels.dispatch._best", lambda inputs, native: "reference")
    pytest.importorskip("triton", reason="the pages' fetching kernel is replaced where it is")
    monkeypatch.setattr("kvengine.kernels.fetch_pages.triton.fetch", fetch)
    monkeypatch.setattr("kvengine.kernels.fetch_kept.triton.fetch", fetch_kept)
    return Device(monkeypatch)
