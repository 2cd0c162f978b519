"""One step of one rank of a plan, in this process without the others: the plan's own code, in a fake process group.

A rank's storage, arithmetic, communication and memory are read from it before any worker starts. On real tensors it is
timed too; on fake ones nothing is allocated and nothing computed. No other module reads a step of a plan. Called by
`predict` and `fake_step`. The losses of such a step are meaningless.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import count, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.extend.cost import CostTable, OpCounts, combine_ranks, profile_step, to_local
from shoal.extend.parallel import ParallelDims, ParallelModel, PipelineModel, StagePartition, parallelize
from shoal.extend.train import Task, TrainSpec, make_optimizer
from shoal.libs.planning.predict.fake_process_group import SimulatedRanks, fake_world
from shoal.libs.planning.predict.single_device import SingleDeviceProfile

MAX_TIMED_STEPS, TIMING_BUDGET_S = 5, 0.2
MIN_PIPELINE_STEPS = 3
NUM_WARM_UP_STEPS = 2  # DDP rebuilds its buckets before its second step, optimisers create their states in the first
STATES = ("memory_parameters", "memory_optimizer", "memory_average", "memory_gradients")


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
class StageTimes:
    """Seconds of a rank of a pipeline.

    outside_s: of the step outside of the schedule, such as the optimiser's
    busy_s:    by (stage, "forward" or "backward")
    besides_s: that its schedules took in addition
    """

    outside_s: float = 0.0
    busy_s: dict[tuple[int, str], float] = field(default_factory=dict)
    besides_s: float = 0.0

    def merge_fastest(self, again: StageTimes) -> StageTimes:
        """The shorter times of two runs: other load on the machine shortens neither."""
        busy_s = {name: min(seconds, again.busy_s.get(name, seconds)) for name, seconds in self.busy_s.items()}
        return StageTimes(min(self.outside_s, again.outside_s), busy_s, min(self.besides_s, again.besides_s))


@dataclass(frozen=True)
class RankStep:
    """One rank's step.

    values:       of the cost table; besides `flops_forward` and `flops_backward`
    peaks:        bytes by operators: the most in the forward pass, in each half of the backward pass, and after it
    traffic:      its collectives
    unknown:      operators with unknown arithmetic
    handed_bytes: by stage, the size of its output for each micro-batch
    times:        of a pipeline on real tensors, with its partition into stages
    """

    values: dict[str, float]
    peaks: tuple[float, ...] = ()
    traffic: tuple[CollectiveTraffic, ...] = ()
    unknown: tuple[str, ...] = ()
    handed_bytes: dict[int, float] = field(default_factory=dict)
    times: StageTimes = StageTimes()
    partition: StagePartition | None = None

    @property
    def memory_peak(self) -> float:
        return max(self.peaks)

    @property
    def state_bytes(self) -> float:
        """What outlives a step, gradients included."""
        return sum(self.values[name] for name in STATES)

    def extrapolate(self, other: RankStep, by: float) -> RankStep:
        """`by` times the way to `other`: linear in each number but times."""
        others = {(each.ranks, each.is_shared): each for each in other.traffic}

        def go(one: float, two: float) -> float:
            return one + (two - one) * by

        traffic = []
        for one in self.traffic:
            two = others.get((one.ranks, one.is_shared), one)
            num_calls, sent_bytes = go(one.num_calls, two.num_calls), go(one.sent_bytes, two.sent_bytes)
            traffic.append(replace(one, num_calls=round(num_calls), sent_bytes=sent_bytes))
        return replace(
            other,
            values={name: go(value, other.values[name]) for name, value in self.values.items()},
            peaks=tuple(map(go, self.peaks, other.peaks)),
            traffic=tuple(traffic),
            handed_bytes={stage: go(size, other.handed_bytes[stage]) for stage, size in self.handed_bytes.items()},
        )


def run_rank(
    task: Task,
    spec: TrainSpec,
    degrees: ParallelDims,
    build: Callable[[], nn.Module],
    batch: Any,
    device: torch.device,
    play: SimulatedRanks,
    *,
    rank: int = 0,
    is_fake: bool = False,
) -> RankStep:
    """Run `rank` for one step over its `batch`, without a compiler and without retries of the loss scale.

    build:   its model
    play:    the earlier messages of this round's ranks
    is_fake: whether the model and the batch have no values

    Raises PlanError as `parallelize` does, NotYetSent when another rank must run before, and what a model raises on
    fake tensors.
    """
    precision = "bf16" if spec.parallel.precision == "fp16" else spec.parallel.precision
    parallel = spec.parallel.model_copy(update={"compile": False, "precision": precision})
    with fake_world(rank, degrees.workers, device, play) as world:
        model = parallelize(build(), task, parallel, degrees, world, batch, spec.seed)
        try:
            optimizer = make_optimizer(task, spec.optimizer, [parameter for _, parameter in model.named_parameters()])
            steps = count()

            def step() -> None:
                model.train_step(batch, next(steps))
                if spec.clip_norm is not None:
                    model.clip_gradients(spec.clip_norm)
                optimizer.step()
                model.on_optimizer_step()

            step_s, times = dict[str, float](), StageTimes()
            if not is_fake:
                if isinstance(model, PipelineModel) and device.type == "cpu":
                    model.clock.now_s = time.thread_time  # stages are timed in turn: other load must not slow only one
                step_s["step_s"], times = _time_steps(model, step)
            elif degrees.data > 1 == degrees.tensor and (
                not degrees.is_sharded or (device.type == "cpu" and parallel.uses_shared_memory("cpu"))
            ):
                step()  # DDP has its buckets from a step on, and shards the memory through which they are gathered
            else:
                _create_states(optimizer)
            average = allocate_averages(model) if spec.average is not None else []
            play.shared_sums.clear()
            with profile_step(model, optimizer, average, is_fake=True, allocates=not is_fake) as profile:
                step()
            counts = profile.counts
            values = profile.values | step_s
            values |= {"flops_forward": counts.flops_forward, "flops_backward": counts.flops_backward}
            peaks = _find_peaks(counts)
            if is_fake:
                values["memory_peak"] = max(peaks)
            traffic, unknown = _collect_traffic(counts, play), tuple(sorted(counts.unknown))
            if not isinstance(model, PipelineModel):
                return RankStep(values, peaks, traffic, unknown)
            handed_bytes = {stage: float(size) for stage, size in model.stage_output_bytes.items()}
            return RankStep(values, peaks, traffic, unknown, handed_bytes, times, model.partition)
        finally:
            model.close()


def build_cost_table(
    spec: TrainSpec, alone: SingleDeviceProfile, runs: dict[int, RankStep], notes: tuple[str, ...]
) -> CostTable:
    """The numbers of a plan. alone: the full model on one device; runs: of the plan's representative ranks"""
    ranks = {rank: step.values for rank, step in runs.items()}
    values = {
        "parameters": float(alone.parameters),
        "parameters_trainable": float(alone.trainable),
        "flops_forward_sample": alone.flops_forward,
        "flops_backward_sample": alone.flops_backward,
        "latency_s": alone.latency_s,
        **combine_ranks(ranks),
    }
    values["flops_step"] *= spec.resolve_dims().workers / len(ranks)  # the ranks of a stage do the same work
    values = {name: value for name, value in values.items() if math.isfinite(value)}
    return CostTable(values, alone.unknown, notes, ranks=ranks)


