"""The first minutes of a new user, from a clone to the end of the demo, beside an earlier commit.

    python -m benchmarks.first_minute [--before REVISION] [--runs N] [--quick]

HEAD (not what is uncommitted) and REVISION are checked out, take turns, and are removed again. Each installs what its
demo needs in its own way (`make setup`), with the same Python, from pip's cache as it is; then `make demo` must solve
CartPole, evaluate the policy through its endpoint, and write the report. The environment is counted afterwards, with
the bytecode that the demo has left in it.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import astuple, dataclass
from importlib.metadata import distributions
from pathlib import Path

from benchmarks.before import checkout
from benchmarks.children import Child, ChildFailed, scratch
from benchmarks.result import compare, options, write

BEFORE = "f7381daa"
PYTHON = os.path.realpath(sys.executable)  # that .venv was made with
CAP_S = 3600.0  # of an installation that finds nothing in pip's cache
ENVIRONMENT = {"PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": ""}  # a new user has neither


@dataclass(frozen=True)
class FirstMinute:
    """One side, once. `again_s`: of an installation that has nothing to do."""

    install_s: float
    again_s: float
    demo_s: float
    total_s: float
    num_packages: float
    size_gib: float


def measure(revision: str, folder: Path) -> FirstMinute:
    """Raises ChildFailed where a command fails, or where the demo has shown less than it should."""
    folder.mkdir()
    environment = {**ENVIRONMENT, "SHOAL_HOME": str(folder / "home")}
    with checkout(revision, folder) as package:
        tree = package.parent

        def make(target: str) -> tuple[float, str]:
            words = ["make", "-C", str(tree), target, f"PYTHON={PYTHON}"]
            began_s = time.monotonic()
            with Child(words, folder, environment, goodbye_s=0.0) as child:
                status = child.wait(CAP_S)
                took_s = time.monotonic() - began_s
                if status:
                    raise ChildFailed(f"make {target} of {revision} ended with status {status}: {child.last_words()}")
            return took_s, "\n".join(child.output)

        install_s, _ = make("setup")
        again_s, _ = make("setup")
        demo_s, printed = make("demo")
        reports = list((folder / "home").glob("runs/*/report.html"))
        if "played through the endpoint" not in printed or not reports:
            raise ChildFailed(f"the demo of {revision} left {len(reports)} reports, and printed {printed[-2000:]}")
        packages, size_bytes = count(tree / ".venv")
        return FirstMinute(install_s, again_s, demo_s, install_s + demo_s, packages, size_bytes / 2**30)


def count(environment: Path) -> tuple[int, int]:
    """The packages beside Shoal and pip, and the bytes of all files."""
    sites = [str(path) for path in environment.glob("lib/python*/site-packages")]
    packages = {each.metadata["Name"].lower() for each in distributions(path=sites)} - {"shoal", "pip"}
    files = (path for path in environment.rglob("*") if path.is_file() and not path.is_symlink())
    return len(packages), sum(path.stat().st_size for path in files)


# In the order of FirstMinute: the row's name, its unit, its bar and whether that is a ratio or a value.
ROWS = (
    ("what the demo needs, installed from a clone", "s", 0.6, "ratio"),
    ("`make setup` where all is installed", "s", 0.1, "value"),
    ("the first `make demo`, once all is installed", "s", None, None),
    ("from a clone to the end of the demo", "s", None, None),
    ("packages that the demo needs", "packages", 130.0, "value"),
    ("the environment of the demo", "GiB", 1.8, "value"),
)


def main() -> None:
    chosen = options(__doc__, runs=3, before=BEFORE)
    ours: list[FirstMinute] = []
    before: list[FirstMinute] = []
    with scratch() as folder:
        for run in range(chosen.runs):
            sides = [(ours, "HEAD"), (before, chosen.before)]
            for found, revision in reversed(sides) if run % 2 else sides:
                found.append(measure(revision, folder / f"{revision}-{run}"))
                print(f"{revision}: {found[-1]}", flush=True)
    columns = zip(zip(*map(astuple, ours), strict=True), zip(*map(astuple, before), strict=True), strict=True)
    rows = [
        compare(name, unit, "lower", mine, theirs, f"before ({chosen.before})", bar, bar_kind)
        for (name, unit, bar, bar_kind), (mine, theirs) in zip(ROWS, columns, strict=True)
    ]
    write("first_minute", rows, chosen.results)


if __name__ == "__main__":
    main()
