"""Episodes played through an endpoint that serves several policies, each agent by its own.

Called by the flow of such a run when it ends.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from shoal.actor.environment import open_environment, translate_environment_errors
from shoal.errors import RunError
from shoal.flows.policy_evaluation import AnsweredActions, Evaluation, PlayedEpisode, PolicyConnection


def evaluate_policies(
    connections: Mapping[str, PolicyConnection],
    policy_of: Mapping[str, str],
    env: str,
    num_episodes: int,
    seed: int,
    max_rows: Mapping[str, int],
    timeout_s: float,
    ignored: Sequence[str] = (),
) -> dict[str, Evaluation]:
    """Play `num_episodes` at once, greedily; returns for each policy the mean returns of its agents.

    ignored: parts of observations; connections: by policy; policy_of: of each agent; max_rows: of a request, by policy

    An episode in which a policy has no agent does not count for it.

    Raises RunError when they have not ended after `timeout_s`, ConfigError for an error of an environment, and as
    `InferenceConnection.insist` does.
    """
    started = time.monotonic()
    answered = {name: AnsweredActions() for name in connections}
    versions: dict[str, set[int]] = {name: set() for name in connections}
    num_requests = dict.fromkeys(connections, 0)
    with ExitStack() as opened:
        environments = [opened.enter_context(open_environment(env, ignored)) for _ in range(num_episodes)]
        with translate_environment_errors(env):
            episodes = [PlayedEpisode(each, seed + index) for index, each in enumerate(environments)]
        while playing := [episode for episode in episodes if episode.observations]:
            if time.monotonic() - started > timeout_s:
                problem = f"{len(playing)} of {num_episodes} episodes of {env} have not ended after {timeout_s:g} s"
                raise RunError(f"{problem}: give the environment a time limit, or raise eval_timeout_s")
            actions = {id(episode): dict[str, object]() for episode in playing}
            for name, connection in connections.items():
                rows = [(each, agent) for each in playing for agent in each.observations if policy_of[agent] == name]
                for begin in range(0, len(rows), max_rows[name]):
                    part = rows[begin : begin + max_rows[name]]
                    answer = answered[name].ask(connection, part)
                    num_requests[name] += 1
                    versions[name].add(answer.version)
                    for (episode, agent), action in zip(part, answered[name].read(answer, part), strict=True):
                        actions[id(episode)][agent] = action
            for episode in playing:
                with translate_environment_errors(env):
                    episode.step(actions[id(episode)])
    duration_s = time.monotonic() - started
    returns = {
        name: [[value for agent, value in each.returns.items() if policy_of[agent] == name] for each in episodes]
        for name in connections
    }
    return {
        name: Evaluation(
            [statistics.fmean(each) for each in returns[name] if each], num_requests[name], versions[name], duration_s
        )
        for name in connections
    }
