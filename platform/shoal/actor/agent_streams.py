"""The games of an actor: environments, whose agents' steps become segments.

An environment has one agent, with gymnasium's `reset` and `step`, or several, with PettingZoo's parallel API by its
methods (`parallel_game`). Each agent is a stream of experience of its own. Called by the ready loop, which chooses the
actions.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from shoal.actor.policy import Policy
from shoal.actor.segment_builder import SegmentBuilder, convert_rows
from shoal.errors import ConfigError
from shoal.wire import EpisodeSummary, ExperienceSpec, Segment
from shoal.wire.action_masks import INFO_KEY, MASKS, find_choices, read_mask
from shoal.wire.experience_spec import NO_EXTRAS

SUCCESS_KEYS = ("is_success", "success")  # of the info with which an episode ends


class Environment(Protocol):
    """One agent; gymnasium's `Env` implements it."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


class ParallelEnvironment(Protocol):
    """Several agents; PettingZoo's `ParallelEnv` implements it. Everything is by agent.

    An agent acts next when it has an observation, so agents may also take turns; a step in which none has one is a tick
    without actions. Rewards that it gets meanwhile count
    for its last action. An agent that terminates or is truncated gets its last observation with that. The episode is
    over when every agent that has acted has ended.
    """

    possible_agents: Sequence[str]

    def reset(self, seed: int | None = None) -> tuple[Mapping[str, Any], Mapping[str, Any]]: ...

    def step(
        self, actions: Mapping[str, Any]
    ) -> tuple[Mapping[str, Any], Mapping[str, Any], Mapping[str, bool], Mapping[str, bool], Mapping[str, Any]]: ...

    def observation_space(self, agent: str) -> Any: ...

    def action_space(self, agent: str) -> Any: ...


class AgentStream(SegmentBuilder):
    """The episodes of one agent, one after the other, as segments. `observation` is the newest one, and `mask` its
    action mask, in a run with masks.

    unrecorded: if given, steps are recorded only while `has_credit`, until a segment is complete; the episodes that end
        without credit are added here
    """

    def __init__(
        self, number: int, spec: ExperienceSpec, policy: Policy, unrecorded: deque[EpisodeSummary] | None = None
    ) -> None:
        super().__init__(spec)
        self.number, self.policy = number, policy
        self._unrecorded, self.has_credit = unrecorded, unrecorded is None
        self._choices = find_choices(spec)
        self.observation: Any = None
        self.mask: np.ndarray | None = None
        self.num_segments = 0  # that are complete
        self.opponent = 0  # with self-play, the version of this policy that plays others in this episode

    @property
    def version(self) -> int:
        """The version of the weights that act now."""
        return self.policy.version

    def restart(self) -> None:
        super().restart()
        self.has_credit = self._unrecorded is None
        self.policy.reset(self.number)

    def start_episode(self, observation: Any, info: Mapping[str, Any]) -> None:
        """Begin an episode with this observation, whose info has its action mask."""
        self.observation = observation
        self.restart()
        self.begin(observation, self.find_extras(info))

    def end_step(
        self,
        choice: tuple[Any, float, int],
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
        info: Mapping[str, Any],
    ) -> Segment | None:
        """Add a step: the choice (action, log-probability, version), and what came of it. Returns a segment that is
        complete, of recorded steps."""
        self.observation = observation
        extras = self.find_extras(info, terminated, truncated) if self._extras else NO_EXTRAS
        action, log_probability, version = choice
        segment = self.step(action, log_probability, version, reward, observation, terminated, truncated, extras)
        if segment is not None and segment.episode_return is not None:
            segment = add_success(segment, info)
        if self._unrecorded is None:
            return segment
        if self.has_credit:
            self.has_credit = segment is None
            return segment
        if segment is None:
            self.discard_steps()
        elif segment.episode_return is not None:  # never a segment for the learner: ends would be most of its batch
            ended = segment.episode_return, segment.episode_length or 1, self.opponent, segment.success
            self._unrecorded.append(EpisodeSummary(*ended))
        return None

    def find_extras(
        self, info: Mapping[str, Any], terminated: bool = False, truncated: bool = False
    ) -> Mapping[str, Any]:
        """Find the extras of the newest observation, which has this info."""
        self.mask = find_mask(info, self._choices, terminated, truncated)
        extras = self.policy.get_extras(self.number)
        return extras if self.mask is None else {**extras, MASKS: self.mask}


