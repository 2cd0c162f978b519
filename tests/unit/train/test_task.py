"""A Task is found by the word that a user types, loaded once, and given its batch."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.errors import ConfigError, DataError
from shoal.train import Task
from shoal.train.task import find_source_file, find_task, get_source, load_data, make_task, unload_if_changed

FILE = """
from beside import WIDTH
from shoal.train import Task
class Mine(Task):
    def __init__(self, *, width=WIDTH): self.width = width
class _Hidden(Task): pass
def made(**args): return Mine(**args)
def other(): return 3
def fussy(*, one): raise TypeError("one is too few")
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    Path("mine.py").write_text(FILE)
    Path("beside.py").write_text("WIDTH = 5\n")
    Path("jobs").mkdir()
    Path("jobs/recipe.py").write_text(FILE)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_a_file_a_recipe_and_a_module_are_found() -> None:
    assert find_task("mine.py").__name__ == "Mine"  # the only one that is meant to be seen
    assert find_task("mine.py:Mine") is find_task("mine.py:Mine")  # a file is loaded once
    assert find_task("recipe").__name__ == "Mine"
    assert find_task("train_task:Toy").__name__ == "Toy"
    assert find_source_file("recipe") == Path("jobs/recipe.py").resolve()
    assert find_source_file("train_task:Toy") is None


def test_a_recipe_that_comes_with_shoal_is_found_in_any_folder() -> None:
    ours = Path(__file__).parents[3] / "jobs/forecaster.py"
    assert find_source_file("forecaster") == ours
    Path("forecaster.py").write_text(FILE)  # a module of the user's own
    sys.path.insert(0, str(Path.cwd()))
    assert find_source_file("forecaster") is None
    Path("jobs/forecaster.py").write_text(FILE)
    assert find_source_file("forecaster") == Path("jobs/forecaster.py").resolve()


@pytest.mark.parametrize("name", ["mine.py", "mine.v2.py", "my task-2.py"])
def test_what_lies_beside_the_file_can_be_imported_and_its_classes_travel(name: str) -> None:
    Path(name).write_text(FILE)
    task = make_task(f"{name}:Mine", {})
    assert task.width == 5  # type: ignore[attr-defined]
    assert pickle.loads(pickle.dumps(task)).width == 5


def test_a_file_that_was_changed_is_loaded_again_where_something_new_begins() -> None:
    first = find_task("mine.py:Mine")
    unload_if_changed("mine.py:Mine")
    assert find_task("mine.py:Mine") is first
    Path("mine.py").write_text(FILE.replace("width=WIDTH", "width=7"))
    assert find_task("mine.py:Mine") is first  # what has begun goes on with what it began with
    unload_if_changed("mine.py:Mine")
    assert make_task("mine.py:Mine", {}).width == 7  # type: ignore[attr-defined]
    assert "width=7" in (get_source("mine.py:Mine") or "")
    Path("mine.py").write_text("class Mine(")
    unload_if_changed("mine.py:Mine")
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"mine\.py does not load: SyntaxError"):
            find_task("mine.py:Mine")
    Path("mine.py").unlink()
    for word in ("mine.py:Mine", "recipe", "train_task:Toy", "nowhere.py:Mine", ""):
        unload_if_changed(word)


def test_a_module_that_was_changed_is_loaded_again_for_each_task_also_from_a_folder_without_init() -> None:
    Path("namespace").mkdir()
    for width in (8, 64, 512):
        Path("namespace/sizes.py").write_text(f"WIDTH = {width}\n")
        for name in ("first", "second")[width == 512 :]:
            text = "import shoal\nfrom namespace import sizes\nclass Mine(shoal.Task):\n    width = sizes.WIDTH\n"
            Path(f"{name}.py").write_text(text)
            unload_if_changed(f"{name}.py:Mine")
            assert find_task(f"{name}.py:Mine").width == width  # type: ignore[attr-defined]


def test_a_file_that_trains_itself_while_it_is_loaded_is_told_so() -> None:
    Path("mine.py").write_text(f"{FILE}\nfrom shoal.train.task import make_task\nmake_task('mine.py:Mine', {{}})\n")
    with pytest.raises(ConfigError, match='put what starts the training under `if __name__ == "__main__":`'):
        make_task("mine.py:Mine", {})


def test_a_task_of_the_program_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"__main__.*nobody else could build.*a file of its own"):
        find_task("__main__:Mine")


def test_a_function_may_make_a_task_and_nothing_else() -> None:
    assert type(make_task("mine.py:made", {"width": 2})).__name__ == "Mine"
    with pytest.raises(ConfigError, match=r"gives a int, not a shoal\.train\.Task"):
        make_task("mine.py:other", {})
    with pytest.raises(ConfigError, match=r"refused them.*one is too few"):
        make_task("mine.py:fussy", {"one": 1})


def test_the_inputs_of_each_kind_of_batch() -> None:
    one = torch.zeros(1)
    two = torch.ones(1)
    three = torch.ones(2)
    assert Task().inputs(one) == (one,)
    assert Task().inputs((one, two, three)) == (one, two)
    assert Task().inputs([one, two]) == (one,)
    assert Task().inputs({"inputs": one, "target": two}) == (one,)
    with pytest.raises(ConfigError, match="has no 'inputs', but x, y"):
        Task().inputs({"x": one, "y": two})


def test_data_that_cannot_be_opened_is_a_data_error() -> None:
    class Gone(Task):
        def data(self) -> Any:
            return Path("nowhere.npy").open()

    with pytest.raises(DataError, match=r"Gone\.data could not read it: FileNotFoundError.*nowhere\.npy") as raised:
        load_data(Gone(), "mine.py:Gone")
    assert str(Path.cwd()) in raised.value.remedy
