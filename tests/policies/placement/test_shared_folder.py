"""The disk tier in a folder that others write to, as the system's for temporary files is."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import torch

from kvengine.offload.placement._file import File
from kvengine.offload.placement._levels import Layout


def test_what_others_put_there_is_left_alone(tmp_path: Path) -> None:
    """Leftovers go, but no link is followed: a lock is not laid on the file that it names, nor is the link removed."""
    folder, target = tmp_path / "pages", tmp_path / "mine"
    folder.mkdir()
    target.write_bytes(b"mine")
    link, left = folder / "kvengine-link.kvpages", folder / "kvengine-left.kvpages"
    link.symlink_to(target)
    left.write_bytes(b"of a process that was killed")
    held = os.open(folder / "kvengine-held.kvpages", os.O_RDWR | os.O_CREAT)
    fcntl.flock(held, fcntl.LOCK_EX)
    file = File(Layout.of({"k": torch.zeros(1, 4)}), str(folder), 8)
    assert link.is_symlink() and target.read_bytes() == b"mine" and not left.exists()
    assert (folder / "kvengine-held.kvpages").exists()
    os.close(held)
    file.close()
    assert sorted(path.name for path in folder.iterdir()) == ["kvengine-held.kvpages", "kvengine-link.kvpages"]
