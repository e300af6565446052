"""Side by side with kvpress 0.5.5: the same model, prompts, share removed and options; scores, times and bytes.

    python -P benchmarks/kvpress_compare.py MODEL OUT [--length 1024] [--samples 20] [--tasks niah_single_1,...]

Needs an environment with both: `pip install kvengine` and then `pip install --no-deps kvpress==0.5.5` with
accelerate, datasets, cachetools, requests and fire. kvpress asks for transformers below 5.3; on newer ones it misses
an argument that attention modules are no longer given, and `with_positions` gives it back.

Each prompt is read twice: the context alone, compressed before its question is known ("agnostic"), and with it
("aware"). Questions and answers are then read token by token by both sides. Times are CPU seconds of this process: of
reading and compressing the prompt, and per decoded token; the fastest of the samples counts. Bytes are those of the
cache after the prompt: for kvpress keys and values, for kvengine everything it holds, positions, scores and slots for
tokens to come included.

Not the same on both sides: TOVA, H2O and StreamingLLM go on judging while decoding here, and only at the prompt there;
kvpress has no H2O, its ObservedAttentionPress (the mean attention received, no recent window) is the nearest.
Writes OUT/kvpress.json (a row per method, share, mode, task and sample) and OUT/kvpress.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

import kvengine
from kvengine.evals.prompt import Prompter
from kvengine.evals.tasks import Plan, choose

TASKS = "niah_single_1,niah_single_2,niah_multikey_1"
REMOVED = (0.5, 0.75, 0.875)
NEW = 24  # tokens generated


@dataclass(frozen=True)
class Method:
    """One method under both names. `press` takes the share removed, `policy` the tokens and the share kept."""

    press: Callable[[Any, float], Any]
    policy: Callable[[int, float], str]
    attention: str = "sdpa"  # that kvpress needs


def snap(kvpress: Any, removed: float) -> Any:
    return kvpress.SnapKVPress(removed, window_size=32, kernel_size=5)


METHODS: dict[str, Method] = {
    "StreamingLLM": Method(
        lambda p, r: p.StreamingLLMPress(r, n_sink=4), lambda n, s: f"streaming(sinks=4, recent={max(1, n - 4)})"
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
    "TOVA": Method(lambda p, r: p.TOVAPress(r), lambda n, s: f"tova(budget={s}, recent=1)"),
    "KeyDiff": Method(lambda p, r: p.KeyDiffPress(r), lambda n, s: f"keydiff(budget={s})"),
    "ExpectedAttention": Method(
        lambda p, r: p.ExpectedAttentionPress(r), lambda n, s: f"expected_attention(budget={s})"
    ),
    "H2O": Method(lambda p, r: p.ObservedAttentionPress(r), lambda n, s: f"h2o(budget={s})", "eager"),
    "none": Method(lambda p, r: None, lambda n, s: "full"),
}


@dataclass(frozen=True)
class Row:
    """One answer. Seconds of CPU time; bytes and mean tokens per head of the cache after the prompt."""

    side: str
    method: str
    removed: float
    mode: str
    task: str
    sample: int
    score: float
    prompt_tokens: int
    compress: float
    decode: float
    bytes: int
    held: float


@contextlib.contextmanager
def with_positions(model: Any) -> Iterator[None]:
    """Give attention modules the `cache_position` that kvpress's hooks read."""

    def hook(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        past, n = kwargs["past_key_values"].get_seq_length(module.layer_idx), kwargs["hidden_states"].shape[1]
        kwargs["cache_position"] = torch.arange(past, past + n)
        return args, kwargs

    hooks = [layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True) for layer in model.model.layers]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


@torch.inference_mode()
def answer(model: Any, cache: Any, prompt: list[int], more: list[int], around: Any) -> tuple[list[int], float, float]:
    """New tokens, and CPU seconds of the prompt and per decoded token."""
    step = lambda ids, at: model(  # noqa: E731
        input_ids=torch.tensor([ids]),
        position_ids=torch.arange(at, at + len(ids))[None],
        past_key_values=cache,
        logits_to_keep=1,
    ).logits[0, -1]
    start = time.process_time()
    with around:
        logits = step(prompt, 0)
    compress = time.process_time() - start
    at = len(prompt)
    for token in more:
        logits = step([token], at)
        at += 1
    new = [int(logits.argmax())]
    start = time.process_time()
    for _ in range(NEW - 1):
        new.append(int(step([new[-1]], at).argmax()))
        at += 1
    return new, compress, (time.process_time() - start) / (NEW - 1)


