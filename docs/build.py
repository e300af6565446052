"""Write the generated parts of the documentation: `make docs`.

Between `<!-- table:NAME -->` and `<!-- /table -->` in any Markdown file stands what benchmarks/results/NAME.json says:

    {"command": "kvengine eval ruler ...", "machine": "2 CPU cores, ...",
     "columns": {"Policy": "stack", "Accuracy": "score:.1f"},
     "rows": [{"stack": "full", "score": 98.25}, ...],
     "pictures": {"Score against bytes": "file beside it, for pages in docs/"}}

A column maps its heading to a key of the rows, with a format after a colon where one is wanted. A part of a table is asked for
by `<!-- table:NAME of COLUMN; COLUMN for ROW; ROW -->`, a row by what it says in its first column. docs/policies.md comes
from the policies themselves. A test fails when a file and its sources disagree, so no figure is typed by hand.
"""

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin, get_type_hints

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BLOCK = re.compile(r"(<!-- table:([\w-]+)(?: of (.*?) for (.*?))? -->\n).*?(<!-- /table -->)", re.DOTALL)
UNMEASURED = "*Not measured yet.*\n"
FOLDED = 60
"""Rows beyond which a table is shown on demand."""

Load = Callable[[str], tuple[str, type[Any]]]


# Tables


def cell(row: Mapping[str, Any], column: str) -> str:
    """One value of a row.

    >>> cell({"score": 98.25}, "score:.1f"), cell({}, "score")
    ('98.2', '–')
    """
    key, _, form = column.partition(":")
    value = row.get(key)
    return "–" if value is None else format(value, form).replace("|", "\\|")


