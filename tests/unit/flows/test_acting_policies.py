"""The ready loop of a run of several policies: whose segment is whose, and past versions with self-play."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rl_setting import RecordingClient
from shoal.actor import play
from shoal.errors import ConfigError
from shoal.flows.rl_metrics import combine_policies
from shoal.libs.games.tag import HUNTERS, PREY, Tag
from shoal.wire import ExperienceSpec, PolicySpec, Segment, TensorSpec
from sign_game import SignGame

STAY, DOWN = 0, 2


class PolicyClient(RecordingClient):
    """A connection to the gateway of one policy, which always takes the same action; so do its past versions."""

    def __init__(
        self, agents: tuple[str, ...], size: int, action: int, past: int | None = None, version: int = 1
    ) -> None:
        policy = PolicySpec("mlp_categorical", "tanh", (("policy.0.weight", "policy.0.bias"),))
        observation, actions = TensorSpec("float32", (size,), -1.0, 1.0), TensorSpec("int64", (), 0, 4)
        super().__init__(ExperienceSpec(observation, actions, 16, policy, (), past is not None, agents))
        self.opponents = {} if past is None else {3: self._make(past)}
        self._action, self._version = action, version

    def _make(self, action: int) -> dict[str, np.ndarray]:
        bias = np.where(np.arange(5) == action, 100.0, -100.0).astype(np.float32)
        return {"policy.0.weight": np.zeros((5, *self.spec.observation.shape), np.float32), "policy.0.bias": bias}

    def wait_for_weights(self, *_: Any) -> tuple[int, dict[str, np.ndarray]]:
        return self._version, self._make(self._action)


def play_tag(*clients: PolicyClient, max_steps: int = 1200, num_envs: int = 2) -> None:
    play([Tag() for _ in range(num_envs)], clients, seed=2, max_steps=max_steps)  # type: ignore[arg-type]


def test_each_segment_goes_to_the_policy_of_its_agent() -> None:
    hunters, prey = PolicyClient(HUNTERS, 6, DOWN, version=4), PolicyClient((PREY,), 7, STAY, version=9)
    play_tag(hunters, prey)
    steps = [sum(each.num_steps for each in client.segments) for client in (hunters, prey)]
    assert steps[0] == pytest.approx(2 * steps[1], abs=4 * 16)
    for client, action, version in ((hunters, DOWN, 4), (prey, STAY, 9)):
        assert all(set(each.actions.tolist()) == {action} for each in client.segments)
        assert all(set(each.versions.tolist()) == {version} for each in client.segments)
        assert {each.opponent for each in client.segments} == {0}
        last_rewards = {float(each.rewards[-1]) for each in client.segments if each.terminated}
        assert last_rewards == {1.0 if client is hunters else -1.0}


class PausingClient(PolicyClient):
    """Gives credit for `num_credits` segments, and for no more."""

    is_synchronous, num_credits = True, 0

    def send(self, segment: Segment, timeout_s: float | None) -> None:
        assert self.num_credits > 0, "it would wait for ever"
        self.num_credits -= 1
        super().send(segment, timeout_s)


def test_agents_of_a_policy_without_credit_act_on_without_a_record() -> None:
    """While others in their game learn: the learners of both would wait for each other's actors."""
    hunters, prey = PausingClient(HUNTERS, 6, DOWN), PausingClient((PREY,), 7, STAY)
    prey.num_credits = 10

    class Granting(PausingClient):
        """Grants the hunters credit in the middle of an episode."""

        def send(self, segment: Segment, timeout_s: float | None) -> None:
            super().send(segment, timeout_s)
            is_first = all(each.episode_length for each in self.segments[:-1])
            hunters.num_credits += 6 * (is_first and segment.episode_length is None)
            hunters.finished = self.num_credits == 0  # otherwise it would wait for more

    prey.__class__ = Granting
    play_tag(hunters, prey, max_steps=10_000)
    assert len(prey.segments) == 10
    assert len(hunters.segments) == 6
    for client in (hunters, prey):
        for each in client.segments:
            assert each.episode_length is None or each.episode_length >= each.num_steps
    assert (8, 40) in [(each.num_steps, each.episode_length) for each in hunters.segments]


def test_with_self_play_one_agent_learns_beside_past_versions_of_all_policies() -> None:
    """Only what an agent does with the newest weights is experience. The opponent is a version of its own policy."""
    hunters, prey = PolicyClient(HUNTERS, 6, DOWN, past=STAY), PolicyClient((PREY,), 7, STAY, past=DOWN)
    play_tag(hunters, prey, max_steps=6000)
    learnt = {"hunters": hunters.segments, "prey": prey.segments}
    assert all(set(each.actions.tolist()) == {DOWN} for each in learnt["hunters"])
    assert all(set(each.actions.tolist()) == {STAY} for each in learnt["prey"])
    assert {each.opponent for each in learnt["hunters"]} == {3}
    assert {each.opponent for each in learnt["prey"]} == {0}
    ended = Counter({name: sum(each.terminated or each.truncated for each in learnt[name]) for name in learnt})
    assert ended["hunters"] > ended["prey"] > 0


@pytest.mark.parametrize(
    ("clients", "agent", "problem"),
    [
        ([(HUNTERS, 6)], PREY, "has no policy"),
        ([((PREY,), 7)], "left", "has no policy, nor have 1 other agents"),
        ([(HUNTERS, 6), (HUNTERS, 6)], "left", "has two policies"),
    ],
)
def test_an_actor_needs_the_gateways_of_all_policies(clients: Any, agent: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as raised:
        play_tag(*[PolicyClient(agents, size, STAY) for agents, size in clients])
    assert raised.value.value == agent


def test_an_environment_of_one_agent_is_none_for_a_run_of_several_policies() -> None:
    client = PolicyClient(HUNTERS, 6, STAY)
    with pytest.raises(ConfigError, match="has one agent, and this run has several: left, right"):
        play(SignGame(), client, max_steps=10)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("runs", "problem"), [(("a.x", "b.x"), "are of different runs"), (("a", "a"), "has one agent")]
)
def test_several_addresses_are_of_one_run_of_several_agents(runs: tuple[str, str], problem: str) -> None:
    clients = [PolicyClient((), 4, STAY) for _ in runs]
    for client, run_id in zip(clients, runs, strict=True):
        client.run_id = run_id
    with pytest.raises(ConfigError, match=problem):
        play(SignGame(), clients, max_steps=10)  # type: ignore[arg-type]


def test_metrics_of_several_policies_are_one_set() -> None:
    one = {"return/mean_100": 1.0, "steps/total": 5.0, "lag/max": math.nan, "weights/version": 3.0, "learner/loss": 0.5}
    other = {**one, "return/mean_100": -1.0, "lag/max": 2.0, "drops/stale_admission": 4.0}
    assert combine_policies({"a": one, "b": other}) == {
        **{"return/a": 1.0, "return/b": -1.0, "steps/total": 10.0, "lag/max": 2.0, "weights/version": 3.0},
        **{"a/learner/loss": 0.5, "b/learner/loss": 0.5, "drops/stale_admission": 4.0},
    }
