"""The repository keeps four packages outside `kvengine/`; these tests keep that layout honest.

Two traps have no test because nothing here can fall into them: an editable install in `strict` mode hides new files
until it is made again (the Makefile uses the default mode), and pyright skips symlinked folders (mypy is the checker).
"""

import ast
import email
import importlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import view
from layout import FOLDERS, PYPROJECT, ROOT, files_in_packages, packages_on_disk
from packaging.requirements import Requirement
from support import every

STRANGERS = {"policies", "offload", "kernels", "evals"}


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    return subprocess.run(command, cwd=cwd, env=inherited | environment, capture_output=True, text=True, timeout=300)


# What is declared


def test_every_package_on_disk_is_declared() -> None:
    """A forgotten one works in an editable install and is missing from the wheel."""
    assert packages_on_disk() == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for folder in FOLDERS.values() for path in folder.rglob("*.py")}
    assert {folder for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_constraints_pin_what_is_required() -> None:
    """Every requirement of the package and of development has one pinned version, inside the declared range."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {
        r.name.lower(): r for r in map(Requirement, (line for line in lines if line and not line.startswith("#")))
    }
    project = PYPROJECT["project"]
    for wanted in map(Requirement, (*project["dependencies"], *project["optional-dependencies"]["dev"])):
        (pin,) = pinned[wanted.name.lower()].specifier
        assert pin.operator == "==" and wanted.specifier.contains(pin.version), f"{wanted} against {pin}"


def test_constraints_name_no_build() -> None:
    """A suffix such as +cpu would shut out every other machine."""
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][A-Za-z0-9.]*", pin) for pin in pins)


# Names


def test_no_package_is_imported_under_its_folder_name() -> None:
    ours = {name for name in STRANGERS & set(sys.modules) if ROOT in Path(sys.modules[name].__file__ or "/").parents}
    assert ours == set()


def test_the_root_is_not_importable_during_tests() -> None:
    assert ROOT not in {Path(entry).resolve() for entry in sys.path}


def test_each_package_comes_from_its_folder() -> None:
    for package, folder in FOLDERS.items():
        assert Path(next(iter(importlib.import_module(package).__path__))).name == folder.name


def test_the_linter_refuses_folder_names_and_relative_imports() -> None:
    for line in ("import kernels", "from policies import selection", "from .x import y", "from ..x import y"):
        source = f'"""A file."""\n\n{line}\n\n__all__ = ["kernels", "selection", "y"]\n'
        command = (
            sys.executable,
            "-P",
            "-m",
            "ruff",
            "check",
            "--select",
            "TID",
            "--stdin-filename",
            "offload/x.py",
            "-",
        )
        found = subprocess.run(command, input=source, cwd=ROOT, capture_output=True, text=True)
        assert found.returncode == 1 and "TID25" in found.stdout, line


def test_the_view_for_static_tools_shows_every_package(tmp_path: Path) -> None:
    view.lay_out(tmp_path)
    inits = {".".join(path.parent.relative_to(tmp_path).parts) for path in find(tmp_path, "__init__.py")}
    assert inits == packages_on_disk()


def find(folder: Path, name: str) -> list[Path]:
    """`rglob` that follows symlinks."""
    return [Path(parent) / name for parent, _, files in os.walk(folder, followlinks=True) if name in files]


# Hugging Face's own `kernels`


def test_kernels_is_safe_to_import_as_a_stranger() -> None:
    """transformers imports the first `kernels` on the path; ours must then do nothing and claim nothing."""
    (docstring,) = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(docstring, ast.Expr) and isinstance(docstring.value, ast.Constant)


FAKE_KERNELS = '''
"""Stands in for the distribution of this name: every public name exists and decorates to nothing."""

class Anything:
    def __init__(self, *args, **options): ...
    def __call__(self, subject): return subject

def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Anything
'''

AT_EXIT = """
import atexit
import concurrent.futures.thread  # which cannot be imported at exit, as transformers does

def report():
    import transformers.integrations.hub_kernels
    from transformers.utils.import_utils import is_kernels_available
    import kernels
    print("AVAILABLE", is_kernels_available(), kernels.__file__)

atexit.register(report)
"""


@pytest.fixture(scope="module")
def site_with_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: a `kernels` of a version that transformers supports, and a report at exit."""
    from transformers.utils import import_utils

    version = import_utils.KERNELS_MIN_VERSION
    site = tmp_path_factory.mktemp("site")
    metadata = site / f"kernels-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: kernels\nVersion: {version}\n")
    (site / "kernels").mkdir()
    (site / "kernels" / "__init__.py").write_text(FAKE_KERNELS)
    (site / "sitecustomize.py").write_text(AT_EXIT)
    return site


