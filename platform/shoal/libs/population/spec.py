"""The spec of a population run: many members of one architecture, trained and evolved in one process.

Used by the flow, its job and the CLI's check of overrides. Imports neither torch nor Ray, and has no behaviour beyond
properties of its fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from shoal.config import Spec
from shoal.extend.registry import AliasNames
from shoal.extend.runs import LogFormat, TrackerNames, infer_direction
from shoal.extend.train import require_direction
from shoal.libs.population.evolution import EvolutionSpec
from shoal.search.space import Options, SearchSpace, flatten

AUGMENTATION = "augmentation."
OPTIMIZER = "optimizer."
TUNABLE = ("learning_rate", "momentum", "weight_decay")


def flatten_space(space: object) -> object:
    """Nested fields by their paths, as `space.optimizer.momentum=...` on the command line is one, as text of YAML. The
    last of several counts, and None removes it."""
    if not isinstance(space, Mapping):
        return space
    flat = dict(flatten(space))
    return {
        path: value if isinstance(value, str | list) else str(value)
        for path, value in flat.items()
        if value is not None
    }


Space = Annotated[dict[str, Any], BeforeValidator(flatten_space)]
_Beta = Annotated[float, Field(ge=0, lt=1)]


class MemberOptimizerSpec(Spec):
    """The optimiser of every member, with the fields of a TrainSpec's; those in the space differ from member to
    member."""

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    learning_rate: float = Field(default=0.05, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd only")
    betas: tuple[_Beta, _Beta] = (0.9, 0.999)


class PopulationSpec(Spec):
    """One population run.

    task:            `lenet` (a file of ./jobs), `my_task.py:MyTask`, or `package.module:MyTask`
    args:            the Task's keyword arguments
    space:           what differs from member to member, as in `optimizer.learning_rate: log(1e-3, 1e-1)`; there is
                     `optimizer.momentum`, `optimizer.weight_decay`, and `augmentation.NAME` of Task.augmentations
    augmentation:    strengths of augmentations that are the same for all members
    rounds:          between two of them members are scored, copied and changed
    order:           whether all members see the same batches, or each its own
    engine:          how members are computed, and `chunk` how many at once; auto and null: by a short trial
    memory_bytes:    of the device, for members; those that do not fit wait in host memory; null: what is free
    evolution:       how members copy and change each other between rounds; the name alone will do
    init:            the weights of every member at the start: NAME@VERSION of the registry, or a file; "": fresh ones
    metric:          of the validation data, by which members are scored
    score_samples:   of the validation data, the first ones, that score the members; None: all. What is registered is
                     measured over all
    direction:       whether more of it is better; auto: by its name
    ensemble:        of so many of the best members, registered as NAME-ensemble; 0: none; null: of five, or of all
                     where there are fewer
    workers:         Ray workers with a share of the members each; 1: this process has them all
    threads:         that train chunks at once, in each worker; None: all cores
    logs:            json: each line of the driver's output, and of the workers' logs, is an object
    track:           where its record is mirrored to: mlflow, wandb, trackio
    name:            in the registry; "" takes the Task's name
    """

    recorded_always = ("space",)

    task: str = ""
    args: dict[str, Any] = Field(default_factory=dict)
    members: int = Field(default=30, ge=1)
    space: Space = Field(default_factory=lambda: {"optimizer.learning_rate": "log(1e-3, 1e-1)"})
    augmentation: dict[str, float] = Field(default_factory=dict)
    rounds: int = Field(default=20, ge=1)
    steps_per_round: int = Field(default=100, ge=1)
    batch_size: int = Field(default=64, ge=1)
    order: Literal["shared", "own"] = "shared"
    engine: Literal["auto", "lanes", "stacked", "vmap", "looped"] = "auto"
    chunk: int | None = Field(default=None, ge=1)
    memory_bytes: int | None = Field(default=None, ge=1)
    optimizer: MemberOptimizerSpec = MemberOptimizerSpec()
    evolution: EvolutionSpec = EvolutionSpec()
    init: str = ""
    metric: str = "accuracy"
    direction: Literal["auto", "max", "min"] = "auto"
    score_samples: int | None = Field(default=None, ge=1)
    evaluation_batch_size: int = Field(default=500, ge=1)
    ensemble: int | None = Field(default=None, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    workers: int = Field(default=1, ge=1)
    threads: int | None = Field(default=None, ge=1)
    keep_checkpoints: int = Field(default=2, ge=1)
    track: TrackerNames = ()
    logs: LogFormat = "text"
    name: str = ""
    aliases: AliasNames | None = None
    resume: str = ""

    @model_validator(mode="after")
    def _fits_together(self) -> PopulationSpec:
        known = [OPTIMIZER + name for name in TUNABLE if name != "momentum" or self.optimizer.name == "sgd"]
        for path, distribution in self.search_space.items():
            if not (path in known or path.startswith(AUGMENTATION)):
                there_is = ", ".join((*known, "augmentation.NAME"))
                raise ValueError(f"space: no member has {path!r}: there is {there_is}; arguments: shoal sweep")
            if isinstance(distribution, Options) and not distribution.is_ordered:
                raise ValueError(f"space: {path} = {distribution}: a hyper-parameter of a member is a number")
            most = 1.0 if path == OPTIMIZER + "momentum" else math.inf
            if path.startswith(OPTIMIZER) and not 0 <= distribution.ends[0] <= distribution.ends[1] <= most:
                raise ValueError(f"space: {path} = {distribution}: its values are from 0 to {most:g}")
        if not self.space:
            raise ValueError("space: it is empty: add what members change, as optimizer.learning_rate")
        for name in self.augmentation:
            if AUGMENTATION + name in self.space:
                raise ValueError(f"augmentation.{name} is in the space too: fix it with space.augmentation.{name}=null")
        require_direction(self.metric, self.direction)
        if self.workers > self.members:
            raise ValueError(f"workers={self.workers} is more than members={self.members}")
        if self.ensemble is not None and self.ensemble > self.members:
            raise ValueError(f"ensemble={self.ensemble} is more than members={self.members}: say fewer, or 0 for none")
        if self.ensemble == 1:
            raise ValueError("ensemble=1: the best member is registered by itself; say 0, or 2 or more")
        return self

    @property
    def search_space(self) -> SearchSpace:
        """What differs from member to member."""
        return SearchSpace.parse(self.space)

    @property
    def is_higher_better(self) -> bool:
        """Whether more of the metric is better."""
        return self.direction == "max" or (self.direction == "auto" and infer_direction(self.metric) is True)

    @property
    def ensemble_size(self) -> int:
        """How many members are averaged; 0: none."""
        size = min(5, self.members) if self.ensemble is None else self.ensemble
        return size if size > 1 else 0

    @property
    def steps_per_member(self) -> int:
        """The steps of each member."""
        return self.rounds * self.steps_per_round

    @property
    def hyper_parameters(self) -> dict[str, float]:
        """The fixed ones, by path; those of the space take their place."""
        fixed = {OPTIMIZER + name: float(getattr(self.optimizer, name)) for name in TUNABLE}
        return fixed | {AUGMENTATION + name: strength for name, strength in self.augmentation.items()}

    @property
    def augmentations(self) -> list[str]:
        """The names of all augmentations, in the order in which they are applied."""
        paths = self.hyper_parameters | self.space
        return [path.removeprefix(AUGMENTATION) for path in paths if path.startswith(AUGMENTATION)]
