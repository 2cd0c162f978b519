"""The configuration of an algorithm, chosen by its name: `algorithm=impala`, `algorithm.learning_rate=0.002`.

Owns the table of algorithms. Imports no torch: launchers and the gateway read a spec without computing. An algorithm of
the user's own is named by its configuration: `algorithm=my_algorithm.py:MyConfig` (see `shoal.extend`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BeforeValidator, SerializeAsAny

from shoal.config import Spec
from shoal.plugins.find import find_extension
from shoal.plugins.library import collect_extensions
from shoal.wire.experience_spec import PolicySpec

# The platform's own; libraries add theirs to the group. Modules are imported at their first use.
CONFIGS = {
    "impala": "shoal.rl.algorithms.impala.config:ImpalaConfig",
    "ppo": "shoal.rl.algorithms.ppo.config:PPOConfig",
}
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
    changeable:    fields that a learner can change while it learns, as populations do; () where it cannot
    batch_steps:   environment steps in a batch, at least, unless `learner.batch_steps` is given; at most twice as many
    updates_between_trials: steps of the optimizer after which weights that failed their trial get another one
    """

    name: str

    algorithm: ClassVar[str]
    model_factory: ClassVar[str] = "shoal.models.actor_critic:ActorCritic"
    recurrent_factory: ClassVar[str] = "shoal.models.recurrent_actor_critic:RecurrentActorCritic"
    score_output: ClassVar[str] = "logits"
    has_value: ClassVar[bool] = True
    has_value_head: ClassVar[bool] = True
    cores: ClassVar[tuple[str, ...]] = ("none",)
    action_spaces: ClassVar[tuple[str, ...]] = ("Discrete", "Box", "MultiDiscrete", "MultiBinary")
    is_off_policy: ClassVar[bool] = False
    changeable: ClassVar[tuple[str, ...]] = ()
    batch_steps: ClassVar[int] = 2048
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
        return 5.0 if self.pauses_actors else 0.5

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
        return find_config_type(values.get("name"))


def find_config_type(name: object) -> type[AlgorithmConfig]:
    """The configuration of the algorithm `name`. Raises ValueError."""
    found = find_extension(str(name), GROUP, CONFIGS)
    if not (isinstance(found, type) and issubclass(found, AlgorithmConfig)):
        raise ValueError(f"{name} is no subclass of shoal.extend.AlgorithmConfig")
    return found


def find_fitting(fits: Callable[[type[AlgorithmConfig]], bool]) -> list[str]:
    """The words of the algorithms of which `fits` is true, of the platform, of libraries and of installed packages."""
    return [name for name in (*CONFIGS, *collect_extensions(GROUP)) if fits(find_config_type(name))]


def _parse_config(value: object) -> object:
    if isinstance(value, str):
        value = {"name": value}
    if isinstance(value, Mapping):
        return find_config_type(value.get("name")).parse(value)
    return value


AnyAlgorithmConfig = Annotated[SerializeAsAny[AlgorithmConfig], BeforeValidator(_parse_config)]
