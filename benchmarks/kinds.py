"""Which policies share a picture."""

from __future__ import annotations

import re
from dataclasses import fields

from kvengine.stack import Stack

KINDS = ("retention", "representation", "selection", "others, and together")
SIZE = re.compile(r"\b(budget|recent)=0?\.\d+,? ?")


def kind(spelled: str) -> str:
    """Where a stack is drawn: the only axis on which it chooses something, where that has many methods."""
    idle = Stack().spelled().split(" + ")
    axes = [field.name for field in fields(Stack)]
    chosen = [axis for axis, part, null in zip(axes, spelled.split(" + "), idle, strict=True) if part != null]
    return chosen[0] if chosen in ([one] for one in KINDS) else KINDS[-1]


def series(policy: str) -> str:
    """A policy without its share of the tokens: what differs in that alone is a line.

    >>> series("h2o(budget=0.5)"), series("h2o(budget=0.25,recent=0,average=True)"), series("streaming(recent=0.5)")
    ('h2o', 'h2o(recent=0,average=True)', 'streaming')
    """
    return SIZE.sub("", policy.strip("`")).replace("()", "")
