"""The runner: both modes against hand-made sessions, resume, refusals, configuration and the command line."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from support_evals import saved_model, tiny_model, tiny_tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import AutoTokenizer, DynamicCache, GPT2Config, GPT2LMHeadModel
from typer.testing import CliRunner

from kvengine.cli import app
from kvengine.errors import EvaluationError, PolicyError, UnsupportedPolicy
from kvengine.evals import aggregate, bundled_model, demo, drive, records, report, tables
from kvengine.evals.config import RunConfig, build
from kvengine.evals.engine import CacheSession, StockEngine, Usage
from kvengine.evals.loading import load, model_digest
from kvengine.evals.policies import Arm, arms, split
from kvengine.evals.progress import Bar, Silent
from kvengine.evals.prompt import Prompter, middle_cut
from kvengine.evals.protocol import Answer, Protocol
from kvengine.evals.records import MEASURED, Journal
from kvengine.evals.runner import Cell, Run, outcome, room
from kvengine.evals.tasks import Sample, Task, Turn
from kvengine.policies import catalogue

pytestmark = pytest.mark.usefixtures("undrawn")

SAMPLE = Sample(
    id="0",
    context="CONTEXT. ",
    turns=tuple(Turn(question=f"Q{i}?", answers=(f"G{i}",), max_new_tokens=3, prefix=" A:") for i in range(3)),
)


def made(**given: Any) -> Task:
    """A task of these alone."""
    task = Task()
    vars(task).update(given)
    return task


@dataclass
class Recorder:
    """A session that writes down what is read, and always answers with one token."""

    reads: list[str]
    prompter: Prompter
    token: int
    path: str = "main"
    branches: list[str] = field(default_factory=list)

    def read(self, ids: list[int], *, every: bool = False) -> Tensor:
        self.reads.append(f"{self.path}: {self.prompter.tokenizer.decode(ids)}")
        logits = torch.zeros(len(ids) if every else 1, 640)
        logits[:, self.token] = 1
        return logits

    def follow_up(self) -> None:
        self.reads.append(f"{self.path}: <judged>")

    def branch(self) -> Recorder:
        self.branches.append(self.path)
        return Recorder(self.reads, self.prompter, self.token, f"copy {len(self.branches)}")

    def usage(self) -> Usage:
        return Usage(held=1, attended=1, bytes_held=1, read_per_token=1)


def played(mode: str, *, chat: bool = False, golden: bool = True) -> tuple[list[str], list[str]]:
    prompter = Prompter(tiny_tokenizer(chat=chat), chat)
    letter = prompter.ids("x")[0]
    session = Recorder([], prompter, letter)
    protocol = Protocol(prompter=prompter, mode=mode, stop=frozenset(), golden=golden)
    answers = list(protocol.play(session, SAMPLE))
    return [line for line in session.reads if not line.endswith(": x")], [answer.text for answer in answers]


def test_multi_turn_reads_golden_answers_and_throws_generations_away() -> None:
    reads, answers = played("multi-turn")
    assert reads == [
        "main: <s>CONTEXT. Q0? A:",
        "main: <judged>",
        "main: G0\n\nQ1? A:",
        "main: <judged>",
        "main: G1\n\nQ2? A:",
        "main: <judged>",
    ]
    assert answers == ["xxx"] * 3


def test_multi_turn_can_keep_the_models_own_answers() -> None:
    reads, _ = played("multi-turn", golden=False)
    assert reads[2] == "main: xxx\n\nQ1? A:"


def test_multi_turn_with_a_chat_template_closes_and_opens_turns() -> None:
    reads, _ = played("multi-turn", chat=True)
    assert reads[0] == "main: <s><|user|>CONTEXT. Q0?<|end|><|assistant|> A:"
    assert reads[2] == "main: G0<|end|><|user|>Q1?<|end|><|assistant|> A:"


def test_multi_request_judges_the_context_alone_and_asks_on_copies() -> None:
    reads, _ = played("multi-request", chat=True)
    assert reads == [
        "main: <s><|user|>CONTEXT. ",
        "main: <judged>",
        "copy 1: Q0?<|end|><|assistant|> A:",
        "copy 2: Q1?<|end|><|assistant|> A:",
        "main: Q2?<|end|><|assistant|> A:",
    ]


def test_generation_on_a_branch_does_not_touch_the_session() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    session = CacheSession(model, DynamicCache())
    session.read([5, 6, 7])
    before = session.read([8]).clone()
    branch = session.branch()
    branch.read([9, 10, 11])
    assert session.usage().held == 4 and branch.usage().held == 7
    again = CacheSession(model, DynamicCache())
    assert torch.allclose(again.read([5, 6, 7, 8]), before, atol=1e-5)
    assert tokenizer is not None


def test_answers_equal_those_of_generate() -> None:
    """The runner's loop against transformers' own, on a stock cache."""
    model, prompter = tiny_model(), Prompter(tiny_tokenizer())
    turn = Turn(question="Q?", answers=("x",), max_new_tokens=12)
    sample = Sample(id="0", context="Alice was beginning to get very tired. ", turns=(turn,))
    answers = {}
    for mode in ("multi-turn", "multi-request"):
        protocol = Protocol(prompter=prompter, mode=mode, stop=frozenset({1}))
        answers[mode] = next(iter(protocol.play(StockEngine(model).session(), sample)))
    ids = torch.tensor([prompter.whole(sample)])
    out = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=1, pad_token_id=1)
    assert answers["multi-turn"].text == prompter.text(out[0, ids.shape[1] :].tolist())
    assert answers["multi-turn"].tokens == 12 and answers["multi-turn"].finish == "length"


@pytest.mark.parametrize("mode", ["multi-turn", "multi-request"])
def test_an_answer_ends_before_the_first_token_that_ends_one(mode: str) -> None:
    model, prompter = tiny_model(), Prompter(tiny_tokenizer())
    turn = Turn(question="Q?", answers=("x",), max_new_tokens=12)
    sample = Sample(id="0", context="Alice was beginning to get very tired. ", turns=(turn,))
    parts = prompter.context(sample) + prompter.asked(turn)
    ids = torch.tensor([prompter.whole(sample) if mode == "multi-turn" else parts])
    said = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None)[0, ids.shape[1] :].tolist()
    for end in (said[0], said[-1]):
        kept = said[: said.index(end)]
        protocol = Protocol(prompter=prompter, mode=mode, stop=frozenset({end}))
        answer = next(iter(protocol.play(StockEngine(model).session(), sample)))
        assert (answer.text, answer.tokens, answer.finish) == (prompter.text(kept), len(kept), "stop")
        assert answer.usage.held == ids.shape[1] + len(kept)


@pytest.mark.parametrize(
    ("mode", "limit"), [("multi-turn", 9), ("multi-turn", 99), ("multi-request", 4), ("multi-request", 99)]
)
def test_what_was_read_is_counted_and_what_was_cut_is_told(mode: str, limit: int) -> None:
    """A later turn of a conversation reads no first prompt; a request is charged the context with its question."""
    prompter = Prompter(tiny_tokenizer())
    protocol = Protocol(prompter=prompter, mode=mode, stop=frozenset(), limit=limit)
    session = Recorder([], prompter, prompter.ids("x")[0])
    answers = list(protocol.play(session, SAMPLE))
    if mode == "multi-turn":
        whole, later = (
            len(prompter.whole(SAMPLE)),
            [len(prompter.follow(f"G{i}", SAMPLE.turns[i + 1])) for i in range(2)],
        )
        assert [answer.prompt_tokens for answer in answers] == [min(whole, limit), *later]
        assert [answer.truncated for answer in answers] == [limit < whole, False, False]
    else:
        whole = len(prompter.context(SAMPLE))
        assert [answer.prompt_tokens for answer in answers] == [
            min(whole, limit) + len(prompter.asked(turn)) for turn in SAMPLE.turns
        ]
        assert [answer.truncated for answer in answers] == [limit < whole] * 3
    assert len(session.branches) == 2 and {answer.finish for answer in answers} == {"length"}


def test_a_request_without_a_question_goes_on_from_the_context() -> None:
    """Whatever was asked before it: it was answered from what the question before it had led to."""
    model, prompter = tiny_model(), Prompter(tiny_tokenizer())
    asked, bare = (Turn(question=text, answers=("x",), max_new_tokens=6) for text in ("Who said that?", ""))
    sample = Sample(id="0", context="Alice was beginning to get very tired. ", turns=(bare, asked, bare))
    protocol = Protocol(prompter=prompter, mode="multi-request", stop=frozenset())
    first, other, last = protocol.play(StockEngine(model).session(), sample)
    assert first.text == last.text != other.text and first.prompt_tokens == last.prompt_tokens


@pytest.mark.parametrize("most", [64, 2, 1])
def test_forced_nll_equals_the_loss_of_one_forward(most: int) -> None:
    model, prompter = tiny_model(), Prompter(tiny_tokenizer(chat=True), True)  # the sample is raw: no template
    turn = Turn(question="", answers=(" and what is the use of a book",), max_new_tokens=most, forced=True)
    sample = Sample(id="0", context="thought Alice", turns=(turn,), raw=True)
    bare = Prompter(prompter.tokenizer)
    context, after = bare.context(sample), bare.ids(turn.answers[0])[:most]
    with torch.no_grad():
        logits = model(torch.tensor([context + after])).logits[0, len(context) - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(after)).item()
    for mode in ("multi-turn", "multi-request"):
        protocol = Protocol(prompter=prompter, mode=mode, stop=frozenset())
        answer = next(iter(protocol.play(StockEngine(model).session(), sample)))
        assert answer.nll == pytest.approx(expected, abs=1e-5) and answer.tokens == len(after)


@dataclass
class Slow(Recorder):
    """Takes a second for each token that it reads, and a minute to be copied."""

    clock: list[float] = field(default_factory=lambda: [1000.0])

    def read(self, ids: list[int], *, every: bool = False) -> Tensor:
        self.clock[0] += len(ids)
        return super().read(ids, every=every)

    def branch(self) -> Slow:
        self.clock[0] += 60
        return replace(self)


@pytest.mark.parametrize("forced", [False, True])
@pytest.mark.parametrize("mode", ["multi-turn", "multi-request"])
def test_times_are_those_of_what_the_turn_has_read(mode: str, forced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the first token: of what was unread, in a request the context too. Decoding: of the tokens after it."""
    prompter, clock = Prompter(tiny_tokenizer()), [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    sample = replace(SAMPLE, turns=tuple(replace(turn, forced=forced) for turn in SAMPLE.turns))
    session = Slow([], prompter, prompter.ids("x")[0], clock=clock)
    answers = list(Protocol(prompter=prompter, mode=mode, stop=frozenset()).play(session, sample))
    follows = [len(prompter.follow(f"G{i}", SAMPLE.turns[i + 1])) for i in range(2)]
    context, turns = len(prompter.context(SAMPLE)), SAMPLE.turns
    conversation = [len(prompter.whole(SAMPLE)), *follows]
    unread = conversation if mode == "multi-turn" else [context + len(prompter.asked(turn)) for turn in turns]
    assert [answer.ttft for answer in answers] == unread
    said = [len(prompter.ids(turn.answers[0])) if forced else 3 for turn in turns]
    assert [answer.decode for answer in answers] == [n - 1 for n in said]


# ---- prompts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("bos", [False, True])
def test_exactly_one_beginning_token(chat: bool, bos: bool) -> None:
    """The template of the chat tokenizer writes one and the tokenizer adds one of its own: together that is two."""
    tokenizer = tiny_tokenizer(chat=chat, bos=bos)
    prompter = Prompter(tokenizer, chat)
    for ids in (prompter.whole(SAMPLE), prompter.context(SAMPLE)):
        assert ids.count(tokenizer.bos_token_id) == int(bos or chat) == int(ids[0] == tokenizer.bos_token_id)
    assert tokenizer.bos_token_id not in prompter.asked(SAMPLE.turns[0]) + prompter.follow("G", SAMPLE.turns[1])
    if not chat:
        assert prompter.context(SAMPLE) == tokenizer(SAMPLE.context).input_ids
    if chat and bos:  # the trap itself: rendering to text and encoding with special tokens on
        text = prompter.wrapper.head + SAMPLE.context
        assert tokenizer(text).input_ids.count(tokenizer.bos_token_id) == 2


def test_a_raw_sample_has_no_template() -> None:
    prompter = Prompter(tiny_tokenizer(chat=True), True)
    raw = Sample(id="0", context="C", turns=SAMPLE.turns, raw=True)
    assert prompter.of(raw).text(prompter.of(raw).whole(raw)) == "CQ0? A:"
    assert (
        prompter.of(raw).whole(raw) == prompter.tokenizer("CQ0? A:").input_ids
    )  # and nothing that the text leaves out
    assert prompter.of(SAMPLE) is prompter


EACH = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.mark.parametrize("template", [
    EACH.replace("] }", "] | lower }"),
    EACH.replace("] }", "] | upper }"),
    EACH.replace("{% endfor", "{{ m['content'] }}{% endfor"),  # said twice
    "{{ messages[-1]['content'] }}",  # what was said before is gone
    "{% if messages | length > 1 %}" + EACH + "{% endif %}",  # and here what is said first
])  # fmt: skip
def test_a_template_that_changes_messages_is_refused(template: str) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = template
    with pytest.raises(EvaluationError, match="drops or changes messages.*--chat off"):
        _ = Prompter(tokenizer, True).wrapper


@pytest.mark.parametrize("template", [
    "{{ raise_exception('no system role') }}", "{{ messages }", "{{ messages + 1 }}", {"tools": EACH, "plain": EACH},
])  # fmt: skip
def test_a_template_that_cannot_be_used_is_refused(template: Any) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = template
    with pytest.raises(EvaluationError, match="the chat template cannot be used.*--chat off"):
        _ = Prompter(tokenizer, True).wrapper


def test_prompts_are_the_same_every_day() -> None:
    """Llama 3 and others write the date into them: a run could not be continued after midnight."""
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = "{% set date = strftime_now('%d %b %Y') %}" + EACH.replace("%}", "%}[{{ date }}] ", 1)
    assert Prompter(tokenizer, True).wrapper.head == "[26 Jul 2024] "
    tokenizer.chat_template = "{%- if strftime_now is defined %}{{ strftime_now('%Y-%m-%d, %H:%M') }}{% endif %}" + EACH
    assert Prompter(tokenizer, True).wrapper.head == "2024-07-26, 00:00"


def test_no_answer_is_spent_on_thoughts_or_it_is_told() -> None:
    """Templates as Qwen 3's have the model think unless they are told: an answer's 48 tokens may all be a thought."""
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = EACH + "{% if enable_thinking is false %}<think></think>{% endif %}"
    may = Prompter(tokenizer, True).wrapper.tail
    tokenizer.chat_template = EACH + "<think>"  # as DeepSeek R1 always does
    must = Prompter(tokenizer, True).wrapper.tail
    assert (may, must) == ("<think></think>", "<think>")
    told = [tables.conditions([], {"config": {}, "wrapper": {"tail": tail}}) for tail in (may, must, "")]
    assert "--chat off" in told[1][0] and told == [[], told[1][:1], []]


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(EvaluationError, match="no chat template.*--chat off"):
        _ = Prompter(tiny_tokenizer(chat=False), True).wrapper


def test_a_sample_is_measured_by_its_longest_prompt() -> None:
    """A later question may be longer than the first, and a text in two pieces than in one: words that begin a text get a
    space of their own from some tokenizers."""
    long = replace(SAMPLE, turns=(*SAMPLE.turns, replace(SAMPLE.turns[0], question="And which one was it, again?")))
    prompter = Prompter(tiny_tokenizer())
    prompts = [len(prompter.context(long)) + len(prompter.asked(turn)) for turn in long.turns]
    assert prompter.measure(long) == prompts[-1] > len(prompter.whole(long))
    spaced = tiny_tokenizer()
    spaced.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    prompter = Prompter(spaced)
    assert prompter.text(prompter.asked(SAMPLE.turns[0])) == " Q0? A:"
    assert prompter.measure(SAMPLE) == len(prompter.context(SAMPLE)) + len(prompter.asked(SAMPLE.turns[0]))
    assert prompter.measure(SAMPLE) > len(prompter.whole(SAMPLE))


def test_no_question_of_several_is_beyond_the_length(tmp_path: Path) -> None:
    run(settings := config(tmp_path, suite="quiz", tasks="quiz_multikey_1", samples=3, modes=("multi-request",)))
    rows = fixed(tmp_path)
    assert len(rows) == 12
    assert max(row["prompt_tokens"] + row["max_new_tokens"] for row in rows) <= settings.lengths[0]


def test_a_sample_may_have_an_opening_of_its_own() -> None:
    prompter = Prompter(tiny_tokenizer())
    assert prompter.text(prompter.whole(replace(SAMPLE, opening="Q0? CONTEXT."))) == "Q0? CONTEXT. A:"


@pytest.mark.parametrize("most", range(1, 12))
def test_an_answer_read_from_its_text_takes_no_more_tokens_than_it_may(most: int) -> None:
    prompter, turn = Prompter(tiny_tokenizer()), SAMPLE.turns[1]
    answer = "Alice \ufffd\ufffd was"
    whole, rest = prompter.follow(answer, turn), prompter.follow("", turn)
    found = prompter.follow(answer, turn, most)
    assert found[-len(rest) :] == rest and len(rest) < len(found) <= len(rest) + most
    assert len(whole) > len(rest) + most or found == whole


def test_the_middle_is_cut_and_both_ends_stay() -> None:
    assert middle_cut(list(range(10)), 5) == [0, 1, 7, 8, 9]
    assert middle_cut([1, 2], 5) == [1, 2]


# ---- runs ----------------------------------------------------------------------------------------------------------


def config(out: Path, **more: Any) -> RunConfig:
    settings = {
        "suite": "ruler",
        "tasks": "niah_single_1,fwe",
        "lengths": (1024,),
        "samples": 2,
        "policies": ("stock",),
    }
    return RunConfig(**{**settings, "oracle": False, "out": out, **more})


def run(settings: RunConfig, **more: Any) -> Run:
    made = Run(settings, tiny_model(), tiny_tokenizer(), Journal.open(settings.out / "rows.jsonl"), **more)
    made.execute(Silent())
    return made


def fixed(path: Path) -> list[dict[str, Any]]:
    """Rows without what was measured with a clock."""
    rows = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in MEASURED} for row in rows]


