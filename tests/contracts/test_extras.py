"""Who lacks an optional library is told in one line which extra brings it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def test_each_extra_that_is_named_exists() -> None:
    sources = [*(ROOT / "platform").rglob("*.py"), *(ROOT / "jobs").glob("*.py")]
    named = {name for path in sources for name in re.findall(r'needs_extra\("(\w+)"\)', path.read_text())}
    assert named
    assert named <= EXTRAS.keys()


def test_the_table_of_extras_names_each() -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text()
    _, _, table = page.partition("| extra | for |\n|---|---|\n")
    rows = [line.split("|")[1] for line in table.partition("\n\n")[0].splitlines()]
    assert rows[0].strip() == "none"
    assert sorted(name for row in rows for name in re.findall(r"`(\w+)`", row)) == sorted(EXTRAS)


def test_the_cluster_has_all_that_a_user_needs() -> None:
    assert "shoal[client,data,gym,recipes,report]" in EXTRAS["cluster"]


# What is missing, where a user meets it, and the extra that brings it.
MISSING = [
    ("httpx2", "import shoal.client", "client"),
    ("h5py", "from shoal.data.formats import Hdf5", "data"),
    ("PIL", "from shoal.data.formats import ImageFolder", "data"),
    ("pyarrow", "from shoal.data.formats import Parquet", "data"),
    ("pyarrow", "from shoal.data.formats import Arrow", "data"),
    ("pandas", "from shoal.runs.run_reader import _to_frame; _to_frame([], [])", "data"),
    ("jinja2", "from shoal.runs.report.report import _template; _template()", "report"),
    ("matplotlib", "from shoal.runs.report.plots import draw_wide_plot; draw_wide_plot(None)", "report"),
    ("tensorboard", "from shoal.runs.record.tensorboard_writer import EventFile; EventFile(None, 1)", "report"),
    ("onnx", "from shoal.rl.policy_graph import _export; _export(None, None, '')", "export"),
    ("sklearn", "from shoal.train.task import make_task; make_task('tabular', {}).data()", "recipes"),
]
PROGRAM = f"""
import sys
import torch
for library, program, _ in {MISSING}:
    sys.modules[library] = None  # an import of it raises ModuleNotFoundError
    try:
        exec(program)
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("imported")
"""


def test_a_missing_library_names_its_extra() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, cwd="/", check=True)
    said = done.stdout.splitlines()
    assert len(said) == len(MISSING)
    for line, (library, program, extra) in zip(said, MISSING, strict=True):
        expected = rf"MissingExtra {library}[\w.]* is not installed: pip install 'CHECKOUT\[{extra}\]'.*"
        assert re.fullmatch(expected, line), (program, line)


def test_the_program_without_the_cluster_says_what_it_lacks_in_one_line() -> None:
    code = "import sys; sys.modules['click'] = None\nfrom shoal.__main__ import main; main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/")
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: click is not installed: pip install 'CHECKOUT\[cluster\]'.*\n", done.stderr)
