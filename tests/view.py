"""Lay the repository out as installed, as symlinks under build/view: static tools cannot see editable installs."""

import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def lay_out(view: Path) -> None:
    """Replace the folder `view` by one in which `kvengine.policies` is found at kvengine/policies, and so on."""
    packages: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-dir"]
    shutil.rmtree(view, ignore_errors=True)
    for package, folder in sorted(packages.items()):
        target = view.joinpath(*package.split("."))
        target.mkdir(parents=True)
        for entry in (ROOT / folder).iterdir():
            (target / entry.name).symlink_to(entry)


if __name__ == "__main__":
    lay_out(ROOT / "build" / "view")
