"""Side by side with kvpress 0.5.5: the same model, prompts, share removed and options; scores, times and bytes.

    python3 -m venv PEER && PEER/bin/pip install torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
    OMP_NUM_THREADS=1 python -P benchmarks/kvpress_compare.py PEER/bin/python [--contexts 5] [--lengths 2048,4096]

kvpress asks for transformers below 5.3, so it lives in an environment of its own; this script starts itself there as a
worker, and the two sides take turns, cell by cell, each on one core. A context is read and compressed before its
questions are known; then each of four questions is read and answered greedily from a copy of the cache.
Scores are RULER's (the value is in the answer), over all questions; the difference is paired by question, with a 95 %
bootstrap interval over contexts. Times are CPU seconds of the process that works: of reading and compressing the context,
and per token of decoding right after it (median of 24); the fastest of the contexts counts, as other work on the
machine only ever adds. A token's time depends on the version of transformers too: the third figure is that of this
environment's transformers with its own cache of as many tokens. Bytes are those of the cache after the context was
compressed: for kvpress keys and values, for kvengine everything it holds; and again after the decoded tokens.

kvpress judges the prompt only, so `decode=False` has StreamingLLM, TOVA and H2O do the same here; it has no H2O, its
ObservedAttentionPress (mean attention received, no recent window) is the nearest, and needs eager attention. Its AdaKV
masks what it drops and keeps the bytes.

Writes benchmarks/results/kvpress.json, and every cell to RUN/kvpress.jsonl as it is done; run again, it goes on there.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

TASKS = "quiz_multikey_1,quiz_multikey_2"
REMOVED = (0.5, 0.75, 0.875)
STEPS = 24  # decoded tokens that are timed
ANSWER = 10  # tokens of an answer

Job = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """One method under both names. `press` takes the share removed, `policy` the tokens and the share kept."""

    press: Callable[[Any, float], Any]
    policy: Callable[[int, float], str]
    attention: str = "sdpa"  # that kvpress needs


def snap(kvpress: Any, removed: float) -> Any:
    return kvpress.SnapKVPress(removed, window_size=32, kernel_size=5)


METHODS: dict[str, Method] = {
    "none": Method(lambda p, r: None, lambda n, s: "full"),
    "StreamingLLM": Method(
        lambda p, r: p.StreamingLLMPress(r, n_sink=4),
        lambda n, s: f"streaming(sinks=4, recent={max(1, int(n * s) - 4)}, decode=False)",
    ),
    "SnapKV": Method(snap, lambda n, s: f"snapkv(budget={s}, window=32, kernel=5)"),
    "PyramidKV": Method(
        lambda p, r: p.PyramidKVPress(r, window_size=32, kernel_size=5),
        lambda n, s: f"pyramidkv(budget={s}, window=32, kernel=5)",
    ),
    "AdaKV": Method(
        lambda p, r: p.AdaKVPress(snap(p, r), alpha_safeguard=0.2),
        lambda n, s: f"adakv(budget={s}, window=32, kernel=5, pool='avg')",
    ),
    "TOVA": Method(lambda p, r: p.TOVAPress(r), lambda n, s: f"tova(budget={s}, recent=1, decode=False)"),
    "KeyDiff": Method(lambda p, r: p.KeyDiffPress(r), lambda n, s: f"keydiff(budget={s})"),
    "ExpectedAttention": Method(
        lambda p, r: p.ExpectedAttentionPress(r), lambda n, s: f"expected_attention(budget={s})"
    ),
    "H2O": Method(lambda p, r: p.ObservedAttentionPress(r), lambda n, s: f"h2o(budget={s}, decode=False)", "eager"),
}


# Both sides


@dataclass
class Side:
    """How one library makes a cache, compresses a prompt into it, and counts it."""

    model: Callable[[Method], Any]
    around: Callable[[Any, Method, float, int], Any]  # context of reading the prompt
    cache: Callable[[Any], Any]
    size: Callable[[Any], tuple[int, float]]  # bytes, and tokens per head
    follow: Callable[[Any], None]
    apart: Callable[[Any], bool]  # whether a question must be read token by token

    @torch.inference_mode()
    def work(self, job: Job) -> Row:
        method, prompt = METHODS[job["method"]], job["prompt"]
        model = self.model(method)
        with self.around(model, method, job["removed"], len(prompt)):
            cache = self.cache(model)
            start = time.process_time()
            logits = step(model, cache, prompt, 0)
            compress = time.process_time() - start
        self.follow(cache)
        row = {"compress": compress, "bytes": self.size(cache)[0], "held": self.size(cache)[1]}
        asked = [[[i] for i in ids] if self.apart(cache) else [ids] for ids in job["asked"]]
        answers = [answer(model, branch(model, cache), parts, len(prompt), job["stop"]) for parts in asked]
        decode = decoded(model, cache, logits, len(prompt))
        return {**row, "decode": decode, "after": self.size(cache)[0], "answers": answers}


def decoded(model: Any, cache: Any, logits: torch.Tensor, at: int) -> float:
    """Seconds per token of going on from here, in the middle of `STEPS`."""
    times = []
    for i in range(STEPS):
        start = time.process_time()
        logits = step(model, cache, [int(logits.argmax())], at + i)
        times.append(time.process_time() - start)
    return statistics.median(times)


def step(model: Any, cache: Any, ids: list[int], at: int) -> torch.Tensor:
    positions = torch.arange(at, at + len(ids))[None]
    out = model(input_ids=torch.tensor([ids]), position_ids=positions, past_key_values=cache, logits_to_keep=1)
    last: torch.Tensor = out.logits[0, -1]
    return last


def branch(model: Any, cache: Any) -> Any:
    """A copy of the cache that knows the same configuration object."""
    return copy.deepcopy(cache, {id(model.config): model.config})


def answer(model: Any, cache: Any, parts: list[list[int]], at: int, stop: list[int]) -> list[int]:
    """Read a question in these parts and answer it."""
    new: list[int] = []
    while len(new) < ANSWER and (not new or new[-1] not in stop):
        for ids in [new[-1:]] if new else parts:
            logits = step(model, cache, ids, at)
            at += len(ids)
        new.append(int(logits.argmax()))
    return new


def load(path: str, attention: str = "sdpa") -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation=attention).eval()


# Theirs: a worker in the other environment, one JSON line per job


def theirs(path: str) -> Side:
    import contextlib

    import kvpress

    models = {how: load(path, how) for how in ("sdpa", "eager")}

    def around(model: Any, method: Method, removed: float, n: int) -> Any:
        press = method.press(kvpress, removed)
        return contextlib.nullcontext() if press is None else press(model)

    def size(cache: Any) -> tuple[int, float]:
        held = [layer.keys.shape[2] for layer in cache.layers]
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), statistics.fmean(held)

    def uneven(cache: Any) -> bool:
        """transformers makes one mask for all layers, but PyramidKV's hold different numbers of tokens."""
        return len({layer.keys.shape[2] for layer in cache.layers}) > 1

    return Side(lambda m: models[m.attention], around, lambda model: DynamicCache(), size, lambda cache: None, uneven)


