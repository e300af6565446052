"""Models and tokenizers by name, and hashes that say which ones they were."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from kvengine.errors import EvaluationError, out_of_memory

ORDINARY = "Yesterday's extraordinary weather surprised 4817263 people; whoever remembers, tell (in your tongue) of it."
"""A text that every model can read."""
DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load(name: str, *, device: str = "auto", dtype: str = "auto") -> tuple[Any, Any]:
    """Model (in eval mode) and tokenizer of a folder, a hub id, or "bundled".

    Raises `EvaluationError` if there is no such model or device.
    """
    from huggingface_hub.errors import StrictDataclassError
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = bundled() if name == "bundled" else name
    if dtype not in DTYPES:
        raise EvaluationError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    place = pick_device(device)
    if str(name).startswith((".", "/", "~")) and not Path(name).is_dir():  # a hub id never does
        raise EvaluationError(f"cannot load {name!r}: there is no such folder. Give a folder, a hub id or 'bundled'")
    loaded: Any
    try:
        loaded = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], output_loading_info=True)
        model, found = loaded
        tokenizer = AutoTokenizer.from_pretrained(path)
    except SafetensorError as error:
        raise EvaluationError(
            f"cannot load {name!r}: its weights are damaged or cut: bring them anew ({str(error).strip()})"
        ) from error
    except (OSError, ValueError, StrictDataclassError) as error:
        said = str(error).rstrip(".")
        raise EvaluationError(f"cannot load {name!r}: {said}. Give a folder, a hub id or 'bundled'") from error
    except Exception as error:  # whatever transformers stumbles over in a file that says something odd
        if out_of_memory(error):
            raise
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise EvaluationError(f"cannot load {name!r}: {said}. Do its files belong together?") from error
    if lacks := sorted(found["missing_keys"]):  # they would be drawn at random, and all that is measured be noise
        told = f"{', '.join(lacks[:3])}{' and others' if len(lacks) > 3 else ''}"
        raise EvaluationError(f"cannot load {name!r}: its files have no weights for {told}. Do they belong together?")
    known, ids = getattr(model.get_input_embeddings(), "num_embeddings", None), tokenizer(ORDINARY).input_ids
    if known is not None and max(ids, default=0) >= known:  # torch would say that an index is out of range
        raise EvaluationError(
            f"cannot load {name!r}: its tokenizer numbers {len(tokenizer)} tokens, and the model knows {known}. Do its files "
            "belong together?"
        )
    model.to(place)
    return model.eval(), tokenizer


def bundled() -> Path:
    """The folder of the model that comes with the package."""
    from kvengine import evals

    return Path(evals.bundled_model())


def pick_device(name: str) -> str:
    """ "auto" is a GPU if there is one. Raises EvaluationError for what is no device, or is not there."""
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.device(name)
    except RuntimeError as error:
        raise EvaluationError(f"device {name!r} is not one that torch knows; give auto, cpu or cuda") from error
    if torch.device(name).type == "meta":
        raise EvaluationError("device 'meta' holds no numbers to compute with; give auto, cpu or cuda")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise EvaluationError(f"device {name!r} asked for, but torch sees no GPU; use --device cpu")
    try:
        torch.empty(0, device=name)
    except (RuntimeError, NotImplementedError, ImportError) as error:
        said = str(error).partition("\n")[0].partition(". ")[0]  # then torch lists all its backends
        raise EvaluationError(f"device {name!r} cannot be used here: {said}; use --device cpu") from error
    return name


def model_digest(model: Any) -> str:
    """Hash of the configuration, whichever transformers has read it, and of the first numbers of every weight."""
    config = json.loads(model.config.to_json_string())
    config.pop("transformers_version", None)  # that of this process, not of who wrote the file
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    for name, weight in model.named_parameters():
        start = weight.detach().flatten()[:64].float().cpu().numpy().tobytes()
        digest.update(f"{name}{tuple(weight.shape)}{weight.dtype}".encode() + start)
    return digest.hexdigest()[:16]


def stop_ids(model: Any, tokenizer: Any, between: str) -> frozenset[int]:
    """Tokens that end an answer: the model's, the tokenizer's, and the special token that ends a template's turn."""
    stop: list[int | None] = [tokenizer.eos_token_id]
    ids = getattr(model.generation_config, "eos_token_id", None)
    stop += ids if isinstance(ids, list) else [ids]
    first = tokenizer(between, add_special_tokens=False).input_ids[:1]
    stop += [id for id in first if id in tokenizer.all_special_ids]
    return frozenset(id for id in stop if id is not None)