def find_mask(
    info: Mapping[str, Any], choices: Sequence[int], terminated: bool = False, truncated: bool = False
) -> np.ndarray | None:
    """The mask of an observation, in a run with masks; after an episode's end no action is chosen by it."""
    if not choices:
        return None
    if terminated or (truncated and not np.any(info.get(INFO_KEY, False))):
        return np.ones(sum(choices), np.bool_)
    if INFO_KEY not in info:
        raise ConfigError("env", INFO_KEY, "is missing in info, and this run has action masks")
    return read_mask(info[INFO_KEY], tuple(choices))


def find_success(info: Mapping[str, Any]) -> bool | None:
    """Whether an episode that has ended with this info has reached its goal; None where the environment does not say,
    under one of the names that environments with goals have for it."""
    found = next((info[name] for name in SUCCESS_KEYS if name in info), None)
    return None if found is None else bool(np.all(found))


def add_success(segment: Segment, info: Mapping[str, Any]) -> Segment:
    """Add it to the last segment of an episode."""
    success = find_success(info)
    return segment if success is None else replace(segment, success=success)


class Runner(Protocol):
    """Gives a game its streams, and takes their segments."""

    def make_stream(self) -> AgentStream: ...

    def send(self, stream: AgentStream, segment: Segment) -> None: ...


class Game(Protocol):
    """One or several environments that are played without end.

    observations: of the agents that act next; numbers: of their streams; masks: of the observations, in a run with
    masks, else None
    """

    @property
    def observations(self) -> Sequence[Any] | np.ndarray: ...

    @property
    def numbers(self) -> Sequence[int]: ...

    @property
    def masks(self) -> Sequence[np.ndarray | None] | None: ...

    def reset(self, seeds: Sequence[int | None]) -> None:
        """Begin, with the seeds of the environments."""
        ...

    def step(self, actions: Sequence[Any], log_probabilities: Sequence[float]) -> None:
        """Take a step: an action and its log-probability for each of `observations`, by the present weights."""
        ...


class StreamGame:
    """An environment whose agents' steps are collected one by one. `acting`: those of `streams` that act next."""

    def __init__(self) -> None:
        self.acting: list[AgentStream] = []

    @property
    def streams(self) -> Sequence[AgentStream]:
        return self.acting

    @property
    def observations(self) -> Sequence[Any]:
        return [stream.observation for stream in self.acting]

    @property
    def numbers(self) -> Sequence[int]:
        return [stream.number for stream in self.acting]

    @property
    def masks(self) -> Sequence[np.ndarray | None] | None:
        return [stream.mask for stream in self.acting] if self.acting[0].mask is not None else None

    @property
    def is_empty(self) -> bool:
        """Whether no segment has begun."""
        return all(stream.is_empty for stream in self.streams)

    @property
    def num_open(self) -> int:
        """How many segments have begun or begin with the next step."""
        return len({stream.number for stream in self.streams if stream in self.acting or not stream.is_empty})

    @property
    def num_segments(self) -> int:
        """How many segments are complete."""
        return sum(stream.num_segments for stream in self.streams)

    def discard_steps(self, policy: Policy) -> None:
        """Forget the steps of begun segments of this policy's agents."""
        for stream in self.streams:
            if stream.policy is policy and not stream.is_empty:
                stream.discard_steps()


class SingleGame(StreamGame):
    """An environment with one agent."""

    def __init__(self, environment: Environment, runner: Runner) -> None:
        self._environment = environment
        self._runner = runner
        self._stream = runner.make_stream()
        self.acting = [self._stream]

    def reset(self, seeds: Sequence[int | None]) -> None:
        self._stream.start_episode(*self._environment.reset(seed=seeds[0]))

    def step(self, actions: Sequence[Any], log_probabilities: Sequence[float]) -> None:
        self._take_step(actions[0], log_probabilities[0])

    def play(self, policy: Policy, most: int, until: float) -> int:
        """Take steps with the policy: at most so many, until this time (time.monotonic()) or the end of a segment;
        returns how many. One call for all: what is done at each step is much of the cost of a fast environment's."""
        act = policy.act
        take_step = self._take_step
        stream = self._stream
        clock = time.monotonic
        for count in range(1, most + 1):
            if take_step(*act(stream.observation, 0, stream.mask)) or clock() >= until:
                return count
        return most

    def _take_step(self, action: Any, log_probability: float) -> bool:
        """Returns whether a segment or the episode has ended."""
        stream = self._stream
        observation, reward, terminated, truncated, info = self._environment.step(action)
        if reward.__class__ is not float:
            reward = to_float(reward)
        choice = action, log_probability, stream.policy.version
        segment = stream.end_step(choice, reward, observation, terminated, truncated, info)
        if segment is not None:
            self._runner.send(stream, segment)
        if terminated or truncated:
            self.reset([None])
            return True
        return segment is not None


