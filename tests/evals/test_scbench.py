"""SCBench: schemas, prompts, both modes, and every scorer with the traps of the published ones."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support_evals import tiny_model, tiny_tokenizer

from kvengine.errors import EvaluationError
from kvengine.evals.config import RunConfig
from kvengine.evals.engine import Usage
from kvengine.evals.prompt import Prompter
from kvengine.evals.records import Journal
from kvengine.evals.runner import Run
from kvengine.evals.tasks import Plan, Sample, catalogue
from kvengine.evals.tasks import _scores as scores
from kvengine.evals.tasks._fit import NoData
from kvengine.evals.tasks._scbench import SessionTask, as_one
from kvengine.evals.tasks.scbench_semantic import bleu, code_block

TASKS = catalogue("scbench")
GENERATED = [name for name, task in TASKS.items() if task.available({})]
OFFICIAL = {
    "scbench_kv": {"scbench_kv": 150},
    "scbench_prefix_suffix": {"scbench_prefix_suffix": 150},
    "scbench_vt": {"scbench_vt": 30},
    "scbench_repoqa": {"scbench_repoqa": 1024},
    "scbench_qa_eng": {"scbench_qa_eng": 40},
    "scbench_qa_chn": {"scbench_qa_chn": 40},
    "scbench_choice_eng": {"scbench_choice_eng": 40},
    "scbench_mf": {"scbench_mf": 5},
    "scbench_many_shot": {"scbench_many_shot": 10},
    "scbench_summary": {"scbench_summary": 200},
    "scbench_summary_with_needles": {"scbench_summary": 800, "scbench_passkey": 15},
    "scbench_repoqa_and_kv": {"scbench_repoqa": 1024, "scbench_kv": 80},
}


def words(sample: Sample) -> int:
    turn = sample.turns[0]
    return len(re.findall(r"\w+|[^\w\s]", sample.context + turn.question + turn.prefix))


def plan(length: int = 3000, count: int = 2, **data: Path) -> Plan:
    return Plan(length=length, count=count, seed=42, measure=words, data=data)


def one(name: str, row: dict[str, Any]) -> Sample:
    task = TASKS[name]
    assert isinstance(task, SessionTask)
    return task.session(row, "0", "user data")


def test_the_twelve_tasks_and_their_answer_lengths() -> None:
    for name, kinds in OFFICIAL.items():
        task = TASKS[name]
        assert isinstance(task, SessionTask) and dict(task.kinds) == kinds
    assert set(TASKS) - set(OFFICIAL) == {"scbench_mixed", "scbench_needles"}  # ours


@pytest.mark.parametrize("name", GENERATED)
def test_generated_sessions_fit_and_are_the_same_again(name: str) -> None:
    few, many = list(TASKS[name].samples(plan(count=1))), list(TASKS[name].samples(plan(count=3)))
    assert few[0].digest() == many[0].digest() != many[1].digest()
    for sample in many:
        assert words(as_one(sample)) <= 3000
        assert len(sample.turns) == {"scbench_mf": 3, "scbench_mixed": 8}.get(name, 5)
        assert len({turn.question for turn in sample.turns}) == len(sample.turns)
        assert sample.provenance == "re-created"


@pytest.mark.parametrize("name", ["scbench_vt", "scbench_many_shot"])
def test_a_conversation_fits_with_the_template_around_every_turn(name: str) -> None:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "<|end|>", "<|end|>\n<next speaker of the conversation>\n"
    )
    prompter, length = Prompter(tokenizer, chat=True), 2000
    fitting = Plan(length=length, count=1, seed=42, measure=prompter.measure, conversation=prompter.conversation)
    for sample in TASKS[name].samples(fitting):
        read = prompter.whole(sample)
        for before, turn in itertools.pairwise(sample.turns):
            read = read + prompter.follow(before.answers[0], turn)
        assert 1500 < len(read) + sample.turns[-1].max_new_tokens <= length
        assert prompter.conversation(sample) == len(read)


class Talker:
    """Says a token for ever, and counts what is read and said."""

    def __init__(self, token: int) -> None:
        self.token, self.tokens = token, 0

    def read(self, ids: list[int], *, every: bool = False) -> torch.Tensor:
        self.tokens += len(ids)
        return torch.nn.functional.one_hot(torch.tensor([self.token]), 640).float()

    def follow_up(self) -> None: ...

    def branch(self) -> Talker:
        return Talker(self.token)

    def usage(self) -> Usage:
        return Usage(held=1, attended=1, bytes_held=1, read_per_token=1)


@pytest.mark.parametrize("provenance", ["re-created", "user data"])
@pytest.mark.parametrize("said", ["x", "\ufffd"])
def test_a_conversation_of_the_models_own_answers_fits(provenance: str, said: str, tmp_path: Path) -> None:
    """It was made to fit with the right ones, of few tokens; the model's own may each take all that they are allowed."""
    settings = RunConfig(
        suite="scbench", out=tmp_path, tasks="scbench_vt", lengths=(2000,), samples=1, modes=("multi-turn",),
        golden=False, policies=("stock",),
    )  # fmt: skip
    run = Run(settings, tiny_model(), tiny_tokenizer(chat=True), Journal(tmp_path / "x"))
    cell = run.cells()[0]
    sample = run.samples(cell)[0]
    if provenance == "user data":
        sample = replace(sample, provenance=provenance, context=5 * sample.context)
    talker = Talker(run.prompter.ids(said)[0])  # of the replacement character a third: as text it takes three tokens
    answers = list(run.asking(cell, sample).play(talker, sample))
    assert [answer.tokens for answer in answers] == [30] * 5 and answers[0].text
    assert 1800 < talker.tokens + 1 <= 2000  # the last token is not read
    assert answers[0].truncated == (provenance == "user data")