def test_a_run_gives_every_row_once_and_a_second_run_gives_nothing(tmp_path: Path) -> None:
    settings = config(tmp_path)
    run(settings)
    rows = fixed(tmp_path)
    assert [(row["task"], row["sample"]) for row in rows] == [(t, s) for t in ("niah_single_1", "fwe") for s in "01"]
    run(settings)
    assert fixed(tmp_path) == rows


def test_texts_of_a_task_go_when_it_is_done_and_their_hashes_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of thirteen tasks of 128K tokens would be gigabytes. In rounds they stay, as each asks of them again."""
    most = 0

    def nothing(self: Run, cell: Any, *_: Any) -> None:
        nonlocal most
        most = max(most, len(self._drawn))

    monkeypatch.setattr(Run, "attempt", nothing)
    one = run(config(tmp_path, lengths=(512, 1024), policies=("stock", "full")))
    assert most == 1 and not one._drawn
    rounds = Run(one.config, one.model, one.tokenizer, one.journal)
    rounds.execute(Silent(), 1)
    assert most == len(rounds._drawn) == 4 and rounds.data_hashes() == one.data_hashes() != {}


def test_a_long_text_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each round it is asked of every sample so far whether it was done."""
    sample = replace(SAMPLE, context="another")
    known = sample.digest()
    assert known not in (SAMPLE.digest(), replace(sample, context="a third").digest())
    monkeypatch.setattr("kvengine.evals.tasks.hashlib", None)
    assert sample.digest() == known


