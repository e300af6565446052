"""Side by side with kvpress 0.5.5: the same model, prompts, share removed and options; scores, times and bytes.

    python3 -m venv PEER && PEER/bin/pip install torch==2.13.0 transformers==5.2.0 kvpress==0.5.5
    OMP_NUM_THREADS=1 python -P benchmarks/kvpress_compare.py PEER/bin/python [--contexts 5] [--lengths 2048,4096]
    make docs

kvpress asks for transformers below 5.3, so it lives in an environment of its own; this script starts itself there as a
worker, and the two sides take turns, cell by cell, each on one core. A context is read and compressed before its
questions are known; then each of four questions is read and answered greedily from a copy of the cache.
Scores are RULER's (the value is in the answer), over all questions; the difference is paired by question, with a 95 %
interval over contexts. Bytes are those that the cache's tensors are allocated after the context was compressed: for
kvpress keys and values, for kvengine everything it holds; and again after the decoded tokens.

Times are CPU seconds of the process that works: of reading and compressing the context, and per token of decoding right
after it (median of 24). Each side does both `--rounds` times in turns, first the one, then the other. The times shown are
the fastest, as other work on the machine only ever adds; the verdict is the middle of the ratios of neighbours in time,
ours to theirs, with a 95 % interval that supposes nothing of their distribution (order statistics; the whole range where
there are fewer than six). A token's time depends on the version of transformers too: the third figure is that of this
environment's transformers with its own cache of as many tokens.

kvpress judges the prompt only, so `decode=False` has StreamingLLM, TOVA and H2O do the same here. It has no H2O; its
ObservedAttentionPress (mean attention received, no recent window) is the nearest, and needs eager attention: beside it
stand the same rule and the paper's (sums, half of the budget recent). Its AdaKV and its KVzip mask what they drop
and keep the bytes; from a second chunk of 2048 tokens on its KVzip asks to repeat a part in other words, and ours in the same.

Writes benchmarks/results/kvpress.json (every cell) and kvpress_methods.json (all cells of a method together), and every
cell to RUN/kvpress.jsonl as it is done. Run again, it goes on there, so `--contexts` may be raised later; `--minutes`
ends it in time, and what was done by then counts. `--again` takes the times of cells that are done once more and adds them:
where the system happens to lay out a process's memory shifts all its times by some per cent, `none` among them.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM

TASKS = "quiz_multikey_1,quiz_multikey_2"
REMOVED = (0.5, 0.75, 0.875)
STEPS, TIMES = 24, ("compress", "decode")  # decoded tokens that are timed; what is timed. Mirrors kvpress_table.py
ANSWER = 10  # tokens of an answer
# Where kvpress runs there may be no kvengine to ask what this version of transformers calls it.
CACHE = next(x for x in ("cache", "past_key_values") if x in inspect.signature(LlamaForCausalLM.forward).parameters)
QUESTIONS = 4  # about each context

REPEAT, SUFFIX = (json.dumps(words) for words in ("\n\nRepeat the previous context exactly.", "\n"))
"""What kvpress feeds before a text that is to be repeated; in a policy they stand for their ids."""
OBSERVED = "recent=0, average=True, decode=False"

Job = Row = dict[str, Any]


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
    "StreamingLLM": Method(lambda p, r: p.StreamingLLMPress(r, n_sink=4),
                           lambda n, s: f"streaming(sinks=4, recent={max(1, int(n * s) - 4)}, decode=False)"),
    "SnapKV": Method(snap, lambda n, s: f"snapkv(budget={s}, window=32, kernel=5)"),
    "PyramidKV": Method(lambda p, r: p.PyramidKVPress(r, window_size=32, kernel_size=5),
                        lambda n, s: f"pyramidkv(budget={s}, window=32, kernel=5)"),
    "AdaKV": Method(lambda p, r: p.AdaKVPress(snap(p, r), alpha_safeguard=0.2),
                    lambda n, s: f"adakv(budget={s}, window=32, kernel=5, pool='avg')"),
    "TOVA": Method(lambda p, r: p.TOVAPress(r), lambda n, s: f"tova(budget={s}, recent=1, decode=False)"),
    "KeyDiff": Method(lambda p, r: p.KeyDiffPress(r), lambda n, s: f"keydiff(budget={s})"),
    "ExpectedAttention": Method(lambda p, r: p.ExpectedAttentionPress(r), lambda n, s: f"expected_attention(budget={s})"),
    "KVzip": Method(lambda p, r: p.KVzipPress(r), lambda n, s: f"kvzip(budget={s}, prompt={REPEAT}, suffix={SUFFIX})"),
    "H2O": Method(lambda p, r: p.ObservedAttentionPress(r), lambda n, s: f"h2o(budget={s}, {OBSERVED})", "eager"),
    "H2O, half recent": Method(lambda p, r: p.ObservedAttentionPress(r), lambda n, s: f"h2o(budget={s}, decode=False)", "eager"),
}  # fmt: skip


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
        """One reading of the context; the questions too, if they are `asked`."""
        method, prompt = METHODS[job["method"]], job["prompt"]
        model = self.model(method)
        with self.around(model, method, job["removed"], len(prompt)):
            cache = self.cache(model)
            start = time.process_time()
            logits = step(model, cache, prompt, 0)
        compress = time.process_time() - start  # kvpress's KVzip reads the text again when its context ends
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
    out = model(input_ids=torch.tensor([ids]), position_ids=positions, **{CACHE: cache}, logits_to_keep=1)
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
        parts = [x.untyped_storage() for layer in cache.layers for x in (layer.keys, layer.values)]
        return sum({part.data_ptr(): part.nbytes() for part in parts}.values()), statistics.fmean(held)

    def uneven(cache: Any) -> bool:
        """transformers makes one mask for all layers, but PyramidKV's hold different numbers of tokens."""
        return len({layer.keys.shape[2] for layer in cache.layers}) > 1

    return Side(lambda m: models[m.attention], around, lambda model: DynamicCache(), size, lambda cache: None, uneven)