def _time_steps(model: ParallelModel, step: Callable[[], None]) -> tuple[float, StageTimes]:
    """The shortest times of some steps, after those for warm-up."""
    steps_s, times = list[float](), list[StageTimes]()
    least, affordable = NUM_WARM_UP_STEPS + (MIN_PIPELINE_STEPS if isinstance(model, PipelineModel) else 1), 0
    while len(steps_s) < max(least, affordable):
        before_s, scheduled_s = model.busy_by_stage, model.scheduled_s
        began_s = time.perf_counter()
        step()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        steps_s.append(time.perf_counter() - began_s)
        busy_s = {name: seconds - before_s.get(name, 0.0) for name, seconds in model.busy_by_stage.items()}
        scheduled_s = model.scheduled_s - scheduled_s
        besides_s = max(0.0, scheduled_s - sum(busy_s.values()))
        times.append(StageTimes(steps_s[-1] - scheduled_s, busy_s, besides_s))
        if len(steps_s) == NUM_WARM_UP_STEPS:
            affordable = NUM_WARM_UP_STEPS + min(MAX_TIMED_STEPS, int(TIMING_BUDGET_S / max(steps_s[-1], 1e-9)))
    return min(steps_s[NUM_WARM_UP_STEPS:]), reduce(StageTimes.merge_fastest, times[NUM_WARM_UP_STEPS:])


def _create_states(optimizer: Optimizer) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _collect_traffic(counts: OpCounts, play: SimulatedRanks) -> tuple[CollectiveTraffic, ...]:
    traffic = [CollectiveTraffic(ranks, *both, is_shared=False) for ranks, both in counts.collectives.items()]
    for ranks in dict.fromkeys(ranks for ranks, _ in play.shared_sums):
        sent = [sent_bytes for each, sent_bytes in play.shared_sums if each == ranks]
        traffic.append(CollectiveTraffic(ranks, len(sent), sum(sent), is_shared=True))
    return tuple(traffic)


def _find_peaks(counts: OpCounts) -> tuple[float, ...]:
    """In the forward pass, the halves of the backward pass, and after it. What is alive changes linearly in each."""
    first, last = counts.backward
    ends = (0, first, (first + last) // 2, last, len(counts.live_bytes))
    parts = (counts.live_bytes[begin:end] for begin, end in pairwise(ends))
    return tuple(float(counts.resident_bytes + max(part, default=0)) for part in parts)


def allocate_averages(model: ParallelModel) -> list[Tensor]:
    """Tensors of the size of an average of the weights on this rank; at least float32, as a run stores it."""
    saved = model.model_state()
    here = [to_local(parameter) for name, parameter in model.named_parameters() if name in saved]
    numbers = [each for each in here if each.is_floating_point() or each.is_complex()]
    return [torch.empty_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in numbers]
