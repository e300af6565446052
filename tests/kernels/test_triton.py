"""Triton kernels without a GPU: run in the interpreter against the same oracles, and compiled for real GPUs."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
SMALL = [
    "narrow_numbers and dtype0 and duo and quest and kivi",
    "merged or unseen or not_named or (softcap_and_sinks and not (False or 0.5 or True-None)) or survivors or dead_tokens "
    "or as_the_loop or (matches_a_loop and (fetch or (band-probes and column_mass) or units-48-24 "
    "or all-32-8 or causal-one "
    "or later and not causal or sparse-odd)) or turned_codes or (own_spans and later) "
    "or (far_apart and (count or masks or 1-300 or put or (1-70 and not (attention or mass)))) "
    "or (matches_lists and odd-3) or (views and lowrank) "
    "or (turned and pages and not turned-4) or some_at_a_time or (waiting and (2-torch.bfloat16 or several)) "
    "or told or halves or narrow_and_wide and triton-8 "
    "or no_numbers and (of_codes or joined or tokens-nan or inf-unbiased)",
]
"""Which tests of this folder: what the interpreter does in a minute, a model's and single kernels'."""
CODED = ["test_words.py", "test_lowrank_attention.py", "test_column_mass.py", "test_quantise.py"]
COMPILED = [
    "words_match and (4 or mixed or bfloat16) and not (forty or nine or turned-units or none or wide or more) "
    "and not (huge or small or salient or grow or width and (large or tiny or one or many or but)) and not long",
    "(matches_a_loop and (33 and bfloat16-max or units-48-24)) "
    "or (in_sixteen_bits and (bfloat16-96 or 47-torch.float16)) or (turned_codes and 3-72-0)",
]
"""The same of these files that takes a minute to compile: `mixed_kernel` alone is 10 to 25 seconds for each page length and
width."""
SOME = {80: ["bounds", "put a token"], 86: ["turboquant, dim 512"], 90: ["units of 16", "verdict by ends"]}
NOTED = HERE.parents[1] / "benchmarks/results/kernels_aot.json"
LIMITS = {80: 163 * 1024, 86: 99 * 1024, 90: 227 * 1024}
"""Shared memory a block can have, in bytes."""

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this test starts the interpreter itself"),
    pytest.mark.skipif("TRITON_COMPILED" in os.environ, reason="this test starts what runs compiled code itself"),
]


@pytest.fixture
def as_written(pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("jaxtyping_packages", None):
        pytest.skip("Triton compiles kernels as they are written, not what checks their signatures")


def interpret(files: list[str], which: str) -> None:
    """Run the tests of these files that name the Triton backend, in a process where it is interpreted."""
    if importlib.metadata.version("triton") == "3.9.0":
        pytest.skip(
            "its interpreter makes integers of a truth value that is spread over a block, and takes none as a mask"
        )
    run(files, which, {"TRITON_INTERPRET": "1"})


def any_of(which: list[str]) -> str:
    return " or ".join(f"({one})" for one in which)


def run(files: list[str], which: str, how: dict[str, str]) -> None:
    where = [str(HERE / file) for file in files]
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *where, "-k", which]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | how
    done = subprocess.run(command, cwd=HERE.parents[1], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def test_interpreted_on_a_few_cases() -> None:
    interpret(["."], f"triton and ({any_of(SMALL)})")


@pytest.mark.slow
def test_interpreted_on_all_cases() -> None:
    interpret(["."], "triton")


@pytest.mark.usefixtures("as_written")
def test_compiled_code_on_a_few_cases() -> None:
    """What a GPU would run, on a CPU (`support_ptx`): inline assembly, layouts, waits for copies."""
    run(CODED, f"triton and ({any_of(COMPILED)})", {"TRITON_COMPILED": "90"})


@pytest.mark.slow
@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_code_on_all_cases(capability: int) -> None:
    run(["."], "triton", {"TRITON_COMPILED": str(capability)})


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("capability", LIMITS)
def test_some_kernels_compile_ahead_of_time(capability: int) -> None:
    compiles(capability, SOME[capability])


@pytest.mark.slow
@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("capability", LIMITS)
def test_every_kernel_compiles_ahead_of_time(capability: int) -> None:
    compiles(capability, None)


def noted(capability: int) -> list[dict[str, Any]]:
    """What every kernel used when it was compiled for the record."""
    import triton

    record = json.loads(NOTED.read_text())
    if triton.__version__ != record["triton"]:
        pytest.skip(f"the record is of Triton {record['triton']}")
    return [row for row in record["kernels"] if row["target"] == f"sm_{capability}"]


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["sources", "translated"])
@pytest.mark.parametrize("capability", LIMITS)
def test_every_kernel_is_one_that_was_compiled(capability: int, whole: bool) -> None:
    """What the compiler would be given now is what it was given when registers and shared memory were noted."""
    from kvengine.kernels.gpu.ahead import digests

    rows = noted(capability)
    known = {} if whole else {row["source"]: row["given"] for row in rows}
    now = [(case, code.given) for case, code in digests(capability, None, known)]
    then = [(row["case"], row["given"]) for row in rows]
    changed = sorted({case for case, _ in set(now) ^ set(then)})
    assert not changed, f"note them anew: python -P -m kvengine.kernels.gpu.ahead --out {NOTED}"
    assert now == then and all(row["registers"] <= 255 and row["shared"] <= LIMITS[capability] for row in rows)


@pytest.mark.usefixtures("as_written")
def test_what_is_compiled_here_is_what_was_noted() -> None:
    from kvengine.kernels.gpu.ahead import compile_all

    (case,) = SOME[80][:1]
    then = [
        {name: x for name, x in row.items() if name not in ("source", "given")}
        for row in noted(80)
        if row["case"] == case
    ]
    assert [row._asdict() for row in compile_all(80, [case])] == then


def test_what_becomes_other_code_has_another_digest() -> None:
    from kvengine.kernels.gpu.ahead import only_compiling
    from kvengine.kernels.gpu.digest import Digests
    from kvengine.kernels.merge_states.triton import merge_states
    from kvengine.kernels.state import State

    noted(90)  # of another Triton nothing is known

    def given(parts: int, dim: int = 64, capability: int = 90) -> str:
        found = Digests()
        with only_compiling(capability, found):
            merge_states([State(torch.zeros(2, 4, 1, dim), torch.zeros(2, 4, 1))] * parts)
        (one,) = found
        return one

    assert given(2) == given(2)
    assert len({given(2), given(3), given(2, 128), given(2, capability=80)}) == 4


def compiles(capability: int, only: list[str] | None) -> None:
    from kvengine.kernels.gpu.ahead import cases, compile_all

    found = compile_all(capability, only)
    assert {row.case for row in found} == set(only or cases())
    for row in found:
        assert 0 < row.registers <= 255 and row.shared <= LIMITS[capability], row
        assert row.stack <= 512, row  # what spills stays in the first-level cache


@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(
    ("case", "kernel", "turns", "ranges", "most"),
    [
        ("kivi, 4 bits", "kivi_kernel", 1, 2 * 4 * 128 / 32, 0.45),  # in float16 for 32 numbers each
        ("turboquant, 4 bits", "words_kernel", 2, 2 * 2, 1.6),  # one scale for a key, one for a value
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("kivi, 4 bits, pages of 32", "kivi_kernel", 1, 2 * 4 * 128 / 32, 0.47),  # two of them a turn
                ("kivi, 4 bits, groups of 64", "kivi_kernel", 1, 2 * 4 * 128 / 64, 0.45),
                ("kivi, 4 bits, groups of 128", "kivi_kernel", 1, 2 * 4 * 128 / 128, 0.48),
                ("turboquant, 4 bits, units of 16", "words_kernel", 2, 2 * 2, 1.6),
                ("zipcache, pages of 128", "mixed_kernel", 0.5, 14 + 102.4 - 2 * 64, 1.0),  # 3.2 bits; a turn is a page
            ]
        ),
    ],
)
def test_codes_cost_few_instructions_for_their_bytes(
    case: str, kernel: str, turns: float, ranges: float, most: float
) -> None:
    """Beside what a multiprocessor of an H200 issues (4 a cycle) while its 132nd of 4.2 TB/s delivers 64 tokens of 128
    channels."""
    from kvengine.kernels.gpu.ahead import compile_all
    from kvengine.kernels.paged_attention import mixed
    from kvengine.kernels.paged_attention.words import EACH, EACH_OF_FOUR_BITS

    per_token = 2 * 64 + ranges + 4  # codes, their ranges, a position
    room = 4 * 1.755e9 * 64 * per_token / (4.2e12 / 132)
    (read,) = [row for row in compile_all(90, [case]) if row.kernel == kernel]
    loops = read.loop + read.second * (kernel == "mixed_kernel")
    if importlib.metadata.version("triton").startswith("3.8."):
        most *= 1.05  # it computes with some halves one by one, which 3.6 and 3.9 take in pairs
    assert 0 < turns * loops * read.warps < most * room  # so many turns for 64 tokens
    programs = {"kivi_kernel": EACH, "words_kernel": EACH_OF_FOUR_BITS, "mixed_kernel": mixed.EACH}[kernel]
    assert -(-read.registers // 8) * 8 * 32 * programs <= 65536  # all of them run at once
    assert (read.shared + 1024) * programs <= 228 << 10


@pytest.mark.sampled(3)
@pytest.mark.usefixtures("as_written")
@pytest.mark.parametrize(
    "case", ["kivi, 4 bits", "kivi, 4 bits, pages of 32", "turboquant, 4 bits", "low rank", "units of 16"]
)
def test_no_load_of_these_is_waited_for(case: str) -> None:
    """Of two bytes a lane, or where registers wait that are handed on, a compiler's loads come when they are wanted."""
    from kvengine.kernels.gpu.schedule import loops

    (found,) = [loop for loop in loops(90, [case]) if loop.kernel != "join_kernel"]
    assert found.instructions and not found.waits


