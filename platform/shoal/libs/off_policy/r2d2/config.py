"""R2D2's configuration. Imports no torch: launchers and the gateway read it without computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from shoal.rl.algorithm_config import AlgorithmConfig
from shoal.wire.experience_spec import PolicySpec


class R2D2Config(AlgorithmConfig):
    """Names as in Kapturowski et al. (ICLR 2019) and in DQN. Defaults were chosen on small games of memory.

    num_steps:          n of the n-step targets, environment steps
    dueling:            separate streams for value and advantage (1511.06581)
    sequence_length:    environment steps that a sequence trains
    burn_in:            environment steps before them that only bring the state up to date with the weights
    batch_size:         sequences drawn for one step of the optimizer
    samples_per_insert: steps trained for each one inserted, on average
    learning_starts:    environment steps to insert before the first step of the optimizer
    target_update_period: steps of the optimizer between two copies to the target network
    epsilon, epsilon_exponent, epsilon_steps: exploration, as with DQN
    priority_exponent, beta: of prioritised replay, as with DQN
    priority_mix:       η: a sequence's priority is η max + (1 - η) mean of its absolute errors
    rescaling_epsilon:  ε of the value rescaling h(x) = sign(x) (√(|x| + 1) - 1) + ε x
    replay_mb, replay_on_disk: as with DQN
    """

    name: Literal["r2d2"] = "r2d2"
    discount: float = Field(default=0.99, ge=0, le=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    num_steps: int = Field(default=5, ge=1)
    dueling: bool = True
    sequence_length: int = Field(default=40, ge=1)
    burn_in: int = Field(default=20, ge=0)
    batch_size: int = Field(default=32, ge=1)
    samples_per_insert: float = Field(default=4.0, gt=0)
    learning_starts: int = Field(default=1000, ge=1)
    target_update_period: int = Field(default=100, ge=1)
    epsilon: float = Field(default=0.05, ge=0, le=1)
    epsilon_exponent: float = Field(default=1.0, ge=0)
    epsilon_steps: int = Field(default=10_000, ge=1)
    priority_exponent: float = Field(default=0.9, ge=0, le=1)
    beta: float = Field(default=0.6, ge=0, le=1)
    priority_mix: float = Field(default=0.9, ge=0, le=1)
    rescaling_epsilon: float = Field(default=1e-3, gt=0)
    replay_mb: float = Field(default=64.0, gt=0)
    replay_on_disk: bool = False
    max_grad_norm: float = Field(default=10.0, gt=0)

    recurrent_factory: ClassVar[str] = "shoal.libs.off_policy.q_network:RecurrentQNetwork"
    score_output: ClassVar[str] = "q_values"
    algorithm: ClassVar[str] = "shoal.libs.off_policy.r2d2.algorithm:R2D2"
    cores: ClassVar[tuple[str, ...]] = ("gru", "lstm")
    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete",)
    is_off_policy: ClassVar[bool] = True
    batch_steps: ClassVar[int] = 256
    updates_between_trials: ClassVar[int] = 500

    @model_validator(mode="after")
    def _burn_in_fits(self) -> R2D2Config:
        if self.burn_in > self.sequence_length:
            raise ValueError(f"burn_in = {self.burn_in} is above sequence_length = {self.sequence_length}")
        return self

    def describe_policy(self, hidden: Sequence[int]) -> PolicySpec:
        """Greedy in the advantages, as DQN's; `add_core` gives it the core."""
        trunk = [f"trunk.{2 * i}" for i in range(len(hidden) - 1)]
        stream = [f"head.advantage.{2 * i}" for i in range(min(len(hidden), 1) + 1)]
        layers = tuple((f"{name}.weight", f"{name}.bias") for name in (*trunk, *stream))
        kind, epsilon = "mlp_epsilon_greedy", "head.epsilon"
        return PolicySpec(kind, "relu", layers, epsilon, self.epsilon_exponent, core_position=len(trunk))

    def get_model_options(self) -> dict[str, Any]:
        return {"dueling": self.dueling}
