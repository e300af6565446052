"""The bundled models' tokenizer, data, initial circuit, training forward and resume."""

from __future__ import annotations

import functools
import uuid
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from kvengine.errors import EvaluationError
from kvengine.evals.train.__main__ import main
from kvengine.evals.train.data import NEEDLE, PREFIX, Recipe, needle_sample
from kvengine.evals.train.forward import Network, causal_attention
from kvengine.evals.train.init import Gains, frequencies, lay_circuit, pair_weights, tiny_config
from kvengine.evals.train.lists import common_words, frequent_words, variable_tracking
from kvengine.evals.train.presets import PRESETS, Preset, Stage
from kvengine.evals.train.samples import IGNORE, Codec, number, word_key
from kvengine.evals.train.text import haystack_sentences
from kvengine.evals.train.tokenizer import BOS, build
from kvengine.evals.train.train import LOG, Trainer, collate, draw_batch, losses

MICRO = Preset(
    shape={"hidden": 64, "layers": 2, "heads": 4, "kv_heads": 1, "ff": 64},
    stages=(Stage(128, 4, 512), Stage(256, 2, 512, shorter=(128,), mix=0.5, tasks={"needle": 0.5, "common": 0.5})),
    save_every=2,
)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    return build()


@functools.cache
def codec() -> Codec:
    return Codec(tokenizer())


@given(st.text())
@example("<|pad|>")
@example(" a<|bos|> <|eos|>\n")
@settings(max_examples=100, deadline=None)
def test_any_text_comes_back(text: str) -> None:
    ids = tokenizer()(text).input_ids  # a special token's name is that token, as transformers reads text
    assert ids[0] == tokenizer().bos_token_id and tokenizer().decode(ids) == BOS + text
    ids = tokenizer()(text, split_special_tokens=True).input_ids
    assert ids[0] == tokenizer().bos_token_id and not set(tokenizer().all_special_ids) & set(ids[1:])
    assert tokenizer().decode(ids, skip_special_tokens=True) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("1234567", 3), (" 1234567", 3), (" 12", 1), (str(uuid.UUID(int=7)), 20), (" " + str(uuid.UUID(int=2**127)), 20)],
)
def test_numbers_and_uuids_are_cut_in_fixed_pieces(text: str, count: int) -> None:
    assert len(tokenizer()(text, add_special_tokens=False).input_ids) == count


def test_words_of_hex_letters_are_not_taken_for_uuids() -> None:
    pieces = tokenizer().convert_ids_to_tokens(tokenizer()(" deadbeef-cafe", add_special_tokens=False).input_ids)
    assert "".join(pieces) == "\u0120deadbeef-cafe" and pieces[0] == "\u0120dead"


def test_the_saved_tokenizer_is_the_same(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)
    text = "One of the special magic numbers for quiet-harbour is: 1234567.\n"
    assert AutoTokenizer.from_pretrained(tmp_path)(text).input_ids == tokenizer()(text).input_ids


@pytest.mark.parametrize("length", [128, 256, 1024])
def test_needle_samples_are_texts_of_the_length_whose_answers_are_in_them(length: int) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        sample = needle_sample(rng, codec(), length, Recipe(uuid_values=0.3, several=0.6))
        text = tokenizer().decode(sample.ids, skip_special_tokens=True)
        assert tokenizer()(text).input_ids == sample.ids  # pieces are cut where the whole text is
        assert length * 0.7 < len(sample.ids) <= length or length == 128
        marked = [place for place, token in enumerate(sample.target) if token != IGNORE]
        assert marked
        for place in marked:
            if sample.target[place] != tokenizer().eos_token_id:
                assert sample.target[place] == sample.ids[place + 1]
            if sample.weight[place] == 1.0:  # the first token of a value: it stands in the context too
                assert sample.target[place] in sample.ids[:place]
        for place, others in sample.also.items():
            assert set(others) <= set(sample.ids[place + 1 :])


def test_list_samples_ask_for_what_is_most_frequent() -> None:
    sample = frequent_words(np.random.default_rng(0), codec(), 1024)
    text = tokenizer().decode(sample.ids, skip_special_tokens=True)
    answers = text.rsplit("words are:", 1)[1].strip(" .").split(", ")
    counts = [text.split().count(word) for word in answers]
    assert counts[0] >= 2 * counts[2] > 0
    for make in (common_words, variable_tracking):
        assert len(make(np.random.default_rng(0), codec(), 1024).ids) <= 1024


