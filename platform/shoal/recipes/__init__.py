"""Where the recipes are that come with Shoal: the files of `jobs/` and `serve_apps/`; and what comes beside them.

A checkout has all of it at its top, and a wheel carries it in this folder (see `setup.py`). Called by whatever looks
for a job or a task by its name. Imports none of them, and needs the standard library only.
"""

from __future__ import annotations

import shutil
from pathlib import Path

_PACKAGED = Path(__file__).parent
_KINDS = ("jobs", "serve_apps")
_CHECKOUT = Path(__file__).parents[3]


def find_packaged(name: str) -> Path:
    """Where something is that comes with Shoal: `jobs` and `serve_apps`, the recipes; `clients` of engines;
    `constraints.txt`; and in what was built `commit.txt`. A copy of the bare package has nothing of it."""
    is_checkout = _PACKAGED.parents[1].name == "platform" and not (_PACKAGED / name).exists()
    return (_CHECKOUT if is_checkout else _PACKAGED) / name


def find_recipe(name: str) -> Path | None:
    """The file that `name` means among the recipes: `lenet`, `jobs/lenet.py` or `serve_apps/live_policy.py`."""
    kind, separator, file = name.replace("\\", "/").partition("/")
    if not separator:
        path = find_packaged("jobs") / f"{name}.py"
    elif kind in _KINDS and "/" not in file:
        path = find_packaged(kind) / file
    else:
        return None
    return path if path.is_file() else None


def is_recipe(path: Path) -> bool:
    """Whether a file is a job that comes with Shoal, which `python -m shoal.recipes NAME` runs anywhere."""
    return path.resolve().parent == find_packaged("jobs").resolve()


def stage_package(folder: Path) -> Path:
    """The package as a wheel has it, with the recipes in it: itself, or of a checkout a copy in `folder`."""
    if find_packaged("jobs").is_relative_to(_PACKAGED):
        return _PACKAGED.parent
    package = folder / "shoal"
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(_PACKAGED.parent, package, ignore=ignored)
    for kind in _KINDS:
        if find_packaged(kind).is_dir():
            shutil.copytree(find_packaged(kind), package / "recipes" / kind, ignore=ignored)
    return package


def recipe_names() -> list[str]:
    """The names of the jobs."""
    return sorted(path.stem for path in find_packaged("jobs").glob("*.py"))