@pytest.mark.slow
@pytest.mark.usefixtures("as_written")
def test_what_no_model_of_eight_billion_has_fits_a_small_chip() -> None:
    """Many query rows, wide ones, in float32."""
    from kvengine.kernels import codecs, turboquant
    from kvengine.kernels.attention.triton import attention
    from kvengine.kernels.gpu.ahead import only_compiling
    from kvengine.kernels.lowrank_attention.triton import lowrank_attention
    from kvengine.kernels.page_scores.triton import log_shares, page_scores
    from kvengine.kernels.paged_attention.triton import paged_attention
    from kvengine.kernels.span_attention import causal_spans
    from kvengine.kernels.span_attention.triton import span_attention

    q, x = torch.zeros(1, 64, 1, 256), torch.zeros(1, 64, 256)
    table, position = torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    wide, seen, units = q.repeat(1, 1, 1, 2), torch.ones(1, 64, dtype=torch.bool), torch.zeros(1, 4, dtype=torch.int64)
    code, size = turboquant.encode(x, 4, "unbiased", torch.bfloat16)
    turned = {"k_code": code, "k_scale": size, "v_code": code, "v_scale": size}
    kivi = codecs.encode_kivi(x, x, 4, 32, scale_dtype=torch.float32)
    more = 256, None, None, None, None, False
    lowrank = torch.zeros(1, 64, 32), x, torch.zeros(1, 32, 256), torch.ones(64), table, position, 64, 0.1
    with only_compiling(86) as compiled:
        attention(q, x, x, None, 0.1, None, None, False)
        paged_attention(q, kivi, table, position, 64, 0.1, None, 64, "kivi", *more)
        paged_attention(q.bfloat16(), turned, table, position, 64, 0.1, units, 16, "turboquant", *more)
        lowrank_attention(q, *lowrank, None, 64, 1.0, False)
        span_attention(q, x, x, position, causal_spans(1, 64, x.device), 0.1, None, None, None, 128)
        assert {kernel.name for kernel in compiled} == {
            "attend_kernel", "words_kernel", "lowrank_kernel", "stretch_kernel", "span_kernel", "join_kernel",
        }  # fmt: skip
        many = len(compiled)
        page_scores(wide[:, :, 0], x.repeat(1, 1, 2), x.repeat(1, 1, 2), seen, "max")
        log_shares(wide[:, :, 0], x.repeat(1, 1, 2), seen, 0.1)
        for asked, dim in ((q.bfloat16()[:, :40, 0].repeat(1, 1, 2)[..., :288], 288), (q[:, :, 0], 256)):
            stored = torch.zeros(1, 64, dim, dtype=asked.dtype)
            page_scores(asked, stored, stored, seen, "max")  # MiniCPM3's latents, and wide heads in float32
        assert len(compiled) == many  # by torch
        page_scores(q.bfloat16()[:, :, 0], x.bfloat16(), x.bfloat16(), seen, "max")
    assert [kernel.name for kernel in compiled[many:]] == ["score_kernel"]
    assert max(kernel.metadata.shared for kernel in compiled) <= LIMITS[86]


