"""The configuration of an algorithm, chosen by its name: `algorithm=impala`, `algorithm.learning_rate=0.002`.

Owns the table of algorithms, and the configurations of IMPALA and PPO. Imports no torch: launchers and the gateway read
a spec without computing. A user's own algorithm is named by its configuration: `algorithm=my_algorithm.py:MyConfig`
(see `shoal.extend`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, SerializeAsAny

from shoal.config import Spec
from shoal.plugins.find import find_extension
from shoal.plugins.library import collect_extensions
from shoal.wire.experience_spec import PolicySpec

# The platform's own; libraries add theirs to the group. Modules are imported at their first use.
CONFIGS = {"impala": "shoal.rl.algorithm_config:ImpalaConfig", "ppo": "shoal.rl.algorithm_config:PPOConfig"}
GROUP = "shoal.algorithms"  # of libraries and of entry points


class AlgorithmConfig(Spec):
    """What every algorithm has. Subclasses of ours give `name` a default, their word.

    algorithm:     the `module:Class` of its `Algorithm`
    model_factory: of the model that learner, endpoint and registry build
    recurrent_factory: of the model of a run with a recurrent core
    score_output:  the endpoint's name for the numbers of the actions
    has_value:     the endpoint answers the value of the observation, too
    has_value_head: the model gives it beside the policy's outputs
    cores:         recurrent cores that its network can have, "none" among them; the first one is the default
    action_spaces: gymnasium's names of the spaces that it can act in
    is_off_policy: learns from experience of any age: `gateway.max_version_lag` does not apply
    normalize_rewards: whether it learns from normalised rewards, unless the run's `normalize_rewards` is given
    changeable:    fields that a learner can change while it learns, as populations do; () where it cannot
    search_space:  fields that `shoal sweep` searches unless it is given a space, each with the word of its distribution
    segment_length: environment steps in a segment, at most, unless the run's `segment_length` is given
    batch_steps:   environment steps in a batch, at least, unless `learner.batch_steps` is given
    batch_growth:  at most so many times as many, when the learner has fallen behind
    takes_all:     a batch is always of up to so many: all that is queued, which the gateway itself has put together
    updates_between_trials: steps of the optimizer after which weights that failed their trial get another one
    """

    name: str

    algorithm: ClassVar[str]
    model_factory: ClassVar[str] = "shoal.models.actor_critic:ActorCritic"
    recurrent_factory: ClassVar[str] = "shoal.models.actor_critic:RecurrentActorCritic"
    score_output: ClassVar[str] = "logits"
    has_value: ClassVar[bool] = True
    has_value_head: ClassVar[bool] = True
    cores: ClassVar[tuple[str, ...]] = ("none",)
    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete", "Box", "MultiDiscrete", "MultiBinary")
    is_off_policy: ClassVar[bool] = False
    normalize_rewards: ClassVar[bool] = False
    changeable: ClassVar[tuple[str, ...]] = ()
    search_space: ClassVar[Mapping[str, str]] = {}
    segment_length: ClassVar[int] = 256
    batch_steps: ClassVar[int] = 2048
    batch_growth: ClassVar[int] = 2
    takes_all: ClassVar[bool] = False
    updates_between_trials: ClassVar[int] = 50

    @property
    def pauses_actors(self) -> bool:
        """Whether actors wait while the learner updates, so that no step of a batch is of older weights."""
        return False

    def limit_version_lag(self, given: int) -> int:
        """How many weight versions old experience may be, where `given` is the gateway's own limit."""
        return 0 if self.pauses_actors else sys.maxsize if self.is_off_policy else given

    @property
    def take_timeout_s(self) -> float:
        """How long the learner waits for a full batch, unless `learner.take_timeout_s` is given."""
        return 0.5

    @property
    def disk_mb(self) -> float:
        """MiB that its replay takes on the disk; 0 if there is none, or it is in memory."""
        return float(getattr(self, "replay_mb", 0.0)) if getattr(self, "replay_on_disk", False) else 0.0

    def describe_policy(self, hidden: Sequence[int]) -> PolicySpec | None:
        """How actors act with the published weights; None: as with those of an actor-critic."""
        return None

    def get_model_options(self) -> dict[str, Any]:
        """The arguments of the model's constructor beyond sizes."""
        return {}

    @classmethod
    def from_override(cls, text: str, before: Mapping[str, Any]) -> object:
        """Another algorithm begins with its own defaults."""
        return before if text == before.get("name") else {"name": text}

    @classmethod
    def choose_type(cls, values: Mapping[str, Any]) -> type[Spec]:
        return find_algorithm_config_type(values.get("name"))

    @classmethod
    def list_kinds(cls) -> Collection[str]:
        return (*CONFIGS, *collect_extensions(GROUP))


