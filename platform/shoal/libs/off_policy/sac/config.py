"""SAC's configuration. Imports no torch: launchers and the gateway read it without computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from shoal.rl.algorithm_config import AlgorithmConfig
from shoal.wire.experience_spec import PolicySpec


class SACConfig(AlgorithmConfig):
    """Names as in Haarnoja et al. (1812.05905, table 1), defaults for small tasks.

    learning_rate:       of the policy, the critics and the temperature
    tau:                 how far the target critics move to the critics after each step
    batch_size:          steps drawn for one step of the optimizers
    updates_per_step:    steps of the optimizers for each environment step inserted
    learning_starts:     environment steps to insert before the first step of the optimizers, also after a resume
    initial_temperature: α at first
    target_entropy:      H̄ in nats, of the action scaled to [-1, 1]; default: -1 for each number of an action
    replay_mb:           MiB of the replay; what is older is overwritten
    replay_on_disk:      in files of the run's folder, so that a resumed run goes on with it
    """

    name: Literal["sac"] = "sac"
    discount: float = Field(default=0.99, ge=0, le=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    tau: float = Field(default=0.005, gt=0, le=1)
    batch_size: int = Field(default=256, ge=1)
    updates_per_step: float = Field(default=1.0, gt=0)
    learning_starts: int = Field(default=1000, ge=1)
    initial_temperature: float = Field(default=1.0, gt=0)
    target_entropy: float | None = None
    replay_mb: float = Field(default=256.0, gt=0)
    replay_on_disk: bool = False

    algorithm: ClassVar[str] = "shoal.libs.off_policy.sac.algorithm:SAC"
    model_factory: ClassVar[str] = "shoal.libs.off_policy.gaussian_actor:GaussianActor"
    score_output: ClassVar[str] = "mean"
    has_value: ClassVar[bool] = False
    has_value_head: ClassVar[bool] = False
    action_spaces: ClassVar[tuple[str, ...]] = ("Box",)
    is_off_policy: ClassVar[bool] = True
    batch_steps: ClassVar[int] = 64
    updates_between_trials: ClassVar[int] = 1000

    def describe_policy(self, hidden: Sequence[int]) -> PolicySpec:
        layers = tuple((f"policy.{2 * i}.weight", f"policy.{2 * i}.bias") for i in range(len(hidden) + 1))
        return PolicySpec("mlp_squashed_gaussian", "relu", layers)
