"""What `shoal new` writes runs, and its own tests pass, under the name that was given."""

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.libs.start.command import NEXT, PAGES, write_template
from typed import said

DOCS = Path(__file__).resolve().parents[3] / "docs"


def run_tests(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> int:
    """Call the tests of a module in `folder`, but those with parameters; returns how many there were."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(folder))
    module = importlib.import_module(name)
    fixtures = {"tmp_path": tmp_path / "home", "monkeypatch": monkeypatch}
    tests = [each for known, each in vars(module).items() if known.startswith("test_")]
    called = [each for each in tests if inspect.signature(each).parameters.keys() <= fixtures.keys()]
    for each in called:
        each(**{known: fixtures[known] for known in inspect.signature(each).parameters})
    for known in set(sys.modules) - before:
        if str(folder) in str(getattr(sys.modules[known], "__file__", "")):
            del sys.modules[known]
    return len(called)


@pytest.mark.parametrize(
    ("kind", "name", "num_tests"), [("task", "digits", 1), ("actor", "paddle", 2), ("endpoint", "near_words", 2)]
)
def test_the_files_run_and_their_tests_pass(
    kind: str, name: str, num_tests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = said("new", kind, name)
    assert f"{name}.py is written" in shown
    assert f"docs/{PAGES[kind]}" in shown
    assert "my_" not in shown
    assert run_tests(f"test_{name}", tmp_path, monkeypatch, tmp_path) == num_tests


def test_a_library_is_a_package_with_a_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_template("library", "harbour", tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "harbour"))
    assert run_tests("test_harbour", tmp_path / "harbour" / "tests", monkeypatch, tmp_path) == 2


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    (tmp_path / "test_digits.py").write_text("mine")
    with pytest.raises(ConfigError, match=r"test_digits\.py is there already"):
        write_template("task", "digits", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["test_digits.py"]


@pytest.mark.parametrize("name", ["9x", "class", "../up", "Digits", ""])
def test_a_name_is_a_module_s(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no name of a module"):
        write_template("task", name, tmp_path)


def test_each_kind_has_its_page() -> None:
    assert PAGES.keys() == NEXT.keys()
    assert [page for page in PAGES.values() if not (DOCS / page.partition("#")[0]).is_file()] == []
