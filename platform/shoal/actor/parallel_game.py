"""Games of several agents, which have one policy or several, and self-play: past versions play all agents but one.

Called by the ready loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shoal.actor.agent_streams import (
    MAX_IDLE_TICKS,
    AgentStream,
    ParallelEnvironment,
    Runner,
    StreamGame,
    find_mask,
    is_parallel,
    to_float,
)
from shoal.actor.client import ActorClient
from shoal.actor.policy import Policy
from shoal.errors import ConfigError

P = TypeVar("P")


class Opponent(NamedTuple):
    """A version of the policy that does not learn."""

    version: int
    policy: Policy


class OpponentDraw:
    """The versions of the pool that have come from the gateway; it never becomes empty again.

    members: their weights, by version; another mapping whenever they change
    make_policy: a policy without weights, of a seed
    seed: of the draws; None for random ones
    """

    def __init__(
        self,
        members: Callable[[], Mapping[int, Mapping[str, np.ndarray]]],
        make_policy: Callable[[int], Policy],
        seed: int | None,
    ) -> None:
        self._members, self._make_policy = members, make_policy
        # A generator of its own: a shared one would tie an opponent's actions to the learner's.
        self._random = np.random.default_rng(None if seed is None else (seed, 2))
        self._drawn_from: Mapping[int, Mapping[str, np.ndarray]] = {}
        self._opponents: list[Opponent] = []
        self._known: dict[int, Opponent] = {}

    def draw(self) -> Opponent:
        """Any version, all with the same probability: the mixture of fictitious play."""
        members = self._members()
        if members is not self._drawn_from:
            self._drawn_from = members
            self._opponents = []
            for version, tensors in members.items():
                if (opponent := self._known.get(version)) is None:
                    opponent = Opponent(version, self._make_policy(int(self._random.integers(2**63))))
                    opponent.policy.load(version, tensors)
                self._opponents.append(opponent)
            self._known = {opponent.version: opponent for opponent in self._opponents}
        return self._opponents[int(self._random.integers(len(self._opponents)))]


class ParallelRunner(Runner, Protocol):
    """The runner of one policy, which also gives a game the opponents with past versions of it."""

    mask_choices: Sequence[int]  # of the numbers of an action, in a run with masks

    def draw_opponent(self) -> Opponent | None: ...


class ParallelGame(StreamGame):
    """An environment with several agents, each of which is a stream while it is in an episode.

    With self-play one agent is a stream, drawn for each episode. Opponents play the others, without a record: in an
    episode all agents of a policy have the same version of it.

    find_runner: of the policy that an agent has
    """

    def __init__(self, environment: ParallelEnvironment, find_runner: Callable[[str], ParallelRunner]) -> None:
        self._environment, self._find_runner = environment, find_runner
        self._random = np.random.default_rng()
        self._idle: dict[ParallelRunner, list[AgentStream]] = {}
        self._open: dict[str, AgentStream] = {}
        # The last choice of an agent (action, log-probability, version), and its reward since then.
        self._choices: dict[str, tuple[Any, float, int]] = {}
        self._rewards: dict[str, float] = {}
        self._outdated: set[str] = set()  # agents that wait since `discard_steps`: their last choice is discarded, too
        self._acting_agents: list[str] = []  # the agents of `acting`
        self.acting: list[AgentStream] = []
        self._has_started = False  # whether any agent has observed anything in this episode
        self._opponents: dict[str, Opponent] = {}  # with self-play, of the agents that do not learn
        # The observations and masks of the opponents that act next.
        self._others: dict[str, tuple[Any, np.ndarray | None]] = {}

    @property
    def streams(self) -> Sequence[AgentStream]:
        return list(self._open.values())

    def discard_steps(self, policy: Policy) -> None:
        super().discard_steps(policy)
        self._outdated |= {agent for agent in self._choices if self._open[agent].policy is policy}

    def reset(self, seeds: Sequence[int | None]) -> None:
        (seed,) = seeds
        if seed is not None:
            self._random = np.random.default_rng((seed, 1))  # the environment may have the one of `seed` itself
        self._begin_episode(seed)
        self._advance_until_stream_acts()

    def step(self, actions: Sequence[Any], log_probabilities: Sequence[float]) -> None:
        for agent, action, log_probability in zip(self._acting_agents, actions, log_probabilities, strict=True):
            self._choices[agent] = action, log_probability, self._open[agent].version
            self._rewards[agent] = 0.0
        self._step_environment(dict(zip(self._acting_agents, actions, strict=True)))
        self._advance_until_stream_acts()

    def _advance_until_stream_acts(self) -> None:
        """Step until a stream acts next: through the turns of opponents, ticks without observations, and into the next
        episode."""
        num_idle = 0
        while not self._acting_agents:
            if self._has_started and not self._open and not self._others:
                self._begin_episode(None)
                continue
            num_idle = 0 if self._others else num_idle + 1
            if num_idle > MAX_IDLE_TICKS:
                waiting = f"any of {sorted(self._open)}, and they have not ended" if self._open else "any agent"
                problem = f"has had no observation for {waiting}, in {MAX_IDLE_TICKS} steps"
                raise ConfigError("env", type(self._environment).__name__, problem, "end them, or let one of them act")
            self._step_environment({})

    def _begin_episode(self, seed: int | None) -> None:
        self._release_streams(list(self._open))
        self._choices = {}
        self._rewards = {}
        self._outdated = set()
        self._opponents, self._has_started = self._draw_opponents(), False
        observations, infos = self._environment.reset(seed=seed)
        self._select_acting(observations, (), infos)

    def _draw_opponents(self) -> dict[str, Opponent]:
        agents = self._environment.possible_agents
        drawn = {runner: runner.draw_opponent() for runner in dict.fromkeys(map(self._find_runner, agents))}
        if None in drawn.values():
            return {}
        learner = agents[int(self._random.integers(len(agents)))]
        result = {agent: drawn[self._find_runner(agent)] for agent in agents if agent != learner}
        opponents = {agent: opponent for agent, opponent in result.items() if opponent is not None}
        for agent, opponent in opponents.items():
            opponent.policy.reset((id(self), agent))  # which may play in several games
        return opponents

    def _release_streams(self, agents: Iterable[str]) -> None:
        for agent in agents:
            self._idle.setdefault(self._find_runner(agent), []).append(self._open.pop(agent))

    def _step_environment(self, actions: dict[str, Any]) -> None:
        for agent, (observation, mask) in self._others.items():
            actions[agent] = self._opponents[agent].policy.act(observation, (id(self), agent), mask)[0]
        observations, rewards, terminations, truncations, infos = self._environment.step(actions)
        ended = [agent for each in (terminations, truncations) for agent, has_ended in each.items() if has_ended]
        for agent in list(self._choices):
            self._rewards[agent] += to_float(rewards.get(agent, 0.0))
            if agent in observations or agent in ended:  # otherwise it waits for its turn
                ending = terminations.get(agent, False), truncations.get(agent, False)
                self._record(agent, observations, *ending, infos.get(agent, {}))
        self._release_streams([agent for agent in dict.fromkeys(ended) if agent in self._open])
        self._select_acting(observations, ended, infos)

    def _record(
        self, agent: str, observations: Mapping[str, Any], terminated: bool, truncated: bool, info: Mapping[str, Any]
    ) -> None:
        if agent not in observations:
            problem = f"ends without its last observation (of {sorted(observations)})"
            raise ConfigError("env", agent, problem, "step returns it with terminated or truncated")
        stream, reward = self._open[agent], self._rewards.pop(agent)
        choice = self._choices.pop(agent)
        segment = stream.end_step(choice, reward, observations[agent], terminated, truncated, info)
        if segment is not None:  # the end of an episode is sent although its steps are outdated, for its return
            self._find_runner(agent).send(stream, segment)
        elif agent in self._outdated:
            stream.discard_steps()
        self._outdated.discard(agent)

    def _select_acting(
        self, observations: Mapping[str, Any], finished: Sequence[str], infos: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Let those act next who have an observation; who is new begins an episode."""
        self._has_started |= bool(observations)
        acting = [agent for agent in observations if agent not in finished]
        self._acting_agents, self._others = [agent for agent in acting if agent not in self._opponents], {}
        # How the opponents go on when the agent that learns has ended is of no use.
        if self._opponents and all(agent in self._opponents for agent in finished):
            self._others = {
                agent: (observations[agent], find_mask(infos.get(agent, {}), self._find_runner(agent).mask_choices))
                for agent in acting
                if agent in self._opponents
            }
        for agent in self._acting_agents:
            if agent not in self._open:
                runner = self._find_runner(agent)
                idle = self._idle.get(runner)
                self._open[agent] = stream = idle.pop() if idle else runner.make_stream()
                rivals = [each for other, each in self._opponents.items() if self._find_runner(other) is runner]
                stream.opponent = rivals[0].version if rivals else 0
                stream.start_episode(observations[agent], infos.get(agent, {}))
        self.acting = [self._open[agent] for agent in self._acting_agents]


