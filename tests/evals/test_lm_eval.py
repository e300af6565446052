"""RULER against lm-evaluation-harness, where that is installed: `pip install lm_eval nltk scipy`, then `make test-slow`.

Needle samples are equal to the letter on the same seeds, once both draw word pairs and split sentences by the same
function. The others draw in another order: theirs are taken apart and put together again with ours. The last tests pin
the differences that docs/evaluation.md lists. Passed with lm_eval 0.4.13.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvengine.evals import peers
from kvengine.evals.tasks import Plan, Turn, catalogue
from kvengine.evals.tasks import _words as words
from kvengine.evals.tasks._ruler import clean
from kvengine.evals.tasks._words import NOISE
from kvengine.evals.tasks.ruler_niah import Needles, among_lines, enumeration, wording
from kvengine.evals.tasks.ruler_words import CWE, CWE_QUESTION, FWE, FWE_QUESTION, coded_text, numbered

pytestmark = pytest.mark.slow
ruler = pytest.importorskip("lm_eval.tasks.ruler.niah_utils", reason="lm-evaluation-harness is not installed")

TASKS = {name: task for name, task in catalogue("ruler").items() if isinstance(task, Needles)}


class Words:
    """A tokenizer of theirs that counts words."""

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": text.split()})


@pytest.mark.parametrize("name", TASKS)
def test_needle_samples_are_equal_on_the_same_seeds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All eight tasks, essays included; both sides draw keys and split sentences by our functions, nothing else."""
    from lm_eval.tasks.ruler import prepare_niah

    monkeypatch.setattr(prepare_niah, "generate_random_word", lambda: words.pair(random))  # type: ignore[arg-type]
    monkeypatch.setattr(prepare_niah, "cached_sent_tokenize", words.sentences)
    task = TASKS[name]
    units, kind, haystack = {
        "essay": (900, "essay", list(words.prose())),
        "noise": (30, "repeat", NOISE),
        "needle": (30, "needle", prepare_niah.NEEDLE),
    }[task.haystack]
    plan = Plan(length=4096, count=1, seed=42, measure=lambda sample: 0)
    for seed in range(12):
        random.seed(seed)
        text, answers, _ = prepare_niah.generate_input_output(
            units,
            haystack,
            type_haystack=kind,
            num_needle_k=task.all_keys,
            type_needle_k=task.key,
            num_needle_v=task.values,
            type_needle_v=task.value,
            template=ruler.TEMPLATE,
            num_needle_q=task.queried,
        )
        draft = task.draw(units, random.Random(seed), plan, 0)
        assert draft.context + draft.question == text and list(draft.answers) == answers


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.haystack != "essay"])
def test_needle_prompts_are_equal(name: str) -> None:
    from lm_eval.tasks.ruler import prepare_niah

    task = TASKS[name]
    haystack = NOISE if task.haystack == "noise" else prepare_niah.NEEDLE
    random.seed(7)
    text, answers, query = prepare_niah.generate_input_output(
        30,
        haystack,
        type_haystack="repeat" if task.haystack == "noise" else "needle",
        num_needle_k=task.all_keys,
        type_needle_k=task.key,
        num_needle_v=task.values,
        type_needle_v=task.value,
        template=ruler.TEMPLATE,
        num_needle_q=task.queried,
    )
    introduction, question, prefix = wording(task.value, single=True)
    context = text.partition("afterwards.\n")[2].rpartition("\nWhat is")[0]
    asked = {"query": enumeration([query]), "context": context}
    assert text == introduction.format(**asked) + question.format(**asked)
    lines = context.split("\n")
    needle = f"One of the special magic {task.value} for {query} is: {answers[0]}."
    at = lines.index(needle)
    rest = lines[:at] + lines[at + 1 :]
    again = next(
        text
        for seed in range(2000)
        if (text := among_lines(rest, [needle], random.Random(seed))).split("\n")[at] == needle
    )
    assert again == context
    assert prefix.format(**asked).strip().startswith("The special magic")


