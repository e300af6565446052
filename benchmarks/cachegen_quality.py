"""What each level of the cache codec costs in answers: many questions on stored contexts, with intervals.

    python -P benchmarks/cachegen_quality.py [--model FOLDER] [--contexts 70] [--length 1024] [--out FOLDER]

Contexts of three kinds: facts hidden in prose, in repeated lines, and among nothing but other facts. Each context is read
once, encoded and decoded at every level, and asked for five of its facts; the score is how many answers of greedy
decoding hold the fact. 70 contexts of each kind give 1050 questions per level. Points lost are paired, each question
against itself under the exact cache; contexts are what is drawn, so both intervals go by them (Wilson's at the number of
independent answers, and Agresti's and Min's for pairs).

The second table is what levels are chosen by, since no question enters it: the divergence of next-token distributions on
prose, with all steps a quarter smaller and larger. The third streams contexts over the same simulated links under the
controller, under each fixed level, and recomputing: deadlines missed, seconds, and quality, which is the mean over chunks
of what their levels keep in the first table and diverge by in the second. About six minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from transformers import DynamicCache

from kvengine.evals.engine import CacheSession
from kvengine.evals.loading import load, model_digest, stop_ids
from kvengine.evals.prompt import Prompter
from kvengine.evals.protocol import greedy
from kvengine.evals.statistics import interval, paired
from kvengine.evals.tasks import Sample, Turn
from kvengine.evals.tasks._words import NOISE, number, pair, prose, sentences
from kvengine.evals.tasks.ruler_niah import NEEDLE, among_lines, among_sentences, wording
from kvengine.hf.names import CACHE
from kvengine.offload import cachegen
from kvengine.offload.cachegen.levels import LEVELS, LOSSLESS, NAMES, Level
from kvengine.offload.links import SimulatedLink, Trace
from kvengine.offload.streaming import TEXT, Bandwidth, Chunk, Controller, expected, stream

ASKED, NEW = 5, 16
KINDS = ("prose", "lines", "facts")
COLUMNS = {"level": "level", "questions": "n", "right (%)": "score:.1f", "from": "low:.1f", "to": "high:.1f",
           "points lost": "lost:.2f", "at least": "lost_low:.2f", "at most": "lost_high:.2f", "bits per number": "bits:.2f",
           "times smaller than 8 bit": "smaller:.1f"}  # fmt: skip
TUNING = {"level": "level", "steps": "steps", "bits per number": "bits:.2f", "divergence on prose (nats)": "kl:.4f"}
STREAMING = {"link": "link", "choice": "choice", "deadlines missed (%)": "late:.0f", "seconds, mean": "seconds:.2f",
             "answers kept (%)": "kept:.1f", "divergence (nats)": "kl:.3f", "MB sent": "mb:.2f"}  # fmt: skip
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


# Contexts


def drawn(prompter: Prompter, kind: str, at: int, length: int) -> Sample:
    """Facts in about `length` tokens, and questions for some of them."""
    source = Random(f"{kind}/{at}")
    count = max(ASKED, length // 24) if kind == "facts" else ASKED
    values = dict(zip((pair(source) for _ in range(count)), (number(source) for _ in range(count)), strict=True))
    needles = [NEEDLE.format(kind="numbers", key=key, value=value) for key, value in values.items()]
    introduction, question, prefix = wording("numbers", single=True)
    turns = tuple(
        Turn(question=question.format(query=k), prefix=prefix.format(query=k), answers=(values[k],), max_new_tokens=NEW)
        for k in source.sample(sorted(values), ASKED)
    )
    words, state, low, high = prose(), source.getstate(), 1, length
    start = source.randrange(len(words) // 2)

    def text(units: int) -> str:
        source.setstate(state)
        if kind == "facts":
            hay = "\n".join(needles[: max(units, 1)])
        elif kind == "lines":
            hay = among_lines([NOISE] * max(ASKED, units // 16), needles, source)
        else:
            hay = among_sentences(sentences(" ".join(words[start : start + max(units, 100)])), needles, source)
        return introduction.format(context=hay).rstrip("\n")

    if kind == "facts":  # all of them, since any may be asked for
        return Sample(id=f"{kind}-{at}", context=text(count), turns=turns)
    while low + 8 < high:  # the most that fits
        middle = (low + high) // 2
        low, high = (middle, high) if len(prompter.first(text(middle))) <= length else (low, middle)
    return Sample(id=f"{kind}-{at}", context=text(low), turns=turns)


@dataclass
class Read:
    """A context that was read: its exact keys and values, in bf16 as they are stored."""

    layers: Pairs

    @classmethod
    @torch.inference_mode()
    def of(cls, model: Any, ids: list[int]) -> Read:
        cache = DynamicCache()
        model(input_ids=torch.tensor([ids]), **{CACHE: cache}, use_cache=True, logits_to_keep=1)
        return cls([(layer.keys[0].bfloat16(), layer.values[0].bfloat16()) for layer in cache.layers])

    def coded(self, level: str | Level, dtype: torch.dtype) -> tuple[DynamicCache, float]:
        """As a cache after the codec ("" without it), and bits per number."""
        layers, bits = self.layers, 16.0
        if level:
            data = cachegen.encode(cachegen.KV(layers), level)
            bits = 8 * len(data) / sum(k.numel() + v.numel() for k, v in layers)
            layers = list(cachegen.decode(data).layers)
        cache = DynamicCache()
        for i, (k, v) in enumerate(layers):
            cache.update(k[None].to(dtype), v[None].to(dtype), i)
        return cache, bits


def cut(cache: DynamicCache, tokens: int) -> None:
    """Back to the first tokens; the cache's own `crop` means different things in different versions."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[..., :tokens, :], layer.values[..., :tokens, :]


