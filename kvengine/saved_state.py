"""What a cache holds as JSON and tensors, and back: how `kvengine.saved` and `kvengine.prefix_beside` write it down.

State is numbers, text and tensors by the names of the attributes that they belong to; tensors are sections of the container.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvengine.cache import LayerCache
from kvengine.errors import CacheError, CorruptBitstream, IncompatibleCache, KVEngineError, StoreError
from kvengine.hf.layer import EngineLayer
from kvengine.joint import Joint
from kvengine.lane import Lane
from kvengine.nested import Nested
from kvengine.offload.cachegen import lossless
from kvengine.offload.cachegen.codec import DTYPES
from kvengine.offload.cachegen.coder import backend
from kvengine.offload.container import Container
from kvengine.pages import Pages
from kvengine.reach import Reach
from kvengine.saliency import Saliency
from kvengine.saved_beside import beside
from kvengine.sound import (
    check_fields,
    check_kinds,
    check_lengths,
    check_mask,
    check_pages,
    check_rows,
    check_tail,
    expect,
)
from kvengine.tail import Tail

RAW = {str(d).removeprefix("torch."): d for d in (
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, *DTYPES.values(),
)}  # fmt: skip
OUTSIDE = {  # attributes that are made anew, or saved under their own heading
    Lane: {
        "stack", "retention", "session", "layer", "layers", "number", "heads", "part", "inner", "tail", "pages", "marks",
        "plain", "rolls", "thins", "pays", "cached_rule", "reads", "launched", "beside", "repeated", "waits", "due", "tally",
        "scanned", "weighs",
    },
    LayerCache: {"stack", "layer", "layers", "session", "parts", "readers", "named"},
    Tail: {"shared", "scored", "ready", "paged_slots"},
    Nested: {"shared", "scored", "ready", "paged_slots"},
    Pages: {"pool", "page", "inner", "joint", "representation", "selection", "shared", "scored", "beside", "bounds", "views"},
}  # fmt: skip
LOOSE, FOLD = 1 << 26, 16
"""Bytes that any session may take, and how many times its own length: numbers that are all alike are coded in none, so a short
file could ask for all memory, and those of a text shrink to no less than half."""


class Writer:
    """Turns state into JSON; tensors become sections, named by number."""

    def __init__(self) -> None:
        self.sections: list[bytes] = []
        self.kinds: list[list[Any]] = []

    def whole_layer(self, layer: EngineLayer) -> dict[str, Any]:
        held, own = self.layer(layer.cache), beside(layer)
        return held | {"states": self.value(own)} if own else held

    def layer(self, cache: LayerCache) -> dict[str, Any]:
        lanes = [self.lane(part.lane) for part in cache.parts]
        return {"own": self.attributes(cache), "lanes": lanes}

    def lane(self, lane: Lane) -> dict[str, Any]:
        tail = lane.tail
        own = {name: x for name, x in vars(tail).items() if name not in OUTSIDE[Tail]}
        held = {name: x[:, tail.span] if isinstance(x, Tensor) else x for name, x in own.items()}
        return {
            "heads": lane.heads,
            "own": self.attributes(lane),
            "tail": self.value(held | {"start": 0, "end": len(tail)}),
            "pages": None if lane.pages is None else self.pages(lane.pages),
            "tally": [lane.tally.computed, lane.tally.every],
        }

    def pages(self, pages: Pages) -> dict[str, Any]:
        """Only pages in use, numbered anew."""
        used = torch.tensor(sorted(set(pages.pages_in_use())), dtype=torch.long, device=pages.table.device)
        own = {**{n: x for n, x in vars(pages).items() if n not in OUTSIDE[Pages]}, "_table": pages.renumbered(used)}
        joint = pages.joint
        return {
            "own": self.value(own),
            "fields": self.value(pages.pool.read(used) if pages.pool.shelves else {}),
            "joint": None if joint is None else self.value({n: getattr(joint, n) for n in ("fields", "dtype", "late")}),
        }

    def attributes(self, thing: object) -> Any:
        outside = OUTSIDE[type(thing)]
        return self.value({name: x for name, x in vars(thing).items() if name not in outside})

    def value(self, x: Any) -> Any:
        """JSON for a value. Raises CacheError for what cannot be saved."""
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, Tensor):
            return {"tensor": self.tensor(x)}
        if isinstance(x, Reach):
            return self.value(x.positions())
        if isinstance(x, list | tuple):
            return {"list" if isinstance(x, list) else "tuple": [self.value(item) for item in x]}
        if isinstance(x, dict) and all(isinstance(name, str) for name in x):
            return {"dict": {name: self.value(item) for name, item in x.items()}}
        if isinstance(x, dict) and list(x) == list(range(len(x))):  # states of linear attention
            return {"numbered": [self.value(item) for item in x.values()]}
        if isinstance(x, torch.dtype):
            return {"dtype": str(x).removeprefix("torch.")}
        if isinstance(x, torch.device):
            return {"device": True}  # wherever it is loaded
        if isinstance(x, Saliency):
            return {"saliency": self.value({f.name: getattr(x, f.name) for f in fields(x)})}
        raise CacheError(f"a session with a {type(x).__name__} in it cannot be saved")

    def tensor(self, x: Tensor) -> int:
        kind = str(x.dtype).removeprefix("torch.")
        if kind not in RAW:
            raise CacheError(f"a session with a tensor of {x.dtype} cannot be saved")
        x = x.detach().cpu().contiguous()
        if kind in DTYPES and x.ndim >= 2 and x.numel():
            body = lossless.encode(_folded(x), backend())
        else:
            body = x.flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""
        self.sections.append(body)
        self.kinds.append([kind, *x.shape])
        return len(self.kinds) - 1


def _folded(x: Tensor) -> Tensor:
    """As [head token dim], which the codec takes."""
    return x.reshape(1, -1, x.shape[-1])


class Reader:
    """Undoes `Writer`, on `device`, which is each layer's."""

    device: torch.device

    def __init__(self, held: Container, kinds: list[list[Any]]) -> None:
        self.held, self.kinds = held, kinds
        self.left = LOOSE + FOLD * held.size  # bytes that tensors may still take

    def layer(self, cache: LayerCache, state: dict[str, Any]) -> None:
        own = self.value(state["own"])
        check_kinds({"sequences": 0, "heads": 0}, own)
        if state["lanes"]:
            firsts = [self.value(lane["own"])["first"] for lane in state["lanes"]]
            check_rows(own["sequences"], own["heads"], [lane["heads"] for lane in state["lanes"]], firsts)
            empty = self.empty(own, state["lanes"])
            if "inner" in own:
                cache.inner = own["inner"]
            cache.open(*empty)
        if len(cache.parts) != len(state["lanes"]):
            raise IncompatibleCache(f"the policy makes {len(cache.parts)} lanes here, {len(state['lanes'])} were saved")
        set_attributes(cache, own)
        for part, saved in zip(cache.parts, state["lanes"], strict=True):
            self.lane(part.lane, saved)

    def empty(self, own: dict[str, Any], lanes: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        """Keys and values [seq head 0 dim] as the layer brings them, to open its lanes with."""
        tail = self.value(lanes[0]["tail"])
        shape = own["sequences"], own["heads"], 0
        wide = tail["v"].shape[-1] if "v" in tail else own["inner"]
        return tail["k"].new_empty(*shape, tail["k"].shape[-1]), tail["k"].new_empty(*shape, wide)

    def lane(self, lane: Lane, state: dict[str, Any]) -> None:
        if state["heads"] != lane.heads:
            raise IncompatibleCache(f"the policy gives a lane {lane.heads} heads here, {state['heads']} were saved")
        own = self.value(state["own"])
        own = {"former": own["begin"]} | own  # which earlier versions did not save
        set_attributes(lane, own)
        lane.tally.computed, lane.tally.every = map(float, state.get("tally", (0, 0)))  # neither did they save this
        lane.saw = None if own["saw"] is None else Reach(None, None, own["saw"], 1)
        # Under autocast values have another dtype than keys, or not in all lanes.
        if "v" in (tail := self.value(state["tail"])) and tail["v"].dtype in DTYPES.values():
            lane.tail.v = lane.tail.v.to(tail["v"].dtype)
        set_attributes(lane.tail, tail)
        check_tail(lane.tail)
        slots = len(lane.tail) if lane.stack.paged else lane.seen  # where nothing is sealed, lengths are not kept up
        check_lengths(lane.lengths, len(lane.first), slots)
        if state["pages"] is not None:
            self.pages(lane, state["pages"])
            lane.tail.paged_slots = lane.alongside()

    def pages(self, lane: Lane, state: dict[str, Any]) -> None:
        saved = self.value(state["fields"])
        count = check_fields(saved)
        if count and lane.stack.representation.codec == "zipcache":
            check_mask(saved)
        lane.pages = lane.new_pages(self.joint(lane, state["joint"]))
        at = lane.pages.pool.put(saved) if count else None
        set_attributes(lane.pages, self.value(state["own"]))
        check_pages(lane.pages, count)
        if not count:  # of rows whose pages others had, all columns are without one
            lane.pages.release()
        if at is not None:
            table = lane.pages._table
            lane.pages._table = torch.where(table < 0, table, at.to(table)[table.clamp(min=0).long()])

    def joint(self, lane: Lane, state: Any) -> Joint | None:
        if state is None:
            return None
        if lane.session.rope is None:
            raise IncompatibleCache("the session keeps unrotated keys, but this model's rotation is not known")
        saved = self.value(state)
        check_fields(saved["fields"])
        return Joint(lane.stack.representation, lane.session.rope, lane.heads, **saved)

    def value(self, x: Any) -> Any:
        if not isinstance(x, dict):
            return x
        ((kind, inside),) = x.items()
        match kind:
            case "tensor":
                return self.tensor(inside)
            case "list":
                return [self.value(item) for item in inside]
            case "tuple":
                return tuple(self.value(item) for item in inside)
            case "dict":
                return {name: self.value(item) for name, item in inside.items()}
            case "numbered":
                return dict(enumerate(map(self.value, inside)))
            case "dtype":
                return RAW[inside]
            case "device":
                return self.device
            case "saliency":
                return Saliency(**self.value(inside))
        raise IncompatibleCache(f"the session holds a {kind!r}, which this version does not know")

    def tensor(self, number: int) -> Tensor:
        kind, *shape = self.kinds[number]
        dtype, body = RAW[kind], self.held.section(number)
        size = 1
        for side in shape:
            size *= int(side)
        self.left -= size * dtype.itemsize
        expect(self.left >= 0, f"{self.held.size} bytes cannot be all of its tensors")
        if dtype in DTYPES.values() and len(shape) >= 2 and size:
            if len(body) < shape[-1]:
                raise CorruptBitstream(f"a section of {len(body)} bytes cannot hold {shape}")
            out = torch.empty(shape, dtype=dtype)
            lossless.decode(body, _folded(out), backend())
        elif len(body) != size * dtype.itemsize:
            raise CorruptBitstream(f"a tensor {shape} of {kind} cannot have {len(body)} bytes")
        else:
            out = (
                torch.frombuffer(bytearray(body), dtype=dtype).reshape(shape)
                if size
                else torch.empty(shape, dtype=dtype)
            )
        return out.to(self.device)


def set_attributes(thing: object, saved: dict[str, Any]) -> None:
    """Gives an object its saved attributes. Raises IncompatibleCache unless they are those it has."""
    have = set(vars(thing)) - OUTSIDE[type(thing)]
    if have != set(saved):
        raise IncompatibleCache(
            f"a {type(thing).__name__} was saved with other attributes ({sorted(have ^ set(saved))}): the session "
            "comes from another version of the engine"
        )
    check_kinds({name: vars(thing)[name] for name in have}, saved)
    vars(thing).update(saved)


@contextmanager
def garbled(what: str | Path) -> Iterator[None]:
    """Say of what cannot be read that it cannot, whatever happens on the way."""
    try:
        yield
    except StoreError as error:
        raise type(error)(f"{what}: {error}") from error
    except KVEngineError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError, MemoryError) as error:
        raise CorruptBitstream(f"{what} lacks or garbles a part of the session: {error!r}") from error
