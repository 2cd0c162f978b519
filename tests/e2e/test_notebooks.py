"""The notebooks of the tutorials: what needs no cluster runs here, and each runs from top to bottom as a soak test."""

import os
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from notebooks import FOLDER, execute, read_code
from registered import arrays_of
from shoal.cli import cli
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import describe_policy_model, inspect_environment, register_policy
from shoal.weights import WeightSnapshot
from shoal_program import ROOT, Program


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """In place of a kernel's `__main__`, in a folder of its own."""
    made = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", made)
    monkeypatch.chdir(tmp_path)
    return made


def test_a_script_becomes_a_task(module: ModuleType) -> None:
    for number, source in enumerate(read_code("from-a-script")):
        if not source.startswith("%%bash\n"):
            execute(source, module, f"<cell {number}>")
            continue
        for line in source.splitlines()[1:]:
            done = CliRunner().invoke(cli, shlex.split(line)[1:])
            assert done.exit_code == 0, (line, done.output)
    assert vars(module)["result"].metrics["loss"] < 0.3


def test_a_registered_policy_plays(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    spec = ActorLearnerSpec(env="CartPole-v1", hidden=(8,)).override(["endpoint.name=cartpole"])
    experience, _ = inspect_environment(spec)
    weights = arrays_of(describe_policy_model(spec, experience)[0].build())
    register_policy(spec, experience, WeightSnapshot.of(1, weights), "run", {"mean_return": 1, "steps": 1})
    for number, source in enumerate(read_code("use-a-model")):
        if not source.startswith("%%"):  # commands that train it
            execute(source, module, f"<cell {number}>")
    assert vars(module)["done"]
    assert float(capsys.readouterr().out.splitlines()[0]) >= 8


@pytest.mark.soak
@pytest.mark.timeout(2400)
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.iterdir()))
def test_a_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path) -> None:
    """With its own home, cluster and endpoints, by its own commands."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "SHOAL_", "PYTEST_"))}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    home = {"HOME": str(tmp_path), "SHOAL_HOME": str(tmp_path / ".shoal"), "PATH": path, "BROWSER": "true"}
    program = [sys.executable, str(ROOT / "tests" / "notebooks.py"), name]
    (tmp_path / "notebook").mkdir()
    with Program(program, env=kept | home, cwd=tmp_path / "notebook") as running:
        assert running.wait(1200) == 0, running.said
