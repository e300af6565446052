"""Time to first token with a prompt's beginning from a store, against computing it, over context lengths.

    python -P benchmarks/prefix.py [--model FOLDER] [--lengths 1024 2048 4096 8192] [--out FOLDER]

One thread, wall clock, best of three; each run ends with the first new token. Tiers: host (values in this process'
memory), disk (the embedded file store, page cache warm), remote (Redis over loopback, if there is a server). Bytes are
those stored for the whole chunks of the prompt.

Then the pages of a live cache on each tier: milliseconds per decoded token, bytes by tier, and how many of the pages
that were read had been fetched ahead. About four minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

import kvengine
from kvengine.evals.loading import load, model_digest
from kvengine.evals.prompt import Prompter
from kvengine.evals.tasks._words import essay, prose
from kvengine.hf.names import CACHE
from kvengine.offload import stores
from kvengine.offload.placement._tiered import Tiered
from kvengine.prefix import Prefix

LEVELS = ("lossless", "high", "low")
COLUMNS = {"from": "tier", "tokens": "tokens", "level": "level", "computed (s)": "cold_s:.3f", "from the tier (s)": "warm_s:.3f",
           "times faster": "speed_up:.1f", "stored (MB)": "stored_mb:.2f", "tokens reused": "reused_tokens",
           "same first token": "same"}  # fmt: skip
LIVE = {
    "pages on": "pages on",
    "tokens": "tokens",
    "decode (ms)": "ms:.1f",
    **{f"{tier} (MB)": f"{tier}:.2f" for tier in ("device", "host", "disk", "remote")},
    "fetched ahead": "ahead:.0%",
    "same next tokens": "same",
}


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def first_token(model: Any, ids: torch.Tensor, cache: Any) -> int:
    with torch.inference_mode():
        cache.announce(ids.shape[1])
        out = model(input_ids=ids[:, cache.seen :], **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return int(out.logits[0, -1].argmax())


@contextmanager
def redis() -> Iterator[str | None]:
    """The URL of a Redis server of our own; None where there is none to start."""
    server = shutil.which("valkey-server") or shutil.which("redis-server")
    if server is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [server, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--daemonize", "no"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        time.sleep(1.0)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def tiers(stack: ExitStack, url: str | None) -> dict[str, stores.Store]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    made = {"host": stores.Store(stores.backend("memory://")), "disk": stores.Store(stores.Files(folder))}
    if url is not None:
        made["remote (Redis, loopback)"] = stores.Store(stores.Resp(url))
    for store in made.values():
        stack.callback(store.close)
    return made


def cold(model: Any, ids: torch.Tensor) -> tuple[kvengine.EngineCache, int, float]:
    """The prompt computed: its cache, its first new token, and the least seconds of three runs."""
    spent = []
    for _ in range(3):
        cache = kvengine.EngineCache(model, "full")
        start = time.perf_counter()
        token = first_token(model, ids, cache)
        spent.append(time.perf_counter() - start)
    return cache, token, min(spent)


def measure(
    model: Any, tokenizer: Any, ids: torch.Tensor, store: stores.Store, level: str, computed: tuple[Any, int, float]
) -> dict[str, Any]:
    reuse = Prefix(model, store, tokenizer, level=level)
    cache, token, cold_s = computed
    reuse.keep(ids, cache)
    store.drain()
    warm = min(seconds(lambda: first_token(model, ids, reuse.fetch(ids))) for _ in range(3))
    found = reuse.fetch(ids)
    hits = found.seen
    keys = stores.chain(ids[0].tolist(), reuse.start, reuse.chunk)
    same = first_token(model, ids, found) == token
    return {"cold_s": cold_s, "warm_s": warm, "speed_up": cold_s / warm, "reused_tokens": hits,
            "stored_mb": sum(size or 0 for size in store.sizes(keys)) / 1e6, "same": "yes" if same else "no"}  # fmt: skip


def placements(url: str | None, folder: str, bytes_of_pages: int) -> dict[str, str]:
    """Where pages live: all of them on one tier, but for a sixteenth of them on each tier above."""
    part = bytes_of_pages // 16
    found = {
        "device": "device",
        "host": "host",
        "host, resident set": "host(resident=1024, keep='lru')",
        "disk": f"disk(folder={folder!r}, device={part}, host={part})",
    }
    return found if url is None else found | {"remote": f"remote(url={url!r}, device={part}, host={part})"}


def written(cache: kvengine.EngineCache) -> None:
    """Wait until pages on their way down are there."""
    for pages in (part.lane.pages for layer in cache.engines for part in layer.parts):
        for shelf in () if pages is None else pages.pool.shelves:
            if isinstance(shelf, Tiered):
                shelf.flush()


def live(model: Any, ids: torch.Tensor, where: str, policy: str, steps: int = 64) -> dict[str, Any]:
    """The last tokens taken one by one, with pages on that tier."""
    cache = kvengine.EngineCache(model, policy)
    ids, rest = ids[:, :-steps], ids[:, -steps:]
    spent, tokens = [], [first_token(model, ids, cache)]
    with torch.inference_mode():
        for i in range(steps):
            start = time.perf_counter()
            out = model(input_ids=rest[:, i : i + 1], **{CACHE: cache}, use_cache=True)
            tokens.append(int(out.logits[0, -1].argmax()))
            spent.append(time.perf_counter() - start)
    written(cache)
    stats = cache.stats()
    mb = {tier: sum(fields.values()) / 1e6 for tier, fields in stats.bytes.items()}
    below = sum(n for tier, n in stats.served.items() if tier not in ("device", "host"))
    ahead = stats.served.get("ahead", 0) / below if below else None
    return {"pages on": where, "policy": policy.split("(folder")[0].split("(url")[0], "tokens": ids.shape[1],
            "ms": 1000 * sorted(spent)[len(spent) // 2], "device": mb.get("device", 0), "host": mb.get("host", 0),
            "disk": mb.get("disk", 0), "remote": mb.get("remote", 0), "ahead": ahead, "text": tokens}  # fmt: skip


def lives(model: Any, ids: torch.Tensor, url: str | None) -> list[dict[str, Any]]:
    config = model.config
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4 * config.num_hidden_layers
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for where, placement in placements(url, folder, per_token * ids.shape[1]).items():
            rows.append(live(model, ids, where, f"quest(budget=1024) + {placement}"))
            print(rows[-1], file=sys.stderr, flush=True)
    first = rows[0].pop("text")
    return [row | {"same": "yes" if row.pop("text", first) == first else "no"} for row in rows]


def run(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu", dtype="float32")
    ids = torch.tensor([Prompter(tokenizer).first(essay(prose(), max(options.lengths)))])
    rows = []
    with ExitStack() as stack, kvengine.patched(model, "full"):
        url = stack.enter_context(redis())
        made = tiers(stack, url)
        for length in options.lengths:
            computed = cold(model, ids[:, :length])
            for name, store in made.items():
                for level in LEVELS:
                    row = {"tier": name, "tokens": length, "level": level}
                    rows.append(row | measure(model, tokenizer, ids[:, :length], store, level, computed))
                    print(rows[-1], file=sys.stderr, flush=True)
        placed = lives(model, ids[:, : max(options.lengths)], url)
    machine = f"one CPU core{processor()}, torch {torch.__version__}, Python {platform.python_version()}"
    shared = {"model": model_digest(model), "machine": machine, "command": "python -P benchmarks/prefix.py"}
    return {
        "prefix": shared | {"columns": COLUMNS, "rows": rows},
        "tiers": shared | {"columns": LIVE, "rows": placed},
    }


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Seconds to the first token over the length of the prompt."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    first = [row for row in rows if (row["tier"], row["level"]) == (rows[0]["tier"], rows[0]["level"])]
    axes.plot([r["tokens"] for r in first], [r["cold_s"] for r in first], "k.-", label="computed")
    for i, tier in enumerate(dict.fromkeys(row["tier"] for row in rows)):
        for level, line in (("lossless", "-"), ("low", "--")):
            some = [row for row in rows if (row["tier"], row["level"]) == (tier, level)]
            axes.plot(
                [r["tokens"] for r in some], [r["warm_s"] for r in some], f"C{i}.{line}", label=f"{tier}, {level}"
            )
    axes.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="seconds to the first token")
    axes.set_xticks([r["tokens"] for r in first], [str(r["tokens"]) for r in first], minor=False)
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for both files")
    options = parser.parse_args()
    result = json.loads(json.dumps(run(options)), parse_float=lambda text: float(f"{float(text):.4g}"))
    draw(result["prefix"]["rows"], options.out / "prefix.png")
    result["prefix"]["pictures"] = {"Seconds to the first token, computed and from each tier": "prefix.png"}
    for name, part in result.items():
        (options.out / f"{name}.json").write_text(json.dumps(part, indent=1) + "\n")


if __name__ == "__main__":
    main()
