"""The document service as its operator meets it: full disks, damaged files, restarts, slow and vanishing clients."""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from support_service import GRASS, Client, service
from support_service import served as served

from kvengine.offload.stores.store import Event

Served = tuple[Client, Any, ModuleType]
QUESTION = b'{"question": "What is the sky?", "max_new_tokens": 2}'


def document(name: str) -> bytes:
    """A text of some chunks that no other test sends."""
    return f"{name}.{GRASS * 20}".encode()


def connection(client: Client) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(client.base.removeprefix("http://"), timeout=30)


@pytest.mark.parametrize("name", ["a" * 300, "%C3%A9" * 8, "A" * 16, "..", "%2e%2e%2fx", "a" * 16, "%00"])
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_names_that_no_document_has(served: Served, name: str, method: str) -> None:
    path = f"/documents/{name}/questions" if method == "POST" else f"/documents/{name}"
    status, answer = served[0](path, QUESTION if method == "POST" else None, method)
    assert status == 404 and answer["error"]


@pytest.mark.parametrize("headers", [{"Content_Type": "multipart/form-data; boundary=x"}, {"Content_Encoding": "gzip"}])
def test_a_form_or_a_packed_body_is_not_taken_for_a_text(served: Served, headers: dict[str, str]) -> None:
    status, answer = served[0]("/documents", b"--x\r\nContent-Disposition: form-data\r\n\r\nhello", **headers)
    assert status == 415 and "--data-binary" in answer["error"]


def test_a_body_may_come_in_pieces_without_its_length_but_not_for_ever(served: Served) -> None:
    client, library, _ = served
    there = connection(client)
    there.request("POST", "/documents", iter([b"The sky ", b"is blue."]), encode_chunked=True,
                  headers={"Transfer-Encoding": "chunked"})  # fmt: skip
    with there.getresponse() as answer:
        assert answer.status == 201
    there.close()
    there = connection(client)
    there.request("POST", "/documents", iter([b"x" * 9000] * 4), encode_chunked=True,
                  headers={"Transfer-Encoding": "chunked"})  # fmt: skip
    with there.getresponse() as answer:
        assert answer.status == 413 and str(library.max_bytes) in json.load(answer)["error"]
    there.close()
    with socket.create_connection(there.host.split(":")[:1] + [there.port], timeout=30) as slow:  # type: ignore[arg-type]
        slow.sendall(b"POST /documents HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nThe sky")
        said = http.client.HTTPResponse(slow)
        said.begin()
        assert said.status == 408 and "in time" in json.load(said)["error"]


def test_a_client_that_leaves_in_its_body_is_no_error_of_the_service(served: Served) -> None:
    """The framework's own exception would put a page into the log each time."""
    _, _, module = served

    async def left() -> dict[str, str]:
        return {"type": "http.disconnect"}

    app = SimpleNamespace(state=SimpleNamespace(patience=1.0))
    request = module.Request({"type": "http", "headers": [], "app": app}, left)
    with pytest.raises(module.HTTPException, match="the client left"):
        asyncio.run(module.limited(request, 100))


