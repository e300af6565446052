"""RULER's variable tracking: follow a chain of assignments through noise, after one solved example."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from string import ascii_uppercase
from typing import Any

from kvengine.evals.tasks import Plan
from kvengine.evals.tasks._ruler import Draft, RulerTask
from kvengine.evals.tasks._words import NOISE

INTRODUCTION = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
QUESTION = "Question: Find all variables that are assigned the value {query} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, "
    "{count} variables are assigned the value {query}, they are: "
)
EXAMPLE_NOISES = 12  # noise units of the solved example: about 500 tokens in all, as in the official code


@dataclass(frozen=True)
class Chain:
    """Variables that all hold one value, in the order of assignment."""

    variables: tuple[str, ...]
    value: str

    def statements(self) -> list[str]:
        """`VAR A = 12345`, `VAR B = VAR A `, … (the official trailing space is kept).

        >>> Chain(("AB", "CD"), "7").statements()
        ['VAR AB = 7', 'VAR CD = VAR AB ']
        """
        follow = zip(self.variables, self.variables[1:], strict=False)
        return [f"VAR {self.variables[0]} = {self.value}"] + [f"VAR {new} = VAR {old} " for old, new in follow]


@dataclass(frozen=True)
class VariableTracking(RulerTask):
    """`chains` chains of `hops` assignments; the value of the first is asked."""

    new_tokens: int = 30
    chains: int = 1
    hops: int = 4

    def draw(self, units: int, source: Random, plan: Plan, index: int) -> Draft:
        chains = draw_chains(source, self.chains, self.hops)
        context = INTRODUCTION.format(context=scatter(chains, units, source))
        value = chains[0].value
        return Draft(
            context=self.example(source) + "\n" + context,
            question=QUESTION.format(query=value),
            prefix=PREFIX.format(count=self.hops + 1, query=value),
            answers=chains[0].variables,
            meta={"hops": self.hops, "chains": self.chains},
        )

    def example(self, source: Random) -> str:
        """The solved example: three-letter variables, its answer spelled out behind two spaces, as officially."""
        chains = draw_chains(source, self.chains, self.hops, letters=3)
        value = chains[0].value
        text = INTRODUCTION.format(context=scatter(chains, EXAMPLE_NOISES, source)) + QUESTION.format(query=value)
        return text + PREFIX.format(count=self.hops + 1, query=value) + " " + " ".join(chains[0].variables) + "\n"

    def smallest(self) -> int:
        return self.hops + 2

    def step(self, length: int) -> int:
        return 10 if length >= 4096 else 5

    def recipe(self) -> dict[str, Any]:
        return {**super().recipe(), "chains": self.chains, "hops": self.hops}


def draw_chains(source: Random, chains: int, hops: int, *, letters: int = 5) -> list[Chain]:
    """Chains over distinct variables and distinct five-digit values."""
    names: dict[str, None] = {}
    while len(names) < chains * (hops + 1):
        names["".join(source.choices(ascii_uppercase, k=letters))] = None
    values = source.sample(range(10_000, 99_999), chains)
    groups = [tuple(names)[i * (hops + 1) : (i + 1) * (hops + 1)] for i in range(chains)]
    return [Chain(group, str(value)) for group, value in zip(groups, values, strict=True)]


def scatter(chains: list[Chain], noises: int, source: Random) -> str:
    """Noise lines with every chain's statements among them, each chain in its order of assignment."""
    lines = [NOISE] * noises
    for chain in chains:
        statements = chain.statements()
        places = sorted(source.sample(range(len(lines)), len(statements)))
        for shift, (place, statement) in enumerate(zip(places, statements, strict=True)):
            lines.insert(place + shift, statement)
    return "\n".join(lines).replace(". \n", ".\n")


TASKS = (VariableTracking("vt"),)
