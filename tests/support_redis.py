"""A Redis server of a test's own, which it may kill."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest


class Redis:
    def __init__(self, folder: Path, *options: str) -> None:
        server = shutil.which("valkey-server") or shutil.which("redis-server")
        if server is None:
            pytest.skip("no redis-server or valkey-server on the PATH")
        pytest.importorskip("redis")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.command = [server, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
        self.command += options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL)
        for _ in range(400):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        raise TimeoutError(f"nothing listens on port {self.port}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)
