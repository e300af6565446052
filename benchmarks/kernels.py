"""Time one decode step's attention, by kernel, and set it against the bytes it must read.

    python -P benchmarks/kernels.py --device cpu --out benchmarks/results/kernels_cpu.json

Beside FILE.json it draws FILE.png and, on a CPU, writes FILE_targets.json: what decoding should reach, and did.

Shapes of an 8B model: 8 KV heads of 128, 4 query heads each. Within a length, all cases take turns, so that a busy
machine disturbs them alike (those over 60 ms every third turn). Before each call twice as much memory as the last-level
cache holds is read: what the case before has read is not there any more, and nothing that it wrote is still on its way to
memory. Reported per case: median, 20th and 80th percentile of the time; bytes that the method must read; the bandwidth
that makes; its share of the bandwidth of a copy (bytes copied, over time, in the same run); and the speed-up over stock
transformers' call and over our own full decode, beside the ratio of bytes.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from kvengine import memory
from kvengine.kernels import codecs
from kvengine.kernels.attention import attention
from kvengine.kernels.lowrank_attention import lowrank_attention
from kvengine.kernels.page_scores import best_units, page_bounds
from kvengine.kernels.page_scores.coarse import Coarse
from kvengine.kernels.paged_attention import paged_attention
from kvengine.policies.representation.quantspec import QuantSpec
from kvengine.policies.representation.turboquant import TurboQuant

HEADS, GROUP, DIM, PAGE, UNIT, BUDGET, RANK = 8, 4, 128, 64, 16, 2048, 160
SCALE = DIM**-0.5
MIDDLE, LONG = 32768, 131072
"""Lengths that the targets speak of."""
FIRST = ((32, 4096), (1, LONG), (8, LONG))
"""Batches and lengths that a GPU's targets speak of: measured before the others, as a device is lent for minutes."""
CHOICE = "quest 2048: bounds and choice"
AT_ONCE = 16384
"""Pages that are encoded at once."""
SHARE = 4.0
"""Memory that the cases take, over that of keys and values: these, what is copied into, and six encodings of them."""
SLOW = 60
"""Milliseconds above which a case takes only every third turn."""
COLUMNS = ("ms", "gb_per_s", "of_copy", "over_sdpa", "over_full", "byte_ratio")
HEADER = f"{'case':32}{'dtype':>10}{'batch':>6}{'tokens':>8}" + "".join(f"{name:>11}" for name in COLUMNS)


@dataclass
class Row:
    """One case at one length."""

    case: str
    dtype: str
    batch: int
    length: int
    ms: float
    p20: float
    p80: float
    bytes: int
    gb_per_s: float = 0.0
    of_copy: float = 0.0
    over_sdpa: float = 0.0
    over_full: float = 0.0
    byte_ratio: float = 0.0
    """Bytes of the dense cache over the bytes this case must read."""


Case = tuple[int, Callable[[], object]]
"""Bytes read, and what to time."""


