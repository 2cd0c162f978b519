"""`make test`: it runs every stage, ends with the status of the first that failed, and says where the time went."""

import os
import subprocess
import sys
from pathlib import Path

import suite
from shoal_program import ROOT

SUITE = "import sys; sys.path.insert(0, 'tests'); import suite; sys.exit(suite.main(sys.argv[1:]))"


def test_a_stage_that_fails_hides_no_other_and_its_status_is_kept(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text("from suite import *\n" + REGISTER)
    (tmp_path / "test_good.py").write_text("def test_it(): pass\ndef test_that(): pass\n")
    (tmp_path / "test_bad.py").write_text(BAD)
    bad, good = (f"--rootdir {tmp_path} {tmp_path}/{name}" for name in ("test_bad.py", "test_good.py"))
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests")}
    command = [sys.executable, "-c", SUITE, bad, good]
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    lines = ran.stdout.rpartition("where ")[2].splitlines()
    assert [line.rpartition(" (")[2] for line in lines[1:3]] == ["1 tests, exit status 1)", "2 tests)"]
    assert float(lines[1].split()[2]) >= 1  # the child's processor seconds count
    seconds, _, test = lines[4].split()
    assert int(seconds) >= 1
    assert test.endswith("test_bad.py::test_it")


BAD = """
import subprocess, sys
BUSY = "import time\\nwhile time.process_time() < 1: pass"

def test_it():
    subprocess.run([sys.executable, "-c", BUSY])
    raise ValueError
"""
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


def test_no_two_files_of_tests_have_one_name() -> None:
    """pytest imports them by it, and refuses the second one where both are run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


def test_a_soak_of_a_change_has_the_files_that_import_what_changed() -> None:
    files = [ROOT / "tests/contracts/test_suite.py", ROOT / "tests/contracts/test_imports.py"]
    assert suite.files_about(["tests/suite.py"], files) == files[:1]
    assert suite.files_about(["tests/contracts/test_imports.py", "README.md"], files) == files[1:]
    assert suite.files_about(["docs/store.md"], files) == []
