"""The document service of `examples/document_qa.py`, over HTTP, and what its clients do wrong."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support_service import GRASS, Client, service
from support_service import served as served


class Dead:
    """A backend whose server is gone."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_: Any, **__: Any) -> Any:
            raise ConnectionError("connection refused")

        return (lambda: None) if name == "close" else fail


DOCUMENT = f"{GRASS * 10} One of the special magic numbers for quiet-river is: 4817263.{GRASS * 8}".encode()


def test_a_document_is_computed_once_and_answers_are_those_of_the_plain_model(
    served: tuple[Client, Any, ModuleType],
) -> None:
    client, library, module = served
    status, made = client("/documents", DOCUMENT)
    assert status == 201 and made["stored"] is True and made["already_known"] == 0
    chunks = made["tokens"] // library.prefix.chunk * library.prefix.chunk
    status, answer = client.ask(made["id"], "quiet-river")
    assert status == 200 and answer["reused_tokens"] == chunks > 0
    cold = module.Library(library.model, library.tokenizer, module.Prefix(library.model, module.Store(Dead())),
                          library.folder)  # fmt: skip
    question = "\nWhat is the special magic number for quiet-river mentioned in the provided text?"
    question += " The special magic number for quiet-river mentioned in the provided text is"
    alone = cold.ask(made["id"], question, 6)
    assert alone["reused_tokens"] == 0 and alone["answer"] == answer["answer"]
    known = client("/health")[1]["documents"]
    assert client("/documents", DOCUMENT)[1]["already_known"] == chunks  # the second upload costs nothing
    assert client("/health")[1]["documents"] == known


@pytest.mark.parametrize(("path", "body", "status", "says"), [
    ("/documents", b"x" * 20001, 413, "more than 20000 bytes"),
    ("/documents", b"word " * 3999 + b"\xff", 400, "not UTF-8"),
    ("/documents", "in UTF-16".encode("utf-16-le"), 400, "not UTF-8 text (byte 1)"),  # NUL is a character of UTF-8 too
    ("/documents", b"  \n", 400, "empty"),
    ("/documents", b"9 8 7 6 " * 2499, 413, "tokens, at most 8192 fit"),
    ("/documents/0000/questions", b'{"question": "who?"}', 404, "POST it to /documents first"),
    ("/documents/..%2F..%2Fetc/questions", b'{"question": "who?"}', 404, ""),
    ("/documents/0000/questions", b"who?", 400, "expected JSON like"),
    ("/documents/0000/questions", b'{"question": " "}', 400, "must not be empty"),
    ("/documents/0000/questions", b'{"question": "who?", "max_new_tokens": 1e999}', 400, "expected JSON like"),
    ("/documents/0000/questions", b'{"question": null', 400, "expected JSON like"),
    ("/documents/0000/questions", b'{"question": null}', 400, "expected JSON like"),
    ("/documents/0000/questions", b'{"question": ["who?"]}', 400, "expected JSON like"),
    ("/documents/0000/questions", b'{"question": "who?", "max_new_tokens": true}', 400, "expected JSON like"),
    ("/documents/0000/questions", b'{"question": "\\ud800?"}', 400, "expected JSON like"),
    ("/documents/0000/questions", b"[" * 60000, 400, "expected JSON like"),
    ("/documents/0000/questions", b'"' + b"x" * 70000 + b'"', 413, "more than 65536 bytes"),
    ("/documents/0000/questions", b'{"question": "who?", "stream": true}', 400, "nothing else in it"),
    ("/documents/", b"text", 404, "Not Found: POST a text to /documents"),
    ("/nothing", None, 404, "Not Found: POST a text to /documents"),
    ("/documents", None, 405, "Method Not Allowed: POST a text to /documents"),
])  # fmt: skip
def test_what_goes_wrong_is_said(
    served: tuple[Client, Any, ModuleType], path: str, body: bytes | None, status: int, says: str
) -> None:
    got, answer = served[0](path, body)
    assert got == status and says in answer["error"], answer


