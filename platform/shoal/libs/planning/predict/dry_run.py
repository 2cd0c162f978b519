"""Runs one rank of a plan in this process without the others: the same code, in a fake process group.

A rank's storage, computation, communication and memory are read from a real step of the real plan, before any worker
starts. Called by `predict`. The losses of such a step are meaningless.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import torch
from torch.optim import Optimizer

from shoal.extend.cost import allocate_averages, profile_step
from shoal.extend.data import Data, load_first_batch
from shoal.extend.parallel import ParallelDims, ParallelModel, ParallelSpec, PipelineModel, StagePartition, parallelize
from shoal.extend.train import Task, TrainSpec, make_optimizer
from shoal.libs.planning.predict.fake_process_group import MessageCosts, SimulatedRanks, fake_world

MAX_TIMED_STEPS, TIMING_BUDGET_S = 5, 0.2
MIN_PIPELINE_STEPS = 3
NUM_WARM_UP_STEPS = 2  # DDP rebuilds its buckets before its second step, optimisers create their states in the first


def pick_representative_ranks(degrees: ParallelDims) -> list[int]:
    """One rank of each stage: the first shard and the first share are never smaller than the others."""
    return [degrees.rank(degrees.coordinates(0)._replace(pipeline=stage)) for stage in range(degrees.pipeline)]


@dataclass(frozen=True)
class CollectiveTraffic:
    """A step's collectives among the same ranks.

    sent_bytes: that this rank sends in all of them, in rings
    is_shared:  whether they go through memory of one host where all ranks are on it
    """

    ranks: tuple[int, ...]
    num_calls: int
    sent_bytes: float
    is_shared: bool


@dataclass(frozen=True)
class DryRun:
    """One rank's step.

    traffic: its collectives

    In a pipeline:

    outside_s:    seconds of the step outside of the schedule, such as the optimiser's
    busy_s:       seconds by (stage, "forward" or "backward")
    besides_s:    seconds that its schedules took in addition, without waiting and without messages
    messages_s:   by size in bytes, the seconds of sending a message, and of receiving one
    handed_bytes: by stage, the size of its output for each micro-batch
    layout:       the partition into stages
    """

    values: dict[str, float]
    traffic: tuple[CollectiveTraffic, ...] = ()
    outside_s: float = 0.0
    busy_s: dict[tuple[int, str], float] = field(default_factory=dict)
    besides_s: float = 0.0
    messages_s: dict[int, tuple[float, float]] = field(default_factory=dict)
    handed_bytes: dict[int, float] = field(default_factory=dict)
    layout: StagePartition | None = None

    def merge_fastest(self, again: DryRun) -> DryRun:
        """The shorter times of two runs: other load on the machine shortens neither."""
        messages_s = dict(self.messages_s)
        for size, both in again.messages_s.items():
            before = messages_s.get(size, both)
            messages_s[size] = (min(before[0], both[0]), min(before[1], both[1]))
        return replace(
            self,
            outside_s=min(self.outside_s, again.outside_s),
            busy_s={name: min(seconds, again.busy_s.get(name, seconds)) for name, seconds in self.busy_s.items()},
            besides_s=min(self.besides_s, again.besides_s),
            messages_s=messages_s,
        )


def dry_run(
    task: Task, spec: TrainSpec, data: Data, rank: int, batch_size: int, device: torch.device, play: SimulatedRanks
) -> DryRun:
    """Run `rank` for one step over a global batch of `batch_size`.

    play: the earlier messages of this round's ranks

    Raises PlanError as `parallelize` does, and NotYetSent when another rank must run before.
    """
    degrees = spec.resolve_dims()
    with fake_world(rank, degrees.workers, device, play) as world:
        torch.manual_seed(spec.seed)
        batch = load_first_batch(data, batch_size // degrees.data, device, is_exact=True)
        model = parallelize(task.model(), task, make_eager_spec(spec.parallel), degrees, world, batch, spec.seed)
        try:
            if isinstance(model, PipelineModel) and device.type == "cpu":
                model.clock.now_s = time.thread_time  # stages are timed in turn: other load must not slow only one
            parameters = [parameter for _, parameter in model.named_parameters()]
            optimizer = make_optimizer(task, spec.optimizer, parameters)
            steps = count()
            timer = partial(_time_step, model, optimizer, batch, clip_norm=spec.clip_norm, handled=play.message_costs)
            *_, warm = (timer(next(steps)) for _ in range(NUM_WARM_UP_STEPS))
            least = MIN_PIPELINE_STEPS if degrees.pipeline > 1 else 1
            affordable = min(MAX_TIMED_STEPS, int(TIMING_BUDGET_S / max(warm.step_s, 1e-9)))
            timed = [timer(next(steps)) for _ in range(max(least, affordable))]
            messages_s = play.message_costs.compute_medians()
            average = allocate_averages(model) if spec.average is not None else []
            play.shared_sums.clear()
            with profile_step(model, optimizer, average, is_fake=True) as profile:
                run_step(model, optimizer, batch, next(steps), spec.clip_norm)
            values = {**profile.values, "step_s": min(each.step_s for each in timed)}
            traffic = collect_traffic(profile.counts.collectives, play)
            if not isinstance(model, PipelineModel):
                return DryRun(values, traffic)
            outside_s = min(each.step_s - each.scheduled_s for each in timed)
            busy_s = {name: min(each.busy_s[name] for each in timed) for name in warm.busy_s}
            besides_s = min(each.besides_s for each in timed)
            handed_bytes = {stage: float(size) for stage, size in model.stage_output_bytes.items()}
            return DryRun(values, traffic, outside_s, busy_s, besides_s, messages_s, handed_bytes, model.partition)
        finally:
            model.close()


def collect_traffic(
    collectives: dict[tuple[int, ...], tuple[int, float]], play: SimulatedRanks
) -> tuple[CollectiveTraffic, ...]:
    traffic = [CollectiveTraffic(ranks, *both, is_shared=False) for ranks, both in collectives.items()]
    for ranks in dict.fromkeys(ranks for ranks, _ in play.shared_sums):
        sent = [sent_bytes for each, sent_bytes in play.shared_sums if each == ranks]
        traffic.append(CollectiveTraffic(ranks, len(sent), sum(sent), is_shared=True))
    return tuple(traffic)


def make_eager_spec(parallel: ParallelSpec) -> ParallelSpec:
    """Without a compiler, and without retries of the loss scale: the losses here are meaningless."""
    precision = "bf16" if parallel.precision == "fp16" else parallel.precision
    return parallel.model_copy(update={"compile": False, "precision": precision})


@dataclass(frozen=True)
class _StepTimes:
    """One step: seconds in total; of the schedules; of computation by stage and direction; of the schedules besides
    messages."""

    step_s: float
    scheduled_s: float
    busy_s: dict[tuple[int, str], float]
    besides_s: float


def _time_step(
    model: ParallelModel, optimizer: Optimizer, batch: Any, step: int, clip_norm: float | None, handled: MessageCosts
) -> _StepTimes:
    before_s, scheduled_s, handled_s = model.busy_by_stage, model.scheduled_s, handled.total_s
    began_s = time.perf_counter()
    run_step(model, optimizer, batch, step, clip_norm)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    step_s = time.perf_counter() - began_s
    busy_s = {name: seconds - before_s.get(name, 0.0) for name, seconds in model.busy_by_stage.items()}
    scheduled_s = model.scheduled_s - scheduled_s
    besides_s = max(0.0, scheduled_s - sum(busy_s.values()) - (handled.total_s - handled_s))
    return _StepTimes(step_s, scheduled_s, busy_s, besides_s)


def run_step(model: ParallelModel, optimizer: Optimizer, batch: Any, step: int, clip_norm: float | None) -> None:
    model.train_step(batch, step)
    if clip_norm is not None:
        model.clip_gradients(clip_norm)
    optimizer.step()
    model.on_optimizer_step()
