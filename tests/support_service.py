"""The document service of `examples/document_qa.py` on a port of its own, and a client."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from layout import ROOT


def service() -> ModuleType:
    for needed in ("starlette", "uvicorn"):
        pytest.importorskip(needed)
    spec = importlib.util.spec_from_file_location("document_qa", ROOT / "examples" / "document_qa.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["document_qa"] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    return module


class Client:
    """Talks to a server on a port."""

    def __init__(self, port: int) -> None:
        self.base = f"http://127.0.0.1:{port}"

    def __call__(
        self, path: str, body: bytes | None = None, method: str | None = None, **headers: str
    ) -> tuple[int, Any]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            request = urllib.request.Request(self.base + path, body, named, method=method)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def ask(self, name: str, key: str) -> tuple[int, Any]:
        question = f"\nWhat is the special magic number for {key} mentioned in the provided text?"
        question += f" The special magic number for {key} mentioned in the provided text is"
        return self(f"/documents/{name}/questions", json.dumps({"question": question, "max_new_tokens": 6}).encode())


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Any, ModuleType]]:
    module, folder = service(), tmp_path_factory.mktemp("qa")
    import uvicorn

    library = module.library("bundled", str(folder / "store"), folder / "documents", "full", max_bytes=20000)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(module.application(library, patience=1.0), port=port, log_level="error", ws="none")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    limit = time.monotonic() + 60
    while not server.started:
        assert thread.is_alive() and time.monotonic() < limit, "the service did not start"
        time.sleep(0.02)
    yield Client(port), library, module
    server.should_exit = True
    thread.join()


GRASS = " The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