def commands() -> list[tuple[str | Path, ...]]:
    return [
        (Path(sys.executable).parent / "kvengine", "--help"),
        (sys.executable, "-P", "-c", "import kvengine.kernels"),
    ]


@pytest.mark.parametrize("command", every(2, commands()), ids=["kvengine", "python -P"])
def test_the_installed_kernels_is_found_from_the_root(command: tuple[str | Path, ...], site_with_kernels: Path) -> None:
    done = run(*command, PYTHONPATH=str(site_with_kernels))
    assert f"AVAILABLE True {site_with_kernels / 'kernels' / '__init__.py'}" in done.stdout, done.stderr


def test_without_care_the_folder_hides_the_distribution(site_with_kernels: Path) -> None:
    """The control: from the root, plain `python -c` finds our folder, so the two tests above can fail."""
    script = "import kernels, os; print(kernels.__file__, flush=True); os._exit(0)"  # without the report at exit
    done = run(sys.executable, "-c", script, PYTHONPATH=str(site_with_kernels))
    assert str(ROOT / "kernels" / "__init__.py") in done.stdout


# What is shipped


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy so that the working tree stays clean."""
    copy, out = tmp_path_factory.mktemp("source") / "kvengine", tmp_path_factory.mktemp("dist")
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(
            ".venv*", ".git", "build", "dist", "runs", "__pycache__", ".*_cache", "*.egg-info"
        ),
    )
    build = f"from setuptools import build_meta as b; b.build_wheel({str(out)!r}); b.build_sdist({str(out)!r})"
    done = run(sys.executable, "-P", "-W", "ignore", "-c", build, cwd=copy)
    assert done.returncode == 0, done.stderr
    return out


def test_the_wheel_holds_every_file_of_every_package(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert names == files_in_packages()


def test_the_wheel_states_its_licence_and_python(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    fields = email.message_from_string(archive.read(metadata).decode())
    assert fields["License-Expression"] == "Apache-2.0" and fields["Requires-Python"] == ">=3.11"


def test_the_sdist_holds_the_tests_of_every_folder(built: Path) -> None:
    """By itself setuptools takes only tests/test_*.py."""
    (sdist,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sdist, built / "unpacked", filter="data")
    (top,) = (built / "unpacked").iterdir()
    expected = {path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.py")}
    assert {path.relative_to(top) for path in (top / "tests").rglob("*.py")} == expected


@pytest.mark.parametrize("inside", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["inside", "elsewhere"])
def test_the_wheel_works_without_the_repository(built: Path, tmp_path: Path, inside: bool) -> None:
    """Imported from elsewhere, and from the repository root, where `kvengine/` alone would lack its four parts."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    script = "import kvengine.policies, kvengine.kernels, kvengine.offload, kvengine.evals as e; print(e.__file__)"
    done = run(sys.executable, "-P", "-c", script, cwd=ROOT if inside else tmp_path.parent, PYTHONPATH=str(tmp_path))
    assert done.stdout.strip() == str(tmp_path / "kvengine" / "evals" / "__init__.py"), done.stderr
