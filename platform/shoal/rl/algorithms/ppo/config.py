"""PPO's configuration. Imports no torch: launchers and the gateway read it without computing."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from shoal.rl.algorithm_config import AlgorithmConfig


class PPOConfig(AlgorithmConfig):
    """Names and defaults as in Schulman et al. (1707.06347) and Huang et al. ("37 details", 2022).

    epochs, minibatches: steps of the optimiser for a batch: epochs * minibatches
    clip:    ε of the clipped objective, around the policy that has acted
    rho_bar: the most that a step counts, by π / π_behaviour, which experience of older weights may have far from 1
    synchronous: actors pause while the learner updates, as in the paper: every step is of the newest weights
    """

    name: Literal["ppo"] = "ppo"
    discount: float = Field(default=0.99, ge=0, le=1)
    lambda_: float = Field(default=0.95, ge=0, le=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    epochs: int = Field(default=4, ge=1)
    minibatches: int = Field(default=4, ge=1)
    clip: float = Field(default=0.2, gt=0)
    value_cost: float = Field(default=0.5, ge=0)
    entropy_cost: float = Field(default=0.01, ge=0)
    rho_bar: float = Field(default=2.0, gt=0)
    max_grad_norm: float = Field(default=0.5, gt=0)
    normalize_advantages: bool = True
    synchronous: bool = False

    algorithm: ClassVar[str] = "shoal.rl.algorithms.ppo.algorithm:PPO"
    cores: ClassVar[tuple[str, ...]] = ("none", "gru", "lstm")
    changeable: ClassVar[tuple[str, ...]] = (
        *("discount", "lambda_", "learning_rate", "epochs", "minibatches", "clip"),
        *("value_cost", "entropy_cost", "rho_bar", "max_grad_norm"),
    )

    @property
    def pauses_actors(self) -> bool:
        return self.synchronous