def test_frequent_words_are_equal() -> None:
    from lm_eval.tasks.ruler import fwe_utils

    random.seed(3)
    text, answers, words = fwe_utils.generate_input_output(4096, Words(), num_words=900, vocab_size=60)
    coded = text.partition("coded words. ")[2].partition("\n")[0]
    ranked = [word for word, _ in Counter(coded.split()).most_common()]
    order = sorted(set(ranked), key=lambda word: (-coded.split().count(word), word != "..."))
    assert order[0] == "..." and set(order[1:4]) == set(answers)
    random.seed(3)
    vocabulary = ["".join(random.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(60)]
    vocabulary = sorted(set(vocabulary))
    random.Random(42).shuffle(vocabulary)
    assert coded_text(["...", *vocabulary[1:]], words, 42) == coded
    assert text.startswith(FWE.format(context=coded) + FWE_QUESTION)


def test_common_words_are_equal() -> None:
    from lm_eval.tasks.ruler import cwe_utils

    random.seed(5)
    example, text, answers = cwe_utils.generate_input_output(50, 4096)
    flat = re.findall(r"\d+\. (\S+)", text)
    assert text.startswith(CWE.format(context=numbered(flat)) + CWE_QUESTION)
    assert {Counter(flat)[word] for word in answers} == {30} and set(Counter(flat).values()) == {30, 3}
    assert example.startswith(CWE.partition("{context}")[0])


def test_scores_are_equal() -> None:
    from lm_eval.tasks.ruler import common_utils

    source = random.Random(1)
    task = catalogue("ruler")["vt"]
    for _ in range(300):
        answers = tuple("".join(source.choices("abAB1", k=2)) for _ in range(source.randint(1, 4)))
        text = "".join(source.choices("abAB1 \n\x01", k=12))
        theirs = common_utils.string_match_all(common_utils.postprocess_pred([text]), [list(answers)])
        ours = task.score(Turn(question="", answers=answers, max_new_tokens=1), text)["string_match_all"]
        assert theirs == pytest.approx(ours)
        assert common_utils.postprocess_pred([text]) == [clean(text)]


def test_their_scorer_reads_our_files(tmp_path: Path) -> None:
    from lm_eval.tasks.ruler import common_utils

    predictions = ["The number is 1234567.", "1234567 and 7654321", "", "\x00 7654321"]
    task, turn = (
        catalogue("ruler")["niah_multivalue"],
        Turn(question="", answers=("1234567", "7654321"), max_new_tokens=9),
    )
    shared = {"task": task.name, "question": "", "answers": list(turn.answers), "sample_hash": "", "prompt_tokens": 5}
    rows = [
        {**shared, "sample": str(i), "prediction": text, "score": task.score(turn, text)["string_match_all"],
         "null": not text, "max_new_tokens": 9}
        for i, text in enumerate(predictions)
    ]  # fmt: skip
    peers.ruler(tmp_path, rows)
    lines = [json.loads(line) for line in (tmp_path / "niah_multivalue.jsonl").read_text().splitlines()]
    theirs = [
        common_utils.process_results({"max_length": 4096, "outputs": line["outputs"]}, [line["pred"]])["4096"]
        for line in lines
    ]
    assert common_utils.aggregate_metrics(theirs) == pytest.approx(0.5)
    assert "Score,50.0" in (tmp_path / "summary-niah_multivalue.csv").read_text()


def test_the_differences_that_the_documentation_lists() -> None:
    from lm_eval.tasks.ruler import common_utils, vt_utils

    turn = Turn(question="", answers=("a", "b"), max_new_tokens=1)
    assert common_utils.string_match_part(["a"], [["a", "b"]]) == 0.5  # a fraction there, "any" officially and here
    assert catalogue("ruler")["qa_1"].score(turn, "a")["string_match_part"] == 1.0
    assert "assgined" in vt_utils.TEMPLATE  # the typo of before May 2025
    vt = next(iter(catalogue("ruler")["vt"].samples(Plan(length=4096, count=1, seed=1, measure=lambda sample: 4000))))
    assert "assigned" in vt.turns[0].prefix and "assgined" not in vt.context + vt.turns[0].prefix
    random.seed(0)
    text, _ = vt_utils.generate_input_output(20, 1, 4)
    assert ".\n The grass" in text and ".\n The grass" not in vt.context  # a space after each line of noise
    assert vt.turns[0].prefix.startswith(" ") and ruler.TEMPLATE.endswith("?")  # their prefixes are stripped


def test_likelihoods_under_a_policy_as_the_documentation_has_it() -> None:
    """Its own are the full cache's under every policy."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import kvengine
    from kvengine.evals import bundled_model

    page = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text()
    made: dict[str, Any] = {}
    exec(page.partition("```python\n")[2].partition("scores =")[0], made)
    tokenizer, model = (auto.from_pretrained(bundled_model()) for auto in (AutoTokenizer, AutoModelForCausalLM))
    text = "One of the special magic numbers for cat is: 7351962. The grass is green. " * 3
    pairs = [(text + "The number for cat is", said) for said in (" 7351962", " 1234567")] + [(text, "The sky")]
    asked = [Instance("loglikelihood", {}, pair, i) for i, pair in enumerate(pairs)]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    found = {}
    for policy in ("full", "h2o(budget=16)"):
        kvengine.patch(model.float(), policy)
        for kind in (HFLM, made["Under"]):
            harness = kind(pretrained=model, tokenizer=tokenizer, batch_size=2)
            found[policy, kind] = [score for score, _ in harness.loglikelihood(asked, disable_tqdm=True)]
            found[policy, kind] += harness.loglikelihood_rolling(rolling, disable_tqdm=True)
    (stock, full), (blind, under) = ([found[p, k] for k in (HFLM, made["Under"])] for p in ("full", "h2o(budget=16)"))
    assert full == pytest.approx(stock, abs=1e-2) and blind == pytest.approx(stock, abs=1e-2)
    assert all(abs(one - other) > 0.1 for one, other in zip(under, stock, strict=True))
