"""What episodes that were played say of those that were not."""

import functools
import math
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import gymnasium
import numpy as np
import pytest

from shoal.client import Answer
from shoal.errors import ConfigError, InferenceError, RunError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.flows.evaluation import Evaluation, record_evaluation
from shoal.libs.evaluation.connection import PolicyAddress, PolicyConnection, ask_policy, wait_for_version
from shoal.libs.evaluation.episode_player import (
    NUM_RESAMPLES,
    TRIAL_SEED,
    evaluate_policies,
    hold_trial,
    is_sure,
    resample_means,
)
from shoal.libs.evaluation.episodes import play_through
from shoal.runs import RunRecorder


def _played(returns: list[float]) -> Evaluation:
    return Evaluation(returns, 0, {1}, 1.0)


def answer(version: int = 3, **outputs: np.ndarray) -> Answer:
    return Answer(outputs, version, "policy")


def play_alone(connection: object, env: str, num_episodes: int, seed: int, max_rows: int, **words: float) -> Evaluation:
    """Of a run with one policy."""
    policy = cast("PolicyConnection", connection)
    return play_through([{"": policy}], env, num_episodes, seed, {"": max_rows}, **words)[""]


def test_an_evaluation_that_no_agent_took_part_in_is_not_recorded() -> None:
    recorded: list[object] = []
    recorder = cast("RunRecorder", SimpleNamespace(log=recorded.append, record_event=recorded.append))
    record_evaluation(recorder, 1, {})
    assert recorded == []


def test_equal_returns_have_one_mean() -> None:
    assert set(resample_means(_played([500.0] * 20), 20)) == {500.0}


@pytest.mark.parametrize(("num_low", "num_played"), [(8, 16), (3, 60), (1, 40)])
def test_the_probability_of_a_miss_is_the_binomial_one_where_there_are_two_returns(
    num_low: int, num_played: int
) -> None:
    low = num_low / num_played
    exact = sum(math.comb(20, count) * low**count * (1 - low) ** (20 - count) for count in range(2, 21))
    returns = [200.0] * num_low + [500.0] * (num_played - num_low)
    found = np.mean(resample_means(_played(returns), 20) < 475.0)  # one low return in twenty gives 485, two 470
    assert found == pytest.approx(exact, abs=5 * math.sqrt(exact * (1 - exact) / NUM_RESAMPLES))


