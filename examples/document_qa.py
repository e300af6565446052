"""A service that answers questions on long documents, and computes each document once.

    python examples/document_qa.py [--model bundled] [--store FOLDER|redis://…|s3://…] [--port 8000]

    curl --data-binary @report.txt localhost:8000/documents            {"id": "3f…", "tokens": 8123, "stored": true}
    curl -d '{"question": "Who won?"}' localhost:8000/documents/3f…/questions
    curl -X DELETE localhost:8000/documents/3f…                        its text, and what was computed of it alone
    curl localhost:8000/health

Keys and values of a document go to a store, in chunks. A question fetches them, enters them into a cache under the policy
of your choice, and only the question is computed, also after a restart or on another machine with the same store. A store
that is down costs time, not answers. Whoever reaches the port may ask about every document whose id they know: put what
knows your users in front. Needs `pip install starlette uvicorn`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteriaList

try:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
except ModuleNotFoundError as missing:
    raise SystemExit(f"{missing}: pip install starlette uvicorn") from None

import kvengine
from kvengine.evals import loading
from kvengine.offload.stores import Store
from kvengine.offload.stores.filesystem import replace_file
from kvengine.offload.stores.urls import backend
from kvengine.prefix import Prefix

USE = "POST a text to /documents, a question to /documents/ID/questions; DELETE /documents/ID; GET /health"
ROOM = 1024  # tokens for a question and its answer
LASTING = 3600.0  # seconds for which /health tells what went wrong with the store; its counts tell of all time
NAME = re.compile(r"[0-9a-f]{16}")


@dataclass
class Library:
    """Documents (as text files) and the model that reads them. One request computes at a time."""

    model: Any
    tokenizer: Any
    prefix: Prefix
    folder: Path
    policy: str = "full"
    max_bytes: int = 4 << 20
    max_tokens: int = 8192
    max_documents: int = 1000
    lock: threading.Lock = field(default_factory=threading.Lock)
    failed: dict[str, float] = field(default_factory=dict)  # what went wrong with the store, and when; the newest last
    control: frozenset[int] = field(init=False)  # tokens that must not come from a client's text
    # what `max_tokens` of the longest tokens spell: counting those of more takes seconds
    max_characters: int = field(init=False)

    def __post_init__(self) -> None:
        names = self.tokenizer
        ends = {names.bos_token_id, names.eos_token_id, names.pad_token_id}
        special = {*names.all_special_ids, *(i for i, token in names.added_tokens_decoder.items() if token.special)}
        self.control = frozenset(special - ({names.unk_token_id} - ends))
        names.split_special_tokens = True  # "<|im_end|>" in a text is these ten characters
        names("")  # here and not by several clients at once: the setting is passed on at the first use
        longest = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        self.max_tokens = min(self.max_tokens, (longest or 1 << 40) - ROOM)
        if self.max_tokens < 1:
            raise ValueError(f"the model reads {longest} tokens, and {ROOM} are for question and answer; take another")
        self.max_characters = self.max_tokens * max(map(len, names.get_vocab()))
        for draft in self.folder.glob("*.part"):
            if time.time() - draft.stat().st_mtime > 3600:
                draft.unlink(missing_ok=True)  # of a service that was killed

    def read(self, text: str, *, begins: bool) -> Tensor:
        """Token ids [1, token] of a client's text, all of it text. Raises HTTPException 400 where that cannot be done.

        Args:
            text: whatever came.
            begins: whether it is the start of the prompt, which gets the tokens that the tokenizer puts around one.
        """
        added = self.tokenizer("", add_special_tokens=begins).input_ids
        ids: Tensor = self.tokenizer(text, return_tensors="pt", add_special_tokens=begins, verbose=False).input_ids
        strange = Counter(ids[0].tolist()) - Counter(added)
        if spelled := self.tokenizer.convert_ids_to_tokens(sorted(self.control & strange.keys())):
            raise HTTPException(
                400, f"the text has {', '.join(spelled)} in it, which this model cannot read as plain text; take it out"
            )
        return ids.long()

    def add(self, body: bytes) -> dict[str, Any]:
        """Read a document once, and store what was computed. Raises HTTPException 400, 413 or 507."""
        try:  # Windows puts a mark before a text, which is none of it; of UTF-16 without one, NUL tells
            text, wrong = body.decode("utf-8-sig"), body.find(b"\0")
        except UnicodeDecodeError as error:
            wrong = error.start
        if wrong >= 0:
            raise HTTPException(400, f"the document is not UTF-8 text (byte {wrong}); convert it first")
        if not text.strip():
            raise HTTPException(400, "the document is empty; send its text as the body")
        if len(text) > self.max_characters:
            raise HTTPException(413, f"{len(text)} characters, more than {self.max_tokens} tokens can be; split it")
        ids = self.read(text, begins=True)
        if ids.shape[1] > self.max_tokens:
            raise HTTPException(413, f"the document has {ids.shape[1]} tokens, at most {self.max_tokens} fit; split it")
        name = hashlib.sha256(body).hexdigest()[:16]
        with self.lock, torch.no_grad():
            self.write(name, body)
            cache = self.prefix.fetch(ids, "full")
            known = cache.seen
            self.prefix.compute(ids, cache)
            stored = self.stored(ids)  # `poll` hands out every finished job: nobody else may have one under way
        return {"id": name, "tokens": ids.shape[1], "already_known": known, **stored}

    def write(self, name: str, body: bytes) -> None:
        """Keep a text: whole or not at all, whatever stops the service or the machine. Raises HTTPException 507."""
        file = self.folder / f"{name}.txt"
        if not file.exists() and len(list(self.folder.glob("*.txt"))) >= self.max_documents:
            raise HTTPException(507, f"{self.max_documents} documents are kept, which is all; DELETE one of them first")
        try:
            replace_file(file, body)
        except OSError as error:
            raise HTTPException(507, f"the document cannot be kept: {error.strerror}; what was there stays") from error

    def text(self, name: str) -> str:
        """A document to the byte as it came; reading as text would turn \\r\\n into \\n. Raises HTTPException 404, 500, 503."""
        missing = HTTPException(404, f"there is no document {name[:32]!r}; POST it to /documents first")
        if not NAME.fullmatch(name):
            raise missing
        try:
            body = (self.folder / f"{name}.txt").read_bytes()
        except FileNotFoundError:
            raise missing from None
        except OSError as error:
            raise HTTPException(503, f"the text of {name} cannot be read: {error.strerror}; ask again") from error
        if hashlib.sha256(body).hexdigest()[:16] != name:
            raise HTTPException(500, f"the text of {name} is not what was sent; POST the document again")
        return body.decode("utf-8-sig")

    def delete(self, name: str) -> dict[str, Any]:
        """Forget a document: its text, and what was computed of it alone. Raises HTTPException 404 or 503."""
        file = self.folder / f"{name}.txt"
        with self.lock:
            try:
                text = self.text(name)
            except HTTPException as error:
                if error.status_code != 500:
                    raise
                file.unlink()  # damaged: only the text would tell where the store has what was computed of it
                told = "its text was damaged: the store keeps its chunks"
                return {"id": name, "deleted": True, "chunks": 0, "warning": told}
            ids, others = self.read(text, begins=True), self.others(name, text)
            keys, every = (self.prefix.keys(ids, beside=both) for both in (False, True))
            failures = self.failures
            gone = self.prefix.store.delete([key for key in every if key not in others])
            if self.failures > failures:  # the text stays, as without it nobody knows what is to go
                raise HTTPException(503, "the store cannot be reached and has what was computed of it; DELETE it again")
            file.unlink()
        return {"id": name, "deleted": True, "chunks": sum(gone[: len(set(keys) - others)])}

    def others(self, name: str, text: str) -> set[str]:
        """Keys of what was computed of documents that begin as this text does: they share chunks with it."""
        found: set[str] = set()
        for other in {file.stem for file in self.folder.glob("*.txt")} - {name}:
            with contextlib.suppress(HTTPException):  # damaged, or no document
                if (whole := self.text(other)).startswith(text[:64]):  # no chunk has fewer characters
                    found.update(self.prefix.keys(self.read(whole, begins=True), beside=True))
        return found

    def problems(self) -> list[str]:
        """The last five things that went wrong with the store within an hour, each once. Who asks again is told again."""
        for event in self.prefix.store.events():
            if event.kind not in ("miss", "skipped"):  # skipped: what failed before was not tried again yet
                self.failed.pop(event.detail, None)
                self.failed[event.detail] = event.when
        newest = list(self.failed.items())[-5:]
        self.failed = {detail: when for detail, when in newest if time.time() - when < LASTING}
        return list(self.failed)

    @property
    def failures(self) -> int:
        counts = self.prefix.store.counts
        return counts["failed"] + counts["skipped"]

    def stored(self, ids: Tensor) -> dict[str, Any]:
        """Whether what was submitted has reached the store, and is still there: a store that is full makes room."""
        store, chunks = self.prefix.store, self.prefix.keys(ids)
        # Windows and states after the last of them, where the model has such: without, no question can go on from there.
        keys = [*chunks, *self.prefix.keys(ids, beside=True)[len(chunks) :][-1:]]
        store.drain()
        down = [done for done in store.poll() if not all(done.ok)]
        kept = store.lookup(keys, self.prefix.timeout)
        if kept == len(keys):
            return {"stored": True}
        had = f"keeps {kept} of {len(keys)} chunks of it"
        why = "cannot be reached or takes no more (see /health)" if down else had
        return {"stored": False, "warning": f"the store {why}; questions work, and the rest is computed for each"}

    def ask(self, name: str, question: str, most: int, gone: threading.Event | None = None) -> dict[str, Any]:
        """Answer a question on a document, unless the client is `gone`. Raises HTTPException 404, 413, 500 or 503."""
        begin = time.perf_counter()
        document = self.read(self.text(name), begins=True)
        asked = self.read(question, begins=False)
        ids = torch.cat([document, asked], 1)
        if (tokens := document.shape[1]) > self.max_tokens:  # it was kept for a model that reads more
            raise HTTPException(413, f"the document has {tokens} tokens, at most {self.max_tokens} fit; split it")
        if asked.shape[1] > (room := self.max_tokens + ROOM - most - tokens):
            raise HTTPException(413, f"the question has {asked.shape[1]} tokens; at most {room} fit")
        with self.lock:
            cache = self.prefix.fetch(ids, self.policy)
            reused = cache.seen
            left = lambda so_far, _: torch.full((1,), gone is not None and gone.is_set(), device=so_far.device)  # noqa: E731
            out = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=most, do_sample=False,
                stopping_criteria=StoppingCriteriaList([left]),
            )  # fmt: skip
            stats = cache.stats()
        return {
            "answer": self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True).strip(),
            "prompt_tokens": ids.shape[1],
            "reused_tokens": reused,
            "bytes_held": stats.bytes_held,
            "seconds": round(time.perf_counter() - begin, 4),
        }


async def limited(request: Request, most: int) -> bytes:
    """The body, read only as far as it may go, and as long. Raises HTTPException 408, 413 or 415."""
    kind, packed = (request.headers.get(name, "").lower() for name in ("content-type", "content-encoding"))
    if kind.startswith("multipart/") or packed not in ("", "identity"):
        raise HTTPException(415, "send the text itself, as curl --data-binary @FILE does: no form, not packed")
    body = bytearray()
    try:
        async with asyncio.timeout(request.app.state.patience):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise HTTPException(413, f"the body has more than {most} bytes; split the text")
    except TimeoutError:
        raise HTTPException(408, "the body did not come in time; send it again") from None
    except ClientDisconnect:
        raise HTTPException(408, "the client left") from None
    return bytes(body)


def admitted(serve: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The same, unless as many requests as may be are served or wait: each may hold a body. Raises HTTPException 503."""

    async def one(request: Request) -> Response:
        if (places := request.app.state.places).locked():
            raise HTTPException(503, "too many requests wait already; ask again in a minute")
        async with places:
            return await serve(request)

    return one


