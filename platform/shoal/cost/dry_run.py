"""One rank of a plan, run in this process without the others: the same code, in a group that only pretends.

Owns the pretended world: collectives return at once, with this rank's own words as everybody's. What a rank holds,
computes, sends and keeps alive is then read off a real step of the real plan, before any worker is started. Called by
`predict`. The losses of such a step mean nothing.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from shoal.cost.alone import Costed, first_batch
from shoal.cost.reading import busy_by_stage, metering
from shoal.data import Data
from shoal.errors import PlanError
from shoal.parallel import Degrees, ParallelSpec, World
from shoal.parallel.model import ParallelModel, parallelize

MOST_TIMED, TIMED_S = 5, 0.2
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

    said: list[bytes] = field(default_factory=list)  # by rank 0, for the other ranks that are looked at
    _heard: Iterator[bytes] = field(default_factory=lambda: iter(()))

    def broadcast(self, value: T) -> T:
        if self.is_first:
            self.said.append(pickle.dumps(value))
            return value
        heard: T = pickle.loads(next(self._heard))
        return heard

    def gather(self, value: T) -> list[T]:
        return [value] * self.size

    def barrier(self) -> None:
        """Nobody to wait for."""


@contextmanager
def pretended(rank: int, size: int, device: torch.device, said: list[bytes]) -> Iterator[World]:
    """This process as one rank of `size`; rank 0, which goes first, leaves in `said` what it tells the others.

    Raises PlanError when it is in a group already."""
    if size == 1:
        yield World(0, 1, device)
        return
    if dist.is_initialized():
        raise PlanError("workers", size, "the cost of a plan is told before a process joins a group", "ask earlier")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    original = DistributedDataParallel.__init__
    DistributedDataParallel.__init__ = _made_to_answer(original)  # type: ignore[method-assign]
    try:
        if rank == 0:
            said.clear()
        yield _Pretended(rank, size, device, said=said, _heard=iter(said))
    finally:
        DistributedDataParallel.__init__ = original  # type: ignore[method-assign]
        dist.destroy_process_group()


def _made_to_answer(original: Callable[..., None]) -> Callable[..., None]:
    """DDP wants to be handed what was reduced, and the pretended group hands over nothing."""

    def reduce(group: Any, bucket: Any) -> Any:
        dist.all_reduce(bucket.buffer(), group=group)
        answer: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        answer.set_result(bucket.buffer())
        return answer

    def made(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.register_comm_hook(self.process_group, lambda state, bucket: reduce(state, bucket))

    return made


def representatives(degrees: Degrees) -> list[int]:
    """One rank of each stage: the first shard and the first share are never smaller than the others."""
    return [degrees.rank(degrees.coordinates(0)._replace(pipeline=stage)) for stage in range(degrees.pipeline)]


@dataclass(frozen=True)
class DryRun:
    """What one rank did in a step. `busy_s`: seconds by (stage, "forward" or "backward"), of a pipeline's stages."""

    values: dict[str, float]
    busy_s: dict[tuple[int, str], float]


def dry_run(
    task: Costed,
    spec: Configured,
    data: Data,
    rank: int,
    batch_size: int,
    device: torch.device,
    make: MakeOptimizer,
    said: list[bytes],
) -> DryRun:
    """What `rank` does in one step over a global batch of `batch_size`. Raises PlanError as `parallelize` does."""
    degrees = spec.degrees()
    with pretended(rank, degrees.workers, device, said) as world:
        torch.manual_seed(spec.seed)
        batch = first_batch(data, batch_size // degrees.data, device)
        model = parallelize(task.model(), task, _eager(spec.parallel), degrees, world, batch, spec.seed)
        try:
            parameters = [parameter for _, parameter in model.named_parameters()]
            optimizer = make(task, spec.optimizer, parameters)
            steps = count()
            seconds = [_seconds(model, optimizer, batch, next(steps), spec.clip_norm) for _ in range(NUM_WARM)]
            before = busy_by_stage(model)
            timed = [
                _seconds(model, optimizer, batch, next(steps), spec.clip_norm) for _ in range(_repeats(seconds[-1]))
            ]
            chunks = {name: (value - before[name]) / len(timed) for name, value in busy_by_stage(model).items()}
            with metering(model, optimizer, is_pretended=True) as found:
                _step(model, optimizer, batch, next(steps), spec.clip_norm)
            return DryRun({**found, "step_s": min(timed)}, chunks)
        finally:
            model.close()


def _eager(parallel: ParallelSpec) -> ParallelSpec:
    """Without a compiler, and without a scale that is tried again until it fits: the losses here mean nothing."""
    precision = "bf16" if parallel.precision == "fp16" else parallel.precision
    return parallel.model_copy(update={"compile": False, "precision": precision})


def _repeats(step_s: float) -> int:
    return max(1, min(MOST_TIMED, int(TIMED_S / max(step_s, 1e-9))))


def _seconds(model: ParallelModel, optimizer: Optimizer, batch: Any, step: int, clip_norm: float | None) -> float:
    began_s = time.perf_counter()
    _step(model, optimizer, batch, step, clip_norm)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter() - began_s


def _step(model: ParallelModel, optimizer: Optimizer, batch: Any, step: int, clip_norm: float | None) -> None:
    model.train_step(batch, step)
    if clip_norm is not None:
        model.clip(clip_norm)
    optimizer.step()
    model.optimizer_stepped()
