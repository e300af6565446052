"""Compile every Triton kernel for a GPU that is not here, and report what each uses.

The operations are called with small CPU tensors while launches only compile, so what is compiled is what a launch
with such arguments would run. Run as `python -P -m kvengine.kernels.gpu.ahead --out FILE.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from kvengine.kernels import codecs, turboquant
from kvengine.kernels.attention.triton import attention
from kvengine.kernels.best_tokens.triton import best_tokens
from kvengine.kernels.column_mass.triton import received as column_mass
from kvengine.kernels.compact.triton import compact
from kvengine.kernels.fetch_kept import empty
from kvengine.kernels.fetch_kept.triton import fetch as fetch_new
from kvengine.kernels.fetch_pages.triton import fetch
from kvengine.kernels.gpu import compiling_for
from kvengine.kernels.gpu.digest import Digests, Given
from kvengine.kernels.gpu.used import Compiled, report
from kvengine.kernels.key_logits import NARROW
from kvengine.kernels.key_logits.triton import key_logits
from kvengine.kernels.lowrank_attention.triton import lowrank_attention
from kvengine.kernels.merge_states.triton import joined, merge_states, ongoing, received
from kvengine.kernels.page_scores.triton import log_shares, page_scores, top_units, units_by_share
from kvengine.kernels.paged_attention.triton import paged_attention
from kvengine.kernels.put_token import Limit
from kvengine.kernels.put_token.triton import put_token
from kvengine.kernels.quantise.triton import pack, quantise, turned_codes
from kvengine.kernels.span_attention import Band, band_spans, causal_spans
from kvengine.kernels.span_attention.triton import span_attention
from kvengine.kernels.state import State
from kvengine.kernels.step import Ends, Merged, Paid, Placed, Rule, Sealed
from kvengine.kernels.unit_places.triton import unit_places
from kvengine.kernels.verdict.triton import verdict

TARGETS = (80, 86, 90)
"""Compute capabilities, times ten."""
ROWS, PAGE, TABLE = 8, 64, 4


def compile_all(capability: int, only: Sequence[str] | None = None) -> list[Compiled]:
    """Every kernel of every case in `cases` (or of some), for one target. Raises what the compiler raises."""
    found = []
    for name, call in cases().items():
        if only is not None and name not in only:
            continue
        with only_compiling(capability) as compiled:
            call()
        found += [report(name, kernel, capability) for kernel in compiled]
    return found


def digests(
    capability: int, only: Sequence[str] | None = None, known: Mapping[str, str] | None = None
) -> list[tuple[str, Given]]:
    """Case and digests of what `compile_all` would give the compiler, in its order (with Triton 3.6). Of sources that are
    `known` the digest is taken from there."""
    names, given = list[str](), Digests(known)
    for name, call in cases().items():
        if only is None or name in only:
            with only_compiling(capability, given):
                call()
            names += [name] * (len(given) - len(names))
    return list(zip(names, given, strict=True))


@contextmanager
def only_compiling(capability: int, given: Digests | None = None) -> Iterator[list[Any]]:
    """Launches compile for the target and do nothing else; yields the list that collects the kernels. With `given` they do not
    even compile: it collects digests of what would be."""
    compiled: list[Any] = []

    def compile_only(self: Any, grid: Any) -> Callable[..., None]:
        return lambda *args, **kwargs: compiled.append(self.run(*args, grid=grid, warmup=True, **kwargs))

    before, launcher, token = driver._active, JITFunction.__getitem__, compiling_for.set(capability)
    compiler, kept = getattr(JITFunction, "_do_compile", None), -capability if given is None else -1000 - capability
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", capability, 32),
            get_current_device=lambda: kept,  # kernels are cached by device
            get_current_stream=lambda device: 0,
        )
    )
    JITFunction.__getitem__ = compile_only
    if given is not None:
        JITFunction._do_compile = lambda *args: given.note(*args)
    try:
        yield compiled
    finally:
        JITFunction.__getitem__ = launcher
        if given is not None:
            JITFunction._do_compile = compiler
        driver._active = before
        compiling_for.reset(token)


def cases() -> dict[str, Callable[[], object]]:
    """Calls that between them reach every kernel, with the shapes of an 8B model: 8 KV heads of 128, 4 queries each."""
    table = torch.arange(ROWS * TABLE, dtype=torch.int32).view(ROWS, TABLE)
    position = torch.arange(TABLE * PAGE, dtype=torch.int32).repeat(ROWS, 1)
    units = torch.zeros(ROWS, 16, dtype=torch.int64)
    at = torch.full((ROWS, 16), 500)
    bf16, state = torch.bfloat16, State(torch.zeros(ROWS, 4, 1, 128), torch.zeros(ROWS, 4, 1))

    def pool(
        codec: str, dim: int, dtype: torch.dtype, bits: int = 4, scaled: int = 32, page: int = PAGE
    ) -> dict[str, Tensor]:
        x = torch.zeros(ROWS * TABLE, page, dim, dtype=dtype)
        if codec == "dense":
            return {"k": x, "v": x if dim <= 512 else x[..., :512]}
        if codec == "kivi":
            return codecs.encode_kivi(x, x, bits, scaled)
        if codec == "quantspec":
            found = codecs.encode_kivi(x, x, 4, 64)
            return found | {"k_low": found["k_code"], "v_low": found["v_code"]}
        if codec == "turboquant":
            code, size = turboquant.encode(x, bits, "unbiased", torch.float16)
            return {"k_code": code, "k_scale": size, "v_code": code, "v_scale": size}
        return codecs.encode_zipcache(x, x, (4, 2), (torch.arange(page) < round(0.6 * page)).expand(len(x), -1))

    def pages(
        codec: str = "dense",
        dim: int = 128,
        query: int = 1,
        dtype: torch.dtype = bf16,
        bits: int = 4,
        chosen: bool = False,
        window: int | None = None,
        unit: int = 16,
        rows: int = ROWS,
        group: int = 4,
        wait: bool = False,
        scaled: int = 32,
        page: int = PAGE,
    ) -> Callable[[], object]:
        q, fields = torch.zeros(rows, group, query, dim, dtype=dtype), pool(codec, dim, dtype, bits, scaled, page)
        where = torch.arange(TABLE * page, dtype=torch.int32).repeat(rows, 1)
        return lambda: paged_attention(
            q, fields, table[:rows], where, page, 0.1, units[:rows] if chosen else None,
            unit if chosen else page, codec, min(dim, 512), at[:rows, :query] if window else None, window,
            None, None, False, wait,
        )  # fmt: skip

    def asked(codec: str) -> Callable[[], object]:
        q, fields = torch.zeros(ROWS, 4, 128, dtype=bf16), pool(codec, 128, bf16)
        if codec == "dense":
            fields["v"] = fields["v"][..., :NARROW]
        dim_v = fields["v"].shape[-1] if codec == "dense" else 128
        return lambda: key_logits(q, fields, table, position, PAGE, 0.1, codec, dim_v)

    def tail(
        query: int, dim: int = 128, dtype: torch.dtype = bf16, masked: bool = True, wait: bool = False
    ) -> Callable[[], object]:
        q, k = torch.zeros(ROWS, 4, query, dim, dtype=dtype), torch.zeros(ROWS, 256, dim, dtype=dtype)
        visible = torch.ones(ROWS, query, 256, dtype=torch.bool) if masked else None
        return lambda: attention(q, k, k, visible, 0.1, None if masked else 30.0, None, not masked, wait=wait)

    def weighed() -> object:
        part: Any = tail(1, masked=False, wait=True)()
        ongoing(part, joined([part], None, bf16)[0], torch.zeros(ROWS, 256), position[:, :256], count[:1], 0)
        return part

    def together(far: Callable[[], Any], near: Callable[[], Any]) -> Callable[[], object]:
        def call() -> object:
            parts = [far(), near()]
            return received(parts, joined(parts, None, bf16)[0])

        return call

    def put(slot: int | None, origin: int | None) -> Callable[[], object]:
        k, held, place = (
            torch.zeros(ROWS, 1, 128, dtype=bf16),
            torch.zeros(ROWS, 256, 128, dtype=bf16),
            position.clone(),
        )
        limit = Limit(count, 16, count.clone())
        return lambda: put_token(k, k, held, held, place, count[:1], slot, origin, 128, count.int(), None, limit)

    def judged(rule: Rule) -> Callable[[], object]:
        paid, score = torch.zeros(ROWS, 4, TABLE * PAGE), torch.zeros(ROWS, TABLE * PAGE)
        held = torch.zeros(ROWS, TABLE * PAGE, 128, dtype=bf16)
        return lambda: verdict(rule, position.clone(), count[:1], paid, score, held, held)

    def prompt(
        dtype: torch.dtype = bf16, dim: int = 128, local: int | None = None, by_head: bool = False
    ) -> Callable[[], object]:
        q, k = torch.zeros(ROWS, 4, 256, dim, dtype=dtype), torch.zeros(ROWS, 256, dim, dtype=dtype)
        band = None if local is None else Band(torch.zeros(ROWS, dtype=torch.int64), 16, local)
        spans = causal_spans(256, 256, k.device) if band is None else band_spans(256, 256, band)
        spans = spans.repeat(4 * ROWS, 1, 1, 1) if by_head else spans
        return lambda: span_attention(q, k, k, position, spans, 0.1, band, None, None, 128)

    def mass(
        dtype: torch.dtype = bf16, dim: int = 128, band: Band | None = None, most: bool = False
    ) -> Callable[[], object]:
        q, k = torch.zeros(ROWS, 4, 256, dim, dtype=dtype), torch.zeros(ROWS, 256, dim, dtype=dtype)
        real, sinks = torch.ones(ROWS, 256, dtype=torch.bool), torch.zeros(ROWS, 4)
        cap = None if band is None else 30.0
        return lambda: column_mass(
            q, k, position, torch.arange(256), real, 0.1, band, cap, None if band is None else sinks, most
        )

    def by_shares(
        units: int, outliers: float = 0.0, first: bool = False, softcap: float | None = None
    ) -> Callable[[], object]:
        mean, live = torch.zeros(ROWS, units, 128, dtype=bf16), torch.ones(ROWS, units, dtype=torch.bool)
        far, counts = (torch.zeros(ROWS, units, dtype=torch.float16), count) if outliers else (None, None)
        return lambda: units_by_share(q[:, :, 0], mean, live, 256, 0.1, counts, far, outliers, first, "max", softcap)

    bounds, x = torch.zeros(ROWS, 64, 128, dtype=bf16), torch.zeros(ROWS * TABLE, PAGE, 128, dtype=bf16)
    q, dense = torch.zeros(ROWS, 4, 1, 128, dtype=bf16), pool("dense", 128, bf16)
    basis, freq = torch.zeros(ROWS, 160, 128, dtype=bf16), torch.ones(64)
    u = torch.zeros(ROWS * TABLE, PAGE, 160, dtype=bf16)
    turned, levels = torch.zeros(64, 128), turboquant.levels(4)
    count = torch.full((ROWS,), 256)
    alive, ends = torch.ones(ROWS, TABLE * PAGE // 16, dtype=torch.bool), Ends(count, count)
    return {
        "tail, 1 query": tail(1),
        "tail, tree of 16 queries": tail(16),
        "tail, softcap, probabilities": tail(1, masked=False),
        "tail, dim 64, fp16": tail(1, 64, torch.float16),
        "tail, dim 256": tail(1, 256),
        "tail, dim 256, 64 queries": tail(64, 256),
        "tail, dim 512, 64 queries": tail(64, 512),
        "pages": pages(),
        "pages, fp32": pages(dtype=torch.float32),
        "pages, dim 256, fp32": pages(dim=256, dtype=torch.float32),
        "pages, dim 512": pages(dim=512),
        "pages, dim 512, fp32": pages(dim=512, dtype=torch.float32),
        "pages, one row": pages(rows=1),
        "pages, window": pages(window=4096, query=16),
        "units of 16": pages(chosen=True),
        "logits of keys": asked("dense"),
        "logits of keys, kivi": asked("kivi"),
        "latents, 16 heads": pages(dim=576, rows=1, group=16),
        "latents, 128 heads": pages(dim=576, rows=1, group=128),
        "latents, 128 heads, units of 16": pages(dim=576, rows=1, group=128, chosen=True),
        "latents, fp32": pages(dim=576, rows=1, group=16, dtype=torch.float32),
        "kivi, 2 bits": pages("kivi", bits=2),
        "kivi, 4 bits": pages("kivi"),
        "kivi, 2 bits, pages of 32": pages("kivi", bits=2, page=32),
        "kivi, 4 bits, pages of 32": pages("kivi", page=32),
        "kivi, 4 bits, groups of 64": pages("kivi", scaled=64),
        "kivi, 4 bits, groups of 128": pages("kivi", scaled=128, page=128),
        "kivi, 8 bits": pages("kivi", bits=8),
        "kivi, 4 bits, units of 16": pages("kivi", chosen=True),
        "kivi, dim 256": pages("kivi", 256),
        "kivi, dim 512": pages("kivi", 512),
        "kivi, units of 1": pages("kivi", chosen=True, unit=1),
        "quantspec": pages("quantspec"),
        "quantspec, units of 16": pages("quantspec", chosen=True),
        "quantspec, units of 1": pages("quantspec", chosen=True, unit=1),
        "quantspec, dim 256": pages("quantspec", 256),
        "quantspec, dim 512": pages("quantspec", 512),
        "turboquant, 2 bits": pages("turboquant", bits=2),
        "turboquant, 3 bits": pages("turboquant", bits=3),
        "turboquant, 4 bits": pages("turboquant"),
        "turboquant, 4 bits, units of 16": pages("turboquant", chosen=True),
        "turboquant, units of 1": pages("turboquant", chosen=True, unit=1),
        "turboquant, dim 256": pages("turboquant", 256),
        "turboquant, dim 512": pages("turboquant", 512),
        "zipcache": pages("zipcache"),
        "zipcache, pages of 128": pages("zipcache", page=128),
        "zipcache, units of 32": pages("zipcache", chosen=True, unit=32),
        "zipcache, dim 256": pages("zipcache", 256),
        "zipcache, dim 512": pages("zipcache", 512),
        "prompt, causal": prompt(),
        "prompt, each query head's spans": prompt(by_head=True),
        "prompt, band": prompt(local=64),
        "prompt, band, fp32": prompt(torch.float32, local=64),
        "prompt, dim 256": prompt(dim=256),
        "prompt, dim 256, fp32": prompt(torch.float32, dim=256),
        "prompt, dim 512": prompt(dim=512),
        "mass": mass(),
        "mass, fp32": mass(torch.float32),
        "mass, band, softcap, sinks": mass(band=Band(torch.zeros(ROWS, dtype=torch.int64), 16, 64)),
        "peak": mass(most=True),
        "mass, dim 256": mass(dim=256),
        "mass, dim 256, fp32": mass(torch.float32, dim=256),
        "mass, dim 512": mass(dim=512),
        "tail and pages, joined": together(pages(wait=True), tail(1, masked=False, wait=True)),
        "tail and turned pages, joined": together(pages("turboquant", wait=True), tail(1, masked=False, wait=True)),
        "tail, a mean of what is received": weighed,
        "merge of 2": lambda: merge_states([state] * 2),
        "merge of 4": lambda: merge_states([state] * 4),
        "bounds": lambda: page_scores(q[:, :, 0], bounds, bounds, torch.ones(ROWS, 64, dtype=torch.bool), "max"),
        "bounds, dim 512": lambda: page_scores(
            q.repeat(1, 1, 1, 4)[:, :, 0], *(bounds.repeat(1, 1, 4),) * 2, torch.ones(ROWS, 64, dtype=torch.bool), "max"
        ),
        "shares": lambda: log_shares(q[:, :, 0], bounds, torch.ones(ROWS, 64, dtype=torch.bool), 0.1),
        "by shares": by_shares(8192),
        "by shares, outliers": by_shares(16384, 0.1875),
        "by shares, the first, softcap": by_shares(1024, first=True, softcap=30.0),
        "top 128 of 8192": lambda: top_units(torch.zeros(ROWS, 8192), 128),
        "top 128 of 8191, some alive": lambda: top_units(
            torch.zeros(ROWS, 8191), 128, alive=torch.ones(ROWS, 8191, dtype=torch.bool)
        ),
        "top 128 of 32768": lambda: top_units(torch.zeros(ROWS, 32768), 128),
        "best 1024 of 1025": lambda: best_tokens(torch.zeros(ROWS, 1025), torch.full((ROWS,), 1024)),
        "put a token": put(None, 0),
        "put a token into a free slot": put(None, None),
        "put a token into a known slot": put(3, None),
        "verdict by ends": judged(Sealed(ends, position.clone(), alive)),
        "verdict by attention": judged(Paid(count, count, adds=True)),
        "verdict by place": judged(Placed(count, count)),
        "verdict that merges": judged(Merged(Paid(count, count, adds=True, first=count), torch.zeros(ROWS), 0.7)),
        "quantise keys": lambda: quantise(x, 4, 32, "tokens", None, torch.float16),
        "quantise values": lambda: quantise(x, 2, 32, "channels", None, torch.float16),
        "turned codes": lambda: turned_codes(turned, 4, 0, levels),
        "pack": lambda: pack(torch.zeros(64, 128, dtype=torch.uint8), 4),
        "places of units": lambda: unit_places(units, table, position, PAGE // 16, 16),
        "fetch": lambda: fetch(x, table[0].long(), x.device),
        "fetch what is new": lambda: fetch_new(empty({"v": x}, ROWS, 16), {"v": x}, table.flatten().long(), x.device, True),
        "compact": lambda: compact({"k": x}, table, position, table[:, :2], PAGE),
        "low rank": lambda: lowrank_attention(q, u, dense["v"], basis, freq, table, position, PAGE, 0.1, units, 8, 1.0, False),
    }  # fmt: skip


def note(capability: int, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each kernel uses; compiled are those that are not among what was noted before."""
    sources = {row["source"]: row["given"] for row in before if "source" in row}
    used = {row["given"]: row for row in before if row["target"] == f"sm_{capability}"}
    now = digests(capability, known=sources)
    new = {name for name, code in now if code.given not in used}
    compiled = iter(compile_all(capability, list(new)))
    rows = [
        (next(compiled)._asdict() if name in new else used[code.given] | {"case": name}, code) for name, code in now
    ]
    return [row | code._asdict() for row, code in rows]


def main() -> None:
    """Compile for every target and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, required=True, help="JSON file to write; what it knows is not compiled again"
    )
    parser.add_argument("--anew", action="store_true", help="compile what the file knows too")
    parsed = parser.parse_args()
    there = json.loads(parsed.out.read_text()) if parsed.out.exists() and not parsed.anew else {}
    before = there["kernels"] if there.get("triton") == triton.__version__ else []
    rows = [row for capability in TARGETS for row in note(capability, before)]
    parsed.out.write_text(
        json.dumps({"triton": triton.__version__, "torch": torch.__version__, "kernels": rows}, indent=1)
    )
    for row in rows:
        used = f"{row['registers']:4} registers {row['stack']:4} B spilled {row['shared']:7} B shared {row['loop']:5} in the loop"
        print(f"{row['target']} {row['kernel']:16} {row['case']:30} {used}")


if __name__ == "__main__":
    main()
