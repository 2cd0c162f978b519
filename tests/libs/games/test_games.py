"""The environments that come with Shoal, and how booleans and a missing simulator are treated."""

import importlib.util

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.env_checker import check_env

from shoal.actor.environment import make_environment
from shoal.errors import ConfigError
from shoal.libs.games.harvest import APPLE, BASKET, MAX_STEPS, STONE, Harvest
from shoal.libs.games.pursuit import Pursuit
from shoal.rl.spec import RLSpec, describe_convolutions, experience_spec

LEFT, STAY, RIGHT = range(3)


def drop(game: Harvest, kind: int) -> tuple[float, bool]:
    """Let one thing fall into the basket from the row above."""
    game.reset(seed=0)
    game._frame[-2, game._column, kind] = 255
    _, reward, terminated, _, _ = game.step(STAY)
    return reward, terminated


def test_harvest_keeps_gymnasiums_rules() -> None:
    check_env(make_environment("shoal.libs.games:Harvest-v0").unwrapped)


def test_an_apple_is_a_point_and_a_stone_is_the_end() -> None:
    assert drop(Harvest(), APPLE) == (1.0, False)
    assert drop(Harvest(), STONE) == (0.0, True)


def test_two_hunters_beside_the_prey_have_caught_it_and_one_alone_has_not() -> None:
    game = Pursuit()
    observations, _ = game.reset(seed=1)
    assert all(np.abs(each).max() <= 1 for each in observations.values())
    game._prey, game._positions = (
        [0, 0],
        {"first": [0, 4], "second": [2, 0]},
    )  # beside it around the edge; two fields away
    _, rewards, terminations, _, _ = game.step({"first": 0, "second": 0})
    assert set(rewards.values()) == {-0.05}
    assert not any(terminations.values())
    game._prey = [0, 0]
    observations, rewards, terminations, truncations, _ = game.step({"first": 0, "second": 1})
    assert set(rewards.values()) == {1.0}
    assert all(terminations.values())
    assert not any(truncations.values())
    assert game.agents == []
    assert observations["first"].tolist() == [0.0, 0.5, 0.5, 0.5]  # the prey, and then the other one, diagonally


def test_a_pursuit_without_a_catch_is_cut_off() -> None:
    game = Pursuit()
    game.reset(seed=2)
    for number in range(1, 41):
        game._prey, game._positions = [0, 0], {"first": [2, 2], "second": [2, 2]}
        _, _, terminations, truncations, _ = game.step({"first": 0, "second": 0})
        assert list(truncations.values()) == [number == 40] * 2
        assert not any(terminations.values())


def test_the_basket_stays_in_the_field_and_things_fall_a_row_a_step() -> None:
    game = Harvest()
    for action, column in ((LEFT, 0), (RIGHT, 9)):
        game.reset(seed=1)
        game._frame[0, 4, APPLE] = 255
        for row in range(1, 9):
            frame, *_ = game.step(action)
            assert frame[row, 4, APPLE] == 255
        assert np.flatnonzero(frame[-1, :, BASKET]).tolist() == [column]


def test_an_episode_without_a_stone_is_truncated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.libs.games.harvest.STONE_PROBABILITY", 0.0)
    game = Harvest()
    game.reset(seed=0)
    ends = [game.step(STAY)[2:4] for _ in range(MAX_STEPS)]
    assert (ends[-2], ends[-1]) == ((False, False), (False, True))


class Booleans(gymnasium.Env):
    observation_space = Box(0.0, 1.0, (10, 10, 4), bool)
    action_space = Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.ones((10, 10, 4), bool), {}

    def step(self, action):
        return np.eye(10, dtype=bool)[:, :, None].repeat(4, 2), 0.0, False, False, {}


def test_booleans_become_bytes_that_reach_the_network_as_they_are() -> None:
    gymnasium.register("Booleans-v0", Booleans)
    environment = make_environment("Booleans-v0")
    first, _ = environment.reset()
    then, *_ = environment.step(0)
    assert (first.dtype, first.sum(), then.dtype, then.sum()) == (np.uint8, 400, np.uint8, 40)
    experience = experience_spec(environment.observation_space, environment.action_space, RLSpec())
    assert (experience.observation.dtype, experience.observation.high) == ("uint8", 1)
    assert describe_convolutions(experience.observation)["observation_scale"] == 1.0


@pytest.mark.skipif(importlib.util.find_spec("Box2D") is not None, reason="it is installed")
def test_a_missing_simulator_names_its_extra() -> None:
    with pytest.raises(ConfigError, match=r"LunarLander-v3.*cannot be made.*CHECKOUT\[box2d\]"):
        make_environment("LunarLander-v3")


@pytest.mark.skipif(importlib.util.find_spec("ale_py") is not None, reason="it is installed")
def test_a_missing_emulator_names_its_package() -> None:
    with pytest.raises(ConfigError, match=r"needs ale_py, which is not installed\. pip install ale-py"):
        make_environment("shoal.libs.games:Pong-v0")
