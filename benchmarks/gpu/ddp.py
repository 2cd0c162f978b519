"""A training step under the Trainer beside torch's own loop; and that of DDP, forced onto one rank, beside torch's.

One process trains by the plan `single` whatever the preset is, so the Trainer stands beside a plain loop. Both read a
dataset in host memory and copy the next batch through pinned memory while the device computes. The plan of several
ranks, with a group of one rank, is called without the Trainer, as is its peer, on batches that are on the device.
"""

from __future__ import annotations

import contextlib
import itertools
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

from benchmarks.gpu.networks import NAMES, TITLES, choose_batch_size, compute_loss, make_dataset, make_network
from benchmarks.gpu.turns import Setting, Turn, describe_ratios, synchronize, take_turns, time_ms
from benchmarks.result import Row, compare
from shoal.data import Data
from shoal.parallel import ParallelDims, ParallelModel, ParallelSpec, World
from shoal.parallel.comm.world import backend_for, make_data_group
from shoal.parallel.spmd.ddp import DdpModel
from shoal.train import Callback, Task, TrainSpec
from shoal.train.callback import TrainingState
from shoal.train.loop.trainer import Trainer
from shoal.train.optim.optimizers import make_optimizer
from shoal.train.spec import OptimizerSpec

BAR, RATE = 1.03, 1e-4
NUM_WARM_STEPS = 80  # the Trainer times and profiles its first ones, and waits for the device in each
BLOCKS = {"lenet": 60, "resnet": 10, "decoder": 8}  # steps of a turn
PRECISIONS = ("fp32", "bf16")
BuildModel = Callable[[nn.Module, Task, ParallelSpec, World, Any], ParallelModel]


class ByHand:
    """The loop that one writes without a platform."""

    def __init__(
        self, model: nn.Module, batches: Iterator[tuple[Tensor, ...]], precision: str, device: torch.device
    ) -> None:
        self._model, self._batches = model, batches
        self._device, self._is_fp32 = device, precision == "fp32"
        self._optimizer = torch.optim.Adam(model.parameters(), RATE, fused=True)

    def step(self) -> None:
        inputs, targets = next(self._batches)
        with contextlib.nullcontext() if self._is_fp32 else torch.autocast(self._device.type, torch.bfloat16):
            loss = compute_loss(self._model(inputs), targets)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


