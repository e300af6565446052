"""What a run ran on: versions, hashes, configuration. Written beside the rows; a run resumes only onto its own kind."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import torch

from kvengine.errors import EvaluationError
from kvengine.evals.records import MOST
from kvengine.offload.stores.filesystem import replace_file

PACKAGES = ("kvengine", "torch", "transformers", "tokenizers", "numpy", "triton", "wonderwords")
FIXED = ("dtype", "model", "tokenizer")
"""The first that differs is told: with its dtype a model's hash is another too, and with a chat template its tokenizer's."""
TOLD = (
    *(*FIXED, "config", "started", "resumed", "data", "model_name"),
    *("parameters", "device", "threads", "versions"),  # what a report says of the run
)


def texts(x: Any) -> bool:
    """Whether it is texts by name."""
    return isinstance(x, dict) and all(isinstance(one, str) for one in x.values())


KINDS: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("config", "data"), lambda x: isinstance(x, dict)),
    **dict.fromkeys(("versions", "policies", "wrapper"), texts),
    **dict.fromkeys(("parameters", "vocabulary"), lambda x: isinstance(x, int) and 0 < x < MOST),
    "positions": lambda x: isinstance(x, int | float),
    "resumed": lambda x: isinstance(x, list),
    "machines": lambda x: isinstance(x, list) and all(isinstance(one, str) for one in x),
    "calls": lambda x: isinstance(x, list) and all(map(texts, x)),
}
"""What fields are that are read as more than text; those not in `TOLD` may be missing."""
ASKED = ("seed", "golden", "judge_every")  # settings under which every policy of a folder was asked the same


def write(path: Path, run: Any) -> dict[str, Any]:
    """Write or extend the manifest of a run folder.

    Raises `EvaluationError` if the folder holds results of another model, tokenizer or dtype, or of samples that another
    seed drew or that were asked otherwise: policies would be compared on different questions.
    """
    now = describe(run)
    if path.exists():
        before = read(path)
        _same(path, before, now)
        now["started"] = before["started"]
        now["resumed"] = [*before["resumed"], datetime.now(UTC).isoformat(timespec="seconds")]
        now["data"] = {**before["data"], **now["data"]}
        now["machines"] = list(dict.fromkeys([*machines(before), *machines(now)]))
        now["calls"] = calls(before) + [one for one in calls(now) if one not in calls(before)]
        now["policies"] = {**before.get("policies", {}), **now["policies"]}
        now["shared"] = shared(before) or shared(now)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, (json.dumps(now, indent=2, ensure_ascii=False, default=str) + "\n").encode())
    return now


def read(path: Path) -> dict[str, Any]:
    """The manifest of a run folder. Raises OSError, or `EvaluationError` if it is none."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        if lacks := [name for name in TOLD if not isinstance(found, dict) or name not in found]:
            raise ValueError(f"it lacks {', '.join(lacks)}")
        if wrong := [f"{name} ({str(found[name])[:80]!r})" for name in strange(found)]:
            raise ValueError(f"no run writes such {', '.join(wrong)}")
    except ValueError as error:
        raise EvaluationError(
            f"{path} is damaged: {error}; delete it, and the command of its run writes it anew and keeps the rows"
        ) from error
    return found


def strange(found: dict[str, Any]) -> list[str]:
    """Fields that are read as more than text, and are not what `describe` writes."""
    kept = {name: found[name] for name in KINDS if name in TOLD or found.get(name) is not None}
    return [name for name, value in kept.items() if not KINDS[name](value)]


def machines(found: dict[str, Any]) -> list[str]:
    """Where the rows of a folder were measured, one call after the other."""
    here: list[str] = found.get("machines") or [f"{found['device']}, {found['threads']} threads"]
    return here


def calls(found: dict[str, Any]) -> list[dict[str, str]]:
    """What was installed when the rows of a folder were measured, one call after the other, each set once."""
    here: list[dict[str, str]] = found.get("calls") or [found["versions"]]
    return here


def installed(found: dict[str, Any]) -> dict[str, str]:
    """The same by package: `2.13.0`, or `2.13.0, then 2.14.0`."""
    names = dict.fromkeys(name for call in calls(found) for name in call)
    return {name: ", then ".join(dict.fromkeys(call[name] for call in calls(found) if name in call)) for name in names}


def shared(found: dict[str, Any]) -> bool:
    """Whether contexts were read once for all policies, in any call."""
    return bool(found.get("shared") or found["config"].get("shared"))


def describe(run: Any) -> dict[str, Any]:
    """Everything known before the first sample, and the hashes of the data drawn so far."""
    model = run.model
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "resumed": [],
        "model": run.base["model"],
        "tokenizer": run.base["tokenizer"],
        "dtype": str(model.dtype),
        "model_name": run.config.model,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "positions": positions(model),
        "vocabulary": getattr(model.config.get_text_config(decoder=True), "vocab_size", None),
        "chat": run.prompter.chat,
        "wrapper": asdict(run.prompter.wrapper),
        "bos": int(run.prompter.bos is not None),
        "attention": getattr(model.config, "_attn_implementation", None),
        "device": device_name(model),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": versions(),
        "commit": commit(),
        "command": sys.argv[1:],
        "config": asdict(run.config),
        "policies": {arm.policy: arm.spelled for arm in run.config.arms()},
        "data": run.data_hashes(),
    }


def positions(model: Any) -> int | None:
    """Tokens that the model's configuration speaks of, if it says so."""
    return getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)


def position_table(model: Any) -> int | None:
    """Positions that a model has learned vectors of; None where they are computed (rotary, ALiBi), and have no end."""
    most, words = positions(model), model.get_input_embeddings()
    tables = [one for one in model.modules() if isinstance(one, torch.nn.Embedding) and one is not words]
    spare = 2  # rows before the first position, as in OPT
    return most if most and any(0 <= one.num_embeddings - most <= spare for one in tables) else None


def versions() -> dict[str, str]:
    """Installed versions of what matters."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str | None:
    """The git commit of the working tree this package runs from, "+" if it has changes; None outside one."""
    here = Path(__file__).resolve().parent
    try:
        name = _git(here, "rev-parse", "--short=12", "HEAD")
        return name + ("+" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def device_name(model: Any) -> str:
    """The GPU's name, or the processor's architecture."""
    if model.device.type == "cuda":
        return torch.cuda.get_device_name(model.device)
    return f"cpu ({platform.machine()})"


def _same(path: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    pairs = [("chat", before.get("chat", now["chat"]), now["chat"])]
    pairs += [(name, before[name], now[name]) for name in FIXED]
    pairs += [(name, before["config"].get(name, now["config"][name]), now["config"][name]) for name in ASKED]
    for name, old, new in pairs:
        if old != new:
            raise EvaluationError(
                f"{path.parent} holds a run with {name} {old}, this one has {new}; choose another --out"
            )
