"""What each level of the cache codec costs in answers: many questions on one stored context, with intervals.

    python -P benchmarks/cachegen_quality.py [--model FOLDER] [--contexts 12] [--length 1024] [--out FILE]

A context hides ten facts in prose or in repeated lines; it is encoded and decoded once per level, and asked for all ten,
each question on a copy. So 12 contexts of each kind give 240 questions per level. Points lost are against the exact cache
on the same questions; intervals are bootstrapped over contexts, since questions on one context are not independent.

Whoever changes the levels' steps goes by sizes (about 6, 4, 3, 2 and 1.3 bits per number) and by the second table, which
no question enters: the divergence of next-token distributions on prose, with all steps a quarter smaller and larger. The
first table is for looking at afterwards. About four minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvengine.evals.engine import CacheSession
from kvengine.evals.loading import load, model_digest, stop_ids
from kvengine.evals.prompt import Prompter
from kvengine.evals.protocol import Protocol
from kvengine.evals.statistics import bootstrap, interval
from kvengine.evals.tasks import Sample, Turn
from kvengine.evals.tasks._words import NOISE, essay, number, pair, prose, sentences
from kvengine.evals.tasks.ruler_niah import NEEDLE, among_lines, among_sentences, wording
from kvengine.offload import cachegen
from kvengine.offload.cachegen.levels import LEVELS, NAMES, Level

FACTS = 10
COLUMNS = {"level": "level", "questions": "n", "right (%)": "score:.1f", "from": "low:.1f", "to": "high:.1f",
           "points lost": "lost:.2f", "at least": "lost_low:.2f", "at most": "lost_high:.2f", "bits per number": "bits:.2f",
           "times smaller than 8 bit": "smaller:.1f"}  # fmt: skip
TUNING = {"level": "level", "steps": "steps", "bits per number": "bits:.2f", "divergence on prose (nats)": "kl:.4f"}


@dataclass
class Coded(CacheSession):
    """A session whose context goes through the codec before the first question."""

    level: str | Level = ""
    bits: float = 16.0

    def follow_up(self) -> None:
        if self.level:
            layers = [(layer.keys[0].bfloat16(), layer.values[0].bfloat16()) for layer in self.cache.layers]
            data = cachegen.encode(cachegen.KV(layers), self.level)
            self.bits = 8 * len(data) / sum(k.numel() + v.numel() for k, v in layers)
            for layer, (k, v) in zip(self.cache.layers, cachegen.decode(data).layers, strict=True):
                layer.keys, layer.values = k[None].to(layer.keys), v[None].to(layer.values)


def drawn(prompter: Prompter, kind: str, number_of: int, length: int) -> Sample:
    """Ten facts among prose or lines, in about `length` tokens."""
    source = Random(f"{kind}/{number_of}")
    values = dict(zip((pair(source) for _ in range(FACTS)), (number(source) for _ in range(FACTS)), strict=True))
    needles = [NEEDLE.format(kind="numbers", key=key, value=value) for key, value in values.items()]
    introduction, question, prefix = wording("numbers", single=True)
    turns = tuple(
        Turn(question=question.format(query=key), prefix=prefix.format(query=key), answers=(value,), max_new_tokens=16)
        for key, value in values.items()
    )
    state, best = source.getstate(), ""
    for units in range(40, 4000, 20):
        source.setstate(state)
        if kind == "prose":
            hay = among_sentences(sentences(essay(prose(), 10 * units)), needles, source)
        else:
            hay = among_lines([NOISE] * max(FACTS, units // 2), needles, source)
        text = introduction.format(context=hay).rstrip("\n")
        if best and len(prompter.first(text)) > length:
            break
        best = text
    return Sample(id=f"{kind}-{number_of}", context=best, turns=turns)


def answers(model: Any, prompter: Prompter, stop: frozenset[int], samples: list[Sample]) -> Iterator[dict[str, Any]]:
    play = Protocol(prompter=prompter, mode="multi-request", stop=stop)
    exact: list[float] = []
    eight = 8 + 16 / (2 * model.config.num_key_value_heads * model.config.head_dim)
    for level in ("", *NAMES):
        scores, names, bits = [], [], []
        for sample in samples:
            session = Coded(model, DynamicCache(), level)
            for turn, answer in zip(sample.turns, play.play(session, sample), strict=True):
                scores.append(float(turn.answers[0] in answer.text))
                names.append(sample.id)
            bits.append(session.bits)
        exact = exact or scores
        found, lost = interval(scores, names), [100 * (a - b) for a, b in zip(exact, scores, strict=True)]
        low, high = np.quantile(bootstrap(lost, names), [0.025, 0.975])
        yield {"level": level or "exact", "n": len(scores), "score": 100 * found.mean, "low": 100 * found.low,
               "high": 100 * found.high, "lost": float(np.mean(lost)), "lost_low": float(low), "lost_high": float(high),
               "bits": float(np.mean(bits)), "smaller": eight / float(np.mean(bits))}  # fmt: skip


@torch.inference_mode()
def tuning(model: Any, prompter: Prompter, length: int, texts: int = 4) -> Iterator[dict[str, Any]]:
    """Mean divergence of next-token distributions over the 128 tokens of prose after a stored context."""
    ids = prompter.first(essay(prose(), texts * (length + 128) + 200))
    parts = [ids[i * (length + 128) : (i + 1) * (length + 128)] for i in range(texts)]

    def read(part: list[int], level: str | Level) -> tuple[torch.Tensor, float]:
        session = Coded(model, DynamicCache(), level)
        session.read(part[:length])
        session.follow_up()
        return session.read(part[length:], every=True).log_softmax(-1), session.bits

    exact = [read(part, "")[0] for part in parts]
    for name, level in LEVELS.items():
        for factor in (0.75, 1.0, 1.25):
            steps = Level(keys=level.keys * factor, values=level.values * factor, groups=level.groups)
            found = [read(part, steps) for part in parts]
            kl = [float((a.exp() * (a - b)).sum(-1).mean()) for a, (b, _) in zip(exact, found, strict=True)]
            yield {"level": name, "steps": f"x {factor}", "bits": float(np.mean([bits for _, bits in found])),
                   "kl": float(np.mean(kl))}  # fmt: skip


def run(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    model, tokenizer = load(options.model, device="cpu", dtype="float32")
    prompter = Prompter(tokenizer, tokenizer.chat_template is not None)
    stop = stop_ids(model, tokenizer, prompter.wrapper.between)
    samples = [drawn(prompter, kind, i, options.length) for kind in ("prose", "lines") for i in range(options.contexts)]
    machine = f"{platform.machine()}, one core, torch {torch.__version__}, Python {platform.python_version()}"
    shared = {"model": model_digest(model), "machine": machine, "command": "python -P benchmarks/cachegen_quality.py"}
    rows: dict[str, list[dict[str, Any]]] = {"cachegen_quality": [], "cachegen_tuning": []}
    for name, found in (("cachegen_tuning", tuning(model, prompter, options.length)),
                        ("cachegen_quality", answers(model, prompter, stop, samples))):  # fmt: skip
        for row in found:
            rows[name].append(row)
            print(row, file=sys.stderr, flush=True)
    columns = {"cachegen_quality": COLUMNS, "cachegen_tuning": TUNING}
    return {name: shared | {"columns": columns[name], "rows": part} for name, part in rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="bundled")
    parser.add_argument("--contexts", type=int, default=12)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for both files")
    options = parser.parse_args()
    result = json.loads(json.dumps(run(options)), parse_float=lambda text: float(f"{float(text):.5g}"))
    for name, part in result.items():
        (options.out / f"{name}.json").write_text(json.dumps(part, indent=1) + "\n")


if __name__ == "__main__":
    main()