@pytest.mark.parametrize("name", GENERATED)
def test_golden_answers_score_full_marks_and_silence_none(name: str) -> None:
    task = TASKS[name]
    for sample in task.samples(plan(count=1)):
        for turn in sample.turns:
            assert set(task.score(turn, turn.answers[0]).values()) == {1.0}
            assert set(task.score(turn, "").values()) == {0.0}


def test_the_answer_of_a_pair_stands_behind_its_key() -> None:
    sample = next(iter(TASKS["scbench_kv"].samples(plan())))
    data = json.loads(sample.context.partition("JSON data:\n")[2])
    for turn in sample.turns:
        key = re.search(r'Key: "(.*)"', turn.question)
        assert key is not None and data[key[1]] == turn.answers[0]


def test_prefix_and_suffix_single_out_one_string_and_each_alone_does_not() -> None:
    sample = next(iter(TASKS["scbench_prefix_suffix"].samples(plan())))
    listed = re.findall(r"'([A-Za-z0-9]+)'", sample.context)
    for turn in sample.turns:
        prefix, suffix = re.findall(r"(?:Prefix|Suffix): (\w+)", turn.question)
        assert [word for word in listed if word.startswith(prefix) and word.endswith(suffix)] == list(turn.answers)
        assert sum(word.startswith(prefix) for word in listed) == 2 == sum(word.endswith(suffix) for word in listed)
    assert {len(word) for word in listed} <= set(range(65, 123))


def test_each_hop_turn_asks_another_chain() -> None:
    sample = next(iter(TASKS["scbench_vt"].samples(plan())))
    for turn in sample.turns:
        names = turn.meta["answer"]
        assert len(names) == 3
        for new, old in zip(names[1:], names, strict=False):
            assert f"VAR {new} = VAR {old}" in sample.context