def test_a_long_prompt_fits_into_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first axis of a CUDA grid holds more than 65535 programs."""
    from triton.runtime.jit import JITFunction

    from kvengine.kernels.column_mass.triton import column_mass
    from kvengine.kernels.span_attention import causal_spans
    from kvengine.kernels.span_attention.triton import span_attention

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: lambda *a, **k: grids.append(grid))
    q, k = torch.zeros(2, 8, 262144, 1), torch.zeros(2, 262144, 1)
    position = torch.arange(262144).expand(2, -1)
    span_attention(q, k, k, position, causal_spans(262144, 262144, k.device), 0.1, None, None, None, 128)
    assert grids[0] == (2,) and grids[1][0] > 65535 and all(n <= 65535 for n in grids[1][1:])
    q, k, position = (x.repeat_interleave(16, 2 if x.dim() == 4 else 1) for x in (q[:, :2], k, position))
    real = torch.ones(2, len(at := torch.arange(16 * 262144)), dtype=torch.bool)
    column_mass(q, k, position, at, real, 0.1, None, None, None)
    assert grids[2:4] == [(2,)] * 2 and len(grids) == 6
    assert all(grid[0] > 65535 and grid[1] == 4 for grid in grids[4:])


def test_many_heads_of_many_queries_fit_into_the_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """As latents have them."""
    from triton.runtime.jit import JITFunction

    from kvengine.kernels.attention.triton import attention

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(JITFunction, "__getitem__", lambda self, grid: lambda *a, **k: grids.append(grid))
    q, k = torch.zeros(1, 128, 600, 16), torch.zeros(1, 40, 16)
    attention(q, k, k, None, 0.1, None, None, False)
    assert len(grids) == 2 and all(n <= 65535 for grid in grids for n in grid[1:])


def test_many_heads_of_many_queries_take_no_more_room_for_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each tile of query rows few programs find something, where there are many tiles."""
    from kvengine.kernels.gpu import stream

    monkeypatch.setattr(stream, "programs", lambda device, each: 132 * each)
    found = [stream.Partials(torch.zeros(1, 128, n, 16), 512, 1 << 17, 32, None, n * 2) for n in (1, 169)]
    assert [x.programs for x in found] == [128, 1]  # of 132 as many as divide the row
    assert found[1].parts.numel() <= 2 * 169 * 128 * 512


