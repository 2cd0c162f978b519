"""The ready loop with several environments: whose step is whose, seeds, and the number of steps."""

from typing import Any

import msgspec
import numpy as np
import pytest

from rl_setting import EXPERIENCE, RecordingClient, weights
from shoal.actor import play
from shoal.wire import Segment
from shoal.wire.action_masks import describe_masks
from sign_game import SignGame


class RenewingClient(RecordingClient):
    """Newer weights come at once."""

    def newer_weights(self, than: int) -> Any:
        return than + 1, weights(than + 1).tensors()


class SynchronousClient(RecordingClient):
    """Grants credit for three segments, and only when there is none; then newer weights come."""

    is_synchronous = True
    num_credits, version = 3, 1

    def newer_weights(self, than: int) -> Any:
        return (self.version, weights(self.version).tensors()) if self.version > than else None

    def send(self, segment: Segment, timeout_s: float | None = None) -> None:
        assert (segment.versions == self.version).all()
        self.num_credits -= 1
        assert self.num_credits >= 0
        super().send(segment, timeout_s)

    def wait_for_credit(self) -> None:
        if not self.num_credits:
            self.num_credits, self.version = 3, self.version + 1


class CountingGame(SignGame):
    """Its episodes are of another length than those of other numbers."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.seeds = number, list[int | None]()

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self.seeds.append(seed)
        return super().reset(seed=seed)

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        observation, reward, _, _, info = super().step(action)
        return observation, reward, self._steps == 20 + self.number, False, {**info, "success": float(self.number < 2)}


@pytest.mark.parametrize("num_environments", [1, 2, 5])
def test_each_environment_has_segments_of_its_own(num_environments: int) -> None:
    """The reward of a step tells the action and the observation that it belongs to."""
    client, games = RenewingClient(), [CountingGame(number) for number in range(num_environments)]
    assert play(games, client, seed=3, max_steps=200 * num_environments) == 200 * num_environments  # type: ignore[arg-type]
    for segment in client.segments:
        right = segment.actions == (segment.observations[:-1, 0] > 0)
        np.testing.assert_array_equal(segment.rewards, right)
        assert (np.diff(segment.versions) >= 0).all()
    lengths = [segment.episode_length for segment in client.segments if segment.terminated]
    assert set(lengths) == {20 + number for number in range(num_environments)}
    for each in client.segments:  # said with every step, and meant at the end
        assert each.success == (each.episode_length < 22 if each.episode_length else None)
    assert sum(segment.num_steps for segment in client.segments) > 180 * num_environments
    assert len({game.seeds[0] for game in games}) == num_environments
    assert all(seed is None for game in games for seed in game.seeds[1:])


class ReusingGame(CountingGame):
    """Gives the same array each time, and masks."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self._array = np.zeros(4, np.float32)

    def reset(self, *, seed: int | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        self._array[:], _ = super().reset(seed=seed)
        return self._array, {"action_mask": self._get_mask()}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self._array[:], *others, _ = super().step(action)
        return self._array, *others, {"action_mask": self._get_mask()}  # type: ignore[return-value]

    def _get_mask(self) -> list[bool]:
        return [True, bool(self._array[1] > 0)]


@pytest.mark.parametrize("num_environments", [1, 3])
def test_a_reused_array_and_masks_stay_with_their_steps(num_environments: int) -> None:
    client = RenewingClient(msgspec.structs.replace(EXPERIENCE, extras=(describe_masks(EXPERIENCE.action, ()),)))
    games = [ReusingGame(number) for number in range(num_environments)]
    play(games, client, seed=3, max_steps=150 * num_environments)  # type: ignore[arg-type]
    for segment in client.segments:
        np.testing.assert_array_equal(segment.rewards, segment.actions == (segment.observations[:-1, 0] > 0))
        masks = segment.extras["masks"]
        num_rows = segment.num_steps if segment.terminated else segment.num_steps + 1
        np.testing.assert_array_equal(masks[:num_rows, 1], segment.observations[:num_rows, 1] > 0)
        assert masks[:, 0].all()
        assert not (segment.actions & ~masks[:-1, 1]).any()
    assert {each.episode_length for each in client.segments if each.terminated} == set(range(20, 20 + num_environments))


@pytest.mark.parametrize(("pull_interval_s", "versions"), [(0.0, range(40)), (3600.0, [0] * 40)])
def test_one_environment_applies_newer_weights_between_two_steps(pull_interval_s: float, versions: list[int]) -> None:
    """Also within a segment: each step has the version that acted. It ends after the steps that were asked for."""
    client, game = RenewingClient(), CountingGame(0)
    assert play(game, client, seed=3, max_steps=47, pull_interval_s=pull_interval_s) == 47  # type: ignore[arg-type]
    assert len(game.seeds) == 3
    found = np.concatenate([segment.versions for segment in client.segments])
    np.testing.assert_array_equal(found - found[0], versions)
    assert game._steps == 7


def test_a_synchronous_run_has_no_more_open_segments_than_credit() -> None:
    """All environments play, though never all at once."""
    client, games = SynchronousClient(), [CountingGame(number) for number in range(5)]
    play(games, client, seed=3, max_steps=2000)  # type: ignore[arg-type]
    assert client.version > 20
    assert {each.episode_length for each in client.segments if each.terminated} == {20, 21, 22, 23, 24}
