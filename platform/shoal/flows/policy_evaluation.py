"""Play episodes through an endpoint: the evaluation of a run's policies, the trial of one before it, and probes of best
actions while it learns.

The trial makes sure that the evaluation will reach the target.

Called by flows, benchmarks and tests. Uses no Ray and holds no weights.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shoal.actor.agent_streams import AgentsEpisode, is_parallel
from shoal.actor.environment import open_environment, translate_environment_errors
from shoal.errors import RunError
from shoal.flows.actor_learner_spec import ONLY_POLICY, ActorLearnerSpec
from shoal.flows.policy_connection import ActionAnswer, PolicyConnection
from shoal.registry import ModelVersion
from shoal.runs import RunRecorder
from shoal.runs.formatting import format_number
from shoal.weights import WeightSnapshot

TRIAL_SEED, EVALUATION_SEED = 20_000, 10_000  # the trial selects, so the evaluation must have other episodes
PROBE_SEED = 30_000
PAUSE_FACTOR = 19  # pauses between probes are so many times as long as a probe: they take 5% of the time at most
MAX_MISS_PROBABILITY = 1e-3  # that an evaluation misses the target after a passed trial
MIN_EPISODES = 20  # for a mean: with fewer, luck decides in many environments
ACTIONS = ("best", "sampled")  # how a policy acts: see `shoal.serve.model.action_sampler`
NUM_FULL_REASONS = 2  # of failed trials, before it is said what to do
REMIND_EVERY = 50  # failed trials it is said once more
NUM_RESAMPLES = 50_000  # estimates a probability of MAX_MISS_PROBABILITY within 15%

Connections = Mapping[str, PolicyConnection]  # by policy


class Evaluation(NamedTuple):
    """`returns` of the episodes, in order; the number of requests and seconds; the versions that answered."""

    returns: list[float]
    num_requests: int
    versions: set[int]
    duration_s: float

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))

    def resample_means(self, num_episodes: int) -> np.ndarray:
        """Estimate mean returns of `num_episodes` other episodes, float64 [NUM_RESAMPLES], from these episodes by the
        bootstrap (Efron 1979). It assumes no distribution of returns: many are capped, as CartPole's, and a sum of
        twenty of those is far from normal."""
        random, returns = np.random.default_rng(0), np.asarray(self.returns)
        means = [random.choice(returns, (1000, num_episodes)).mean(axis=1) for _ in range(NUM_RESAMPLES // 1000)]
        return np.concatenate(means)


def hold_trial(connections: Sequence[Connections], spec: ActorLearnerSpec) -> Evaluation:
    """Play `spec.num_trial_episodes` of a run with one policy, as many at a time as the connections allow; stop early
    when the version cannot pass even if each remaining episode equals the best so far. Raises as `play_through`
    does."""
    at_once = spec.endpoint.options(spec.model_name).max_rows * len(connections)
    trial = Evaluation([], 0, set(), 0.0)
    while (num_missing := spec.num_trial_episodes - len(trial.returns)) > 0:
        num_episodes = min(at_once, num_missing)
        played = _play(connections, spec, num_episodes, TRIAL_SEED + len(trial.returns))[ONLY_POLICY]
        trial = Evaluation(
            trial.returns + played.returns,
            trial.num_requests + played.num_requests,
            trial.versions | played.versions,
            trial.duration_s + played.duration_s,
        )
        at_best = trial.returns + [max(trial.returns)] * (spec.num_trial_episodes - len(trial.returns))
        if not is_sure(trial._replace(returns=at_best), spec):
            break
    return trial


def probe_policy(connections: Sequence[Connections], spec: ActorLearnerSpec) -> Evaluation:
    """Play some episodes of a run with one policy while it learns. Raises as `play_through` does."""
    return _play(connections, spec, max(spec.eval_episodes, MIN_EPISODES), PROBE_SEED)[ONLY_POLICY]


class EpisodePlayer:
    """One evaluation at a time, in a thread of its own. connect: as `connect_policies`"""

    def __init__(
        self, spec: ActorLearnerSpec, connect: Callable[..., AbstractContextManager[Sequence[Connections]]]
    ) -> None:
        self._spec, self._connect = spec, connect
        self._thread = ThreadPoolExecutor(1, "episode-player")
        self._cancelled = threading.Event()  # what is being played
        self._probe: Future[float | None] | None = None
        self._due_s = 0.0  # of the next probe

    def start_trial(self, action: str, snapshot: WeightSnapshot) -> Future[Evaluation]:
        """Begin a trial of this version. A probe that has not ended is given up."""
        self.cancel()
        self._cancelled = cancelled = threading.Event()
        return self._thread.submit(self._play, hold_trial, action, [snapshot], cancelled)

    def probe(self) -> float | None:
        """The mean return of a probe that has just ended; begin one when it is time."""
        found = None
        if self._probe is None and time.monotonic() >= self._due_s:
            self._cancelled = cancelled = threading.Event()
            self._probe = self._thread.submit(self._run_probe, cancelled)
        elif self._probe is not None and self._probe.done():
            found, self._probe = self._probe.result(), None
        return found

    def cancel(self) -> None:
        """Let what is being played raise ConnectionLost. Does not wait."""
        self._cancelled.set()

    def close(self) -> None:
        """End without waiting. Idempotent."""
        self.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _play(self, play: Callable[..., Evaluation], *setting: Any) -> Evaluation:
        with self._connect(*setting) as connections:
            return play(connections, self._spec)

    def _run_probe(self, cancelled: threading.Event) -> float | None:
        began_s = time.monotonic()
        try:
            return self._play(probe_policy, "best", (), cancelled).mean_return
        except Exception:  # noqa: BLE001 - as while a replica restarts: no probe ends the run, and the next may succeed
            return None
        finally:
            self._due_s = time.monotonic() + PAUSE_FACTOR * (time.monotonic() - began_s)


def choose_action(trials: Mapping[str, Evaluation]) -> str:
    """The best actions, unless sampled ones return more by more than chance."""
    if len(trials) < len(ACTIONS):
        return next(iter(trials))
    return "sampled" if is_better(trials["sampled"], trials["best"]) else "best"


def is_better(one: Evaluation, other: Evaluation) -> bool:
    """Whether one has the higher mean return by more than twice the standard error of the difference."""
    first, second = np.asarray(one.returns), np.asarray(other.returns)
    error = math.sqrt(first.var() / len(first) + second.var() / len(second))
    return float(first.mean() - second.mean()) > 2 * error


def is_sure(trial: Evaluation, spec: ActorLearnerSpec) -> bool:
    """Whether a version with this trial will reach the target in its evaluation, with near certainty."""
    return estimate_miss(trial, spec) < MAX_MISS_PROBABILITY


def estimate_miss(trial: Evaluation, spec: ActorLearnerSpec) -> float:
    """The probability that other episodes, as many as an evaluation has, miss the target."""
    if spec.target_return is None:
        return 0.0
    return float(np.mean(trial.resample_means(max(spec.eval_episodes, MIN_EPISODES)) < spec.target_return))


def judge_trial(trials: Sequence[Evaluation], spec: ActorLearnerSpec, version: int, action: str) -> dict[str, Any]:
    """What a record says of the last trial: whether it `passes`, and the `reason` if not; after others that failed what
    to do, and then in few words."""
    trial = trials[-1]
    miss = estimate_miss(trial, spec)
    passes = miss < MAX_MISS_PROBABILITY
    target, returned = spec.target_return, f"version {version} returned {format_number(trial.mean_return)}"
    reason = "" if passes else returned
    if reason and len(trials) <= NUM_FULL_REASONS:
        reason += (
            f" over {len(trial.returns)} episodes of a trial with action={action}, and would miss"
            f" {target:g} in others with a probability of {miss:.2g}, where {MAX_MISS_PROBABILITY:g} is allowed"
        )
    elif reason and len(trials) % REMIND_EVERY == NUM_FULL_REASONS + 1:
        nearest = max(trials, key=lambda each: each.mean_return)
        sure = np.quantile(nearest.resample_means(max(spec.eval_episodes, MIN_EPISODES)), MAX_MISS_PROBABILITY / 2)
        reason += f" in its trial with action={action}; the nearest trial returned {format_number(nearest.mean_return)}"
        reason += f", and would pass target_return={sure:.4g}: lower it, or raise max_wall_s={spec.max_wall_s:g}"
    result = {"mean_return": trial.mean_return, "episodes": len(trial.returns), "passes": passes, "action": action}
    bound = {"miss_probability": miss, "allowed": MAX_MISS_PROBABILITY, "target": target}
    return {"version": version, "seconds": trial.duration_s, **result, **bound, "reason": reason}


def describe_registered(model: ModelVersion, evaluation: Evaluation | None, action: str) -> str:
    name = f"{model.ref} ({', '.join(model.aliases)})" if model.aliases else model.ref
    decision = f"\n{model.decision}" if model.decision else ""
    if evaluation is None:
        return f"{name}: not evaluated, for the run has no environment to play{decision}"
    if not evaluation.returns:
        return f"{name}: no episode of the evaluation had one of its agents{decision}"
    return (
        f"{name}: mean return {format_number(evaluation.mean_return)} over {len(evaluation.returns)} episodes played"
        f" through the endpoint with action={action} ({evaluation.num_requests} requests){decision}"
    )


def evaluate_policies(connections: Sequence[Connections], spec: ActorLearnerSpec) -> dict[str, Evaluation]:
    """Play `spec.eval_episodes`, which differ from the trial's; by policy, without an environment of none. Raises as
    `play_through` does."""
    return {} if spec.given else _play(connections, spec, spec.eval_episodes, EVALUATION_SEED)


def _play(
    connections: Sequence[Connections], spec: ActorLearnerSpec, num_episodes: int, seed: int
) -> dict[str, Evaluation]:
    timeout_s = spec.eval_timeout_s * max(1.0, num_episodes / spec.eval_episodes)
    max_rows = {name: own.endpoint.options(own.model_name).max_rows for name, own in spec.split_by_policy().items()}
    policy_of = spec.assign_policies()
    return play_through(connections, spec.env, num_episodes, seed, max_rows, timeout_s, spec.ignore, policy_of)


def record_evaluation(recorder: RunRecorder, step: int, played: Mapping[str, Evaluation]) -> None:
    """played: of each policy that had an agent in an episode, if any had; step: of the metrics"""
    if not played:
        return
    if ONLY_POLICY not in played:
        recorder.log(step, {f"evaluation/{name}": each.mean_return for name, each in played.items()})
        recorder.record_event(
            "policies_evaluated",
            returns={name: each.returns for name, each in played.items()},
            versions={name: sorted(each.versions) for name, each in played.items()},
            seconds=max(each.duration_s for each in played.values()),
        )
        return
    evaluation = played[ONLY_POLICY]
    metrics = {
        "evaluation/mean": evaluation.mean_return,
        "evaluation/requests": evaluation.num_requests,
        "endpoint/requests_per_s": evaluation.num_requests / evaluation.duration_s,
    }
    recorder.log(step, metrics)
    recorder.record_event(
        "evaluated",
        mean_return=evaluation.mean_return,
        returns=evaluation.returns,
        requests=evaluation.num_requests,
        versions=sorted(evaluation.versions),
    )


class PlayedEpisode(AgentsEpisode):
    """One episode. returns: so far, by agent"""

    def __init__(self, environment: Any, seed: int) -> None:
        super().__init__(environment, seed)
        self.returns = {**dict.fromkeys(self.observations, 0.0), **self.rewards}
        self.states: dict[Any, np.ndarray] = {}  # of a recurrent policy, by agent, after its first answer

    def step(self, actions: Mapping[Any, Any]) -> None:
        super().step(actions)
        for agent, reward in self.rewards.items():
            self.returns[agent] = self.returns.get(agent, 0.0) + reward


class AnsweredActions:
    """Actions of one policy for agents of several episodes, by one request. `state_size` is known after the first.

    acting: the episodes and their agents, one for each row
    """

    def __init__(self) -> None:
        self.state_size: int | None = None  # of a recurrent policy

    def ask(self, connection: PolicyConnection, acting: Sequence[tuple[PlayedEpisode, Any]]) -> ActionAnswer:
        observations = np.stack([episode.observations[agent] for episode, agent in acting]).astype(np.float32)
        inputs = dict[str, Any]()
        masks = [episode.get_mask(agent) for episode, agent in acting]
        if masks[0] is not None:
            inputs["masks"] = np.stack(masks).astype(np.bool_)
        if self.state_size is not None:
            first = np.zeros(self.state_size, np.float32)
            inputs["states"] = np.stack([episode.states.get(agent, first) for episode, agent in acting])
        return connection.insist(observations, **inputs)

    def read(self, answer: ActionAnswer, acting: Sequence[tuple[PlayedEpisode, Any]]) -> list[Any]:
        """The actions, one for each row; the episodes take the states of a recurrent policy."""
        rows, states = answer.outputs["action"], answer.outputs.get("next_state", np.empty(0))
        self.state_size = states.shape[1] if len(states) else None
        for (episode, agent), state in zip(acting, states, strict=False):
            episode.states[agent] = state
        return rows.tolist() if rows.ndim == 1 else list(rows)


class _Group:
    """Episodes that share requests: each request has the observations of every agent of a policy in the unfinished
    ones. The caller's thread steps the environments; it steps another group while requests are in flight."""

    def __init__(
        self,
        env: str,
        environments: Sequence[Any],
        seed: int,
        max_rows: Mapping[str, int],
        policy_of: Mapping[Any, str],
    ) -> None:
        self._env = env
        self._max_rows = max_rows
        self._policy_of = policy_of
        with translate_environment_errors(env):
            self._episodes = [PlayedEpisode(each, seed + index) for index, each in enumerate(environments)]
        self.playing = list(self._episodes)
        self._actions = {name: AnsweredActions() for name in max_rows}

    def collect_returns(self, policy: str) -> Iterator[float]:
        """Yield, for each episode, the mean of the policy's agents, if it has any there."""
        for episode in self._episodes:
            own = [value for agent, value in episode.returns.items() if self._find_policy(agent) == policy]
            if own:
                yield statistics.fmean(own)

    def ask(self, connections: Connections) -> list[_Answered]:
        """One request for each policy whose agents act next, or several of at most its `max_rows`."""
        answered = []
        for name, connection in connections.items():
            rows = [
                (episode, agent)
                for episode in self.playing
                for agent in episode.observations
                if self._find_policy(agent) == name
            ]
            for begin in range(0, len(rows), self._max_rows[name]):
                part = rows[begin : begin + self._max_rows[name]]
                answered.append(_Answered(name, part, self._actions[name].ask(connection, part)))
        return answered

    def step(self, answered: Sequence[_Answered]) -> None:
        actions = {id(episode): dict[Any, Any]() for episode in self.playing}
        for policy, rows, answer in answered:
            for (episode, agent), action in zip(rows, self._actions[policy].read(answer, rows), strict=True):
                actions[id(episode)][agent] = action
        for episode in self.playing:
            with translate_environment_errors(self._env):
                episode.step(actions[id(episode)])
        self.playing = [episode for episode in self.playing if episode.observations]

    def _find_policy(self, agent: Any) -> str:
        return self._policy_of.get(agent, ONLY_POLICY)