def test_extremes_are_right_and_vary() -> None:
    samples = list(TASKS["scbench_mf"].samples(plan(count=6)))
    for sample in samples:
        numbers = sorted(set(json.loads(sample.context.strip())))
        truth = {"largest": -1, "smallest": 0, "second largest": -2, "second smallest": 1}
        for turn in sample.turns:
            asked = re.search(r"The (.+) number of", turn.question)
            assert asked is not None and turn.meta["answer"] == numbers[truth[asked[1]]]
    assert len({turn.answers for sample in samples for turn in sample.turns}) > 6


def test_swaps_are_simulated_right() -> None:
    sample = next(iter(TASKS["scbench_many_shot"].samples(plan())))
    for turn in sample.turns:
        holds = dict(re.findall(r"(\w+) holds the ([a-z ]+)\.", turn.question))
        for a, b in re.findall(r"(\w+) and (\w+) swap", turn.question):
            holds[a], holds[b] = holds[b], holds[a]
        who = re.search(r"What does (\w+) hold", turn.question)
        assert who is not None and f"{turn.answers[0]} {holds[who[1]]}" in turn.question


def test_mixed_turns_are_tagged_and_scored_by_kind() -> None:
    sample = next(iter(TASKS["scbench_mixed"].samples(plan())))
    assert [turn.kind for turn in sample.turns] == ["scbench_kv", "scbench_vt"] * 4
    assert {turn.kind: turn.max_new_tokens for turn in sample.turns} == {"scbench_kv": 80, "scbench_vt": 30}
    for turn in sample.turns[::2]:
        key = re.search(r'Key: "(.*)"', turn.question)
        assert key is not None and json.dumps({key[1]: turn.answers[0]}) in sample.context


# ---- prompts -------------------------------------------------------------------------------------------------------


def first_prompt(name: str, row: dict[str, Any]) -> str:
    prompter = Prompter(tiny_tokenizer())
    return prompter.text(prompter.whole(one(name, row)))


def test_prompts_are_the_published_ones() -> None:
    turns = [{"input": "Q1", "answer": "A1"}, {"input": "Q2", "answer": "A2"}]
    row = {"context": "CTX", "multi_turns": turns}
    assert first_prompt("scbench_kv", row) == (
        "Extract the value corresponding to the specified key in the JSON object below.\n\nCTX\n\nQ1"
    )
    assert first_prompt("scbench_qa_eng", row) == (
        "Read the book and answer the question. Be very concise in your answer.\n\nCTX\n\nQuestion: Q1\nAnswer:"
    )
    assert first_prompt("scbench_qa_chn", row) == "阅读以下书籍然后回答问题。\n\nCTX\n\n问题：Q1\n答案："
    assert first_prompt("scbench_summary", row) == "CTX\n\nQ1"
    assert first_prompt("scbench_repoqa", row).startswith("Based on the function description and code context, please ")


def test_choice_prompt_keeps_the_double_the() -> None:
    row: dict[str, Any] = {
        "context": "C",
        "multi_turns": [{"input": "Q", "answer": "w", "options": ["u", "v", "w", "x"]}],
    }
    assert first_prompt("scbench_choice_eng", row).endswith(
        "C\n\nQuestion: Q\nA. u\nB. v\nC. w\nD. x\n\nThe the correct answer is"
    )
    assert one("scbench_choice_eng", row).turns[0].meta["answer"] == ["w", "C"]
    row["multi_turns"][0]["answer"] = ["w"]  # as it is published
    assert one("scbench_choice_eng", row).turns[0].meta["answer"] == ["w", "C"]


def test_math_find_names_its_first_question_before_the_list_in_multi_turn_mode_only() -> None:
    ask = "You should answer with only one number, no other words. The largest number of the list is: "
    sample = one("scbench_mf", {"context": [3, 1, 2], "multi_turns": [{"input": ask, "answer": [3]}]})
    target = "What is the largest number of the list?"
    assert sample.opening == f"{target}\n\n[3, 1, 2]\n\n{ask}"
    assert sample.context == "[3, 1, 2]\n\n"  # nothing of the question: the context is judged without it
    assert sample.turns[0].question == f"{target}\n\n{ask}"
    assert sample.turns[0].meta["answer"] == 3


