"""One rank that takes turns: a block of the Trainer's steps, a block of a loop written by hand, on the same data.

    python -m benchmarks.ours.steps MODEL BLOCKS                                        # in one process
    torchrun --nproc-per-node 2 -m benchmarks.ours.steps MODEL BLOCKS                   # DDP beside bare DDP

The Trainer calls the Task's `loss` once a step. After each block of its steps the other loop takes as many, from within
that call, on every rank at the same step; both are on the clock only in their own blocks. With several ranks there is
a third one: the same loop without any exchange, which is the arithmetic of a step.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from benchmarks.talk import say
from shoal.data import Data
from shoal.models.lenet import LeNet
from shoal.parallel import World
from shoal.train import Task, TrainSpec
from shoal.train.loop.trainer import Trainer

BLOCK, WARM_BLOCKS = 40, 2
BATCH, SAMPLES = 64, 6400  # of all ranks
RATE = 1e-3


def model_of(name: str) -> nn.Module:
    """`mlp`: 784-256-256-10; `lenet`."""
    torch.manual_seed(0)
    if name == "lenet":
        return LeNet()
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def samples() -> tuple[Tensor, Tensor]:
    """Images float [N, 1, 28, 28] and classes int64 [N]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(SAMPLES, 1, 28, 28, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


class ByHand:
    """The loop that one writes without a platform: an index of a permutation, forward, backward, step.

    spread: lets several ranks train the model; by DistributedDataParallel over the group of all when None
    """

    def __init__(self, name: str, world: World, spread: Callable[[nn.Module], nn.Module] | None = None) -> None:
        self._model = model_of(name)
        if world.size > 1:
            self._model = (spread or DistributedDataParallel)(self._model)
        self.optimizer = torch.optim.Adam(self._model.parameters(), RATE, fused=True)
        self._images, self._classes = samples()
        self._indices = self._endless(world)

    def step(self) -> None:
        images, classes = self.next_batch()
        loss = nn.functional.cross_entropy(self._model(images), classes)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def next_batch(self) -> tuple[Tensor, Tensor]:
        """This rank's part of the next global batch."""
        chosen = next(self._indices)
        return self._images[chosen], self._classes[chosen]

    def _endless(self, world: World) -> Iterator[Tensor]:
        """This rank's part of each global batch."""
        epoch, mine = 0, BATCH // world.size
        while True:
            order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
            for start in range(0, SAMPLES, BATCH):
                yield order[start + world.rank * mine : start + (world.rank + 1) * mine]
            epoch += 1


class TurnTask(Task):
    """Classification whose `loss` lets the other loop have its turns."""

    def __init__(self, name: str, loops: dict[str, ByHand]) -> None:
        self._name, self._loops = name, loops
        self._num_steps = 0
        self._since_s = 0.0
        self.seconds: dict[str, list[float]] = {each: [] for each in ("ours", *loops)}  # of a step, in each block

    def model(self) -> nn.Module:
        return model_of(self._name)

    def data(self) -> Data:
        return Data(TensorDataset(*samples()))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        if self._num_steps % BLOCK == 0:
            self._turn()
        self._num_steps += 1
        return nn.functional.cross_entropy(outputs, batch[1])

    def _turn(self) -> None:
        began_s = time.perf_counter()
        if self._since_s:
            self.seconds["ours"].append((began_s - self._since_s) / BLOCK)
        for name, loop in self._loops.items():
            began_s = time.perf_counter()
            for _ in range(BLOCK):
                loop.step()
            self._since_s = time.perf_counter()
            self.seconds[name].append((self._since_s - began_s) / BLOCK)


def main(name: str, num_blocks: int) -> None:
    """Take turns, and say the seconds of a step in each block."""
    torch.set_num_threads(1)
    world = World.from_environment("cpu")
    loops = {"peer": ByHand(name, world)}
    if world.size > 1:
        loops["alone"] = ByHand(name, world, lambda model: model)
    task = TurnTask(name, loops)
    spec = TrainSpec.parse(
        {
            "parallel": "ddp" if world.size > 1 else "single",
            "batch_size": BATCH,
            "optimizer": {"learning_rate": RATE},
            "stop": {"steps": BLOCK * (num_blocks + WARM_BLOCKS) + 1},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        shared = world.broadcast(folder)
        Trainer(spec, task, world, Path(shared)).run()
        world.barrier()
    if world.is_first:
        say(**{each: values[WARM_BLOCKS : num_blocks + WARM_BLOCKS] for each, values in task.seconds.items()})
    world.close()
    assert not dist.is_initialized()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
