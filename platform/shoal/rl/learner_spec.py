"""The specs of a run's learner, its self-play, its games, and what it learns from demonstrations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from shoal.config import Spec

Setting = bool | int | float | str  # what a game is told


class SettingsRule(Spec):
    """`set` holds from when the mean return of the last 100 episodes, or of at least 20, reaches `above`."""

    above: float
    set: dict[str, Setting] = Field(min_length=1)


class LearnerSpec(Spec):
    """How the learner takes experience, and how often it publishes and saves."""

    batch_steps: int | None = Field(
        default=None, ge=1, description="environment steps in a batch, at least; default: the algorithm's"
    )
    max_batch_steps: int | None = Field(
        default=None, ge=1, description="at most, when the learner has fallen behind; default: twice the algorithm's"
    )
    take_timeout_s: float | None = Field(
        default=None, gt=0, description="after which a smaller batch is taken; default: 0.5, or 5 if actors pause"
    )
    publish_interval_s: float = Field(default=0.05, ge=0, description="between two weight versions, at least")
    checkpoint_every_s: float = Field(default=5.0, gt=0)
    keep_checkpoints: int = Field(default=2, ge=1)
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: CUDA where there is a GPU")
    replicas: int = Field(default=1, ge=1, description="learners that share each batch, or each sample of a replay")
    torch_threads: int = Field(default=1, ge=1)
    num_cpus: float = Field(default=0.5, ge=0, description="what each reserves of the cluster")
    num_gpus: float = Field(default=1.0, gt=0, description="likewise, on cuda")
    max_restarts: int = Field(default=3, ge=0, description="of the gateway and of the learner, after a crash")
    seed: int = Field(default=0, ge=-(2**63), lt=2**64)  # torch's range

    @model_validator(mode="after")
    def _limits_fit(self) -> LearnerSpec:
        if self.max_batch_steps and self.batch_steps and self.max_batch_steps < self.batch_steps:
            raise ValueError(f"max_batch_steps = {self.max_batch_steps} is below batch_steps = {self.batch_steps}")
        return self


class SelfPlaySpec(Spec):
    """Of an environment with several agents, one has the newest weights and the others a past version, which is drawn
    for each episode from a pool."""

    snapshot_every: int = Field(
        default=0, ge=0, description="environment steps between two of its versions that enter the pool; 0: none does"
    )
    opponents: tuple[str, ...] = Field(
        default=(), description="registered versions that are in the pool, as poker@3 or poker@champion"
    )
    max_versions: int = Field(
        default=64, ge=2, description="of its own; of more, those between the oldest and the newest thin out evenly"
    )

    @property
    def is_on(self) -> bool:
        return self.snapshot_every > 0 or bool(self.opponents)


class DemonstrationsSpec(Spec):
    """What people and scripts show to a run, and how it learns from that, beside the experience of its policy."""

    source: str = Field(default="", description="a run, or a folder, whose demonstrations this run starts with")
    passes: float = Field(
        default=200.0,
        ge=0,
        description="over each new one, in steps of cloning before the next update, of ppo and impala",
    )
    weight: float = Field(
        default=1.0, ge=0, description="of their cross entropy in the loss from then on, of ppo and impala"
    )
    fade_steps: int = Field(
        default=200_000, ge=1, description="environment steps after the newest one in which the weight falls to 0"
    )
    share: float = Field(default=0.25, ge=0, lt=1, description="of each sample of a replay, of dqn, r2d2 and sac")
    max_mb: float = Field(default=256.0, gt=0, description="MiB that are kept; beyond, the oldest go")

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """`demonstrations=RUN`"""
        return {**before, "source": text}
