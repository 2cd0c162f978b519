"""One rank of a plan, run in this process without the others: the same code, in a group that only pretends.

Owns the pretended world: collectives return at once, with this rank's own words as everybody's. What a rank holds,
computes, sends and keeps alive is then read off a real step of the real plan, before any worker is started. Called by
`predict`. The losses of such a step mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.cost.alone import Costed, first_batch
from shoal.cost.memory import bytes_of, growth, state_of
from shoal.cost.meter import metered
from shoal.data import Data
from shoal.errors import PlanError
from shoal.parallel import Degrees, ParallelSpec, World
from shoal.parallel.model import ParallelModel, parallelize

NUM_WARM = 2  # DDP arranges its buckets anew before its second step, optimisers make their states in the first
T = TypeVar("T")

MakeOptimizer = Callable[[Any, Any, Iterable[nn.Parameter]], Optimizer]  # of task, spec.optimizer, parameters


class Configured(Protocol):
    """What is asked of a TrainSpec."""

    parallel: ParallelSpec
    workers: int
    batch_size: int
    seed: int
    threads: int | None
    clip_norm: float | None

    @property
    def optimizer(self) -> Any: ...

    @property
    def device(self) -> str: ...

    def degrees(self) -> Degrees: ...


@dataclass(frozen=True)
class _Pretended(World):
    """A world whose other ranks say what this one says."""

    def broadcast(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value] * self.size

    def barrier(self) -> None:
        """Nobody to wait for."""


@contextmanager
def pretended(rank: int, size: int, device: torch.device) -> Iterator[World]:
    """This process as one rank of `size`. Raises PlanError when it is in a group already."""
    if size == 1:
        yield World(0, 1, device)
        return
    if dist.is_initialized():
        raise PlanError("workers", size, "the cost of a plan is told before a process joins a group", "ask earlier")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield _Pretended(rank, size, device)
    finally:
        dist.destroy_process_group()


def representatives(degrees: Degrees) -> list[int]:
    """One rank of each stage: the first shard and the first share are never smaller than the others."""
    return [degrees.rank(degrees.coordinates(0)._replace(pipeline=stage)) for stage in range(degrees.pipeline)]


def dry_run(
    task: Costed, spec: Configured, data: Data, rank: int, batch_size: int, device: torch.device, make: MakeOptimizer
) -> dict[str, float]:
    """What `rank` does in one step over a global batch of `batch_size`. Raises PlanError as `parallelize` does."""
    degrees = spec.degrees()
    with pretended(rank, degrees.workers, device) as world:
        torch.manual_seed(spec.seed)
        batch = first_batch(data, batch_size // degrees.data, device)
        model = parallelize(task.model(), task, spec.parallel, degrees, world, batch, spec.seed)
        try:
            parameters = [parameter for _, parameter in model.named_parameters()]
            optimizer = make(task, spec.optimizer, parameters)
            for step in range(NUM_WARM):
                _step(model, optimizer, batch, step, spec.clip_norm)
            began_s = time.perf_counter()
            _step(model, optimizer, batch, NUM_WARM, spec.clip_norm)
            step_s = time.perf_counter() - began_s
            found = meter_step(model, optimizer, lambda: _step(model, optimizer, batch, NUM_WARM + 1, spec.clip_norm))
            return found | {"step_s": step_s}
        finally:
            model.close()


def _step(model: ParallelModel, optimizer: Optimizer, batch: Any, step: int, clip_norm: float | None) -> None:
    model.train_step(batch, step)
    if clip_norm is not None:
        model.clip(clip_norm)
    optimizer.step()
    model.optimizer_stepped()


def meter_step(model: ParallelModel, optimizer: Optimizer, step: Callable[[], Any]) -> dict[str, float]:
    """Run one step and tell what this rank did in it; the same names as in a CostTable."""
    state = state_of(model.modules, optimizer)
    device = next((each.device for each in state["parameters"]), torch.device("cpu"))
    for _, parameter in model.named_parameters():
        parameter.grad = None  # a step clears them anyway: what it frees at once is no part of its peak
    with growth(device) as grown, metered([*state["parameters"], *state["optimizer"]]) as reading:
        step()
    trained = [parameter for _, parameter in model.named_parameters()]
    return {
        "parameters_rank": float(sum(_local_count(parameter) for parameter in trained)),
        "flops_rank": reading.flops,
        "memory_parameters": float(bytes_of(state["parameters"])),
        "memory_gradients": float(bytes_of(parameter.grad for parameter in trained)),
        "memory_optimizer": float(bytes_of(state["optimizer"])),
        "memory_activations": float(reading.saved_bytes),
        "memory_peak": float(reading.held_bytes + grown.peak_bytes),
        "sent_bytes": reading.sent_bytes,
    }


def _local_count(parameter: nn.Parameter) -> int:
    local = getattr(parameter, "_local_tensor", parameter)
    return int(local.numel())