def theirs(kvpress: Any, model: Any, method: Method, removed: float, prompt: list[int], more: list[int]) -> Any:
    press, cache = method.press(kvpress, removed), DynamicCache()
    sizes: list[tuple[int, float]] = []
    with contextlib.ExitStack() as stack:
        around = contextlib.ExitStack()
        if press is not None:
            stack.enter_context(with_positions(model))
            around.enter_context(press(model))
        around.callback(lambda: sizes.append(stock_size(cache)))
        found = answer(model, cache, prompt, more, around)
    return *found, *sizes[0]


def stock_size(cache: Any) -> tuple[int, float]:
    held = [layer.keys.shape[2] for layer in cache.layers]
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers), statistics.fmean(held)


def ours(model: Any, method: Method, removed: float, prompt: list[int], more: list[int]) -> Any:
    kept = 1 - removed
    sizes: list[tuple[int, float]] = []
    with kvengine.patched(model, method.policy(int(len(prompt) * kept), kept)):
        cache = kvengine.EngineCache(model)
        around = contextlib.ExitStack()
        around.callback(lambda: sizes.append((cache.stats().bytes_held, float(cache.stats().held.float().mean()))))
        found = answer(model, cache, prompt, more, around)
    return *found, *sizes[0]


def rows(kvpress: Any, models: dict[str, Any], tokenizer: Any, arguments: argparse.Namespace) -> Iterator[Row]:
    prompter = Prompter(tokenizer)
    for task in choose("ruler", arguments.tasks):
        plan = Plan(length=arguments.length, count=arguments.samples, seed=42, measure=prompter.measure)
        for index, sample in enumerate(task.samples(plan)):
            (turn,) = sample.turns
            asked = {
                "agnostic": (prompter.context(sample), prompter.asked(turn)),
                "aware": (prompter.whole(sample), list[int]()),
            }
            for (name, method), removed, (mode, (prompt, more)) in cases(asked):
                both = {
                    "kvpress": partial(theirs, kvpress, models[method.attention], method, removed, prompt, more),
                    "kvengine": partial(ours, models["engine"], method, removed, prompt, more),
                }
                for side, run in both.items():
                    new, compress, decode, size, held = run()
                    score = task.score(turn, prompter.text(new))[task.metric]
                    whole = len(prompt)
                    yield Row(side, name, removed, mode, task.name, index, score, whole, compress, decode, size, held)


def cases(asked: dict[str, Any]) -> Iterator[tuple[tuple[str, Method], float, tuple[str, Any]]]:
    for one in METHODS.items():
        for removed in REMOVED if one[0] != "none" else (0.0,):
            for mode in asked.items():
                yield one, removed, mode


def table(found: list[Row]) -> str:
    """Means over samples; times are the fastest."""
    names = ("mode", "method", "removed", "score: kvpress", "kvengine", "difference")
    names += ("read and compress, s", "decode, ms", "KiB", "tokens per head")
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for key in dict.fromkeys((row.mode, row.method, row.removed) for row in sorted(found, key=lambda r: r.mode)):
        some = [row for row in found if (row.mode, row.method, row.removed) == key]
        sides = [[row for row in some if row.side == side] for side in ("kvpress", "kvengine")]
        gap = [b.score - a.score for a, b in zip(*sides, strict=True)]
        error = 1.96 * statistics.stdev(gap) / len(gap) ** 0.5 if len(gap) > 1 else float("nan")
        pair = lambda f, sides=sides: " / ".join(f(side) for side in sides)  # noqa: E731
        cells = [
            *(key[0], key[1], f"{key[2]:g}"),
            *(f"{statistics.fmean(row.score for row in side):.3f}" for side in sides),
            f"{statistics.fmean(gap):+.3f} ± {error:.3f}",
            pair(lambda side: f"{min(row.compress for row in side):.3f}"),
            pair(lambda side: f"{1e3 * min(row.decode for row in side):.2f}"),
            pair(lambda side: f"{statistics.fmean(row.bytes for row in side) / 1024:.0f}"),
            pair(lambda side: f"{statistics.fmean(row.held for row in side):.0f}"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out", type=Path)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--tasks", default=TASKS)
    arguments = parser.parse_args()
    import kvpress

    load = lambda how: AutoModelForCausalLM.from_pretrained(  # noqa: E731
        arguments.model, dtype=torch.float32, attn_implementation=how
    ).eval()
    models = {"sdpa": load("sdpa"), "eager": load("eager"), "engine": load("sdpa")}
    found = []
    for row in rows(kvpress, models, AutoTokenizer.from_pretrained(arguments.model), arguments):
        found.append(row)
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "kvpress.json").write_text(json.dumps([asdict(one) for one in found], indent=0))
    (arguments.out / "kvpress.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
