"""Damaged, torn and foreign containers: an error of ours every time, never a crash, a hang or a wrong number."""

from __future__ import annotations

import json
import os
import random
import struct
import time
from pathlib import Path

import pytest
import torch
from support_offload import cache, resign, stack

from kvengine.errors import CorruptBitstream, IncompatibleCache, StoreError
from kvengine.kernels.cpu import library
from kvengine.offload import cachegen
from kvengine.offload import container as box
from kvengine.offload.cachegen import coder, lossy, native, reference, tables
from kvengine.offload.stores.filesystem import replace_file

LEVELS = ["lossless", "low", "near"]


def streams() -> list[bytes]:
    kv = cache(layers=1, tokens=40, dim=5, dtype=torch.bfloat16)
    return [cachegen.encode(kv, level, chunk=24) for level in LEVELS]


@pytest.mark.parametrize("level", LEVELS)
def test_every_damaged_byte_and_every_length_is_noticed(level: str) -> None:
    data = cachegen.encode(cache(layers=1, heads=1, tokens=20, dim=3), level, chunk=16)
    for at in range(len(data)):
        hurt = bytearray(data)
        hurt[at] ^= 1 << at % 8
        with pytest.raises((CorruptBitstream, IncompatibleCache)):
            cachegen.decode(bytes(hurt))
        with pytest.raises(CorruptBitstream):
            cachegen.decode(data[:at])
    with pytest.raises(CorruptBitstream):
        cachegen.decode(data + b"\0")


def mutate(data: bytes, dice: random.Random) -> bytes:
    """One to four of: a flipped bit, a random byte, a cut, a repeated or overwritten stretch, an extreme number."""
    hurt = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, other = dice.randrange(len(hurt)), dice.randrange(len(hurt))
        match dice.randrange(6):
            case 0:
                hurt[at] ^= 1 << dice.randrange(8)
            case 1:
                hurt[at] = dice.randrange(256)
            case 2:
                del hurt[at : at + dice.randint(1, 8)]
            case 3:
                hurt[at : at + 8] = hurt[other : other + 8]
            case 4:
                hurt[at : at + 4] = struct.pack("<I", dice.choice([0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 16]))
            case 5:
                hurt[at:at] = hurt[other : other + dice.randint(1, 8)]
        if not hurt:
            hurt = bytearray(b"\0")
    return bytes(hurt)


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """(refused, accepted with digests made right again). Without that help every mutation must be refused."""
    dice, sources = random.Random(seed), streams()
    refused = accepted = 0
    for i in range(count):
        hurt = mutate(sources[i % len(sources)], dice)
        if hurt in sources:
            continue
        for data, fooled in ((hurt, False), (resign(bytearray(hurt)), True)):
            start = time.monotonic()
            try:
                back = cachegen.decode(data, limit=1 << 28)
            except StoreError:
                refused += 1
            else:
                assert fooled, "a mutation went unnoticed"
                accepted += 1
                assert sum(t.numel() for pair in back.layers for t in pair) < 1 << 27
            assert time.monotonic() - start < 20
    return refused, accepted


def test_mutations_are_refused() -> None:
    refused, accepted = fuzz(6000, 1)
    assert refused > 6000 and accepted > 200  # the second shows that damage does reach the decoder


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_hundred_thousand_mutations_are_refused(seed: int) -> None:
    refused, accepted = fuzz(10_500, seed)
    assert refused > 10_000 and accepted > 500


def rewrite(data: bytes, **changes: object) -> bytes:
    opened = box.read_bytes(data)
    sections = [opened.section(i) for i in range(len(opened.entries))]
    return box.pack({**opened.header, **changes}, sections)


