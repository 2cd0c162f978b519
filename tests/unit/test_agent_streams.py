"""Games of several agents: each agent is a stream of its own, whoever leaves first and whoever's turn it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from test_environment_loop import RecordingClient, SynchronousClient

from chase import LENGTHS, Chase
from rl_setting import EXPERIENCE
from shoal.actor import play
from shoal.actor.environment import get_spaces, make_environment, require_matching_spaces, reset_environment
from shoal.errors import ConfigError
from shoal.flows.policy_evaluation import ActionAnswer, play_through
from shoal.flows.rl_policy import inspect_environment
from shoal.rl.spec import RLSpec
from shoal.wire import Segment

EXPERIENCE_SPACES = Box(-1, 1, (4,), np.float32), Discrete(2)


def split_by_agent(segments: list[Segment]) -> dict[int, list[Segment]]:
    by_agent: dict[int, list[Segment]] = {}
    for segment in segments:
        (agent,) = set(segment.observations[:, 1].tolist())  # each segment is of one agent
        by_agent.setdefault(int(agent), []).append(segment)
    return by_agent


@pytest.mark.parametrize("num_environments", [1, 3])
@pytest.mark.parametrize("has_turns", [False, True])
def test_each_agent_has_episodes_of_its_own(has_turns: bool, num_environments: int) -> None:
    client, games = RecordingClient(), [Chase(has_turns) for _ in range(num_environments)]
    assert play(games, client, seed=1, max_steps=480 * num_environments) >= 480 * num_environments
    by_agent = split_by_agent(client.segments)
    for index, (agent, length) in enumerate(LENGTHS.items()):
        for segment in by_agent[index]:
            assert (segment.terminated, segment.truncated) == (agent != "blue", agent == "blue")
            assert segment.episode_length == segment.num_steps == length
            assert segment.observations[:, 2].tolist() == list(range(length + 1))  # no step of another, none lost
            right = segment.actions == (segment.observations[:-1, 0] > 0)
            waited = segment.rewards - right
            # A quarter for each turn of another between two of its own.
            assert set(waited.tolist()) <= ({0.0, 0.25, 0.5, 0.75, 1.0} if has_turns else {0.0})
            assert waited[0] == (0.5 if has_turns else 0.0)
        assert len(by_agent[index]) >= 15 * num_environments
    assert games[0].seeds[0] == 1
    assert len({game.seeds[0] for game in games}) == num_environments


def test_agents_of_a_synchronous_run_share_its_credit() -> None:
    """Three agents in each of two environments; three segments of credit: one environment at a time."""
    client = SynchronousClient()
    play([Chase(), Chase()], client, max_steps=2000)  # type: ignore[arg-type]
    assert client.version > 20
    assert len(split_by_agent(client.segments)) == 3


class Silent(Chase):
    def step(self, actions: Any) -> tuple[dict[str, Any], ...]:
        return {}, *super().step(actions)[1:]


class Abrupt(Chase):
    def step(self, actions: Any) -> tuple[dict[str, Any], ...]:
        observations, *others = super().step(actions)
        return {agent: each for agent, each in observations.items() if agent in self.agents}, *others


@pytest.mark.parametrize(
    ("game", "problem"),
    [(Silent(), "no observation for any of .*'green'"), (Abrupt(), "'red': ends without its last observation")],
)
def test_a_game_that_breaks_the_rules_is_named(game: Chase, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        play(game, RecordingClient(), max_steps=100)  # type: ignore[arg-type]


class Unequal(Chase):
    def action_space(self, agent: str) -> Any:
        from gymnasium.spaces import Discrete

        return Discrete(2 + (agent == "blue"))


def test_an_environment_may_be_a_function_of_a_module() -> None:
    environment = make_environment("chase:make_turns")
    assert isinstance(environment, Chase)
    assert [type(space).__name__ for space in get_spaces(environment, "chase")] == ["Box", "Discrete"]
    require_matching_spaces(environment, "chase:make_turns", EXPERIENCE)
    assert reset_environment(environment, "chase")[0].shape == (4,)
    experience, observation = inspect_environment(RLSpec(env="chase:make_turns"))
    assert experience.action.high == 1
    assert observation.shape == (4,)
    with pytest.raises(ConfigError, match=r"gives blue other spaces than red"):
        get_spaces(Unequal(), "chase")
    with pytest.raises(ConfigError, match=r"no module 'no_such_module'"):
        make_environment("no_such_module:make")


class RightAnswers:
    """An endpoint whose policy tells the sign."""

    largest = 0

    def insist(self, observations: np.ndarray, patience_s: float = 0.0) -> ActionAnswer:
        self.largest = max(self.largest, len(observations))
        return ActionAnswer({"action": (observations[:, 0] > 0).astype(np.int64)}, 1)


def test_an_evaluation_plays_all_agents_by_the_policy() -> None:
    """The mean return of the agents: 5, 8 and 11 steps, all of them right."""
    connection = RightAnswers()
    evaluation = play_through([connection], "chase:Chase", 10, 0, max_rows=16)
    assert evaluation.returns == [8.0] * 10
    assert connection.largest <= 16


def make_nothing() -> None: ...


class Unclosable:
    """What the documentation asks of an environment, and no more."""

    observation_space, action_space = EXPERIENCE_SPACES

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        return np.zeros(4, np.float32), 0.0, False, True, {}


def test_a_function_returns_an_environment_which_need_not_have_close() -> None:
    experience, _ = inspect_environment(RLSpec(env=f"{__name__}:Unclosable"))
    assert experience.observation.shape == (4,)
    with pytest.raises(ConfigError, match="returned a NoneType, which has no reset and step"):
        make_environment(f"{__name__}:make_nothing")
