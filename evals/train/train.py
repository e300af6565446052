"""The training loop: stages by length, answers as the only target, resumable to the bit."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from kvengine.errors import EvaluationError
from kvengine.evals.train.forward import Network
from kvengine.evals.train.init import Gains, lay_circuit, tiny_config
from kvengine.evals.train.presets import Preset, Stage, draw_sample
from kvengine.evals.train.samples import IGNORE, Codec, Sample

CHECKPOINT = "checkpoint.pt"
LOG = "training_log.jsonl"


@dataclass
class Batch:
    """ids int64[B, T]; places int64[B, N] where something is to be predicted; the rest holds one entry per place."""

    ids: Tensor
    places: Tensor
    target: Tensor
    weight: Tensor
    also: list[tuple[int, int, tuple[int, ...]]]
    samples: list[Sample]


def collate(samples: Sequence[Sample], pad: int) -> Batch:
    """Pad to the longest sample (on the right: nothing earlier sees it) and list the places with a target."""
    longest = max(len(sample.ids) for sample in samples)
    ids = torch.full((len(samples), longest), pad)
    chosen = [[i for i, token in enumerate(sample.target) if token != IGNORE] for sample in samples]
    most = max(map(len, chosen))
    places, target = torch.zeros(len(samples), most, dtype=torch.long), torch.full((len(samples), most), IGNORE)
    weight = torch.zeros(len(samples), most)
    also = []
    for row, (sample, at) in enumerate(zip(samples, chosen, strict=True)):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
        places[row, : len(at)] = torch.tensor(at)
        target[row, : len(at)] = torch.tensor([sample.target[i] for i in at])
        weight[row, : len(at)] = torch.tensor([sample.weight[i] for i in at])
        column = {place: index for index, place in enumerate(at)}
        also += [(row, column[place], right) for place, right in sample.also.items()]
    return Batch(ids, places, target, weight, also, list(samples))


def draw_batch(stage: Stage, codec: Codec, seed: int, step: int) -> Batch:
    """The batch of a step: a function of seed and step alone, so that a resumed run sees what it would have seen."""
    rng = np.random.default_rng([seed, step])
    length = stage.length
    if stage.shorter and rng.random() < stage.mix:
        length = int(stage.shorter[rng.integers(len(stage.shorter))])
    count = max(1, stage.tokens // length)
    return collate([draw_sample(rng, codec, length, stage) for _ in range(count)], codec.tokenizer.pad_token_id)


def losses(logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Weighted loss, and bool[B, N]: right or not. Where several tokens are right their probability is summed."""
    target = batch.target.to(logits.device)
    logarithms = logits.float().log_softmax(-1)
    picked = logarithms.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    best = logits.argmax(-1)
    right = best == target
    if batch.also:
        rows = torch.tensor([row for row, _, _ in batch.also], device=logits.device)
        columns = torch.tensor([column for _, column, _ in batch.also], device=logits.device)
        width = max(len(tokens) for _, _, tokens in batch.also)
        allowed = torch.tensor(
            [[*tokens, *[tokens[0]] * (width - len(tokens))] for _, _, tokens in batch.also], device=logits.device
        )
        several = logarithms[rows, columns].gather(-1, allowed)
        repeated = torch.tensor([[i >= len(t) for i in range(width)] for _, _, t in batch.also], device=logits.device)
        summed = several.masked_fill(repeated, float("-inf")).logsumexp(-1)
        picked = picked.index_put((rows, columns), summed)
        right = right.index_put((rows, columns), (best[rows, columns][:, None] == allowed).any(-1))
    weight = batch.weight.to(logits.device)
    return -(picked * weight).sum() / weight.sum(), right & (target != IGNORE)


