"""Building the C kernels: once, atomically, and with a reason when it cannot be done."""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import kvengine
from kvengine.errors import KernelError
from kvengine.kernels import dispatch
from kvengine.kernels.attention import attention
from kvengine.kernels.cpu import library

build = library.load.__wrapped__
needs_compiler = pytest.mark.skipif(library.load().reason is not None, reason=str(library.load().reason))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "kvengine"


def fake_compiler(folder: Path, script: str) -> Path:
    file = folder / "cc"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


def kept(cache: Path) -> list[str]:
    return [path.name for path in cache.iterdir() if path.name != "building.lock"]


ALONE = """
import importlib.util, sys, types
package = sys.modules["kvengine"] = types.ModuleType("kvengine")  # all that it imports would take most of the time
package.__path__ = [sys.argv[2]]
spec = importlib.util.spec_from_file_location("library", sys.argv[1])
library = sys.modules["library"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(library)
assert library.load().library.kv_top
"""


@pytest.fixture
def quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that does not optimise, which takes a fifth of the time."""
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, f'exec {shutil.which("cc")} "$@" -O0')))


@pytest.fixture
def copying(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that copies what was built before, and notes each time."""
    built, runs = tmp_path / "built.so", tmp_path / "runs"
    shutil.copy(str(library.load().library._name), built)  # type: ignore[union-attr]
    rest = 'while [ "$1" != -o ]; do shift; done; cp'
    script = f'case "$1" in --version) echo fake; exit;; esac; echo >> {runs}; sleep 0.1; {rest} {built} "$2"'
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, script)))
    return runs


@needs_compiler
@pytest.mark.parametrize("compiler", [pytest.param("real", marks=pytest.mark.slow), "copies"])
def test_built_once_and_loaded_again(compiler: str, cache: Path, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue({"real": "quick", "copies": "copying"}[compiler])
    assert build().reason is None
    (file,) = cache.glob("kernels-*.so")
    before = file.stat().st_mtime_ns
    again = build()
    assert isinstance(again.library, ctypes.CDLL) and file.stat().st_mtime_ns == before
    assert kept(cache) == [file.name]  # nothing half-made is left


@pytest.mark.slow
@needs_compiler
def test_processes_that_build_at_once_all_get_a_whole_library(cache: Path, quick: None) -> None:
    files = [str(Path(library.__file__)), str(Path(kvengine.__file__).parent)]
    started = [subprocess.Popen([sys.executable, "-P", "-c", ALONE, *files]) for _ in range(3)]
    assert [process.wait() for process in started] == [0, 0, 0]
    assert len(kept(cache)) == 1


@needs_compiler
def test_threads_that_begin_at_once_build_once(cache: Path, copying: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build(), range(4)))
    files = len(list(Path(library.__file__).parent.glob("*.c")))
    assert (
        all(one.reason is None for one in found) and len(copying.read_text().splitlines()) == files + 1
    )  # and the linker


def test_no_compiler(cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    assert "no C compiler" in (build().reason or "")
    assert "plain torch" in caplog.text and "no C compiler" in caplog.text


@needs_compiler
@pytest.mark.parametrize(
    ("flag", "said", "unsaid"),
    [
        pytest.param("-fopenmp", "one thread", "not made for this processor", marks=pytest.mark.slow),
        ("=native", "not made for this processor", "one thread"),
    ],
)
def test_a_flag_that_is_not_known_is_done_without(
    flag: str, said: str, unsaid: str, cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    script = f'case "$*" in *{flag}*) echo "no such flag" >&2; exit 1;; esac; exec {shutil.which("cc")} "$@" -O0'
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, script)))
    assert build().reason is None
    assert said in caplog.text and "no such flag" in caplog.text and unsaid not in caplog.text


@pytest.mark.skipif(os.name != "posix", reason="users are told apart by numbers")
def test_a_user_without_a_home_has_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have them: a number that no list of users knows."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(RuntimeError):
        Path.home()
    assert library.cache_dir().parent == tmp_path


def test_another_processor_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what it tells of itself; where it tells nothing, by what the compiler makes of it."""
    told, script = tmp_path / "cpuinfo", 'case "$*" in *-dM*) cat $0.made;; *) echo fake;; esac'
    monkeypatch.setattr(library, "CPUINFO", told)
    compiler, made = str(fake_compiler(tmp_path, script)), tmp_path / "cc.made"

    def key() -> str:
        return library._fingerprint(compiler, library.FLAGS, [])

    known = set()
    for lines in ("flags : avx2", "flags : avx2 avx512f", "CPU part : 0xd0c"):
        told.write_text(f"bogomips : {len(known)}\n{lines}\n")
        known.add(key())
    told.write_text("bogomips : 7\nCPU part : 0xd0c\n")
    assert len(known) == 3 and key() in known  # how busy it is plays no part
    told.unlink()
    for macros in ("#define __AVX2__ 1", "#define __AVX512F__ 1"):
        made.write_text(macros)
        known.add(key())
    assert len(known) == 5 and key() in known


def test_every_team_of_threads_is_as_large_as_is_asked_for() -> None:
    """Not as large as OpenMP likes: with a runtime of its own, torch's setting does not reach ours."""
    teams = [
        line
        for path in sorted(Path(library.__file__).parent.glob("*.c"))
        for line in path.read_text().splitlines()
        if line.startswith("#pragma omp parallel")
    ]
    assert len(teams) > 10 and [line for line in teams if "num_threads(" not in line] == []


def test_a_compiler_that_fails_is_quoted(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = 'case "$1" in --version) echo fake;; *) echo "no such flag" >&2; exit 1;; esac'
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, script)))
    assert "no such flag" in (build().reason or "")
    assert kept(cache) == []


def test_a_library_that_does_not_load_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(fake_compiler(tmp_path, "echo fake")))  # writes nothing into the file it was given
    assert "could not be built or loaded" in (build().reason or "")


def test_without_the_library_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = torch.randn(2, 3, 1, 16), torch.randn(2, 9, 16)
    want = attention(q, k, k, None, 0.3).out
    monkeypatch.setattr(library, "load", lambda: library.Loaded(None, "no C compiler here"))
    assert torch.allclose(attention(q, k, k, None, 0.3).out, want, atol=1e-6)
    assert dispatch.info()["native"] == "no C compiler here"
    with pytest.raises(KernelError, match="no C compiler here"):
        attention(q, k, k, None, 0.3, backend="native")


def test_heads_too_wide_for_the_buffers_go_to_torch() -> None:
    q, k = torch.randn(1, 2, 1, 1040), torch.randn(1, 9, 1040)
    assert attention(q, k, k, None, 0.05).out.isfinite().all()
    with pytest.raises(KernelError, match="shapes or dtypes"):
        attention(q, k, k, None, 0.05, backend="native")
