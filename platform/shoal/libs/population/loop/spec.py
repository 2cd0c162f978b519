"""The spec of a population of learners, and the checks before it starts. Imports neither torch nor Ray."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field, model_validator

from shoal.errors import ConfigError
from shoal.extend.flows import MEAN_RETURN, require_local
from shoal.extend.registry import AliasNames
from shoal.extend.rl import RLSpec
from shoal.libs.population.evolution import EvolutionSpec
from shoal.libs.population.spec import Space
from shoal.search.space import Options, SearchSpace, nest

ALGORITHM = "algorithm."


class RLPopulationSpec(RLSpec):
    """One run: the fields of a run of the loop are those of each member, but for the fields of `space`.

    members:         learners, each with a gateway of its own
    actors:          of each member: processes that the run starts and ends
    rounds:          between two of them members are scored, copied and changed
    steps_per_round: environment steps of each member
    min_episodes:    of each member in a round, at least: their mean return scores it
    space:           what differs from member to member: fields of the algorithm that a learner can change while it
                     learns
    seed:            of the evolution; member k learns with learner.seed + k
    model_name:      of the best member's policy in the registry; "": none is registered
    """

    recorded_always = ("space",)

    main_fields = (
        "env",
        "members",
        "actors",
        "rounds",
        "steps_per_round",
        "space",
        "algorithm.name",
        "model_name",
    )
    page = "libs/population.md"

    members: int = Field(default=4, ge=1)
    actors: int = Field(default=1, ge=1)
    rounds: int = Field(default=10, ge=1)
    steps_per_round: int = Field(default=5000, ge=1)
    min_episodes: int = Field(default=5, ge=1)
    space: Space = Field(
        default_factory=lambda: {
            "algorithm.learning_rate": "log(1e-4, 1e-2)",
            "algorithm.entropy_cost": "log(1e-3, 1e-1)",
        }
    )
    evolution: EvolutionSpec = EvolutionSpec(name="pbt")
    seed: int = Field(default=0, ge=0, lt=2**63)
    keep_checkpoints: int = Field(default=2, ge=1)
    model_name: str = "policy"
    aliases: AliasNames | None = None
    resume: str = ""

    @property
    def search_space(self) -> SearchSpace:
        return SearchSpace.parse(self.space)

    @property
    def metric(self) -> str:
        return MEAN_RETURN

    @property
    def is_higher_better(self) -> bool:
        return True

    @property
    def steps_per_member(self) -> int:
        """Environment steps of each member."""
        return self.rounds * self.steps_per_round

    @model_validator(mode="after")
    def _fits_together(self) -> RLPopulationSpec:
        changeable = self.algorithm.changeable
        if not changeable:
            raise ValueError(
                f"algorithm={self.algorithm.name}: its learner has a replay, which no member can copy: use"
                " algorithm=impala or algorithm=ppo, or shoal sweep"
            )
        for path, distribution in self.search_space.items():
            if not path.startswith(ALGORITHM) or path.removeprefix(ALGORITHM) not in changeable:
                there_is = ", ".join(ALGORITHM + name for name in changeable)
                raise ValueError(f"space: a learner cannot change {path!r} while it learns: there is {there_is}")
            if isinstance(distribution, Options) and not distribution.is_ordered:
                raise ValueError(f"space: {path} = {distribution}: a hyper-parameter of a member is a number")
        return self

    def make_member_spec(self, member: int, values: Mapping[str, object]) -> RLSpec:
        """What this member learns with. Raises ConfigError for values that do not fit."""
        own = {name: getattr(self, name) for name in RLSpec.model_fields}
        spec = RLSpec.parse({**own, "algorithm": self.algorithm})
        device = "cpu" if spec.learner.device == "auto" else spec.learner.device  # the driver's, which reserves no GPU
        return spec.update(nest({**values, "learner.seed": self.learner.seed + member, "learner.device": device}))


def require_members(spec: RLPopulationSpec) -> None:
    """Raise ConfigError for what members cannot have, and for values out of range."""
    require_local(spec)
    if spec.self_play.is_on:
        problem = "scores a member by opponents of its own, so that members cannot be compared"
        raise ConfigError("self_play", str(spec.self_play), problem, "leave it out")
    for unit in (0.0, 1.0):
        spec.make_member_spec(0, spec.search_space.from_unit([unit] * len(spec.space)))