@pytest.mark.usefixtures("as_written")
def test_lengths_do_not_decide_what_is_compiled() -> None:
    """Triton compiles apart for numbers that are 1 or a multiple of 16. As a text grows its lengths become all of these,
    and a decode step in the middle of it would wait for the compiler."""
    from kvengine.kernels.attention.triton import attention
    from kvengine.kernels.best_tokens.triton import best_tokens
    from kvengine.kernels.column_mass.triton import column_mass
    from kvengine.kernels.fetch_pages.triton import fetch
    from kvengine.kernels.gpu.ahead import only_compiling
    from kvengine.kernels.lowrank_attention.triton import lowrank_attention
    from kvengine.kernels.page_scores.triton import page_scores, top_units
    from kvengine.kernels.paged_attention.triton import paged_attention
    from kvengine.kernels.put_token.triton import put_token
    from kvengine.kernels.span_attention import causal_spans
    from kvengine.kernels.span_attention.triton import span_attention
    from kvengine.kernels.step import Ends
    from kvengine.kernels.unit_places.triton import unit_places
    from kvengine.kernels.verdict.triton import verdict

    q, k = torch.zeros(2, 3, 17, 32), torch.zeros(2, 64, 32)
    one, page = q[:, :, :1], torch.zeros(40, 16, 32)
    with only_compiling(90) as compiled:
        for n in (1, 5, 16):
            seen, position = torch.ones(2, 1, n, dtype=torch.bool), torch.zeros(2, 16 * n, dtype=torch.int32)
            table, units = torch.zeros(2, n, dtype=torch.int32), torch.zeros(2, n, dtype=torch.int64)
            attention(one, k[:, :n], k[:, :n], seen, 0.1, None, None, False)
            paged = one, {"k": page, "v": page}, table, position, 16, 0.1, units, 16, "dense", 32
            paged_attention(*paged, None, None, None, None, False)
            u, basis = torch.zeros(1, n, 24), torch.zeros(2, 24, 32)
            lowrank_attention(one, u, page, basis, torch.ones(16), table, position, 16, 0.1, units, 16, 1.0, False)
            page_scores(one[:, :, 0], k, k, seen[:, 0], "max")
            fetch(page[: n + 20], table[0], page.device)
            few = (
                torch.zeros(2, 3, n, 32),
                *[torch.zeros(2, n + 16, 32)] * 2,
                torch.zeros(2, n + 16, dtype=torch.int32),
            )
            spans = causal_spans(n, n + 16, k.device).repeat(1, 1, n, 1)
            span_attention(*few, spans, 0.1, None, None, None, 128)
            top_units(torch.zeros(2, 32 + n), 8 + n % 7)
            best_tokens(torch.zeros(2, 32 + n), torch.ones(2))
            at, real = torch.arange(n), torch.ones(2, n, dtype=torch.bool)
            column_mass(few[0], few[1], few[3], at, real, 0.1, None, None, None)
            slots, now = torch.zeros(2, n + 1, 32), torch.zeros(1, dtype=torch.int32)
            put_token(one[:, 0], one[:, 0], slots, slots, position[:, : n + 1], now, n, None, 0, None, None, None)
            verdict(Ends(torch.zeros(2), torch.ones(2)), position[:, : n + 1], now, None, None, None, None)
            unit_places(units, table, position, 1, 16)
    kinds = Counter(kernel.name for kernel in {id(kernel): kernel for kernel in compiled}.values())
    # The tail's and the pages' attention differ, and so does what joins their parts.
    assert kinds.pop("attend_kernel") == 2 and kinds.pop("join_kernel") <= 3
    assert set(kinds) == {
        "lowrank_kernel", "score_kernel", "fetch_kernel", "span_kernel", "lse_kernel", "mass_kernel", "top_kernel",
        "best_kernel", "put_kernel", "ends_kernel", "places_kernel", "stretch_kernel",
    }  # fmt: skip
    assert set(kinds.values()) == {1}, kinds
