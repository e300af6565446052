"""`python -P -m kvengine.evals.train --preset cpu --out DIR`: train a bundled model, or go on where it stopped."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from kvengine.command_errors import resumable
from kvengine.evals.train.presets import PRESETS
from kvengine.evals.train.tokenizer import build
from kvengine.evals.train.train import CHECKPOINT, Trainer


def main() -> None:
    """Train the preset in the output folder; `export/` below it holds the model at the end."""
    parser = argparse.ArgumentParser(prog="python -P -m kvengine.evals.train", description=__doc__)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint, the log and the export")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--until", type=int, default=None, help="stop after this step")
    chosen = parser.parse_args()
    with resumable(chosen.out / CHECKPOINT):
        trainer = Trainer(PRESETS[chosen.preset], build(), chosen.out, chosen.seed, chosen.device)
        trainer.train(chosen.until)
        trainer.export(chosen.out / "export")


if __name__ == "__main__":
    main()
