"""A live session in a file: everything an `EngineCache` holds, under any policy, to go on with later or elsewhere.

    save(cache, "chat.kv", model)            cache = load(model, "chat.kv")

What is saved is state, not code: numbers, text and tensors by the names of the attributes they belong to, in the
container of `kvengine.offload`. Policies are written as the stack's text and made anew; tensors of 16- and 32-bit
floats go through the lossless codec, so the restored session continues with the same bits. Of sealed pages, those that
some table still names are kept, wherever they were placed. Nothing is unpickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from kvengine.errors import CacheError, CorruptBitstream, IncompatibleCache, ModelError
from kvengine.fingerprint import check_maker, identity
from kvengine.hf.cache import EngineCache
from kvengine.hf.devices import layer_devices
from kvengine.hf.held_window import HeldWindow
from kvengine.hf.layer import EngineLayer
from kvengine.hf.rewind import check_between
from kvengine.offload.cachegen import Identity
from kvengine.offload.cachegen.codec import check_identity
from kvengine.offload.container import parts, plain, read_file
from kvengine.offload.stores.filesystem import replace_file
from kvengine.saved_beside import beside, check_same_rows, restore, restore_shift
from kvengine.saved_state import Reader, Writer, garbled
from kvengine.sound import check_kinds
from kvengine.text import Text

FORMAT = 1
SESSION = ("prompt_end", "following", "dense", "positions", "without_ids")


def save(cache: EngineCache, path: str | Path, model: nn.Module, *, extra: Mapping[str, Any] | None = None) -> int:
    """Writes a session to a file, atomically and durably; returns the bytes written.

    Args:
        cache: what to save, between two calls of the model. What was recorded to roll back to must be committed.
        path: the file; one that exists is replaced.
        model: the model the cache belongs to.
        extra: anything else, as plain JSON (the tokens so far, for instance).

    Raises:
        CacheError: the cache is in the middle of something, or was while it was written (another thread's pass); a pass over it
            broke off; it is of another model; or `extra` is not plain JSON.
        PolicyError: its policy is of the caller's own, and has no name that `load` would find.
        ModelError: `model` is none.
        OSError: of the file system; nothing is left half-written.
    """
    if not isinstance(cache, EngineCache):
        raise CacheError(f"a session is saved from an EngineCache, not from a {type(cache).__name__}")
    check_module(model)
    check_maker(cache, model, "a file that names")
    seen = check_between(cache)
    for layer in (*cache.engines, *(layer for layer in cache.others if isinstance(layer, HeldWindow))):
        layer.check_free()  # type: ignore[attr-defined]
    if any(part.lane.marks for layer in cache.engines for part in layer.parts):
        raise CacheError("the cache remembers states to roll back to; call cache.commit() before saving it")
    told, cache.unread = plain({} if extra is None else extra, "extra"), None
    cache.thaw()  # to read what lies below the device moves it up
    out = Writer()
    header = {
        "kind": "session",
        "format": FORMAT,
        "identity": identity(model).as_json(),
        "stack": cache.stack.lasting(),
        "session": {name: getattr(cache.session, name) for name in SESSION},
        "layers": [
            out.whole_layer(layer) if isinstance(layer, EngineLayer) else out.value(beside(layer))
            for layer in cache.layers
        ],
        "extra": told,
        "text": out.value(cache.session.text.state()),
        "shift": out.value(cache.session.shifts.at(seen)),
    }
    pieces = list(parts({**header, "tensors": out.kinds}, out.sections))  # one buffer of them would be as large again
    if check_between(cache) != seen:
        raise CacheError(
            "another thread ran the model over this cache meanwhile. Nothing was saved; save between passes"
        )
    replace_file(Path(path), *pieces)
    return sum(map(len, pieces))


def load(model: nn.Module, path: str | Path) -> EngineCache:
    """The session in a file, on the devices of the (patched) model.

    Raises:
        CorruptBitstream: the file is damaged.
        IncompatibleCache: it was saved for another model, or by another version of the engine.
        PolicyError: its policy does not exist here.
        ModelError: the model is not patched, or is none.
        OSError: there is no such file.
    """
    check_module(model)
    held = read_file(path)
    header = held.header
    if header.get("kind") != "session" or header.get("format") != FORMAT:
        found = f"{header.get('kind')!r} of format {header.get('format')!r}"
        raise IncompatibleCache(f"{path} holds {found}, not a session of format {FORMAT}")
    with garbled(path):
        check_identity(Identity(**header["identity"]), identity(model))
        cache = EngineCache(model, header["stack"])  # type: ignore[arg-type]
        cache.thaw()
        source = Reader(held, header["tensors"])
        known = {"without_ids": False} | header["session"]  # which earlier versions did not save
        state = {name: known[name] for name in SESSION}
        check_kinds({name: getattr(cache.session, name) for name in SESSION}, state)
        vars(cache.session).update(state)
        devices = layer_devices(model, len(cache.layers))
        for layer, own, device in zip(cache.layers, header["layers"], devices, strict=True):
            source.device = device
            if isinstance(layer, EngineLayer):
                source.layer(layer.cache, own)
                layer.is_initialized = bool(layer.cache.parts)
                own = own["states"] if beside(layer) else None
            if own is not None:
                restore(layer, source.value(own))
        check_same_rows(cache)
        source.device = devices[0]
        if (text := source.value(header.get("text"))) is not None:
            cache.session.text = Text.of(text)
        restore_shift(cache, source.value(header.get("shift")))
    return cache


def check_module(model: nn.Module) -> None:
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise ModelError(f"a session belongs to a patched model, not to a {type(model).__name__}")


def extra(path: str | Path) -> dict[str, Any]:
    """What was saved beside the session. Raises CorruptBitstream or IncompatibleCache."""
    found = read_file(path).header.get("extra", {})
    if not isinstance(found, dict):
        raise CorruptBitstream(f"{path} has a {type(found).__name__} beside the session, not an object")
    return found
