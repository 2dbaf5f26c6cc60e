"""A fresh environment, as `pip install .` makes it: milepost from its wheel, what it requires, and
nothing else.

milepost is built and installed by pip, so that what the wheel lacks is missed. What it requires is
linked from the environment of the tests, by the names that the distributions' own metadata has,
without extras: the same files as a download would bring, in seconds and without a network.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import venv
from importlib.metadata import Distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TREE: Final = Path(__file__).parents[2]
SOURCES: Final = ("client", "daemon", "pyproject.toml", "README.md", "LICENSE")
"""Of the tree, what a wheel is built from."""

BUILD_S: Final = 100


def make_environment(folder: Path) -> Path:
    """Make the environment in a folder that is not there yet; return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site_packages,) = folder.glob("lib/python*/site-packages")
    for found in required("milepost"):
        _link(found, site_packages)
        _write_scripts(found, python)
    _install(_build_wheel(folder / "wheel"), python)
    return python


def required(name: str) -> list[Distribution]:
    """Return the distributions that one requires, and these in turn, without extras."""
    found: dict[str, Distribution] = {}
    names = [name]
    while names:
        for text in importlib.metadata.distribution(names.pop()).requires or ():
            requirement = Requirement(text)
            wanted = canonicalize_name(requirement.name)
            is_asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if is_asked and wanted not in found:
                found[wanted] = importlib.metadata.distribution(wanted)
                names.append(wanted)
    return list(found.values())


def _link(found: Distribution, site_packages: Path) -> None:
    """Link what a distribution has put at the top of its site-packages."""
    installed = Path(str(found.locate_file("")))
    for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        link = site_packages / top
        if not link.exists():
            link.symlink_to(installed / top)


def _write_scripts(found: Distribution, python: Path) -> None:
    """Write a distribution's commands, such as torchrun, for this Python."""
    for entry in found.entry_points.select(group="console_scripts"):
        script = python.with_name(entry.name)
        script.write_text(
            f"#!{python}\nimport sys\nfrom {entry.module} import {entry.attr}\n"
            f"sys.exit({entry.attr}())\n"
        )
        script.chmod(0o755)


def _build_wheel(folder: Path) -> Path:
    tree = folder / "tree"
    tree.mkdir(parents=True)
    for name in SOURCES:
        if (TREE / name).is_dir():
            shutil.copytree(TREE / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(TREE / name, tree)
    _pip("wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", str(folder), str(tree))
    (wheel,) = folder.glob("*.whl")
    return wheel


def _install(wheel: Path, python: Path) -> None:
    # With its requirements: what they ask for and is not there fails.
    _pip("--python", str(python), "install", "--no-index", str(wheel))


def _pip(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=BUILD_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"pip {' '.join(arguments)}:\n{done.stdout}"
