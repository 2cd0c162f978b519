"""Play episodes through an endpoint, as a client with only its URL: the evaluation of a policy, and the trial before
it, which makes sure that the evaluation will reach the target.

Called by flows, benchmarks and tests. Speaks the Open Inference Protocol over plain HTTP; uses no Ray and holds no
weights.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

import numpy as np

from shoal.actor.agent_streams import MAX_IDLE_TICKS, is_parallel
from shoal.actor.environment import open_environment, translate_environment_errors
from shoal.errors import ConfigError, ConnectionLost, InferenceError, RunError
from shoal.flows.actor_learner_spec import ActorLearnerSpec
from shoal.wire.action_masks import INFO_KEY

PATIENCE_S = 60.0  # with an unavailable endpoint: a dead replica restarts within it
TRIAL_SEED, EVALUATION_SEED = 20_000, 10_000  # the trial selects, so the evaluation must have other episodes
MAX_MISS_PROBABILITY = 1e-3  # that an evaluation misses the target after a passed trial
MIN_EPISODES = 20  # for a mean: with fewer, luck decides in many environments
HEADER_LENGTH = "Inference-Header-Content-Length"
NUM_RESAMPLES = 50_000  # estimates a probability of MAX_MISS_PROBABILITY within 15%


class ActionAnswer(NamedTuple):
    """One inference: the output tensors by name, and the version of the weights that computed them."""

    outputs: dict[str, np.ndarray]
    version: int


class PolicyConnection(Protocol):
    """A connection for playing episodes."""

    def insist(
        self,
        observations: np.ndarray,
        patience_s: float = PATIENCE_S,
        states: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> ActionAnswer:
        """The answer to `observations` [B, *obs]; of a recurrent policy to their `states` [B, S], too: None, at the
        beginning of the episodes, is zero. It then has the `next_state`s. Of a policy with action masks to `masks` bool
        [B, K], too."""
        ...


class InferenceConnection:
    """One kept-alive connection to one model of an endpoint. Not for use by several threads.

    state_size: numbers in the state of a recurrent policy; 0 of others
    """

    def __init__(self, url: str, model: str, token: str, timeout_s: float = 10.0, state_size: int = 0) -> None:
        parts = urlsplit(url)
        self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=timeout_s)
        self._path = f"{parts.path}/v2/models/{model}/infer"
        self._token, self._state_size = token, state_size

    def infer(
        self, observations: np.ndarray, states: np.ndarray | None = None, masks: np.ndarray | None = None
    ) -> ActionAnswer:
        """Request actions for `observations` [B, *obs], as bytes, which take the endpoint and this client half the time
        of JSON. Raises InferenceError with the endpoint's message, or ConnectionLost.

        Retrying is safe: a request changes nothing. See `insist`.
        """
        inputs = {"observation": np.ascontiguousarray(observations, "<f4")}
        if self._state_size:
            zeros = np.zeros((len(observations), self._state_size))
            inputs["state"] = np.ascontiguousarray(zeros if states is None else states, "<f4")
        if masks is not None:
            inputs[INFO_KEY] = np.ascontiguousarray(masks, np.bool_)
        described = [
            {
                "name": name,
                "datatype": "BOOL" if name == INFO_KEY else "FP32",
                "shape": rows.shape,
                "parameters": {"binary_data_size": rows.nbytes},
            }
            for name, rows in inputs.items()
        ]
        names = ["action", "next_state"] if self._state_size else ["action"]
        outputs = [{"name": name, "parameters": {"binary_data": True}} for name in names]
        head = json.dumps({"inputs": described, "outputs": outputs}).encode()
        payload = head + b"".join(rows.tobytes() for rows in inputs.values())
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/octet-stream"}
        headers[HEADER_LENGTH] = str(len(head))
        try:
            self._connection.request("POST", self._path, payload, headers)
            response = self._connection.getresponse()
            answer = response.read()
            size = int(response.getheader(HEADER_LENGTH, len(answer)))
            body: dict[str, Any] = json.loads(answer[:size])
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._connection.close()
            raise ConnectionLost(f"the endpoint did not answer: {error}") from error
        if response.status != 200:
            raise InferenceError(response.status, str(body.get("error", body)))
        arrays, offset = {}, size
        for output in body["outputs"]:
            dtype, count = {"INT64": "<i8", "FP32": "<f4"}[output["datatype"]], math.prod(output["shape"])
            arrays[output["name"]] = np.frombuffer(answer, dtype, count, offset).reshape(output["shape"])
            offset += arrays[output["name"]].nbytes
        return ActionAnswer(arrays, int(body["model_version"]))

    def insist(
        self,
        observations: np.ndarray,
        patience_s: float = PATIENCE_S,
        states: np.ndarray | None = None,
        masks: np.ndarray | None = None,
    ) -> ActionAnswer:
        """`infer`, retried while the endpoint is unavailable or answers 503: a replica may be restarting."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return self.infer(observations, states, masks)
            except (InferenceError, ConnectionLost) as error:
                if time.monotonic() > deadline or (isinstance(error, InferenceError) and error.status != 503):
                    raise
            time.sleep(0.05)

    def close(self) -> None:
        self._connection.close()