class Still(gymnasium.Env):  # type: ignore[type-arg]
    """Shows zeros, whatever is done."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32), gymnasium.spaces.Discrete(2)
    reward, ends = 0.0, False

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        return np.zeros(4, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        return np.zeros(4, np.float32), self.reward, self.ends, False, {}


class Scripted(Still):
    """One step an episode; what it returns depends on the seed."""

    ends = True
    return_of: ClassVar[dict[int, float]] = {}
    seeds: ClassVar[list[int]] = []

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        assert seed is not None
        Scripted.seeds.append(seed)
        self.reward = Scripted.return_of.get(seed, 500.0)
        return super().reset()


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Scripted]]:
    gymnasium.register("Scripted-v0", entry_point=Scripted)
    monkeypatch.setattr(Scripted, "return_of", {})
    monkeypatch.setattr(Scripted, "seeds", [])
    yield Scripted
    del gymnasium.registry["Scripted-v0"]


def _tried(**words: object) -> tuple[Evaluation, bool]:
    """A trial in the scripted environment, and whether its version passes."""
    spec = ActorLearnerSpec.parse({"env": "Scripted-v0", **words})
    trial = hold_trial([{"": AlwaysLeft()}, {"": AlwaysLeft()}], spec)
    return trial, is_sure(trial, spec)


def test_a_trial_has_six_times_the_episodes_of_the_evaluation_and_none_of_them(scripted: type[Scripted]) -> None:
    trial, passes = _tried()
    assert (len(trial.returns), trial.versions, passes) == (120, {3}, True)
    assert trial.num_requests == 2  # in waves of what the endpoint takes at once
    tried = set(scripted.seeds)
    assert len(tried) == 120
    scripted.seeds.clear()
    evaluate_policies([{"": AlwaysLeft()}], ActorLearnerSpec(env="Scripted-v0"))
    assert len(scripted.seeds) == 20
    assert not tried & set(scripted.seeds)


def test_a_version_whose_twenty_episodes_reach_the_target_and_may_miss_it_in_others_does_not_pass(
    scripted: type[Scripted],
) -> None:
    scripted.return_of = {TRIAL_SEED + 100: 200.0}  # two of them in twenty are a miss
    trial, passes = _tried()
    assert trial.mean_return == 497.5
    assert not passes
    assert _tried(trial_episodes=20)[1]  # what a shorter trial does not find


def test_a_trial_ends_when_the_version_cannot_pass_any_more(scripted: type[Scripted]) -> None:
    scripted.return_of = {TRIAL_SEED + index: 200.0 for index in range(3)}
    trial, passes = _tried(trial_episodes=400)
    assert (len(trial.returns), passes) == (128, False)  # 64 of each connection


def test_returns_that_scatter_pass_when_their_mean_is_far_enough_above_the_target(scripted: type[Scripted]) -> None:
    random = np.random.default_rng(0)
    scripted.return_of = {TRIAL_SEED + index: random.normal(-80.0, 15.0) for index in range(200)}
    assert _tried(target_return=-95.0)[1]  # 4.5 standard errors of a mean of twenty
    assert _tried(target_return=-95.0, eval_episodes=1, trial_episodes=200)[1]  # not each single episode reaches it
    assert not _tried(target_return=-85.0)[1]  # 1.5


def test_without_a_target_there_is_nothing_to_make_sure(scripted: type[Scripted]) -> None:
    scripted.return_of = {TRIAL_SEED: -1000.0}
    trial, passes = _tried(target_return=None)
    assert (len(trial.returns), passes) == (20, True)


class AlwaysLeft:
    """Stands for a connection to an endpoint that takes `max_rows` at once."""

    def __init__(self, max_rows: int = 64) -> None:
        self._max_rows = max_rows

    def insist(self, observations: np.ndarray, masks: np.ndarray | None = None) -> Answer:
        if len(observations) > self._max_rows:
            raise InferenceError(400, f"{len(observations)} rows, and at most {self._max_rows} are taken")
        return answer(action=np.zeros(len(observations), np.int64))


def test_a_first_observation_may_be_a_list_as_many_environments_return_one() -> None:
    class Measuring:
        def insist(self, observations: np.ndarray, masks: np.ndarray | None) -> Answer:
            assert (observations.shape, observations.dtype) == ((1, 2), np.float32)
            return answer()

    wait_for_version(Measuring(), [0.0, 0.5], 3)  # type: ignore[arg-type]


def test_more_episodes_than_the_endpoint_takes_at_once_are_asked_for_in_pieces() -> None:
    whole = play_alone(AlwaysLeft(), "CartPole-v1", num_episodes=5, seed=1, max_rows=5)
    pieces = play_alone(AlwaysLeft(2), "CartPole-v1", num_episodes=5, seed=1, max_rows=2)
    assert pieces.returns == whole.returns
    assert (len(whole.returns), whole.versions, whole.num_requests) == (5, {3}, max(whole.returns))
    assert pieces.num_requests > whole.num_requests


class Recalling(gymnasium.Env):  # type: ignore[type-arg]
    """The number of an episode is its length, is seen at first only, and is the only action that the mask has."""

    observation_space, action_space = gymnasium.spaces.Box(-1, 99, (1,), np.float32), gymnasium.spaces.Discrete(99)

    def reset(self, *, seed: int | None = None, options: object = None) -> tuple[np.ndarray, dict[str, object]]:
        assert seed is not None
        self._number, self._steps = seed, 0
        return np.array([seed], np.float32), {"action_mask": np.arange(99) == seed}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        self._steps += 1
        is_right = action == self._number * 10 + self._steps
        mask = {"action_mask": np.arange(99) == self._number}
        return np.zeros(1, np.float32), float(is_right), self._steps == 2 + self._number, False, mask


class CountingUp:
    """A policy whose state is the number that it has seen, times ten, and the step; its action tells both."""

    def insist(self, observations: np.ndarray, *, masks: np.ndarray, states: np.ndarray | None = None) -> Answer:
        numbers = observations if states is None else states // 10
        np.testing.assert_array_equal(masks.argmax(1), numbers[:, 0])
        states = (np.zeros_like(observations) if states is None else states) + 10 * observations + 1
        return answer(action=states[:, 0].astype(np.int64), next_state=states)


@pytest.mark.parametrize("max_rows", [8, 2])
def test_each_episode_goes_on_with_the_state_and_the_mask_of_its_own(max_rows: int) -> None:
    gymnasium.register("Recalling-v0", entry_point=Recalling)
    try:
        played = play_alone(CountingUp(), "Recalling-v0", 4, 1, max_rows)
    finally:
        del gymnasium.registry["Recalling-v0"]
    assert played.returns == [3.0, 4.0, 5.0, 6.0]


def test_episodes_that_do_not_end_are_given_up() -> None:
    with pytest.raises(RunError, match=r"2 of 2 episodes of CartPole-v1 have not ended after 0 s.*eval_timeout_s"):
        play_alone(AlwaysLeft(), "CartPole-v1", 2, 1, max_rows=64, timeout_s=0.0)


class Held(Still):
    """Holds something (a window, a port, a process) from its making to its `close`. Never ends."""

    num_open, fault = 0, ""

    def __init__(self) -> None:
        Held.num_open += 1

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, object]]:
        if Held.fault:
            raise OSError(Held.fault)
        return super().step(action)

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
    timeout_s = 0.05 if error is RunError else 60.0
    with pytest.raises(error):
        play_alone(AlwaysLeft(taken), "Held-v0", 5, 1, max_rows, timeout_s=timeout_s)
    assert held.num_open == 0


def test_what_an_environment_raises_in_a_trial_is_said_in_a_line(
    held: type[Held], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "fault", "the game has crashed")
    line = r"env = 'Held-v0': raised OSError: the game has crashed \(test_evaluation.py:\d+\)"
    with pytest.raises(ConfigError, match=line):
        play_alone(AlwaysLeft(), "Held-v0", 2, 1, max_rows=64)


def test_requests_of_a_driver_elsewhere_begin_where_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PolicyAddress] = []

    class Connection:
        def __init__(self, address: PolicyAddress) -> None:
            made.append(address)

        def infer(self, observations: np.ndarray, states: object, masks: object) -> Answer:
            return answer(5, action=observations)

    called: list[str] = []

    def call(function: Any, *arguments: object) -> object:
        called.append(function.__name__)
        return function(*arguments)

    monkeypatch.setattr("shoal.libs.evaluation.connection._connect_once", functools.cache(Connection))
    address = PolicyAddress("http://127.0.0.1:8000", "cartpole", "token", 0, "sampled")
    connection = PolicyConnection(functools.partial(call, ask_policy, address), threading.Event())
    assert made == []
    for _ in range(2):
        assert connection.insist(np.zeros((1, 4))).version == 5
    assert made == [address], "a process keeps its connection"
    assert len(called) == 2


class LateGuest:
    """A host plays three steps alone; a guest joins in every other episode."""

    possible_agents = ("host", "guest")
    episodes = 0

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.number, self.steps = LateGuest.episodes, 0
        LateGuest.episodes += 1
        return {"host": np.zeros(2)}, {}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        self.steps += 1
        has_guest = self.number % 2 == 1 and self.steps > 1
        agents = ["host", "guest"] if has_guest else ["host"]
        over = dict.fromkeys(agents, self.steps == 3)
        return {agent: np.zeros(2) for agent in agents}, dict.fromkeys(agents, 1.0), over, {}, {}

    def observation_space(self, agent: str) -> None: ...


class CountingConnection:
    """Of an endpoint whose requests take two rows."""

    def __init__(self, version: int) -> None:
        self.version, self.rows = version, list[int]()

    def insist(self, observations: np.ndarray, **inputs: Any) -> Answer:
        self.rows.append(len(observations))
        return answer(self.version, action=np.zeros(len(observations), np.int64))


def test_an_evaluation_asks_each_policy_for_its_own_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent that is not in an episode does not count there."""
    monkeypatch.setattr("shoal.libs.evaluation.episodes.open_environment", lambda *_: nullcontext(LateGuest()))
    connections: dict[str, Any] = {"first": CountingConnection(4), "second": CountingConnection(7)}
    policy_of, max_rows = {"host": "first", "guest": "second"}, {"first": 2, "second": 64}
    found = play_through([connections], "late", 4, 0, max_rows, policy_of=policy_of)
    assert found["first"].returns == [3.0] * 4
    assert found["second"].returns == [2.0] * 2
    assert (found["first"].versions, found["second"].versions) == ({4}, {7})
    assert connections["first"].rows == [2, 2] * 3
    assert connections["second"].rows == [1, 1]
    assert (found["first"].num_requests, found["second"].num_requests) == (6, 2)


class Blinking(LateGuest):
    """A host that observes every third of twelve ticks alone."""

    def reset(self, seed: int | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
        self.steps = 0
        return {}, {}

    def step(self, actions: dict[str, int]) -> tuple[dict[str, Any], ...]:
        assert bool(actions) == (self.steps > 0 and self.steps % 3 == 0)
        self.steps += 1
        seen = {"host": np.zeros(2)} if self.steps % 3 == 0 else {}
        return seen, {"host": 1.0}, {"host": self.steps == 12}, {"host": False}, {}


def test_ticks_in_which_no_agent_observes_pass_by(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.libs.evaluation.episodes.open_environment", lambda *_: nullcontext(Blinking()))
    connection: Any = CountingConnection(1)
    found = play_through([{"host": connection}], "blinking", 2, 0, {"host": 16}, policy_of={"host": "host"})
    assert found["host"].returns == [12.0, 12.0]