@pytest.mark.parametrize(
    "changes",
    [
        {"tokens": 1 << 39}, {"tokens": -1}, {"tokens": 1.5}, {"tokens": None}, {"chunk": 0}, {"chunk": 1 << 30},
        {"dtype": "int8"}, {"shapes": [[1 << 19, 1 << 19, 1 << 19, 1]]}, {"shapes": [[2, 5, 5, 1 << 60]]},
        {"shapes": "x"}, {"shapes": []}, {"positions": [[0, 1 << 50]]}, {"positions": [[0, 39]]}, {"positions": 7},
        {"identity": {"nobody": 1}}, {"extra": 3}, {"level": 7}, {"chunk": True}, {"shapes": [[2, 5, 1]]},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_headers_are_corrupt(changes: dict[str, object]) -> None:
    with pytest.raises(CorruptBitstream):
        cachegen.decode(rewrite(streams()[0], **changes))


@pytest.mark.parametrize("using", ["native", "reference"])
def test_sections_that_no_encoder_writes_are_corrupt(using: coder.Backend) -> None:
    """Where digests are right: the C code would divide by a group of 0, or look behind its tables."""
    ops, x = coder.backend(using), torch.randn(2, 20, 3, generator=torch.Generator().manual_seed(0))
    x[0, 5, 1] = 1e3
    good, kind = lossy.encode(x, 0.5, reference), lossy.HEAD.size + 2 * 4
    size, _, group, far, words = lossy.HEAD.unpack_from(good)
    state = kind + 6 + 6 * size
    assert far > 0
    for at, new in (
        (0, b"\x03"), (1, b"\x01"), (2, b"\0\0"), (kind, b"\x3f"), (kind, b"\xc0"), (kind, b"\x7e"),
        (kind - 4, struct.pack("<f", 0)), (kind - 4, struct.pack("<f", -1)), (kind - 4, struct.pack("<f", float("nan"))),
        (state, struct.pack("<I", 1)), (state, struct.pack("<I", 1 << 20)),
    ):  # fmt: skip
        with pytest.raises(CorruptBitstream):
            lossy.decode(good[:at] + new + good[at + len(new) :], torch.empty_like(x), ops)
    longer = good[: state + 64] + b"\0\0" + good[state + 64 :], good + b"\0\0"
    for data, counts in zip(longer, ((far + 1, words), (far, words + 1)), strict=True):
        with pytest.raises(CorruptBitstream):
            lossy.decode(lossy.HEAD.pack(size, 0, group, *counts) + data[lossy.HEAD.size :], torch.empty_like(x), ops)


@pytest.mark.parametrize(
    "changes",
    [
        {"shapes": [[1, 1, 1, 1 << 15]] * 3}, {"tokens": 1 << 20, "positions": [[0, 1 << 20]]},
        {"identity": {"rope": 5}}, {"identity": {"rope": "ab"}},
    ],
    ids=str,
)  # fmt: skip
def test_a_header_without_sections_asks_for_nothing(changes: dict[str, object]) -> None:
    """No section bounds what it says: layers without tokens, tokens without layers."""
    data = cachegen.encode(cachegen.KV([]), "lossless")
    assert cachegen.decode(data).layers == []
    with pytest.raises(CorruptBitstream):
        cachegen.decode(rewrite(data, **changes), cachegen.Identity())


def test_tensors_that_fit_into_no_memory_are_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*shape: int, **options: object) -> torch.Tensor:
        raise RuntimeError("can't allocate memory")

    data = cachegen.encode(cache(), "low")
    monkeypatch.setattr(torch, "empty", none)
    with pytest.raises(IncompatibleCache, match="decoding takes 5120 bytes, for which there is no memory"):
        cachegen.decode(data)


def test_foreign_containers_are_incompatible() -> None:
    kv = cache(identity=cachegen.Identity(model="a", tokenizer="t", rope={"theta": 10000.0}))
    data = cachegen.encode(kv, "high")
    for other, named in (
        (cachegen.Identity(model="b", tokenizer="t", rope={"theta": 10000.0}), "model 'a'"),
        (cachegen.Identity(model="a", tokenizer="u", rope={"theta": 10000.0}), "tokenizer 't'"),
        (cachegen.Identity(model="a", tokenizer="t", rope={"theta": 5e5}), "rope"),
    ):
        with pytest.raises(IncompatibleCache, match=named):
            cachegen.decode(data, other)
    with pytest.raises(IncompatibleCache, match="kind"):
        cachegen.decode(rewrite(data, kind="session"))
    with pytest.raises(IncompatibleCache, match=tables.fingerprint()):
        cachegen.decode(rewrite(data, tables="0" * 16))
    with pytest.raises(IncompatibleCache, match="version 9"):
        cachegen.decode(data[:8] + b"\x09\x00" + data[10:])
    with pytest.raises(IncompatibleCache, match="flags 1"):
        cachegen.decode(data[:10] + b"\x01\x00" + data[12:])
    with pytest.raises(IncompatibleCache, match="limit"):
        cachegen.decode(data, limit=100)
    with pytest.raises(CorruptBitstream, match="magic"):
        cachegen.decode(b"PK\x03\x04" + bytes(100))


def test_the_limit_is_of_the_bytes_that_the_tensors_take() -> None:
    """Layers of different shapes."""
    kv = cachegen.KV([(torch.zeros(2, 40, 8), torch.zeros(2, 40, 6)), (torch.zeros(1, 40, 4), torch.zeros(1, 40, 10))])
    data, size = cachegen.encode(kv, "lossless"), sum(x.nbytes for pair in kv.layers for x in pair)
    assert len(cachegen.decode(data, limit=size).layers) == 2
    with pytest.raises(IncompatibleCache, match=f"takes {size} bytes"):
        cachegen.decode(data, limit=size - 1)


def test_a_header_too_deep_or_not_an_object_is_corrupt() -> None:
    for text in (b"[" * 100_000, b"[]", b"{", b"\xff"):
        front = box.PREAMBLE.pack(box.MAGIC, box.VERSION, 0, len(text), 0, box.PREAMBLE.size + len(text) + 8) + text
        with pytest.raises(CorruptBitstream):
            box.read_bytes(front + box.digest(front))


def test_a_file_that_is_replaced_while_it_is_read_is_read_to_its_end(tmp_path: Path) -> None:
    """It was called damaged, and to be deleted."""
    path = tmp_path / "s.kv"
    replace_file(path, box.pack({"n": 1}, [b"one" * 1000, b"more"]))
    held = box.read_file(path)
    replace_file(path, box.pack({"n": 2}, [b"two" * 3000]))
    held.verify()
    assert held.section(1) == b"more" and box.read_file(path).header == {"n": 2}


def test_files_that_were_read_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "s.kv"
    replace_file(path, box.pack({}, [b"one"]))
    (tmp_path / "t.kv").write_bytes(b"torn")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        box.read_file(path).verify()
        with pytest.raises(CorruptBitstream):
            box.read_file(tmp_path / "t.kv")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_is_replaced_keeps_its_permissions_whatever_its_name(tmp_path: Path) -> None:
    for name in ("s.kv", "漢" * 84, "x" * 255):
        path = tmp_path / name
        replace_file(path, b"first")
        path.chmod(0o600)
        replace_file(path, b"second")
        assert path.read_bytes() == b"second" and path.stat().st_mode & 0o777 == 0o600
    assert len(list(tmp_path.iterdir())) == 3


def test_drafts_of_a_killed_writer_go_when_the_file_is_written_again(tmp_path: Path) -> None:
    """Each time that a process was killed in `save`, a hidden file as large as a session stayed for ever."""
    path, now = tmp_path / "s.kv", time.time()
    for name, age in {
        ".s.kv.0123abcd.part": 7200,
        ".s.kv.4567cdef.part": 60,
        ".t.kv.0123abcd.part": 7200,
        ".s.kv.part": 7200,
    }.items():
        (tmp_path / name).write_bytes(b"torn")
        os.utime(tmp_path / name, (now - age, now - age))
    replace_file(path, b"whole")
    assert {one.name for one in tmp_path.iterdir()} == {
        "s.kv",
        ".s.kv.4567cdef.part",
        ".t.kv.0123abcd.part",
        ".s.kv.part",
    }


def test_what_is_no_plain_file_is_written_to_and_stays(tmp_path: Path) -> None:
    """Whoever saved to /dev/null as root had a plain file there from then on, and so had every other program."""
    pipe, link, dangling, file = (tmp_path / name for name in ("pipe", "link", "dangling", "file"))
    os.mkfifo(pipe)
    read = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    replace_file(pipe, b"whole")
    assert pipe.is_fifo() and os.read(read, 9) == b"whole"
    os.close(read)
    file.write_bytes(b"first")
    link.symlink_to(file)
    dangling.symlink_to(tmp_path / "new")
    for name in (link, dangling):
        replace_file(name, b"second")
        assert name.is_symlink() and name.read_bytes() == b"second"
    assert file.read_bytes() == (tmp_path / "new").read_bytes() == b"second"
    assert len(list(tmp_path.iterdir())) == 5
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path, b"")