def inputs(batch: int, length: int, dtype: torch.dtype, device: str) -> dict[str, Tensor]:
    """A cache of `batch` sequences as pages, row after row, and a query."""
    rng = torch.Generator(device).manual_seed(0)
    rows, pages = batch * HEADS, batch * HEADS * length // PAGE
    new = partial(torch.randn, generator=rng, device=device, dtype=dtype)
    k, v = kept(new(rows, length, DIM)), kept(new(rows, length, DIM))
    table = torch.arange(pages, dtype=torch.int32, device=device).view(rows, -1)
    position = torch.arange(length, dtype=torch.int32, device=device).repeat(rows, 1)
    alive = torch.ones(rows, length // UNIT, dtype=torch.bool, device=device)
    low, high = page_bounds(k, position >= 0, UNIT)
    return {"q": new(rows, GROUP, 1, DIM), "k": k, "v": v, "table": table, "position": position, "alive": alive,
            "low": kept(low), "high": kept(high)}  # fmt: skip


def kept(x: Tensor) -> Tensor:
    """A copy where a cache of ours holds it."""
    return memory.empty(x.shape, x.dtype, x.device).copy_(x)


def cases(x: dict[str, Tensor], batch: int) -> dict[str, Case]:
    """Everything to time."""
    q, k, v, table, position = (x[name] for name in ("q", "k", "v", "table", "position"))
    rows, length, _ = k.shape
    size, slot = k.element_size(), position.element_size()
    dense, pages = 2 * k.numel() * size, {"k": k.view(-1, PAGE, DIM), "v": v.view(-1, PAGE, DIM)}
    theirs = (k, v) if k.is_cuda else (k.clone(), v.clone())  # where a stock cache has them
    stock = [t.view(batch, -1, *t.shape[1:]) for t in (q.view(rows * GROUP, 1, DIM), *theirs)]
    many = torch.cat([q.roll(i, 3) for i in range(4)], 1)
    into = k.clone()  # written to before: the first touch of memory costs more
    read = partial(paged_attention, table=table, position=position, page=PAGE, scale=SCALE)
    coarse, chosen, asks = Coarse(), rows * min(BUDGET, length), q[:, :, 0]

    def choice() -> Tensor:
        return best_units(asks, x["low"], x["high"], x["alive"], BUDGET // UNIT, coarse=coarse)

    def quest(fields: dict[str, Tensor], codec: str) -> object:
        return read(q, fields, units=choice(), unit=UNIT, codec=codec)

    if not k.is_cuda:
        choice()  # makes the coarse bounds
    bounds = coarse.reads(length // UNIT, 2 * x["low"].numel() * size)

    found: dict[str, Case] = {
        "copy": (dense, lambda: (into.copy_(k), into.copy_(v))),
        "sdpa, grouped (stock)": (dense, lambda: F.scaled_dot_product_attention(*stock, enable_gqa=True)),
        "sdpa, group folded": (dense, lambda: F.scaled_dot_product_attention(q[None, :, :, 0], *(t[None] for t in theirs))),
        "full, contiguous": (dense, lambda: attention(q, k, v, None, SCALE)),
        "full, pages": (dense + rows * length * slot, lambda: read(q, pages)),
        "sdpa, groups of 16, folded": (
            dense,
            lambda: F.scaled_dot_product_attention(many[None, :, :, 0], *(t[None] for t in theirs)),
        ),
        "full, groups of 16": (dense + rows * length * slot, lambda: read(many, pages)),
        "quest 2048": (bounds + chosen * (2 * DIM * size + slot), lambda: quest(pages, "dense")),
        CHOICE: (bounds, choice),
    }  # fmt: skip
    if not k.is_cuda:
        found["full, contiguous, torch's memory"] = dense, lambda: attention(q, *theirs, None, SCALE)
    for unit in (1, 8, 64):
        drawn = torch.rand(rows, length // unit, device=k.device).topk(min(BUDGET, length) // unit, 1)
        ids = drawn.indices.sort(1).values
        part = chosen * (2 * DIM * size + slot) + ids.nbytes
        found[f"2048 tokens in units of {unit}"] = part, partial(read, q, pages, units=ids, unit=unit)
    mixed = torch.rand(len(pages["k"]), PAGE, device=k.device).argsort(1) < 38  # 60 % of a page
    groups = [(f"kivi {bits} bits", bits, 32) for bits in (8, 4, 2)]
    groups += [(f"kivi 4 bits, groups of {size}", 4, size) for size in (64, 128)] if k.is_cuda else []

    def turned(keys: Tensor, values: Tensor, bits: int) -> dict[str, Tensor]:
        return TurboQuant(bits).encode(keys.to(k.dtype), values.to(k.dtype), keys[..., 0])

    def nibbles(keys: Tensor, values: Tensor) -> dict[str, Tensor]:
        return QuantSpec(group=PAGE).encode(keys, values, keys[..., 0].abs())

    for name, codec, encode, *options in (
        *((name, "kivi", codecs.encode_kivi, *options) for name, *options in groups),
        ("quantspec 8 bits", "quantspec", nibbles),
        *((f"turboquant {bits} bits", "turboquant", turned, bits) for bits in (4, 2)),
        ("zipcache 4/2 bits", "zipcache", codecs.encode_zipcache, (4, 2), mixed),
    ):
        page = max(PAGE, *options) if codec == "kivi" else PAGE
        try:
            fields = encoded({n: x.view(-1, page, DIM) for n, x in pages.items()}, encode, *options)
        except Exception as error:
            if not k.is_cuda or isinstance(error, torch.OutOfMemoryError):
                raise
            print(f"FAILED {name}: {type(error).__name__}: {str(error)[:500]}", flush=True)  # the others go on
            continue
        held = sum(t.numel() * t.element_size() for t in fields.values())
        where = torch.arange(rows * length // page, dtype=table.dtype, device=table.device).view(rows, -1)
        found[name] = held + rows * length * slot, partial(read, q, fields, table=where, page=page, codec=codec)
        if name == "kivi 4 bits":
            part = held * chosen // (rows * length) + chosen * slot + bounds
            found["quest 2048, kivi 4 bits"] = part, partial(quest, fields, codec)
    return found | shadow(x, pages, rows, length) | latents(x, batch, length)


def encoded(pages: dict[str, Tensor], encode: Callable[..., dict[str, Tensor]], *options: Any) -> dict[str, Tensor]:
    """All pages' fields, some pages at a time: a wide copy of all would be twice the cache."""
    found: dict[str, Tensor] = {}
    for at in range(0, len(pages["k"]), AT_ONCE):
        some = slice(at, at + AT_ONCE)
        mine = [x[some] if isinstance(x, Tensor) else x for x in options]
        for name, x in encode(pages["k"][some].float(), pages["v"][some].float(), *mine).items():
            if name not in found:
                found[name] = memory.empty((len(pages["k"]), *x.shape[1:]), x.dtype, x.device)
            found[name][some] = x
    return found


def shadow(x: dict[str, Tensor], pages: dict[str, Tensor], rows: int, length: int) -> dict[str, Case]:
    """Low-rank keys: units chosen beforehand, as ShadowKV's landmarks cost what Quest's bounds do, and half."""
    q, device = x["q"], x["q"].device
    u = kept(torch.randn(rows // HEADS, length, RANK, device=device, dtype=q.dtype))
    basis, frequency = torch.randn(rows, RANK, DIM, device=device, dtype=q.dtype), torch.ones(DIM // 2, device=device)
    units = torch.rand(rows, length // 8, device=device).topk(min(BUDGET, length) // 8, 1).indices.sort(1).values
    call = partial(lowrank_attention, q, u, pages["v"], basis, frequency, x["table"], x["position"], page=PAGE,
                   scale=SCALE, units=units, unit=8)  # fmt: skip
    each = (RANK + DIM) * q.element_size() + x["position"].element_size()
    return {"low-rank keys 2048": (8 * units.numel() * each + units.nbytes + basis.nbytes, call)}


def latents(x: dict[str, Tensor], batch: int, length: int) -> dict[str, Case]:
    """Heads that share latents (MLA): 512 channels that are values too, and 64 more; in the memory of the keys."""
    q, found = x["q"], {}
    held = x["k"].flatten()[: batch * length * 576].view(batch, length, 576)
    pages = held.view(-1, PAGE, 576)
    table = torch.arange(len(pages), dtype=torch.int32, device=q.device).view(batch, -1)
    position, size = x["position"][:batch], held.numel() * held.element_size()
    for heads in (16, 128):
        asked = torch.randn(batch, heads, 1, 576, device=q.device, dtype=q.dtype)
        folded = asked.transpose(1, 2), held[:, None], held[:, None]
        found[f"sdpa over latents, {heads} heads"] = (
            size,
            partial(F.scaled_dot_product_attention, *folded, scale=0.04),
        )
        found[f"latents, {heads} heads"] = (
            size + batch * length * position.element_size(),
            partial(
                paged_attention, asked, {"k": pages, "v": pages[..., :512]}, table, position, page=PAGE, scale=0.04
            ),
        )
    return found


def beside() -> None:
    """Make the files of this folder importable, behind everything: kernels.py must not hide another package."""
    if (here := str(Path(__file__).parent)) not in sys.path:
        sys.path.append(here)


def once(call: Callable[[], object], device: str, cpu_time: bool) -> float:
    """Milliseconds of one call."""
    if device == "cuda":
        from peers import between_events  # `measure` has made it importable

        return between_events(call)
    clock = time.process_time if cpu_time else time.perf_counter
    began = clock()
    call()
    return (clock() - began) * 1e3


class TooLarge(Exception):
    """What should be measured does not fit into the device's memory."""


def check_memory(device: str, probe: int) -> None:
    """Raises TooLarge where it is known beforehand."""
    if device != "cuda":
        return
    gc.collect()
    torch.cuda.empty_cache()  # gives nothing back after a capture that failed, so what torch keeps counts as free
    kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    free, need = torch.cuda.mem_get_info()[0] + kept, int(SHARE * probe) + (2 << 30)
    if need > free:
        raise TooLarge(f"it takes {need / 1e9:.0f} GB, and {free / 1e9:.0f} GB are free")


def measure(
    batch: int, length: int, dtype: torch.dtype, device: str, rounds: int, cold: int, cpu_time: bool
) -> list[Row]:
    """All cases at one length, taking turns."""
    probe = 2 * batch * HEADS * length * DIM * dtype.itemsize
    check_memory(device, probe)
    x, others = inputs(batch, length, dtype, device), torch.ones(-(-cold // 4), device=device)
    found = cases(x, batch)
    if device == "cuda":
        beside()
        from peers import capture, peers

        found |= peers(x, batch, HEADS, PAGE)
        capture(found)
    times: dict[str, list[float]] = {name: [] for name in found}
    with torch.inference_mode():
        for turn in range(rounds + 2):
            for name, (_, call) in found.items():
                if times[name] and times[name][0] > SLOW and turn % 3:
                    continue
                others.sum()
                ms = once(call, device, cpu_time)
                if turn >= 2:  # the first two compile, allocate and warm up
                    times[name].append(ms)
    rows = []
    for name, taken in times.items():
        cuts = statistics.quantiles(taken, n=10)
        kind = (name, str(dtype).split(".")[1], batch, length)
        rows.append(Row(*kind, statistics.median(taken), cuts[1], cuts[7], found[name][0]))
    compare({row.case: row for row in rows})
    return rows


def compare(rows: dict[str, Row]) -> None:
    """Fill in what follows from the times; against a case that failed, nothing does."""
    copy, sdpa, full = (rows.get(name) for name in ("copy", "sdpa, grouped (stock)", "full, pages"))
    for row in rows.values():
        row.gb_per_s = row.bytes / row.ms / 1e6
        if copy is not None:
            row.of_copy, row.byte_ratio = row.gb_per_s / (copy.bytes / copy.ms / 1e6), copy.bytes / row.bytes
        row.over_sdpa, row.over_full = (0.0 if x is None else x.ms / row.ms for x in (sdpa, full))


def targets(rows: list[Row]) -> list[dict[str, Any]]:
    """What decoding on a CPU should reach, and what it did at batch 1, by dtype; lengths not measured are left out."""
    found: list[dict[str, Any]] = []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        ms = {(row.case, row.length): row.ms for row in rows if row.dtype == dtype and row.batch == 1}
        if ("copy", MIDDLE) not in ms:
            continue
        at = {name: ms[name, MIDDLE] for name, length in ms if length == MIDDLE}
        full, quest = at["full, pages"], at["quest 2048"]
        reached = {
            "full decode, over stock attention": (">= 3", at["sdpa, grouped (stock)"] / full),
            "full decode, time over that of a copy": ("<= 2", full / at["copy"]),
            "quest 2048, over full decode": (">= 4", full / quest),
            "KIVI 4 bits, over full decode": (">= 1", full / at["kivi 4 bits"]),
        }
        if ("quest 2048", LONG) in ms:
            where, apart = f"at {LONG}, time over that at {MIDDLE}", ms["quest 2048", LONG] - ms[CHOICE, LONG]
            reached[f"quest 2048 {where}"] = "", ms["quest 2048", LONG] / quest
            reached[f"quest 2048 {where}, bounds and choice apart"] = "<= 1.6", apart / (quest - at[CHOICE])
            reached[f"bounds and choice {where} (their bytes: 4)"] = "<= 4", ms[CHOICE, LONG] / at[CHOICE]
        found += [{"dtype": dtype, "what": name, "wanted": w, "reached": x} for name, (w, x) in reached.items()]
    return found


def summary(rows: list[Row], about: dict[str, str], command: str, picture: str) -> dict[str, Any]:
    """The targets as a table of the documentation."""
    columns = {"at 32768 tokens": "what", "dtype": "dtype", "wanted": "wanted", "reached": "reached:.2f"}
    where = f"{about['machine']}, {about['clock']} time, torch {about['torch']}; 8 KV heads of 128, 4 query heads each"
    drawn = {"Bandwidth against length, and speed-up beside the ratio of bytes": picture}
    return {"command": command, "machine": where, "columns": columns, "rows": targets(rows), "pictures": drawn}


def draw(rows: list[Row], file: Path) -> None:
    beside()
    try:
        from plot_kernels import plot
    except ImportError as error:
        print(f"no picture is drawn: {error}")
        return
    plot(sorted(rows, key=lambda r: (r.dtype, r.batch, r.length)), file)


def main() -> None:
    """Measure, print, write."""
    beside()
    from where import last_level, machine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 32768, 131072], help="tokens")
    parser.add_argument("--batches", type=int, nargs="+", default=[1], help="sequences")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument(
        "--cold", type=int, default=2 * last_level(), help="bytes that are read before each call (GPU: 1 << 30)"
    )
    parser.add_argument("--cpu-time", action="store_true", help="processor time, for one thread on a busy machine")
    args = parser.parse_args()
    rows, skipped, failed = list[Row](), list[str](), False
    print(HEADER)
    about = machine(args.device, args.cpu_time)
    shapes = list(itertools.product(args.dtypes, args.batches, args.lengths))
    if args.device == "cuda":
        shapes.sort(key=lambda shape: FIRST.index(shape[1:]) if shape[1:] in FIRST else len(FIRST))
    for dtype, batch, length in shapes:
        try:
            new = measure(batch, length, getattr(torch, dtype), args.device, args.rounds, args.cold, args.cpu_time)
        except Exception as error:  # a device is lent for minutes: the other shapes are measured
            skipped.append(f"{dtype}, batch {batch}, {length} tokens: {type(error).__name__}: {str(error)[:200]}")
            failed |= not isinstance(error, (TooLarge, torch.OutOfMemoryError))
            print("skipped:", skipped[-1], flush=True)
            new = []
        rows += new
        for r in new:
            figures = "".join(f"{getattr(r, name):11.2f}" for name in COLUMNS)
            print(f"{r.case:32}{r.dtype:>10}{r.batch:6}{r.length:8}{figures}", flush=True)
        found = about | {"skipped": skipped, "rows": [asdict(r) for r in rows]}
        args.out.write_text(json.dumps(found, indent=1))  # after each shape, so that a run that is cut off loses one
    if not rows:
        sys.exit("nothing was measured")
    picture = args.out.with_suffix(".png")
    draw(rows, picture)
    reached = summary(rows, about, f"python -P {' '.join(sys.argv)}", picture.name)
    if args.device == "cpu" and reached["rows"]:
        for row in reached["rows"]:
            print(f"{row['what']:75} {row['dtype']:9} {row['wanted']:>7} {row['reached']:6.2f}")
        args.out.with_name(f"{args.out.stem}_targets.json").write_text(json.dumps(reached, indent=1) + "\n")
    if failed:
        sys.exit(f"not all was measured; the rest is in {args.out}")


if __name__ == "__main__":
    main()
