"""Games of others: in turns by PettingZoo's AEC methods, ticks that nobody sees, parts of a Dict that are left out, and
what one step tells before a run starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, Space

from rl_setting import RecordingClient
from shoal.actor import play
from shoal.actor.environment import make_environment, pick_action, reset_environment
from shoal.cluster.job_main import job_main
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_policy import check, inspect_environment
from shoal.rl.spec import RLSpec
from shoal.wire.action_masks import find_choices

ROUNDS = 4


class Rounds:
    """Three agents in turns; an act is worth 1 for its agent, and a quarter for each other one. Observes an agent, and
    how often it has acted; even agents may not choose 1."""

    possible_agents = ("a", "b", "c")

    def observation_space(self, agent: str) -> Space[Any]:
        return Dict({"observation": Box(-10, 10, (4,), np.float32), "action_mask": Box(0, 1, (2,), np.int8)})

    def action_space(self, agent: str) -> Discrete:
        return Discrete(2)

    def reset(self, seed: int | None = None, options: object = None) -> None:
        self.agents = list(self.possible_agents)
        self.agent_selection = "a"
        self._clock = 0
        self._gains = dict.fromkeys(self.agents, 0.0)
        self._has_ended = False

    def observe(self, agent: str) -> dict[str, np.ndarray]:
        index = self.possible_agents.index(agent)
        mask = [0, 0] if self._has_ended else [1, index % 2]  # as of a finished game of chess
        seen = np.array([index, (self._clock + 2 - index) // 3, 0, 0], np.float32)
        return {"observation": seen, "action_mask": np.array(mask, np.int8)}

    def last(self, observe: bool = True) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        agent = self.agent_selection
        ends = self._has_ended and agent != "c", self._has_ended and agent == "c"
        return self.observe(agent), self._gains[agent], *ends, {}

    def step(self, action: int | None) -> None:
        agent = self.agent_selection
        if self._has_ended:
            assert action is None
            self.agents.remove(agent)
            self.agent_selection = self.agents[0] if self.agents else agent
            return
        assert action == 0 or agent == "b"
        self._gains[agent] = 0.0
        for each in self.agents:
            self._gains[each] += 1.0 if each == agent else 0.25
        self._clock += 1
        self.agent_selection = self.possible_agents[self._clock % 3]
        self._has_ended = self._clock == 3 * ROUNDS


def test_a_game_in_turns_by_aec_methods_gives_each_agent_what_it_got_until_its_own_next_turn() -> None:
    env = f"{__name__}:Rounds"
    experience, first = inspect_environment(RLSpec(env=env, hidden=()))
    assert (first.tolist(), find_choices(experience)) == ([0, 0, 0, 0], (2,))
    client = RecordingClient(experience)
    play(make_environment(env), client, seed=1, max_steps=5 * 3 * ROUNDS)
    assert len(client.segments) >= 12
    for segment in client.segments:
        agent = "abc"[int(segment.observations[0, 0])]
        assert set(segment.observations[:, 0].tolist()) == {float("abc".index(agent))}
        assert segment.observations[:, 1].tolist() == [0, 1, 2, 3, 4]
        last = {"a": 1.5, "b": 1.25, "c": 1.0}[agent]
        assert segment.rewards.tolist() == [1.5] * (ROUNDS - 1) + [last]
        assert (segment.terminated, segment.truncated) == (agent != "c", agent == "c")
        assert set(segment.actions.tolist()) <= ({0, 1} if agent == "b" else {0})


class Blinking(Rounds):
    """The same by the parallel API, of one agent, which sees every third tick; a tick is worth 1."""

    possible_agents = ("a",)
    last = observe = None  # type: ignore[assignment]

    def observation_space(self, agent: str) -> Space[Any]:
        return Box(-10, 10, (4,), np.float32)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:  # type: ignore[override]
        self._clock = 0
        return {}, {}  # nor is there anything at first

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:  # type: ignore[override]
        assert bool(actions) == (self._clock > 0 and self._clock % 3 == 0)
        self._clock += 1
        has_ended = self._clock == 12
        seen = {"a": np.full(4, self._clock / 2, np.float32)} if self._clock % 3 == 0 else {}
        return seen, {"a": 1.0}, {"a": has_ended}, {"a": False}, {}


def test_ticks_in_which_no_agent_observes_pass_by() -> None:
    client = RecordingClient()
    play(Blinking(), client, seed=1, max_steps=9)  # type: ignore[arg-type]
    for segment in client.segments:
        assert segment.rewards.tolist() == [3.0, 3.0, 3.0]
        assert segment.observations[:, 0].tolist() == [1.5, 3.0, 4.5, 6.0]
    assert len(client.segments) == 3
    inspect_environment(RLSpec(env=f"{__name__}:Blinking"))


class Words(Space[str]):
    """A text, as MiniGrid's missions are: gymnasium does not flatten it."""

    def __init__(self) -> None:
        super().__init__(dtype=str)


class Mission(gymnasium.Env):  # type: ignore[misc]
    observation_space = Dict({"mission": Words(), "image": Box(0, 255, (2, 2), np.uint8), "hint": Words()})
    action_space = Discrete(3)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return self._look(), {}

    def step(self, action: int) -> Any:
        return self._look(), 1.0, False, True, {}

    def _look(self) -> dict[str, Any]:
        return {"mission": "go there", "image": np.full((2, 2), 7, np.uint8), "hint": "or there"}


