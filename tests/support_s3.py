"""A small S3-compatible server over loopback: objects in memory, byte ranges, listing. Enough for an object store's
client, so that its tests need no cloud and no large test dependency."""

from __future__ import annotations

import email.utils
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

DATE = "2026-01-01T00:00:00.000Z"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    objects: dict[str, bytes]

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        fixed = {"Content-Length": str(len(body)), "Last-Modified": email.utils.formatdate(usegmt=True), "ETag": '"x"'}
        for name, value in {**fixed, **{n.replace("_", "-"): v for n, v in headers.items()}}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    @property
    def key(self) -> str:
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]

    def missing(self) -> None:
        self.answer(404, b"<Error><Code>NoSuchKey</Code><Message>no</Message></Error>", Content_Type="application/xml")

    def do_PUT(self) -> None:
        self.objects[self.key] = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(200)

    def do_GET(self) -> None:
        if not self.key:
            return self.listing(parse_qs(urlsplit(self.path).query))
        if self.key not in self.objects:
            return self.missing()
        body, wanted = self.objects[self.key], self.headers.get("Range")
        if wanted is None:
            return self.answer(200, body)
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1 if last else len(body), len(body))
        if start >= len(body):
            return self.answer(416)
        self.answer(206, body[start:stop], Content_Range=f"bytes {start}-{stop - 1}/{len(body)}")

    do_HEAD = do_GET

    def do_DELETE(self) -> None:
        self.objects.pop(self.key, None)
        self.answer(204)

    def do_POST(self) -> None:
        """Deletes several, as clients do even for one."""
        asked = re.findall(r"<Key>(.*?)</Key>", self.rfile.read(int(self.headers["Content-Length"])).decode())
        for key in asked:
            self.objects.pop(unescape(key), None)
        gone = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in asked)
        self.answer(200, f"<DeleteResult>{gone}</DeleteResult>".encode(), Content_Type="application/xml")

    def listing(self, query: dict[str, list[str]]) -> None:
        prefix = query.get("prefix", [""])[0]
        items = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>{DATE}</LastModified><ETag>&quot;x&quot;</ETag>"
            f"<Size>{len(body)}</Size></Contents>"
            for key, body in sorted(self.objects.items()) if key.startswith(prefix)
        )  # fmt: skip
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{items}</ListBucketResult>"
        self.answer(200, text.encode(), Content_Type="application/xml")

    def log_message(self, format: str, *args: Any) -> None: ...


class Bucket:
    """A running server; `store()` is an obstore client of its bucket."""

    def __init__(self) -> None:
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Handler,), {"objects": {}}))
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def store(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            "bucket", endpoint=f"http://127.0.0.1:{self.server.server_port}", region="us-east-1", access_key_id="a",
            secret_access_key="b", client_options={"allow_http": True}, virtual_hosted_style_request=False,
        )  # fmt: skip

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
