"""The environment that a run names: what cannot be made, raises, or is another game is said in a line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.actor.environment import make_environment, reset_environment
from shoal.errors import ConfigError
from shoal.flows.rl_policy import inspect_environment
from shoal.rl.spec import RLSpec

GAMES = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Discrete

class Game(gymnasium.Env):
    observation_space, action_space = Box(-1, 1, (4,), np.float32), Discrete(2)
    def __init__(self, fault=""):
        self.fault = fault
        if fault == "init":
            raise RuntimeError("no display")
    def reset(self, seed=None, options=None):
        if self.fault == "reset":
            raise OSError("no joystick")
        if self.fault == "alone":
            return np.zeros(4, np.float32)
        if self.fault == "shape":
            return np.zeros(5, np.float32), {}
        return np.zeros(4, np.float32), {}
    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, True, {}

for fault in ("", "init", "reset", "alone", "shape"):
    gymnasium.register(f"Fault{fault}-v0", entry_point=Game, kwargs={"fault": fault})
"""


@pytest.fixture(autouse=True)
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "some_games.py").write_text(GAMES)
    (tmp_path / "broken_games.py").write_text("import no_such_physics\n")
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("NoSuch-v0", r"env = 'NoSuch-v0': cannot be made: .*NoSuch.*name one that gymnasium knows"),
        (
            "no_such_games:A-v0",
            r"there is no module 'no_such_games' in /.*, and none is installed. run it in the folder",
        ),
        ("broken_games:A-v0", r"raised ModuleNotFoundError: No module named 'no_such_physics'"),
        ("some_games:Faultinit-v0", r"raised RuntimeError: no display \(some_games\.py:10\)"),
    ],
)
def test_one_that_cannot_be_made_is_refused_by_its_own_words(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_environment(name)


def test_a_job_finds_the_modules_of_the_folder_that_it_is_run_in(tmp_path: Path) -> None:
    job = Path(__file__).parents[2] / "jobs" / "actor_learner.py"
    words = [sys.executable, str(job), "env=some_games:Fault-v0", "--check"]
    checked = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_one_that_cannot_begin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env = 'F': raised OSError: no joystick \(some_games\.py:13\)"):
        reset_environment(make_environment("some_games:Faultreset-v0"), "F")
    assert reset_environment(make_environment("some_games:Fault-v0"), "F")[0].shape == (4,)


@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")  # it warns of both, and goes on
@pytest.mark.parametrize(("fault", "shape"), [("alone", r"\(\)"), ("shape", r"\(5,\)")])
def test_one_that_begins_with_what_no_actor_could_send_is_refused(fault: str, shape: str) -> None:
    said = rf"begins with what is not in its observation_space: {shape}, expected \(4,\)\. .* reset returns"
    with pytest.raises(ConfigError, match=said):
        inspect_environment(RLSpec(env=f"some_games:Fault{fault}-v0"))
    inspect_environment(RLSpec(env="some_games:Fault-v0"))