class _Step(NamedTuple):
    """What was chosen in a step of all environments [B], the rewards, and the extras of the observations before it."""

    actions: Sequence[Any]
    rewards: list[float]
    log_probabilities: Sequence[float]
    version: int
    extras: Sequence[Mapping[str, Any]]


class BatchGame:
    """Several environments with one agent each, which step together.

    The newest steps of all are stored together, and a segment is cut from them when it is complete: for each agent,
    that is much cheaper than to collect its steps one by one.
    """

    def __init__(self, environments: Sequence[Environment], runner: Runner, spec: ExperienceSpec) -> None:
        self._environments = environments
        self._runner = runner
        self._spec = spec
        self._length, num_environments = spec.segment_length, len(environments)
        self._shape, self._dtype = spec.observation.shape, spec.observation.numpy_dtype()
        self._streams = [runner.make_stream() for _ in environments]
        self.numbers = [stream.number for stream in self._streams]
        self._num_steps = 0
        self._starts = [0] * num_environments  # of each incomplete segment, in steps
        # Step t is at t % segment_length.
        self._rows = np.empty((self._length, num_environments, *self._shape), self._dtype)
        self._steps: list[_Step] = [_Step((), [], (), 0, ())] * self._length
        self._newest: list[Any] = [None] * num_environments
        self._extras: list[Mapping[str, Any]] = [NO_EXTRAS] * num_environments
        self._batch_shape = (num_environments, *self._shape)
        self.observations = self._rows[0]

    @property
    def masks(self) -> Sequence[np.ndarray | None] | None:
        return None if self._streams[0].mask is None else [stream.mask for stream in self._streams]

    def reset(self, seeds: Sequence[int | None]) -> None:
        for index, seed in enumerate(seeds):
            self._reset_environment(index, seed)
        self._take_observations()

    def step(self, actions: Sequence[Any], log_probabilities: Sequence[float]) -> None:
        rewards = list[float]()
        newest = self._newest
        starts = self._starts
        has_extras = self._spec.extras
        version = self._streams[0].version
        self._steps[self._num_steps % self._length] = _Step(actions, rewards, log_probabilities, version, self._extras)
        self._num_steps += 1
        full_start = self._num_steps - self._length
        if has_extras:
            self._extras = self._extras.copy()
        for index, (environment, action) in enumerate(zip(self._environments, actions, strict=True)):
            newest[index], reward, terminated, truncated, info = environment.step(action)
            rewards.append(to_float(reward))
            if has_extras:
                self._extras[index] = self._streams[index].find_extras(info, terminated, truncated)
            if terminated or truncated or starts[index] == full_start:
                self._send_segment(index, terminated, truncated, info)
                if terminated or truncated:
                    self._reset_environment(index)
        self._take_observations()

    def _reset_environment(self, index: int, seed: int | None = None) -> None:
        stream = self._streams[index]
        self._newest[index], info = self._environments[index].reset(seed=seed)
        stream.restart()
        self._extras[index] = stream.find_extras(info)

    def _take_observations(self) -> None:
        """Copy the newest ones, since an environment may reuse one array."""
        observations = np.array(self._newest)
        if observations.dtype is not self._dtype or observations.shape != self._batch_shape:
            observations = convert_rows("observation", observations, self._dtype, self._batch_shape)
        self._rows[self._num_steps % self._length] = self.observations = observations

    def _send_segment(self, index: int, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> None:
        """Cut a segment, which ends with the newest observation, the real one, and send it."""
        positions = [step % self._length for step in range(self._starts[index], self._num_steps)]
        steps, stream = [self._steps[each] for each in positions], self._streams[index]
        self._starts[index] = self._num_steps
        observations = np.empty((len(steps) + 1, *self._shape), self._dtype)
        observations[:-1] = self._rows[positions, index]
        observations[-1] = convert_rows("observation", np.asarray(self._newest[index]), self._dtype, self._shape)
        columns = (
            [step.actions[index] for step in steps],
            [step.rewards[index] for step in steps],
            [step.log_probabilities[index] for step in steps],
            [step.version for step in steps],
        )
        extras = {}
        for each in self._spec.extras:
            result = [*(step.extras[index] for step in steps), self._extras[index]][: each.count_rows(len(steps))]
            rows, shape = np.array([row[each.name] for row in result]), (len(result), *each.tensor.shape)
            extras[each.name] = convert_rows(each.name, rows, each.tensor.numpy_dtype(), shape)
        segment = stream.make_segment(observations, *columns, terminated, truncated, extras)
        self._runner.send(stream, add_success(segment, info) if terminated or truncated else segment)


def to_float(reward: Any) -> float:
    """A reward as a float. Raises ConfigError."""
    try:
        return float(reward)
    except (TypeError, ValueError):
        raise ConfigError("reward", reward, "of the environment's step is no number", "give a float") from None


MAX_IDLE_TICKS = 1000  # of an environment of several agents, in a row, in which none of them has an observation


def is_parallel(environment: Any) -> bool:
    """Whether an environment has several agents: its spaces are methods, by agent."""
    return callable(getattr(environment, "observation_space", None))


class AgentsEpisode:
    """One episode of an environment. The agent of an environment that has one is None.

    observations: of the agents that act next; of none when the episode is over
    rewards:      of the newest step, by agent; those of ticks without observations count for it
    infos:        that came with it, by agent
    outcomes:     with the newest step, each with its last observation, if there is one, and whether it was cut off
    """

    def __init__(self, environment: Any, seed: int | None) -> None:
        self._environment, self._is_parallel = environment, is_parallel(environment)
        observations, infos = environment.reset(seed=seed)
        self.observations: Mapping[Any, Any] = observations if self._is_parallel else {None: observations}
        self.infos: dict[Any, Mapping[str, Any]] = dict(infos) if self._is_parallel else {None: infos}
        self._open = set(self.observations)  # the agents that have begun and not ended
        self._has_started = bool(self._open)
        self.rewards: dict[Any, float] = {}
        self.outcomes: dict[Any, tuple[Any, bool]] = {}
        self._pass_idle_ticks()

    def get_mask(self, agent: Any) -> Any:
        """The action mask of an agent's newest observation; None without."""
        return self.infos.get(agent, {}).get(INFO_KEY)

    def get_outcome(self, agent: Any) -> tuple[Any, bool]:
        """Of an agent that has ended. Raises ConfigError where its last observation is missing."""
        if self.outcomes[agent][0] is None:
            problem = f"ends without its last observation (of {sorted(self.observations)})"
            raise ConfigError("env", agent, problem, "step returns it with terminated or truncated")
        return self.outcomes[agent]

    def find_success(self, agent: Any) -> bool | None:
        """Whether an agent that has ended has reached its goal; None where the environment does not say."""
        return find_success(self.infos.get(agent, {}))

    def step(self, actions: Mapping[Any, Any]) -> None:
        """`actions`: of those who have observations."""
        self.rewards, self.outcomes, self.infos = {}, {}, {}
        self._step_environment(actions)
        self._pass_idle_ticks()

    def _pass_idle_ticks(self) -> None:
        """Step until an agent has an observation, or all have ended."""
        for _ in range(MAX_IDLE_TICKS):
            if self.observations or (self._has_started and not self._open):
                return
            self._step_environment({})
        waiting = f"any of {sorted(self._open)}, and they have not ended" if self._open else "any agent"
        problem = f"has had no observation for {waiting}, in {MAX_IDLE_TICKS} steps"
        raise ConfigError("env", type(self._environment).__name__, problem, "end them, or let one of them act")

    def _step_environment(self, actions: Mapping[Any, Any]) -> None:
        if self._is_parallel:
            observations, rewards, terminations, truncations, infos = self._environment.step(actions)
        else:
            result = self._environment.step(actions[None])
            observations, rewards, terminations, truncations, infos = ({None: each} for each in result)
        self.infos.update(infos)
        for agent, reward in rewards.items():
            self.rewards[agent] = self.rewards.get(agent, 0.0) + to_float(reward)
        for agent in dict.fromkeys((*terminations, *truncations)):
            is_terminated = bool(terminations.get(agent))
            if is_terminated or truncations.get(agent):
                self.outcomes[agent] = observations.get(agent), not is_terminated
        self.observations = {agent: each for agent, each in observations.items() if agent not in self.outcomes}
        self._open = (self._open | self.observations.keys()) - self.outcomes.keys()
        self._has_started |= bool(observations)
