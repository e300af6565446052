"""Scorers of single answers. Official ones do what the published code does, strict ones what it meant to."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Any

CHINESE = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def contains(prediction: str, label: Any) -> float:
    """1 if the label is part of the prediction."""
    return float(first(label) in prediction)


def contains_whole(prediction: str, label: Any) -> float:
    """1 if the label stands in the prediction with no letter or digit at either side."""
    return float(re.search(rf"(?<![\w-]){re.escape(first(label))}(?![\w-])", prediction) is not None)


def first(label: Any) -> str:
    """The label, or the first of several, as text."""
    return str(label[0]) if isinstance(label, list | tuple) else str(label)


def fraction_found(prediction: str, labels: Sequence[str]) -> float:
    """Fraction of labels that are part of the prediction, ignoring case, rounded to two places (as officially)."""
    return round(sum(label.lower() in prediction.lower() for label in labels) / len(labels), 2)


def set_found(prediction: str, labels: Sequence[str]) -> float:
    """Fraction of labels that stand in the prediction as whole words, not rounded."""
    return sum(contains_whole(prediction, label) for label in labels) / len(labels)


def first_number(prediction: str, label: Any) -> float:
    """1 if the first number of the prediction, cut to an integer, is the label."""
    found = re.search(r"\d+\.\d+|\d+", prediction)
    return float(found is not None and int(float(found[0])) == int(first(label)))


def only_number(prediction: str, label: Any) -> float:
    """1 if the prediction is the label and nothing else but punctuation."""
    return float(prediction.strip().strip(".,;:!") == first(label))


def first_integer(prediction: str, label: Any) -> float:
    """1 if the first run of digits is the label, leading zeros and all."""
    found = re.search(r"[0-9]+", prediction)
    return float(found is not None and found[0] == first(label))


def any_character(prediction: str, label: Any) -> float:
    """What many-shot scoring officially comes to: any one character of "(B)" in the prediction, brackets included.

    The published scorer takes a list of labels and is handed a string.
    """
    return float(any(letter.upper() in prediction.strip().upper() for letter in label))


def option_letter(prediction: str, label: Any) -> float:
    """1 if the first option named, "(B)" or a lone "B", is the label's."""
    wanted = re.search(r"[A-Z]", first(label))
    found = re.search(r"\(([A-Z])\)|\b([A-Z])\b", prediction)
    return float(bool(wanted and found and wanted[0] == (found[1] or found[2])))


def any_label(prediction: str, labels: Any) -> float:
    """1 if any label is part of the prediction, ignoring case."""
    wanted = [labels] if isinstance(labels, str) else labels
    return float(any(str(label).upper() in prediction.strip().upper() for label in wanted))


def choice(prediction: str, label: Sequence[str]) -> float:
    """SCBench's matcher for a choice of four; the label is the option's text and its letter.

    A leading capital A–D decides; else what follows "answer is" and the like; else the first word that is one.
    """
    text = prediction.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in label)
    if text in label:
        return 1.0
    text = re.sub(r" {2,}", " ", re.sub(r"[\n\"'.,?!{}]", " ", text))
    for lead in ("answer is:", "answer:", "answer is", "option is"):
        at = text.find(lead)
        if at >= 0:
            rest = text[at + len(lead) + 1 :]
            return float(bool(rest) and any(rest.startswith(one) for one in label))
    letters = [word for word in text.split() if word in "ABCD"]
    return float(bool(letters) and letters[0] in label)


def choice_letter(prediction: str, label: Sequence[str]) -> float:
    """1 if the first letter A–D that stands alone is the right one."""
    found = re.search(r"\b([ABCD])\b", prediction)
    return float(found is not None and found[1] == label[-1])


def english_words(text: str) -> list[str]:
    """SQuAD's normalisation: lower case, no punctuation, no articles."""
    bare = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", bare).split()


def chinese_letters(text: str) -> list[str]:
    """Lower case, no punctuation of either kind, no spaces; one letter, one token."""
    return [letter for letter in text.lower() if letter not in string.punctuation + CHINESE and not letter.isspace()]


def f1(prediction: Sequence[str], reference: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over shared tokens, counted with repetition."""
    shared = sum((Counter(prediction) & Counter(reference)).values())
    return 2 * shared / (len(prediction) + len(reference)) if shared else 0.0


def english_f1(prediction: str, labels: Any) -> float:
    """Best token F1 over the labels."""
    wanted = [labels] if isinstance(labels, str) else labels
    return max(f1(english_words(prediction), english_words(str(label))) for label in wanted)


def chinese_f1(prediction: str, label: Any) -> float:
    """Letter F1 with the label."""
    wanted = [label] if isinstance(label, str) else label
    return max(f1(chinese_letters(prediction), chinese_letters(str(one))) for one in wanted)


def chinese_f1_by_character(prediction: str, label: Any) -> float:
    """What the official score comes to: the best F1 with any *single character* of the label."""
    return max((f1(chinese_letters(prediction), chinese_letters(str(one))) for one in label), default=0.0)


def longest_common(a: Sequence[str], b: Sequence[str]) -> list[int]:
    """Indices in `a` of one longest common subsequence with `b`."""
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a, 1):
        for j, y in enumerate(b, 1):
            table[i][j] = table[i - 1][j - 1] + 1 if x == y else max(table[i - 1][j], table[i][j - 1])
    kept, i, j = [], len(a), len(b)
    while i and j:
        if a[i - 1] == b[j - 1]:
            kept.append(i - 1)
            i, j = i - 1, j - 1
        elif table[i - 1][j] >= table[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return kept[::-1]


def rouge_words(text: str) -> list[str]:
    """Lower-case runs of letters and digits."""
    return re.findall(r"[a-z0-9]+", text.lower())


def rouge_l(prediction: str, reference: str) -> float:
    """ROUGE-L F1 as the package `rouge` counts it: over distinct words, case and all punctuation but full stops kept.

    Sentences end at full stops. A word counts if it is in the longest common subsequence of a sentence of the prediction
    and one of the reference.
    """
    sides = [
        [" ".join(part.split()).split(" ") for part in text.split(".") if part] for text in (reference, prediction)
    ]
    words = [{word for line in side for word in line} for side in sides]
    if not all(words):
        return 0.0
    common = {b[i] for a in sides[0] for b in sides[1] for i in longest_common(b, a)}
    return 2 * len(common) / sum(map(len, words))


def rouge_lsum(prediction: str, reference: str) -> float:
    """ROUGE-Lsum F1 (Lin 2004): sentences end at newlines alone; a reference line counts its matches with all lines."""
    lines = [[rouge_words(line) for line in text.split("\n")] for text in (reference, prediction)]
    left = [Counter(word for line in side for word in line) for side in lines]
    total = [sum(side.values()) for side in left]
    if not all(total):
        return 0.0
    hits = 0
    for line in lines[0]:
        for index in sorted({i for other in lines[1] for i in longest_common(line, other)}):
            if left[0][line[index]] > 0 and left[1][line[index]] > 0:
                hits += 1
                left[0][line[index]] -= 1
                left[1][line[index]] -= 1
    return 2 * hits / sum(total)
