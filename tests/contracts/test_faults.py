"""tests/faults.json: faults that were named once, each with a change that brings it back, and the tests that find it.

    fault          what goes wrong, in a sentence
    named          the page, or the line of the changelog, that says so
    file, find     where the change is: a text that stands there once
    replace        what takes its place
    tests          which fail then

`make soak` brings each back in a copy of the tree. See docs/architecture/tests.md.
"""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import suite
from libraries import LIBRARIES

ROOT = suite.ROOT
FAULTS: list[dict[str, Any]] = [
    each
    for each in json.loads(suite.FAULTS_FILE.read_text())
    if {*re.findall(r"/libs/(\w+)/", json.dumps(each))} <= LIBRARIES
]


@cache
def read(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def list_tests(file: str) -> set[str]:
    return {
        each.name for each in ast.parse(read(file)).body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_every_fault_can_be_brought_back_and_has_its_tests() -> None:
    for fault in FAULTS:
        assert list(fault) == ["fault", "named", "file", "find", "replace", "tests"], fault
        assert fault["find"] != fault["replace"], fault
        assert read(fault["file"]).count(fault["find"]) == 1, fault
        assert (ROOT / fault["named"].partition(":")[0]).is_file(), fault
        assert fault["tests"], fault
        for test in fault["tests"]:
            file, _, name = test.partition("::")
            assert name in list_tests(file), fault


def test_no_fault_is_named_twice() -> None:
    for key in (suite.name_fault, lambda each: (each["file"], each["find"], each["replace"])):
        assert Counter(map(key, FAULTS)).most_common(1)[0][1] == 1


def test_a_change_tries_faults_of_its_files_and_not_too_many() -> None:
    faults = [{"fault": f"Fault {each}.", "file": "a.py", "tests": [f"b{each % 2}.py::test"]} for each in range(100)]
    assert suite.faults_about(["c.py"], faults) == []
    assert suite.faults_about(["b1.py"], faults[:4]) == ["fault_1", "fault_3"]
    assert len(suite.faults_about(["a.py"], faults)) <= suite.MAX_FAULTS


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what tests need."""
    copy: Path = tmp_path_factory.mktemp("tree")
    for name in ("platform", "tests", "docs", "jobs", "serve_apps"):
        shutil.copytree(ROOT / name, copy / name, symlinks=True)
    shutil.copy2(ROOT / "pyproject.toml", copy)
    return copy


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=suite.name_fault)
def test_a_fault_that_comes_back_is_found(fault: dict[str, Any], tree: Path) -> None:
    file = tree / fault["file"]
    file.write_text(read(fault["file"]).replace(fault["find"], fault["replace"]))
    command = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider", *fault["tests"]]
    environment = os.environ | {"PYTHONPATH": str(tree / "platform"), suite.DURATIONS: os.devnull}
    ran = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
    shutil.copy2(ROOT / fault["file"], file)
    assert ran.returncode == pytest.ExitCode.TESTS_FAILED, f"{fault}\n{ran.stdout}"
