"""The recipes that come with Shoal are found by name, from any folder; a user's own file has precedence."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal import recipes
from shoal.cli.commands.serve_deploy import _parse_fields as fields_of
from shoal.cli.support.jobs import find_job
from shoal.errors import ConfigError

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


def test_a_wheel_has_them_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = tmp_path / "site-packages/shoal/recipes"
    monkeypatch.setattr(recipes, "_PACKAGED", packaged)
    assert recipes.recipe_folder("jobs") == packaged / "jobs"  # the package alone, as Ray ships it: there is none
    assert recipes.recipe_names() == []
    (packaged / "jobs").mkdir(parents=True)
    (packaged / "jobs/mine.py").touch()
    assert recipes.recipe_names() == ["mine"]
    assert recipes.find_recipe("mine") == packaged / "jobs/mine.py"