def assign_agents(environment: Any, policies: Sequence[tuple[P, Sequence[str]]]) -> dict[Any, P]:
    """The policy of each agent; the agent of an environment that has one is None.

    policies: each with the agents that it is for; none where it is for all

    Raises ConfigError for an agent that has no policy, or several.
    """
    named = [agent for _, own in policies for agent in own]
    if not is_parallel(environment):
        if len(policies) > 1 or named:
            problem = f"has one agent, and this run has several: {', '.join(named)}"
            raise ConfigError("env", type(environment).__name__, problem, "take the run's own")
        return {None: policies[0][0]}
    assigned: dict[Any, P] = {}
    agents = environment.possible_agents
    for policy, own in policies:
        for agent in own or agents:
            if agent in assigned:
                raise ConfigError("connect", agent, "has two policies", "give the addresses of one run, each once")
            assigned[agent] = policy
    if missing := [agent for agent in agents if agent not in assigned]:
        problem = f"has no policy, nor have {len(missing) - 1} other agents" if len(missing) > 1 else "has no policy"
        raise ConfigError("connect", missing[0], problem, "give the addresses of all policies of the run")
    return assigned


def require_one_run(clients: Sequence[ActorClient]) -> None:
    """Raise ConfigError when the gateways of several policies are of different runs."""
    if len(clients) > 1 and len({client.run_id.rpartition(".")[0] for client in clients}) > 1:
        runs = [client.run_id for client in clients]
        raise ConfigError("connect", runs, "are of different runs", "give the addresses of one run")