def test_offset_heads_look_where_they_should() -> None:
    config = tiny_config(8000, hidden=128, layers=2, heads=4, kv_heads=1, ff=64)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = lay_circuit(LlamaForCausalLM(config))
    ids = torch.randint(0, 8000, (1, 700), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        maps = model(ids, output_attentions=True).attentions[0][0]
    for head, attention in enumerate(maps):
        assert attention.diagonal(-(head + 1)).mean() > 0.85


def test_matching_heads_find_the_value_before_any_training() -> None:
    signs = [tokenizer().convert_tokens_to_ids(sign) for sign in "-:"]
    ends = {"bos_token_id": tokenizer().bos_token_id}
    config = tiny_config(len(tokenizer()), hidden=320, layers=4, heads=8, kv_heads=2, ff=128, **ends)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = lay_circuit(LlamaForCausalLM(config), 0, Gains(match=1.5), *signs)
    rng, needles = np.random.default_rng(0), list[tuple[str, str]]()
    while len(needles) < 30:
        needles.append((word_key(rng), number(rng)))
    found = []
    for key, value in needles[::5]:
        text = "".join("\n" + NEEDLE.format(kind="numbers", key=k, value=v) for k, v in needles)
        text += PREFIX[True].format(one="number", query=key) + " " + value
        ids = tokenizer()(text).input_ids
        with torch.no_grad():
            maps = model(torch.tensor([ids]), output_attentions=True).attentions[1][0]
        start = len(ids) - 3  # of the answer: three tokens, as in the needle
        there = next(i for i in range(start) if ids[i : i + 3] == ids[start:])
        found.append([maps[1, start - 1, there], maps[2, start, there + 1], maps[3, start + 1, there + 2]])
        assert ids[start] != ids[start - 1]
    first, second, third = torch.tensor(found).mean(0).tolist()
    assert first > 0.8 and second > 0.4 and third > 0.6, (first, second, third)


def test_offset_scores_stay_sharp_at_the_longest_length() -> None:
    omega = frequencies(tiny_config(64, hidden=64, layers=1, heads=1, kv_heads=1, ff=64))[:16]
    weights = pair_weights(omega, 30.0)
    scores = weights @ torch.cos(omega[:, None] * torch.arange(-32, 8192))
    assert scores.softmax(0)[32] > 0.97
    even = torch.full_like(weights, 30.0 / 16) @ torch.cos(omega[:, None] * torch.arange(-32, 8192))
    assert even.softmax(0)[32] < 0.75  # the control: equal weights are not sharp


def test_training_forward_is_the_models_own() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(300, hidden=64, layers=3, heads=4, kv_heads=2, ff=96))
    ids, places = torch.randint(0, 300, (2, 600)), torch.tensor([[5, 511, 599], [0, 300, 512]])
    weight = torch.randn(2, 3, 64)
    index = places[..., None].expand(-1, -1, 64)
    gradients = []
    for states in (model.model(ids).last_hidden_state.gather(1, index), Network(model)(ids, places)):
        model.zero_grad()
        (states * weight).sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
        last = states.detach()
        reference = last if len(gradients) == 1 else reference
    torch.testing.assert_close(last, reference, atol=1e-5, rtol=1e-4)
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def test_block_attention_equals_the_textbook() -> None:
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = (torch.randn(1, heads, 530, 8, generator=generator) for heads in (4, 2, 2))
    wide = [states.repeat_interleave(2, 1) for states in (keys, values)]
    scores = (queries @ wide[0].mT / 8**0.5).masked_fill(torch.ones(530, 530, dtype=torch.bool).triu(1), -torch.inf)
    torch.testing.assert_close(causal_attention(queries, keys, values), scores.softmax(-1) @ wide[1])


def test_any_missing_value_counts_as_right() -> None:
    sample = next(
        found
        for seed in range(50)
        if (found := needle_sample(np.random.default_rng(seed), codec(), 256, Recipe(several=1.0))).also
    )
    batch = collate([sample], 0)
    row, column, right = batch.also[0]
    logits = torch.zeros(*batch.target.shape, len(tokenizer()))
    logits[row, column, right[1]] = 50.0
    _, hits = losses(logits, batch)
    assert hits[row, column]
    logits[row, column, right[1]], logits[row, column, 0] = 0.0, 50.0
    assert not losses(logits, batch)[1][row, column]


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    stage = MICRO.stages[1]
    first, again, other = (draw_batch(stage, codec(), 0, step) for step in (5, 5, 6))
    assert torch.equal(first.ids, again.ids)
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def test_a_resumed_run_ends_where_the_uninterrupted_one_does(tmp_path: Path) -> None:
    whole = Trainer(MICRO, tokenizer(), tmp_path / "whole")
    whole.train()
    Trainer(MICRO, tokenizer(), tmp_path / "parts").train(until=3)
    resumed = Trainer(MICRO, tokenizer(), tmp_path / "parts")
    assert resumed.step == 3
    resumed.train()
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert (tmp_path / "parts" / LOG).exists()


def test_a_folder_goes_on_with_its_own_training_alone(tmp_path: Path) -> None:
    """Another seed's samples followed the first ones, and --until 0 trained to the end."""
    first = Trainer(MICRO, tokenizer(), tmp_path)
    first.train(until=0)
    assert first.step == 0
    with pytest.raises(EvaluationError, match="a training with --seed 0; choose another --out"):
        Trainer(MICRO, tokenizer(), tmp_path, seed=1)
    with pytest.raises(EvaluationError, match="another preset"):
        Trainer(replace(MICRO, shape={**MICRO.shape, "ff": 32}), tokenizer(), tmp_path)


@pytest.mark.parametrize(("words", "said"), [
    (["--until", "0"], "--until 0: give a step from 1 on"),
    (["--device", "abacus"], "device 'abacus' is not one that torch knows"),
    (["--out", "/proc/self/new"], "FileNotFoundError"),
])  # fmt: skip
def test_what_is_typed_wrong_is_a_line(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["train", "--out", str(tmp_path), *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2 and said in capsys.readouterr().err


def test_the_export_loads_as_any_model_does(tmp_path: Path) -> None:
    trainer = Trainer(MICRO, tokenizer(), tmp_path / "run")
    trainer.export(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16 and model.config.eos_token_id == loaded.eos_token_id
    out = model.generate(**loaded("The grass is green.", return_tensors="pt"), max_new_tokens=2)
    assert out.shape[1] >= 7


def test_presets_shapes_fit_the_published_model() -> None:
    shape = PRESETS["cpu"].shape
    assert shape["layers"] >= 4 and shape["kv_heads"] < shape["heads"]
    with pytest.raises(ValueError, match="steps"):
        PRESETS["cpu"].at(PRESETS["cpu"].steps)


def test_haystacks_are_prose() -> None:
    text = " ".join(haystack_sentences())
    assert len(text) > 50_000 and "\n" not in text and text.count(". ") > 500