class ActorCriticConfig(AlgorithmConfig):
    """What IMPALA and PPO have in common.

    discount:        γ, for an environment step
    lambda_:         of the traces or advantages; below 1 less variance and more bias
    learning_rate:   of Adam
    epochs:          passes over each batch
    minibatch_steps: environment steps for one step of the optimizer: whatever the batch, N environment steps are
                     learnt by N · epochs / minibatch_steps updates
    clip:            ε, the trust region: a step teaches nothing more once π / μ has left 1 ± ε, where μ has acted
    value_cost:      weight of the value loss, in units of the deviation of the value targets
    entropy_cost:    weight of the entropy at first, beside normalised advantages, for a nat
    entropy_half_steps: environment steps after which that has fallen to a half; it goes on as 1 / (1 + steps / these)
    rho_bar:         the most that a step counts, by π / μ, which experience of older weights may have far from 1
    max_grad_norm:   of the loss's gradient
    normalize_advantages: to mean 0 and standard deviation 1 in each batch; otherwise they are in units of the deviation
                     of the value targets
    synchronous:     actors pause while the learner updates: every step is of the newest weights
    """

    discount: float = Field(default=0.999, ge=0, le=1)
    lambda_: float = Field(default=0.98, ge=0, le=1)
    learning_rate: float = Field(default=2e-3, gt=0)
    epochs: int = Field(default=10, ge=1)
    minibatch_steps: int = Field(default=512, ge=1)
    clip: float = Field(default=0.2, gt=0)
    value_cost: float = Field(default=0.5, ge=0)
    entropy_cost: float = Field(default=0.01, ge=0)
    entropy_half_steps: float = Field(default=100_000, gt=0)
    rho_bar: float = Field(default=2.0, gt=0)
    max_grad_norm: float = Field(default=0.5, gt=0)
    normalize_advantages: bool = True
    synchronous: bool = False

    cores: ClassVar[tuple[str, ...]] = ("none", "gru", "lstm")
    changeable: ClassVar[tuple[str, ...]] = (
        "discount",
        "lambda_",
        "learning_rate",
        "epochs",
        "minibatch_steps",
        "clip",
        "value_cost",
        "entropy_cost",
        "entropy_half_steps",
        "rho_bar",
        "max_grad_norm",
    )
    search_space: ClassVar[Mapping[str, str]] = {
        "learning_rate": "log(3e-4,4e-3)",
        "epochs": "choice(4,10,20)",
        "entropy_cost": "choice(0,0.003,0.01,0.03)",
        "discount": "choice(0.98,0.99,0.995,0.999)",
        "lambda_": "choice(0.9,0.95,0.98)",
    }
    batch_steps: ClassVar[int] = 1024
    batch_growth: ClassVar[int] = 4  # of hundreds of actors, so that experience is few versions old
    updates_between_trials: ClassVar[int] = 200  # those of ten batches

    @property
    def pauses_actors(self) -> bool:
        return self.synchronous

    @property
    def take_timeout_s(self) -> float:
        return 5.0 if self.synchronous else 60.0


class ImpalaConfig(ActorCriticConfig):
    """Names as in table D.1 of the paper; the optimizer is Adam.

    c_bar: the most that a trace is carried on
    """

    name: Literal["impala"] = "impala"
    rho_bar: float = Field(default=1.0, gt=0)
    c_bar: float = Field(default=1.0, gt=0)

    algorithm: ClassVar[str] = "shoal.rl.algorithms.impala:Impala"
    changeable: ClassVar[tuple[str, ...]] = (*ActorCriticConfig.changeable, "c_bar")


class PPOConfig(ActorCriticConfig):
    """Names as in Schulman et al. (1707.06347)."""

    name: Literal["ppo"] = "ppo"

    algorithm: ClassVar[str] = "shoal.rl.algorithms.ppo:PPO"


def find_algorithm_config_type(name: object) -> type[AlgorithmConfig]:
    """The configuration of the algorithm `name`. Raises ValueError."""
    config_type = find_extension(str(name), GROUP, CONFIGS)
    if not (isinstance(config_type, type) and issubclass(config_type, AlgorithmConfig)):
        raise ValueError(f"{name} is no subclass of shoal.extend.AlgorithmConfig")
    return config_type


def find_fitting(fits: Callable[[type[AlgorithmConfig]], bool]) -> list[str]:
    """The words of the algorithms of which `fits` is true, of the platform, of libraries and of installed packages."""
    fitting = []
    for name in (*CONFIGS, *collect_extensions(GROUP)):
        with suppress(ValueError):  # a package that cannot be imported here
            if fits(find_algorithm_config_type(name)):
                fitting.append(name)
    return fitting


def _parse_config(value: object) -> object:
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        return find_algorithm_config_type(value.get("name")).parse(value)
    return value


AnyAlgorithmConfig = Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(_parse_config)]
