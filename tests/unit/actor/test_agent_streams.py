"""Games of several agents: each agent is a stream of its own, whoever leaves first and whoever's turn it is."""

import re
from pathlib import Path
from typing import Any, cast

import gymnasium
import msgspec
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete
from test_environment_loop import SynchronousClient

from chase import LENGTHS, Chase
from rl_setting import EXPERIENCE, POLICY, RecordingClient, weights
from shoal.actor import ActorClient, play
from shoal.actor.agent_streams import find_success
from shoal.actor.environment import check_step, get_spaces, make_environment, require_matching_spaces, reset_environment
from shoal.actor.game import GameActor
from shoal.errors import ConfigError
from shoal.flows.rl_policy import inspect_environment
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec, Segment, TensorSpec
from shoal.wire.action_masks import find_choices
from shoal.wire.spaces import describe_space

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


def test_an_agent_that_waits_while_newer_weights_come_sends_nothing_of_the_older_ones() -> None:
    """Its last choice is of the older weights: the gateway would drop the segment that begins with it."""

    class BusyClient(SynchronousClient):
        num_credits, num_pulls = 10**6, 0

        def newer_weights(self, than: int) -> Any:
            self.num_pulls += 1
            self.version += self.num_pulls % 19 == 0
            return super().newer_weights(than)

        def send(self, segment: Segment, timeout_s: float | None = None) -> None:
            if segment.episode_length is None:  # the last one is sent in any case: it has the return
                super().send(segment, timeout_s)  # which compares the versions

    client = BusyClient(msgspec.structs.replace(EXPERIENCE, segment_length=2))
    play(Chase(has_turns=True), client, max_steps=600, pull_interval_s=0.0)  # type: ignore[arg-type]
    assert client.version > 20
    assert len(split_by_agent(client.segments)) == 3
    assert len(client.segments) > 50


class Silent(Chase):
    def step(self, actions: Any) -> tuple[dict[str, Any], ...]:
        return {}, *(super().step(actions)[1:] if actions else ({}, {}, {}, {}))


class Abrupt(Chase):
    def step(self, actions: Any) -> tuple[dict[str, Any], ...]:
        observations, *others = super().step(actions)
        return {agent: each for agent, each in observations.items() if agent in self.agents}, *others


@pytest.mark.parametrize(
    ("game", "problem"),
    [
        (Silent(), "had no observation for any of .*'green'.*in 1000 steps"),
        (Abrupt(), "'red': ends without its last observation"),
    ],
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


class MaskedChase(Chase):
    """As PettingZoo's classic games: observes a Dict with an action mask. 1 is allowed where a number is above 0."""

    def observation_space(self, agent: str) -> Any:
        return Dict({"observation": Box(-20, 20, (4,), np.float32), "action_mask": Box(0, 1, (2,), np.int8)})

    def reset(self, seed: int | None = None) -> Any:
        observations, infos = super().reset(seed)
        return self._mask(observations), infos

    def step(self, actions: Any) -> Any:
        assert all(action == 0 or self._seen[agent][0] > 0 for agent, action in actions.items())
        observations, *others = super().step(actions)
        return self._mask(observations), *others

    def _mask(self, observations: Any) -> Any:
        return {
            agent: {"observation": seen, "action_mask": np.array([1, seen[0] > 0], np.int8)}
            for agent, seen in observations.items()
        }


class PartedChase(Chase):
    """Observes a Dict of several parts."""

    def observation_space(self, agent: str) -> Any:
        return Dict({"flags": MultiBinary(2), "numbers": Box(-20, 20, (4,), np.float32)})

    def reset(self, seed: int | None = None) -> Any:
        observations, infos = super().reset(seed)
        return {agent: self._divide(seen) for agent, seen in observations.items()}, infos

    def step(self, actions: Any) -> Any:
        observations, *others = super().step(actions)
        return {agent: self._divide(seen) for agent, seen in observations.items()}, *others

    def _divide(self, seen: np.ndarray) -> Any:
        return {"flags": np.array([1, 0], np.int8), "numbers": seen}


def make_masked_turns() -> Chase:
    return MaskedChase(has_turns=True)


def make_parted() -> Chase:
    return PartedChase()


@pytest.mark.parametrize("name", ["MaskedChase", "make_masked_turns"])
def test_the_masks_of_agents_that_observe_a_dict_are_found(name: str) -> None:
    env = f"{__name__}:{name}"
    experience, first = inspect_environment(RLSpec(env=env, hidden=()))
    assert first.shape == experience.observation.shape == (4,)
    assert find_choices(experience) == (2,)
    client = RecordingClient(experience)
    play(make_environment(env), client, seed=1, max_steps=200)
    by_agent = split_by_agent(client.segments)
    assert by_agent.keys() == {0, 1, 2}
    for segment in client.segments:
        masks = segment.extras["masks"][:-1]
        np.testing.assert_array_equal(masks[:, 1], segment.observations[:-1, 0] > 0)
        assert masks[np.arange(len(masks)), segment.actions].all()


def test_the_parts_that_an_agent_observes_become_one_array() -> None:
    experience, first = inspect_environment(RLSpec(env=f"{__name__}:make_parted"))
    assert experience.observation.shape == (6,)
    assert first[:2].tolist() == [1, 0]
    environment = make_environment(f"{__name__}:make_parted")
    environment.reset(seed=1)
    observations, *_ = environment.step(dict.fromkeys(LENGTHS, 0))
    assert {each.shape for each in observations.values()} == {(6,)}


# -- the game of the page for games in Python


PAGE = Path(__file__).parents[3] / "docs" / "games" / "python.md"


def test_it_can_be_played_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (text,) = re.findall(r"^```python file=grid.py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "grid_of_page.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    game = make_environment("grid_of_page:Grid-v0")
    del gymnasium.registry["Grid-v0"]  # another test registers it, too
    _, info = reset_environment(game, "Grid-v0")
    check_step(game, "Grid-v0", info)
    game.reset(seed=1)
    steps = [game.step(0) for _ in range(30)]
    assert {find_success(info) for *_, info in steps} == {False}
    assert [truncated for _, _, _, truncated, _ in steps] == [False] * 29 + [True]


@pytest.mark.parametrize("is_flat", [False, True])
def test_a_game_with_its_own_loop_shows_what_it_has(is_flat: bool) -> None:
    space = Dict({"field": Box(0.0, 1.0, (2, 2)), "at": MultiDiscrete([3, 2])})
    shown = {"field": np.array([[0, 1], [1, 0]], np.float32), "at": np.array([2, 0])}
    flat = gymnasium.spaces.flatten(space, shown)
    observation, action = TensorSpec("float32", flat.shape, 0.0, 1.0), TensorSpec("int64", (), 0, 1)
    client = RecordingClient(
        ExperienceSpec(observation, action, 2, POLICY, space=describe_space(space)), weights(1, flat.size).tensors()
    )
    with GameActor(cast(ActorClient, client)) as actor:
        for _ in range(2):
            assert actor.act(flat if is_flat else shown) in (0, 1)
            actor.reward(1.0)
        actor.end_episode(flat if is_flat else shown)
    (segment,) = client.segments
    np.testing.assert_array_equal(segment.observations, np.array([flat] * len(segment.observations), np.float32))
