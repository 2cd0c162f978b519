"""Episodes that end without credit, and a remote actor whose gateways change to another run one by one."""

import math
import random
from collections import deque
from typing import Any

import gymnasium
import msgspec
import numpy as np
import pytest

from rl_setting import EXPERIENCE, POLICY, RecordingClient
from shoal.actor import play
from shoal.actor.remote import run_remote_actor
from shoal.errors import ConfigError, InvalidSegment, RunChanged
from shoal.rl.gateway.actor_stats import ActorProgress, RunProgress
from shoal.wire import (
    EpisodeSummary,
    ExperienceSpec,
    MessageLimits,
    Segment,
    SegmentMessage,
    TensorSpec,
    decode,
    pack_segment,
    unpack_segment,
)
from shoal.wire.messages import ActionMessage
from shoal.wire.segment import MAX_UNRECORDED, estimate_segment_bytes, largest_segment_bytes

WEIGHTS = {"policy.0.weight": np.zeros((2, 1), np.float32), "policy.0.bias": np.zeros(2, np.float32)}


class CountedClient(RecordingClient):
    """A connection to a gateway that counts what comes. A synchronous one gives credit for a segment now and then."""

    def __init__(self, agent: str, is_synchronous: bool) -> None:
        observation, action = TensorSpec("float32", (1,), -1.0, 1.0), TensorSpec("int64", (), 0, 1)
        super().__init__(ExperienceSpec(observation, action, 32, POLICY, (), False, (agent,)), WEIGHTS)
        self.is_synchronous, self.num_credits = is_synchronous, 0
        self.progress, self._random = RunProgress(returns=deque(), lengths=deque()), random.Random(1)

    def newer_weights(self, than: int) -> None:
        if self.is_synchronous and not self.num_credits and self._random.random() < 0.02:
            self.num_credits = 1

    def send(self, segment: Segment, timeout_s: float | None = None) -> None:
        if self.is_synchronous:
            assert self.num_credits > 0
            self.num_credits -= 1
        message = decode(frames := pack_segment(segment, 0), MessageLimits())
        assert isinstance(message, SegmentMessage)
        self.progress.record_segment(ActorProgress("actor-0", 1), unpack_segment(message, frames[1:], self.spec))