def test_two_runs_agree_and_more_samples_extend_the_first(tmp_path: Path) -> None:
    run(config(tmp_path / "a"))
    run(config(tmp_path / "b", samples=3))
    a, b = fixed(tmp_path / "a"), fixed(tmp_path / "b")
    assert [row for row in b if row["sample"] != "2"] == a


def test_rows_hold_what_a_reader_needs(tmp_path: Path) -> None:
    run(config(tmp_path, modes=("multi-request",)))
    row = json.loads((tmp_path / "rows.jsonl").read_text().splitlines()[0])
    assert row["placement"] == "agnostic" and row["metric"] == "string_match_all" and row["stack"] == "stock"
    assert row["held"] == row["attended"] == row["prompt_tokens"] + row["new_tokens"] - 1
    assert row["bytes_held"] == row["held"] * 2 * 2 * 2 * 8 * 4  # layers · k and v · kv heads · head size · fp32
    assert row["ttft"] > 0 and row["tokens_per_s"] > 0 and 0 <= row["meta"]["depth"] <= 1


def test_a_row_says_what_an_answer_was_worth() -> None:
    usage = Usage(held=3.0, attended=2.0, bytes_held=5, read_per_token=4)
    said = Answer(
        text=" x", tokens=5, finish="stop", prompt_tokens=7, truncated=True, ttft=0.5, decode=2.0, usage=usage
    )  # fmt: skip
    task = made(metric="official", score=lambda turn, text: {"strict": 0.0, "official": 1.0})
    row = outcome(task, SAMPLE.turns[0], said)
    assert (row["metric"], row["score"], row["scores"]) == ("official", 1.0, {"strict": 0.0, "official": 1.0})
    assert (row["answers"], row["null"], row["truncated"], row["finish"]) == (["G0"], False, True, "stop")
    assert row["tokens_per_s"] == 5 / 2.0  # the first came with the prompt, and what ended the answer was decoded
    assert outcome(task, SAMPLE.turns[0], replace(said, finish="length"))["tokens_per_s"] == 4 / 2.0
    assert [row[name] for name in ("prompt_tokens", "new_tokens", "held", "attended", "bytes_held")] == [7, 5, 3, 2, 5]
    task.metric = "of another kind"  # of a task that mixes several
    assert outcome(task, SAMPLE.turns[0], said)["metric"] == "strict"
    untimed: tuple[dict[str, Any], ...] = ({"tokens": 0}, {"tokens": 1, "finish": "length"}, {"decode": None})
    rows = [outcome(task, SAMPLE.turns[0], replace(said, **more)) for more in untimed]
    assert [row["tokens_per_s"] for row in rows] == [None] * 3
    assert outcome(task, SAMPLE.turns[0], replace(said, text=" \n"))["null"]
    row = outcome(task, replace(SAMPLE.turns[0], forced=True), replace(said, text="", nll=0.25))
    assert (row["metric"], row["score"], row["scores"]) == ("nll", 0.25, {"nll": 0.25})
    assert (row["answers"], row["null"], row["tokens_per_s"]) == ([], False, None)


def test_a_torn_tail_is_cut_and_only_that_sample_done_again(tmp_path: Path) -> None:
    settings = config(tmp_path)
    run(settings)
    rows, path = fixed(tmp_path), tmp_path / "rows.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:-40])
    assert len(Journal.open(path).rows) == 3 and path.read_bytes() == b"".join(lines[:-1])
    run(settings)
    assert fixed(tmp_path) == rows


def test_edited_data_are_done_again(tmp_path: Path) -> None:
    """The key of a cell names files, not what is in them: the hash of each sample does."""
    essays = tmp_path / "essays.txt"
    essays.write_text("")
    settings = config(tmp_path / "run", tasks="niah_single_2", data={"essays": essays}, samples=1)
    for text in ("Cats sleep. " * 900, "Dogs bark. " * 900):
        essays.write_text(text)
        run(settings)
    hashes = [row["sample_hash"] for row in fixed(tmp_path / "run")]
    assert len(set(hashes)) == 2 == len(hashes)


@pytest.mark.parametrize("width", [40, 80])
def test_no_number_is_shortened_on_a_narrow_terminal(width: int) -> None:
    """The bar's count and the time left were dots even on 80 columns, the table's `96.7` was `96…` on 40."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    policy = "oracle_topk(budget=0.25)"
    cell = Cell(made(name="scbench_needles"), 4096, "multi-turn", Arm(policy, "policy", policy))
    with Bar(3, 20, console) as bar:
        bar.cell(cell, 7)
    drive.show(console, "ruler", ["policy", "score", "read/token"], [["snapkv(budget=0.25)", "96.7", "920.9 KiB"]])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert re.search(r"7/60 0:00:\d\d eta [-:]+ scbench", text) and "96.7" in text and "920.9 KiB" in text
    assert max(map(len, text.splitlines())) <= width


def test_a_policy_that_was_asked_of_other_data_stands_beside_no_other(tmp_path: Path, model_folder: Path) -> None:
    """The data are edited and the run goes on with another policy: its samples have the names of the older ones."""
    words = ["--model", str(model_folder), "--data", f"longbench={tmp_path}", "--tasks", "hotpotqa", "--samples", "1"]
    words += ["--lengths", "1024", "--out", str(tmp_path / "run"), "--no-ceiling", "--no-oracle"]
    told = ""
    for policy, place in (("full", "Paris"), ("streaming(recent=64)", "Rome"), ("full", "Rome")):
        row = {"input": "where?", "context": f"It was in {place}.", "answers": [place]}
        (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
        before, told = told, invoke("longbench", *words, "--policies", policy)[1]
    assert "full on hotpotqa: other data" in before and "other data" not in told
    scores = {cell.policy: cell.score for cell in report.found(tmp_path / "run")}
    assert len(scores) == 2 and all(scores.values())


def test_half_a_session_is_cut_too(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"key": "k", "sample": "0", "turns": 3}
    path.write_text("".join(json.dumps({**row, "turn": turn}) + "\n" for turn in range(2)))
    assert Journal.open(path).rows == [] and path.read_bytes() == b""


def test_damage_in_the_middle_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = json.dumps({"key": "k", "sample": "0", "turn": 0, "turns": 1})
    path.write_text(f"{row}\n{row[:10]}\n{row}\n")
    with pytest.raises(EvaluationError, match="damaged at byte 51"):
        Journal.open(path)


@pytest.mark.parametrize("line", ["{}", "[1]", '{"key": "k", "sample": "0", "turn": "x", "turns": null}', '{"a": 1}'])
def test_another_tools_file_is_neither_read_nor_cut(tmp_path: Path, line: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(EvaluationError, match="no row of a run, at byte 0"):
        Journal.open(path)
    assert path.read_text() == f"{line}\n"


def test_who_opens_a_journal_cuts_off_nothing_that_another_process_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--dry-run` beside a run took the sample for torn that came while it read, and cut it off."""
    path, there, threads = tmp_path / "rows.jsonl", records.read_rows, []
    row = {"key": "k", "sample": "0", "turn": 0, "turns": 1}
    Journal(path).append([row])

    def slowly(path: Path) -> Any:
        found = there(path)
        threads.append(threading.Thread(target=Journal(path).append, args=([{**row, "sample": "1"}],)))
        threads[0].start()
        threads[0].join(0.3)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(records, "read_rows", slowly)
        assert len(Journal.open(path).rows) == 1
    threads[0].join()
    assert len(Journal.open(path).rows) == 2


