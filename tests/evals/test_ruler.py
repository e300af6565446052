"""RULER: the strings, the generators, the fitting and the metrics, against hand-worked cases."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvengine.errors import EvaluationError
from kvengine.evals.tasks import Plan, Sample, Turn, catalogue, choose
from kvengine.evals.tasks import _words as words
from kvengine.evals.tasks._fit import TooShort, largest
from kvengine.evals.tasks._ruler import RulerTask, clean, match_all, match_part
from kvengine.evals.tasks.ruler_niah import Needles, among_lines, among_sentences, enumeration, wording
from kvengine.evals.tasks.ruler_qa import Library, Question, facts, gather
from kvengine.evals.tasks.ruler_vt import Chain, draw_chains, scatter
from kvengine.evals.tasks.ruler_words import coded_text, coded_words, word_list_text

TASKS = catalogue("ruler")


def pieces(sample: Sample) -> int:
    """Words and punctuation of the first prompt: a stand-in for a tokenizer."""
    turn = sample.turns[0]
    return len(re.findall(r"\w+|[^\w\s]", sample.context + turn.question + turn.prefix))


def plan(length: int = 2500, count: int = 3, seed: int = 42, **data: Path) -> Plan:
    return Plan(length=length, count=count, seed=seed, measure=pieces, data=data)


def prompt(sample: Sample) -> str:
    return sample.context + sample.turns[0].question + sample.turns[0].prefix


def test_all_thirteen_tasks_are_found() -> None:
    needles = ["single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery"]
    assert set(TASKS) == {f"niah_{name}" for name in needles} | {"vt", "cwe", "fwe", "qa_1", "qa_2"}


def test_official_lengths_of_answers() -> None:
    expected = {"vt": 30, "cwe": 120, "fwe": 50, "qa_1": 32, "qa_2": 32}
    for name, task in TASKS.items():
        assert isinstance(task, RulerTask)
        assert task.new_tokens == expected.get(name, 128)


def test_unknown_task_is_named_with_a_suggestion() -> None:
    with pytest.raises(EvaluationError, match="no ruler task is called 'niah_singel_1'. Did you mean 'niah_single_1'"):
        choose("ruler", "vt,niah_singel_1")


def test_single_needle_wording_is_the_official_one() -> None:
    introduction, question, prefix = (
        text.format(context="TEXT", query="KEY") for text in wording("numbers", single=True)
    )
    assert introduction + question + prefix == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\nTEXT\n"
        "What is the special magic number for KEY mentioned in the provided text?"
        " The special magic number for KEY mentioned in the provided text is"
    )


def test_plural_wording_is_the_official_one() -> None:
    introduction, question, prefix = (
        text.format(context="TEXT", query="KEY") for text in wording("uuids", single=False)
    )
    assert introduction + question + prefix == (
        "Some special magic uuids are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the uuids afterwards.\nTEXT\n"
        "What are all the special magic uuids for KEY mentioned in the provided text?"
        " The special magic uuids for KEY mentioned in the provided text are"
    )


def test_several_keys_are_listed_with_an_oxford_comma() -> None:
    assert enumeration(["a", "b", "c", "d"]) == "a, b, c, and d"
    assert enumeration(["a"]) == "a"


@pytest.mark.parametrize("name", TASKS)
def test_samples_fill_the_length_and_never_exceed_it(name: str) -> None:
    task, at = TASKS[name], plan()
    assert isinstance(task, RulerTask)
    for sample in task.samples(at):
        total = pieces(sample) + sample.turns[0].max_new_tokens
        assert 0.85 * at.length < total <= at.length


@pytest.mark.parametrize("name", TASKS)
def test_same_seed_same_bytes_whatever_the_count(name: str) -> None:
    few, many = list(TASKS[name].samples(plan(count=2))), list(TASKS[name].samples(plan(count=4)))
    assert [sample.digest() for sample in few] == [sample.digest() for sample in many[:2]]
    assert len({sample.digest() for sample in many}) == 4
    other = next(iter(TASKS[name].samples(plan(seed=43))))
    assert other.digest() != few[0].digest()


def test_data_are_pinned() -> None:
    """A change of these hashes changes every published number: bump the version and say so in the changelog."""
    made = {name: next(iter(task.samples(plan(count=1)))).digest() for name, task in TASKS.items()}
    assert made == json.loads((Path(__file__).parent / "ruler_digests.json").read_text())


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
def test_the_needles_are_in_the_context_and_their_values_not_in_the_question(name: str) -> None:
    task = TASKS[name]
    assert isinstance(task, Needles)
    for sample in task.samples(plan()):
        turn = sample.turns[0]
        assert len(turn.answers) == task.queried * task.values
        for answer in turn.answers:
            assert sample.context.count(f" is: {answer}.") == 1
            assert answer not in turn.question + turn.prefix
        found = re.findall(rf"One of the special magic {task.value} for (\S+) is: (\S+)\.", sample.context)
        expected = task.all_keys * task.values + (sample.meta["units"] if task.haystack == "needle" else 0)
        assert len(found) == expected
        asked = re.search(r" for (.*) mentioned", turn.question)
        assert asked is not None
        keys = re.split(r", and |, ", asked[1])
        assert Counter(value for key, value in found if key in keys) == Counter(turn.answers)


def test_keys_and_values_have_the_official_shapes() -> None:
    source = Random(0)
    assert re.fullmatch(r"[1-9]\d{6}", words.number(source))
    assert re.fullmatch(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}", words.uuid4(source))
    adjective, _, noun = words.pair(source).partition("-")
    assert adjective and noun
    assert (len(words.word_list("adjective")), len(words.word_list("noun"))) == (912, 6782)
    assert len(words.all_words()) == 8166


def test_needles_among_lines_stay_whole_and_spread() -> None:
    text = among_lines([f"line {i}" for i in range(50)], ["N1", "N2"], Random(1))
    lines = text.split("\n")
    assert len(lines) == 52 and {"N1", "N2"} < set(lines)
    assert [line for line in lines if line[0] == "l"] == [f"line {i}" for i in range(50)]


def test_needles_among_sentences_keep_their_order_and_reach_both_ends() -> None:
    sentences = [f"S{i}." for i in range(400)]
    depths = []
    for seed in range(300):
        text = among_sentences(sentences, ["N1.", "N2."], Random(seed))
        parts = text.split()
        assert text.startswith(" ") == (parts[0] == "N1.")  # as in the official code
        assert parts.index("N1.") < parts.index("N2.")
        assert [part for part in parts if part.startswith("S")] == sentences
        depths += [parts.index("N1."), parts.index("N2.")]
    assert min(depths) == 0 and max(depths) == 401  # depth 0 and depth 100 both occur


def test_essay_starts_again_where_it_ends() -> None:
    assert words.essay(["a", "b", "c"], 7) == "a b c a b c a"
    text = words.essay(words.prose(), 9000)
    assert " ".join(words.sentences(text)) == text  # closing quotation marks too
    assert words.sentences("One is. Two are! Three?") == ["One is.", "Two are!", "Three?"]


def test_chain_is_in_logical_order_and_holds_together() -> None:
    chain = draw_chains(Random(3), 1, 4)[0]
    assert all(re.fullmatch("[A-Z]{5}", name) for name in chain.variables) and 10_000 <= int(chain.value) < 99_999
    text = scatter([chain], 30, Random(4))
    places = [text.index(statement.strip()) for statement in chain.statements()]
    assert places == sorted(places) and len(places) == 5
    assert text.count(words.NOISE) == 30
    assert ". \n" not in text


def test_several_chains_do_not_share_variables() -> None:
    chains = draw_chains(Random(0), 6, 2, letters=1)
    assert len({name for chain in chains for name in chain.variables}) == 18
    assert len({chain.value for chain in chains}) == 6


def test_variable_tracking_has_one_solved_example_and_the_corrected_spelling() -> None:
    sample = next(iter(TASKS["vt"].samples(plan())))
    text, turn = prompt(sample), sample.turns[0]
    assert text.count("Memorize and track the chain(s)") == 2
    solved = re.search(r"they are:  ((?:[A-Z]{3} ){4}[A-Z]{3})\n\nMemorize", text)
    assert solved is not None
    assert turn.prefix.startswith(" Answer: According") and turn.prefix.endswith(", they are: ")
    assert "assgined" not in text
    value = re.search(r"the value (\d+) in", turn.question)
    assert value is not None and f"VAR {turn.answers[0]} = {value[1]}" in sample.context
    assert Chain(turn.answers, value[1]).statements()[-1] in sample.context


@pytest.mark.parametrize(("length", "often", "seldom"), [(2500, 6, 1), (4096, 30, 3)])
def test_common_words_appear_as_often_as_they_should(length: int, often: int, seldom: int) -> None:
    sample = next(iter(TASKS["cwe"].samples(plan(length))))
    listed = sample.context.rpartition("the ones that appear most often.\n")[2]
    counts = Counter(re.findall(r"\d+\. (\S+)", listed))
    assert {counts[word] for word in sample.turns[0].answers} == {often}
    assert set(counts.values()) == {often, seldom}


def test_common_words_stand_at_the_same_places_in_lists_of_equal_length() -> None:
    places = []
    for seed in range(2):
        text, common = word_list_text(Random(seed), 60, (6, 1), 42)
        flat = re.findall(r"\d+\. (\S+)", text)
        places.append([place for place, word in enumerate(flat) if word in common])
    assert places[0] == places[1]


def test_words_are_read_whatever_the_locale() -> None:
    """Their package reads a list as it is imported, in the locale's encoding."""
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "from kvengine.evals.tasks import _words; print(len(_words.all_words()))"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env={**os.environ, **plain}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == str(len(words.all_words())), done.stderr


