"""What the training of gates has come to, beside where the pattern will be: one that breaks off goes on from there.

A step is a function of the gates, of the optimiser's moments and of its own number, so that these are all there is to keep; as
JSON, whose numbers are exact.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvengine.errors import EvaluationError, KVEngineError
from kvengine.evals.duo.data import Passkeys
from kvengine.evals.loading import model_digest
from kvengine.evals.tasks._words import prose
from kvengine.offload.stores.filesystem import replace_file

if TYPE_CHECKING:
    from kvengine.evals.duo.train import Recipe

CHECKPOINT = "checkpoint.json"
EVERY = 10.0
"""Seconds from one writing to the next."""


def asked(model: Any, data: Passkeys, recipe: Recipe) -> dict[str, Any]:
    """All that shapes a training, by name; text and tokenizer by a hash of the words, and of the first context's tokens."""
    words, first = prose(data.text), data.draw(f"{recipe.seed}/0", recipe.length(0)).ids.tolist()
    drawn = hashlib.sha256(json.dumps([words, first]).encode()).hexdigest()[:16]
    shape = {**asdict(recipe), "style": data.style, "keys": data.keys, "dtype": str(model.dtype).removeprefix("torch.")}
    return {**shape, "model": model_digest(model), "text and tokenizer": drawn}


def trained(folder: Path, asked: Mapping[str, Any]) -> bool:
    """Whether the pattern in this folder is what such a training came to."""
    try:
        about = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return False
    there = isinstance(about, dict) and (folder / "full_attention_heads.tsv").is_file()
    return there and about.get("trained") == json.loads(json.dumps(asked))


class Checkpoint:
    """A file in the pattern's folder.

    `asked` is all that shapes the training, by name: what is there goes on only as the same. `restart`: what is there is
    thrown away. `steps` is how many were done before.
    """

    def __init__(self, folder: Path, asked: Mapping[str, Any], *, restart: bool = False) -> None:
        self.path, self.asked = folder / CHECKPOINT, json.loads(json.dumps(asked))
        self.last: tuple[int, Tensor, dict[str, Tensor]] | None = None
        self.written = time.monotonic()
        if restart:
            self.path.unlink(missing_ok=True)
        self.found = self._read() if self.path.exists() else None
        self.steps: int = 0 if self.found is None else self.found["steps"]

    def restore(self, alpha: Float[Tensor, "layer head"], optimiser: torch.optim.Optimizer) -> int:
        """Write what is there into gates and optimiser, and return how many steps were done; 0 if nothing is."""
        if self.found is None:
            return 0
        state = {name: torch.tensor(x, dtype=alpha.dtype) for name, x in self.found["optimiser"].items()}
        optimiser.load_state_dict({"state": {0: state}, "param_groups": optimiser.state_dict()["param_groups"]})
        with torch.no_grad():
            alpha.copy_(torch.tensor(self.found["alpha"], dtype=alpha.dtype))
        return self.steps

    def note(self, steps: int, alpha: Float[Tensor, "layer head"], optimiser: torch.optim.Optimizer) -> None:
        """A step has ended, after which so many are done. It is written if the last writing was a while ago."""
        state = {name: x.clone() for name, x in optimiser.state_dict()["state"][0].items()}
        self.last = steps, alpha.detach().clone(), state  # as one: an interruption finds the whole of a step, or none
        if time.monotonic() - self.written > EVERY:
            self.write()

    def write(self) -> None:
        """Write the last step that was noted. Raises OSError."""
        if self.last is None:
            return
        (steps, alpha, state), self.last = self.last, None
        found = {"asked": self.asked, "steps": steps, "alpha": alpha.tolist()}
        found["optimiser"] = {name: x.tolist() for name, x in state.items()}
        replace_file(self.path, (json.dumps(found) + "\n").encode())
        self.written = time.monotonic()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whatever ends the block, the last whole step is written, but for an error of ours, which would only come again; then,
        and after a block that ends well, which has written the pattern, there is nothing to go on with."""
        try:
            yield
        except KVEngineError:
            self.path.unlink(missing_ok=True)
            raise
        except BaseException:
            self.write()
            raise
        self.path.unlink(missing_ok=True)

    def _read(self) -> dict[str, Any]:
        other = "give --restart to begin anew, or another --out"
        try:
            found: dict[str, Any] = json.loads(self.path.read_bytes())
            before = dict(found["asked"])
            kept = found["alpha"], found["optimiser"]["exp_avg"], found["optimiser"]["exp_avg_sq"]
            tables = [torch.tensor(x, dtype=torch.float64) for x in kept]
            if len({x.shape for x in tables}) != 1 or tables[0].ndim != 2:
                raise ValueError("its tables differ in size")
            counts = found["steps"], found["optimiser"]["step"]
            if not 0 < min(counts) <= max(counts) <= before.get("steps", max(counts)) or not isinstance(counts[0], int):
                raise ValueError(f"steps {counts[0]} and {counts[1]} are none of this training")
            if not all(x.isfinite().all() for x in tables) or not torch.equal(tables[0], tables[0].clamp(0, 1)):
                raise ValueError("its tables hold what no training comes to")
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise EvaluationError(f"{self.path} is damaged ({error!r}); {other}") from error
        differ = [name for name in {**before, **self.asked} if before.get(name) != self.asked.get(name)]
        if differ:
            said = ", ".join(f"{name} {before.get(name)} (now {self.asked.get(name)})" for name in differ)
            raise EvaluationError(
                f"{self.path} is what a training with {said} came to; give the same to go on with it. Otherwise {other}"
            )
        return found