def prefetch(samples: tuple[Tensor, ...], size: int, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Batches of permutations without end, each copied through pinned memory on a stream of its own, one ahead."""
    chosen = _select_batches(samples, size)
    if device.type == "cpu":
        yield from chosen
    stream = torch.cuda.Stream(device)

    def begin(batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        with torch.cuda.stream(stream):
            return tuple(each.pin_memory().to(device, non_blocking=True) for each in batch)

    moving = begin(next(chosen))
    while True:
        computing = torch.cuda.current_stream(device)
        computing.wait_stream(stream)
        for each in moving:
            each.record_stream(computing)
        batch, moving = moving, begin(next(chosen))
        yield batch


def _select_batches(samples: tuple[Tensor, ...], size: int) -> Iterator[tuple[Tensor, ...]]:
    while True:
        order = torch.randperm(len(samples[0]))
        for start in range(0, len(order), size):
            yield tuple(each[order[start : start + size]] for each in samples)


class Turns(Callback):
    """After each block of the Trainer's steps, as many of the peer's; each is on the clock in its own blocks only.

    A callback, since a Task's `loss` is called within autocast, which would cache what the peer's steps change.
    """

    def __init__(self, block: int, num_warm: int, peer: Turn, setting: Setting) -> None:
        self._block, self._num_warm, self._peer, self._setting = block, num_warm, peer, setting
        self._since_s = 0.0
        self.ours_ms: list[float] = []
        self.peer_ms: list[float] = []

    def on_step(self, state: TrainingState) -> None:
        if state.step % self._block:
            return
        synchronize(self._setting.device)
        self.ours_ms.append(1e3 * (time.perf_counter() - self._since_s) / self._block)
        self.peer_ms.append(time_ms(self._peer, self._setting.device, self._block))
        if time.monotonic() > self._setting.ends_s and len(self.ours_ms) > self._num_warm + 1:
            state.request_stop("the section's time is over")
        self._since_s = time.perf_counter()


class Classification(Task):
    """Of images, or of next tokens; with turns of a peer."""

    def __init__(self, name: str, turns: Turns | None, setting: Setting) -> None:
        self._name, self._turns, self._is_tiny = name, turns, setting.is_tiny

    def model(self) -> nn.Module:
        return make_network(self._name, is_tiny=self._is_tiny, has_batch_norm=True)

    def data(self) -> Data:
        return Data(TensorDataset(*make_dataset(self._name, is_tiny=self._is_tiny)))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return compute_loss(outputs, batch[1])

    def callbacks(self) -> list[Callback]:
        return [] if self._turns is None else [self._turns]


def measure_trainer(name: str, precision: str, setting: Setting) -> Row:
    """The Trainer beside a plain loop."""
    size, block = choose_batch_size(name, is_tiny=setting.is_tiny), setting.choose(BLOCKS[name], 2)
    network = make_network(name, is_tiny=setting.is_tiny, has_batch_norm=True).to(setting.device)
    batches = prefetch(make_dataset(name, is_tiny=setting.is_tiny), size, setting.device)
    num_warm = setting.choose(-(-NUM_WARM_STEPS // block), 2)  # blocks
    turns = Turns(block, num_warm, ByHand(network, batches, precision, setting.device).step, setting)
    spec = TrainSpec.parse(
        {
            "parallel": {"data": None, "precision": precision},
            "batch_size": size,
            "optimizer": {"learning_rate": RATE},
            "stop": {"steps": block * (setting.rounds + num_warm)},
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        world = World.single(setting.device.type)
        Trainer(spec, Classification(name, turns, setting), world, Path(folder)).run()
    ours, peer = turns.ours_ms[num_warm:], turns.peer_ms[num_warm:]
    what = f"step under the Trainer, one GPU, {TITLES[name]}, {precision}"
    return compare(what, "ms", "lower", ours, peer, "a loop by hand", BAR, "ratio", describe_ratios(ours, peer))


@contextlib.contextmanager
def open_group(device: torch.device) -> Iterator[World]:
    """A process group of one rank, and the World in it."""
    dist.init_process_group(backend_for(device), store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    try:
        yield World.from_process_group(device.type)
    finally:
        dist.destroy_process_group()


def measure_plan(
    name: str, precision: str, setting: Setting, world: World, plan: str, build: BuildModel, peer: nn.Module
) -> Row:
    """`build`'s model of one rank beside `peer`, torch's own; both on the same batches, which are on the device."""
    tiny, device = setting.is_tiny, setting.device
    size = choose_batch_size(name, is_tiny=tiny)
    splits = zip(*(each.split(size) for each in make_dataset(name, is_tiny=tiny)), strict=True)
    batches = [tuple(each.to(device) for each in batch) for batch in splits]
    task = Classification(name, None, setting)
    spec = ParallelSpec.parse({"data": None, "precision": precision, "backend": backend_for(device)})
    model = build(make_network(name, is_tiny=tiny), task, spec, world, batches[0])
    optimizer = make_optimizer(
        task, OptimizerSpec(learning_rate=RATE), [each for _, each in model.named_parameters()], model.modules[0]
    )
    steps, mine = itertools.count(), itertools.cycle(batches)

    def step() -> None:
        model.train_step(next(mine), next(steps))
        optimizer.step()

    by_hand = ByHand(peer, itertools.cycle(batches), precision, device)
    found = take_turns({"ours": step, "peer": by_hand.step}, setting, setting.choose(BLOCKS[name], 2))
    model.close()
    what = f"step of the plan {plan}, a group of one rank, {TITLES[name]}, {precision}"
    note = describe_ratios(found["ours"], found["peer"])
    return compare(what, "ms", "lower", found["ours"], found["peer"], f"torch's {plan}", BAR, "ratio", note)


def build_ddp(network: nn.Module, task: Task, spec: ParallelSpec, world: World, example: Any) -> ParallelModel:
    return DdpModel(network, task, spec, world, example, 0, make_data_group(ParallelDims(), world))


def measure(setting: Setting) -> Iterator[Row]:
    with open_group(setting.device) as world:
        cases = list(itertools.product(NAMES, PRECISIONS))
        for index, (name, precision) in enumerate(cases):
            part = setting.until(1 / (len(cases) - index))
            yield measure_trainer(name, precision, part.until(0.5))
            network = make_network(name, is_tiny=setting.is_tiny).to(setting.device)
            peer = DistributedDataParallel(network, gradient_as_bucket_view=True)
            yield measure_plan(name, precision, part, world, "ddp", build_ddp, peer)
