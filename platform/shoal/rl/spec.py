"""The spec of a reinforcement-learning run, and the format of its experience.

Called by jobs, by `local_loop.py` and by the Ray workers. Knows the environment only through its two spaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from shoal.config import Spec
from shoal.errors import ConfigError
from shoal.network_address import is_loopback
from shoal.rl.algorithm_config import AnyAlgorithmConfig
from shoal.wire.experience_spec import DTYPES, ExperienceSpec, PolicySpec, TensorSpec
from shoal.wire.segment import largest_segment_bytes


class GatewaySpec(Spec):
    """How actors reach the learner. Beyond loopback, `curve` (encryption and the server's identity) is required."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535, description="0 takes a free one")
    curve: bool = False
    queue_capacity: int = Field(default=96, ge=2, description="segments; at least one for every actor")
    max_credits: int = Field(default=8, ge=1, description="segments that one actor may have on their way")
    max_version_lag: int = Field(default=30, ge=0, description="weight versions")
    heartbeat_s: float = Field(default=1.0, gt=0)
    timeout_s: float = Field(default=6.0, gt=0)
    max_message_bytes: int = Field(default=64 * 1024 * 1024, ge=1024)

    @model_validator(mode="after")
    def _closed_by_default(self) -> GatewaySpec:
        if not is_loopback(self.host) and not self.curve:
            raise ValueError(f"gateway host {self.host!r} is not loopback: set curve=true, so that nothing is in clear")
        if self.timeout_s < 2 * self.heartbeat_s:
            raise ValueError("timeout_s must be at least twice heartbeat_s, or one lost ping ends a session")
        return self


class LearnerSpec(Spec):
    """How the learner takes experience, and how often it publishes and saves."""

    batch_steps: int = Field(default=2048, ge=1, description="environment steps in an update, at least")
    max_batch_steps: int = Field(default=4096, ge=1, description="at most, when the learner has fallen behind")
    take_timeout_s: float = Field(default=0.5, gt=0, description="after which a smaller batch is taken")
    publish_interval_s: float = Field(default=0.05, ge=0, description="between two weight versions, at least")
    checkpoint_every_s: float = Field(default=5.0, gt=0)
    keep_checkpoints: int = Field(default=2, ge=1)
    torch_threads: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.5, ge=0, description="what it reserves of the cluster")
    max_restarts: int = Field(default=3, ge=0, description="of the gateway and of the learner, after a crash")
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)  # torch's range

    @model_validator(mode="after")
    def _limits_fit(self) -> LearnerSpec:
        if self.max_batch_steps < self.batch_steps:
            raise ValueError(f"max_batch_steps = {self.max_batch_steps} is below batch_steps = {self.batch_steps}")
        return self


class RLSpec(Spec):
    """One actor-learner run."""

    env: str = "CartPole-v1"
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = (64, 64)
    segment_length: int = Field(default=256, ge=1, description="environment steps in a segment, at most")
    gateway: GatewaySpec = GatewaySpec()
    learner: LearnerSpec = LearnerSpec()
    algorithm: AnyAlgorithmConfig = Field(  # the numbers were chosen on CartPole: docs/log
        default={"name": "impala", "discount": 0.98, "learning_rate": 1.5e-3}, validate_default=True
    )

    @model_validator(mode="before")
    @classmethod
    def _read_older_record(cls, values: object) -> object:
        """Records from before there were several algorithms have the fields of IMPALA under its name."""
        if isinstance(values, dict) and "impala" in values:
            others = {name: each for name, each in values.items() if name != "impala"}
            return {**others, "algorithm": {"name": "impala", **values["impala"]}}
        return values


def experience_spec(observation_space: Any, action_space: Any, spec: RLSpec) -> ExperienceSpec:
    """The format of segments of an environment with these gymnasium spaces.

    Raises ConfigError for spaces that the algorithm cannot learn from, and for segments too large for a message.
    """
    if type(observation_space).__name__ != "Box" or len(observation_space.shape) != 1 or not observation_space.shape[0]:
        remedy = "this algorithm needs a flat Box: gymnasium.wrappers.FlattenObservation makes one of most spaces"
        raise ConfigError("env", spec.env, f"observes {observation_space}", remedy)
    if type(action_space).__name__ != "Discrete":
        raise ConfigError("env", spec.env, f"acts with {action_space}", "this algorithm needs a Discrete space")
    if action_space.start != 0:
        problem = f"acts with {action_space}, which starts at {action_space.start}"
        raise ConfigError("env", spec.env, problem, "this algorithm counts actions from 0: wrap the environment")
    dtype = np.dtype(observation_space.dtype).name
    if dtype not in DTYPES:
        problem, remedy = f"observes {dtype}, which cannot travel", f"wrap it; these can: {', '.join(DTYPES)}"
        raise ConfigError("env", spec.env, problem, remedy)
    low, high = float(np.min(observation_space.low)), float(np.max(observation_space.high))
    observation = TensorSpec(
        dtype,
        tuple(observation_space.shape),
        low if np.isfinite(low) else None,
        high if np.isfinite(high) else None,
    )
    action = TensorSpec("int64", (), 0, int(action_space.n) - 1)
    experience = ExperienceSpec(observation, action, spec.segment_length, policy_spec(spec.hidden))
    require_segment_fits(spec.gateway, experience)
    return experience


def require_segment_fits(gateway: GatewaySpec, experience: ExperienceSpec) -> None:
    """Raise ConfigError when the longest segment exceeds the message limit."""
    largest = largest_segment_bytes(experience)
    if largest > gateway.max_message_bytes:
        remedy = "shorten segment_length, or raise it"
        problem = f"is below the {largest} bytes of the longest segment"
        raise ConfigError("gateway.max_message_bytes", gateway.max_message_bytes, problem, remedy)


def network_kwargs(spec: RLSpec, experience: ExperienceSpec) -> dict[str, Any]:
    """The constructor arguments of this run's ActorCritic, for the learner, the endpoint and later loaders."""
    num_actions = int(experience.action.high or 0) + 1
    return {
        "observation_size": experience.observation.shape[0],
        "num_actions": num_actions,
        "hidden": list(spec.hidden),
    }


def policy_spec(hidden: Sequence[int]) -> PolicySpec:
    """How an actor runs the policy of an ActorCritic with these hidden layers."""
    layers = tuple((f"policy.{2 * i}.weight", f"policy.{2 * i}.bias") for i in range(len(hidden) + 1))
    return PolicySpec("mlp_categorical", "tanh", layers)