def worker(path: str) -> None:
    out, sys.stdout = sys.stdout, sys.stderr  # what libraries print must not get between the answers
    side = theirs(path)
    out.write(json.dumps({name: version(name) for name in ("kvpress", "transformers")}) + "\n")
    out.flush()
    for line in sys.stdin:
        out.write(json.dumps(side.work(json.loads(line))) + "\n")
        out.flush()


class Peer:
    """The worker, from this side."""

    def __init__(self, python: str, path: str) -> None:
        command = [python, "-P", str(Path(__file__).resolve()), python, "--worker", path]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.versions = self.hear()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()

    def work(self, job: Job) -> Row:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> Row:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise SystemExit("the kvpress worker ended; see its error above")
        found: Row = json.loads(line)
        return found


# Ours


def ours(path: str) -> Side:
    import kvengine

    model, tokenizer = load(path), AutoTokenizer.from_pretrained(path)
    ids = {words: tuple(tokenizer(json.loads(words), add_special_tokens=False).input_ids) for words in (REPEAT, SUFFIX)}

    def around(model: Any, method: Method, removed: float, n: int) -> Any:
        policy = method.policy(n, 1 - removed)
        for words, found in ids.items():
            policy = policy.replace(words, str(found))
        return kvengine.patched(model, policy)

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
            for name in given.methods.split(";"):
                for removed in REMOVED if name != "none" else (0.0,):
                    key = f"{task.name}/{length}/{index}/{name}/{removed}"
                    yield key, {**job, "method": name, "removed": removed, "length": length}, score, index


def run(given: argparse.Namespace, path: str, journal: Path) -> tuple[list[Row], Row]:
    """What is measured by then, and the peer's versions."""
    done = [json.loads(line) for line in journal.read_text().splitlines()] if journal.exists() else []
    with Peer(given.peer, path) as peer:
        sides = {"kvpress": peer.work, "kvengine": ours(path).work}
        (again if given.again else measure)(given, path, journal, sides, done)
    return done, peer.versions


