"""The configurations of DQN, R2D2 and SAC. Imports no torch: launchers and the gateway read them without computing."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from shoal.extend.rl import AlgorithmConfig
from shoal.wire.experience_spec import PolicySpec


class QLearningConfig(AlgorithmConfig):
    """What DQN and R2D2 have in common, under the names of Ape-X (Horgan et al., 1803.00933, appendix C).

    discount:           γ, for an environment step
    learning_rate:      of Adam
    num_steps:          n of the n-step targets, environment steps
    dueling:            separate streams for value and advantage (1511.06581)
    batch_size:         steps, or sequences of R2D2, drawn for one step of the optimizer
    samples_per_insert: steps trained for each one inserted: how often a step is learned from, on average
    learning_starts:    environment steps to insert before the first step of the optimizer
    target_update_period: steps of the optimizer between two copies to the target network
    epsilon, epsilon_exponent: an actor at u in [0, 1) explores with probability epsilon^(1 + epsilon_exponent · u)
    epsilon_steps:      environment steps, of all actors together, in which ε falls from 1 to this
    priority_exponent, beta: of prioritised replay (1511.05952): 0 draws uniformly; weights undo it fully at beta = 1
    replay_mb:          MiB of the replay, with its priorities; what is older is overwritten
    replay_on_disk:     in files of the run's folder, so that a resumed run goes on with it
    max_grad_norm:      of the loss's gradient
    """

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
    max_grad_norm: float = Field(default=10.0, gt=0)

    score_output = "q_values"
    action_spaces = ("Discrete",)
    is_off_policy = True
    search_space: ClassVar[Mapping[str, str]] = {
        "learning_rate": "log(3e-4,1e-2)",
        "discount": "choice(0.98,0.99,0.995,0.999)",
        "num_steps": "choice(1,3,5,10)",
        "samples_per_insert": "choice(2,4,8)",
        "target_update_period": "choice(30,100,300)",
    }
    normalize_rewards = True
    batch_steps = 256
    value_prefix: ClassVar[str] = ""  # of the network's tensors of values

    def describe_policy(self, hidden: Sequence[int]) -> PolicySpec:
        """Greedy in the advantages, whose order is that of the values: an actor needs no value stream."""
        prefix, trunk = self.value_prefix, [f"trunk.{2 * i}" for i in range(len(hidden) - 1)]
        stream = [f"{prefix}advantage.{2 * i}" for i in range(min(len(hidden), 1) + 1)]
        layers = tuple((f"{name}.weight", f"{name}.bias") for name in (*trunk, *stream))
        position = len(trunk) if prefix else 0
        epsilon = f"{prefix}epsilon"
        return PolicySpec("mlp_epsilon_greedy", "relu", layers, epsilon, self.epsilon_exponent, core_position=position)

    def get_model_options(self) -> dict[str, Any]:
        return {"dueling": self.dueling}


class DQNConfig(QLearningConfig):
    """Defaults were chosen on CartPole: small networks.

    huber_delta: error from which on the loss grows linearly
    """

    name: Literal["dqn"] = "dqn"
    huber_delta: float = Field(default=10.0, gt=0)

    algorithm = "shoal.libs.off_policy.dqn:DQN"
    model_factory = "shoal.libs.off_policy.q_network:QNetwork"
    has_value_head = False
    updates_between_trials = 1000


class R2D2Config(QLearningConfig):
    """Names as in Kapturowski et al. (ICLR 2019) and in DQN. Defaults were chosen on small games of memory.

    sequence_length:    environment steps that a sequence trains
    burn_in:            environment steps before them that only bring the state up to date; at most sequence_length
    priority_mix:       η: a sequence's priority is η max + (1 - η) mean of its absolute errors
    rescaling_epsilon:  ε of the value rescaling h(x) = sign(x) (√(|x| + 1) - 1) + ε x
    """

    name: Literal["r2d2"] = "r2d2"
    learning_rate: float = Field(default=1e-3, gt=0)
    num_steps: int = Field(default=5, ge=1)
    sequence_length: int = Field(default=40, ge=1)
    burn_in: int = Field(default=20, ge=0)
    batch_size: int = Field(default=32, ge=1)
    samples_per_insert: float = Field(default=4.0, gt=0)
    target_update_period: int = Field(default=100, ge=1)
    priority_exponent: float = Field(default=0.9, ge=0, le=1)
    beta: float = Field(default=0.6, ge=0, le=1)
    priority_mix: float = Field(default=0.9, ge=0, le=1)
    rescaling_epsilon: float = Field(default=1e-3, gt=0)

    algorithm = "shoal.libs.off_policy.r2d2:R2D2"
    recurrent_factory = "shoal.libs.off_policy.q_network:RecurrentQNetwork"
    cores = ("gru", "lstm")
    updates_between_trials = 500
    value_prefix = "head."

    def get_model_options(self) -> dict[str, Any]:
        return {**super().get_model_options(), "rescaling_epsilon": self.rescaling_epsilon}

    @model_validator(mode="after")
    def _burn_in_fits(self) -> R2D2Config:
        if self.burn_in > self.sequence_length:
            raise ValueError(f"burn_in = {self.burn_in} is above sequence_length = {self.sequence_length}")
        return self


class SACConfig(AlgorithmConfig):
    """Names as in Haarnoja et al. (1812.05905, table 1), defaults for small tasks.

    discount:            γ, for an environment step
    learning_rate:       of Adam, for the policy, the critics and the temperature
    tau:                 how far the target critics move to the critics after each step
    batch_size:          steps drawn for one step of the optimizers
    updates_per_step:    steps of the optimizers for each environment step inserted
    learning_starts:     environment steps to insert before the first step of the optimizers, also after a resume
    initial_temperature: α at first, beside normalised rewards, for a nat
    noise_steps:         time constant of the slowest part of the exploration noise, environment steps; other parts have
                         a quarter and a sixteenth of it, and one is white; 0: all are
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
    initial_temperature: float = Field(default=0.1, gt=0)
    noise_steps: float = Field(default=32.0, ge=0)
    target_entropy: float | None = None
    replay_mb: float = Field(default=256.0, gt=0)
    replay_on_disk: bool = False

    algorithm = "shoal.libs.off_policy.sac:SAC"
    model_factory = "shoal.libs.off_policy.gaussian_actor:GaussianActor"
    score_output = "mean"
    has_value = False
    has_value_head = False
    action_spaces = ("Box",)
    is_off_policy = True
    search_space: ClassVar[Mapping[str, str]] = {
        "learning_rate": "log(3e-4,3e-3)",
        "discount": "choice(0.98,0.99,0.995)",
        "tau": "choice(0.005,0.01,0.02)",
        "batch_size": "choice(128,256,512)",
        "updates_per_step": "choice(0.5,1,2)",
    }
    normalize_rewards = True
    segment_length = 32
    batch_steps = 64
    updates_between_trials = 1000

    def describe_policy(self, hidden: Sequence[int]) -> PolicySpec:
        layers = tuple((f"policy.{2 * i}.weight", f"policy.{2 * i}.bias") for i in range(len(hidden) + 1))
        decays = (0.0, *(math.exp(-each / self.noise_steps) for each in (16, 4, 1))) if self.noise_steps else ()
        return PolicySpec("mlp_squashed_gaussian", "relu", layers, noise_decays=decays)
