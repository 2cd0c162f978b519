"""A step of the plan `fsdp`, forced onto one rank, beside torch's script with `fully_shard` around the same blocks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks.gpu.ddp import PRECISIONS, measure_plan, open_group
from benchmarks.gpu.networks import NAMES, make_network
from benchmarks.gpu.turns import Setting
from benchmarks.result import Row
from shoal.parallel import ParallelDims, ParallelModel, ParallelSpec, World
from shoal.parallel.comm.world import make_data_group, make_mesh
from shoal.parallel.spmd.fsdp import FsdpModel
from shoal.parallel.spmd.fsdp_layout import find_blocks
from shoal.train import Task


def build_fsdp(network: nn.Module, task: Task, spec: ParallelSpec, world: World, example: Any) -> ParallelModel:
    dims = ParallelDims(shard=True)
    return FsdpModel(network, task, spec, world, 0, make_mesh(dims, world), make_data_group(dims, world))


def measure(setting: Setting) -> Iterator[Row]:
    with open_group(setting.device) as world:
        mesh = init_device_mesh(setting.device.type, (1,))
        cases = list(itertools.product(NAMES, PRECISIONS))
        for index, (name, precision) in enumerate(cases):
            peer = make_network(name, is_tiny=setting.is_tiny).to(setting.device)
            for _, block in [*find_blocks(peer), ("", peer)]:
                fully_shard(block, mesh=mesh)
            part = setting.until(1 / (len(cases) - index))
            yield measure_plan(name, precision, part, world, "fsdp", build_fsdp, peer)