def test_a_full_disk_keeps_what_was_there(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, library, _ = served
    made = client("/documents", document("kept"))[1]
    before = sorted(path.name for path in library.folder.iterdir())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    status, answer = client("/documents", document("lost"))
    assert status == 507 and "No space left" in answer["error"]
    assert sorted(path.name for path in library.folder.iterdir()) == before
    monkeypatch.undo()
    assert client(f"/documents/{made['id']}/questions", QUESTION)[0] == 200


def test_a_text_outlives_a_power_failure_as_what_was_computed_of_it_does(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was said to be kept while it might be in memory alone: then nobody could ask about it, or delete its chunks."""
    client, library, _ = served
    sync, synced = os.fsync, set[int]()

    def noted(handle: int) -> None:
        sync(handle)
        synced.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    status, made = client("/documents", document("outlives"))
    assert status == 201
    assert {path.stat().st_ino for path in (library.folder / f"{made['id']}.txt", library.folder)} <= synced


def test_a_document_that_the_store_has_no_room_for_is_told_of(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, library, _ = served
    text = document("large") * 5
    made = client("/documents", text)[1]
    chunks, sizes = made["tokens"] // library.prefix.chunk, [e.size for e in library.prefix.store.entries()]
    assert made["stored"] is True and chunks > 3
    client(f"/documents/{made['id']}", method="DELETE")
    monkeypatch.setattr(library.prefix.store.backend, "cap", (chunks - 1) * max(sizes))
    status, made = client("/documents", text)
    assert status == 201 and made["stored"] is False and f"of {chunks} chunks" in made["warning"]
    assert client(f"/documents/{made['id']}/questions", QUESTION)[1]["reused_tokens"] > 0


def test_a_document_of_which_no_question_can_begin_is_not_said_to_be_stored() -> None:
    """All its chunks were there, and not the windows and states that lay beside the last of them."""
    module, there = service(), ["a", "b"]

    def lookup(keys: list[str], _: float) -> int:
        return next((n for n, key in enumerate(keys) if key not in there), len(keys))

    store = SimpleNamespace(drain=lambda: None, poll=lambda: [], lookup=lookup)
    keys = lambda _, beside=False: ["a", "b", *(("beside a", "beside b") if beside else ())]  # noqa: E731
    library = SimpleNamespace(prefix=SimpleNamespace(store=store, keys=keys, timeout=1.0))
    told = module.Library.stored(library, None)
    assert told["stored"] is False and "keeps 2 of 3" in told["warning"]
    there.append("beside b")
    assert module.Library.stored(library, None) == {"stored": True}


def test_documents_are_counted_and_can_be_deleted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, library, _ = served
    made = client("/documents", document("deleted"))[1]
    monkeypatch.setattr(library, "max_documents", client("/health")[1]["documents"])
    status, answer = client("/documents", document("too many"))
    assert status == 507 and "DELETE one" in answer["error"]
    assert client("/documents", document("deleted"))[0] == 201  # it is kept already
    values = library.prefix.store.usage()["values"]
    status, gone = client(f"/documents/{made['id']}", method="DELETE")
    assert status == 200 and gone["chunks"] == made["tokens"] // library.prefix.chunk > 0
    assert library.prefix.store.usage()["values"] == values - gone["chunks"]
    assert client(f"/documents/{made['id']}/questions", QUESTION)[0] == 404
    assert client(f"/documents/{made['id']}", method="DELETE")[0] == 404
    assert client("/documents", document("too many"))[0] == 201


def test_what_documents_share_goes_with_the_last_of_them(served: Served) -> None:
    """Two versions of a report begin alike. When one was deleted, every question on the other computed all of it anew."""
    client, library, _ = served
    text, chunk = document("shared"), library.prefix.chunk
    made, longer = (client("/documents", body)[1] for body in (text, text + b" The sky is blue." * chunk))
    assert longer["already_known"] == made["tokens"] // chunk * chunk > 0
    (library.folder / "notes.txt").write_bytes(text)  # is no document
    values = library.prefix.store.usage()["values"]
    status, gone = client(f"/documents/{longer['id']}", method="DELETE")
    assert status == 200 and gone["chunks"] == longer["tokens"] // chunk - made["tokens"] // chunk > 0
    assert library.prefix.store.usage()["values"] == values - gone["chunks"]
    assert client(f"/documents/{made['id']}/questions", QUESTION)[1]["reused_tokens"] == longer["already_known"]
    gone = client(f"/documents/{made['id']}", method="DELETE")[1]
    assert gone["chunks"] == made["tokens"] // chunk
    (library.folder / "notes.txt").unlink()


def test_a_document_is_kept_until_the_store_has_deleted_what_was_computed_of_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, library, _ = served
    made, store = client("/documents", document("kept"))[1], library.prefix.store

    def down(key: str) -> bool:
        raise ConnectionError("down")

    with monkeypatch.context() as patch:
        patch.setattr(store, "pause", 0.0)
        patch.setattr(store.backend, "delete", down)
        status, answer = client(f"/documents/{made['id']}", method="DELETE")
        assert status == 503 and "DELETE it again" in answer["error"]
    assert client(f"/documents/{made['id']}/questions", QUESTION)[0] == 200
    status, gone = client(f"/documents/{made['id']}", method="DELETE")
    assert status == 200 and gone["chunks"] == made["tokens"] // library.prefix.chunk > 0


def test_a_text_that_was_changed_on_disk_is_not_answered_from(served: Served) -> None:
    client, library, _ = served
    made = client("/documents", document("changed"))[1]
    (library.folder / f"{made['id']}.txt").write_bytes(document("another"))
    status, answer = client(f"/documents/{made['id']}/questions", QUESTION)
    assert status == 500 and "POST the document again" in answer["error"]
    client("/documents", document("changed"))
    assert client(f"/documents/{made['id']}/questions", QUESTION)[0] == 200
    (library.folder / f"{made['id']}.txt").write_bytes(b"\xff")
    status, gone = client(f"/documents/{made['id']}", method="DELETE")
    assert status == 200 and gone["deleted"] and "damaged" in gone["warning"]
    assert client(f"/documents/{made['id']}", method="DELETE")[0] == 404


def test_a_text_that_cannot_be_read_keeps_others_from_nothing(served: Served) -> None:
    """The name is taken by a folder, as it might be by a file of another user: every DELETE looks at every text."""
    client, library, _ = served
    strange = library.folder / f"{'a' * 16}.txt"
    strange.mkdir()
    status, answer = client(f"/documents/{'a' * 16}/questions", QUESTION)
    assert status == 503 and "cannot be read: Is a directory" in answer["error"]
    made = client("/documents", document("beside a folder"))[1]
    assert client(f"/documents/{'a' * 16}", method="DELETE")[0] == 503 and strange.exists()
    assert client(f"/documents/{made['id']}", method="DELETE")[0] == 200
    strange.rmdir()


def test_a_mark_of_byte_order_is_no_part_of_a_text(served: Served) -> None:
    client, _, _ = served
    plain, marked = (client("/documents", mark + document("marked"))[1] for mark in (b"", b"\xef\xbb\xbf"))
    assert plain["tokens"] == marked["tokens"] and plain["id"] != marked["id"]
    answers = [client(f"/documents/{made['id']}/questions", QUESTION) for made in (plain, marked)]
    assert answers[0][0] == answers[1][0] == 200 and answers[0][1]["answer"] == answers[1][1]["answer"]


def test_a_service_that_starts_again_has_its_documents(served: Served) -> None:
    client, library, module = served
    made = client("/documents", document("lasting"))[1]
    old, new = library.folder / "old.part", library.folder / "new.part"
    for draft in (old, new):
        draft.write_bytes(b"half")
    os.utime(old, (0, 0))  # of a service that was killed; the other may be another's that writes now
    folder = library.prefix.store.backend.folder
    store = module.Store(module.backend(str(folder)))
    again = module.Library(library.model, library.tokenizer, module.Prefix(library.model, store, library.tokenizer),
                           library.folder)  # fmt: skip
    assert again.ask(made["id"], "What?", 2)["reused_tokens"] > 0
    assert not old.exists() and new.exists()
    new.unlink()
    store.close()


def test_nothing_is_computed_for_a_client_that_left(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, library, _ = served
    made, asked, begun, go = client("/documents", document("asked"))[1], [], threading.Event(), threading.Event()

    def ask(name: str, question: str, most: int, gone: threading.Event) -> dict[str, Any]:
        asked.append(question)
        begun.set()
        go.wait(20)
        return {}

    monkeypatch.setattr(library, "ask", ask)
    there = [connection(client) for _ in range(3)]
    for n, one in enumerate(there):
        one.request("POST", f"/documents/{made['id']}/questions", json.dumps({"question": str(n)}))
        assert begun.wait(20)
    time.sleep(0.1)
    there[1].close()
    assert client("/health")[0] == 200  # the server has seen it
    go.set()
    for one in (there[0], there[2]):
        with one.getresponse() as answer:
            assert answer.status == 200
        one.close()
    assert asked == ["0", "2"]


def test_an_answer_ends_when_its_client_leaves(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    client, library, _ = served
    made, plain, told = client("/documents", document("leaving"))[1], library.ask, []

    def ask(name: str, question: str, most: int, gone: threading.Event) -> dict[str, Any]:
        told.append(gone.wait(20))  # where it would compute
        return plain(name, question, most, gone)

    monkeypatch.setattr(library, "ask", ask)
    one = connection(client)
    one.request("POST", f"/documents/{made['id']}/questions", json.dumps({"question": "Who?", "max_new_tokens": 512}))
    time.sleep(0.3)
    one.close()
    deadline = time.monotonic() + 20
    while not told and time.monotonic() < deadline:
        time.sleep(0.05)
    assert told == [True]


def test_nothing_more_is_generated_for_a_client_that_is_gone(served: Served) -> None:
    client, library, module = served
    made, gone = client("/documents", document("half said"))[1], threading.Event()
    seen: list[int] = []
    library.model.register_forward_pre_hook(lambda *_: seen.append(1) or gone.set())
    try:
        library.ask(made["id"], "\nWhat is said?", 64, gone)
    finally:
        library.model._forward_pre_hooks.clear()
    assert len(seen) == 1  # the pass under way ends, and no other begins


def test_a_document_of_a_model_that_read_more_is_told_of(served: Served) -> None:
    """The question had 3 tokens, it said, of which at most -125 fit."""
    client, library, module = served
    made = client("/documents", document("outgrown"))[1]
    again = module.Library(library.model, library.tokenizer, library.prefix, library.folder, max_tokens=100)
    with pytest.raises(module.HTTPException, match=f"413: the document has {made['tokens']} tokens, at most 100 fit"):
        again.ask(made["id"], "Who?", 8)


def test_what_went_wrong_an_hour_ago_is_told_no_longer() -> None:
    """A store that had failed once looked as if it did until the service ended."""
    module, now = service(), time.time()
    events = [
        Event("failed", "", what, now - ago)
        for what, ago in (("long gone", 3700.0), ("again", 3650.0), ("again", 10.0), ("new", 0.0))
    ]
    waiting = [events]
    prefix = SimpleNamespace(store=SimpleNamespace(events=lambda: waiting.pop() if waiting else []))
    library = SimpleNamespace(prefix=prefix, failed={})
    assert [module.Library.problems(library) for _ in range(2)] == [["again", "new"]] * 2


def test_connections_that_ask_nothing_keep_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred of them, which need not send a byte, and everybody else was refused for as long as they stayed."""
    module, run, told = service(), {}, {"counts": {}, "close": lambda: None}
    prefix = SimpleNamespace(store=SimpleNamespace(**told))
    library = SimpleNamespace(policy="full", folder=tmp_path, problems=lambda: [], prefix=prefix)
    monkeypatch.setattr(module, "library", lambda *_, **limits: library)
    monkeypatch.setattr(module.uvicorn, "run", lambda app, **given: run.update(given, app=app))
    monkeypatch.setattr(sys, "argv", ["document_qa.py", "--port", "0"])
    module.main()
    server = module.uvicorn.Server(module.uvicorn.Config(**run, log_level="error", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(101)]
    try:
        assert Client(port)("/health") == (
            200,
            {"policy": "full", "documents": 0, "store": {"counts": {}, "problems": []}},
        )
    finally:
        for one in idle:
            one.close()
        server.should_exit = True
        thread.join()


def test_no_more_than_so_many_requests_wait(served: Served) -> None:
    """And who is refused hears so in JSON, as of every error, while /health is served."""
    module = served[2]

    async def visit() -> list[Any]:
        go = asyncio.Event()

        async def serve(request: Any) -> str:
            await go.wait()
            return "served"

        request = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(places=asyncio.Semaphore(2))))
        inside = [asyncio.create_task(module.admitted(serve)(request)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(module.HTTPException, match="503: too many requests"):
            await module.admitted(serve)(request)
        go.set()
        return [*await asyncio.gather(*inside), await module.admitted(serve)(request)]

    assert asyncio.run(visit()) == ["served"] * 3


def test_limits_that_let_nothing_in(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, library, module = served
    with pytest.raises(ValueError, match="max_bytes=0 lets nothing in"):
        module.library("bundled", str(tmp_path / "kv"), tmp_path, "full", max_bytes=0)
    config = SimpleNamespace(max_position_embeddings=512)
    short = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    with pytest.raises(ValueError, match="reads 512 tokens"):
        module.Library(short, library.tokenizer, library.prefix, tmp_path)
    config.max_position_embeddings = 2048
    assert module.Library(short, library.tokenizer, library.prefix, tmp_path).max_tokens == 1024