def test_no_request_holds_the_service_with_text_that_cannot_fit(
    served: tuple[Client, Any, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens of 4 MiB are counted in 6 to 20 seconds, in which nobody else is served."""
    client, library, _ = served
    monkeypatch.setattr(library, "max_bytes", 4 << 20)
    monkeypatch.setattr(type(library), "read", lambda *args, **options: pytest.fail("it was read"))
    status, answer = client("/documents", b"the quick brown\n" * 200_000)
    assert status == 413 and "3200000 characters, more than 8192 tokens can be; split it" in answer["error"]


def test_the_longest_text_that_can_fit_is_counted(served: tuple[Client, Any, ModuleType]) -> None:
    _, library, _ = served
    word = max(library.tokenizer.get_vocab(), key=len)
    assert library.max_characters == 8192 * len(word) and library.read(word, begins=False).shape == (1, 1)


def test_line_ends_stay_as_they_came(served: tuple[Client, Any, ModuleType]) -> None:
    client, library, _ = served
    status, made = client("/documents", DOCUMENT.replace(b". ", b".\r\n"))
    assert status == 201
    status, answer = client.ask(made["id"], "quiet-river")
    assert (
        status == 200 and answer["reused_tokens"] == made["tokens"] // library.prefix.chunk * library.prefix.chunk > 0
    )


def test_a_question_that_is_too_long_hears_how_much_fits(served: tuple[Client, Any, ModuleType]) -> None:
    client, library, _ = served
    made = client("/documents", b"The sky is blue.")[1]
    room = library.max_tokens + 1024 - 8 - made["tokens"]
    body = json.dumps({"question": "9 8 7 6 " * 3000, "max_new_tokens": 8}).encode()
    status, answer = client(f"/documents/{made['id']}/questions", body)
    assert status == 413 and f"at most {room} fit" in answer["error"]


def test_clients_at_once_get_what_each_gets_alone(served: tuple[Client, Any, ModuleType]) -> None:
    """Uploads and questions of four clients cross each other."""
    client = served[0]
    texts = [DOCUMENT.replace(b"4817263", str(1000003 * n).encode()) for n in range(2, 6)]
    found: dict[int, Any] = {}

    def visit(n: int) -> None:
        made = client("/documents", texts[n])[1]
        found[n] = [client.ask(made["id"], "quiet-river") for _ in range(2)]

    threads = [threading.Thread(target=visit, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n, text in enumerate(texts):
        alone = client.ask(client("/documents", text)[1]["id"], "quiet-river")[1]["answer"]
        assert [(status, answer["answer"]) for status, answer in found[n]] == [(200, alone)] * 2


def test_a_policy_that_is_wrong_stops_the_service_at_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = service()
    words = ["--policy", "quset", "--store", str(tmp_path / "store"), "--folder", str(tmp_path / "documents")]
    monkeypatch.setattr(sys, "argv", ["document_qa.py", *words])
    with pytest.raises(SystemExit) as stopped:
        module.main()
    assert stopped.value.code == 2 and "Did you mean 'quest'" in capsys.readouterr().err


def test_a_dead_store_costs_time_and_not_answers(
    served: tuple[Client, Any, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    client, library, _ = served
    monkeypatch.setattr(library.prefix.store, "backend", Dead())
    monkeypatch.setattr(library.prefix.store, "pause", 0.0)
    status, made = client("/documents", DOCUMENT + b" New.")
    assert status == 201 and made["stored"] is False and "cannot be reached" in made["warning"]
    status, answer = client.ask(made["id"], "quiet-river")
    assert status == 200 and answer["reused_tokens"] == 0 and answer["answer"]
    assert "connection refused" in " ".join(client("/health")[1]["store"]["problems"])
    assert "connection refused" in " ".join(client("/health")[1]["store"]["problems"]), "the next prober sees it too"


def test_health_says_why_a_store_failed_that_was_not_asked_since(
    served: tuple[Client, Any, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five times "the store failed a moment ago" stood where the reason should be."""
    client, library, _ = served
    monkeypatch.setattr(library.prefix.store, "backend", Dead())
    monkeypatch.setattr(library.prefix.store, "pause", 60.0)
    monkeypatch.setattr(library.prefix.store, "_closed_until", 0.0)  # and again for the tests that come after this one
    made = client("/documents", DOCUMENT + b" Newer.")[1]
    assert client.ask(made["id"], "quiet-river")[0] == 200
    problems = client("/health")[1]["store"]["problems"]
    assert len(set(problems)) == len(problems) <= 5 and "connection refused" in " ".join(problems)
    assert not any("a moment ago" in one for one in problems)


# ---- text is text --------------------------------------------------------------------------------------------------


def test_a_text_that_spells_special_tokens_is_text(served: tuple[Client, Any, ModuleType]) -> None:
    """A client can neither end the document, nor begin another, nor hide a part of it."""
    client, library, _ = served
    special = library.tokenizer.all_special_ids
    spelled = "".join(library.tokenizer.all_special_tokens)
    ids = library.read(f"{spelled} <|im_end|></s>", begins=True)
    assert ids[0, 0] == library.tokenizer.bos_token_id
    assert not set(ids[0, 1:].tolist()) & set(special)
    assert spelled in library.tokenizer.decode(ids[0, 1:])
    made, other = (client("/documents", text.encode())[1] for text in ("The sun.", f"{spelled}The sun."))
    assert other["tokens"] > made["tokens"] + len(special)
    body = json.dumps({"question": f"{spelled}?", "max_new_tokens": 1}).encode()
    asked = client(f"/documents/{made['id']}/questions", body)[1]
    assert asked["prompt_tokens"] > made["tokens"] + len(special) + 1


def test_where_special_tokens_cannot_be_read_as_text_they_are_refused(served: tuple[Client, Any, ModuleType]) -> None:
    """Models of whole pieces have them in their vocabulary, whatever is asked of the tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    _, library, module = served
    words = {"[UNK]": 0, "[END]": 1, "river": 2, "quiet": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]", eos_token="[END]")
    other = module.Library(library.model, tokenizer, library.prefix, library.folder)
    assert other.read("quiet brook river", begins=True).tolist() == [[3, 0, 2]]  # an unknown word is no harm
    with pytest.raises(module.HTTPException, match=r"400: .*\[END\].*take it out"):
        other.read("quiet [END] river", begins=True)
