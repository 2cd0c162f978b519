"""One rank's step of a plan on fake tensors: the plan's own code, with nothing allocated and nothing computed.

Owns the reading of memory, arithmetic and communication from such a step, and their growth with the number of equal
blocks: a deep model is read from two short ones. Called by `fake_plan` and `shoal plan`. Times are not read.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.batch_tree import tensors_of
from shoal.cost.fake_tensors import FakeMode, use_fake_tensors
from shoal.cost.measure.collective_bytes import assume_cuda
from shoal.cost.measure.memory import allocate_averages, bytes_of
from shoal.cost.measure.op_counter import OpCounts
from shoal.cost.step_profile import profile_step
from shoal.data import Data
from shoal.data.loader import load_first_batch
from shoal.libs.planning.predict.dry_run import (
    CollectiveTraffic,
    MakeOptimizer,
    TrainSpecProtocol,
    collect_traffic,
    make_eager_spec,
    run_step,
)
from shoal.libs.planning.predict.fake_process_group import SimulatedRanks, fake_world
from shoal.libs.planning.predict.repeated_blocks import NUM_BLOCKS, RepeatedBlocks, keep_block_shares
from shoal.libs.planning.predict.single_device import CostTaskProtocol
from shoal.parallel import ParallelDims, ParallelSpec, World
from shoal.parallel.build import parallelize
from shoal.parallel.model import TaskProtocol
from shoal.parallel.tensor import apply
from shoal.parallel.tensor.plan import TensorPlan

STATES = ("memory_parameters", "memory_optimizer", "memory_average", "memory_gradients")


@dataclass(frozen=True)
class FakeStep:
    """One rank's step.

    values:       of the cost table; besides `flops_forward` and `flops_backward`
    peaks:        bytes: the most in the forward pass, in each half of the backward pass, and after it
    traffic:      its collectives
    handed_bytes: the output of a repeated block
    unknown:      operators with unknown arithmetic
    """

    values: dict[str, float]
    peaks: tuple[float, ...]
    traffic: tuple[CollectiveTraffic, ...] = ()
    handed_bytes: float = 0.0
    unknown: tuple[str, ...] = ()

    @property
    def memory_peak(self) -> float:
        return max(self.peaks)

    @property
    def state_bytes(self) -> float:
        """What outlives a step, gradients included."""
        return sum(self.values[name] for name in STATES)

    def extrapolate(self, other: FakeStep, by: float) -> FakeStep:
        """`by` times the way to `other`: linear in each number."""
        others = {(each.ranks, each.is_shared): each for each in other.traffic}
        pairs = [(each, others.get((each.ranks, each.is_shared), each)) for each in self.traffic]

        def go(one: float, two: float) -> float:
            return one + (two - one) * by

        return replace(
            self,
            values={name: go(value, other.values[name]) for name, value in self.values.items()},
            peaks=tuple(map(go, self.peaks, other.peaks)),
            traffic=tuple(
                replace(
                    one,
                    num_calls=round(go(one.num_calls, two.num_calls)),
                    sent_bytes=go(one.sent_bytes, two.sent_bytes),
                )
                for one, two in pairs
            ),
            handed_bytes=go(self.handed_bytes, other.handed_bytes),
        )


@dataclass(frozen=True)
class StepByDepth:
    """Steps of two short models, and so of any number of blocks."""

    small: FakeStep
    large: FakeStep

    def at(self, num_blocks: float) -> FakeStep:
        return self.small.extrapolate(self.large, (num_blocks - NUM_BLOCKS[0]) / (NUM_BLOCKS[1] - NUM_BLOCKS[0]))


@dataclass(frozen=True)
class FakeTask:
    """A Task on fake tensors, under any plan.

    model:   all of it, on fake tensors of `mode`
    blocks:  those of its model that are repeated, if any
    is_cuda: whether the ranks have GPUs
    """

    task: CostTaskProtocol
    spec: TrainSpecProtocol
    data: Data
    make_optimizer: MakeOptimizer
    mode: FakeMode
    model: nn.Module
    blocks: RepeatedBlocks | None
    is_cuda: bool
    _tensor_plans: dict[int, TensorPlan] = field(default_factory=dict)  # of the larger short model, by ranks

    def read_step(self, parallel: ParallelSpec, degrees: ParallelDims, samples: int) -> FakeStep:
        """The step of rank 0, of the full model.

        samples: of this rank

        Raises what the model raises on fake tensors, and PlanError as `parallelize` does.
        """
        if self.blocks is None:
            return self.run_step(parallel, degrees, samples)
        return self.read_depths(parallel, degrees, samples).at(len(self.blocks.names))

    def read_depths(self, parallel: ParallelSpec, degrees: ParallelDims, samples: int) -> StepByDepth:
        """As `read_step`, of a model with `blocks`, for any number of them."""
        few, many = NUM_BLOCKS
        large = self.run_step(parallel, degrees, samples, many)
        return StepByDepth(self.run_step(parallel, degrees, samples, few), large)

    def run_step(
        self, parallel: ParallelSpec, degrees: ParallelDims, samples: int, num_blocks: int | None = None
    ) -> FakeStep:
        """As `read_step`, of a model with so many of its repeated blocks."""
        play, cpu = SimulatedRanks(), torch.device("cpu")
        batch = load_first_batch(self.data, samples, cpu, is_exact=True)
        with (
            _pause_garbage_collection(),
            assume_cuda(self.is_cuda),
            use_fake_tensors(self.mode),
            fake_world(0, degrees.workers, cpu, play) as world,
        ):
            model, handed = self._copy_model(num_blocks), list[float]()
            if self.blocks is not None:
                block = model.get_submodule(".".join(filter(None, (self.blocks.path, self.blocks.names[0]))))
                block.register_forward_hook(lambda _, args, output: handed.append(bytes_of(tensors_of(output))))
            share = _count_parameters(model) / _count_parameters(self.model)
            with keep_block_shares(share), self._reuse_tensor_plan():
                found = self._profile(model, make_eager_spec(parallel), degrees, world, batch, play)
        return replace(found, handed_bytes=float(handed[-1] if handed else 0.0))

    def _copy_model(self, num_blocks: int | None) -> nn.Module:
        """The model with so many blocks; all for None. One that cannot be copied, as with a lock, is built again."""
        blocks = self.blocks or RepeatedBlocks("", ())
        number = len(blocks.names) if num_blocks is None else num_blocks
        try:
            return blocks.copy(self.model, number)
        except Exception:  # noqa: BLE001 - of the user's own objects
            model = self.task.model()
            blocks.keep(model, number)
            return model

    @contextmanager
    def _reuse_tensor_plan(self) -> Iterator[None]:
        """Within, the layers to split are searched only the first time: no number of samples changes them, and a model
        with fewer blocks has those of the others."""
        find = vars(apply)["find_tensor_plan"]

        def reuse(model: nn.Module, learnable: TaskProtocol, size: int, example: object = None) -> TensorPlan:
            if size not in self._tensor_plans:
                self._tensor_plans[size] = find(model, learnable, size, example)
            return self._tensor_plans[size].for_layers_of(model)

        vars(apply)["find_tensor_plan"] = reuse
        try:
            yield
        finally:
            vars(apply)["find_tensor_plan"] = find

    def _profile(
        self,
        model: nn.Module,
        parallel: ParallelSpec,
        degrees: ParallelDims,
        world: World,
        batch: object,
        play: SimulatedRanks,
    ) -> FakeStep:
        spec, batch = self.spec, self.mode.from_batch(batch)
        parallelized = parallelize(model, self.task, parallel, degrees, world, batch, spec.seed)
        try:
            parameters = [parameter for _, parameter in parallelized.named_parameters()]
            optimizer = self.make_optimizer(self.task, spec.optimizer, parameters)
            if (
                degrees.data > 1 == degrees.tensor and not degrees.is_sharded
            ):  # DDP has its buckets from its first step on
                run_step(parallelized, optimizer, batch, 0, spec.clip_norm)
            else:
                _make_optimizer_states(optimizer, parameters)
            average = allocate_averages(parallelized) if spec.average is not None else []
            collectives: dict[tuple[int, ...], tuple[int, float]] = {}
            counts: list[OpCounts] = []
            play.shared_sums.clear()
            with profile_step(parallelized, optimizer, True, average, collectives, counts) as values:
                run_step(parallelized, optimizer, batch, 1, spec.clip_norm)
            [reading] = counts
            peaks = _find_peaks(reading)
            values |= {"flops_forward": reading.flops_forward, "flops_backward": reading.flops_backward}
            values["memory_peak"] = max(peaks)
            return FakeStep(values, peaks, collect_traffic(collectives, play), unknown=tuple(sorted(reading.unknown)))
        finally:
            parallelized.close()


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Within, what cycles keep alive is counted, and not what the collector has found so far."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _make_optimizer_states(optimizer: Optimizer, parameters: list[nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _find_peaks(reading: OpCounts) -> tuple[float, ...]:
    """In the forward pass, the halves of the backward pass, and after it. What is alive changes linearly in each."""
    first, last = reading.backward
    ends = (0, first, (first + last) // 2, last, len(reading.live_bytes))
    parts = (reading.live_bytes[begin:end] for begin, end in pairwise(ends))
    return tuple(float(reading.resident_bytes + max(part, default=0)) for part in parts)