def test_the_long_text_of_multi_hop_stands_under_input() -> None:
    sample = one("scbench_vt", {"input": "LONG", "multi_turns": [{"input": "Q", "answer": ["A", "B"]}]})
    assert sample.context == "LONG\n\n" and sample.turns[0].answers == ("A, B",)


def test_only_summaries_that_follow_another_under_a_template_start_with_this_paper() -> None:
    turns = [{"input": "Q1", "answer": "A"}, {"input": "Q2", "answer": "B"}]
    sample = one("scbench_summary", {"context": "C", "multi_turns": turns})
    for chat in (True, False):
        prompter = Prompter(tiny_tokenizer(chat=chat), chat)
        texts = [prompter.whole(sample), *map(prompter.asked, sample.turns), prompter.follow("A", sample.turns[1])]
        assert [prompter.text(ids).endswith("This paper") for ids in texts] == [False, False, False, chat]


# ---- data ----------------------------------------------------------------------------------------------------------


def test_local_files_are_read_in_the_published_schema(tmp_path: Path) -> None:
    row = {"context": "C", "multi_turns": [{"input": "Q", "answer": "A"}]}
    (tmp_path / "scbench_qa_eng.jsonl").write_text(json.dumps({**row, "id": 7}) + "\n" + json.dumps(row) + "\n")
    samples = list(TASKS["scbench_qa_eng"].samples(plan(scbench=tmp_path)))
    assert [sample.id for sample in samples] == ["7.0", "1.1"]
    assert samples[0].provenance == "user data"


def test_a_task_without_data_or_generator_says_what_to_give() -> None:
    assert not TASKS["scbench_summary"].available({})
    with pytest.raises(NoData, match="--data scbench=FOLDER with scbench_summary.jsonl"):
        list(TASKS["scbench_summary"].samples(plan()))


def test_what_a_folder_of_the_users_lacks_is_not_made_up(tmp_path: Path) -> None:
    assert TASKS["scbench_vt"].available({"scbench_kv": tmp_path})  # the file of another task says nothing of this one
    with pytest.raises(
        NoData, match=r"no scbench_kv\.jsonl, nor a file of another task; put it there, leave the task out"
    ):
        list(TASKS["scbench_kv"].samples(plan(scbench=tmp_path)))
    for name in ("scbench_vt", "scbench_mf"):
        (tmp_path / f"{name}.jsonl").write_text("{}\n")
    for given in ("scbench", "scbench_kv"):
        what = (
            rf"^scbench_kv: \S+ has no scbench_kv\.jsonl, only files of scbench_mf, scbench_vt; .*, or --data {given}: "
        )
        with pytest.raises(NoData, match=what):
            list(TASKS["scbench_kv"].samples(plan(**{given: tmp_path})))
    with pytest.raises(NoData, match=r"no scbench_summary\.jsonl, only .*; put it there, or leave the task out$"):
        list(TASKS["scbench_summary"].samples(plan(scbench=tmp_path)))
    own = [name for name, task in TASKS.items() if not task.available({"scbench": Path("hub")})]
    assert own == ["scbench_mixed", "scbench_needles"]
    with pytest.raises(NoData, match="scbench_needles is none of the published tasks"):
        list(TASKS["scbench_needles"].samples(plan(scbench=Path("hub"))))


