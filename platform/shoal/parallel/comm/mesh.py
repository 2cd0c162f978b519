"""The groups of a rank: the device mesh of a plan, and the group of its data ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.parallel.comm.world import World
from shoal.parallel.spec import Coordinates, ParallelDims


def make_mesh(degrees: ParallelDims, world: World) -> DeviceMesh:
    """The ranks as [pipeline, replicate, shard, tensor]. Collective.

    Without `shard`, each of the `data` ranks is a copy.
    """
    copies = degrees.replicate if degrees.shard else degrees.data
    shape = (degrees.pipeline, copies, degrees.data // copies, degrees.tensor)
    return init_device_mesh(world.device.type, shape, mesh_dim_names=("pipeline", "replicate", "shard", "tensor"))


def make_data_group(degrees: ParallelDims, world: World) -> dist.ProcessGroup:
    """The ranks with the same part of the model as this one, and other samples. Collective."""
    if degrees.data == world.size:
        world_group = dist.group.WORLD
        assert world_group is not None
        return world_group
    firsts = [Coordinates(stage, 0, part) for stage in range(degrees.pipeline) for part in range(degrees.tensor)]
    group: dist.ProcessGroup
    group, _ = dist.new_subgroups_by_enumeration([degrees.peers(degrees.rank(first), "data") for first in firsts])
    return group
