"""The heat map, perplexity and LongBench tasks, and the interface that all tasks share."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Plan, Sample, Turn, catalogue, choose
from kvengine.evals.tasks import longbench as lb
from kvengine.evals.tasks._fit import NoData
from kvengine.evals.tasks._scores import rouge_l
from kvengine.evals.tasks._words import prose
from kvengine.evals.tasks.niah import DEPTHS


def words(sample: Sample) -> int:
    turn = sample.turns[0]
    return len(re.findall(r"\w+|[^\w\s]", sample.context + turn.question + turn.prefix))


def plan(length: int = 1200, count: int = 11, **data: Path) -> Plan:
    return Plan(length=length, count=count, seed=42, measure=words, data=data)


def test_every_suite_is_there_and_names_are_unique() -> None:
    assert {task.suite for task in catalogue().values()} == {"ruler", "quiz", "scbench", "niah", "ppl", "longbench"}
    assert all(name == task.name for name, task in catalogue().items())
    assert [task.name for task in choose("niah", "niah_passkey, niah_magic")] == ["niah_passkey", "niah_magic"]


@pytest.mark.parametrize("name", catalogue("niah"))
def test_the_needle_is_found_at_every_depth(name: str) -> None:
    samples = list(catalogue("niah")[name].samples(plan()))
    assert sorted(sample.meta["depth"] for sample in samples) == [depth / 100 for depth in range(0, 101, 10)]
    assert sorted(DEPTHS[:3]) == [0, 50, 100]  # a few samples already reach both ends and the middle
    for sample in samples:
        answer = sample.turns[0].answers[0]
        at = sample.context.index(answer) / len(sample.context)
        assert abs(at - sample.meta["depth"]) < 0.15
        assert answer not in sample.turns[0].question + sample.turns[0].prefix
        assert 0.8 * 1200 < words(sample) + sample.turns[0].max_new_tokens <= 1200


def test_heat_map_score_counts_facts() -> None:
    task = catalogue("niah")["niah_sandwich"]
    turn = next(iter(task.samples(plan(count=1)))).turns[0]
    assert task.score(turn, "Eat a SANDWICH in dolores park.") == {"recall": pytest.approx(2 / 3), "exact": 0.0}


def test_perplexity_continues_its_own_text(tmp_path: Path) -> None:
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"w{i}" for i in range(5000)))
    for sample in catalogue("ppl")["ppl_book"].samples(plan(count=3, book=book)):
        last, first = sample.context.split()[-1], sample.turns[0].answers[0].split()[0]
        assert (int(last[1:]) + 1) % 5000 == int(first[1:])
        assert sample.turns[0].forced and sample.raw and sample.provenance == "user data"


def test_a_book_that_would_be_read_twice_is_refused(tmp_path: Path) -> None:
    """What follows the prompt would stand in it already."""
    book = tmp_path / "book.txt"
    book.write_text("some words " * 100)
    with pytest.raises(NoData, match="the book has 200 words.*give a longer book, or shorter lengths"):
        next(iter(catalogue("ppl")["ppl_book"].samples(plan(length=1200, book=book))))
    assert next(iter(catalogue("ppl")["ppl_book"].samples(plan(length=150, book=book))))


def test_a_suite_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(EvaluationError, match="no suite is called 'rule'. Did you mean 'ruler'"):
        choose("rule", "all")


def test_longbench_reads_local_rows_and_keeps_the_question_out_of_the_context(tmp_path: Path) -> None:
    row = {"input": "Who?", "context": "TEXT", "answers": ["Ann", "Ann Lee"], "all_classes": None}
    (tmp_path / "hotpotqa.jsonl").write_text(json.dumps(row) + "\n")
    task = catalogue("longbench")["hotpotqa"]
    sample = next(iter(task.samples(plan(longbench=tmp_path))))
    assert sample.context + sample.turns[0].question == lb.PROMPTS["hotpotqa"].format(context="TEXT", input="Who?")
    assert sample.context.endswith("TEXT") and not sample.raw
    assert task.score(sample.turns[0], "ann lee")["f1"] == 1.0
    assert catalogue("longbench")["trec"].available({"longbench": tmp_path}) is False
    with pytest.raises(NoData, match="has no trec.jsonl, only files of hotpotqa"):
        next(iter(catalogue("longbench")["trec"].samples(plan(longbench=tmp_path))))


def test_longbench_refuses_what_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_bytes(b"%PDF-1.7\n\xb5\xed")
    with pytest.raises(EvaluationError, match=r"qasper\.jsonl is not UTF-8 text"):
        next(iter(catalogue("longbench")["qasper"].samples(plan(longbench=tmp_path))))


def test_longbench_refuses_other_schemas(tmp_path: Path) -> None:
    (tmp_path / "qasper.jsonl").write_text('{"question": 1}\n')
    with pytest.raises(EvaluationError, match="lacks 'input', 'context' and 'answers'"):
        next(iter(catalogue("longbench")["qasper"].samples(plan(longbench=tmp_path))))


@pytest.mark.parametrize(("line", "message"), [
    ("{nope", r"line 4 is not JSON \(Expecting property name enclosed in double quotes at letter 2\)"),
    ('{"input": "q", "answers": ["a"]}', "line 4: a row lacks 'context'"),
    ('{"input": "q", "context": "c", "answers": "a"}', "line 4: input and context are texts"),
    ('{"input": "\\ud800", "context": "c", "answers": ["a"]}', r"line 4 has half of a letter in it, '.ud800'"),
])  # fmt: skip
def test_longbench_says_which_line_is_wrong(tmp_path: Path, line: str, message: str) -> None:
    """Python's own message counts lines within the one that it was given: line 1, always."""
    good = json.dumps({"input": "q", "context": "a\u2028b", "answers": ["a"], "all_classes": None})
    (tmp_path / "qasper.jsonl").write_text(f"{good}\n\n{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(EvaluationError, match=rf"qasper\.jsonl, {message}"):
        list(catalogue("longbench")["qasper"].samples(plan(longbench=tmp_path)))


@pytest.mark.parametrize("classes", [None, [], "Person", ["Person", 3]])
def test_a_task_of_classes_wants_them(tmp_path: Path, classes: object) -> None:
    """Without them every answer was wrong."""
    row = {"input": "q", "context": "c", "answers": ["Person"], "all_classes": classes}
    (tmp_path / "trec.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(EvaluationError, match=r"trec\.jsonl, line 1: all_classes is a list of texts"):
        list(catalogue("longbench")["trec"].samples(plan(longbench=tmp_path)))


@pytest.mark.parametrize("row", [
    [1, 2],
    {"input": "q", "context": "c", "answers": "4817"},
    {"input": "q", "context": "c", "answers": []},
    {"input": None, "context": "c", "answers": ["4817"]},
])  # fmt: skip
def test_longbench_refuses_rows_that_are_not_what_they_should_be(tmp_path: Path, row: object) -> None:
    """A text in place of a list of answers would be taken letter by letter, and each letter for a right answer."""
    (tmp_path / "qasper.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(EvaluationError, match=r"qasper\.jsonl, line 1: (a row lacks|input and context are texts)"):
        next(iter(catalogue("longbench")["qasper"].samples(plan(longbench=tmp_path))))


@pytest.mark.parametrize(("task", "source"), [("qa_1", "squad"), ("qa_2", "hotpotqa")])
@pytest.mark.parametrize("given", [{"data": 3}, [1], [{"context": [["a"]]}]])
def test_another_file_than_the_published_one_is_named(tmp_path: Path, task: str, source: str, given: object) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(given))
    with pytest.raises(EvaluationError, match=rf"mine\.json is not the published {source} file"):
        next(iter(catalogue("ruler")[task].samples(plan(**{source: path}))))


def test_of_a_folder_of_texts_the_one_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfAlpha beta. ")
    assert prose(tmp_path) == ("Alpha", "beta.")  # what Windows puts before a text is none of its words
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "a.txt").write_text("Alpha beta.")
    (tmp_path / "more" / "b.txt").write_bytes("café".encode("latin-1"))
    with pytest.raises(EvaluationError, match=r"the text at .*b\.txt is not UTF-8: .* convert it first"):
        prose(tmp_path / "more")


def test_prose_without_spaces_is_refused(tmp_path: Path) -> None:
    (tmp_path / "essay.txt").write_text("字" * 5000)
    with pytest.raises(EvaluationError, match=r"a word of 5000 letters .* prose with spaces"):
        next(iter(catalogue("ruler")["niah_single_2"].samples(plan(essays=tmp_path))))


def test_longbench_prompts_have_a_context_and_sixteen_tasks() -> None:
    assert set(lb.PROMPTS) == set(catalogue("longbench")) and len(lb.PROMPTS) == 16
    assert all(prompt.count("{context}") == 1 for prompt in lb.PROMPTS.values())
    plain = {task.name for task in lb.TASKS if task.plain}
    assert plain == {"trec", "triviaqa", "samsum", "lcc", "repobench-p"}


def test_longbench_scorers_by_hand() -> None:
    assert lb.numbers_right("3, no: 4 or 3", "3") == pytest.approx(2 / 3)
    assert lb.paragraph_score("Paragraph 12", "Paragraph 12", []) == 1.0
    assert lb.paragraph_score("Paragraph 1", "Paragraph 12", []) == 0.0
    assert lb.class_score("Food or Animal", "Food", ["Food", "Animal", "City"]) == 0.5
    assert lb.class_score("Sport event", "Sport event", ["Sport", "Sport event"]) == 1.0  # "Sport" is part of it
    assert lb.class_score("City", "Food", ["Food", "City"]) == 0.0
    assert lb.code_score("# note\n```\nx = 1\ny", "x = 1", []) == 1.0
    assert lb.code_score("", "x = 1", []) == 0.0
    trec = catalogue("longbench")["trec"]
    turn = (
        lb.TASKS[9]
        .sample({"input": "q", "context": "c", "answers": ["Food"], "all_classes": ["Food", "City"]}, 0)
        .turns[0]
    )
    assert trec.score(turn, "\nFood\nCity") == {"classification": 1.0}  # only the first line counts
    for name, answers, told, want in (
        ("passage_count", ("4", "3"), "3, no: 4 or 3", {"count": pytest.approx(2 / 3)}),  # the best of several answers
        ("passage_count", ("4",), "four", {"count": 0.0}),
        ("gov_report", ("the cat sat",), "cat the", {"rouge_l": pytest.approx(0.4)}),
    ):
        asked = Turn(question="q", answers=answers, max_new_tokens=8, meta={"classes": []})
        assert catalogue("longbench")[name].score(asked, told) == want


def test_longbench_rouge_is_that_of_the_package() -> None:
    """Values of rouge 1.0.1, which the published scores come from."""
    told, wanted = "The cat sat. A dog ran away.", "A dog ran. The cat sat down, the cat slept."
    assert rouge_l(told, wanted) == pytest.approx(0.75)  # sentences match in any order
    assert rouge_l("cat the", "the cat sat") == pytest.approx(0.4)
    assert rouge_l("a b a b", "a b") == pytest.approx(1.0)  # a word counts once
    assert rouge_l("Cat, sat", "cat sat") == pytest.approx(0.5)
    assert rouge_l(".", "a b") == rouge_l("", "a b") == 0.0


@pytest.mark.parametrize("name", catalogue("quiz"))
def test_every_question_of_a_quiz_has_its_own_needles(name: str) -> None:
    task = catalogue("quiz")[name]
    for sample in task.samples(plan(count=4)):
        assert len(sample.turns) == task.apart
        told = re.findall(r"numbers for (.+?) is: (\d+)\.", sample.context)
        answers = [answer for turn in sample.turns for answer in turn.answers]
        assert len(set(answers)) == len(answers) == task.apart * task.queried * task.values
        for turn in sample.turns:
            asked = [key for key in dict(told) if key in turn.question]
            assert sorted(turn.answers) == sorted(value for key, value in told if key in asked)
            assert len(asked) == task.queried and all(key in turn.prefix for key in asked)


def test_longbench_rows_end_at_newlines_only_and_are_scored_once_before_they_are_asked(tmp_path: Path) -> None:
    row = {"input": "Who?", "context": "A\u2028B\x85C", "answers": ["Ann"], "all_classes": None}
    (tmp_path / "qasper.jsonl").write_bytes(f"{json.dumps(row, ensure_ascii=False)}\n\n".encode() * 2)
    found = list(catalogue("longbench")["qasper"].samples(plan(longbench=tmp_path)))
    assert [sample.context.endswith("A\u2028B\x85C") for sample in found] == [True, True]
    (tmp_path / "passage_retrieval_en.jsonl").write_text(json.dumps({**row, "answers": ["7"]}))
    with pytest.raises(EvaluationError, match="line 1: the row is not of LongBench's schema"):
        list(catalogue("longbench")["passage_retrieval_en"].samples(plan(longbench=tmp_path)))


@pytest.mark.parametrize(
    ("task", "source", "file"),
    [
        ("qa_1", "squad", {"data": []}),
        (
            "qa_1",
            "squad",
            {"data": [{"paragraphs": [{"context": "c", "qas": [{"question": "q", "answers": []}]}]}]},
        ),
        ("qa_2", "hotpotqa", []),
        ("qa_2", "hotpotqa", [{"question": "q", "answer": 5, "context": [["t", ["s"]]]}]),
    ],
)
def test_documents_without_a_question_are_refused(tmp_path: Path, task: str, source: str, file: Any) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps(file))
    with pytest.raises(EvaluationError, match=r"x\.json"):
        list(catalogue("ruler")[task].samples(plan(**{source: path})))