def test_headers_are_plain_and_stable() -> None:
    data = cachegen.encode(cache(), "low")
    header = box.read_bytes(data).header
    assert json.loads(json.dumps(header)) == header
    assert data == cachegen.encode(cache(), "low")


def test_the_loops_without_wide_vectors_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    narrow = ("-mno-avx512f",) if b"avx512f" in library.processor("cc", native.FLAGS) else ()
    plain = native.load((*native.FLAGS, *narrow))
    kinds = [torch.float16, torch.bfloat16, torch.float32]
    kvs = [cache(tokens=53, dim=19, dtype=kind) for kind in kinds]
    wide = [cachegen.encode(kv, level) for kv in kvs for level in LEVELS]
    back = [stack(cachegen.decode(data)) for data in wide]
    monkeypatch.setattr(native, "load", lambda: plain)
    assert wide == [cachegen.encode(kv, level) for kv in kvs for level in LEVELS]
    assert all(torch.equal(a, stack(cachegen.decode(b))) for a, b in zip(back, wide, strict=True))


def test_every_half_survives_the_scalar_conversions() -> None:
    """All 65536 fp16 patterns through the lossless path's neighbours: conversions are checked by encode and decode."""
    x = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    x = torch.where(x.isfinite(), x, torch.zeros(())).reshape(1, 4096, 16)
    plain = cachegen.decode(cachegen.encode(cachegen.KV([(x, x)]), "near", using="reference"), using="reference")
    fast = cachegen.decode(cachegen.encode(cachegen.KV([(x, x)]), "near"))
    assert torch.equal(stack(plain), stack(fast))


