"""Examples in docstrings run, and what docs/build.py writes is what the files hold."""

import ast
import builtins
import doctest
import importlib
import importlib.util
import inspect
import json
import re
import textwrap
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from layout import ROOT, modules

import kvengine.evals
import kvengine.policies
import kvengine.presets


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]
    spec.loader.exec_module(module)  # type: ignore[union-attr]
    return module


build = load_build()


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name: str) -> None:
    """One import per module, under its real name: `pytest --doctest-modules` would import it twice."""
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_docstring_examples_of_the_documentation() -> None:
    assert doctest.testmod(build).failed == 0


# Tables


@pytest.mark.parametrize("path", build.with_tables(), ids=lambda path: path.name)
def test_tables_are_what_was_measured(path: Path) -> None:
    assert path.read_text() == build.with_tables()[path], "run `make docs`"


def test_a_changed_result_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "RESULTS", tmp_path)
    result = {"command": "measure", "machine": "a machine", "columns": {"Policy": "stack", "ms": "time:.1f"}}
    (tmp_path / "speed.json").write_text(
        json.dumps(result | {"rows": [{"stack": "a|b", "time": 1.25}, {"stack": "c", "time": 2}]})
    )
    text = "before\n<!-- table:speed -->\nold\n<!-- /table -->\nafter\n"
    filled = build.fill(text)
    assert "| Policy | ms |\n| --- | ---: |\n| a\\|b | 1.2 |\n| c | 2.0 |\n\n`measure` on a machine.\n" in filled
    assert "old" not in filled and filled.startswith("before\n") and filled.endswith("\nafter\n")
    assert build.fill(filled) == filled
    part = build.fill("<!-- table:speed of ms; Policy for c -->\n<!-- /table -->")
    assert "-->\n| ms | Policy |\n| ---: | --- |\n| 2.0 | c |\n\n`measure` on a machine.\n<!-- /table -->" in part


def test_a_table_without_result_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "RESULTS", tmp_path)
    assert "Not measured" in build.fill("<!-- table:none -->\n| made | up |\n<!-- /table -->")


@pytest.mark.parametrize("page", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?", page.read_text())
    assert [target for target, _ in links if not (page.parent / target).exists()] == []
    there = {target: headings(page.parent / target if target else page) for target, part in links if part}
    assert [f"{target}#{part}" for target, part in links if part and part not in there[target]] == []


def headings(page: Path) -> set[str]:
    """What a link into a page can name, as GitHub makes it of headings."""
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    }


# Policies


@dataclass(frozen=True)
class Base:
    budget: int = 64  # tokens read per head


@dataclass(frozen=True)
class Example(Base):
    """Reads the best.

    Args:
        window: newest tokens,
            which always stay
    """

    window: int = 4
    sizes: list[int] = field(default_factory=lambda: [1])
    """bytes of each part,
    largest first"""
    undescribed: float = 0.5


def test_options_are_described_wherever_the_author_described_them() -> None:
    assert build.meanings(Example) == {
        "budget": "tokens read per head",
        "window": "newest tokens, which always stay",
        "sizes": "bytes of each part, largest first",
    }


def test_a_policy_is_shown_with_its_options() -> None:
    page = build.policies_page({"example": "selection"}, lambda name: ("selection", Example))
    assert "## Selection\n" in page and "### `example`\n\n" in page
    assert "| `budget` | `64` | tokens read per head |\n" in page and "| `sizes` | `[1]` |" in page


@pytest.mark.parametrize("name", ["policies", "combinations"])
def test_what_is_generated_is_current(name: str) -> None:
    path = ROOT / "docs" / f"{name}.md"
    assert path.read_text() == pages()[path], "run `make docs`"


@cache
def pages() -> dict[Path, str]:
    """It takes seconds to try all combinations."""
    return build.pages()  # type: ignore[no-any-return]


def test_every_option_of_every_policy_says_what_it_means() -> None:
    classes = {name: kvengine.policies.load(name)[1] for name in kvengine.policies.catalogue()}
    silent = {n: [row["option"] for row in build.options(c) if not row["meaning"]] for n, c in classes.items()}
    assert {name: found for name, found in silent.items() if found} == {}


def test_every_name_that_a_policy_string_takes_is_on_the_page() -> None:
    page = (ROOT / "docs" / "policies.md").read_text()
    names = *kvengine.policies.catalogue(), *kvengine.presets.PRESETS
    assert [name for name in names if f"\n### `{name}`\n" not in page] == []


def test_every_policy_says_what_it_does() -> None:
    assert [name for name in kvengine.policies.catalogue() if not summary(name)] == []


def summary(name: str) -> str:
    cls = kvengine.policies.load(name)[1]
    return build.first_paragraph(cls) or build.first_paragraph(importlib.import_module(cls.__module__))


# Code in the pages


def python_blocks(page: str) -> list[str]:
    """The Python code blocks of a Markdown file, in order, indented ones included."""
    blocks = re.findall(r"^ *```python\n(.*?)^ *```", (ROOT / page).read_text(), re.DOTALL | re.MULTILINE)
    return [textwrap.dedent(block) for block in blocks]


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]
SNIPPETS = {f"{page}-{i}": (page, block) for page in PAGES for i, block in enumerate(python_blocks(page))}
RUN = {"README.md-0": "answer", "docs/speculation.md-0": "out", "docs/gpu.md-0": "decoder"} | {
    f"docs/storage.md-{i}": name for i, name in enumerate(("found", "more"))
}
"""Snippets that are run, with a name that is there afterwards. The others: a policy's file, looked at below, and what needs
lm-evaluation-harness and its data, looked at where that is installed (tests/evals/test_lm_eval.py)."""


@pytest.mark.parametrize("name", SNIPPETS)
def test_a_snippet_binds_what_it_uses(name: str) -> None:
    """Who pastes it has nothing but it."""
    tree = ast.parse(SNIPPETS[name][1])
    nodes = list(ast.walk(tree))
    bound = {
        alias.asname or alias.name.partition(".")[0] for n in nodes if isinstance(n, ast.Import) for alias in n.names
    }
    bound |= {alias.asname or alias.name for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}
    bound |= {n.name for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)} | set(dir(builtins))
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    used = [n for n in nodes if isinstance(n, ast.Name)]
    bound |= {n.id for n in used if isinstance(n.ctx, ast.Store)}
    assert {n.id for n in used} - bound == set()


def test_every_snippet_is_run_or_looked_at() -> None:
    assert SNIPPETS.keys() == RUN.keys() | {"CONTRIBUTING.md-0", "docs/evaluation.md-0"}


@pytest.mark.parametrize("name", RUN)
def test_a_snippet_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(SNIPPETS[name][1], name, "exec"), names)
    assert names[RUN[name]] is not None
    if name == "README.md-0":
        assert "4817263" in capsys.readouterr().out


def test_the_policy_of_contributing_fits_the_interface() -> None:
    names: dict[str, Any] = {"__name__": "sparse_past"}
    exec(compile(python_blocks("CONTRIBUTING.md")[0], "CONTRIBUTING.md", "exec"), names)
    policy, interface = names["SparsePast"], names["Retention"]
    own = {name for name, value in vars(policy).items() if inspect.isfunction(value) and not name.startswith("_")}
    assert issubclass(policy, interface) and own
    for name in own:
        assert list(inspect.signature(getattr(policy, name)).parameters) == list(
            inspect.signature(getattr(interface, name)).parameters
        )
