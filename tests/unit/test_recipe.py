"""From words to a spec: what the recipe says, what a resumed run had, and what is typed, in this order."""

from __future__ import annotations

from pathlib import Path

import pytest

import shoal.runs
from shoal.errors import ConfigError, RunError
from shoal.train.launch.overrides import load_recipe, spec_from_overrides
from shoal.train.spec import TrainSpec

RECIPE = """
from shoal.train import Task, TrainSpec
class Mine(Task): pass
def spec():
    return TrainSpec.parse({"task": __file__, "batch_size": 48, "stop": {"epochs": 5}, "name": "own"})
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "jobs").mkdir()


def test_without_a_recipe_there_are_the_defaults_and_the_words() -> None:
    Path("plain.py").write_text("from shoal.train import Task\nclass Mine(Task): pass\n")
    spec = spec_from_overrides(["task=plain.py:Mine", "batch_size=7", "stop.epochs=2", "parallel=fsdp", "workers=2"])
    assert (spec.task, spec.batch_size, spec.stop.epochs, spec.parallel.shard) == ("plain.py:Mine", 7, 2, True)
    assert spec_from_overrides([]) == TrainSpec()
    assert load_recipe("not.installed:Mine") == TrainSpec(task="not.installed:Mine")


def test_a_recipe_speaks_before_the_words() -> None:
    Path("jobs/mine.py").write_text(RECIPE)
    spec = spec_from_overrides(["task=mine", "batch_size=96"])
    assert (spec.task, spec.batch_size, spec.stop.epochs, spec.name) == ("mine", 96, 5, "own")
    assert load_recipe("jobs/mine.py:Mine").task == "jobs/mine.py:Mine"
    assert spec_from_overrides(["task=other", "task=mine"]).name == "own"  # the last word counts


def test_a_recipe_that_gives_something_else_is_refused() -> None:
    Path("jobs/wrong.py").write_text("def spec():\n    return {}\n")
    with pytest.raises(ConfigError, match=r"wrong.py's spec\(\) gave a dict"):
        load_recipe("wrong")


def test_a_resumed_run_is_as_it_was_recorded_but_for_the_words() -> None:
    recorded = TrainSpec.parse({"task": "gone.py:Mine", "batch_size": 48, "stop": {"epochs": 5}, "clip_norm": 1.0})
    with shoal.runs.create("train", recorded.to_yaml(), "one"):
        pass
    spec = spec_from_overrides(["resume=one", "stop.epochs=9", "parallel=ddp", "workers=2"])
    assert (spec.resume, spec.task, spec.batch_size, spec.clip_norm) == ("one", "gone.py:Mine", 48, 1.0)
    assert (spec.stop.epochs, spec.workers) == (9, 2)
    with pytest.raises(RunError):
        spec_from_overrides(["resume=two"])
