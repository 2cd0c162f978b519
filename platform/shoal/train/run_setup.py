"""What a spec and the data of its Task make together, before the model is built. Called by the check and by workers."""

from __future__ import annotations

from shoal.data import Data
from shoal.errors import ConfigError
from shoal.parallel import ParallelDims
from shoal.train.run_facts import RunFacts
from shoal.train.spec import TrainSpec


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