def test_more_words_than_the_dictionary_has() -> None:
    drawn = words.distinct_words(Random(0), 9000)
    assert len(set(drawn)) == 9000


def test_frequent_words_follow_the_zeta_law() -> None:
    text = coded_text(coded_words(Random(0), 50, 6), 10_000, 42).split(" ")
    counts = [count for _, count in Counter(text).most_common(5)]
    assert counts == [6079, 1519, 675, 379, 243]  # int(10000 / (r² ζ(2)))
    assert Counter(text).most_common(1)[0][0] == "..."


def test_frequent_words_asks_for_ranks_two_to_four() -> None:
    sample = next(iter(TASKS["fwe"].samples(plan())))
    coded = sample.context.partition("three most frequently appeared coded words. ")[2].split()
    top = [word for word, _ in Counter(coded).most_common(4)]
    assert top[0] == "..." and set(top[1:]) == set(sample.turns[0].answers)


def test_substitute_questions_are_labelled_and_answerable() -> None:
    for name in ("qa_1", "qa_2"):
        for sample in TASKS[name].samples(plan()):
            assert sample.provenance.startswith("substitute")
            assert f"born in {sample.turns[0].answers[0]}." in sample.context
    two_hop = facts(1, hops=2, people=50).questions[0]
    assert 1 <= len(two_hop.gold) <= 2


