"""The models that come with the package: small, loadable by plain transformers, and able to look things up."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import kvengine.evals
from kvengine.errors import EvaluationError
from kvengine.evals import bundled
from kvengine.evals.prompt import Prompter
from kvengine.evals.tasks import Plan, catalogue

FOLDERS = {"tiny": kvengine.evals.bundled_model, "draft": kvengine.evals.draft_model}


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Prompter]:
    path = kvengine.evals.bundled_model()
    return AutoModelForCausalLM.from_pretrained(path).eval(), Prompter(AutoTokenizer.from_pretrained(path))


def test_both_models_fit_the_repository() -> None:
    files = [path for find in FOLDERS.values() for path in Path(find()).iterdir()]
    assert sum(path.stat().st_size for path in files) <= 32 * 2**20


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_holds_a_plain_llama_with_card_and_log(name: str) -> None:
    folder = Path(FOLDERS[name]())
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert isinstance(model, LlamaForCausalLM)
    config = model.config
    assert config.head_dim == 64 and config.num_key_value_heads < config.num_attention_heads
    for file in ("README.md", "training_log.jsonl"):
        assert (folder / file).stat().st_size > 500


def test_both_models_share_one_tokenizer() -> None:
    texts = [(Path(find()) / "tokenizer.json").read_bytes() for find in FOLDERS.values()]
    assert texts[0] == texts[1]


def test_the_bundled_model_has_the_promised_shape(tiny: tuple[Any, Prompter]) -> None:
    config = tiny[0].config
    assert config.num_hidden_layers >= 4 and config.max_position_embeddings >= 4096


@pytest.mark.parametrize(
    "name", ["niah_single_1", pytest.param("niah_single_2", marks=pytest.mark.slow), "niah_multikey_2"]
)
def test_it_answers_easy_prompts_through_generate(tiny: tuple[Any, Prompter], name: str) -> None:
    model, prompter = tiny
    task = catalogue("ruler")[name]
    plan = Plan(length=1024, count=3, seed=Random(0).randrange(100), measure=prompter.measure)
    right = 0.0
    for sample in task.samples(plan):
        turn = sample.turns[0]
        ids = torch.tensor([prompter.whole(sample)])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
        right += task.score(turn, prompter.text(out[0, ids.shape[1] :].tolist()))["string_match_all"]
    assert right >= 2


def test_a_missing_model_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundled.resources, "files", lambda _package: tmp_path)
    with pytest.raises(EvaluationError, match="no bundled model"):
        bundled.bundled_model()
