"""Where the models that come with the package are."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from kvengine.errors import EvaluationError


def _folder(name: str) -> str:
    folder = Path(str(resources.files("kvengine.evals"))) / "models" / name
    if not (folder / "model.safetensors").is_file():
        raise EvaluationError(
            f"no bundled model in {folder}: reinstall the package, or train one (kvengine.evals.train)"
        )
    return str(folder)


def bundled_model() -> str:
    """Folder of the bundled model, for `AutoModelForCausalLM.from_pretrained` and `AutoTokenizer.from_pretrained`.

    Raises `EvaluationError` if this installation has no weights.
    """
    return _folder("tiny")


def draft_model() -> str:
    """Folder of the smaller model with the same tokenizer, for speculative decoding with the bundled one.

    Raises `EvaluationError` if this installation has no weights.
    """
    return _folder("draft")