def test_a_journal_that_grows_while_it_is_read_is_not_damaged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, whole = tmp_path / "rows.jsonl", Path.read_bytes
    row = json.dumps({"key": "k", "sample": "0", "turn": 0, "turns": 1}).encode() + b"\n"
    path.write_bytes(row + row[:10])

    def growing(self: Path) -> bytes:
        found = whole(self)
        self.write_bytes(row + row)
        return found

    monkeypatch.setattr(Path, "read_bytes", growing)
    assert records.read_rows(path)[1] == len(row)


def refusing(error: Exception) -> Any:
    @contextlib.contextmanager
    def opener(model: Any, policy: str) -> Iterator[StockEngine]:
        raise error
        yield StockEngine(model)

    return opener


@pytest.mark.parametrize(("error", "status"), [
    (UnsupportedPolicy("this model has no heads"), "refused"),
    (torch.OutOfMemoryError("CUDA out of memory"), "out of memory"),
    (MemoryError(), "out of memory"),
])  # fmt: skip
def test_a_cell_that_cannot_run_is_recorded_and_the_rest_goes_on(tmp_path: Path, error: Exception, status: str) -> None:
    settings = config(tmp_path)
    run(settings, opener=refusing(error))
    rows = fixed(tmp_path)
    assert [row["status"] for row in rows] == [status] * 2
    assert {row["message"] for row in rows} == {str(error)}
    run(settings)
    assert fixed(tmp_path) == rows  # not tried again …
    run(config(tmp_path, retry=True))
    assert [row["status"] for row in fixed(tmp_path)][2:] == ["ok"] * 4  # … unless asked to
    found = aggregate.cells(Journal.open(tmp_path / "rows.jsonl").rows)
    assert [cell.status for cell in found] == ["ok", "ok"]


def test_a_cell_that_went_well_at_last_takes_more_samples(tmp_path: Path) -> None:
    """It was passed over for good, and no word was said."""
    one = {"tasks": "fwe", "ceiling": False, "samples": 1}
    run(config(tmp_path, **one), opener=refusing(MemoryError()))
    run(config(tmp_path, **one, retry=True))
    run(config(tmp_path, **{**one, "samples": 3}))
    assert [row["sample"] for row in fixed(tmp_path)] == [None, "0", "1", "2"]