# Answers


@dataclass
class Asker:
    """Asks a cache, and leaves it as it was."""

    model: Any
    prompter: Prompter
    stop: frozenset[int]

    def answer(self, cache: DynamicCache, question: list[int]) -> list[int]:
        """Greedy tokens."""
        n, session = cache.get_seq_length(), CacheSession(self.model, cache)
        said, _ = greedy(session, session.read(question), self.stop, NEW)
        cut(cache, n)
        return said

    @torch.inference_mode()
    def says(self, cache: DynamicCache, question: list[int], words: list[int]) -> bool:
        """Whether greedy decoding would begin with these tokens; one pass instead of one per token."""
        n, ids = cache.get_seq_length(), torch.tensor([question + words[:-1]])
        out = self.model(input_ids=ids, **{CACHE: cache}, use_cache=True, logits_to_keep=len(words))
        cut(cache, n)
        return bool(out.logits[0].argmax(-1).tolist() == words)

    def right(self, cache: DynamicCache, turn: Turn, known: list[int] | None) -> tuple[bool, list[int] | None]:
        """Whether the answer holds the fact, and the answer; `known` is a right one to look for first."""
        question = self.prompter.asked(turn)
        if known and self.says(cache, question, known):
            return True, known
        said = self.answer(cache, question)
        right = turn.answers[0] in self.prompter.text(said)
        return right, said if right else None


Scores = dict[str, dict[tuple[str, int], float]]


def asked(asker: Asker, samples: list[Sample], dtype: torch.dtype) -> tuple[Scores, dict[str, list[float]]]:
    """By level: 1 or 0 for each (context, question), and bits per number of each context."""
    scores: Scores = {level: {} for level in ("", *NAMES)}
    bits: dict[str, list[float]] = {level: [] for level in scores}
    for sample in samples:
        read, known = Read.of(asker.model, asker.prompter.context(sample)), dict[int, list[int]]()
        for level in scores:
            cache, size = read.coded(level, dtype)
            bits[level].append(size)
            for i, turn in enumerate(sample.turns):
                right, said = asker.right(cache, turn, known.get(i))
                scores[level][sample.id, i] = float(right)
                if said:
                    known.setdefault(i, said)
        if len(bits[""]) % 10 == 0:
            print(f"{len(bits[''])} of {len(samples)} contexts", file=sys.stderr, flush=True)
    return scores, bits


