"""Recipes are found by name from any folder; a spec is the recipe, a resumed run, and then what is typed."""

from pathlib import Path

import pytest

import shoal.runs
from shoal.cli.commands.serve_deploy import _parse_fields as fields_of
from shoal.cli.support.jobs import find_job
from shoal.errors import ConfigError, RunError
from shoal.train.launch.overrides import load_recipe, spec_from_overrides
from shoal.train.spec import TrainSpec

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("job", ["lenet", "jobs/lenet.py", "serve_apps/live_policy.py"])
def test_a_job_is_found_in_an_empty_folder(job: str) -> None:
    assert find_job(job) == ROOT / (job if "/" in job else f"jobs/{job}.py")


def test_a_job_of_the_users_own_has_precedence() -> None:
    mine = Path("jobs/lenet.py")
    mine.parent.mkdir()
    mine.touch()
    for job in ("lenet", "jobs/lenet.py"):
        assert find_job(job) == mine.resolve()


@pytest.mark.parametrize("job", ["jobs", "jobs/", "docs/data.md", "jobs/../README.md", ""])
def test_a_name_that_is_no_recipe_is_refused_with_those_there_are(job: str) -> None:
    with pytest.raises(ConfigError, match=r"jobs: .*actor_learner, .*forecaster, .*lenet"):
        find_job(job)


def test_a_serve_app_is_found_too() -> None:
    app = "serve_apps/trees.yaml"
    assert fields_of([app]) == [f"file={ROOT / app}"]
    Path("serve_apps").mkdir()
    Path(app).touch()
    assert fields_of([app]) == [f"file={Path(app).resolve()}"]


RECIPE = """
from shoal.train import Task, TrainSpec
class Mine(Task): pass
def spec():
    return TrainSpec.parse({"task": __file__, "batch_size": 48, "stop": {"epochs": 5}, "name": "own"})
"""


def test_without_a_recipe_there_are_the_defaults_and_the_words() -> None:
    Path("plain.py").write_text("from shoal.train import Task\nclass Mine(Task): pass\n")
    spec = spec_from_overrides(["task=plain.py:Mine", "batch_size=7", "stop.epochs=2", "parallel=fsdp", "workers=2"])
    assert (spec.task, spec.batch_size, spec.stop.epochs, spec.parallel.shard) == ("plain.py:Mine", 7, 2, True)
    assert spec_from_overrides([]) == TrainSpec()
    assert load_recipe("not.installed:Mine") == TrainSpec(task="not.installed:Mine")


def test_a_recipe_speaks_before_the_words() -> None:
    Path("jobs").mkdir()
    Path("jobs/mine.py").write_text(RECIPE)
    spec = spec_from_overrides(["task=mine", "batch_size=96"])
    assert (spec.task, spec.batch_size, spec.stop.epochs, spec.name) == ("mine", 96, 5, "own")
    assert load_recipe("jobs/mine.py:Mine").task == "jobs/mine.py:Mine"
    assert spec_from_overrides(["task=other", "task=mine"]).name == "own"  # the last word counts


def test_a_recipe_that_gives_something_else_is_refused() -> None:
    Path("jobs").mkdir()
    Path("jobs/wrong.py").write_text("def spec():\n    return {}\n")
    with pytest.raises(ConfigError, match=r"wrong': its file's spec\(\) gave a dict"):
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