def test_other_errors_are_not_swallowed(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(config(tmp_path), opener=refusing(ZeroDivisionError()))


def test_a_length_too_small_is_recorded(tmp_path: Path) -> None:
    run(config(tmp_path, lengths=(140,), tasks="niah_single_1"))
    assert [row["status"] for row in fixed(tmp_path)] == ["too short"]


@pytest.mark.parametrize(("chat", "template", "wrapped"), [
    ("auto", True, True), ("auto", False, False), ("on", True, True), ("off", True, False), ("off", False, False),
])  # fmt: skip
def test_the_template_is_the_models_unless_told_otherwise(
    tmp_path: Path, chat: str, template: bool, wrapped: bool
) -> None:
    made = Run(config(tmp_path, chat=chat), tiny_model(), tiny_tokenizer(chat=template), Journal(tmp_path / "x"))
    assert bool(made.prompter.wrapper.head) == wrapped
    if not template:
        with pytest.raises(EvaluationError, match="no chat template"):
            Run(config(tmp_path, chat="on"), made.model, made.tokenizer, Journal(tmp_path / "x"))


def test_a_task_without_data_is_left_out_of_all_and_told_where_it_was_asked_for(tmp_path: Path) -> None:
    row = {"input": "who?", "context": "The sky is blue.", "answers": ["blue"]}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    for tasks, left in (("all", True), ("hotpotqa,qasper", False)):
        settings = config(tmp_path / tasks, suite="longbench", tasks=tasks, data={"longbench": tmp_path})
        made = Run(settings, tiny_model(), tiny_tokenizer(), Journal(tmp_path / "x"))
        assert ("qasper" in [task.name for task in made.left_out()]) == left
        assert [cell.task.name for cell in made.cells()] == (["hotpotqa"] if left else ["hotpotqa", "qasper"])


def test_a_cell_that_lacked_its_data_is_done_when_they_are_there(tmp_path: Path) -> None:
    """The same command is given again after the file was put where the message said."""
    row = {"input": "who?", "context": "The sky is blue.", "answers": ["blue"]}
    settings = config(tmp_path / "run", suite="longbench", tasks="qasper", data={"longbench": tmp_path}, samples=9)
    for _ in range(2):
        run(settings)
        assert [one["status"] for one in fixed(tmp_path / "run")] == ["no data"]
    (tmp_path / "qasper.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    run(settings)
    assert [one["status"] for one in fixed(tmp_path / "run")] == ["no data", "ok", "ok"]


def test_the_bar_is_full_where_the_data_have_fewer_samples_than_were_asked_for(tmp_path: Path) -> None:
    row = {"input": "who?", "context": "The sky is blue.", "answers": ["blue"]}
    (tmp_path / "qasper.jsonl").write_text(f"{json.dumps(row)}\n" * 2)
    made = Run(
        config(tmp_path / "run", suite="longbench", tasks="qasper", data={"longbench": tmp_path}, samples=50),
        tiny_model(),
        tiny_tokenizer(),
        Journal(tmp_path / "run" / "rows.jsonl"),
    )
    console = Console(file=io.StringIO(), width=120)
    with Bar(1, 50, console) as bar:
        made.execute(bar)
    assert bar.progress.tasks[0].completed == 50
    assert "0.000 of 2" in console.file.getvalue()  # type: ignore[attr-defined]


def test_users_data_are_cut_to_the_length_and_generated_ones_are_not(tmp_path: Path) -> None:
    run = Run(config(tmp_path), tiny_model(), tiny_tokenizer(), Journal(tmp_path / "x"))
    cell, later = run.cells()[0], replace(run.cells()[0], mode="multi-request")
    users = Sample(id="0", context="", turns=SAMPLE.turns, provenance="user data")
    single = Sample(id="0", context="", turns=SAMPLE.turns[:1], provenance="user data")
    assert room(cell, SAMPLE, run.prompter) is None
    follows = [len(run.prompter.follow(f"G{i}", SAMPLE.turns[i + 1])) for i in range(2)]
    assert room(cell, users, run.prompter) == 1024 - sum(follows) - 3
    said = replace(users, turns=tuple(replace(turn, max_new_tokens=90) for turn in SAMPLE.turns))
    assert room(cell, said, run.prompter) == 1024 - 3 * 90  # SCBench's rule, where it is enough
    with pytest.raises(EvaluationError, match="answers and later questions take 1009 tokens; ask for a longer one"):
        room(later, users, run.prompter)  # 1000 tokens are for the questions
    assert room(later, replace(users, turns=SAMPLE.turns[:2]), run.prompter) == 1024 - 6 - 1000
    long = tuple(replace(turn, question=1100 * "why? ") for turn in SAMPLE.turns)
    asked_long = len(run.prompter.asked(long[0]))
    assert room(replace(later, length=4096), replace(users, turns=long), run.prompter) == 4096 - asked_long - 3
    asked = [len(run.prompter.follow("", turn)) for turn in SAMPLE.turns[1:]]
    assert room(cell, users, run.prompter, golden=False) == 1024 - 9 - sum(asked)
    apart = replace(cell, task=made(conversation=False))  # each question alone with the context
    assert room(apart, users, run.prompter, golden=False) == 1024 - 9
    turn, question = single.turns[0], run.prompter.asked(single.turns[0])
    assert question and room(later, single, run.prompter) == 1024 - turn.max_new_tokens - len(question)


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    """kill -9 in the middle of a run, with whatever the file system has kept by then."""
    model = saved_model(tmp_path / "model", chat=True)
    words = ["ruler", "--model", str(model), "--policies", "full;streaming(recent=60)", "--tasks", "niah_single_1,fwe"]
    words += ["--lengths", "1024", "--samples", "3", "--no-oracle", "--no-report"]
    command = [sys.executable, "-P", "-c", "from kvengine.cli import main; main()", "eval", *words, "--out"]
    killed = tmp_path / "killed"
    process = subprocess.Popen([*command, str(killed)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    rows, limit = killed / "rows.jsonl", time.monotonic() + 120
    while process.poll() is None and time.monotonic() < limit:
        if rows.exists() and rows.read_bytes().count(b"\n") >= 2:
            break
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = rows.read_bytes().count(b"\n")
    assert 2 <= done < 12, "the run was over before it could be killed"
    os.truncate(rows, rows.stat().st_size - 17)  # as if the disk had got only a part of the last write
    assert not rows.read_bytes().endswith(b"\n")
    for out in (killed, tmp_path / "whole"):
        assert CliRunner().invoke(app, ["eval", *words, "--out", str(out)]).exit_code == 0
    assert fixed(killed) == fixed(tmp_path / "whole")
    manifest = json.loads((killed / "manifest.json").read_text())
    assert len(manifest["resumed"]) >= 1
    assert manifest["data"] == json.loads((tmp_path / "whole" / "manifest.json").read_text())["data"]


# ---- policies and configuration ------------------------------------------------------------------------------------


def test_policies_split_at_commas_outside_brackets() -> None:
    text = "full,snapkv(budget=0.25, window=16)+kivi(bits=4); duo(pattern='a,b;c')"
    assert split(text) == ["full", "snapkv(budget=0.25, window=16)+kivi(bits=4)", "duo(pattern='a,b;c')"]


def test_the_policies_that_a_message_proposes_can_be_had() -> None:
    """It proposed a streaming(budget=512), and streaming has no budget."""
    with pytest.raises(EvaluationError, match="no policy given") as told:
        arms([])
    (proposed,) = re.findall('"(.*)"', str(told.value))
    assert [arm.refused for arm in arms(split(proposed), oracle=False)] == [None, None]


def test_the_ceiling_comes_first_and_an_oracle_per_budget_last() -> None:
    found = arms(["quest(budget=256)", "snapkv(budget=256)", "h2o(budget=0.5)"])
    assert [arm.policy for arm in found] == [
        "full",
        "quest(budget=256)",
        "snapkv(budget=256)",
        "h2o(budget=0.5)",
        "oracle_topk(budget=256)",
        "oracle_topk(budget=0.5)",
    ]
    assert arms(["h2o(budget=0.00005)"])[-1].policy == "oracle_topk(budget=5e-05)"  # five tokens were its oracle
    assert [arm.role for arm in found] == ["ceiling", "policy", "policy", "policy", "oracle", "oracle"]
    assert [arm.policy for arm in arms(["full", "kivi"], oracle=False)] == ["full", "kivi"]
    assert [arm.policy for arm in arms(["kivi"], ceiling=False, oracle=False)] == ["kivi"]


def test_an_unknown_policy_stops_before_anything_runs() -> None:
    with pytest.raises(PolicyError, match="Did you mean 'quest'"):
        arms(["quset(budget=4)"])


def test_an_impossible_policy_is_kept_with_its_reason() -> None:
    arm = next(arm for arm in arms(["h2o+snapkv"]) if arm.policy == "h2o+snapkv")
    assert arm.refused is not None


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("policies: [full, 'quest(budget=64)']\nlengths: 512,1024\nsamples: 7\nfail-under: {vt: 50}\n")
    made = build("ruler", file, {"samples": 3, "out": tmp_path, "seed": None})
    assert (made.samples, made.lengths, made.seed) == (3, (512, 1024), 42)
    assert made.policies == ("full", "quest(budget=64)") and made.fail_under == {"vt": 50.0}


def test_a_setting_that_would_change_nothing_is_refused_where_it_was_written(tmp_path: Path) -> None:
    """`--policies snapkv --budget 0.5` measured snapkv at its own budget. A file's may lie idle under other policies."""
    (file := tmp_path / "run.yaml").write_text("policies: all\nbudget: 0.5\nshared: true\nbatch: 4\n")
    assert build("ruler", file, {"out": tmp_path}).budget == 0.5
    made = build("ruler", file, {"out": tmp_path, "policies": "kivi", "shared": False})
    assert made.policies == ("kivi",) and not made.shared
    with pytest.raises(EvaluationError, match="budget=0.25 is of what the policy 'all' stands for"):
        build("ruler", file, {"out": tmp_path, "policies": "kivi", "budget": "0.25"})
    file.write_text("policies: kivi\nbudget: 0.5\n")
    with pytest.raises(EvaluationError, match="write it into a policy"):
        build("ruler", file, {"out": tmp_path})
    assert build("ruler", file, {"out": tmp_path, "policies": "all"}).budget == 0.5
    file.write_text("golden: false\n")
    assert not build("scbench", file, {"out": tmp_path, "modes": "multi-request"}).golden
    with pytest.raises(EvaluationError, match="in the mode multi-turn; leave it out"):
        build("scbench", None, {"out": tmp_path, "modes": "multi-request", "golden": False})


@pytest.mark.parametrize("name", ["mode", "modes"])
def test_the_mode_of_the_command_line_overrides_the_files_by_either_name(tmp_path: Path, name: str) -> None:
    """The command line has --mode, and a file may have modes: what was typed was passed over."""
    (file := tmp_path / "run.yaml").write_text(f"{name}: [multi-turn]\n")
    assert build("ruler", file, {"mode": "multi-request", "out": tmp_path}).modes == ("multi-request",)
    assert build("ruler", file, {"modes": "both", "out": tmp_path}).modes == ("multi-turn", "multi-request")
    assert build("ruler", file, {"mode": None, "out": tmp_path}).modes == ("multi-turn",)


@pytest.mark.parametrize(("text", "told"), [
    ("mode: both\nmodes: multi-turn\n", "sets modes twice, once as modes"),
    ("fail_under: {vt: 5}\nfail-under: {cwe: 5}\n", "sets fail_under twice, once as fail-under"),
])  # fmt: skip
def test_a_setting_of_two_names_is_not_chosen_from(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(EvaluationError, match=told):
        build("ruler", tmp_path / "run.yaml", {"out": tmp_path})


@pytest.mark.parametrize(("given", "message"), [
    ({"sampels": 3}, "no setting is called 'sampels'. Did you mean 'samples'"),
    ({"modes": "multi-trun"}, "no mode is called 'multi-trun'. Did you mean 'multi-turn'"),
    ({"lengths": "4k"}, "whole numbers of tokens, got '4k'"),
    ({"samples": 0}, "must be positive"),
    ({"data": ["squad"]}, "expected NAME=VALUE, got 'squad'"),
    ({"data": ["squad=/no/such"]}, "there is no such file"),
    ({"chat": "maybe"}, "expected auto, on or off"),
    ({"samples": "many"}, "samples is a whole number, got 'many'"),
    ({"minutes": [1]}, "minutes is a number"),
    ({"budget": "0"}, "budget=0: must be whole tokens, or a fraction"),
    ({"budget": "2.5"}, "budget=2.5: must be whole tokens, or a fraction"),
    ({"budget": "0.5", "policies": "snapkv"}, "budget=0.5 is of what the policy 'all' stands for; write it into a policy"),
    ({"batch": 4}, "batch=4 counts samples in lockstep; add --shared"),
    ({"golden": False}, "golden=False is of what later questions of a conversation follow: of quiz and scbench"),
    ({"limit": 0}, "limit=0: must be 1 or more"),
    ({"tasks": " "}, "no task given"),
    ({"data": ["book=."]}, "ruler reads no book: that is for ppl"),
    ({"data": ["scbench=hub"]}, "ruler reads no scbench: that is for scbench"),
    ({"data": ["essay=."]}, "no data is called 'essay'. Did you mean 'essays'"),
    ({"fail_under": ["vt=900"]}, "between 0 and 100"),
    ({"fail_under": ["vt"]}, "expected NAME=VALUE, got 'vt'"),
    ({"fail_under": "vt"}, "expected NAME=VALUE, got 'vt'"),
    ({"fail_under": 50}, "fail_under=50 is not what this setting takes: it is NAME=VALUE, a list"),
    ({"data": ["squad=.", 3]}, "it is NAME=VALUE, a list of these, or names with their values"),
    ({"policies": {"full": 1}}, "is not what this setting takes: it is a text or a list of texts"),
    ({"tasks": {"vt": 3}}, "is not what this setting takes: it is a text or a list of texts"),
    ({"tasks": ["vt", 3]}, "tasks is text, got 3"),
    ({"lengths": [1024, 2048.9]}, "whole numbers of tokens, got [1024, 2048.9]"),
    ({"lengths": True}, "whole numbers of tokens, got True"),
    ({"minutes": True}, "minutes is a number, got True"),
    ({"fail_under": {"vt": True}}, "fail_under vt is a number, got True"),
])  # fmt: skip
def test_bad_settings_are_explained(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(EvaluationError, match=re.escape(message)):
        build("ruler", None, {"out": tmp_path, **given})


@pytest.mark.parametrize("suite", ["scbench", "longbench"])
def test_a_file_where_a_folder_of_them_belongs_is_not_read_for_every_task(tmp_path: Path, suite: str) -> None:
    (tmp_path / "one.jsonl").write_text("{}\n")
    with pytest.raises(EvaluationError, match="is a file; give the folder that holds TASK.jsonl"):
        build(suite, None, {"out": tmp_path, "data": {suite: tmp_path / "one.jsonl"}})
    build("scbench", None, {"out": tmp_path, "data": {"scbench_kv": tmp_path / "one.jsonl"}})


def test_a_file_of_another_suite_is_not_taken_for_this_one(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("suite: scbench\n")
    with pytest.raises(EvaluationError, match=r"run\.yaml is of the suite 'scbench', and this run of 'ruler'"):
        build("ruler", tmp_path / "run.yaml", {"out": tmp_path, "suite": "ruler"})
    assert build("scbench", tmp_path / "run.yaml", {"out": tmp_path}).suite == "scbench"


def test_a_file_that_is_no_text_is_explained(tmp_path: Path) -> None:
    (tmp_path / "settings.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(EvaluationError, match=r"cannot read .*settings\.yaml"):
        build("ruler", tmp_path / "settings.yaml", {"out": tmp_path})


def test_a_run_without_a_folder_finds_its_own_again() -> None:
    first = build("ruler", None, {"samples": 3}).out
    assert first.parent == Path("runs") and first.name.startswith("ruler-")
    assert build("ruler", None, {"samples": 3, "minutes": "2", "limit": 1}).out == first
    assert len({first, build("ruler", None, {"samples": 4}).out, build("scbench", None, {"samples": 3}).out}) == 3


def test_a_file_may_leave_settings_open_and_name_one_bar(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("minutes: null\nlimit: null\nfew: null\nfail_under: vt=50\ndata: squad=.\n")
    made = build("ruler", file, {})
    assert (made.minutes, made.limit, made.few) == (None, None, None)
    assert made.fail_under == {"vt": 50.0} and made.data == {"squad": Path()}


def test_few_wants_shared() -> None:
    with pytest.raises(EvaluationError, match="add --shared"):
        build("ruler", None, {"few": 2})


# ---- the command line ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_model(tmp_path_factory.mktemp("model"), chat=True)


def invoke(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["eval", *words], env={"COLUMNS": "200"})
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_unknown_names_are_one_line_and_exit_code_two(tmp_path: Path, model_folder: Path) -> None:
    common = ["--model", str(model_folder), "--out", str(tmp_path)]
    code, text = invoke("ruler", *common, "--tasks", "niah_singel_1")
    assert code == 2 and "Did you mean 'niah_single_1'" in text
    code, text = invoke("ruler", *common, "--policies", "snapvk")
    assert code == 2 and "Did you mean 'snapkv'" in text
    code, text = invoke("ruler", "--model", str(tmp_path / "nothing"), "--out", str(tmp_path))
    assert code == 2 and "cannot load" in text
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_model_that_is_damaged_is_one_line_and_exit_code_two(tmp_path: Path) -> None:
    code, text = invoke("ruler", "--model", str(tmp_path / "nothing"), "--dry-run")
    assert code == 2 and "there is no such folder" in text
    folder = saved_model(tmp_path / "model", chat=True)
    settings, weights = folder / "config.json", folder / "model.safetensors"
    config = settings.read_text()
    settings.write_text(json.dumps(json.loads(config) | {"hidden_size": "large"}))
    code, text = invoke("ruler", "--model", str(folder), "--dry-run")
    assert code == 2 and "cannot load" in text and "hidden_size" in text
    settings.write_text(config)
    os.truncate(weights, weights.stat().st_size // 2)
    code, text = invoke("ruler", "--model", str(folder), "--dry-run")
    assert (
        code == 2 and "cannot load" in text and "weights are damaged or cut: bring them anew" in text.replace("\n", " ")
    )


@pytest.mark.parametrize(("changed", "said"), [
    ({"num_hidden_layers": 3}, "no weights for model.layers.2.input_layernorm.weight, "),
    ({"vocab_size": 64}, "RuntimeError: "),  # shapes that differ, as transformers lists them above
    ({"hidden_act": "nothing"}, "KeyError: 'nothing'"),
])  # fmt: skip
def test_files_of_a_model_that_do_not_belong_together_are_refused(
    changed: dict[str, Any], said: str, tmp_path: Path
) -> None:
    """Weights that are not there were drawn at random, and measured."""
    settings = saved_model(tmp_path) / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | changed))
    with pytest.raises(EvaluationError, match=r"belong together\?$") as refused:
        load(str(tmp_path))
    assert said in str(refused.value)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Deep in torch an index was out of range, once the first text with such a token was read."""
    saved_model(tmp_path)
    AutoTokenizer.from_pretrained(bundled_model()).save_pretrained(tmp_path)
    with pytest.raises(EvaluationError, match=r"numbers 13796 tokens, and the model knows 640\. .* belong together\?$"):
        load(str(tmp_path))


def test_a_model_is_the_same_whichever_transformers_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update its run folders were said to be another model's."""
    model = tiny_model()
    before = model_digest(model)
    monkeypatch.setattr("transformers.configuration_utils.__version__", "99.0.0")
    assert "99.0.0" in model.config.to_json_string() and model_digest(model) == before
    model.config.rms_norm_eps *= 2
    assert model_digest(model) != before


def test_a_device_that_torch_has_no_kernels_for_is_one_line() -> None:
    """torch says which of all its backends has the operator, in forty lines."""
    code, text = invoke("ruler", "--device", "mps", "--dry-run")
    assert code == 2 and "'mps' cannot be used here" in text and text.count("\n") < 6


def test_dry_run_prints_the_matrix_and_writes_no_rows(tmp_path: Path, model_folder: Path) -> None:
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--lengths", "1024"]
    code, text = invoke("ruler", *words, "--policies", "quest(budget=64)", "--samples", "2", "--dry-run")
    assert code == 0 and "oracle_topk(budget=64)" in text and "0/2 done" in text
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.parametrize("width", [40, 80])
def test_dry_run_cuts_no_name_off(tmp_path: Path, width: int) -> None:
    policies = ("full", "quest(budget=0.0625,page=4,reduce='each')+kivi(bits=4,residual=32)")
    made = Run(config(tmp_path, policies=policies), tiny_model(), tiny_tokenizer(), Journal(tmp_path / "x"))
    console = Console(file=io.StringIO(), width=width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drive, "prepare", lambda config: made)
        drive.preview(made.config, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text and max(map(len, text.splitlines())) <= width
    assert "niah_single_1" in text if width == 40 else "1024" in text
    assert text.count("0/2 done") == 4


def test_dry_run_shows_a_cell_that_will_be_given_up(tmp_path: Path, model_folder: Path) -> None:
    """The run itself records it and goes on with the others."""
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--lengths", "64,1024"]
    code, text = invoke("ruler", *words, "--policies", "full", "--samples", "2", "--dry-run")
    assert code == 0 and "too short" in text and "0/2 done" in text


@pytest.mark.parametrize("suite", ["scbench", "longbench"])
def test_a_task_that_is_named_and_lacks_its_file_is_refused_before_the_model_is_loaded(
    tmp_path: Path, suite: str
) -> None:
    name, other = {"scbench": ("scbench_kv", "scbench_vt"), "longbench": ("qasper", "hotpotqa")}[suite]
    (tmp_path / f"{other}.jsonl").write_text("{}\n")
    words = ["--model", str(tmp_path / "none"), "--data", f"{suite}={tmp_path}", "--out", str(tmp_path / "run")]
    code, text = invoke(suite, *words, "--tasks", f"{other},{name}")
    text = " ".join(text.split())
    assert code == 2 and f"has no {name}.jsonl, only files of {other}; put it there" in text
    assert not (tmp_path / "run").exists()


def test_what_a_folder_lacks_is_left_out_of_all_and_not_made_up(tmp_path: Path, model_folder: Path) -> None:
    row = {"context": "The key is blue.", "multi_turns": [{"input": "Which key?", "answer": "blue"}]}
    (tmp_path / "scbench_kv.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--model", str(model_folder), "--data", f"scbench={tmp_path}", "--policies", "full", "--lengths", "1024"]
    code, text = invoke("scbench", *words, "--samples", "1", "--no-report", "--out", str(tmp_path / "run"))
    assert code == 0 and "left out for want of data: " in text and "scbench_vt" in text
    assert [(one["task"], one["provenance"]) for one in fixed(tmp_path / "run")] == [("scbench_kv", "user data")]


def test_a_data_file_without_a_row_ends_its_cell_only(tmp_path: Path, model_folder: Path) -> None:
    row = {"input": "who?", "context": "The sky is blue.", "answers": ["blue"]}
    (tmp_path / "qasper.jsonl").write_text("")
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    words = ["--model", str(model_folder), "--data", f"longbench={tmp_path}", "--policies", "full", "--lengths", "1024"]
    words += ["--tasks", "qasper,hotpotqa", "--samples", "1", "--out", str(tmp_path / "run")]
    code, text = invoke("longbench", *words, "--dry-run")
    assert code == 0 and "no data: qasper finds no sample" in " ".join(text.split()) and "0/1 done" in text
    code, text = invoke("longbench", *words)
    assert (
        code == 0 and "qasper 1024 multi-turn full: no data" in " ".join(text.split()) and "user data: hotpotqa" in text
    )


def test_long_questions_of_the_users_keep_a_conversation_within_the_length(tmp_path: Path) -> None:
    """SCBench's rule leaves room for answers alone, and these are shorter than the questions."""
    turns = [{"input": f"{50 * 'and '}which is the key?", "answer": "blue"} for _ in range(5)]
    row = {"context": 2000 * "The key is blue. ", "multi_turns": turns}
    (tmp_path / "scbench_qa_eng.jsonl").write_text(json.dumps(row) + "\n")
    modes, data = ("multi-turn", "multi-request"), {"scbench": tmp_path}
    run(config(tmp_path / "run", suite="scbench", tasks="scbench_qa_eng", lengths=(2048,), modes=modes, data=data))
    rows = fixed(tmp_path / "run")
    assert len(rows) == 10 and rows[0]["truncated"]
    assert max(row["held"] for row in rows) <= 2048
    assert {cell.cut for cell in aggregate.cells(rows)} == {1}


def test_lengths_beyond_the_models_positions_are_named(tmp_path: Path, model_folder: Path) -> None:
    most = json.loads((model_folder / "config.json").read_text())["max_position_embeddings"]
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--policies", "full", "--dry-run"]
    said = f"Beyond the {most} positions of the model's configuration"
    assert said not in " ".join(invoke("ruler", *words, "--lengths", str(most))[1].split())
    code, text = invoke("ruler", *words, "--lengths", f"{most},{most + 8}")
    assert code == 0 and f"{said}: {most + 8} tokens." in " ".join(text.split())


def test_dry_run_says_of_what_was_given_up_that_it_would_not_be_done(tmp_path: Path) -> None:
    """It was shown as still to be done, and no call did it."""
    made = run(config(tmp_path, tasks="fwe", limit=1))
    (cell,), made.config = made.cells(), config(tmp_path, tasks="fwe")
    assert drive.foreseen(made, cell)[1] == "1/2 done"
    made.give_up(cell, made.key(cell), MemoryError("too much"), Silent())
    assert drive.foreseen(made, cell)[1] == "1/2 done, then out of memory; --retry does the others"
    made.config = config(tmp_path, tasks="fwe", retry=True)
    assert drive.foreseen(made, cell)[1] == "1/2 done"


def test_dry_run_draws_nothing_beyond_the_models_positions(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A length with a digit too many would take all memory for its text."""
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--policies", "full"]
    monkeypatch.setattr(Run, "samples", None)
    code, text = invoke("ruler", *words, "--lengths", "99999999", "--dry-run")
    assert code == 0 and "configuration: 99999999 tokens." in " ".join(text.split()) and "0/20 done" in text


def test_learned_positions_have_an_end(tmp_path: Path) -> None:
    config = GPT2Config(
        vocab_size=640, n_embd=32, n_layer=1, n_head=2, n_positions=1024, bos_token_id=0, eos_token_id=1
    )
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tiny_tokenizer().save_pretrained(tmp_path / "gpt2")
    words = ["--model", str(tmp_path / "gpt2"), "--out", str(tmp_path), "--tasks", "fwe", "--samples", "1"]
    code, text = invoke("ruler", *words, "--lengths", "1024,1025", "--policies", "full")
    assert code == 2 and "learned 1024 positions" in text and "give lengths up to 1024" in text
    assert invoke("ruler", *words, "--lengths", "1024", "--policies", "full")[0] == 0


def test_a_name_that_is_given_twice_is_one_cell(tmp_path: Path, model_folder: Path) -> None:
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe,fwe", "--policies", "full"]
    code, text = invoke("ruler", *words, "--lengths", "1024,1024", "--samples", "1", "--dry-run")
    assert code == 0 and text.count("0/1 done") == 1


def test_a_shared_run_without_time_says_so(tmp_path: Path, model_folder: Path) -> None:
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--policies", "full"]
    code, text = invoke("ruler", *words, "--lengths", "1024", "--shared", "--minutes", "1e-9")
    assert code == 2 and "1e-09 minutes were over before a sample was done" in text


def test_a_full_disk_keeps_what_was_done(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--policies", "full"]
    words += ["--lengths", "1024", "--samples", "2"]
    append = Journal.append

    def full(journal: Journal, rows: list[Any]) -> None:
        if not journal.rows:
            return append(journal, rows)
        with journal.path.open("ab") as file:
            file.write(b'{"key": "torn')
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Journal, "append", full)
    code, text = invoke("ruler", *words)
    assert code == 2 and f"{os.strerror(errno.ENOSPC)}; what was done is kept in {tmp_path}; the same command" in text
    monkeypatch.undo()
    assert invoke("ruler", *words)[0] == 0
    assert [row["sample"] for row in fixed(tmp_path)] == ["0", "1"]


def test_a_run_that_measured_nothing_has_failed(tmp_path: Path, model_folder: Path) -> None:
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--policies", "full"]
    code, text = invoke("ruler", *words, "--lengths", "64", "--samples", "1")
    assert code == 1 and "nothing was measured: too short" in text


def test_fail_under_decides_the_exit_code(tmp_path: Path, model_folder: Path) -> None:
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--lengths", "1024"]
    words += ["--policies", "full", "--samples", "1", "--no-oracle", "--no-report"]
    assert invoke("ruler", *words, "--fail-under", "fwe=0")[0] == 0
    code, text = invoke("ruler", *words, "--fail-under", "fwe=50")
    assert code == 1 and "below the bar" in text


def test_a_bar_may_be_set_for_one_policy(tmp_path: Path, model_folder: Path) -> None:
    words = ["--model", str(model_folder), "--out", str(tmp_path), "--tasks", "fwe", "--lengths", "1024"]
    words += ["--policies", "full;streaming(recent=60)", "--samples", "1", "--no-oracle", "--no-report"]
    assert invoke("ruler", *words, "--fail-under", "streaming(recent=60):fwe=0")[0] == 0
    code, text = invoke("ruler", *words, "--fail-under", "streaming(recent=60):fwe=50")
    assert code == 1 and "streaming(recent=60) on fwe" in text and "full on fwe" not in text


@pytest.mark.parametrize("name", ["no_task", "nobody:fwe", "streaming(recent=61):fwe"])
def test_a_bar_for_nothing_is_told_before_the_run(tmp_path: Path, model_folder: Path, name: str) -> None:
    out = tmp_path / "run"
    words = ["--model", str(model_folder), "--out", str(out), "--tasks", "fwe", "--lengths", "1024"]
    words += ["--policies", "full;streaming(recent=60)", "--samples", "1"]
    code, text = invoke("ruler", *words, "--fail-under", f"{name}=0")
    assert code == 2 and f"fail_under {name}: this run has no such cell" in text and not out.exists()


def test_a_loss_has_no_bar(tmp_path: Path, model_folder: Path) -> None:
    """It would pass whatever the policy does: the worse it is, the larger it is."""
    words = ["--model", str(model_folder), "--out", str(tmp_path / "run"), "--lengths", "300", "--samples", "1"]
    for name in ("ppl_book", "full:ppl_book"):
        code, text = invoke("ppl", *words, "--policies", "full", "--fail-under", f"{name}=50")
        assert code == 2 and f"fail_under {name}: a loss is no percentage" in text and not (tmp_path / "run").exists()


def test_both_modes_are_named_alike_everywhere(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("mode: both\n")
    both = ("multi-turn", "multi-request")
    assert build("ruler", tmp_path / "run.yaml", {"out": tmp_path}).modes == both
    assert build("ruler", None, {"out": tmp_path, "modes": "both"}).modes == both
    found = [build("ruler", None, {"modes": text}).out for text in ("both", "multi-turn,multi-request")]
    assert found[0] == found[1]


def test_looking_leaves_no_folder(tmp_path: Path, model_folder: Path) -> None:
    out = tmp_path / "run"
    words = ["--model", str(model_folder), "--out", str(out), "--lengths", "512", "--samples", "1"]
    assert invoke("ruler", *words, "--tasks", "fwe", "--dry-run")[0] == 0
    (tmp_path / "data").mkdir()
    code, text = invoke("longbench", *words, "--data", f"longbench={tmp_path / 'data'}")
    assert code == 2 and "holds no file such as narrativeqa.jsonl" in text.replace("\n", "")
    assert not out.exists()


def test_help_shows_what_is_done_if_nothing_is_given() -> None:
    text = invoke("ruler", "--help")[1]
    for usual in ("(bundled)", "(full)", "(4096)", "(20)", "(multi-turn)", "(0.125)", "(no-shared)", "(ceiling)"):
        assert f"[default: {usual}]" in text


def test_a_run_may_be_given_minutes(tmp_path: Path, model_folder: Path) -> None:
    words = ["--model", str(model_folder), "--tasks", "fwe", "--lengths", "512", "--samples", "3", "--no-report"]
    words += ["--policies", "full;streaming(recent=60)", "--no-oracle", "--out", str(tmp_path)]
    assert invoke("ruler", *words, "--minutes", "0.00001")[0] == 0
    assert [(row["policy"], row["sample"]) for row in fixed(tmp_path)] == [("full", "0"), ("streaming(recent=60)", "0")]
    assert invoke("ruler", *words, "--minutes", "5")[0] == 0  # goes on in rounds, to the end
    assert [row["sample"] for row in fixed(tmp_path)] == ["0", "0", "1", "1", "2", "2"]
    code, text = invoke("ruler", *words, "--minutes", "-1")
    assert code == 2 and "must be positive" in text


def test_another_model_may_not_join_a_run(tmp_path: Path, model_folder: Path) -> None:
    words = [
        "--out",
        str(tmp_path),
        "--tasks",
        "fwe",
        "--lengths",
        "1024",
        "--policies",
        "full",
        "--samples",
        "1",
        "--no-report",
    ]
    assert invoke("ruler", "--model", str(model_folder), *words)[0] == 0
    other = tmp_path / "other"
    saved_model(other)
    code, text = invoke("ruler", "--model", str(other), *words)
    assert code == 2 and "choose another --out" in text


def test_limit_does_a_part_of_the_same_data(tmp_path: Path, model_folder: Path) -> None:
    words = [
        "--model",
        str(model_folder),
        "--tasks",
        "fwe",
        "--lengths",
        "1024",
        "--policies",
        "full",
        "--samples",
        "3",
    ]
    for out, more in (("part", ["--limit", "1"]), ("part", []), ("whole", [])):
        assert invoke("ruler", *words, "--out", str(tmp_path / out), *more)[0] == 0
    assert fixed(tmp_path / "part") == fixed(tmp_path / "whole")


def test_drive_names_every_bar_that_is_missed(tmp_path: Path) -> None:
    run(config(tmp_path))
    found = aggregate.cells(Journal.open(tmp_path / "rows.jsonl").rows)
    assert drive.below(found, config(tmp_path, fail_under={"stock:fwe": 10.0})) == [
        "stock on fwe: 0.0 [0.0, 65.8] < 10.0"
    ]


def test_a_bar_finds_its_policy_by_whatever_name_a_folder_has_it(tmp_path: Path) -> None:
    """A policy that was measured under another spelling is not measured again, and the bar found no cell of it."""
    run(config(tmp_path))
    one = next(row for row in Journal.open(tmp_path / "rows.jsonl").rows if row["task"] == "fwe")
    kivi = next(arm for arm in arms(["kivi"]) if arm.policy == "kivi")
    found = aggregate.cells([{**one, "policy": "kivi", "stack": kivi.spelled, "score": 0.0, "role": "policy"}])
    spelled = config(tmp_path, policies=("kivi(bits=4)",), fail_under={"kivi(bits=4):fwe": 10.0})
    assert drive.below(found, spelled)[0].startswith("kivi on fwe: 0.0 [")


def test_a_bar_that_is_just_met_is_met(tmp_path: Path) -> None:
    """A hundred times the mean of 57 right answers of 100 is a little less than 57."""
    run(config(tmp_path))
    rows = [row for row in Journal.open(tmp_path / "rows.jsonl").rows if row["task"] == "fwe"]
    many = [{**rows[0], "sample": str(i), "score": float(i < 57)} for i in range(100)]
    assert drive.below(aggregate.cells(many), config(tmp_path, fail_under={"fwe": 57.0})) == []
    assert drive.below(aggregate.cells(many), config(tmp_path, fail_under={"fwe": 57.01}))
    assert drive.below([], config(tmp_path, fail_under={"fwe": 1.0})) == ["fwe: no such cell"]  # time was up before it


def test_all_stands_for_every_method_in_the_tree_at_one_budget(tmp_path: Path) -> None:
    settings = build("ruler", None, {"out": tmp_path, "policies": "all", "budget": "0.25"})
    found = settings.wanted
    assert {"snapkv(budget=0.25)", "h2o(budget=0.25)", "quest(budget=0.25)", "streaming(recent=0.25)"} <= set(found)
    names = {policy.partition("(")[0] for policy in found}
    assert names == set(catalogue()) - {"full", "dense", "all", "device", "uniform", "exact"}
    assert not [arm.policy for arm in arms(found) if arm.refused]
    small = build("ruler", None, {"out": tmp_path, "policies": "all", "budget": "16"})
    assert {"duo(recent=16)", "vertical_slash"} <= set(small.wanted)
    assert "snapkv(budget=16)" in small.wanted  # not its default: a table of one budget would hold another
    assert "must exceed window" in str([arm.refused for arm in small.arms() if arm.policy == "snapkv(budget=16)"])


def test_a_demonstration_says_what_was_done_and_whether_anything_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It said "in 5 minutes" of what took longer, or was done before, and that there were samples where all was refused."""
    monkeypatch.setattr(demo, "TASKS", "fwe")
    usual, written = demo.settings, report.write
    monkeypatch.setattr(
        demo, "settings", lambda out, **more: replace(usual(out, **more), policies=("full",), oracle=False)
    )
    said, folder = Console(file=io.StringIO(), width=200), saved_model(tmp_path / "model")
    common = {"console": said, "model": str(folder), "length": 512, "samples": 1}
    assert demo.main(tmp_path / "run", 5.0, **common) == 0
    assert "1 samples of every task under every policy; report: " in said.file.getvalue()
    monkeypatch.setattr(report, "write", lambda out: [replace(cell, score=None) for cell in written(out)])
    assert demo.main(tmp_path / "run", 5.0, **common) == 1 and "nothing was measured: ok" in said.file.getvalue()


def test_the_demonstration_goes_in_rounds_and_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "TASKS", "fwe")
    settings = demo.settings(tmp_path, length=512, samples=3)
    made = Run(
        replace(settings, policies=("full",), oracle=False, chat="off"),
        tiny_model(),
        tiny_tokenizer(),
        Journal.open(tmp_path / "rows.jsonl"),
    )
    assert demo.rounds(made, time.monotonic(), Silent()) == 1
    assert [(row["mode"], row["sample"]) for row in fixed(tmp_path)] == [("multi-request", "0")]
    assert demo.rounds(made, time.monotonic() + 1000, Silent()) == 3
    assert sorted(row["sample"] for row in fixed(tmp_path)) == sorted("012")