def answers(scores: Scores, bits: dict[str, list[float]], config: Any) -> Iterator[dict[str, Any]]:
    eight = 8 + 16 / (config.num_key_value_heads * config.head_dim)  # a scale for a token's keys, one for its values
    for level, values in scores.items():
        found = interval(list(values.values()), [name for name, _ in values])
        change = paired(values, scores[""])
        assert change is not None
        size = float(np.mean(bits[level]))
        row: dict[str, Any] = {"level": level or "exact", "n": found.n, "contexts": found.clusters}
        row |= {"score": 100 * found.mean, "low": 100 * found.low, "high": 100 * found.high, "bits": size}
        lost = {"lost": 0.0 - 100 * change.mean, "lost_low": -100 * change.high, "lost_high": -100 * change.low}
        yield row | (lost if level else {}) | {"smaller": eight / size}


# Distributions


@torch.inference_mode()
def tuning(model: Any, prompter: Prompter, length: int, texts: int = 4) -> Iterator[dict[str, Any]]:
    """Mean divergence of next-token distributions over the 128 tokens of prose after a stored context."""
    ids = prompter.first(" ".join(prose()[: 2 * texts * (length + 128)]))
    parts = [ids[i * (length + 128) : (i + 1) * (length + 128)] for i in range(texts)]
    reads = [Read.of(model, part[:length]) for part in parts]

    def follow(at: int, level: str | Level) -> tuple[torch.Tensor, float]:
        cache, bits = reads[at].coded(level, model.dtype)
        out = model(input_ids=torch.tensor([parts[at][length:]]), **{CACHE: cache}, use_cache=True)
        return out.logits[0].float().log_softmax(-1), bits

    exact = [follow(at, "")[0] for at in range(texts)]
    for name, level in LEVELS.items():
        for factor in (0.75, 1.0, 1.25):
            steps = Level(keys=level.keys * factor, values=level.values * factor, groups=level.groups)
            found = [follow(at, steps) for at in range(texts)]
            kl = [float((a.exp() * (a - b)).sum(-1).mean()) for a, (b, _) in zip(exact, found, strict=True)]
            yield {"level": name, "steps": f"x {factor}", "bits": float(np.mean([bits for _, bits in found])),
                   "kl": float(np.mean(kl))}  # fmt: skip


# Streaming


