"""One rank of a plan, run in this process without the others: the same code, in a group that only pretends.

What a rank holds, computes, sends and keeps alive is read off a real step of the real plan, before any worker is
started. Called by `predict`. The losses of such a step mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from shoal.cost.alone import Costed, first_batch
from shoal.cost.pretence import Play, pretended
from shoal.cost.reading import metering
from shoal.data import Data
from shoal.parallel import Degrees, ParallelSpec
from shoal.parallel.model import ParallelModel, parallelize
from shoal.parallel.pipeline import Pipelined
from shoal.parallel.pipeline_layout import Layout

MOST_TIMED, TIMED_S = 5, 0.2
NUM_WARM = 2  # DDP arranges its buckets anew before its second step, optimisers make their states in the first

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


def representatives(degrees: Degrees) -> list[int]:
    """One rank of each stage: the first shard and the first share are never smaller than the others."""
    return [degrees.rank(degrees.coordinates(0)._replace(pipeline=stage)) for stage in range(degrees.pipeline)]


@dataclass(frozen=True)
class DryRun:
    """What one rank did in a step.

    busy_s: seconds by (stage, "forward" or "backward"), of a pipeline's stages
    layout: which stage has what, in a pipeline
    """

    values: dict[str, float]
    busy_s: dict[tuple[int, str], float]
    layout: Layout | None = None


def dry_run(
    task: Costed,
    spec: Configured,
    data: Data,
    rank: int,
    batch_size: int,
    device: torch.device,
    make: MakeOptimizer,
    play: Play,
) -> DryRun:
    """What `rank` does in one step over a global batch of `batch_size`.

    play: what the ranks of this round have said so far

    Raises PlanError as `parallelize` does, and NotSaidYet when another rank must be run before.
    """
    degrees = spec.degrees()
    with pretended(rank, degrees.workers, device, play) as world:
        torch.manual_seed(spec.seed)
        batch = first_batch(data, batch_size // degrees.data, device)
        model = parallelize(task.model(), task, _eager(spec.parallel), degrees, world, batch, spec.seed)
        try:
            parameters = [parameter for _, parameter in model.named_parameters()]
            optimizer = make(task, spec.optimizer, parameters)
            steps = count()
            seconds = [_seconds(model, optimizer, batch, next(steps), spec.clip_norm) for _ in range(NUM_WARM)]
            before = model.busy_by_stage
            timed = [
                _seconds(model, optimizer, batch, next(steps), spec.clip_norm) for _ in range(_repeats(seconds[-1]))
            ]
            chunks = {name: (value - before[name]) / len(timed) for name, value in model.busy_by_stage.items()}
            with metering(model, optimizer, is_pretended=True) as found:
                _step(model, optimizer, batch, next(steps), spec.clip_norm)
            layout = model.layout if isinstance(model, Pipelined) else None
            return DryRun({**found, "step_s": min(timed)}, chunks, layout)
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
