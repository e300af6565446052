"""A session whose numbers were changed, digests and all, is refused before a kernel trusts them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support import llama, prompts

import kvengine
from kvengine import saved
from kvengine.errors import CorruptBitstream, IncompatibleCache, KVEngineError
from kvengine.offload.cachegen import lossless
from kvengine.offload.cachegen.coder import backend
from kvengine.offload.container import pack, read_file

STACK = "quest(budget=32, page=8)"
BAD = [-1, 0, 7, 1 << 20, 1 << 40, 1 << 70, None, True, "x", [], {}, 1.5, {"tensor": 0}, {"tensor": 99}, {"dict": {}}]
LANE = ("layers", 0, "lanes", 0)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Any], list[bytes]]:
    model, path = llama(), tmp_path_factory.mktemp("session") / "s.kv"
    kvengine.patch(model, "full")
    cache = kvengine.EngineCache(model, STACK)
    with torch.inference_mode():
        model(**prompts(1), cache=cache, use_cache=True)
    saved.save(cache, path, model)
    held = read_file(path)
    return model, held.header, [held.section(i) for i in range(len(held.entries))]


def places(x: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in inside:
        yield (*at, key)
        yield from places(value, (*at, key))


def changed(header: dict[str, Any], place: tuple[Any, ...], to: Any) -> dict[str, Any]:
    header = copy.deepcopy(header)
    at: Any = header
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = to
    return header


@pytest.mark.parametrize(("place", "to", "says"), [
    ((*LANE, "tail", "dict", "end"), 62, "says that it ends at 62"),
    ((*LANE, "tail", "dict", "end"), -3, "not a count"),
    ((*LANE, "tail", "dict", "lead"), 400, "begins with 400 tokens"),
    ((*LANE, "tail", "dict", "next"), {"tensor": 0}, "next"),
    ((*LANE, "tail", "dict", "v"), {"tensor": 0}, "v is not a tensor"),
    ((*LANE, "own", "dict", "ahead"), 1, "ahead is kept within a pass"),
    ((*LANE, "own", "dict", "lengths"), {"list": [{"tuple": [500, None]}]}, "500 of"),
    ((*LANE, "pages", "own", "dict", "columns"), 900, "columns are in use"),
    ((*LANE, "pages", "own", "dict", "filled"), {"tensor": 0}, "not as even"),
    (("layers",), [], "lacks or garbles"),
    (("layers", 0, "own", "dict", "fixed"), "x", "fixed is kept within a pass"),
    (("layers", 0, "own", "dict", "heads"), 1 << 28, "are not 268435456 heads"),
    (("layers", 0, "own", "dict", "sequences"), 1 << 28, "other rows than"),
    (("session", "prompt_end"), {}, "prompt_end is a dict"),
    (("session", "dense"), 1, "not yes or no"),
    (("shift",), 3, "where its rows go on"),
    (("shift",), {"tensor": 0}, "where its rows go on"),
    (("tensors", 4, 2), -1, "lacks or garbles"),
    (("tensors", 4, 2), 1 << 60, "s"),
])  # fmt: skip
def test_counts_that_cannot_be_are_refused(
    session: tuple[Any, dict[str, Any], list[bytes]], place: tuple[Any, ...], to: Any, says: str, tmp_path: Path
) -> None:
    model, header, sections = session
    (tmp_path / "s.kv").write_bytes(pack(changed(header, place, to), sections))
    with pytest.raises(CorruptBitstream, match=says):
        saved.load(model, tmp_path / "s.kv")


@pytest.mark.parametrize(("name", "to"), [("format", 2), ("kind", "beside")])
def test_what_is_no_session_of_this_format_is_refused(
    session: tuple[Any, dict[str, Any], list[bytes]], name: str, to: Any, tmp_path: Path
) -> None:
    model, header, sections = session
    (tmp_path / "s.kv").write_bytes(pack({**header, name: to}, sections))
    with pytest.raises(IncompatibleCache, match=f"holds .*{to}.*, not a session of format 1"):
        saved.load(model, tmp_path / "s.kv")


def test_what_earlier_versions_did_not_save_is_not_missed(
    session: tuple[Any, dict[str, Any], list[bytes]], tmp_path: Path
) -> None:
    model, header, sections = session
    older = copy.deepcopy(header)
    del older["session"]["without_ids"]
    for layer in older["layers"]:
        del layer["lanes"][0]["own"]["dict"]["former"]
    (tmp_path / "s.kv").write_bytes(pack(older, sections))
    lane = saved.load(model, tmp_path / "s.kv").engines[0].parts[0].lane
    assert torch.equal(lane.former, lane.begin)


@pytest.mark.parametrize("times", [1, 40])
def test_a_short_file_does_not_ask_for_all_memory(
    session: tuple[Any, dict[str, Any], list[bytes]], times: int, tmp_path: Path
) -> None:
    """Numbers that are all alike are coded in no bytes at all; and one tensor may be named many times."""
    model, header, sections = session
    sides = [1, (128 << 20) // 256 // times, 64]  # 128 MiB of zeros in all
    made = len(header["tensors"])
    body = lossless.encode(torch.zeros(sides), backend())
    assert len(body) < 2000
    changes = {"tensors": [*header["tensors"], ["float32", *sides]]}
    large = changed({**header, **changes}, (*LANE, "own", "dict", "lengths"), {"list": [{"tensor": made}] * times})
    (tmp_path / "s.kv").write_bytes(pack(large, [*sections, body]))
    with pytest.raises(CorruptBitstream, match="bytes cannot be all of its tensors"):
        saved.load(model, tmp_path / "s.kv")


def test_whatever_is_changed_is_refused_or_does_no_harm(
    session: tuple[Any, dict[str, Any], list[bytes]], tmp_path: Path
) -> None:
    model, header, sections = session
    dice, path, refused = random.Random(5), tmp_path / "s.kv", 0
    every = [place for place in places(header) if place[0] in ("layers", "session", "tensors")]
    for _ in range(300):
        path.write_bytes(pack(changed(header, dice.choice(every), dice.choice(BAD)), sections))
        try:
            cache = saved.load(model, path)
            with torch.inference_mode():
                model(input_ids=torch.tensor([[3]]), cache=cache, use_cache=True)
        except KVEngineError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("beside", [[], "x", 3, None])
def test_what_lies_beside_a_session_is_an_object(
    session: tuple[Any, dict[str, Any], list[bytes]], beside: Any, tmp_path: Path
) -> None:
    _, header, sections = session
    (tmp_path / "s.kv").write_bytes(pack({**header, "extra": beside}, sections))
    with pytest.raises(CorruptBitstream, match="beside the session"):
        saved.extra(tmp_path / "s.kv")


@pytest.mark.parametrize("byte", [0, 255])
def test_a_mask_that_names_other_tokens_than_a_page_has_is_refused(byte: int, tmp_path: Path) -> None:
    """The C kernel counts by it where a token's code lies: it read what is behind the pages."""
    model, path = llama(), tmp_path / "s.kv"
    kvengine.patch(model, "full")
    cache = kvengine.EngineCache(model, "zipcache(block=16)")
    with torch.inference_mode():
        model(**prompts(1), cache=cache, use_cache=True)
    saved.save(cache, path, model)
    held = read_file(path)
    sections = [held.section(i) for i in range(len(held.entries))]
    mask = held.header["layers"][0]["lanes"][0]["pages"]["fields"]["dict"]["mask"]["tensor"]
    sections[mask] = bytes([byte]) * len(sections[mask])
    path.write_bytes(pack(held.header, sections))
    with pytest.raises(CorruptBitstream, match="a page's mask names other tokens"):
        saved.load(model, path)