@pytest.mark.parametrize("row", ['{"question": 1}', "5", "null"])
def test_a_file_of_another_schema_is_refused(tmp_path: Path, row: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(row + "\n")
    with pytest.raises(EvaluationError, match=r"x\.jsonl, line 1: a row lacks 'multi_turns' or 'context'"):
        list(TASKS["scbench_kv"].samples(plan(scbench_kv=path)))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("scbench_kv", {"context": "c", "multi_turns": []}),
        ("scbench_kv", {"context": "c", "multi_turns": "abc"}),
        ("scbench_kv", {"context": "c", "multi_turns": [{"input": "q"}]}),
        ("scbench_kv", {"context": "c", "multi_turns": [{"input": "q", "answer": ""}]}),  # right, whatever is said
        ("scbench_vt", {"input": "c", "multi_turns": [{"input": "q", "answer": ["A", ""]}]}),
        ("scbench_vt", {"input": "c", "multi_turns": [{"input": "q", "answer": []}]}),
        ("scbench_mf", {"context": [1], "multi_turns": [{"input": "The largest is: ", "answer": "x"}]}),
        (
            "scbench_choice_eng",
            {"context": "c", "multi_turns": [{"input": "q", "answer": "e", "options": ["a", "b", "c", "d"]}]},
        ),
        ("scbench_repoqa_and_kv", {"context": "c", "multi_turns": [{"input": "q", "answer": "a", "task": "x"}]}),
    ],
)
def test_a_row_that_cannot_be_asked_or_scored_is_refused_before_anything_is_asked(
    tmp_path: Path, name: str, row: dict[str, Any]
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(EvaluationError, match=r"x\.jsonl: row 0 is not of SCBench's schema"):
        list(TASKS[name].samples(plan(**{name: path})))


def test_only_newlines_end_a_line(tmp_path: Path) -> None:
    """U+2028 and U+0085 stand in JSON as they are; Python's splitlines would cut a row there."""
    path, text = tmp_path / "x.jsonl", "a\u2028b\x85c"
    rows = [{"context": text, "multi_turns": [{"input": "q", "answer": "a"}]}] * 2
    path.write_bytes(
        b"\xef\xbb\xbf" + "\r\n\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode() + b"\n\n"
    )
    found = list(TASKS["scbench_kv"].samples(plan(scbench_kv=path)))
    assert len(found) == 2 and rows[0]["context"] in found[0].context


# ---- scorers -------------------------------------------------------------------------------------------------------


def test_substring_is_official_and_whole_is_strict() -> None:
    assert (scores.contains("xab-12z", "ab-12"), scores.contains_whole("xab-12z", "ab-12")) == (1.0, 0.0)
    assert scores.contains_whole('the value is "ab-12".', "ab-12") == 1.0


def test_chains_score_rounds_officially() -> None:
    assert scores.fraction_found("a1 b2", ["A1", "B2", "C3"]) == 0.67
    assert scores.set_found("A1, B2", ["A1", "B2", "C3"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("text", "label", "official", "strict"), [
    ("12", 12, 1, 1),
    ("The answer is 12.9, or 13", 12, 1, 0),
    ("-12", 12, 1, 0),
    ("112", 12, 0, 0),
    ("", 12, 0, 0),
])  # fmt: skip
def test_math_find_takes_the_first_number(text: str, label: int, official: int, strict: int) -> None:
    assert (scores.first_number(text, label), scores.only_number(text, label)) == (official, strict)


def test_many_shot_is_officially_right_for_any_character_and_strictly_not() -> None:
    assert scores.any_character("(A)", "(B)") == 1.0  # a bracket is enough
    assert scores.option_letter("(A)", "(B)") == 0.0
    assert scores.option_letter("B.", "(B)") == 1.0
    assert scores.option_letter("Bob has it: (C) not (B)", "(B)") == 0.0
    assert TASKS["scbench_many_shot"].metric == "strict"


def test_chinese_f1_compares_single_characters_officially() -> None:
    assert scores.chinese_f1("北京", "北京") == 1.0
    assert scores.chinese_f1_by_character("北京", "北京") == pytest.approx(2 / 3)  # one of two characters
    assert scores.chinese_f1("北 京。", "北京") == 1.0
    assert scores.chinese_f1("上海", "北京") == 0.0
    assert TASKS["scbench_qa_chn"].metric == "strict"


def test_english_questions_are_substring_officially_and_f1_strictly() -> None:
    text, label = "It was the Blue Boar Inn", "blue boar"
    assert scores.any_label(text, label) == 1.0
    assert scores.english_f1(text, label) == pytest.approx(2 * 2 / (5 + 2))  # "the" is dropped


@pytest.mark.parametrize(("text", "right"), [
    ("C. because", 1.0),
    ("B. because", 0.0),
    ("wet", 1.0),
    ("The answer is: C", 1.0),
    ("I think the answer is B", 0.0),
    ("well, maybe C or so", 1.0),
    ("Because it rained: C", 0.0),  # a leading capital B decides
    ("answer is", 0.0),
    ("", 0.0),
])  # fmt: skip
def test_choice_matcher(text: str, right: float) -> None:
    assert scores.choice(text, ["wet", "C"]) == right


@pytest.mark.parametrize(("text", "right"), [("BC, so: (C) not B", 1.0), ("B or C", 0.0), ("wet, c", 0.0), ("", 0.0)])
def test_the_first_letter_that_stands_alone_is_the_choice(text: str, right: float) -> None:
    assert TASKS["scbench_choice_eng"].scorers["scbench_choice_eng"](text, ["wet", "C"])["strict"] == right


def test_passkey_keeps_leading_zeros() -> None:
    assert scores.first_integer("key 01234.", "01234") == 1.0
    assert scores.first_integer("key 1234", "01234") == 0.0


def test_a_longest_common_subsequence_is_the_longest_of_all() -> None:
    source = Random(0)
    for _ in range(60):
        a, b = ("".join(source.choices("abc", k=source.randint(0, 6))) for _ in range(2))
        found = "".join(a[i] for i in scores.longest_common(a, b))
        every = ({*map("".join, itertools.chain(*(itertools.combinations(x, n) for n in range(7))))} for x in (a, b))
        common = set.intersection(*every)
        assert found in common and len(found) == max(map(len, common))


def test_rouge_by_hand() -> None:
    # Lin's example: reference w1..w5; two candidate lines match w1 w2 and w1 w3 w5; the union has four words
    candidate, reference = "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"
    assert scores.rouge_lsum(candidate, reference) == pytest.approx(2 * 4 / 15)
    assert scores.rouge_lsum("", reference) == 0.0
    assert scores.rouge_lsum("z w x y", "x y\x0cz w") == pytest.approx(0.5)  # a page ends where a line goes on


def test_repository_answer_must_be_the_nearest_and_near_enough() -> None:
    right, wrong = "def f ( x ) : return x + 1 # ok", "def g ( y ) : return y * 2 # no"
    turns = [{"input": "d", "answer": right}, {"input": "e", "answer": wrong}]
    task, sample = TASKS["scbench_repoqa"], one("scbench_repoqa", {"context": "C", "multi_turns": turns})
    assert task.score(sample.turns[0], f"Here:\n```python\n{right}\n```") == {"official": 1.0, "strict": 1.0}
    assert task.score(sample.turns[0], f"```\n{wrong}\n```") == {"official": 0.0, "strict": 0.0}
    assert task.score(sample.turns[0], "nothing of the kind")["official"] == 0.0


def test_bleu_by_hand() -> None:
    assert bleu("a b c d e", "a b c d e") == 1.0
    # precisions 3/4, 2/3, 1/2 and no common 4-gram
    assert bleu("a b c x", "a b c d") == 0.0
    assert bleu("a b", "a b c d") == pytest.approx(2.718281828 ** (1 - 4 / 2))
    assert bleu("a b c", "a b") == pytest.approx((2 / 3 * 1 / 2) ** 0.5)  # no words of the reference make a longer one
    assert code_block("no block") == "no block"