class Trainer:
    """One training run in a folder: model, optimiser, step counter, log."""

    def __init__(
        self, preset: Preset, tokenizer: PreTrainedTokenizerFast, folder: Path, seed: int = 0, device: str = "cpu"
    ) -> None:
        self.preset, self.folder, self.seed, self.device = preset, folder, seed, torch.device(device)
        self.codec = Codec(tokenizer)
        torch.manual_seed(seed)
        vocab = math.ceil(len(tokenizer) / 64) * 64
        named = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
        config = tiny_config(vocab, **preset.shape, **named)
        dash, colon = (cast(int, tokenizer.convert_tokens_to_ids(sign)) for sign in "-:")
        self.model = lay_circuit(LlamaForCausalLM(config), seed, Gains(match=preset.match), dash, colon)
        cast(torch.nn.Module, self.model).to(self.device)
        self.network = Network(self.model)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=preset.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.step, self.tokens, self.seconds = 0, 0, 0.0
        self.running: dict[str, float] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / CHECKPOINT).exists():
            self._resume()

    def _resume(self) -> None:
        """Go on from the folder's checkpoint. Raises EvaluationError if it is another preset's or seed's."""
        state = torch.load(self.folder / CHECKPOINT, map_location=self.device, weights_only=True)
        shapes = {name: x.shape for name, x in state["model"].items()}
        if shapes != {name: x.shape for name, x in self.model.state_dict().items()}:
            raise EvaluationError(f"{self.folder} holds the training of another preset; choose another --out")
        if state.get("seed", self.seed) != self.seed:
            raise EvaluationError(f"{self.folder} holds a training with --seed {state['seed']}; choose another --out")
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.step, self.tokens, self.seconds = state["step"], state["tokens"], state["seconds"]
        self.running = state["running"]
        log = self.folder / LOG
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        kept = [line for line in lines if json.loads(line)["step"] <= self.step]
        log.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def checkpoint(self) -> None:
        """Write what a resumed run needs, replacing the former file only when the new one is complete."""
        state = {"model": self.model.state_dict(), "optimiser": self.optimiser.state_dict(), "step": self.step}
        state |= {"tokens": self.tokens, "seconds": self.seconds, "running": self.running, "seed": self.seed}
        part = self.folder / (CHECKPOINT + ".part")
        torch.save(state, part)
        part.replace(self.folder / CHECKPOINT)

    def train(self, until: int | None = None) -> None:
        """Run the preset's stages to the end, or to step `until`."""
        last = self.preset.steps if until is None else min(until, self.preset.steps)
        while self.step < last:
            stage, done = self.preset.at(self.step)
            began = time.perf_counter()
            record = self._update(stage, done)
            self.seconds += time.perf_counter() - began
            self.step += 1
            if self.step % 20 == 0 or self.step == last:
                self._log(stage, record)
            if self.step % self.preset.save_every == 0:
                self.checkpoint()
        self.checkpoint()

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16)

    def _update(self, stage: Stage, done: float) -> dict[str, float]:
        batch = draw_batch(stage, self.codec, self.seed, self.step)
        rate = stage.rate(done) * self.preset.rate * min(1.0, (self.step + 1) / self.preset.warmup)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        with self._autocast():
            states = self.network(batch.ids.to(self.device), batch.places.to(self.device))
            logits = self.model.lm_head(states)
        loss, right = losses(logits, batch)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.tokens += batch.ids.numel()
        self._count(batch, right)
        return {"loss": loss.item(), "norm": norm.item(), "rate": rate}

    def _count(self, batch: Batch, right: Tensor) -> None:
        """Running accuracy by task: of the first tokens of answers, which must be looked up, and of the others."""
        first = (batch.weight == 1.0).tolist()
        hits = right.tolist()
        for row, sample in enumerate(batch.samples):
            for name, kind in ((sample.task, True), (sample.task + "+", False)):
                places = [c for c, w in enumerate(batch.weight[row].tolist()) if w > 0 and first[row][c] == kind]
                if places:
                    mean = sum(hits[row][c] for c in places) / len(places)
                    self.running[name] = 0.995 * self.running.get(name, mean) + 0.005 * mean

    def _log(self, stage: Stage, record: dict[str, float]) -> None:
        line = {"step": self.step, "length": stage.length, "tokens": self.tokens, "seconds": round(self.seconds, 1)}
        values = {key: float(f"{value:.4g}") for key, value in record.items()}
        accuracy = {name: round(value, 3) for name, value in sorted(self.running.items())}
        with (self.folder / LOG).open("a", encoding="utf-8") as log:
            log.write(json.dumps(line | values | {"accuracy": accuracy}) + "\n")

    def export(self, folder: Path) -> None:
        """Write the model in bfloat16 with its tokenizer, as `from_pretrained` reads it."""
        copy = LlamaForCausalLM(self.model.config)
        cast(torch.nn.Module, copy).to(torch.bfloat16)
        copy.load_state_dict(self.model.state_dict())
        copy.generation_config.do_sample = False
        copy.save_pretrained(folder)
        self.codec.tokenizer.save_pretrained(folder)
