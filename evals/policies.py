"""Which policies a run compares: those asked for, the full cache as ceiling, and an exact top-k of the same budget."""

from __future__ import annotations

import ast
import hashlib
import re
import sys
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from kvengine.errors import EvaluationError, PolicyError, UnsupportedPolicy

STOCK = "stock"


@dataclass(frozen=True)
class Arm:
    """One policy of a comparison. `spelled`: with every option written out; `refused`: why it cannot be built.

    `code`: hash of its methods' files.
    """

    policy: str
    role: str  # "ceiling", "oracle" or "policy"
    spelled: str
    refused: str | None = None
    code: str = ""


def split(text: str) -> list[str]:
    """Split at commas and semicolons outside brackets and quotes.

    >>> split("full; snapkv(budget=0.25, window=32)+kivi, quest(budget=1024)")
    ['full', 'snapkv(budget=0.25, window=32)+kivi', 'quest(budget=1024)']
    """
    parts, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        else:
            depth += (letter in "([{") - (letter in ")]}")
        if letter in ",;" and depth == 0 and not quote:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def everything(budget: float) -> list[str]:
    """Every method in the tree but the null ones, each alone, at one budget where it has one.

    A fraction is of the prompt, a whole number counts tokens.
    """
    import kvengine
    from kvengine.policies import catalogue, load

    idle = set(kvengine.Stack().spelled().replace(" ", "").split("+"))
    return [_at_budget(name, *load(name), budget) for name in catalogue() if name not in idle]


def _at_budget(name: str, axis: str, cls: type[Any], budget: float) -> str:
    """With the budget in whichever option takes one. A method that cannot have that budget is refused, not changed."""
    options = get_type_hints(cls)
    if "budget" in options:
        return f"{name}(budget={budget})"
    # duo counts the newest tokens, and knows no fraction of them; of a prompt that is read sparsely all are held
    if axis != "prefill" and isinstance(budget, options.get("recent", ())):
        return f"{name}(recent={budget})"
    return name


def arms(policies: list[str], *, ceiling: bool = True, oracle: bool = True, spread: Collection[str] = ()) -> list[Arm]:
    """The policies, each once, with the ceiling first and one oracle per budget that occurs.

    Raises `PolicyError` for a policy that does not exist or has a wrong option; one that is understood but impossible
    is kept as refused, and of those that nobody spelled (`spread`) any that cannot be.
    """
    if not policies:
        raise EvaluationError('no policy given: try --policies "full;streaming(recent=512)"')
    asked = [_arm(policy, "policy", spread) for policy in policies]
    first = [_arm("full", "ceiling")] if ceiling and not any(is_ceiling(arm) for arm in asked) else []
    found = [*first, *(replace(arm, role=role(arm)) for arm in asked)]
    if oracle:
        found += [_arm(f"oracle_topk(budget={budget})", "oracle") for budget in budgets(asked)]
    return list({arm.spelled: arm for arm in reversed(found)}.values())[::-1]


def is_ceiling(arm: Arm) -> bool:
    """Does this arm keep and read everything exactly?"""
    return arm.policy in ("full", STOCK)


def role(arm: Arm) -> str:
    """What an arm is in a comparison: an exact top-k on its own is the oracle even where it was asked for."""
    if is_ceiling(arm):
        return "ceiling"
    return "oracle" if re.fullmatch(r"oracle_topk(\([^()]*\))?", arm.policy) else "policy"


def budgets(found: list[Arm]) -> list[str]:
    """The budgets, as written, of all arms, each once."""
    texts = [text for arm in found for text in re.findall(r"\bbudget=([0-9.e-]+)", arm.spelled)]  # 5e-05 is one too
    return list(dict.fromkeys(texts))


def _arm(policy: str, role: str, spread: Collection[str] = ()) -> Arm:
    if policy == STOCK:
        return Arm(policy, role, STOCK)
    import kvengine

    try:
        stack = kvengine.Stack.parse(policy)
        return Arm(policy, role, stack.spelled(), code=code_of(stack))
    except PolicyError as error:
        if policy not in spread and not isinstance(error, UnsupportedPolicy):
            raise
        return Arm(policy, role, policy, str(error))


def code_of(stack: Any) -> str:
    """Hash of what the files of a stack's methods say, and of the heads that a pattern names.

    A method outside of the package may lean on files beside it whose names begin with an underscore: they count too.
    What counts is what they said when they were loaded, as that is what runs.
    """
    from kvengine.policies import ours, sources

    found = hashlib.sha256()
    for policy in (getattr(stack, axis.name) for axis in fields(stack)):
        module = sys.modules[type(policy).__module__]
        file = Path(getattr(module, "__file__", None) or "")
        for text in [file.read_text("utf-8")] if ours(module.__name__) else sources(module).values():
            found.update(meaning(text).encode())
        found.update(repr(getattr(policy, "alpha", "")).encode() if getattr(policy, "pattern", "") else b"")
    return found.hexdigest()[:16]


@cache
def meaning(source: str) -> str:
    """A Python file without comments, docstrings and layout, which change no result.

    >>> meaning("def f(x): 'Adds.'; return (x+1)  # one") == meaning("def f(x): return x + 1")
    True
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:  # beside a method, not imported by it
        return source
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node
        ):
            del node.body[0]
    return ast.unparse(tree)
