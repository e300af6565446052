"""Time to first token with a prompt's beginning from a store, against computing it, over context lengths.

    python -P benchmarks/prefix.py [--model FOLDER] [--lengths 512 1024 2048 4096] [--out FILE]

One thread, wall clock, best of three, interleaved; each run ends with the first new token. Tiers: host (values in this
process' memory), disk (the embedded file store, page cache warm), remote (an S3-compatible server over loopback, if the
tests' one can be started; Redis, if there is a server). Bytes are those stored for the whole chunks of the prompt.
"""

from __future__ import annotations

import argparse
import json
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

import kvengine
from kvengine.evals.loading import load, model_digest
from kvengine.evals.prompt import Prompter
from kvengine.evals.tasks._words import essay, prose
from kvengine.offload import stores
from kvengine.prefix import Prefix

LEVELS = ("lossless", "high", "low")


def seconds(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def first_token(model: Any, ids: torch.Tensor, cache: Any) -> int:
    with torch.inference_mode():
        cache.announce(ids.shape[1])
        out = model(input_ids=ids[:, cache.seen :], past_key_values=cache, use_cache=True, logits_to_keep=1)
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


def tiers(stack: ExitStack) -> dict[str, stores.Store]:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    made = {"host": stores.Store(stores.backend("memory://")), "disk": stores.Store(stores.Files(folder))}
    if (url := stack.enter_context(redis())) is not None:
        made["remote (Redis, loopback)"] = stores.Store(stores.Resp(url))
    for store in made.values():
        stack.callback(store.close)
    return made


def measure(model: Any, tokenizer: Any, ids: torch.Tensor, store: stores.Store, level: str) -> dict[str, Any]:
    reuse = Prefix(model, store, tokenizer, level=level)
    cache = kvengine.EngineCache(model, "full")
    cold_token = first_token(model, ids, cache)
    reuse.keep(ids, cache)
    store.drain()
    cold, warm = [], []
    for _ in range(3):
        cold.append(seconds(lambda: first_token(model, ids, kvengine.EngineCache(model, "full"))))
        warm.append(seconds(lambda: first_token(model, ids, reuse.fetch(ids))))
    found = reuse.fetch(ids)
    hits = found.seen
    keys = stores.chain(ids[0].tolist(), reuse.start, reuse.chunk)
    same = first_token(model, ids, found) == cold_token
    return {"cold_s": min(cold), "warm_s": min(warm), "speed_up": min(cold) / min(warm), "reused_tokens": hits,
            "stored_bytes": sum(size or 0 for size in store.sizes(keys)), "same_first_token": same}  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu", dtype="float32")
    ids = torch.tensor([Prompter(tokenizer).first(essay(prose(), max(options.lengths)))])
    rows = []
    with ExitStack() as stack, kvengine.patched(model, "full"):
        for name, store in tiers(stack).items():
            for length in options.lengths:
                for level in LEVELS:
                    row = {"tier": name, "tokens": length, "level": level}
                    rows.append(row | measure(model, tokenizer, ids[:, :length], store, level))
                    print(rows[-1], file=sys.stderr, flush=True)
    held = sum(2 * layer.num_key_value_heads for layer in [model.config] * model.config.num_hidden_layers)
    return {"model": model_digest(model), "bytes_per_token_bf16": 2 * held * model.config.head_dim, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "prefix.json")
    options = parser.parse_args()
    result = json.loads(json.dumps(run(options)), parse_float=lambda text: float(f"{float(text):.4g}"))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
