"""What episodes that were played say of those that were not."""

from __future__ import annotations

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest

from shoal.errors import ConfigError, InferenceError, RunError
from shoal.flows.policy_evaluation import Answer, Evaluation, play_through, wait_for_version


def _played(returns: list[float]) -> Evaluation:
    return Evaluation(returns, 0, {1}, 1.0)


def test_equal_returns_are_sure() -> None:
    assert _played([500.0] * 20).sure_return == 500.0
    assert _played([480.0]).sure_return == 480.0


def test_scattered_returns_are_less_sure_than_their_mean() -> None:
    played = _played([400.0, 500.0] * 8)
    assert played.mean_return == 450.0
    assert played.sure_return == pytest.approx(450.0 - 2.0 * 51.64 / 4.0, abs=0.01)


class AlwaysLeft:
    """Stands for a connection to an endpoint that takes `max_rows` at once."""

    def __init__(self, max_rows: int = 64) -> None:
        self._max_rows = max_rows

    def insist(self, observations: np.ndarray) -> Answer:
        if len(observations) > self._max_rows:
            raise InferenceError(400, f"{len(observations)} rows, and at most {self._max_rows} are taken")
        return Answer({"action": np.zeros(len(observations), np.int64)}, 3)


def test_a_first_observation_may_be_a_list_as_many_environments_return_one() -> None:
    class Measuring:
        def insist(self, observations: np.ndarray, timeout_s: float) -> Answer:
            assert (observations.shape, observations.dtype) == ((1, 2), np.float32)
            return Answer({}, 3)

    wait_for_version(Measuring(), [0.0, 0.5], 3)  # type: ignore[arg-type]


def test_what_is_played_through_is_counted() -> None:
    played = play_through(AlwaysLeft(), "CartPole-v1", num_episodes=2, seed=1, max_rows=64)  # type: ignore[arg-type]
    assert (len(played.returns), played.versions) == (2, {3})
    assert played.num_requests == max(played.returns)


def test_more_episodes_than_the_endpoint_takes_at_once_are_asked_for_in_pieces() -> None:
    whole = play_through(AlwaysLeft(), "CartPole-v1", num_episodes=5, seed=1, max_rows=5)  # type: ignore[arg-type]
    pieces = play_through(AlwaysLeft(2), "CartPole-v1", num_episodes=5, seed=1, max_rows=2)  # type: ignore[arg-type]
    assert pieces.returns == whole.returns
    assert pieces.num_requests > whole.num_requests


def test_episodes_that_do_not_end_are_given_up() -> None:
    with pytest.raises(RunError, match=r"2 of 2 episodes of CartPole-v1 have not ended after 0 s.*eval_timeout_s"):
        play_through(AlwaysLeft(), "CartPole-v1", 2, 1, max_rows=64, timeout_s=0.0)  # type: ignore[arg-type]


class Held(gymnasium.Env):  # type: ignore[type-arg]
    """Holds something (a window, a port, a process) from its making to its `close`. Never ends."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)
    num_open, fault = 0, ""

    def __init__(self) -> None:
        Held.num_open += 1

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        if Held.fault:
            raise OSError(Held.fault)
        return np.zeros(4, np.float32), 0.0, False, False, {}

    def close(self) -> None:
        Held.num_open -= 1


@pytest.fixture
def held() -> Iterator[type[Held]]:
    gymnasium.register("Held-v0", entry_point=Held)
    yield Held
    del gymnasium.registry["Held-v0"]
    assert Held.num_open == 0


@pytest.mark.parametrize(("max_rows", "taken", "error"), [(2, 1, InferenceError), (2, 2, RunError)])
def test_a_trial_that_fails_leaves_no_environment_open(
    max_rows: int, taken: int, error: type[Exception], held: type[Held]
) -> None:
    with pytest.raises(error):
        play_through(AlwaysLeft(taken), "Held-v0", 5, 1, max_rows, timeout_s=0.05)  # type: ignore[arg-type]
    assert held.num_open == 0


def test_what_an_environment_raises_in_a_trial_is_said_in_a_line(
    held: type[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "fault", "the game has crashed")
    line = r"env = 'Held-v0': raised OSError: the game has crashed \(test_evaluation.py:\d+\)"
    with pytest.raises(ConfigError, match=line):
        play_through(AlwaysLeft(), "Held-v0", 2, 1, max_rows=64)  # type: ignore[arg-type]
