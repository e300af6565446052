"""`python -P -m kvengine.evals.train --preset cpu --out DIR`: train a bundled model, or go on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

from kvengine.command_errors import readable_errors, resumable
from kvengine.evals.loading import pick_device
from kvengine.evals.train.presets import PRESETS
from kvengine.evals.train.tokenizer import build
from kvengine.evals.train.train import CHECKPOINT, LOG, Trainer


def main() -> None:
    """Train the preset in the output folder; `export/` below it holds the model at the end."""
    parser = argparse.ArgumentParser(prog="python -P -m kvengine.evals.train", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, the log and the export")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--until", type=int, default=None, help="stop after this step")
    chosen = parser.parse_args()
    if chosen.until is not None and chosen.until < 1:
        parser.error(f"--until {chosen.until}: give a step from 1 on")
    with readable_errors(), resumable(chosen.out / CHECKPOINT):
        device = pick_device(chosen.device)
        trainer = Trainer(PRESETS[chosen.preset], build(), chosen.out, chosen.seed, device)
        print(f"step {trainer.step} of {trainer.preset.steps}; {chosen.out / LOG} says how far it is", flush=True)
        trainer.train(chosen.until)
        trainer.export(chosen.out / "export")


if __name__ == "__main__":
    main()
