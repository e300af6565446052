"""The rules that keep the tree readable: who may import whom, and how long things may get."""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from layout import FOLDERS, ROOT

LONGEST_FILE = 400
LONGEST_FUNCTION = 60

ENGINE = ("kvengine.lane", "kvengine.cache", "kvengine.hf", "kvengine.speculative", "kvengine.evals", "kvengine.cli")
FORBIDDEN = {  # who: what it may not import. Data flows policies, kernels, offload -> lane, cache -> hf -> evals
    "kvengine.policies": ENGINE,
    "kvengine.offload": ENGINE,
    "kvengine.kernels": (*ENGINE, "kvengine.stack", "kvengine.policies", "kvengine.offload"),
    "kvengine": ("kvengine.evals",),
}
BEYOND = ("kvengine.evals", "kvengine.cli")  # the outermost layer: may import everything
EDGE = ("kvengine.hf", "kvengine.speculative", *BEYOND)  # may import transformers


def module_name(path: Path) -> str:
    """The name under which the package imports a file.

    >>> module_name(ROOT / "policies" / "__init__.py")
    'kvengine.policies'
    """
    package, folder = max(
        ((package, folder) for package, folder in FOLDERS.items() if path.is_relative_to(folder)),
        key=lambda pair: len(pair[1].parts),
    )
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((package, *(part for part in parts if part != "__init__")))


FILES = {module_name(path): path for folder in FOLDERS.values() for path in sorted(folder.rglob("*.py"))}


def only_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs: blocks guarded by TYPE_CHECKING are left out."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not only_for_types(child):
            yield from walk(child)


def imports(source: str) -> set[str]:
    """The dotted names that a file imports, wherever it does. Names after `from` count as modules too."""
    found: set[str] = set()
    for node in walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add(f"{'.' * node.level}{node.module or ''}")
            found.update(f"{node.module}.{alias.name}" for alias in node.names if node.level == 0)
    return found


def under(name: str, packages: tuple[str, ...]) -> bool:
    """Whether a module is one of `packages`, or lies inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def offences(name: str, source: str) -> list[str]:
    """Imports of a module that break a rule."""
    found = imports(source)
    wrong = sorted(item for item in found if item.startswith("."))
    if not under(name, EDGE):
        wrong += sorted(item for item in found if under(item, ("transformers",)))
    for importer, targets in FORBIDDEN.items():
        if under(name, (importer,)) and not under(name, BEYOND):
            wrong += sorted(item for item in found if under(item, targets))
    return wrong


@pytest.mark.parametrize("name", FILES)
def test_imports_go_one_way(name: str) -> None:
    assert offences(name, FILES[name].read_text()) == []


@pytest.mark.parametrize(
    "name, source",
    [
        ("kvengine.policies.selection.quest", "from kvengine.lane import Lane"),
        ("kvengine.policies.selection.quest", "def f():\n    from kvengine.hf import mask"),
        ("kvengine.kernels.page_scores", "import kvengine.policies.selection"),
        ("kvengine.offload.host", "import transformers"),
        ("kvengine.cache", "from transformers.cache_utils import Cache"),
        ("kvengine.lane", "from kvengine.evals import tasks"),
        ("kvengine.lane", "from .tokens import Tokens"),
    ],
)
def test_the_rules_bite(name: str, source: str) -> None:
    assert offences(name, source) != []


@pytest.mark.parametrize(
    "name, source",
    [
        ("kvengine.hf.mask", "import transformers"),
        ("kvengine.evals.run", "import kvengine.hf"),
        ("kvengine.cli", "from kvengine.evals import tasks"),
        ("kvengine.policies.routing", "if TYPE_CHECKING:\n    from kvengine.lane import Lane"),
    ],
)
def test_the_rules_allow_what_they_should(name: str, source: str) -> None:
    assert offences(name, source) == []


def test_modules_can_be_imported_in_any_order() -> None:
    """`kvengine` itself imports nothing, so that whatever is asked for first starts the chain."""
    needs: dict[str, set[str]] = {}
    for name, path in FILES.items():
        top = ast.Module([node for node in ast.parse(path.read_text()).body if not only_for_types(node)], [])
        top.body = [node for node in top.body if isinstance(node, ast.Import | ast.ImportFrom)]
        needs[name] = {one for one in imports(ast.unparse(top)) & set(FILES) if not name.startswith(one)}
    TopologicalSorter(needs).prepare()


@pytest.mark.parametrize("name", FILES)
def test_files_stay_short(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= LONGEST_FILE


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its docstring."""
    docstring = function.body[0] if ast.get_docstring(function) is not None else None
    length = (function.end_lineno or function.lineno) - function.lineno + 1
    return length - ((docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0)


@pytest.mark.parametrize("name", [name for name in FILES if not under(name, ("kvengine.kernels",))])
def test_functions_stay_short(name: str) -> None:
    functions = (
        n for n in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    assert {f.name: body_lines(f) for f in functions if body_lines(f) > LONGEST_FUNCTION} == {}


@pytest.mark.parametrize("name", FILES)
def test_the_library_raises_typed_errors_and_never_asserts(name: str) -> None:
    """`python -O` removes assert statements, and an AssertionError tells a user nothing."""
    asserts = [node.lineno for node in ast.walk(ast.parse(FILES[name].read_text())) if isinstance(node, ast.Assert)]
    assert asserts == []


def test_examples_and_benchmarks_use_the_installed_names() -> None:
    """A script that imports `policies` works from the repository root and nowhere else."""
    scripts = [path for folder in ("examples", "benchmarks", "docs") for path in sorted((ROOT / folder).rglob("*.py"))]
    wrong = {
        p.name: sorted(i for i in imports(p.read_text()) if under(i, ("policies", "offload", "kernels", "evals")))
        for p in scripts
    }
    assert {name: found for name, found in wrong.items() if found} == {}
