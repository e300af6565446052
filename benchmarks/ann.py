"""How much of the exact choice an index finds, with the model's own queries and, for contrast, with keys as queries.

    python -P benchmarks/ann.py [--model FOLDER] [--tokens 4096] [--queries 64] [--budget 256] [--out FILE]

The bundled model reads English text; each layer's queries of the last tokens search the keys of all before them, per KV
head. Recall is the share of the `budget` keys with the largest q . k that the index returns; mass is the share of the
exact softmax that the returned keys have. Milliseconds are CPU time of one query, bytes those of the index. One thread,
about a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch

import kvengine
from kvengine.evals.loading import load, model_digest
from kvengine.evals.prompt import Prompter
from kvengine.evals.tasks._words import essay, prose
from kvengine.hf.names import CACHE
from kvengine.policies.selection._index import Row

PAGE = 16
COLUMNS = {
    "index": "index",
    "probe": "probe",
    "searched with": "queries",
    "recall": "recall:.3f",
    "of a tenth, below": "recall_p10:.3f",
    "share of the softmax": "mass:.3f",
    "CPU ms per query": "ms_per_query:.3f",
    "MB": "mb:.1f",
}
CASES = [("flat", 1), *(("ivf", n) for n in (1, 4, 8, 16, 32)), *(("hnsw", n) for n in (1, 4, 8, 16))]


def heads(model: Any, ids: torch.Tensor, queries: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Queries [query, dim] and keys [token, dim] of each KV head of each layer."""
    found: list[tuple[np.ndarray, np.ndarray]] = []

    def listen(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Any) -> None:
        n = (k.shape[2] - queries) // PAGE * PAGE
        asked = q[0].unflatten(0, (k.shape[1], -1))[:, :, -queries:].flatten(1, 2).float()
        found.extend(zip(asked.numpy(), k[0, :, :n].float().numpy(), strict=True))

    cache = kvengine.EngineCache(model, "full")
    for layer in cache.layers:
        layer.listener = listen  # type: ignore[union-attr]
    with torch.inference_mode():
        model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=1)
    return found


def case(kind: str, probe: int, data: list[tuple[np.ndarray, np.ndarray]], budget: int, by_key: bool) -> dict[str, Any]:
    recall, mass, spent, size = [], [], 0.0, 0
    for asked, keys in data:
        row = Row(kind, probe)
        row.columns = np.arange(len(keys) // PAGE)
        row.add(np.arange(len(keys) // PAGE), keys.reshape(-1, PAGE, keys.shape[1]))
        asked = keys[:: len(keys) // 64][:64] if by_key else asked
        alive, logits = np.ones(len(keys), dtype=bool), asked @ keys.T
        start = time.process_time()
        ids, _ = row.search(np.ascontiguousarray(asked), budget, alive)
        spent, size = spent + (time.process_time() - start) / len(asked), size + row.nbytes
        share = np.exp(logits * keys.shape[1] ** -0.5 - (logits * keys.shape[1] ** -0.5).max(1, keepdims=True))
        best = np.argpartition(-logits, budget, 1)[:, :budget]
        for i, (mine, exact) in enumerate(zip(ids, best, strict=True)):
            mine = mine[mine >= 0]
            recall.append(len(np.intersect1d(mine, exact)) / budget)
            mass.append(float(share[i, mine].sum() / share[i].sum()))
    return {"index": kind, "probe": probe, "queries": "keys" if by_key else "queries", "recall": float(np.mean(recall)),
            "recall_p10": float(np.quantile(recall, 0.1)), "mass": float(np.mean(mass)),
            "ms_per_query": 1000 * spent / len(data), "mb": size / 1e6}  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu", dtype="float32")
    ids = torch.tensor([Prompter(tokenizer).first(essay(prose(), options.tokens))])[:, : options.tokens]
    with kvengine.patched(model, "full"):
        data = heads(model, ids, options.queries)
    rows = []
    for kind, probe in CASES:
        for by_key in (False, True):
            rows.append(case(kind, probe, data, options.budget, by_key))
            print(rows[-1], file=sys.stderr, flush=True)
    machine = f"one CPU core{processor()}, faiss {faiss.__version__}, Python {platform.python_version()}"
    return {"model": model_digest(model), "machine": machine, "command": "python -P benchmarks/ann.py", "columns": COLUMNS,
            "tokens": ids.shape[1], "budget": options.budget, "heads": len(data), "rows": rows}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--queries", type=int, default=64)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ann.json")
    options = parser.parse_args()
    result = json.loads(json.dumps(run(options)), parse_float=lambda text: float(f"{float(text):.4g}"))
    options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
