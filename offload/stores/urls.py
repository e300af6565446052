"""A store from one line of text: a folder, redis://, or whatever URL obstore understands."""

from __future__ import annotations

import importlib
from typing import Any

from kvengine.errors import StoreError
from kvengine.offload.stores.backend import Backend
from kvengine.offload.stores.files import Files
from kvengine.offload.stores.objects import Objects
from kvengine.offload.stores.resp import Resp


def backend(url: str, *, cap: int | None = None, **options: Any) -> Backend:
    """The store at `url`.

    A path or file:// gives Files; redis://, rediss://, unix:// (Redis or Valkey) give Resp; s3://, gs://, az://,
    memory:// give Objects, with `options` passed to `obstore.store.from_url`. Raises StoreError.
    """
    scheme, _, rest = url.partition("://")
    if not rest and scheme == url:
        return Files(url, cap=cap, **options)
    match scheme:
        case "file":
            return Files(rest, cap=cap, **options)
        case "redis" | "rediss" | "unix":
            return Resp(url, **options)
        case "s3" | "gs" | "gcs" | "az" | "memory":
            return Objects(_bucket(url, options), cap=cap)
    raise StoreError(
        f"no store is known for {url!r}: give a folder, file://, redis://, s3://, gs://, az:// or memory://"
    )


def _bucket(url: str, options: dict[str, Any]) -> Any:
    try:
        store = importlib.import_module("obstore.store")
    except ImportError as error:
        raise StoreError("object stores need obstore: pip install 'kvengine[stores]'") from error
    return store.MemoryStore() if url.startswith("memory://") else store.from_url(url, **options)