def test_squad_file_gives_official_documents(tmp_path: Path) -> None:
    paragraphs = [
        {
            "context": f"Text {i} {'pad ' * 40}",
            "qas": [{"question": f"Q{i}?", "answers": [{"text": f"A{i}"}, {"text": "B"}]}],
        }
        for i in range(60)
    ]
    paragraphs[0]["qas"].insert(0, {"question": "never?", "answers": [], "is_impossible": True})  # type: ignore[attr-defined]
    path = tmp_path / "dev.json"
    path.write_text(json.dumps({"data": [{"title": "T", "paragraphs": paragraphs}]}))
    samples = list(TASKS["qa_1"].samples(plan(count=3, squad=path)))
    assert [sample.turns[0].question for sample in samples] == ["Question: Q0?", "Question: Q1?", "Question: Q2?"]
    assert samples[0].provenance == "official" and samples[0].turns[0].answers == ("A0", "B")
    gold = [re.findall(r"Document (\d+):\nText (\d+) ", sample.context) for sample in samples]
    at = [next(place for place, text in found if text == str(i)) for i, found in enumerate(gold)]
    assert len(set(at)) == 1  # the official fixed permutation keeps the gold document at one place
    others = [sorted(int(text) for _, text in found if text != str(i)) for i, found in enumerate(gold)]
    assert all(max(some) > 50 and min(some) < 10 for some in others)  # any of the article's, not its first ones
    assert len(list(TASKS["qa_1"].samples(plan(count=90, squad=path)))) == 60  # and no question twice


def test_documents_are_the_gold_ones_then_near_ones_then_any() -> None:
    texts = tuple(f"text {i}" for i in range(30))
    question, library = Question("?", ("!",), texts[:2], texts[2:9]), Library((), texts)
    for count in (1, 2, 5, 8, 9, 15, 30, 40):
        found = gather(library, question, count, Random(count))
        assert found[:2] == [*texts[:2]] and len(found) == len(set(found)) == min(max(count, 2), 30)
        near = set(found) & set(texts[2:9])
        assert len(near) == min(max(count - 2, 0), 7) and (count > 9 or set(found) <= set(texts[:9]))
    drawn = {text for seed in range(40) for text in gather(library, question, 3, Random(seed))[2:]}
    assert drawn == set(texts[2:9])


def test_hotpotqa_file(tmp_path: Path) -> None:
    path = tmp_path / "hotpot.json"
    row = {"question": "Who?", "answer": "Ann", "context": [["T1", ["Ann did. ", "It ended."]], ["T2", ["No."]]]}
    path.write_text(
        json.dumps([row] * 4), encoding="utf-8-sig"
    )  # Windows puts a mark before a text, which is none of it
    sample = next(iter(TASKS["qa_2"].samples(plan(count=1, hotpotqa=path))))
    assert "T1\nAnn did. It ended." in sample.context and sample.provenance == "official"


