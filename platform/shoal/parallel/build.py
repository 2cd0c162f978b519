"""Choose the implementation of a plan for this rank's model.

Called by the Trainer. Checks without a process group are in `validate`, which the launcher calls beforehand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from shoal.errors import PlanError
from shoal.parallel.comm.world import World, make_data_group, make_mesh
from shoal.parallel.deferred.weights import DeferredWeights
from shoal.parallel.layers.precision import use_channels_last
from shoal.parallel.model import ParallelModel, TaskProtocol
from shoal.parallel.pipeline.model import build_pipeline
from shoal.parallel.spec import ParallelDims, ParallelSpec
from shoal.parallel.spmd.base import SingleProcessModel
from shoal.parallel.spmd.ddp import DdpModel
from shoal.parallel.spmd.fsdp import FsdpModel
from shoal.parallel.state.module_snapshot import restore_parameters
from shoal.parallel.state.state_dict import sum_in_double
from shoal.parallel.tensor.apply import build_tensor_parallel
from shoal.parallel.validate import check_plan


def parallelize(
    model: nn.Module,
    learnable: TaskProtocol,
    spec: ParallelSpec,
    degrees: ParallelDims,
    world: World,
    example: Any,
    seed: int = 0,
    deferred: DeferredWeights | None = None,
) -> ParallelModel:
    """Parallelise `model` over the ranks of `world`; every rank has built the same model and calls this.

    example:  a batch of this rank, from which shapes are read
    deferred: what fills the parameters of a model that was built without memory for them: for a plan that shards or
              splits it

    Raises PlanError on every rank, with the remedy, when the model does not fit the plan.
    """
    if degrees.workers != world.size:
        problem, remedy = f"does not fit {degrees.description}", f"start {degrees.workers} processes"
        raise PlanError("workers", world.size, problem, remedy)
    check_plan(model, learnable, spec, degrees, device=world.device.type)
    splits_layers = degrees.tensor > 1 or degrees.pipeline > 1
    if degrees.is_sharded or splits_layers:
        restore_parameters(model)
    if degrees.shard or splits_layers:  # replicas take rank 0's weights; parts of one model must already be equal
        tensors = [*model.named_parameters(), *model.named_buffers()]
        sums: dict[str, object] = {name: sum_in_double(each) for name, each in tensors if not each.is_meta}
        sums |= {} if deferred is None else deferred.fingerprint()
        sums["the list of its tensors"] = list(sums)
        remedy = "let Task.model() draw from torch's generator only, which is seeded alike everywhere"
        _require_same(sums, model, world, remedy)
    if spec.channels_last:
        use_channels_last(model)
    if degrees.pipeline == 1 and world.size == 1:
        return SingleProcessModel(model, learnable, spec, world, seed)
    if degrees.pipeline == degrees.tensor == 1 and not degrees.shard:
        return DdpModel(model, learnable, spec, world, example, seed, make_data_group(degrees, world))
    parallel: ParallelModel
    if degrees.pipeline > 1:
        parallel = build_pipeline(model, learnable, spec, degrees, world, example, seed, deferred)
    elif degrees.tensor > 1:
        parallel = build_tensor_parallel(model, learnable, spec, degrees, world, example, seed, deferred)
    else:
        mesh, group = make_mesh(degrees, world), make_data_group(degrees, world)
        parallel = FsdpModel(model, learnable, spec, world, seed, mesh, group, deferred)
    if deferred is not None:
        _require_same(deferred.sampled, model, world, "let each host begin with the same weights")
    return parallel


def _require_same(mine: Mapping[str, object], model: nn.Module, world: World, remedy: str) -> None:
    """Raises PlanError when two ranks have another value for a tensor of both. Collective."""
    for rank, theirs in enumerate(world.gather(mine)):
        for name in [name for name in mine if name in theirs]:
            if repr(theirs[name]) != repr(mine[name]):
                problem = f"{name} is not the same on ranks {world.rank} and {rank}"
                raise PlanError("model", type(model).__name__, problem, remedy)
