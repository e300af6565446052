"""Compile the C kernels with the system's compiler at first use, and load them.

The library is kept in the user's cache directory under a hash of the sources, the compiler, its flags and this
processor, so it is built once per machine (some seconds). Without a compiler the torch references run instead.
Plain C and ctypes: no torch headers, hence no build against a torch version.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kvengine.errors import KernelError

log = logging.getLogger(__name__)

NATIVE = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
"""For this processor. On ARM, several clangs refuse `-march=native`."""
# Without the early scheduling, which only ARM's gcc does: it moves so many loads ahead that the sums are spilled.
PLAIN = ("-O3", "-fno-math-errno", "-ffp-contract=fast", "-fno-schedule-insns", "-std=gnu11", "-fPIC", "-shared")
FLAGS = (*PLAIN, NATIVE)
OPENMP = ("-fopenmp",)
LINK = ("-lm",)
CPUINFO = Path("/proc/cpuinfo")
BUILDING = threading.Lock()
"""Threads that begin together build once."""


@dataclass(frozen=True)
class Loaded:
    """The library, or the reason why there is none."""

    library: ctypes.CDLL | None
    reason: str | None


@functools.cache
def load() -> Loaded:
    """Build if needed, and load. Never raises: the reason for failure is part of the answer, and logged once."""
    found = _load()
    if found.reason:
        log.warning("what runs on this CPU runs as plain torch, many times slower: %s", found.reason)
    return found


def _load() -> Loaded:
    known = compiler()
    if platform.system() == "Windows" or known is None:
        return Loaded(None, "no C compiler (cc, gcc or clang) on the PATH")
    reason = ""
    for flags in ((*FLAGS, *OPENMP), FLAGS, (*PLAIN, *OPENMP), PLAIN):
        try:
            found = Loaded(ctypes.CDLL(str(_built(known, flags))), None)
            if reason:
                log.warning("the C kernels %s: %s", _lacking(flags), reason)
            return found
        except subprocess.CalledProcessError as error:
            reason = f"{known} failed: {error.stderr.strip()[-500:]}"
        except (OSError, subprocess.TimeoutExpired) as error:
            reason = f"the C kernels could not be built or loaded: {error}"
    return Loaded(None, reason)


def _lacking(flags: tuple[str, ...]) -> str:
    lacks = [] if NATIVE in flags else [f"are not made for this processor, without {NATIVE}"]
    return " and ".join(lacks if OPENMP[0] in flags else [*lacks, "use one thread, without OpenMP"])


def compiler() -> str | None:
    """Where the system's C compiler is: `$CC`, or else cc, gcc or clang."""
    return shutil.which(os.environ.get("CC") or "cc") or shutil.which("gcc") or shutil.which("clang")


def needed() -> ctypes.CDLL:
    """The C kernels. Raises KernelError where there are none."""
    found = load()
    if found.library is None:
        raise KernelError(f"backend='native' cannot run here: {found.reason}")
    return found.library


def cache_dir() -> Path:
    """Where libraries are kept: `$XDG_CACHE_HOME/kvengine`, else `~/.cache/kvengine`, else a private temporary one."""
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        path = (Path(root) if root else Path.home() / ".cache") / "kvengine"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(path, os.W_OK):
            return path
    except (OSError, RuntimeError):  # the latter for a user whom nobody knows, as containers have them
        pass
    return Path(tempfile.mkdtemp(prefix="kvengine-"))


def _built(compiler: str, flags: tuple[str, ...]) -> Path:
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    target = cache_dir() / f"kernels-{_fingerprint(compiler, flags, sources)}.so"
    with BUILDING, _alone(target.with_name("building.lock")):
        if not target.exists():
            _build(compiler, flags, sources, target)
    return target


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """While no other process is here: those that begin together (ranks, test workers) build once as well."""
    import fcntl  # not on Windows

    with path.open("w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks: both build, and the later one stays
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(compiler: str, flags: tuple[str, ...], sources: list[Path], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:

        def run(*arguments: str, out: str) -> str:
            path = str(Path(folder) / out)
            command = [compiler, *flags, *arguments, "-o", path]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
            return path

        inputs = [path for path in sources if path.suffix == ".c"]
        objects = list(pool.map(lambda path: run("-c", str(path), out=f"{path.stem}.o"), inputs))
        put(run(*objects, *LINK, out="whole.so"), target)


def put(built: str | Path, target: Path) -> None:
    """Into its place: others see no library or a whole one, also after a power loss, since a torn one ends the process."""
    with open(built, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(built, target)


def _fingerprint(compiler: str, flags: tuple[str, ...], sources: list[Path]) -> str:
    digest = hashlib.sha256()
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=30).stdout
    for part in (compiler.encode(), version, " ".join((*flags, *LINK)).encode(), processor(compiler, flags)):
        digest.update(part + b"\0")
    for path in sources:
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:24]


def processor(compiler: str, flags: tuple[str, ...]) -> bytes:
    """What NATIVE depends on, as machines may share a home directory. Where nobody tells (not on Linux), what the compiler
    makes of it: "arm" is the name of many processors."""
    try:
        lines = CPUINFO.read_bytes().splitlines()
    except OSError:
        asked = [compiler, *flags, "-dM", "-E", "-x", "c", os.devnull]
        return platform.machine().encode() + subprocess.run(asked, capture_output=True, timeout=30).stdout
    wanted = (b"model name", b"flags", b"Features", b"CPU implementer", b"CPU part")
    return b"\n".join([platform.machine().encode(), *sorted({line for line in lines if line.startswith(wanted)})])
