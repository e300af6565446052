"""Words and prose that training samples are written with: nothing is downloaded, every installation has them."""

from __future__ import annotations

import functools
import re
from importlib import resources

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_SENTENCE = re.compile(r"[A-Z][^.!?*|=<>{}\[\]_\\]{20,240}[.!?](?=\s|$)")


@functools.cache
def words(kind: str) -> tuple[str, ...]:
    """The `wonderwords` list of that kind ("adjective", "noun" or "verb"), in file order."""
    text = (resources.files("wonderwords.assets") / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@functools.cache
def haystack_sentences() -> tuple[str, ...]:
    """Sentences of the Python language reference as `pydoc` carries it, whitespace normalised, markup left out.

    They differ a little between Python versions.
    """
    from pydoc_data.topics import topics

    found: dict[str, None] = {}
    for name in sorted(topics):
        for paragraph in re.split(r"\n\s*\n", topics[name]):
            flat = " ".join(paragraph.split())
            found.update(dict.fromkeys(_SENTENCE.findall(flat)))
    return tuple(found)
