"""Words, numbers, sentences and prose that the generators hide things in."""

from __future__ import annotations

import functools
import random
import re
import uuid
from collections.abc import Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from kvengine.errors import EvaluationError
from kvengine.evals.tasks._fit import stamp

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@functools.cache
def word_list(kind: str) -> tuple[str, ...]:
    """One list of the `wonderwords` distribution ("adjective", "noun" or "verb"), in file order.

    Its package is not imported: it reads files of its own in the locale's encoding, which may not be UTF-8.
    """
    found = find_spec("wonderwords")
    if found is None or not found.submodule_search_locations:
        raise EvaluationError("this task draws its words from the package wonderwords: pip install wonderwords")
    folder = Path(found.submodule_search_locations[0]) / "assets"
    text = (folder / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@functools.cache
def all_words() -> tuple[str, ...]:
    """Every distinct noun, adjective and verb, sorted."""
    return tuple(sorted({word for kind in ("noun", "adjective", "verb") for word in word_list(kind)}))


def pair(source: random.Random) -> str:
    """A key made of two words: `quiet-harbour`."""
    return f"{source.choice(word_list('adjective'))}-{source.choice(word_list('noun'))}"


def number(source: random.Random) -> str:
    """Seven digits, the first not zero."""
    return str(source.randint(10**6, 10**7 - 1))


def uuid4(source: random.Random) -> str:
    """A version-4 UUID from the given source of randomness."""
    return str(uuid.UUID(int=source.getrandbits(128), version=4))


def distinct_words(source: random.Random, count: int) -> list[str]:
    """`count` distinct words; made-up ones after the dictionary is used up (RULER's own larger list is a download)."""
    words = all_words()
    if count <= len(words):
        return source.sample(words, count)
    extra: dict[str, None] = {}
    while len(extra) < count - len(words):
        extra["".join(source.choices("bdfgklmnprstvz", k=1) + source.choices("aeiou", k=1)) + pair(source)] = None
    return source.sample(words, len(words)) + list(extra)


LONGEST = 1000
"""Letters of a word in prose. A text without spaces is one word, of which thousands would take all memory."""


def prose(path: Path | None = None) -> tuple[str, ...]:
    """The words of the essay haystack: the user's text file or folder of them, else the bundled public-domain novel.

    Raises `EvaluationError` if the path holds no text, or none in UTF-8.
    """
    return _prose(path, () if path is None else stamp(path))


@functools.lru_cache(maxsize=8)
def _prose(path: Path | None, written: tuple[object, ...]) -> tuple[str, ...]:
    if path is None:
        text = (resources.files("kvengine.evals.tasks") / "data" / "alice.txt").read_text(encoding="utf-8")
    else:
        files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
        text = "\n".join(_read(file) for file in files if file.is_file())
    words = tuple(text.split())
    if not words:
        raise EvaluationError(f"no text at {path}: give a .txt file, or a folder of them")
    if len(longest := max(words, key=len)) > LONGEST:
        raise EvaluationError(
            f"the text at {path} has a word of {len(longest)} letters ({longest[:20]}…); "
            "a haystack is counted in words, so give prose with spaces between them"
        )
    return words


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise EvaluationError(f"the text at {file} is not UTF-8: {error}; unpack or convert it first") from error


def essay(words: Sequence[str], count: int) -> str:
    """The first `count` words, the text starting again where it ends."""
    whole, rest = divmod(count, len(words))
    return " ".join([*words] * whole + [*words[:rest]])


def sentences(text: str) -> list[str]:
    """Split at sentence ends (a rule, not nltk's trained splitter: differs from the official code at abbreviations).

    >>> sentences('"So you did, old fellow!" said the others. (They went on.) "Yes."')
    ['"So you did, old fellow!" said the others.', '(They went on.)', '"Yes."']
    """
    return [part for part in re.split(r"(?:(?<=[.!?])|(?<=[.!?]['\")]))\s+(?=[\"'`(A-Z])", text) if part]