def streaming(
    model: Any, prompter: Prompter, kept: dict[str, float], kl: dict[str, float], traces: int = 60, chunks: int = 8
) -> Iterator[dict[str, Any]]:
    """A context of 8 chunks of 256 tokens, whose sizes and computing times are measured, over links that fluctuate.

    The deadline is three quarters of what recomputing takes; links have, on average, from an eighth to four times what
    the level "high" needs for it."""
    ids = prompter.first(" ".join(prose()[: 2 * 256 * chunks]))[: 256 * chunks]
    start = time.process_time()
    layers = Read.of(model, ids).layers
    compute = (time.process_time() - start) / chunks
    sizes = [{level: len(cachegen.encode(cachegen.KV([(k[:, a : a + 256], v[:, a : a + 256]) for k, v in layers]), level))
              for level in NAMES} for a in range(0, 256 * chunks, 256)]  # fmt: skip
    made = [Chunk(size, compute) for size in sizes]
    deadline = compute * chunks * 0.75
    rate = sum(size["high"] for size in sizes) / deadline
    choices = {"controller": [*NAMES, TEXT], **{name: [name] for name in (*NAMES, TEXT)}}
    for link, low, high in (("slow: 1/8 to 1", 1 / 8, 1.0), ("fair: 1 to 4", 1.0, 4.0)):
        scales = np.geomspace(low, high, traces) * rate
        links = [Trace.random(i, low=0.5 * s, high=1.5 * s, step=deadline / 8) for i, s in enumerate(scales)]
        for name, options in choices.items():
            outcomes = []
            for trace in links:
                controller = Controller(deadline, options, 300e6, Bandwidth(float(np.mean(trace.rates[:8]))))
                outcomes.append(stream(made, controller, SimulatedLink(trace), expected(made, controller)))
            yield {"link": link, "choice": "recompute" if name == TEXT else name, "deadline_s": deadline,
                   "late": 100 * float(np.mean([o.seconds > deadline for o in outcomes])),
                   "seconds": float(np.mean([o.seconds for o in outcomes])),
                   "kept": float(np.mean([o.quality(kept) for o in outcomes])),
                   "kl": float(np.mean([o.quality(kl) for o in outcomes])),
                   "mb": float(np.mean([o.nbytes for o in outcomes])) / 1e6}  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    sys.path.append(str(Path(__file__).parent))  # behind everything, for the file beside this one
    from where import processor

    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu", dtype="float32")
    prompter = Prompter(tokenizer, tokenizer.chat_template is not None)
    asker = Asker(model, prompter, stop_ids(model, tokenizer, prompter.wrapper.between))
    samples = [drawn(prompter, kind, i, options.length) for i in range(options.contexts) for kind in KINDS]
    rows = list(answers(*asked(asker, samples, model.dtype), model.config))
    tuned = list(tuning(model, prompter, options.length))
    kept = {row["level"]: 100 - row.get("lost", 0.0) for row in rows} | {TEXT: 100.0}
    kl = {row["level"]: row["kl"] for row in tuned if row["steps"] == "x 1.0"} | {TEXT: 0.0, LOSSLESS: 0.0}
    machine = f"one CPU core{processor()}, torch {torch.__version__}, Python {platform.python_version()}"
    shared = {"model": model_digest(model), "machine": machine, "command": "python -P benchmarks/cachegen_quality.py"}
    return {
        "cachegen_quality": shared | {"columns": COLUMNS, "rows": rows},
        "cachegen_tuning": shared | {"columns": TUNING, "rows": tuned},
        "cachegen_streaming": shared | {"columns": STREAMING, "rows": list(streaming(model, prompter, kept, kl))},
    }


def draw(rows: list[dict[str, Any]], tuned: list[dict[str, Any]], file: Path) -> None:
    """What levels cost over how small they are: in answers, and in divergence."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    some = [row for row in rows if "lost" in row]
    bars = [[max(0.0, r["lost"] - r["lost_low"]) for r in some], [max(0.0, r["lost_high"] - r["lost"]) for r in some]]
    left.errorbar([r["smaller"] for r in some], [r["lost"] for r in some], bars, fmt=".-", capsize=3)
    left.axhline(1, color="grey", linewidth=0.8, linestyle="--")
    left.axvline(4, color="grey", linewidth=0.8, linestyle="--")
    left.set(xlabel="times smaller than 8 bit", ylabel="points lost (95 % interval)")
    for row in some:
        left.annotate(
            row["level"], (row["smaller"], row["lost"]), textcoords="offset points", xytext=(3, 5), fontsize=8
        )
    right.plot([r["bits"] for r in tuned], [r["kl"] for r in tuned], ".-")
    right.set(xlabel="bits per number", ylabel="divergence on prose (nats)", yscale="log")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--contexts", type=int, default=70, help="of each kind")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the files")
    options = parser.parse_args()
    result = json.loads(json.dumps(run(options)), parse_float=lambda text: float(f"{float(text):.5g}"))
    draw(result["cachegen_quality"]["rows"], result["cachegen_tuning"]["rows"], options.out / "cachegen_quality.png")
    result["cachegen_quality"]["pictures"] = {"What levels cost over how small they are": "cachegen_quality.png"}
    for name, part in result.items():
        (options.out / f"{name}.json").write_text(json.dumps(part, indent=1) + "\n")


if __name__ == "__main__":
    main()