class ShortOrLong:
    """Two agents, whose episodes have 1 step or 19. A step's reward is 1."""

    possible_agents = ("a", "b")

    def __init__(self) -> None:
        self.lengths: list[int] = []
        self._random, self._num_steps = random.Random(2), 0

    def observation_space(self, agent: str) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (1,))

    def action_space(self, agent: str) -> gymnasium.spaces.Discrete:
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self._num_steps = 0
        self.lengths.append(self._random.choice([1, 19]))
        return self._observe(), {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._num_steps += 1
        has_ended = self._num_steps == self.lengths[-1]
        infos = {"b": {"is_success": np.bool_(self.lengths[-1] == 1)}}
        return self._observe(), {"a": 1.0, "b": 1.0}, {"a": has_ended, "b": has_ended}, {}, infos

    def _observe(self) -> dict[str, Any]:
        return {"a": np.zeros(1, np.float32), "b": np.zeros(1, np.float32)}


@pytest.mark.parametrize("is_synchronous", [True, False])
def test_a_policy_that_pauses_reports_the_return_of_every_episode(is_synchronous: bool) -> None:
    """Else long episodes, in which a record is more likely to begin, would be most of the reported ones."""
    game = ShortOrLong()
    pausing = CountedClient("a", is_synchronous)
    other = CountedClient("b", False)
    play([game], [pausing, other], seed=1, max_steps=10_000, pull_interval_s=0.0)  # type: ignore[arg-type, list-item]
    for progress in (pausing.progress, other.progress):
        assert list(progress.returns) == list(map(float, game.lengths))[: progress.episodes]
        assert list(progress.lengths) == game.lengths[: progress.episodes]
        assert progress.episodes > len(game.lengths) - 100
    assert not pausing.progress.successes  # the game does not say
    shortest = [length == 1 for length in other.progress.lengths]
    assert list(other.progress.successes) == shortest[-len(other.progress.successes) :]
    assert pausing.progress.mean_return == pytest.approx(np.mean(game.lengths), rel=0.05)


def with_unrecorded(*episodes: EpisodeSummary) -> Segment:
    zeros = np.zeros(1, np.float32)
    return Segment(
        np.zeros((2, 1), np.float32), np.zeros(1, np.int64), zeros, zeros, np.ones(1, np.int64), unrecorded=episodes
    )


@pytest.mark.parametrize(
    ("unrecorded", "reason", "problem"),
    [
        ([EpisodeSummary(1.0, 1)] * (MAX_UNRECORDED + 1), "invalid_range", "has 101 episodes, at most 100"),
        ([EpisodeSummary(1.0, 0)], "invalid_range", "has an episode of 0 steps"),
        ([EpisodeSummary(1.0, 1), EpisodeSummary(math.inf, 1)], "non_finite", "has a return that is NaN or infinite"),
    ],
)
def test_what_no_episode_can_be_is_rejected(unrecorded: list[EpisodeSummary], reason: str, problem: str) -> None:
    client = CountedClient("a", False)
    with pytest.raises(InvalidSegment) as caught:
        client.send(with_unrecorded(*unrecorded), None)
    assert (caught.value.reason, caught.value.field, caught.value.problem) == (reason, "unrecorded", problem)
    assert client.progress.episodes == 0


def test_they_are_within_the_largest_message_and_count_for_their_opponents() -> None:
    client = CountedClient("a", False)
    largest = with_unrecorded(*[EpisodeSummary(0.1, 2**62, 2**62)] * MAX_UNRECORDED)
    without = with_unrecorded()
    size = sum(map(len, pack_segment(largest, 2**62))) - sum(map(len, pack_segment(without, 2**62)))
    assert size <= estimate_segment_bytes(largest) - estimate_segment_bytes(without)
    named = largest_segment_bytes(client.spec) - largest_segment_bytes(msgspec.structs.replace(client.spec, agents=()))
    assert size <= named
    client.send(with_unrecorded(EpisodeSummary(1.0, 3, 2), EpisodeSummary(-1.0, 3, 2), EpisodeSummary(5.0, 3)), None)
    assert client.progress.to_dict()["opponents"] == {2: {"episodes": 2, "win_rate": 0.5, "mean_return": 0.0}}
    assert (client.progress.episodes, client.progress.steps) == (3, 1)


class ChangingClient:
    """A connection whose gateway is one of another run after some actions: the next call says so, or `connect`."""

    finished = False
    behaviour = ""
    settings_version = 0

    def __init__(self, agent: str, change_after: int, next_run: str = "run-2") -> None:
        self.spec: ExperienceSpec = msgspec.structs.replace(EXPERIENCE, agents=(agent,))
        self.offers: dict[str, Any] = {}
        self.agent = agent
        self.run_id = f"run-1.{agent}"
        self.num_connects = 0
        self._next_run_id, self._left = f"{next_run}.{agent}", change_after

    def ask(self, *message: Any) -> None: ...

    def wait_for_action(self, episode: int, step: int) -> ActionMessage:
        self._left -= 1
        if self._left <= 0 and self.run_id != self._next_run_id:
            self.run_id = self._next_run_id
            raise RunChanged("another run")
        return ActionMessage(episode, step, action=0)

    def connect(self) -> None:
        self.run_id, self.num_connects = self._next_run_id, self.num_connects + 1


class Turns:
    """Two agents, of which one acts at a time."""

    possible_agents = ("a", "b")
    _num_steps = 0

    def observation_space(self, agent: str) -> gymnasium.spaces.Box:
        return gymnasium.spaces.Box(-1.0, 1.0, (4,))

    def action_space(self, agent: str) -> gymnasium.spaces.Discrete:
        return gymnasium.spaces.Discrete(2)

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"a": np.zeros(4, np.float32)}, {}

    def step(self, actions: dict[str, Any]) -> tuple[dict[str, Any], ...]:
        self._num_steps += 1
        agent = self.possible_agents[self._num_steps % 2]
        return {agent: np.zeros(4, np.float32)}, {agent: 0.0}, {}, {}, {}


def test_an_actor_follows_all_gateways_to_the_next_run() -> None:
    clients = [ChangingClient("a", 3), ChangingClient("b", 100)]
    runs: list[str] = []
    played = run_remote_actor(
        Turns(),  # type: ignore[arg-type]
        clients,  # type: ignore[arg-type]
        max_steps=50,
        on_run=lambda spec: runs.extend(spec.agents),
    )
    assert played == 50
    assert [client.run_id for client in clients] == ["run-2.a", "run-2.b"]
    assert runs == ["a", "b"] * 2
    assert [client.num_connects for client in clients] == [1, 1]


def test_gateways_that_stay_those_of_different_runs_are_refused() -> None:
    clients = [ChangingClient("a", 3), ChangingClient("b", 100, "run-3")]
    with pytest.raises(ConfigError, match="are of different runs"):
        run_remote_actor(Turns(), clients, max_steps=50)  # type: ignore[arg-type]