class Evaluation(NamedTuple):
    """`returns` of the episodes, in order; the number of requests and seconds; the versions that answered."""

    returns: list[float]
    num_requests: int
    versions: set[int]
    duration_s: float

    @property
    def mean_return(self) -> float:
        return float(np.mean(self.returns))

    def miss_probability(self, target_return: float, num_episodes: int) -> float:
        """Estimate the probability that `num_episodes` other episodes have a mean return below `target_return`, from
        these episodes by the bootstrap (Efron 1979). It assumes no distribution of returns: many are capped, as
        CartPole's, and a sum of twenty of those is far from normal."""
        random, returns = np.random.default_rng(0), np.asarray(self.returns)
        means = [random.choice(returns, (1000, num_episodes)).mean(axis=1) for _ in range(NUM_RESAMPLES // 1000)]
        return float(np.mean(np.concatenate(means) < target_return))


def wait_for_version(
    connection: PolicyConnection,
    observation: np.ndarray,
    version: int,
    timeout_s: float = PATIENCE_S,
    mask: np.ndarray | None = None,
) -> None:
    """Return when `version` or a newer one answers to an observation, and to its action mask, if the policy has masks.
    Raises ConnectionLost after `timeout_s`."""
    masks = {} if mask is None else {"masks": mask[None]}
    deadline = time.monotonic() + timeout_s
    seen = 0
    while time.monotonic() < deadline:
        seen = connection.insist(np.asarray(observation, np.float32)[None], timeout_s, **masks).version
        if seen >= version:
            return
        time.sleep(0.02)
    raise ConnectionLost(f"the endpoint still answers with version {seen}, not {version}, after {timeout_s} s")


def hold_trial(connections: Sequence[PolicyConnection], spec: ActorLearnerSpec) -> Evaluation:
    """Play `spec.num_trial_episodes`, as many at a time as the connections allow; stop early when the version cannot
    pass even if each remaining episode equals the best so far. Raises as `play_through` does."""
    at_once = _max_rows(spec) * len(connections)
    trial = Evaluation([], 0, set(), 0.0)
    while (num_missing := spec.num_trial_episodes - len(trial.returns)) > 0:
        played = _play(connections, spec, min(at_once, num_missing), TRIAL_SEED + len(trial.returns))
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


def is_sure(trial: Evaluation, spec: ActorLearnerSpec) -> bool:
    """Whether a version with this trial will reach the target in its evaluation, with near certainty."""
    return estimate_miss(trial, spec) < MAX_MISS_PROBABILITY


def estimate_miss(trial: Evaluation, spec: ActorLearnerSpec) -> float:
    """The probability that other episodes, as many as an evaluation has, miss the target."""
    if spec.target_return is None:
        return 0.0
    return trial.miss_probability(spec.target_return, max(spec.eval_episodes, MIN_EPISODES))


def evaluate(connections: Sequence[PolicyConnection], spec: ActorLearnerSpec) -> Evaluation:
    """Play `spec.eval_episodes`, which differ from the trial's. Raises as `play_through` does."""
    return _play(connections, spec, spec.eval_episodes, EVALUATION_SEED)


def _play(connections: Sequence[PolicyConnection], spec: ActorLearnerSpec, num_episodes: int, seed: int) -> Evaluation:
    timeout_s = spec.eval_timeout_s * max(1.0, num_episodes / spec.eval_episodes)
    return play_through(connections, spec.env, num_episodes, seed, _max_rows(spec), timeout_s, spec.ignore)


def _max_rows(spec: ActorLearnerSpec) -> int:
    return spec.endpoint.options(spec.model_name).max_rows


class PlayedEpisode:
    """One episode. `observations` are those of the agents that act next, by agent; None is the one of a game with one.

    returns: so far, by agent
    """

    def __init__(self, environment: Any, seed: int) -> None:
        self._environment, self._is_parallel = environment, is_parallel(environment)
        observations, infos = environment.reset(seed=seed)
        self.observations: Mapping[Any, Any] = observations if self._is_parallel else {None: observations}
        self._infos: Mapping[Any, Mapping[str, Any]] = infos if self._is_parallel else {None: infos}
        self._open = set(self.observations)  # the agents that have begun and not ended
        self._has_begun = bool(self._open)
        self.returns = dict.fromkeys(self.observations, 0.0)
        self.states: dict[Any, np.ndarray] = {}  # of a recurrent policy, by agent, after its first answer
        self._pass_idle_ticks()

    @property
    def mean_return(self) -> float:
        """Of its agents."""
        return sum(self.returns.values()) / len(self.returns)

    def get_mask(self, agent: Any) -> Any:
        """The action mask of an agent that acts next; None without."""
        return self._infos.get(agent, {}).get(INFO_KEY)

    def step(self, actions: Mapping[Any, Any]) -> None:
        """`actions`: of those who have observations."""
        if not self._is_parallel:
            observation, reward, terminated, truncated, info = self._environment.step(actions[None])
            self._infos = {None: info}
            self.observations = {} if terminated or truncated else {None: observation}
            self.returns[None] += float(reward)
            return
        self._step_agents(actions)
        self._pass_idle_ticks()

    def _pass_idle_ticks(self) -> None:
        """Until an agent has an observation, or all have ended."""
        for _ in range(MAX_IDLE_TICKS):
            if self.observations or (self._has_begun and not self._open):
                return
            self._step_agents({})
        problem = f"has had no observation for any agent in {MAX_IDLE_TICKS} steps"
        raise ConfigError("env", type(self._environment).__name__, problem, "end them, or let one of them act")

    def _step_agents(self, actions: Mapping[Any, Any]) -> None:
        observations, rewards, terminations, truncations, self._infos = self._environment.step(actions)
        for agent, reward in rewards.items():
            self.returns[agent] = self.returns.get(agent, 0.0) + float(reward)
        ended = {agent for each in (terminations, truncations) for agent, is_over in each.items() if is_over}
        self.observations = {agent: each for agent, each in observations.items() if agent not in ended}
        self._open = (self._open | self.observations.keys()) - ended
        self._has_begun |= bool(observations)


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
    """Episodes that share requests: each request has the observations of every unfinished episode. The caller's thread
    steps the environments; it steps another group while a request is in flight."""

    def __init__(self, env: str, environments: Sequence[Any], seed: int) -> None:
        self._env = env
        with translate_environment_errors(env):
            self._episodes = [PlayedEpisode(each, seed + index) for index, each in enumerate(environments)]
        self.playing = list(self._episodes)
        self._actions = AnsweredActions()

    @property
    def returns(self) -> list[float]:
        return [episode.mean_return for episode in self._episodes]

    def ask(self, connection: PolicyConnection) -> ActionAnswer:
        return self._actions.ask(connection, self._rows)

    @property
    def _rows(self) -> list[tuple[PlayedEpisode, Any]]:
        return [(episode, agent) for episode in self.playing for agent in episode.observations]

    def step(self, answer: ActionAnswer) -> None:
        actions = iter(self._actions.read(answer, self._rows))
        for episode in self.playing:
            with translate_environment_errors(self._env):
                episode.step({agent: next(actions) for agent in episode.observations})
        self.playing = [episode for episode in self.playing if episode.observations]


def play_through(
    connections: Sequence[PolicyConnection],
    env: str,
    num_episodes: int,
    seed: int,
    max_rows: int,
    timeout_s: float = 300.0,
    ignored: Sequence[str] = (),
) -> Evaluation:
    """Play `num_episodes` greedily, in parallel, in groups of at most `max_rows`, the endpoint's largest request. The
    groups take turns at the connections.

    Raises RunError when they have not ended after `timeout_s`, ConfigError for an error of an environment, and as
    `InferenceConnection.insist` does.
    """
    started = time.monotonic()
    with ExitStack() as opened:  # close unfinished environments, too: another trial may follow
        environments = [opened.enter_context(open_environment(env, ignored)) for _ in range(num_episodes)]
        num_agents = len(environments[0].possible_agents) if is_parallel(environments[0]) else 1
        num_groups = -(-num_episodes // max(1, max_rows // num_agents))
        bounds = [num_episodes * number // num_groups for number in range(num_groups + 1)]
        groups = [_Group(env, environments[begin:end], seed + begin) for begin, end in pairwise(bounds)]
        threads = [opened.enter_context(ThreadPoolExecutor(1)) for _ in connections]
        versions: set[int] = set()
        num_requests = 0

        def ask(number: int) -> Future[ActionAnswer]:
            index = number % len(connections)
            return threads[index].submit(groups[number].ask, connections[index])

        answers = {number: ask(number) for number in range(num_groups)}
        while answers:
            if time.monotonic() - started > timeout_s:
                num_playing = sum(len(group.playing) for group in groups)
                still_s = f"{num_playing} of {num_episodes} episodes of {env} have not ended after {timeout_s:g} s"
                raise RunError(f"{still_s}: give the environment a time limit, or raise eval_timeout_s")
            for number, future in list(answers.items()):
                answer = future.result()
                num_requests += 1
                versions.add(answer.version)
                groups[number].step(answer)
                if groups[number].playing:
                    answers[number] = ask(number)
                else:
                    del answers[number]
    returns = [each for group in groups for each in group.returns]
    return Evaluation(returns, num_requests, versions, time.monotonic() - started)
