"""Where the packages of the repository lie, as pyproject.toml declares them and as they are on disk."""

import importlib
import pkgutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FOLDERS = {package: ROOT / folder for package, folder in PYPROJECT["tool"]["setuptools"]["package-dir"].items()}


def packages_on_disk() -> set[str]:
    return {
        ".".join((package, *init.parent.relative_to(folder).parts))
        for package, folder in FOLDERS.items()
        for init in folder.rglob("__init__.py")
    }


def modules() -> list[str]:
    """Every module and package, by the name it is imported under. `walk_packages` would miss the mapped folders."""
    packages = sorted(packages_on_disk())
    inside = (f"{p}.{m.name}" for p in packages for m in pkgutil.iter_modules(importlib.import_module(p).__path__))
    return sorted({*packages, *inside})


def files_in_packages() -> set[str]:
    """What a wheel must hold, as paths inside it."""
    return {
        "/".join((*package.split("."), *path.relative_to(folder).parts))
        for package, folder in FOLDERS.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
