"""Games of several agents, and self-play, in which past versions of the policy play all agents but one.

Called by the ready loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.actor.agent_streams import AgentStream, ParallelEnvironment, Runner, StreamGame, find_mask, to_float
from shoal.actor.policy import Policy
from shoal.errors import ConfigError


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
            self._opponents = [self._known.get(version) or self._load(version) for version in members]
            self._known = {opponent.version: opponent for opponent in self._opponents}
        return self._opponents[int(self._random.integers(len(self._opponents)))]

    def _load(self, version: int) -> Opponent:
        policy = self._make_policy(int(self._random.integers(2**63)))
        policy.load(version, self._drawn_from[version])
        return Opponent(version, policy)


class ParallelRunner(Runner, Protocol):
    """Who also gives a game its opponents."""

    mask_choices: Sequence[int]  # of the numbers of an action, in a run with masks

    def draw_opponent(self) -> Opponent | None: ...


class ParallelGame(StreamGame):
    """An environment with several agents, each of which is a stream while it is in an episode.

    With self-play one agent is a stream, drawn for each episode. An opponent plays the others, without a record.
    """

    def __init__(self, environment: ParallelEnvironment, runner: ParallelRunner) -> None:
        self._environment, self._runner = environment, runner
        self._random = np.random.default_rng()
        self._idle: list[AgentStream] = []
        self._open: dict[str, AgentStream] = {}
        # The last choice of an agent (action, log-probability, version), and its reward since then.
        self._choices: dict[str, tuple[Any, float, int]] = {}
        self._rewards: dict[str, float] = {}
        self._acting_agents: list[str] = []  # the agents of `acting`
        self.acting: list[AgentStream] = []
        self._opponent: Opponent | None = None
        self._learner = ""  # with an opponent, the agent that learns
        # The observations and masks of those who act next and do not learn.
        self._others: dict[str, tuple[Any, np.ndarray | None]] = {}

    @property
    def streams(self) -> Sequence[AgentStream]:
        return list(self._open.values())

    def reset(self, seeds: Sequence[int | None]) -> None:
        (seed,) = seeds
        if seed is not None:
            self._random = np.random.default_rng((seed, 1))  # the environment may have the one of `seed` itself
        self._begin_episode(seed)
        self._advance_until_stream_acts()

    def step(self, actions: Sequence[Any], log_probabilities: Sequence[float], version: int) -> None:
        for agent, action, log_probability in zip(self._acting_agents, actions, log_probabilities, strict=True):
            self._choices[agent], self._rewards[agent] = (action, log_probability, version), 0.0
        self._step_environment(dict(zip(self._acting_agents, actions, strict=True)))
        self._advance_until_stream_acts()

    def _advance_until_stream_acts(self) -> None:
        """Until a stream acts next: through the turns of opponents, and into the next episode."""
        while not self._acting_agents:
            if self._others:
                self._step_environment({})
            elif self._open:
                problem = f"has no observation for any of {sorted(self._open)}, and they have not ended"
                raise ConfigError("env", type(self._environment).__name__, problem, "end them, or let one of them act")
            else:
                self._begin_episode(None)

    def _begin_episode(self, seed: int | None) -> None:
        self._idle += self._open.values()
        self._open, self._choices, self._rewards = {}, {}, {}
        self._opponent = self._runner.draw_opponent()
        if self._opponent is not None:
            agents = self._environment.possible_agents
            self._learner = agents[int(self._random.integers(len(agents)))]
            for agent in agents:
                self._opponent.policy.reset((id(self), agent))
        observations, infos = self._environment.reset(seed=seed)
        self._select_acting(observations, (), infos)

    def _step_environment(self, actions: dict[str, Any]) -> None:
        if self._opponent is not None:
            policy = self._opponent.policy  # which may play in several games
            for agent, (observation, mask) in self._others.items():
                actions[agent] = policy.act(observation, (id(self), agent), mask)[0]
        observations, rewards, terminations, truncations, infos = self._environment.step(actions)
        ended = [agent for each in (terminations, truncations) for agent, has_ended in each.items() if has_ended]
        for agent in list(self._choices):
            self._rewards[agent] += to_float(rewards.get(agent, 0.0))
            if agent in observations or agent in ended:  # otherwise it waits for its turn
                ending = terminations.get(agent, False), truncations.get(agent, False)
                self._record(agent, observations, *ending, infos.get(agent, {}))
        self._idle += [self._open.pop(agent) for agent in set(ended) if agent in self._open]
        self._select_acting(observations, ended, infos)

    def _record(
        self,
        agent: str,
        observations: Mapping[str, Any],
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> None:
        if agent not in observations:
            problem = f"ends without its last observation (of {sorted(observations)})"
            raise ConfigError("env", agent, problem, "step returns it with terminated or truncated")
        stream, reward = self._open[agent], self._rewards.pop(agent)
        choice = self._choices.pop(agent)
        segment = stream.end_step(choice, reward, observations[agent], terminated, truncated, info)
        if segment is not None:
            self._runner.send(stream, segment)

    def _select_acting(
        self, observations: Mapping[str, Any], ended: Sequence[str], infos: Mapping[str, Mapping[str, Any]]
    ) -> None:
        """Those who have an observation act next; who is new begins an episode."""
        acting = [agent for agent in observations if agent not in ended]
        self._acting_agents, self._others = acting, {}
        if self._opponent is not None:
            self._acting_agents = [agent for agent in acting if agent == self._learner]
            is_over = self._learner in ended  # how the others go on is of no use
            others = [agent for agent in acting if agent != self._learner and not is_over]
            self._others = {
                agent: (observations[agent], find_mask(infos.get(agent, {}), self._runner.mask_choices))
                for agent in others
            }
        for agent in self._acting_agents:
            if agent not in self._open:
                self._open[agent] = self._idle.pop() if self._idle else self._runner.make_stream()
                stream = self._open[agent]
                stream.opponent = self._opponent.version if self._opponent is not None else 0
                stream.start_episode(observations[agent], infos.get(agent, {}))
        self.acting = [self._open[agent] for agent in self._acting_agents]
