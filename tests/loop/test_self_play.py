"""Self-play: a growing pool of past versions, which play the agents that do not learn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from benchmarks.ours.kuhn_poker import KuhnPoker

from rl_setting import EXPERIENCE, TOKEN, Parts, segment, weights
from shoal.actor import ActorClient, play
from shoal.errors import ConfigError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_metrics import MAX_WIN_RATES, select_win_rates
from shoal.flows.rl_policy import check, inspect_environment
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.spec import RLSpec
from shoal.wire import Segment, TensorSpec
from waiting import wait_for

KUHN = msgspec.structs.replace(EXPERIENCE, observation=TensorSpec("float32", (7,), 0.0, 1.0), self_play=True)


def test_the_pool_grows_with_the_steps_and_survives_a_restart(tmp_path: Path) -> None:
    pool = OpponentPool(tmp_path, snapshot_every=100)
    for version, num_steps in ((1, 0), (2, 50), (3, 99), (4, 100), (5, 150), (6, 230), (6, 500)):
        pool.offer(weights(version), num_steps)
    assert pool.versions == [1, 4, 6]
    assert 4 in pool
    assert 5 not in pool
    again = OpponentPool(tmp_path, snapshot_every=100)
    assert again.versions == [1, 4, 6]
    again.offer(weights(7), 510)  # the steps since the restart count
    again.offer(weights(8), 610)
    assert again.versions == [1, 4, 6, 8]
    found = []
    while (member := again.find_next(found[-1] if found else 0)) is not None:
        found.append(member.version)
        assert member.sha256 == weights(member.version).sha256
    assert found == [1, 4, 6, 8]
    (tmp_path / "4.safetensors").unlink()
    assert again.find_next(1).version == 6  # type: ignore[union-attr]
    assert again.versions == [1, 6, 8]


def test_a_full_pool_thins_out_evenly_between_its_oldest_and_its_newest(tmp_path: Path) -> None:
    pool = OpponentPool(tmp_path, snapshot_every=10, max_versions=8)
    for version in range(1, 101):
        pool.offer(weights(version), 10 * version)
        assert len(pool.versions) == min(version, 8)
        assert (pool.versions[0], pool.versions[-1]) == (1, version)
    gaps = np.diff(pool.versions)
    assert gaps[:-1].max() <= 3 * gaps[:-1].min()  # the newest has a shorter way
    assert {int(path.stem) for path in tmp_path.glob("*.safetensors")} == set(pool.versions)
    again = OpponentPool(tmp_path, snapshot_every=10, max_versions=8)
    assert again.versions == pool.versions
    assert all(version in again for version in range(1, 101))  # an actor may still play against one that has gone
    assert 101 not in again


def test_an_actor_forgets_the_members_that_have_gone(tmp_path: Path) -> None:
    parts = Parts()
    pool = OpponentPool(tmp_path, snapshot_every=8, max_versions=2)
    experience = msgspec.structs.replace(EXPERIENCE, self_play=True)
    gateway = Gateway(parts.spec, experience, parts.queue, parts.store, TOKEN, "run-1", opponents=pool)
    gateway.start()
    try:
        with ActorClient(gateway.address, TOKEN, "actor-0") as client:
            client.wait_for_opponents()
            for version in (2, 3, 4):
                parts.store.publish(weights(version))
                client.wait_for_weights(version - 1)
                client.send(segment(version=version, opponent=1))
                client.drain(5)
                wait_for(lambda version=version: client._wait(lambda: True, 1, "") or version in client.opponents, 5)
            assert list(client.opponents) == [1, 4]
            client.send(segment(version=4, opponent=2))
            client.drain(5)
            assert client.drops == {}
    finally:
        parts.store.close()
        gateway.close()
        parts.ledger.close()


def test_an_actor_gets_every_member_and_the_gateway_counts_who_was_beaten(tmp_path: Path) -> None:
    parts = Parts()
    pool = OpponentPool(tmp_path, snapshot_every=8)
    experience = msgspec.structs.replace(EXPERIENCE, self_play=True)
    gateway = Gateway(parts.spec, experience, parts.queue, parts.store, TOKEN, "run-1", opponents=pool)
    gateway.start()
    try:
        with ActorClient(gateway.address, TOKEN, "actor-0") as client:
            client.wait_for_opponents()
            assert list(client.opponents) == [1]
            for version in (2, 3):
                parts.store.publish(weights(version))
                client.wait_for_weights(version - 1)
                for reward in (1.0, -1.0):
                    ending: dict[str, Any] = {"terminated": True, "episode_return": reward, "episode_length": 8}
                    client.send(segment(version=version, opponent=1, **ending))
                client.drain(5)
                wait_for(lambda version=version: client._wait(lambda: True, 1, "") or version in client.opponents, 5)
            np.testing.assert_array_equal(
                client.opponents[3]["policy.0.weight"], weights(3).tensors()["policy.0.weight"]
            )
            client.send(segment(version=3, opponent=7))
            client.drain(5)
            assert client.last_drop == "invalid_range: opponent: 7 is not in the pool of opponents"
        assert gateway.stats()["opponents"] == {1: {"episodes": 4, "win_rate": 0.5, "mean_return": 0.0}}
    finally:
        parts.store.close()
        gateway.close()
        parts.ledger.close()


class StubbornClient:
    """Two opponents: version 1 always passes, version 2 always bets. The newest policy always bets."""

    actor_id, finished, is_synchronous, spec = "actor-0", False, False, KUHN

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.opponents = {1: self._make(0), 2: self._make(1)}

    def _make(self, action: int) -> dict[str, np.ndarray]:
        bias = np.array([100.0, -100.0] if action == 0 else [-100.0, 100.0], np.float32)
        return {"policy.0.weight": np.zeros((2, 7), np.float32), "policy.0.bias": bias}

    def wait_for_weights(self) -> tuple[int, dict[str, np.ndarray]]:
        return 9, self._make(1)

    def wait_for_opponents(self) -> None: ...

    def newer_weights(self, than: int) -> None: ...

    def send(self, segment: Segment, timeout_s: float | None) -> None:
        self.segments.append(segment)


class RecordedKuhn(KuhnPoker):
    def __init__(self) -> None:
        super().__init__()
        self.histories: list[str] = []

    def step(self, actions: Any) -> Any:
        outcome = super().step(actions)
        if outcome[1]:
            self.histories.append(self._history)
        return outcome


def test_one_agent_of_each_episode_learns_and_any_member_plays_the_other() -> None:
    """Against the one who passes: b p as the first, p b as the second. Against the one who bets: b b."""
    client, game = StubbornClient(), RecordedKuhn()
    play(game, client, seed=4, max_steps=1000)  # type: ignore[arg-type]
    assert len(client.segments) == 1000  # one step of the learner in each episode
    assert {tuple(each.versions) for each in client.segments} == {(9,)}
    assert all(each.terminated for each in client.segments)
    opponents = Counter(each.opponent for each in client.segments)
    assert opponents.keys() == {1, 2}
    assert abs(opponents[1] - 500) < 5 * 16  # five standard deviations of a fair coin
    seats = Counter((each.opponent, bool(each.observations[0, 3])) for each in client.segments)
    assert all(abs(count - 250) < 5 * 14 for count in seats.values())
    assert len(seats) == 4
    ends = Counter(game.histories[:1000])
    assert ends.keys() == {"bp", "pbp", "bb"}
    assert ends["bp"] == seats[1, True]
    # A mean over the deals: the winner of "bp" gets the ante, and "bb" is fair.
    against_passing = [each.episode_return for each in client.segments if each.opponent == 1]
    assert set(against_passing) == {1.0}


def test_self_play_needs_several_agents() -> None:
    with pytest.raises(ConfigError, match="has one agent, and self-play needs several"):
        inspect_environment(RLSpec(env="CartPole-v1").override(["self_play.snapshot_every=100"]))
    spec = RLSpec(env="benchmarks.ours.kuhn_poker:make").override(["self_play.snapshot_every=100"])
    assert inspect_environment(spec)[0].self_play
    assert not inspect_environment(RLSpec())[0].self_play


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["env=benchmarks.ours.kuhn_poker:make", "self_play.snapshot_every=100"], "self-play has several"),
        (["algorithm=ppo", "algorithm.synchronous=true"], "ppo pauses actors, not users"),
    ],
)
def test_users_cannot_teach_every_run(words: list[str], problem: str) -> None:
    spec = ActorLearnerSpec().override(["learn_from_endpoint=true", *words])
    with pytest.raises(ConfigError, match=problem):
        check(spec)


def test_win_rates_are_of_versions_at_equal_distances_and_of_the_newest() -> None:
    results = {version: {"win_rate": version / 100} for version in range(1, 101)}
    found = select_win_rates({"opponents": results})
    assert len(found) <= MAX_WIN_RATES
    assert found["100"] == 1.0
    assert np.diff([int(version) for version in found]).tolist() == [7] * (len(found) - 1)
    assert select_win_rates({}) == {}
