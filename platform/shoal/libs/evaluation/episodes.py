"""Episodes of an environment whose actions an endpoint gives: many at a time, in groups that share requests.

Called by `episode_player`, benchmarks and tests. Uses no Ray and holds no weights.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from shoal.client import Answer
from shoal.errors import RunError
from shoal.extend.flows import ONLY_POLICY, Evaluation
from shoal.extend.rl import AgentsEpisode, is_parallel, open_environment, translate_environment_errors
from shoal.libs.evaluation.connection import PolicyConnection

Connections = Mapping[str, PolicyConnection]  # by policy


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

    def ask(self, connection: PolicyConnection, acting: Sequence[tuple[PlayedEpisode, Any]]) -> Answer:
        observations = np.stack([episode.observations[agent] for episode, agent in acting]).astype(np.float32)
        inputs = dict[str, Any]()
        masks = [episode.get_mask(agent) for episode, agent in acting]
        if masks[0] is not None:
            inputs["masks"] = np.stack(masks).astype(np.bool_)
        if self.state_size is not None:
            first = np.zeros(self.state_size, np.float32)
            inputs["states"] = np.stack([episode.states.get(agent, first) for episode, agent in acting])
        return connection.insist(observations, **inputs)

    def read(self, answer: Answer, acting: Sequence[tuple[PlayedEpisode, Any]]) -> list[Any]:
        """The actions, one for each row; the episodes take the states of a recurrent policy."""
        rows, states = answer["action"], answer.get("next_state", np.empty(0))
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
    answer: Answer


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
    `PolicyConnection.insist` does.
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