def again(
    given: argparse.Namespace, path: str, journal: Path, sides: dict[str, Callable[[Job], Row]], done: list[Row]
) -> None:
    """Add to the times of the cells that are there."""
    rows, end, stock = {row["key"]: row for row in done}, time.monotonic() + 60 * given.minutes, Stock(path)
    for key, job, _, index in jobs(given, path):
        if key in rows and time.monotonic() < end:
            found = measured({**job, "asked": []}, sides, stock, given.rounds, index % 2)
            for side, times in found.items():
                for name in TIMES:
                    rows[key][side].setdefault(name, []).extend(times.get(name, []))
            print(key, flush=True)
    journal.write_text("".join(json.dumps(row) + "\n" for row in done))


def measure(
    given: argparse.Namespace, path: str, journal: Path, sides: dict[str, Callable[[Job], Row]], done: list[Row]
) -> None:
    """Add the cells that are not there yet, until the minutes are over."""
    held, end, stock = {row["key"] for row in done}, time.monotonic() + 60 * given.minutes, Stock(path)
    for key, job, score, index in jobs(given, path):
        if key in held:
            continue
        if time.monotonic() > end:
            print(f"{given.minutes:g} minutes are over; run again to go on")
            break
        about = {"key": key, **{name: job[name] for name in ("method", "removed", "length")}, "context": index}
        about |= measured(job, sides, stock, given.rounds, index % 2)
        for side in sides:
            about[side]["scores"] = [score(new, i) for i, new in enumerate(about[side].pop("answers"))]
        done.append(about)
        with journal.open("a") as file:
            file.write(json.dumps(about) + "\n")
        print(key, *(f"{name} {statistics.fmean(about[name]['scores']):.2f}" for name in sides), flush=True)


def measured(job: Job, sides: dict[str, Callable[[Job], Row]], stock: Stock, rounds: int, first: int) -> Row:
    """What each side found; its times as a list, round by round. The sides take turns at going first."""
    about: dict[str, Row] = {"stock": {"decode": []}}
    for turn in range(rounds):
        order = list(sides) if (turn + first) % 2 else list(sides)[::-1]
        for name in order:
            found = sides[name](job if turn == 0 else {**job, "asked": []})
            times = {what: [*about.get(name, {}).get(what, []), found[what]] for what in TIMES}
            about[name] = {**about.get(name, found), **times}
        about["stock"]["decode"].append(stock.decode(job["prompt"], about["kvengine"]["held"]))
    return about


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("peer", help="Python of an environment with kvpress")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--contexts", type=int, default=5)
    parser.add_argument("--lengths", default="2048,4096")
    parser.add_argument("--tasks", default=TASKS)
    parser.add_argument("--run", type=Path, default=Path("runs/kvpress"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kvpress.json"))
    parser.add_argument("--rounds", type=int, default=3, help="times that both sides read, compress and decode")
    parser.add_argument(
        "--again", action="store_true", help="add to the times of cells that are done, in new processes"
    )
    parser.add_argument("--methods", default=";".join(METHODS), help="separated by semicolons; others stay as they are")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no more cells after so long")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.worker:
        return worker(given.worker)
    from kvengine.evals import bundled_model

    path = bundled_model() if given.model == "bundled" else given.model
    given.run.mkdir(parents=True, exist_ok=True)
    rows, versions = run(given, path, given.run / "kvpress.jsonl")
    contexts, kvpress, theirs = len({(r["length"], r["context"]) for r in rows}), *versions.values()
    about = {
        "command": f"python -P benchmarks/kvpress_compare.py PEER/bin/python --contexts {given.contexts} --lengths "
        f"{given.lengths} --rounds {given.rounds}",
        "machine": f"the {given.model} model in float32, {contexts} contexts with {QUESTIONS} questions each, seed 42; one "
        f"core; pairs are kvpress {kvpress} on transformers {theirs} / kvengine on transformers {transformers.__version__}, "
        f"torch {torch.__version__}, Python {platform.python_version()}",
    }
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from kvpress_table import write

    write(rows, list(METHODS), about, given.out)


if __name__ == "__main__":
    main()
