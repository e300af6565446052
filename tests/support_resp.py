"""A server that speaks enough of Redis' protocol over loopback for our backend, and breaks off where a test wants it."""

from __future__ import annotations

import socketserver
import threading
from fnmatch import fnmatchcase
from typing import Any


class Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server: Any = self.server
        waiting: list[list[bytes]] | None = None  # of a transaction
        while line := self.rfile.readline():
            words = [self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2] for _ in range(int(line[1:]))]
            name = words[0].decode().upper()
            if name == "MULTI":
                waiting, answer = [], b"+OK\r\n"
            elif name == "EXEC":
                answer, waiting = server.pretended.answer(waiting or []), None
            elif waiting is not None:
                waiting.append(words)
                answer = b"+QUEUED\r\n"
            elif (one := server.pretended.answer([words])) is not None:
                answer = one.partition(b"\r\n")[2] if one.startswith(b"*") else one
            else:
                answer = None
            if answer is None:
                return
            self.wfile.write(answer)


def bulk(value: bytes | None) -> bytes:
    return b"$-1\r\n" if value is None else b"$%d\r\n%s\r\n" % (len(value), value)


class Pretended:
    """A running server of `values`; `left` commands on it are answered, then `fault` decides: "close", "hang" or an error's text.

    `life` has the milliseconds that a value was last given, None for ever."""

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.life: dict[bytes, int | None] = {}
        self.left, self.fault, self.asked = 1 << 30, "close", list[str]()
        self.over, self.lock = threading.Event(), threading.Lock()
        socketserver.ThreadingTCPServer.allow_reuse_address = True
        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.server.pretended = self  # type: ignore[attr-defined]
        self.url = f"redis://127.0.0.1:{self.server.server_address[1]}/0?protocol=2&socket_timeout=0.2"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def answer(self, commands: list[list[bytes]]) -> bytes | None:
        """The answers to what is done at once, as an array."""
        names = [words[0].decode().upper() for words in commands]
        if names == ["CLIENT"]:
            return b"*1\r\n+OK\r\n"
        with self.lock:
            self.asked.append("+".join(names))
            self.left -= 1
            if self.left >= 0:
                done = [self.do(name, words[1:]) for name, words in zip(names, commands, strict=True)]
                return b"*%d\r\n" % len(done) + b"".join(done)
        if self.fault == "hang":
            self.over.wait(10)
        return None if self.fault in ("close", "hang") else f"-{self.fault}\r\n".encode()

    def do(self, name: str, words: list[bytes]) -> bytes:
        key, held = words[0] if words else b"", self.values
        match name:
            case "PING":
                return b"+PONG\r\n"
            case "SET":
                held[key] = words[1]
                self.life[key] = int(words[3]) if words[2:3] == [b"PX"] else None
                return b"+OK\r\n"
            case "GET":
                return bulk(held.get(key))
            case "GETRANGE":
                return bulk(held.get(key, b"")[int(words[1]) : int(words[2]) + 1])
            case "DEL":
                return b":%d\r\n" % sum(held.pop(word, None) is not None for word in words)
            case "EXISTS":
                return b":%d\r\n" % sum(word in held for word in words)
            case "PERSIST":
                self.life[key] = None
                return b":1\r\n"
            case "PEXPIRE":
                self.life[key] = int(words[1])
                return b":1\r\n"
            case "PTTL":
                return b":%d\r\n" % (-2 if key not in held else self.life[key] or -1)
            case "SCAN":
                found = [k for k in held if fnmatchcase(k.decode(), words[2].decode())]
                return b"*2\r\n" + bulk(b"0") + b"*%d\r\n" % len(found) + b"".join(map(bulk, found))
        return b"-ERR unknown command\r\n"

    def close(self) -> None:
        self.over.set()
        self.server.shutdown()
        self.server.server_close()
