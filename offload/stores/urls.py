"""A store from one line of text: a folder, redis://, or whatever URL obstore understands."""

from __future__ import annotations

import importlib
import os
import re
from datetime import timedelta
from typing import Any
from urllib.parse import quote
from urllib.request import url2pathname

from kvengine.errors import KVEngineError, StoreError
from kvengine.offload.stores.backend import Backend
from kvengine.offload.stores.files import Files
from kvengine.offload.stores.objects import Objects
from kvengine.offload.stores.reached import SECRET, UNQUOTED, gist
from kvengine.offload.stores.reached import shown as shown
from kvengine.offload.stores.resp import Resp

SERVERS, BUCKETS = ("redis", "rediss", "unix"), ("s3", "gs", "gcs", "az", "memory")
VARIABLE = re.compile(r"\$\{(\w+)\}")


def backend(url: str, *, cap: int | None = None, **options: Any) -> Backend:
    """The store at `url`.

    A path or file:// gives Files; redis://, rediss://, unix:// (Redis or Valkey) give Resp; s3://, gs://, az://,
    memory:// give Objects, with `options` passed to `obstore.store.from_url`. A path has a separator in it, as in ./kv; a
    name alone is one only if there is such a folder, since more often it is a server without its scheme. In what says who
    is asking, ${NAME} stands for a variable of the environment: redis://me:${REDIS_PASSWORD}@host:6379/0.

    Raises StoreError for what is no store, or one that cannot be opened, or a cap where the server has its own.
    """
    scheme, place = parse(url)
    if cap is not None and (type(cap) is not int or cap < 0):
        raise StoreError(f"cap={cap!r} is not a number of bytes")
    try:
        if not scheme:
            return Files(place, cap=cap, **options)
        if scheme in BUCKETS:
            return Objects(_bucket(f"{scheme}://{place}", options), cap=cap)
        if cap is not None:
            raise StoreError("a Redis or Valkey server limits itself (maxmemory); leave cap out")
        return Resp(filled(f"{scheme}://{place}"), **options)
    except (KVEngineError, TypeError):
        raise
    except Exception as error:  # each client library has errors of its own
        raise StoreError(f"the store at {shown(url)!r} cannot be used: {gist(error)}") from error


def parse(url: str) -> tuple[str, str]:
    """(scheme, what follows it), or ("", a path) for a folder. Raises StoreError for what is neither."""
    scheme, mark, place = url.partition("://")
    scheme = scheme.lower()
    if not mark:
        return "", _folder(url)
    if scheme == "file":
        if not place.startswith("/"):
            raise StoreError(f"{url!r} names a host; a folder is file:///with/its/whole/path")
        return "", url2pathname(place)
    if scheme not in (*SERVERS, *BUCKETS):
        raise StoreError(
            f"no store is known for {shown(url)!r}: give a folder, file://, redis://, s3://, gs://, az:// or memory://"
        )
    if scheme in SERVERS and re.match(UNQUOTED, place):
        raise StoreError(f"{shown(url)!r} has a password in which # must be written as %23, and ? as %3F")
    number = place.partition("?")[0].partition("/")[2]
    if scheme in ("redis", "rediss") and number and not number.isdecimal():
        raise StoreError(f"{shown(url)!r} must end in the number of a database, as in redis://host:6379/0")
    return scheme, place


def _folder(path: str) -> str:
    first = re.split(r"[/\\]", path)[0]
    if not path or "\0" in path:
        raise StoreError(f"{path!r} is no store: give a folder, or a URL such as redis://host:6379/0")
    if len(first) > 1 and ":" in first:
        raise StoreError(
            f"{path!r} is no URL and hardly a path: write redis://host:6379/0, or ./ before a folder's name"
        )
    whole = os.path.expanduser(path)
    if first == path and path not in (".", "..", "~") and not os.path.isdir(whole):
        raise StoreError(
            f"{path!r} has no scheme and is no folder here: write redis://{path}:6379/0 for a server, ./{path} for a new folder"
        )
    return whole


def filled(url: str) -> str:
    """A URL with what the environment says in place of its ${NAME}s. Raises StoreError where it says nothing."""

    def value(name: re.Match[str]) -> str:
        if name[1] not in os.environ:
            raise StoreError(f"{shown(url)!r} asks for {name[0]}, but the environment has no {name[1]}; set it")
        return quote(os.environ[name[1]], safe="")

    return SECRET.sub(lambda part: VARIABLE.sub(value, part[0]), url)


def tells(url: str) -> bool:
    """Whether a server's URL has a password in it, instead of a variable's name."""
    if url.partition("://")[0].lower() not in SERVERS:
        return False
    given = [x[0] if url[: x.start()].endswith("password=") else x[0].partition(":")[2] for x in SECRET.finditer(url)]
    return any(VARIABLE.sub("", secret) for secret in given)


def _bucket(url: str, options: dict[str, Any]) -> Any:
    try:
        store = importlib.import_module("obstore.store")
    except ImportError as error:
        raise StoreError("object stores need obstore: pip install 'kvengine[stores]'") from error
    if url.startswith("memory://"):
        return store.MemoryStore()
    patience = {"retry_config": {"max_retries": 2, "retry_timeout": timedelta(seconds=10)}}  # a cache is not worth more
    return store.from_url(url, **{**patience, **options})