def test_parts_that_are_no_numbers_are_left_out_by_name_or_named_with_the_remedy() -> None:
    env = f"{__name__}:Mission"
    with pytest.raises(ConfigError, match=r"mission \(Words\).*ignore=\[.*mission.*\] .*--ignore mission"):
        make_environment(env)
    with pytest.raises(ConfigError, match=r"observes hint \(Words\)"):
        make_environment(env, ["mission"])
    with pytest.raises(ConfigError, match=r"ignore = 'missoin': is no part of .*its parts are hint, image, mission"):
        make_environment(env, ["missoin"])
    environment = make_environment(env, ["mission", "hint"])
    assert environment.observation_space == Box(0, 255, (2, 2), np.uint8)
    assert environment.reset(seed=1)[0].tolist() == environment.step(0)[0].tolist() == [[7, 7], [7, 7]]
    spec = RLSpec(env=env).override(["ignore=[mission,hint]"])
    assert spec.ignore == ("mission", "hint")


class Old(gymnasium.Env):  # type: ignore[misc]
    """A game of gym's old API, whose step has `done`."""

    observation_space, action_space = Box(-1, 1, (4,), np.float32), Discrete(2)
    taken: Any = (np.zeros(4, np.float32), 1.0, False, {})

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> Any:
        return self.taken


class Rewardless(Old):
    taken = np.zeros(4, np.float32), None, False, False, {}


class Bare(Old):
    """As of gym's old API, reset gives no info: its observation of two numbers looks like a pair."""

    observation_space = Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32)


class Masked(Old):
    """Its observations pass through a wrapper of ours."""

    observation_space = Dict({"a": Old.observation_space, "b": Old.observation_space})
    taken = {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}, 1.0, False, {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return {"a": np.zeros(4, np.float32), "b": np.zeros(4, np.float32)}, {}


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Old", "step returns no 5 values .*got 4.*return observation, reward, terminated"),
        ("Masked", "step returns no 5 values .*got 4.*return observation, reward, terminated"),
        ("Bare", r"begins with what is not in its observation_space.*reset returns \(observation, info\)"),
        ("Rewardless", "reward = None: of the environment's step is no number"),
    ],
)
def test_a_step_that_no_actor_could_take_is_named_before_the_run(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        inspect_environment(RLSpec(env=f"{__name__}:{name}"))


def test_an_action_is_picked_of_any_space_and_mask() -> None:
    assert pick_action(Discrete(4), np.array([0, 0, 1, 1], np.int8)) == 2
    assert pick_action(gymnasium.spaces.MultiDiscrete([2, 3]), np.array([0, 1, 0, 0, 1])).tolist() == [1, 2]
    assert pick_action(gymnasium.spaces.MultiBinary(3)).tolist() == [0, 0, 0]
    assert pick_action(Box(-1, 3, (2,), np.float32)).tolist() == [1.0, 1.0]


def test_a_function_may_be_in_a_file_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "their_game.py").write_text("from shoal.libs.games.tictactoe import TicTacToe as make\n")
    environment = make_environment(f"{tmp_path}/their_game.py:make")
    assert environment.observation_space.shape == (18,)
    with pytest.raises(ConfigError, match="the file has no function nothing"):
        make_environment(f"{tmp_path}/their_game.py:nothing")
    with pytest.raises(ConfigError, match="there is no file"):
        make_environment("no_file.py:make")


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
        if self.fault == "shape":
            return np.zeros(5, np.float32), {}
        return np.zeros(4, np.float32), {}
    def step(self, action):
        return np.zeros(4, np.float32), 0.0, False, True, {}

for fault in ("", "init", "reset", "shape"):
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


def test_a_job_finds_the_modules_of_the_folder_that_it_is_run_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own_game.py").write_text("from shoal.libs.games.tictactoe import TicTacToe as make\n")
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.chdir(tmp_path / "here")
    words = ["env=own_game:make", "--check"]
    checked: list[object] = []
    job_main(
        ActorLearnerSpec(), lambda spec, job: None, "job", lambda spec: checked.append(check(spec)), lambda _: words
    )
    assert checked


def test_one_that_cannot_begin_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"env = 'F': raised OSError: no joystick \(some_games\.py:13\)"):
        reset_environment(make_environment("some_games:Faultreset-v0"), "F")
    assert reset_environment(make_environment("some_games:Fault-v0"), "F")[0].shape == (4,)


@pytest.mark.filterwarnings("ignore::UserWarning:gymnasium")  # it warns, and goes on
def test_one_that_begins_with_what_no_actor_could_send_is_refused() -> None:
    said = r"begins with what is not in its observation_space: \(5,\), expected \(4,\)\. .* reset returns"
    with pytest.raises(ConfigError, match=said):
        inspect_environment(RLSpec(env="some_games:Faultshape-v0"))
    inspect_environment(RLSpec(env="some_games:Fault-v0"))


def test_a_module_of_the_current_folder_is_an_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program `shoal` has its own folder in `sys.path`, in place of the current one."""
    (tmp_path / "beside_me.py").write_text(
        "import gymnasium\nfrom gymnasium.envs.classic_control import CartPoleEnv\n"
        "gymnasium.register('Beside-v0', CartPoleEnv)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each not in ("", str(tmp_path))])
    assert make_environment("beside_me:Beside-v0").action_space.n == 2