async def turn(request: Request, work: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What `work` returns, once everybody before is served, and if the client is still there then."""
    async with request.app.state.turn:
        if await request.is_disconnected():
            raise HTTPException(408, "the client left")
        return await run_in_threadpool(work, *given)


async def watch(request: Request, gone: threading.Event) -> None:
    """Set `gone` when the client leaves: others wait for what nobody would read."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)
    gone.set()


async def add(request: Request) -> Response:
    library: Library = request.app.state.library
    body = await limited(request, library.max_bytes)
    return JSONResponse(await turn(request, library.add, body), 201)


async def delete(request: Request) -> Response:
    return JSONResponse(await turn(request, request.app.state.library.delete, request.path_params["name"]))


async def ask(request: Request) -> Response:
    library: Library = request.app.state.library
    try:
        given = json.loads(await limited(request, 65536))
        question, most = given["question"], given.get("max_new_tokens", 64)
        if not isinstance(question, str) or type(most) is not int:
            raise TypeError(f"a question of {type(question).__name__}, {type(most).__name__} tokens")
        if strange := given.keys() - {"question", "max_new_tokens"}:
            raise TypeError(f"unknown: {', '.join(sorted(strange))}")
        question.encode()  # half of a surrogate pair is no text
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HTTPException(
            400, 'expected JSON like {"question": "…", "max_new_tokens": 64}, with nothing else in it'
        ) from error
    if not question.strip() or not 1 <= most <= 512:
        raise HTTPException(400, "the question must not be empty, and max_new_tokens lies between 1 and 512")
    gone = threading.Event()
    watching = asyncio.create_task(watch(request, gone))
    try:
        return JSONResponse(await turn(request, library.ask, request.path_params["name"], question, most, gone))
    finally:
        watching.cancel()


async def health(request: Request) -> Response:
    library: Library = request.app.state.library
    store = {"counts": dict(library.prefix.store.counts), "problems": library.problems()}
    documents = len(list(library.folder.glob("*.txt")))
    return JSONResponse({"policy": library.policy, "documents": documents, "store": store})


async def failed(request: Request, error: Exception) -> Response:
    """Every error is JSON with a sentence that says what to do."""
    known = isinstance(error, HTTPException)
    told = error.detail if known else "internal error; the service's log says more"
    if told in ("Not Found", "Method Not Allowed"):  # the framework's own, for a path or a method that is not there
        told = f"{told}: {USE}"
    return JSONResponse({"error": told}, error.status_code if known else 500)


def application(library: Library, patience: float = 60.0, most: int = 100) -> Starlette:
    """The service as an ASGI application. `patience`: seconds that a body may take to come; `most`: requests at once."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        app.state.library, app.state.patience = library, patience
        app.state.turn, app.state.places = asyncio.Lock(), asyncio.Semaphore(most)
        yield
        library.prefix.store.close()

    routes = [
        Route("/documents", admitted(add), methods=["POST"]),
        Route("/documents/{name}/questions", admitted(ask), methods=["POST"]),
        Route("/documents/{name}", admitted(delete), methods=["DELETE"]),
        Route("/health", health),
    ]
    made = Starlette(routes=routes, lifespan=lifespan, exception_handlers={HTTPException: failed, 500: failed})
    made.router.redirect_slashes = False  # a redirection has no body, and says nothing to curl
    return made


def library(model: str, store: str, folder: Path, policy: str, *, cap: int | None = None, **limits: int) -> Library:
    """Load a model, patch it, and open the store. Raises ValueError for a limit below 1."""
    if small := [name for name, most in limits.items() if most < 1]:
        raise ValueError(f"{small[0]}={limits[small[0]]} lets nothing in; give 1 or more")
    loaded, tokenizer = loading.load(model)
    kvengine.patch(loaded, "full")
    kvengine.EngineCache(loaded, policy)  # a policy that is wrong, or not for this model, stops here
    folder.mkdir(parents=True, exist_ok=True)
    prefix = Prefix(loaded, Store(backend(store, cap=cap)), tokenizer)
    return Library(loaded, tokenizer, prefix, folder, policy, **limits)


def main() -> None:
    given = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    given.add_argument("--model", default="bundled", help="folder, hub id, or 'bundled'")
    given.add_argument("--store", default="runs/qa/store", help="folder, redis://, s3://, …: where KV chunks live")
    given.add_argument("--folder", type=Path, default=Path("runs/qa/documents"), help="where the texts live")
    given.add_argument("--policy", default="quest(budget=1024)", help="of the caches that answer")
    given.add_argument("--max-bytes", type=int, default=4 << 20, help="of a document")
    given.add_argument("--max-documents", type=int, default=1000, help="that are kept")
    given.add_argument("--cap", type=int, help="bytes of KV chunks in a folder; the longest unused go")
    given.add_argument("--host", default="127.0.0.1")
    given.add_argument("--port", type=int, default=8000)
    args = given.parse_args()
    if not 0 <= args.port < 1 << 16:
        given.error(f"--port {args.port} is not a port: 0 to 65535")
    try:
        made = library(
            args.model, args.store, args.folder, args.policy, cap=args.cap,
            max_bytes=args.max_bytes, max_documents=args.max_documents,
        )  # fmt: skip
    except (kvengine.errors.KVEngineError, OSError, ValueError) as error:
        given.error(str(error))
    uvicorn.run(application(made), host=args.host, port=args.port)  # its own limit counts connections that ask nothing


if __name__ == "__main__":
    main()