def test_a_file_that_was_edited_is_read_anew(tmp_path: Path) -> None:
    """In a notebook the questions, or the prose, of before were asked once more."""
    for letter in "abc":  # of equal lengths, as only the time of writing then tells
        row = {"question": f"Who {letter}?", "answer": letter, "context": [["T", [f"It is {letter}."]]]}
        (tmp_path / "hotpot.json").write_text(json.dumps([row]))
        (tmp_path / "essays.txt").write_text(f"{letter.upper()} sentence. " * 200)
        asked = next(iter(TASKS["qa_2"].samples(plan(hotpotqa=tmp_path / "hotpot.json"))))
        told = next(iter(TASKS["niah_single_2"].samples(plan(essays=tmp_path / "essays.txt"))))
        assert f"Who {letter}?" in asked.turns[0].question and f"{letter.upper()} sentence." in told.context


@pytest.mark.parametrize(("question", "answer"), [("Who?", ""), ("Who?", " "), (None, "Ann"), ("Who?", 7)])
def test_an_answer_that_every_text_contains_is_refused(tmp_path: Path, question: Any, answer: Any) -> None:
    paragraph = {"context": "Ann did.", "qas": [{"question": question, "answers": [{"text": answer}]}]}
    (tmp_path / "s.json").write_text(json.dumps({"data": [{"paragraphs": [paragraph]}]}))
    (tmp_path / "h.json").write_text(json.dumps([{"question": question, "answer": answer, "context": [["T", ["A"]]]}]))
    for task, source in (("qa_1", "squad"), ("qa_2", "hotpotqa")):
        with pytest.raises(EvaluationError, match=f"is not the published {source} file.*is no text"):
            next(iter(TASKS[task].samples(plan(**{source: tmp_path / f"{source[0]}.json"}))))


def test_damaged_data_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text("{")
    with pytest.raises(EvaluationError, match="cannot read .*x.json as JSON"):
        next(iter(TASKS["qa_1"].samples(plan(squad=path))))


def test_own_essays_make_the_haystack_official(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Zebra stripes are many. " * 400)
    sample = next(iter(TASKS["niah_single_2"].samples(plan(essays=tmp_path))))
    assert sample.provenance == "official" and "Zebra stripes" in sample.context


@pytest.mark.parametrize("name", TASKS)
def test_a_length_too_small_is_an_error_not_an_endless_loop(name: str) -> None:
    with pytest.raises(TooShort, match="longer"):
        list(TASKS[name].samples(plan(length=80)))


@pytest.mark.parametrize("limit", [1, 2, 3, 7, 64, 1000, 12345])
def test_largest_equals_the_linear_search(limit: int) -> None:
    assert largest(lambda n: n <= limit, 1) == limit


# ---- metrics -------------------------------------------------------------------------------------------------------


def test_match_all_is_a_fraction_and_ignores_case_and_order() -> None:
    assert match_all("the words are Cat and DOG", ("dog", "cat", "cow", "hen")) == 0.5
    assert match_all("", ("x",)) == 0.0


def test_match_part_is_any_and_not_the_fraction_of_lm_eval() -> None:
    assert match_part("Paris it is", ("paris", "Paris, France", "City of Light")) == 1.0
    assert match_part("Rome", ("paris",)) == 0.0


def test_short_words_hide_in_longer_ones_and_only_the_word_metric_sees_it() -> None:
    assert match_all("the party", ("art",)) == 1.0
    assert match_all("the party", ("art",), words=True) == 0.0
    assert match_all("the ART.", ("art",), words=True) == 1.0


def test_extra_output_is_not_punished_and_control_characters_become_newlines() -> None:
    assert clean("\n a\x00b\tc \n") == "a\nb\nc"
    task = TASKS["niah_single_1"]
    turn = Turn(question="", answers=("1234567",), max_new_tokens=8)
    assert task.score(turn, " 1234567. And more 999")["string_match_all"] == 1.0
    assert task.score(turn, "123\x004567")["string_match_all"] == 0.0  # deleting (as a peer does) would match


def test_question_answering_takes_any_answer_and_the_rest_takes_all() -> None:
    turn = Turn(question="", answers=("a1", "b2"), max_new_tokens=8)
    for name, task in TASKS.items():
        expected = 1.0 if name.startswith("qa") else 0.5
        assert task.score(turn, "only a1")[task.metric] == expected


def test_every_answer_scores_full_marks_and_silence_none() -> None:
    for task in TASKS.values():
        for sample in task.samples(replace(plan(), count=1)):
            turn = sample.turns[0]
            assert task.score(turn, ", ".join(turn.answers))[task.metric] == 1.0
            assert task.score(turn, "")[task.metric] == 0.0