def test_a_library_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torn one was loaded ever after: a bus error, or the slow coder."""
    synced, sync, source = list[bool](), os.fsync, tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    targets = [tmp_path / "codec.so", tmp_path / "kernels.so"]
    monkeypatch.setattr(os, "fsync", lambda handle: (sync(handle), synced.append(targets[len(synced)].exists()))[0])
    native._compile(["cc", *native.FLAGS], targets[0])
    library._build("cc", library.FLAGS, [source], targets[1])
    assert all(target.exists() for target in targets)
    assert synced == [False, False]


@pytest.mark.parametrize("given", [None, "", "not-there"])
def test_any_compiler_will_do(given: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As for the kernels: gcc or clang, where cc is not there or `$CC` names nothing."""
    cc = library.compiler()
    if cc is None:
        pytest.skip("no C compiler")
    other = tmp_path / "clang"
    other.write_text(f'#!/bin/sh\nPATH="{os.environ["PATH"]}" exec {cc} "$@" -O0\n')
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CC", raising=False) if given is None else monkeypatch.setenv("CC", given)
    assert native.load.__wrapped__().kv_choose


def test_without_a_compiler_numpy_takes_over_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing() -> None:
        raise StoreError("no C compiler found")

    kv = cache()
    data = cachegen.encode(kv, "low")
    coder._native.cache_clear()
    monkeypatch.setattr(native, "load", missing)
    assert coder.backend() is reference and "no C compiler" in caplog.text
    assert cachegen.encode(kv, "low") == data
    with pytest.raises(StoreError, match="compiler"):
        coder.backend("native")
    coder._native.cache_clear()
