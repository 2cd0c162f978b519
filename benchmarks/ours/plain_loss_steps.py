"""A step of LeNet whose loss is a mean over the samples, with what finds other divisors, and without it, in turn.

    python -m benchmarks.ours.plain_loss_steps LOSS STEPS        # in four micro-batches
    torchrun --nproc-per-node 2 -m benchmarks.ours.plain_loss_steps LOSS STEPS

LOSS is a name of torch.nn.functional. Prints the median CPU seconds of both, of rank 0.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.ours.random_splits import SmallTask
from benchmarks.talk import say
from shoal.models.lenet import LeNet
from shoal.parallel import ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import ParallelModel
from shoal.train.loop.split_check import SplitCheck

BATCH, WARM = 64, 70


class PlainTask(SmallTask):
    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._loss = getattr(functional, name)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return (batch[0],)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        loss: Tensor = self._loss(outputs, batch[1] if self._loss is functional.cross_entropy else batch[2])
        return loss


def make(name: str, world: World, batch: Any, *, is_active: bool) -> tuple[ParallelModel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    spec = ParallelSpec.parse({} if world.size > 1 else {"accumulate": 4})
    model = parallelize(LeNet(), PlainTask(name), spec, spec.resolve_dims(world.size), world, batch)
    model.loss_reader.is_active = is_active
    return model, torch.optim.Adam([each for _, each in model.named_parameters()], 1e-3, fused=True)


def main(name: str, num_steps: int) -> None:
    torch.set_num_threads(1)
    world = World.from_environment("cpu")
    batch = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,)), torch.randn(BATCH, 10)
    sides = {side: make(name, world, batch, is_active=side == "ours") for side in ("ours", "before")}
    check = SplitCheck(sides["ours"][0], world, name, BATCH // 4)
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for step in range(num_steps + WARM):
        for side in sorted(sides, reverse=bool(step % 2)):
            model, optimizer = sides[side]
            began_s = time.process_time()
            if side == "ours":
                check.watch(batch)
            model.train_step(batch, step)
            optimizer.step()
            seconds[side].append(time.process_time() - began_s)
        if step < WARM:
            check.verify()
    if world.is_first:
        say(**{side: statistics.median(each[WARM:]) for side, each in seconds.items()})
    for model, _ in sides.values():
        model.close()
    world.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