def worker(path: str) -> None:
    side, out = theirs(path), sys.stdout
    sys.stdout = sys.stderr  # what libraries print must not get between the answers
    out.write(json.dumps({"transformers": transformers.__version__, "torch": torch.__version__}) + "\n")
    for line in sys.stdin:
        out.flush()
        out.write(json.dumps(side.work(json.loads(line))) + "\n")
        out.flush()


class Peer:
    """The worker, from this side."""

    def __init__(self, python: str, path: str) -> None:
        command = [python, "-P", str(Path(__file__).resolve()), python, "--worker", path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def work(self, job: Job) -> Row:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        while True:
            found: Row = json.loads(self.process.stdout.readline() or "null")
            if found is None:
                raise SystemExit("the kvpress worker ended; see its error above")
            if "answers" in found:
                return found


# Ours


def ours(path: str) -> Side:
    import kvengine

    model = load(path)

    def around(model: Any, method: Method, removed: float, n: int) -> Any:
        return kvengine.patched(model, method.policy(n, 1 - removed))

    def size(cache: Any) -> tuple[int, float]:
        stats = cache.stats()
        return stats.bytes_held, float(stats.held.float().mean())

    kvengine.patch(model)  # a cache goes on under the policy that it was made with
    follow = lambda cache: cache.follow_up()  # noqa: E731
    return Side(lambda m: model, around, kvengine.EngineCache, size, follow, lambda cache: False)


class Stock:
    """This environment's transformers with its own cache of as many tokens: what a version of transformers costs."""

    def __init__(self, path: str) -> None:
        self.model, self.prompt = load(path), list[int]()

    @torch.inference_mode()
    def decode(self, prompt: list[int], held: float) -> float:
        if prompt is not self.prompt:
            self.prompt, self.whole = prompt, DynamicCache(config=self.model.config)
            self.logits = step(self.model, self.whole, prompt, 0)
        cache = branch(self.model, self.whole)
        for layer in cache.layers:
            layer.keys, layer.values = (x[:, :, : int(held)].contiguous() for x in (layer.keys, layer.values))
        return decoded(self.model, cache, self.logits, len(prompt))


# The comparison


def jobs(given: argparse.Namespace, path: str) -> Iterator[tuple[str, Job, Any, Any]]:
    from kvengine.evals.prompt import Prompter
    from kvengine.evals.tasks import Plan, choose

    prompter = Prompter(AutoTokenizer.from_pretrained(path))
    stop = [i for i in (prompter.tokenizer.eos_token_id, *prompter.ids(".\n")) if i is not None]
    tasks, lengths = choose("quiz", given.tasks), [int(n) for n in given.lengths.split(",")]
    drawn = {
        (task.name, n): list(task.samples(Plan(length=n, count=given.contexts, seed=42, measure=prompter.measure)))
        for task in tasks
        for n in lengths
    }
    for index in range(given.contexts):
        for length in lengths:
            task = tasks[index % len(tasks)]
            sample = drawn[task.name, length][index]
            asked = [prompter.asked(turn) for turn in sample.turns]
            job = {"prompt": prompter.context(sample), "asked": asked, "stop": stop}
            score = lambda new, i, t=task, s=sample: t.score(s.turns[i], prompter.text(new))[t.metric]  # noqa: E731
            for name in METHODS:
                for removed in REMOVED if name != "none" else (0.0,):
                    key = f"{task.name}/{length}/{index}/{name}/{removed}"
                    yield key, {**job, "method": name, "removed": removed, "length": length}, score, index


def run(given: argparse.Namespace, path: str, journal: Path) -> list[Row]:
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    held = {row["key"] for row in done}
    sides, stock = {"kvpress": Peer(given.peer, path), "kvengine": ours(path)}, Stock(path)
    for key, job, score, index in jobs(given, path):
        if key in held:
            continue
        about = {"key": key, **{name: job[name] for name in ("method", "removed", "length")}, "context": index}
        for name, side in sides.items() if index % 2 else reversed(sides.items()):
            found = side.work(job)
            about[name] = {**found, "scores": [score(new, i) for i, new in enumerate(found.pop("answers"))]}
        about["stock"] = {"decode": stock.decode(job["prompt"], about["kvengine"]["held"])}
        done.append(about)
        with journal.open("a") as file:
            file.write(json.dumps(about) + "\n")
        print(key, *(f"{name} {statistics.fmean(about[name]['scores']):.2f}" for name in sides), flush=True)
    return done


def summary(rows: list[Row]) -> list[Row]:
    """One row per length, method and share removed."""
    from kvengine.evals.statistics import paired

    places = dict.fromkeys((row["length"], row["method"], row["removed"]) for row in rows)
    made = []
    for length, method, removed in sorted(places, key=lambda p: (p[0], list(METHODS).index(p[1]), p[2])):
        some = [row for row in rows if (row["length"], row["method"], row["removed"]) == (length, method, removed)]
        pair = [{(row["key"], i): s for row in some for i, s in enumerate(row[side]["scores"])} for side in SIDES]
        gap = paired(pair[1], pair[0])
        assert gap is not None
        best = lambda side, name, some=some: min(row[side][name] for row in some)  # noqa: E731
        mean = lambda side, name, some=some: statistics.fmean(row[side][name] for row in some)  # noqa: E731
        both = lambda how, name, form, scale=1.0: " / ".join(f"{how(s, name) * scale:{form}}" for s in SIDES)  # noqa: E731
        made.append({
            "length": length, "method": method, "removed": removed, "questions": gap.n, "contexts": gap.clusters,
            "scores": " / ".join(f"{100 * statistics.fmean(one.values()):.0f}" for one in pair),
            "gap": f"{100 * gap.mean:+.0f} ({100 * gap.low:+.0f} … {100 * gap.high:+.0f})",
            "compress": both(best, "compress", ".3f"),
            "decode": f"{both(best, 'decode', '.2f', 1e3)} / {1e3 * best('stock', 'decode'):.2f}",
            "kib": both(mean, "bytes", ".0f", 1 / 1024), "after": both(mean, "after", ".0f", 1 / 1024),
            "held": both(mean, "held", ".0f"),
            **{f"{side}_{name}": how(side, name) for side in SIDES
               for how, name in ((best, "compress"), (best, "decode"), (mean, "bytes"), (mean, "after"), (mean, "held"))},
            **{f"{side}_score": statistics.fmean(one.values()) for side, one in zip(SIDES, pair, strict=True)},
            "stock_decode": best("stock", "decode"), "gap_low": gap.low, "gap_high": gap.high,
        })  # fmt: skip
    return made


SIDES = ("kvpress", "kvengine")
COLUMNS = {
    "context": "length", "method": "method", "removed": "removed:g", "right (%): kvpress / kvengine": "scores",
    "difference (95 %)": "gap", "read and compress (s)": "compress", "decode (ms), stock too": "decode", "held (KiB)": "kib",
    f"after {STEPS} tokens (KiB)": "after", "tokens per head": "held",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", help="Python of an environment with kvpress")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--contexts", type=int, default=5)
    parser.add_argument("--lengths", default="2048,4096")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--run", type=Path, default=Path("runs/kvpress"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kvpress.json"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.worker:
        return worker(given.worker)
    from kvengine.evals import bundled_model

    path = bundled_model() if given.model == "bundled" else given.model
    given.run.mkdir(parents=True, exist_ok=True)
    rows = summary(run(given, path, given.run / "kvpress.jsonl"))
    result = {
        "command": f"python -P benchmarks/kvpress_compare.py PEER/bin/python --contexts {given.contexts} --lengths "
        f"{given.lengths}",
        "machine": f"the {given.model} model in float32, {rows[0]['contexts']} contexts per length with "
        f"{rows[0]['questions']} questions, seed 42; one core; pairs are kvpress 0.5.5 on transformers 5.2.0 / kvengine "
        f"on transformers {transformers.__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "columns": COLUMNS,
        "rows": rows,
    }
    given.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