def markdown_table(columns: Mapping[str, str], rows: list[Mapping[str, Any]]) -> str:
    """Numbers to the right, words to the left."""
    numeric = [
        all(isinstance(row.get(column.partition(":")[0]), int | float) for row in rows) for column in columns.values()
    ]
    lines = [list(columns), ["---:" if right else "---" for right in numeric]]
    lines += [[cell(row, column) for column in columns.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def table(name: str, columns: str | None = None, rows: str | None = None) -> str:
    """The table of a result file, or some of its columns and rows, with the command and machine it came from."""
    source = RESULTS / f"{name}.json"
    if not source.exists():
        return UNMEASURED
    result = json.loads(source.read_text())
    if columns and rows:
        first = next(iter(result["columns"].values()))
        by_name = {cell(row, first): row for row in result["rows"]}
        result["columns"] = {column: result["columns"][column] for column in columns.split("; ")}
        result["rows"] = [by_name[row] for row in rows.split("; ")]
        result["pictures"] = {}
    drawn = result.get("pictures", {}).items()
    pictures = "".join(f"![{what}](../benchmarks/results/{file})\n\n" for what, file in drawn)
    lines = markdown_table(result["columns"], result["rows"])
    if len(result["rows"]) > FOLDED:
        lines = f"<details><summary>The table, {len(result['rows'])} rows</summary>\n\n{lines}\n</details>\n"
    return f"{pictures}{lines}\n`{result['command']}` on {result['machine']}.\n"


def fill(text: str) -> str:
    """A Markdown text with every table replaced by what was measured."""
    return BLOCK.sub(lambda block: f"{block[1]}{table(*block.groups()[1:4])}{block[5]}", text)


# Policies


def first_paragraph(thing: object) -> str:
    """The first paragraph of a docstring on one line; empty when there is none of its own."""
    text = thing.__doc__ or ""
    generated = isinstance(thing, type) and text.startswith(f"{thing.__name__}(")  # what @dataclass makes up
    return "" if generated else " ".join(inspect.cleandoc(text).split("\n\n")[0].split())


def meanings(cls: type[Any]) -> dict[str, str]:
    """What each option of a policy means, its base classes' included.

    A meaning stands where the author found it clearest: in the class docstring as `name: meaning`, in a comment on the
    line of the field, or in a string under the field.
    """
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            found.update(described(base))
    return found


def listed(docstring: str) -> Iterator[tuple[str, str]]:
    """The lines `name: meaning` of a docstring, with the deeper lines that continue them.

    >>> list(listed("Args:\\n    unit: chosen together.\\n        Tokens.\\n    reduce: how."))
    [('unit', 'chosen together. Tokens.'), ('reduce', 'how.')]
    """
    for _, name, first in re.findall(r"^( *)`{0,2}(\w+)`{0,2}: (.+(?:\n\1 +.+)*)", docstring, re.MULTILINE):
        yield name, " ".join(first.split())


def described(cls: type[Any]) -> Iterator[tuple[str, str]]:
    source = textwrap.dedent(inspect.getsource(cls))
    (tree,) = ast.parse(source).body
    lines = source.encode().splitlines()  # ast counts columns in bytes
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    yield from listed(inspect.cleandoc(cls.__doc__ or ""))
    for field, after in zip(body, [*body[1:], None], strict=True):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        rest = lines[(field.end_lineno or 1) - 1][field.end_col_offset or 0 :].decode()
        if rest.strip().startswith("#"):
            yield field.target.id, rest.strip().lstrip("# ")
        elif (
            isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) and isinstance(after.value.value, str)
        ):
            yield field.target.id, " ".join(after.value.value.split())


def default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    return "required" if field.default_factory is dataclasses.MISSING else f"`{field.default_factory()!r}`"


def options(cls: type[Any]) -> list[dict[str, str]]:
    """The options of a policy as rows of a table."""
    known, kinds = meanings(cls), get_type_hints(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    said = {f.name: with_choices(known.get(f.name, ""), kinds[f.name]) for f in fields}
    return [{"option": f"`{f.name}`", "default": default(f), "meaning": said[f.name]} for f in fields]


def with_choices(meaning: str, kind: Any) -> str:
    """A meaning that names no choice of several, with all of them behind it.

    >>> with_choices("how to pool.", Literal["avg", "max"]), with_choices('"avg" or "max".', Literal["avg", "max"])
    ('how to pool: "avg" or "max".', '"avg" or "max".')
    """
    choices = [f'"{choice}"' for choice in get_args(kind)] if get_origin(kind) is Literal else []
    if not meaning or not choices or any(choice in meaning for choice in choices):
        return meaning
    return f"{meaning.rstrip('.')}: {', '.join(choices[:-1])} or {choices[-1]}."


def linked(text: str) -> str:
    """Papers as links.

    >>> linked("(arXiv:2306.14048)")
    '([arXiv:2306.14048](https://arxiv.org/abs/2306.14048))'
    """
    return re.sub(r"\barXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def departures(module: ModuleType) -> str:
    """The paragraph of a module's docstring that says where the method leaves the official code."""
    paragraphs = (" ".join(part.split()) for part in (module.__doc__ or "").split("\n\n"))
    return "\n\n".join(part for part in paragraphs if part.startswith("Differs"))


def policy_section(name: str, cls: type[Any]) -> str:
    module = sys.modules[cls.__module__]
    rows: list[Mapping[str, Any]] = [*options(cls)]
    columns = {"Option": "option", "Default": "default", "Meaning": "meaning"}
    parts = [
        first_paragraph(module) or first_paragraph(cls),
        departures(module),
        markdown_table(columns, rows) if rows else "",
    ]
    return f"### `{name}`\n\n" + "\n\n".join(linked(part.rstrip()) for part in parts if part) + "\n"


def question(package: ModuleType) -> str:
    """What an axis decides: the first paragraph of its package, without the name that it starts with."""
    text = re.sub(r"^\w+: ", "", first_paragraph(package))
    return text[:1].upper() + text[1:]


BUDGETS = (
    "A budget is a number of tokens (`64`), or a fraction of the prompt (`0.25`). In a conversation that is a fraction of all "
    "prompts so far: generated tokens do not raise it, though what is kept of them counts against it. So after long answers a "
    "fraction leaves little, and a number of tokens says better what is meant."
)


def policies_page(catalogue: Mapping[str, str], load: Load) -> str:
    """Every policy in the tree, by axis."""
    page = f"# Policies\n\nWritten by `make docs` from the docstrings of the policies; edit those.\n\n{BUDGETS}\n"
    for axis in dict.fromkeys(catalogue.values()):
        classes = {name: load(name)[1] for name, its_axis in sorted(catalogue.items()) if its_axis == axis}
        package = sys.modules[next(iter(classes.values())).__module__.rpartition(".")[0]]
        page += f"\n## {axis.capitalize()}\n\n{question(package)}\n"
        page += "".join(f"\n{policy_section(name, cls)}" for name, cls in classes.items())
    return page


def presets_section() -> str:
    """The names that stand for choices on several axes."""
    from kvengine.presets import PRESETS

    page = "\n## Presets\n\nNames that stand for choices on several axes; more may be added with `+`.\n"
    for name, preset in PRESETS.items():
        meaning = " ".join(inspect.cleandoc(preset.text.__doc__ or "").partition(">>>")[0].split())
        known = ", ".join(f"`{option}`" for option in preset.options)
        page += f"\n### `{name}`\n\n{linked(meaning)}\n\n`{name}` is `{preset.text({})}`. "
        page += f"Options, those of its parts: {known}.\n"
    return page


# Combinations

NULLS = ("uniform", "exact", "full", "dense", "all", "device")  # combine with everything by definition


def refusal(a: str, b: str) -> str | None:
    """Why two policies cannot be combined; None if they can."""
    from kvengine.errors import UnsupportedPolicy
    from kvengine.stack import Stack

    try:
        Stack.parse(f"{a} + {b}")
    except UnsupportedPolicy as reason:
        return str(reason)
    return None


def combinations_page(catalogue: Mapping[str, str]) -> str:
    """Every pair of policies of different axes: works, or the number of the reason why not."""
    names = [name for name in catalogue if name not in NULLS]
    reasons: dict[str, int] = {}
    lines = [["", *(f"`{b}`" for b in names)], ["---"] * (len(names) + 1)]
    for a in names:
        line = [f"`{a}`"]
        for b in names:
            why = None if catalogue[a] == catalogue[b] else refusal(a, b)
            line.append("" if catalogue[a] == catalogue[b] else "yes" if why is None else f"[{number(reasons, why)}]")
        lines.append(line)
    rows = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    notes = "".join(f"{n}. {why}\n" for why, n in reasons.items())
    return (
        "# Which policies combine\n\nWritten by `make docs` by asking the parser; `tests/test_pairs.py` runs every pair that "
        f"says yes. A stack has one policy per axis, so pairs of one axis are left blank.\n\n{rows}\n## Why not\n\n{notes}"
        f"\n{recorded_section(names)}"
    )


def recorded_section(names: list[str]) -> str:
    """Which policies' decode steps can be recorded."""
    from kvengine.fixed import refusal as why_not
    from kvengine.stack import Stack

    reasons = {name: why_not(Stack.parse(name)) for name in names}
    fine = ", ".join(f"`{name}`" for name, why in reasons.items() if why is None)
    rows = "".join(f"| `{name}` | {why} |\n" for name, why in reasons.items() if why is not None)
    return (
        "## Decode steps that can be recorded\n\n`kvengine.compile_decode` takes every stack that is made of these, and "
        f"of the null choices: {fine}. `tests/test_compiled.py` replays a recording of each.\n\nIt refuses:\n\n"
        f"| policy | why |\n| --- | --- |\n{rows}\n`host(resident=…, keep='lru')` is refused too: which pages the device has is "
        "known to the host alone there. So are models with layers whose cache is transformers' own and grows by moving "
        "(attention in chunks, a window beside states), with rotations that follow the longest position where the host looks "
        "at it (`dynamic`; in transformers 5.17 `longrope` too), with a mask of their own, with latents whose weights are "
        "quantised, off-loaded or have an adapter, or on several devices.\n"
    )


def number(reasons: dict[str, int], why: str) -> int:
    return reasons.setdefault(why, len(reasons) + 1)


# Files


def with_tables() -> dict[Path, str]:
    """Every Markdown file that holds a table, as it should read."""
    texts = {path: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    return {path: fill(text) for path, text in texts.items() if BLOCK.search(text)}


def pages() -> dict[Path, str]:
    """Every generated file and its text."""
    from kvengine.policies import catalogue, load

    return {
        **with_tables(),
        ROOT / "docs" / "policies.md": policies_page(catalogue(), load) + presets_section(),
        ROOT / "docs" / "combinations.md": combinations_page(catalogue()),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        path.write_text(text)
        print(path.relative_to(ROOT))
