"""Predicts the cost of a Task under its plan, without a worker.

Profiles the full model once, then dry-runs each kind of rank of the plan. A step that would take long is run on fewer
samples and scaled. Called by `shoal inspect` and by the launchers: on a cluster after the run, when the cores are free,
otherwise before it. Leaves random numbers, threads and process groups unchanged.
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from shoal.cpu_count import count_usable_cores
from shoal.errors import ShoalError, summarize_error
from shoal.extend.cost import CostTable, ModelTooLarge, PlacementRow, build_small_model, combine_ranks
from shoal.extend.data import Data, load_first_batch
from shoal.extend.parallel import ParallelDims, ShmP2P, choose_device, find_tensor_plan, get_stage_ranks
from shoal.extend.train import Task, TrainSpec
from shoal.libs.planning.predict.dry_run import DryRun, dry_run, pick_representative_ranks
from shoal.libs.planning.predict.fake_plan import predict_on_fake_tensors
from shoal.libs.planning.predict.fake_process_group import NotYetSent, SimulatedRanks
from shoal.libs.planning.predict.placement import build_placement
from shoal.libs.planning.predict.simulate_pipeline import SimulatedStep, TransferTime, plan_actions, simulate_step
from shoal.libs.planning.predict.single_device import SingleDeviceProfile, preserve_process, profile_single_device

NUM_PIPELINE_ROUNDS = 2  # dry runs of each rank
BUDGET_S = 1.5  # for a step of a dry run; a longer one is scaled
NUM_ROUNDS = 20  # of a tiny message
PAUSE_S = 0.001  # until a waiting thread has fallen asleep


@dataclass(frozen=True)
class DryPlan:
    """A plan that was run rank by rank.

    runs:           of the representative ranks
    placement_rows: which rank stores what
    """

    degrees: ParallelDims
    device: torch.device
    alone: SingleDeviceProfile
    runs: dict[int, DryRun]
    notes: tuple[str, ...]
    placement_rows: tuple[PlacementRow, ...]


def predict_cost(task: Task, spec: TrainSpec) -> CostTable:
    """The table for `task` under `spec`: see `shoal.train.launch.predicted_cost.Estimator`. Call it before this process
    joins a group.

    A model that is too large to be built here is counted on fake tensors, if it can be.

    Raises PlanError, DataError or ConfigError for a run that is impossible.
    """
    try:
        return build_cost_table(spec, dry_run_plan(task, spec, is_limited=True))
    except ModelTooLarge:
        pass
    try:
        return predict_on_fake_tensors(task, spec)
    except ShoalError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises of tensors without values
        note = f"run with the real model, which could not be counted on fake tensors: {summarize_error(error)}"
    table = build_cost_table(spec, dry_run_plan(task, spec))
    return replace(table, notes=(*table.notes, note))


def dry_run_plan(task: Task, spec: TrainSpec, *, is_limited: bool = False) -> DryPlan:
    """Profile the full model, and dry-run each kind of rank. As `predict_cost`.

    is_limited: raise ModelTooLarge for a model that is better counted on fake tensors
    """
    degrees = spec.resolve_dims()
    samples = spec.parallel.compute_micro_batch_size(spec.batch_size, degrees)
    threads = spec.threads or max(1, count_usable_cores() // spec.workers)
    with preserve_process(spec.seed, threads):
        data = task.data()
        model = build_small_model(task.model) if is_limited else task.model()
        device = choose_device(spec.device, 0)
        model = model.to(device)
        alone = profile_single_device(task, model, data, samples, device)
        runs, notes = _run_ranks(task, spec, data, alone, samples, device)
        layout = next(iter(runs.values())).layout
        batch = load_first_batch(data, samples, device, is_exact=True)
        split = find_tensor_plan(model, task, degrees.tensor, batch) if degrees.tensor > 1 else None
        along: dict[str, list[int]] | None = None
        if layout is not None:
            ranks = get_stage_ranks(spec.parallel.schedule, degrees.pipeline)
            along = {name: sorted({ranks[stage] for stage in stages}) for name, stages in layout.parameters.items()}
        rows = build_placement(model, degrees, split, along)
    return DryPlan(degrees, device, alone, runs, notes, tuple(rows))


def build_cost_table(spec: TrainSpec, plan: DryPlan) -> CostTable:
    """The numbers of a plan that was run."""
    degrees, layout = plan.degrees, next(iter(plan.runs.values())).layout
    ranks = {rank: run.values for rank, run in plan.runs.items()}
    alone = plan.alone
    values = {
        "parameters": float(alone.parameters),
        "parameters_trainable": float(alone.trainable),
        "flops_forward_sample": alone.flops_forward / alone.num_samples,
        "flops_backward_sample": alone.flops_backward / alone.num_samples,
        "latency_s": alone.latency_s,
        **combine_ranks(ranks),
    }
    values["flops_step"] *= degrees.workers / len(ranks)  # the ranks of a stage do the same work
    if degrees.pipeline > 1:
        played = simulate_pipeline(spec, plan)
        values |= {"bubble": played.idle_share, "step_s": played.step_s * spec.parallel.accumulate}
    cuts = tuple(cut.module for cut in layout.split_points) if layout is not None else ()
    return CostTable(values, alone.unknown, plan.notes, cuts, ranks, plan.placement_rows)


def _run_ranks(
    task: Task, spec: TrainSpec, data: Data, alone: SingleDeviceProfile, samples: int, device: torch.device
) -> tuple[dict[int, DryRun], tuple[str, ...]]:
    """Profile the representative ranks, at the real size of a micro-batch, or scaled to it from two smaller ones."""
    degrees, repeats = spec.resolve_dims(), spec.batch_size // samples  # micro-batches of all ranks in a step

    def run_at(size: int) -> dict[int, DryRun]:
        return _run_round(lambda rank, play: dry_run(task, spec, data, rank, size * repeats, device, play), degrees)

    small, large = _choose_sizes(alone.sample_s * repeats / degrees.data, samples)
    if large == samples:
        return run_at(samples), ()
    less, more = run_at(small), run_at(large)
    runs = {rank: _extrapolate(less[rank], more[rank], samples / small - 1) for rank in less}
    return runs, (f"scaled from steps of {small} and {large} samples a micro-batch to {samples}",)


def _choose_sizes(sample_s: float, samples: int) -> tuple[int, int]:
    """The samples of a micro-batch in one dry run and twice as many in another; or all of them, if that is quick.

    sample_s: the time of a step per sample of its micro-batches
    """
    affordable = int(BUDGET_S / max(sample_s, 1e-9))
    if affordable >= samples or samples == 1:
        return samples, samples
    small = max(1, min(affordable, samples // 2) // 2)
    return small, 2 * small


def _run_round(run: Callable[[int, SimulatedRanks], DryRun], degrees: ParallelDims) -> dict[int, DryRun]:
    """Run each representative rank; one that needs a message of a later one runs again after that one.

    Ranks of a pipeline run several times, in turn: their bubble depends on differences of their times, and a slow
    moment of the machine would add to those of one rank.
    """
    play, runs = SimulatedRanks(), dict[int, DryRun]()
    waiting = pick_representative_ranks(degrees)
    for _ in range(2 * degrees.pipeline):
        for rank in list(waiting):
            with suppress(NotYetSent):
                runs[rank] = run(rank, play)
                waiting.remove(rank)
        waiting.reverse()
    assert not waiting, "the stages wait for each other"
    for rank in sorted(runs) * (NUM_PIPELINE_ROUNDS - 1 if degrees.pipeline > 1 else 0):
        runs[rank] = runs[rank].merge_fastest(run(rank, play))
    return dict(sorted(runs.items()))


def _extrapolate(one: DryRun, two: DryRun, by: float) -> DryRun:
    """Extrapolate linearly, from `one` and `two` times the samples; `by`: from the smaller step.

    Nothing becomes less than it is with the larger sample: a time may, where other load slowed the smaller one.
    """

    def extend(one: dict[Any, float], two: dict[Any, float]) -> dict[Any, float]:
        return {name: max(two[name], one[name] + (two[name] - one[name]) * by) for name in one}

    values, busy_s = extend(one.values, two.values), extend(one.busy_s, two.busy_s)
    # All of them, when backward begins.
    alive = ("memory_parameters", "memory_optimizer", "memory_average", "memory_activations")
    values["memory_peak"] = max(values["memory_peak"], sum(values[name] for name in alive))
    handed = extend(one.handed_bytes, two.handed_bytes)
    small = {(each.ranks, each.is_shared): each.sent_bytes for each in one.traffic}
    traffic = []
    for each in two.traffic:  # activations grow with the samples, weights do not
        sent_bytes = small.get((each.ranks, each.is_shared), each.sent_bytes)
        traffic.append(replace(each, sent_bytes=sent_bytes + (each.sent_bytes - sent_bytes) * by))
    messages_s = one.messages_s | two.messages_s
    return DryRun(values, tuple(traffic), two.outside_s, busy_s, two.besides_s, messages_s, handed, two.layout)


def simulate_pipeline(
    spec: TrainSpec,
    plan: DryPlan,
    slowdown: float = 1.0,
    transit_s: Callable[[int, float], float | None] = lambda stage, size_bytes: None,
) -> SimulatedStep:
    """A pipeline's schedule, simulated in its order from the stages' times; one micro-step.

    slowdown:  how much longer the ranks compute than in the dry run
    transit_s: the seconds that a message takes from a stage to the next one, by the stage and the bytes; None: as
               between two processes of this host
    """
    runs, degrees = plan.runs, plan.degrees
    busy_s = {name: slowdown * seconds for run in runs.values() for name, seconds in run.busy_s.items()}
    schedule, accumulate = spec.parallel.schedule, spec.parallel.accumulate
    micro = spec.parallel.num_micro_batches(degrees)
    stages = range(1 + max(stage for stage, _ in busy_s))
    forward_s, backward_s = (
        [busy_s.get((stage, way), 0.0) / (micro * accumulate) for stage in stages] for way in ("forward", "backward")
    )
    num_works = sum(len(works) for works in plan_actions(schedule, degrees.pipeline, micro)) * accumulate
    between_s = slowdown * sum(run.besides_s for run in runs.values()) / num_works
    messages = _estimate_transfers(runs, transit_s) if plan.device.type == "cpu" else []
    return simulate_step(schedule, degrees.pipeline, micro, forward_s, backward_s, messages, between_s)


def _estimate_transfers(
    runs: dict[int, DryRun], transit_s: Callable[[int, float], float | None] = lambda stage, size_bytes: None
) -> list[TransferTime]:
    """The output message of each stage but the last, as sent and received in the dry runs."""
    known = {size: both for run in runs.values() for size, both in run.messages_s.items()}
    handed = {stage: size for run in runs.values() for stage, size in run.handed_bytes.items()}
    on_the_way_s, transfers = measure_latency_s(), []
    for stage, size in sorted(handed.items()):
        send_s, take_s = next(iter(known.values()), (0.0, 0.0))  # none are known if the group sends them
        if len(known) > 1:
            lines = (np.polyfit(list(known), seconds, 1) for seconds in zip(*known.values(), strict=True))
            send_s, take_s = (max(0.0, float(np.polyval(line, size))) for line in lines)
        elsewhere_s = transit_s(stage, size)
        transfers.append(TransferTime(send_s, on_the_way_s if elsewhere_s is None else elsewhere_s, take_s))
    return transfers


def measure_latency_s() -> float:
    """How soon a waiting rank of this host receives a message: the median of some tiny ones, within this process.

    From the end of `send` to the end of `wait`; 0 if most are received before `send` returns. It is the least that a
    network between hosts takes, which is unknown before the ranks exist.
    """
    ours, theirs = socket.socketpair()
    sent_s, received_s = list[float](), list[float]()

    def listen(messages: ShmP2P) -> None:
        tensor = torch.empty(8, dtype=torch.uint8)
        for _ in range(NUM_ROUNDS):
            messages.receive(tensor, 0).wait()
            received_s.append(time.perf_counter())

    with closing(ShmP2P(0, {1: ours})) as messages, closing(ShmP2P(1, {0: theirs})) as others:
        waiting = threading.Thread(target=listen, args=(others,), daemon=True)
        waiting.start()
        for _ in range(NUM_ROUNDS):
            time.sleep(PAUSE_S)
            messages.send(torch.empty(8, dtype=torch.uint8), 1)
            sent_s.append(time.perf_counter())
        waiting.join()
    return max(0.0, statistics.median(received - sent for sent, received in zip(sent_s, received_s, strict=True)))
