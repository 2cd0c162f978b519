"""What the Makefile installs for each of its commands, with which Python, and what it says without one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal_program import ROOT

MAKE = str(shutil.which("make"))
INSTALLED = re.compile(r"-e '\.\[(\w+)\]'")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder in which nothing is installed."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "tests", "clients"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "bin").mkdir()
    return tmp_path


def make(clone: Path, *words: str, path: str = os.environ["PATH"]) -> str:
    ran = subprocess.run([MAKE, *words], cwd=clone, env={"PATH": path}, capture_output=True, text=True, check=False)
    return ran.stdout


def add_python(path: Path, status: int) -> None:
    """With status 0, one that could make environments. It says which module it is to run, and fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'#!/bin/sh\n[ "$1" != -m ] && exit {status}\necho "{path.name} $*"; exit 1\n')
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("target", "extras"),
    [("demo", ["cluster"]), ("recommender", ["recommender"]), ("test", ["cluster", "dev"])],
)
def test_a_command_installs_what_it_needs_once(clone: Path, target: str, extras: list[str]) -> None:
    assert INSTALLED.findall(make(clone, "-n", target)) == extras
    (clone / ".venv").mkdir()
    for extra in extras:
        (clone / ".venv" / f".{extra}").touch()
    assert INSTALLED.findall(make(clone, "-n", target)) == []


def test_the_newest_python_that_runs_makes_the_environment_and_stays(clone: Path) -> None:
    for name, status in (("python3.13", 127), ("python3.12", 0), ("python3.11", 0)):  # as pyenv's name of none
        add_python(clone / "bin" / name, status)
    assert "python3.12 -m venv .venv\n" in make(clone, "setup", path=str(clone / "bin"))
    add_python(clone / ".venv/bin/python", 0)
    assert "python -m venv .venv\n" in make(clone, "setup", path=str(clone / "bin"))  # it was interrupted, or lacks pip
    add_python(clone / ".venv/bin/pip", 0)
    assert "python -m pip install" in make(clone, "setup", path=str(clone / "bin"))
    assert "python='.venv/bin/python'" in make(clone, "-n", "test", path=str(clone / "bin"))


def test_without_a_python_it_says_how_to_get_one(clone: Path) -> None:
    said = make(clone, "demo", path=str(clone / "bin"))
    for command in ("apt install python3-venv", "dnf install python3.13", "brew install python@3.13", "make PYTHON="):
        assert command in said
    assert "installing" not in said
