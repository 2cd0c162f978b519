"""`make test`: it ends with the status of the stage that failed, and says where the time went."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import suite
from shoal_program import ROOT

SUITE = "import sys; sys.path.insert(0, 'tests'); import suite; sys.exit(suite.main(sys.argv[1:]))"


def test_the_first_stage_that_fails_is_the_last_and_its_status_is_kept(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from suite import *\n" + REGISTER)
    (tmp_path / "test_good.py").write_text("def test_it(): pass\ndef test_that(): pass\n")
    (tmp_path / "test_bad.py").write_text("import time\ndef test_it():\n    time.sleep(0.6)\n    raise ValueError\n")
    good, bad, never = (f"--rootdir {tmp_path} {tmp_path}/{name}" for name in ("test_good.py", "test_bad.py", "none"))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", SUITE, good, bad, never]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    told = ran.stdout.rpartition("where ")[2].splitlines()
    assert [line.split()[-2:] for line in told[1:3]] == [["(2", "tests)"], ["(1", "tests)"]]
    seconds, _, file = told[4].split()
    assert int(seconds) >= 1
    assert file.endswith("test_bad.py")


REGISTER = """
import os
from pathlib import Path

def pytest_configure(config):
    config.pluginmanager.register(Durations(Path(os.environ[DURATIONS])))
"""


def test_every_folder_of_tests_is_in_one_stage() -> None:
    named = [word for words in suite.STAGES for word in words.split() if word.startswith("tests/")]
    files = (ROOT / "tests").rglob("test_*.py")
    assert sorted(named) == sorted({f"tests/{path.relative_to(ROOT / 'tests').parts[0]}" for path in files})


def test_the_ten_slowest_files_are_told_from_the_slowest_on() -> None:
    seconds = {f"tests/unit/test_{number:02}.py": float(number) for number in range(1, 20)}
    lines = suite.describe([suite.Stage("-n 2 tests/unit", 31.4, 0, 190, seconds)]).splitlines()
    assert lines[:2] == ["where 31 s went:", "     31 s  tests/unit (190 tests)"]
    assert [line.split()[-1] for line in lines[3:]] == [
        f"tests/unit/test_{number:02}.py" for number in range(19, 9, -1)
    ]


@pytest.mark.parametrize("num_stages", [0, 2])
def test_what_left_nothing_is_told_all_the_same(num_stages: int) -> None:
    stages = [suite.Stage("tests/hosts", 2.0, 2)] * num_stages
    assert suite.describe(stages).startswith(f"where {2 * num_stages} s went:")