class _Answered(NamedTuple):
    """A request: the policy, the episodes and agents of its rows, and the answer."""

    policy: str
    rows: Sequence[tuple[PlayedEpisode, Any]]
    answer: ActionAnswer


def play_through(
    connections: Sequence[Connections],
    env: str,
    num_episodes: int,
    seed: int,
    max_rows: Mapping[str, int],
    timeout_s: float = 300.0,
    ignored: Sequence[str] = (),
    policy_of: Mapping[Any, str] | None = None,
) -> dict[str, Evaluation]:
    """Play `num_episodes` greedily, in parallel, in groups whose requests have at most `max_rows`, the endpoint's
    largest. The groups take turns at the connections. An episode in which a policy has no agent does not count for it.

    max_rows:  by policy
    policy_of: of each agent; by default all have the only one

    Raises RunError when they have not ended after `timeout_s`, ConfigError for an error of an environment, and as
    `InferenceConnection.insist` does.
    """
    started = time.monotonic()
    policy_of = policy_of or {}
    with ExitStack() as opened:  # close unfinished environments, too: another trial may follow
        environments = [opened.enter_context(open_environment(env, ignored)) for _ in range(num_episodes)]
        agents = environments[0].possible_agents if is_parallel(environments[0]) else [None]
        shared = [policy_of.get(agent, ONLY_POLICY) for agent in agents]
        size = max(1, min(rows // max(1, shared.count(name)) for name, rows in max_rows.items()))
        num_groups = -(-num_episodes // size)
        bounds = [num_episodes * number // num_groups for number in range(num_groups + 1)]
        groups = [
            _Group(env, environments[begin:end], seed + begin, max_rows, policy_of) for begin, end in pairwise(bounds)
        ]
        threads = [opened.enter_context(ThreadPoolExecutor(1)) for _ in connections]
        versions: dict[str, set[int]] = {name: set() for name in max_rows}
        num_requests = dict.fromkeys(max_rows, 0)

        def ask(number: int) -> Future[list[_Answered]]:
            index = number % len(connections)
            return threads[index].submit(groups[number].ask, connections[index])

        answers = {number: ask(number) for number in range(num_groups)}
        while answers:
            if time.monotonic() - started > timeout_s:
                num_playing = sum(len(group.playing) for group in groups)
                still_s = f"{num_playing} of {num_episodes} episodes of {env} have not ended after {timeout_s:g} s"
                raise RunError(f"{still_s}: give the environment a time limit, or raise eval_timeout_s")
            for number, future in list(answers.items()):
                answered = future.result()
                for each in answered:
                    num_requests[each.policy] += 1
                    versions[each.policy].add(each.answer.version)
                groups[number].step(answered)
                if groups[number].playing:
                    answers[number] = ask(number)
                else:
                    del answers[number]
    returns = {name: [each for group in groups for each in group.collect_returns(name)] for name in max_rows}
    duration_s = time.monotonic() - started
    return {name: Evaluation(returns[name], num_requests[name], versions[name], duration_s) for name in max_rows}
