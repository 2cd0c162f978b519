"""Games of several agents, which have one policy or several, and self-play: past versions play all agents but one.

Called by the ready loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from shoal.actor.agent_streams import (
    AgentsEpisode,
    AgentStream,
    ParallelEnvironment,
    Runner,
    StreamGame,
    find_mask,
    is_parallel,
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
        self._opponents: dict[str, Opponent] = {}  # with self-play, of the agents that do not learn
        self._playing: list[str] = []  # the opponents that act next

    _episode: AgentsEpisode

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
        self._step_episode(dict(zip(self._acting_agents, actions, strict=True)))
        self._advance_until_stream_acts()

    def _advance_until_stream_acts(self) -> None:
        """Step until a stream acts next: through the turns of opponents, and into the next episode."""
        while not self._acting_agents:
            if self._playing:
                self._step_episode({})
            else:
                self._begin_episode(None)

    def _begin_episode(self, seed: int | None) -> None:
        self._release_streams(list(self._open))
        self._choices = {}
        self._rewards = {}
        self._outdated = set()
        self._opponents = self._draw_opponents()
        self._episode = AgentsEpisode(self._environment, seed)
        self._select_acting()

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

    def _step_episode(self, actions: dict[str, Any]) -> None:
        episode = self._episode
        for agent in self._playing:
            choices = self._find_runner(agent).mask_choices
            mask = find_mask(episode.infos.get(agent, {}), choices)
            actions[agent] = self._opponents[agent].policy.act(episode.observations[agent], (id(self), agent), mask)[0]
        episode.step(actions)
        for agent in list(self._choices):
            self._rewards[agent] += episode.rewards.get(agent, 0.0)
            if agent in episode.observations or agent in episode.outcomes:  # otherwise it waits for its turn
                self._record(agent)
        self._release_streams([agent for agent in episode.outcomes if agent in self._open])
        self._select_acting()

    def _record(self, agent: str) -> None:
        episode = self._episode
        stream, reward = self._open[agent], self._rewards.pop(agent)
        has_ended = agent in episode.outcomes
        observation, is_cut_off = episode.get_outcome(agent) if has_ended else (episode.observations[agent], False)
        ending = has_ended and not is_cut_off, is_cut_off
        segment = stream.end_step(self._choices.pop(agent), reward, observation, *ending, episode.infos.get(agent, {}))
        if segment is not None:  # the end of an episode is sent although its steps are outdated, for its return
            self._find_runner(agent).send(stream, segment)
        elif agent in self._outdated:
            stream.discard_steps()
        self._outdated.discard(agent)

    def _select_acting(self) -> None:
        """Let those act next who have an observation; who is new begins an episode."""
        observations, infos = self._episode.observations, self._episode.infos
        self._acting_agents = [agent for agent in observations if agent not in self._opponents]
        # How the opponents go on when the agent that learns has ended is of no use.
        is_over = any(agent not in self._opponents for agent in self._episode.outcomes)
        self._playing = [] if is_over else [agent for agent in observations if agent in self._opponents]
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
