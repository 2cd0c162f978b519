"""One rank that takes turns at the same training by two ranks: over gloo, through memory, and by a process group.

    torchrun --nproc-per-node 2 -m benchmarks.ours.shm_process_group MODEL TURNS

`ShmProcessGroup` is the experiment of docs/decisions/015: `ShmAllReduce` as a back end of torch.distributed, as far as
DistributedDataParallel and FSDP2 call it. Every loop has its own model, and ends with the same parameters to the bit.
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from benchmarks.ours.steps import BATCH, ByHand, model_of, samples
from benchmarks.talk import say
from shoal.parallel import World
from shoal.parallel.comm.shm_all_reduce import ShmAllReduce
from shoal.parallel.spec import ParallelSpec
from shoal.parallel.spmd.ddp import DdpModel
from shoal.parallel.spmd.fsdp_layout import find_blocks
from shoal.train import Task

BLOCK, WARM_TURNS = 20, 3  # steps of a turn
NAME = "shm"
PEERS = {"ddp group": "ddp gloo", "plan group": "plan", "plan flat": "plan", "fsdp group": "fsdp gloo"}


class ShmProcessGroup(dist.ProcessGroup):
    """All-reduce, all-gather, reduce-scatter and broadcast by the thread that asks for them, of sums and means.

    Torch calls the methods by these names, and asks the group itself for the name that back ends in C++ keep.
    """

    def __init__(self, rank: int, size: int, sums: ShmAllReduce) -> None:
        super().__init__(rank, size)
        self._rank, self._sums, self._name = rank, sums, ""

    def allreduce(self, tensors: list[Tensor], options: Any) -> dist.Work:
        for tensor in tensors:
            self._sums.sum(tensor, self._factor(options))
        return done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any) -> dist.Work:
        for output, mine in zip(outputs, inputs, strict=True):
            for place, values in zip(output, self._sums.gather(mine), strict=True):
                place.copy_(values)
        return done(outputs)

    def all_gather_single(self, output: Tensor, mine: Tensor, options: Any) -> dist.Work:
        output.view(self._sums.size, -1).copy_(self._sums.gather(mine.view(-1)))
        return done([output])

    def reduce_scatter_single(self, output: Tensor, mine: Tensor, options: Any) -> dist.Work:
        total = self._sums.sum(mine.clone(), self._factor(options))
        output.view(-1).copy_(total.view(self._sums.size, -1)[self._rank])
        return done([output])

    def broadcast(self, tensors: list[Tensor], options: Any) -> dist.Work:
        for tensor in tensors:
            tensor.copy_(self._sums.gather(tensor)[options.rootRank])
        return done(tensors)

    def _factor(self, options: Any) -> float:
        return 1.0 / self._sums.size if options.reduceOp == dist.ReduceOp.AVG else 1.0

    def getBackendName(self) -> str:  # noqa: N802
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, description: str) -> None:
        """Nothing reads it."""


def done(result: Any) -> dist.Work:
    """Work that is done."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def new_group() -> dist.ProcessGroup:
    """A process group of all ranks through memory. Collective."""
    if NAME.upper() not in dist.Backend._plugins:
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
    group: dist.ProcessGroup = dist.new_group(backend=NAME)
    return group


def create(options: Any, _: Any) -> ShmProcessGroup:
    """The back end of a new group, which must be of all ranks."""
    assert dist.group.WORLD is not None
    sums = ShmAllReduce.try_create(dist.group.WORLD)
    assert sums is not None, "the ranks are not on one host"
    return ShmProcessGroup(options.group_rank, options.group_size, sums)


class Classify(Task):
    """The loss of the loop by hand."""

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])


class GroupSum(ShmAllReduce):
    """The sums of a group through torch.distributed, for gradients that lie end to end."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size, self._group = dist.get_world_size(group), group

    def sum(self, values: Tensor, factor: float = 1.0) -> Tensor:
        dist.all_reduce(values, group=self._group)
        return values.mul_(factor)


class ByPlan(ByHand):
    """The same loop with the model of the plan `ddp`.

    group: that carries what torch's DistributedDataParallel sends, or, with `is_flat`, the plan's own gradients, which
        lie end to end; None for the plan as it is
    """

    def __init__(self, name: str, world: World, group: dist.ProcessGroup | None = None, is_flat: bool = False) -> None:
        super().__init__(name, world, lambda model: model)
        example, spec, over = tuple(each[: BATCH // world.size] for each in samples()), ParallelSpec(), dist.group.WORLD
        assert over is not None
        if group is not None and not is_flat:
            over = group  # a group that is not gloo's is left to torch's DistributedDataParallel
        self._plan = DdpModel(model_of(name), Classify(), spec, world, example, 0, over)
        if group is not None and is_flat:
            self._plan._flat._shm_all_reduce = GroupSum(group)
        self.parameters = [parameter for _, parameter in self._plan.named_parameters()]
        self.optimizer = torch.optim.Adam(self.parameters, self.optimizer.defaults["lr"], fused=True)
        self._num_steps = 0

    def step(self) -> None:
        self._plan.train_step(self.next_batch(), self._num_steps)
        self.optimizer.step()
        self._num_steps += 1


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """By FSDP2, in the blocks of the plan `fsdp`."""
    for block in [*(block for _, block in find_blocks(model)), model]:
        fully_shard(block, mesh=mesh)
    return model


def loops_of(name: str, world: World) -> dict[str, ByHand]:
    """Each from the same parameters over the same batches."""

    def over(group: dist.ProcessGroup) -> ByHand:
        return ByHand(name, world, lambda model: DistributedDataParallel(model, process_group=group))

    def shards(group: dist.ProcessGroup) -> ByHand:
        return ByHand(name, world, lambda model: sharded(model, DeviceMesh.from_group(group, "cpu")))

    assert dist.group.WORLD is not None
    return {
        "ddp gloo": over(dist.group.WORLD),
        "ddp group": over(new_group()),
        "plan": ByPlan(name, world),
        "plan group": ByPlan(name, world, new_group()),
        "plan flat": ByPlan(name, world, new_group(), is_flat=True),
        "fsdp gloo": shards(dist.group.WORLD),
        "fsdp group": shards(new_group()),
    }


def values_of(loop: ByHand) -> list[Tensor]:
    """This rank's part of what a loop has trained."""
    parameters = loop.optimizer.param_groups[0]["params"]
    return [each.detach().to_local() if hasattr(each, "to_local") else each.detach() for each in parameters]


def main(name: str, num_turns: int) -> None:
    """Take turns in an order drawn anew each time, and say the seconds of a step in each turn, and of the processor."""
    torch.set_num_threads(1)
    world = World.from_environment("cpu")
    loops = loops_of(name, world)
    wall_s: dict[str, list[float]] = {loop: [] for loop in loops}
    cpu_s: dict[str, list[float]] = {loop: [] for loop in loops}
    orders = random.Random(0)
    for turn in range(WARM_TURNS + num_turns):
        for loop in orders.sample(list(loops), len(loops)):
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                loops[loop].step()
            if turn >= WARM_TURNS:
                wall_s[loop].append((time.perf_counter() - began_s) / BLOCK)
                cpu_s[loop].append((time.process_time() - began_cpu_s) / BLOCK)
    for loop, peer in PEERS.items():
        assert all(map(torch.equal, values_of(loops[loop]), values_of(loops[peer]))), f"{loop} and {peer} differ"
    if world.is_first:
        say(wall=wall_s, cpu=cpu_s)
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
