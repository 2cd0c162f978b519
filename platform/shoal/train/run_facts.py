"""What a spec and the data of its Task make together, before the model is built; and what a Task may know of it.

Called by the check of a run, and by its workers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.data import Data
from shoal.errors import ConfigError
from shoal.parallel import ParallelDims
from shoal.train.spec import TrainSpec

_ROUNDING = 1e-9  # 0.07 epochs of 100 steps are 7 steps, not 7.000000000000001


@dataclass(frozen=True)
class RunFacts:
    """A run before its model is built.

    epochs, steps:   when it ends, as far as `stop` says
    steps_per_epoch: None if the data has no length
    batch_size, accumulate, clip_norm, precision: as in the spec
    rank, num_ranks: this process, and how many take part; of a check before the workers start, the first
    """

    epochs: float | None
    steps: int | None
    steps_per_epoch: int | None
    batch_size: int
    accumulate: int
    clip_norm: float | None
    precision: str
    rank: int = 0
    num_ranks: int = 1

    @property
    def total_steps(self) -> int | None:
        """Steps until the nearest end in steps or epochs; None where neither is known."""
        per_epoch, epochs = self.steps_per_epoch, self.epochs
        by_epochs = None if epochs is None or per_epoch is None else epochs_to_steps(epochs, per_epoch)
        return min((each for each in (self.steps, by_epochs) if each is not None), default=None)


def epochs_to_steps(epochs: float, steps_per_epoch: int) -> int:
    """The smallest number of steps that completes `epochs` epochs."""
    return max(math.ceil(epochs * steps_per_epoch - _ROUNDING), 1)


def make_facts(spec: TrainSpec, steps_per_epoch: int | None, rank: int, num_ranks: int) -> RunFacts:
    """The facts of a run for its Task."""
    stop, plan = spec.stop, spec.parallel
    settings = (spec.batch_size, plan.accumulate, spec.clip_norm, plan.precision)
    return RunFacts(stop.epochs, stop.steps, steps_per_epoch, *settings, rank, num_ranks)


def needs_even_batches(spec: TrainSpec, degrees: ParallelDims) -> bool:
    """Whether each step needs the full batch, so that an incomplete last one is left out."""
    return degrees.pipeline > 1 or spec.has_replicas or spec.selective_backprop is not None


def adopt_batch_size(spec: TrainSpec, data: Data) -> TrainSpec:
    """With the batch size of the DataLoader that the data was, unless the run says one.

    Raises ConfigError for another than that of a batch sampler, which makes the batches itself.
    """
    found = data.get_settings("train")
    if found.batch_size is None or found.batch_size == spec.batch_size:
        return spec
    if "batch_size" not in spec.model_fields_set:
        return spec.update({"batch_size": found.batch_size})
    if found.order is not None and found.order.gives_batches:
        problem = f"has no effect: the batch sampler {found.order.name} makes the batches"
        raise ConfigError("batch_size", spec.batch_size, problem, "leave it out")
    return spec
