"""From degrees to processes: which groups a rank belongs to, and which implementation holds its model.

Called by `parallelize`; the checks that need no process group are `check_plan`, which the launcher calls beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.errors import PlanError
from shoal.parallel.comm.world import World
from shoal.parallel.layers.memory_format import use_channels_last
from shoal.parallel.model import Learnable, ParallelModel
from shoal.parallel.spec import Coordinates, Degrees, ParallelSpec
from shoal.parallel.validate import check_plan


def spread(
    model: nn.Module,
    learnable: Learnable,
    spec: ParallelSpec,
    degrees: Degrees,
    world: World,
    example: Any,
    seed: int,
) -> ParallelModel:
    """See `parallelize`."""
    if degrees.workers != world.size:
        raise PlanError("workers", world.size, f"does not fit {degrees.words}", f"start {degrees.workers} processes")
    check_plan(model, learnable, spec, degrees, device=world.device.type)
    if degrees.shard or degrees.tensor > 1 or degrees.pipeline > 1:
        _check_alike(model, world)  # replicas take rank 0's weights; parts of one model must be parts of the same
    if spec.channels_last:
        use_channels_last(model)
    if degrees.pipeline > 1:
        from shoal.parallel.pipeline.model import build_pipeline

        return build_pipeline(model, learnable, spec, degrees, world, example, seed)
    if world.size == 1:
        from shoal.parallel.spmd.base import Single

        return Single(model, learnable, spec, world, seed)
    if degrees.tensor > 1:
        from shoal.parallel.tensor.apply import build_tensor

        return build_tensor(model, learnable, spec, degrees, world, example, seed)
    if degrees.shard:
        from shoal.parallel.spmd.fsdp import Sharded

        return Sharded(model, learnable, spec, world, seed, make_mesh(degrees, world), data_group(degrees, world))
    from shoal.parallel.spmd.ddp import Replicated

    return Replicated(model, learnable, spec, world, example, seed, data_group(degrees, world))


def _check_alike(model: nn.Module, world: World) -> None:
    """Raises PlanError when ranks have built models with other weights. Collective."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    sums = {name: _sum(each.detach()) for name, each in tensors}
    for rank, theirs in enumerate(world.gather(sums)):
        for name in dict.fromkeys([*sums, *theirs]):
            if repr(theirs.get(name)) != repr(sums.get(name)):
                problem = f"{name} is not the same on ranks {world.rank} and {rank}"
                remedy = "let Task.model() draw from torch's generator only, which is seeded alike everywhere"
                raise PlanError("model", type(model).__name__, problem, remedy)


def _sum(tensor: Tensor) -> float | complex:
    """In double precision, of a complex tensor its imaginary part included."""
    total: float | complex = tensor.to(torch.complex128 if tensor.is_complex() else torch.float64).sum().item()
    return total


def make_mesh(degrees: Degrees, world: World) -> DeviceMesh:
    """The ranks as [pipeline, replicate, shard, tensor]. Collective.

    Without `shard`, each of the `data` ranks is a copy.
    """
    copies = degrees.replicate if degrees.shard else degrees.data
    shape = (degrees.pipeline, copies, degrees.data // copies, degrees.tensor)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))


def data_group(degrees: Degrees, world: World) -> dist.ProcessGroup:
    """The ranks that hold what this one holds and are fed other samples. Collective."""
    if degrees.data == world.size:
        world_group = dist.group.WORLD
        assert world_group is not None
        return world_group
    firsts = [Coordinates(stage, 0, part) for stage in range(degrees.pipeline) for part in range(degrees.tensor)]
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration([degrees.peers(degrees.rank(first), "data") for first in firsts])
    return group
