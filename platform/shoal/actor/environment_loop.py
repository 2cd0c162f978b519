"""The bundled loop: step an environment with the pulled weights and send its experience, segment by segment.

Called by `python -m shoal.actor` and for any environment with gymnasium's `reset` and `step`. A game with a loop of its
own uses ActorClient and SegmentBuilder directly.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from shoal.actor.client import ActorClient
from shoal.actor.policy import MlpPolicy
from shoal.errors import Closed, ConfigError, InvalidSegment, RunChanged
from shoal.wire import DropReason, ExperienceSpec, Segment


class Environment(Protocol):
    """The loop's interface to an environment; gymnasium's `Env` implements it."""

    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...


class SegmentBuilder:
    """Collects the steps of one episode into segments of at most `segment_length` steps."""

    def __init__(self, spec: ExperienceSpec) -> None:
        self._spec = spec
        self._segment_length = spec.segment_length
        self._shape, self._dtype = spec.observation.shape, spec.observation.numpy_dtype()
        self._is_integer = self._dtype.kind in "iu"  # a conversion would truncate or wrap values
        # Copied on arrival: an environment may reuse one array for every step.
        self._observations = np.empty((spec.segment_length + 1, *self._shape), self._dtype)
        self._steps: list[tuple[Any, float, float, int]] = []  # action, reward, log-probability, version
        self._return = 0.0  # of the episode, up to the segment
        self._length = 0

    def begin(self, observation: Any) -> None:
        """Set the first observation of an episode. Raises InvalidSegment for a wrong shape, and, if the run's
        observations are integers, for other values or values out of range."""
        self._store_observation(0, observation)
        self._steps = []
        self._return, self._length = 0.0, 0

    def step(
        self,
        action: Any,
        log_probability: float,
        version: int,
        reward: float,
        observation: Any,
        terminated: bool,
        truncated: bool,
    ) -> Segment | None:
        """Add a step and the observation after it; returns a segment when one is complete.

        `observation` after a truncated or terminated step is the episode's real final one; then call `begin`. Raises
        InvalidSegment as `begin` does, and for actions that are not integers.
        """
        # Expensive checks wait for the end of the segment: this runs at every step of a possibly very fast environment.
        num_steps = len(self._steps) + 1
        self._store_observation(num_steps, observation)  # first: a rejected observation adds no step
        self._steps.append((action, reward, log_probability, version))
        if terminated or truncated or num_steps == self._segment_length:
            return self._build_segment(terminated, truncated)
        return None

    def _store_observation(self, index: int, observation: Any) -> None:
        """Copy it, with checks: NumPy would broadcast a scalar to a row, and wrap 300 to 44 in bytes."""
        if getattr(observation, "shape", None) != self._shape and (shape := np.shape(observation)) != self._shape:
            problem = f"{shape}, expected {self._shape}"
            raise InvalidSegment(DropReason.INVALID_SHAPE, "observation", problem)
        if self._is_integer and getattr(observation, "dtype", None) != self._dtype:
            observation = self._to_integers(np.asarray(observation))
        self._observations[index] = observation

    def _to_integers(self, observation: np.ndarray) -> np.ndarray:
        if observation.dtype.kind not in "iub":
            problem = f"{observation.dtype}, expected {self._dtype}"
            raise InvalidSegment(DropReason.INVALID_DTYPE, "observation", problem)
        converted = observation.astype(self._dtype)
        if not np.array_equal(converted, observation):
            problem = f"from {observation.min()} to {observation.max()}, expected {self._dtype}"
            raise InvalidSegment(DropReason.INVALID_RANGE, "observation", problem)
        return converted

    def _to_action_array(self, actions: tuple[Any, ...]) -> np.ndarray:
        found = np.array(actions)
        if found.dtype.kind not in "iub":
            problem = f"{found.dtype}, expected {self._spec.action.dtype}"
            raise InvalidSegment(DropReason.INVALID_DTYPE, "action", problem)
        return found.astype(self._spec.action.numpy_dtype())

    def _build_segment(self, terminated: bool, truncated: bool) -> Segment:
        actions, rewards, log_probabilities, versions = zip(*self._steps, strict=True)
        num_steps = len(rewards)
        self._return = float(sum(rewards, self._return))
        self._length += num_steps
        ended = terminated or truncated
        segment = Segment(
            self._observations[: num_steps + 1].copy(),
            self._to_action_array(actions),
            np.array(rewards, np.float32),
            np.array(log_probabilities, np.float32),
            np.array(versions, np.int64),
            bool(terminated),
            bool(truncated and not terminated),
            self._return if ended else None,
            self._length if ended else None,
        )
        self._observations[0], self._steps = self._observations[num_steps], []
        return segment


def play(
    environment: Environment,
    client: ActorClient,
    seed: int | None = None,
    max_steps: int | None = None,
    on_weights: Callable[[int], None] | None = None,
    pull_interval_s: float = 0.005,
    on_run: Callable[[ExperienceSpec], None] | None = None,
) -> int:
    """Play until the run is over, or for `max_steps`; returns the number of steps.

    The loop pulls newer weights at most every `pull_interval_s`, and applies them between two steps. It calls
    `on_weights` with each applied version. It waits for a busy learner while the gateway answers. When another run
    takes the address, the actor starts anew. It calls `on_run`, which may raise, with each run's spec before the first
    step. Raises Refused or ConnectionLost as the client does.
    """
    steps, pull_at = 0, 0.0
    while not client.finished and (max_steps is None or steps < max_steps):
        if on_run is not None:
            on_run(client.spec)
        game = _PolicyRunner(environment, client, seed, on_weights)
        try:
            game.start()
            while not client.finished and (max_steps is None or steps < max_steps):
                if time.monotonic() >= pull_at:
                    game.pull_weights()
                    pull_at = time.monotonic() + pull_interval_s
                steps += 1
                game.step()
        except RunChanged:
            continue
        except Closed:
            if not client.finished:
                raise
    return steps


class _PolicyRunner:
    """The policy and environment state of one run, replaced when another run takes over."""

    def __init__(
        self,
        environment: Environment,
        client: ActorClient,
        seed: int | None,
        on_weights: Callable[[int], None] | None,
    ) -> None:
        self._environment, self._client, self._seed, self._on_weights = environment, client, seed, on_weights
        self._policy = MlpPolicy(client.spec.policy, seed)
        self._builder = SegmentBuilder(client.spec)
        self._observation: Any = None

    def start(self) -> None:
        self._policy.load(*self._client.wait_for_weights())
        self._reset(self._seed)

    def pull_weights(self) -> None:
        newer = self._client.newer_weights(self._policy.version)
        if newer is not None:
            self._policy.load(*newer)
            if self._on_weights is not None:
                self._on_weights(self._policy.version)

    def step(self) -> None:
        policy = self._policy
        action, log_probability = policy.act(self._observation)
        self._observation, reward, terminated, truncated, _ = self._environment.step(action)
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            raise ConfigError("reward", reward, "of the environment's step is no number", "give a float") from None
        segment = self._builder.step(
            action, log_probability, policy.version, reward, self._observation, terminated, truncated
        )
        if segment is not None:
            self._client.send(segment, timeout_s=None)
        if terminated or truncated:
            self._reset(None)

    def _reset(self, seed: int | None) -> None:
        self._observation, _ = self._environment.reset(seed=seed)
        self._builder.begin(self._observation)
