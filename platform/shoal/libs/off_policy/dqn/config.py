"""DQN's configuration. Imports no torch: launchers and the gateway read it without computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field

from shoal.rl.algorithm_config import AlgorithmConfig
from shoal.wire.experience_spec import PolicySpec


class DQNConfig(AlgorithmConfig):
    """Names as in Ape-X (Horgan et al., 1803.00933, appendix C). Defaults were chosen on CartPole: small networks.

    num_steps:          n of the n-step targets, environment steps
    dueling:            separate streams for value and advantage (1511.06581)
    batch_size:         steps drawn for one step of the optimizer
    samples_per_insert: steps drawn for each one inserted: how often a step is learned from, on average
    learning_starts:    environment steps to insert before the first step of the optimizer
    target_update_period: steps of the optimizer between two copies to the target network
    epsilon, epsilon_exponent: an actor at u in [0, 1) explores with probability epsilon^(1 + epsilon_exponent · u)
    epsilon_steps:      environment steps, of all actors together, in which ε falls from 1 to this
    priority_exponent, beta: of prioritised replay (1511.05952): 0 draws uniformly; weights undo it fully at beta = 1
    huber_delta:        error from which on the loss grows linearly
    replay_mb:          MiB of the replay, with its priorities; what is older is overwritten
    replay_on_disk:     in files of the run's folder, so that a resumed run goes on with it
    """

    name: Literal["dqn"] = "dqn"
    discount: float = Field(default=0.99, ge=0, le=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    num_steps: int = Field(default=10, ge=1)
    dueling: bool = True
    batch_size: int = Field(default=256, ge=1)
    samples_per_insert: float = Field(default=8.0, gt=0)
    learning_starts: int = Field(default=1000, ge=1)
    target_update_period: int = Field(default=30, ge=1)
    epsilon: float = Field(default=0.05, ge=0, le=1)
    epsilon_exponent: float = Field(default=1.0, ge=0)
    epsilon_steps: int = Field(default=10_000, ge=1)
    priority_exponent: float = Field(default=0.6, ge=0, le=1)
    beta: float = Field(default=0.4, ge=0, le=1)
    replay_mb: float = Field(default=64.0, gt=0)
    replay_on_disk: bool = False
    huber_delta: float = Field(default=10.0, gt=0)
    max_grad_norm: float = Field(default=10.0, gt=0)

    algorithm: ClassVar[str] = "shoal.libs.off_policy.dqn.algorithm:DQN"
    model_factory: ClassVar[str] = "shoal.libs.off_policy.q_network:QNetwork"
    score_output: ClassVar[str] = "q_values"
    has_value_head: ClassVar[bool] = False
    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete",)
    is_off_policy: ClassVar[bool] = True
    batch_steps: ClassVar[int] = 256
    updates_between_trials: ClassVar[int] = 1000

    def describe_policy(self, hidden: Sequence[int]) -> PolicySpec:
        """Greedy in the advantages, whose order is that of the values: an actor needs no value stream."""
        trunk = [f"trunk.{2 * i}" for i in range(len(hidden) - 1)]
        stream = [f"advantage.{2 * i}" for i in range(min(len(hidden), 1) + 1)]
        layers = tuple((f"{name}.weight", f"{name}.bias") for name in (*trunk, *stream))
        return PolicySpec("mlp_epsilon_greedy", "relu", layers, "epsilon", self.epsilon_exponent)

    def get_model_options(self) -> dict[str, Any]:
        return {"dueling": self.dueling}
