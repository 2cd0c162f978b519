"""Self-play: a growing pool of past versions, which play the agents that do not learn."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from benchmarks.ours.kuhn_poker import KuhnPoker

from registered import arrays_of
from rl_setting import EXPERIENCE, TOKEN, Parts, RecordingClient, segment, serving, weights
from shoal.actor import ActorClient, GameActor, RemoteClient, play
from shoal.errors import ConfigError, Refused, RegistryError, SpecMismatch
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.rl_metrics import MAX_WIN_RATES, select_win_rates
from shoal.flows.rl_policy import _require_same_opponents, check, inspect_environment, register_policy
from shoal.registry import Registry
from shoal.rl.algorithms.algorithm import make_algorithm
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.local_loop import LocalLoop
from shoal.testing import Loop
from shoal.weights import WeightSnapshot
from shoal.wire import EpisodeSummary, Segment, TensorSpec
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
    assert found == [each.version for each in again.load_own()] == [1, 4, 6, 8]
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
    pool = OpponentPool(tmp_path, snapshot_every=8, max_versions=2)
    with serving(experience=WITH_OPPONENTS, opponents=pool) as parts, connect(parts) as client:
        for version in (2, 3, 4):
            publish(parts, version, client)
            send(client, segment(version=version, opponent=1))
            wait_for_member(client, version)
        assert list(client.opponents) == [1, 4]
        send(client, segment(version=4, opponent=2))
        assert client.drops == {}


def test_an_actor_gets_every_member_and_the_gateway_counts_who_was_beaten(tmp_path: Path) -> None:
    pool = OpponentPool(tmp_path, snapshot_every=8)
    with serving(experience=WITH_OPPONENTS, opponents=pool) as parts, connect(parts) as client:
        assert list(client.opponents) == [1]
        for version in (2, 3):
            publish(parts, version, client)
            for reward in (1.0, -1.0):
                ending: dict[str, Any] = {"terminated": True, "episode_return": reward, "episode_length": 8}
                send(client, segment(version=version, opponent=1, **ending))
            wait_for_member(client, version)
        np.testing.assert_array_equal(client.opponents[3]["policy.0.weight"], weights(3).tensors()["policy.0.weight"])
        send(client, segment(version=3, opponent=7))
        assert client.last_drop == "invalid_range: opponent: 7 is not in the pool of opponents"
        send(client, segment(version=3, opponent=1, unrecorded=(EpisodeSummary(9.0, 8, opponent=8),)))
        assert client.last_drop == "invalid_range: opponent: 8 is not in the pool of opponents"
        send(client, segment(version=3, opponent=1, unrecorded=(EpisodeSummary(10.0, 8, opponent=1),)))
        assert parts.gateway.stats()["opponents"] == {1: {"episodes": 5, "win_rate": 0.6, "mean_return": 2.0}}


WITH_OPPONENTS = msgspec.structs.replace(EXPERIENCE, self_play=True)


@contextmanager
def connect(parts: Parts) -> Iterator[ActorClient]:
    with ActorClient(parts.address, TOKEN, "actor-0") as client:
        client.wait_for_opponents()
        yield client


def publish(parts: Parts, version: int, client: ActorClient) -> None:
    parts.store.publish(weights(version))
    client.wait_for_weights(version - 1)


def send(client: ActorClient, sent: Segment) -> None:
    client.send(sent)
    client.drain(60)


def wait_for_member(client: ActorClient, version: int) -> None:
    wait_for(lambda: client._wait(lambda: True, 1, "") or version in client.opponents)


class StubbornClient(RecordingClient):
    """Two opponents: version 1 always passes, version 2 always bets. The newest policy always bets."""

    def __init__(self) -> None:
        super().__init__(KUHN, self._make(1))
        self.opponents = {1: self._make(0), 2: self._make(1)}

    def _make(self, action: int) -> dict[str, np.ndarray]:
        bias = np.array([100.0, -100.0] if action == 0 else [-100.0, 100.0], np.float32)
        return {"policy.0.weight": np.zeros((2, 7), np.float32), "policy.0.bias": bias}


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
    assert {tuple(each.versions) for each in client.segments} == {(1,)}
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


POKER = "benchmarks.ours.kuhn_poker:make"


def register_champion(*words: str, bias: float = 0.0) -> ActorLearnerSpec:
    """A run that has registered its policy, which bets where `bias` is high; returns its spec."""
    spec = ActorLearnerSpec(env=POKER, hidden=()).override(["endpoint.name=poker", *words])
    experience, _ = inspect_environment(spec)
    model = make_algorithm(spec, experience).model
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.zero_()
            if name == "policy.0.bias":
                each[1] = bias
    snapshot = WeightSnapshot.of(77, arrays_of(model))
    register_policy(spec, experience, snapshot, "a-run", {"mean_return": 0.0, "steps": 1})
    return spec


def test_registered_members_stay_and_the_run_s_own_versions_are_above_them(tmp_path: Path) -> None:
    register_champion()
    register_champion()
    assert Registry().get("poker@champion").version == 2  # against others no return compares them
    register_champion("aliases=[]")
    assert Registry().get("poker@champion").version == 2
    words = ["poker@1", "poker@champion"]
    pool = OpponentPool(tmp_path, 10, max_versions=3, registered=words)
    assert (pool.versions, pool.names) == ([1, 2], {1: "poker@1", 2: "poker@2"})
    pool.offer(weights(3), 0)  # the first version of the run's own enters at once
    assert pool.versions == [1, 2, 3]
    pool.offer(weights(4), 9)
    for version in range(5, 30):
        pool.offer(weights(version), 10 * version)
    assert pool.versions[:3] == [1, 2, 3]
    assert len(pool.versions) == 5
    assert pool.versions[-1] == 29
    assert pool.find_next(0).sha256 == Registry().get("poker@1").manifest.sha256  # type: ignore[union-attr]
    register_champion()  # the alias moves: the run goes on with what it began with
    again = OpponentPool(tmp_path, 10, max_versions=3, registered=words)
    assert (again.versions, again.names) == (pool.versions, pool.names)
    with pytest.raises(RegistryError, match="9"):
        OpponentPool(tmp_path / "other", 10, registered=["poker@9"])


@pytest.mark.parametrize("snapshot_every", [0, 300])
def test_a_champion_of_an_earlier_run_is_an_opponent(snapshot_every: int, tmp_path: Path) -> None:
    champion = register_champion(bias=50.0)
    words = ["self_play.opponents=[poker@champion]", f"self_play.snapshot_every={snapshot_every}", "segment_length=16"]
    spec = champion.override(["learner.batch_steps=64", "learner.take_timeout_s=0.1", *words])
    experience, _ = check(spec)[""]
    game = RecordedKuhn()
    with LocalLoop(spec, experience, tmp_path / "run", TOKEN) as loop:
        with ActorClient(loop.address, TOKEN, "actor-0", timeout_s=20) as client:
            assert client.wait_for_weights()[0] >= 2  # version 1 is the champion's
            play(game, client, seed=1, max_steps=1500)
            assert client.drops == {}
        opponents = loop.gateway.stats()["opponents"]
    assert opponents[1]["name"] == "poker@1"
    assert (set(opponents) == {1}) == (snapshot_every == 0)
    if not snapshot_every:
        ends = {history for history in game.histories if history}
        assert ends <= {"bp", "bb", "pbp", "pbb"}  # it always bets: no game ends with two checks
    rates = select_win_rates({"": {"opponents": opponents}})
    assert "poker@1" in rates
    assert all(name == "poker@1" or int(name) > 1 for name in rates)


def test_opponents_that_a_run_cannot_play_are_refused_by_name() -> None:
    champion = register_champion()
    other = champion.override(["hidden=[8]", "self_play.opponents=[poker@1]"])
    with pytest.raises(ConfigError, match=r"poker@1 has another network than this run: hidden = \[\]"):
        check(other)
    dqn = champion.override(["algorithm=dqn", "self_play.opponents=[poker@1]"])
    with pytest.raises(ConfigError, match=r"another network than this run: factory = shoal\.models\.actor_critic"):
        check(dqn)
    assert check(champion.override(["action=sampled", "self_play.opponents=[poker@1]"]))  # how it acts is no matter
    with pytest.raises(RegistryError, match="holdem"):
        check(champion.override(["self_play.opponents=[holdem@champion]"]))
    with pytest.raises(ConfigError, match="has one agent, and self-play needs several"):
        check(ActorLearnerSpec(env="CartPole-v1").override(["self_play.opponents=[poker@1]"]))


def test_a_resumed_run_has_the_opponents_that_it_began_with() -> None:
    spec = register_champion().override(["self_play.opponents=[poker@1]"])
    _require_same_opponents(spec, spec, "one")
    with pytest.raises(SpecMismatch, match=r"run one began with \['poker@1'\]"):
        _require_same_opponents(spec.override(["self_play.opponents=[]"]), spec, "one")
    with pytest.raises(SpecMismatch, match=r"policies\.prey\.opponents"):
        _require_same_opponents(spec.override(["self_play.opponents=[]"]), spec, "one", "policies.prey.")


def test_who_cannot_draw_opponents_is_refused(tmp_path: Path) -> None:
    with Loop(POKER, tmp_path, "self_play.snapshot_every=100") as loop:
        with (
            pytest.raises(ConfigError, match="a game that owns its loop cannot"),
            ActorClient(loop.address, TOKEN, "actor-0", timeout_s=20) as client,
        ):
            GameActor(client)
        with pytest.raises(Refused, match="self-play"), RemoteClient(loop.address, TOKEN, "actor-1", timeout_s=20):
            pass


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


def test_win_rates_are_of_versions_at_equal_distances_and_of_the_newest_of_each_policy_by_name() -> None:
    results = {version: {"win_rate": version / 100} for version in range(1, 101)}
    found = select_win_rates({"": {"opponents": results}})
    assert len(found) <= MAX_WIN_RATES
    assert found["100"] == 1.0
    assert np.diff([int(version) for version in found]).tolist() == [7] * (len(found) - 1)
    assert select_win_rates({"": {}}) == {}
    results[1]["name"] = "tag-prey@1"  # type: ignore[assignment]
    found = select_win_rates({"hunters": {"opponents": results}, "prey": {"opponents": {1: results[1]}}, "late": {}})
    assert len(found) <= MAX_WIN_RATES
    assert (found["hunters 100"], found["prey tag-prey@1"]) == (1.0, 0.01)


def test_the_average_of_a_pool_is_registered_as_one_version(tmp_path: Path) -> None:
    spec = register_champion()
    experience, _ = inspect_environment(spec)
    member = Registry().get("poker@1").snapshot()
    pool = OpponentPool(tmp_path, 10)
    for version in (2, 3, 4):
        pool.offer(WeightSnapshot.of(version, member.tensors()), 10 * version)
    stats = {"mean_return": 0.0, "steps": 1}
    mixed = register_policy(spec, experience, member, "a-run", stats, "sampled", pool.load_own())
    manifest = Registry().get(mixed.ref).manifest
    assert (manifest.model.kwargs["num_members"], manifest.model.action, manifest.weights_version) == (3, "sampled", 4)
    assert [each.name for each in manifest.signature.inputs] == ["observation", "state"]
    assert len(mixed.snapshot().tensors()) == 3 * len(member.tensors())
