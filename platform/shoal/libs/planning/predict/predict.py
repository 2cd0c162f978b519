"""Predicts the cost of a Task under its plan, without a worker.

Profiles the full model once, then runs each kind of rank of the plan. A step that would take long is run on fewer
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
from dataclasses import replace

import torch

from shoal.cpu_count import count_usable_cores
from shoal.errors import ShoalError, summarize_error
from shoal.extend.cost import CostTable, ModelTooLarge, build_small_model
from shoal.extend.data import Data, load_first_batch
from shoal.extend.parallel import ParallelDims, ShmP2P, choose_device, find_tensor_plan, get_stage_ranks
from shoal.extend.train import Task, TrainSpec
from shoal.libs.planning.predict.fake_plan import predict_on_fake_tensors
from shoal.libs.planning.predict.fake_process_group import NotYetSent, SimulatedRanks
from shoal.libs.planning.predict.placement import build_placement
from shoal.libs.planning.predict.rank_step import RankStep, build_cost_table, run_rank
from shoal.libs.planning.predict.simulate_pipeline import SimulatedStep, TransferTime, plan_actions, simulate_step
from shoal.libs.planning.predict.single_device import preserve_process, profile_single_device

NUM_PIPELINE_ROUNDS = 2  # runs of each rank
BUDGET_S = 1.5  # for a step; a longer one is scaled
NUM_ROUNDS = 20  # of a tiny message
PAUSE_S = 0.001  # until a waiting thread has fallen asleep


def predict_cost(task: Task, spec: TrainSpec) -> CostTable:
    """The table for `task` under `spec`: see `shoal.train.launch.predicted_cost.Estimator`. Call it before this process
    joins a group.

    A model that is too large to be built here is counted on fake tensors, if it can be.

    Raises PlanError, DataError or ConfigError for a run that is impossible.
    """
    try:
        return _read_plan(task, spec, is_limited=True)
    except ModelTooLarge:
        pass
    try:
        return predict_on_fake_tensors(task, spec)
    except ShoalError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises of tensors without values
        note = f"run with the real model, which could not be counted on fake tensors: {summarize_error(error)}"
    table = _read_plan(task, spec)
    return replace(table, notes=(*table.notes, note))


def _read_plan(task: Task, spec: TrainSpec, *, is_limited: bool = False) -> CostTable:
    """As `predict_cost`, of a model that is built. is_limited: raise ModelTooLarge for one that is better counted on
    fake tensors"""
    degrees = spec.resolve_dims()
    samples = spec.parallel.compute_micro_batch_size(spec.batch_size, degrees)
    with preserve_process(spec.seed, spec.threads or max(1, count_usable_cores() // spec.workers)):
        data = task.data()
        model = build_small_model(task.model) if is_limited else task.model()
        model = model.to(device := choose_device(spec.device, 0))  # a model that is counted needs none
        alone = profile_single_device(task, model, data, samples, device)
        runs, notes = run_ranks(task, spec, data, alone.sample_s)
        table = build_cost_table(spec, alone, runs, notes)
        partition = next(iter(runs.values())).partition
        batch = load_first_batch(data, samples, device, is_exact=True)
        split = find_tensor_plan(model, task, degrees.tensor, batch) if degrees.tensor > 1 else None
        if partition is None:
            return replace(table, placement_rows=tuple(build_placement(model, degrees, split)))
        ranks = get_stage_ranks(spec.parallel.schedule, degrees.pipeline)
        along = {name: sorted({ranks[stage] for stage in stages}) for name, stages in partition.parameters.items()}
        rows = build_placement(model, degrees, split, along)
    played = simulate_pipeline(spec, runs)
    values = table.values | {"bubble": played.idle_share, "step_s": played.step_s * spec.parallel.accumulate}
    cuts = tuple(cut.module for cut in partition.split_points)
    return replace(table, values=values, cuts=cuts, placement_rows=tuple(rows))


def run_ranks(task: Task, spec: TrainSpec, data: Data, sample_s: float) -> tuple[dict[int, RankStep], tuple[str, ...]]:
    """Steps of a plan's representative ranks, at the real size of a micro-batch, or scaled to it from two smaller ones;
    and notes on that.

    sample_s: a sample's part of a step of the full model
    """
    degrees, device = spec.resolve_dims(), choose_device(spec.device, 0)
    samples = spec.parallel.compute_micro_batch_size(spec.batch_size, degrees)
    repeats = spec.batch_size // samples  # micro-batches of all ranks in a step

    def run_at(size: int) -> dict[int, RankStep]:
        def run(rank: int, play: SimulatedRanks) -> RankStep:
            torch.manual_seed(spec.seed)
            batch = load_first_batch(data, size * repeats // degrees.data, device, is_exact=True)
            return run_rank(task, spec, degrees, task.model, batch, device, play, rank=rank)

        return _run_round(run, degrees)

    small, large = _choose_sizes(sample_s * repeats / degrees.data, samples)
    if large == samples:
        return run_at(samples), ()
    less, more = run_at(small), run_at(large)
    runs = {rank: _extrapolate(less[rank], more[rank], samples / small - 1) for rank in less}
    return runs, (f"scaled from steps of {small} and {large} samples a micro-batch to {samples}",)


def _choose_sizes(sample_s: float, samples: int) -> tuple[int, int]:
    """The samples of a micro-batch in one run and twice as many in another; or all of them, if that is quick.

    sample_s: the time of a step per sample of its micro-batches
    """
    affordable = int(BUDGET_S / max(sample_s, 1e-9))
    if affordable >= samples or samples == 1:
        return samples, samples
    small = max(1, min(affordable, samples // 2) // 2)
    return small, 2 * small


def _run_round(run: Callable[[int, SimulatedRanks], RankStep], degrees: ParallelDims) -> dict[int, RankStep]:
    """Run each representative rank; one that needs a message of a later one runs again after that one.

    Ranks of a pipeline run several times, in turn: their bubble depends on differences of their times, and a slow
    moment of the machine would add to those of one rank.
    """
    play, runs = SimulatedRanks(), dict[int, RankStep]()
    # One rank of each stage: the first shard and the first share are never smaller than the others.
    waiting = [degrees.rank(degrees.coordinates(0)._replace(pipeline=stage)) for stage in range(degrees.pipeline)]
    for _ in range(2 * degrees.pipeline):
        for rank in list(waiting):
            with suppress(NotYetSent):
                runs[rank] = run(rank, play)
                waiting.remove(rank)
        waiting.reverse()
    assert not waiting, "the stages wait for each other"
    for rank in sorted(runs) * (NUM_PIPELINE_ROUNDS - 1 if degrees.pipeline > 1 else 0):
        runs[rank] = replace(runs[rank], times=runs[rank].times.merge_fastest(run(rank, play).times))
    return dict(sorted(runs.items()))


def _extrapolate(one: RankStep, two: RankStep, by: float) -> RankStep:
    """Extrapolate linearly, from `one` and `two` times the samples; `by`: from the smaller step.

    Nothing becomes less than it is with the larger sample: a time may, where other load slowed the smaller one.
    """

    step = one.extrapolate(two, by)
    values = {name: max(value, two.values[name]) for name, value in step.values.items()}
    # All of them, when backward begins.
    alive = ("memory_parameters", "memory_optimizer", "memory_average", "memory_activations")
    values["memory_peak"] = max(values["memory_peak"], sum(values[name] for name in alive))
    busy_s = {
        name: max(more, less + (more - less) * by)
        for name, less in one.times.busy_s.items()
        for more in (two.times.busy_s[name],)
    }
    return replace(step, values=values, times=replace(two.times, busy_s=busy_s))


def simulate_pipeline(
    spec: TrainSpec,
    runs: dict[int, RankStep],
    slowdown: float = 1.0,
    transit_s: Callable[[int, float], float | None] = lambda stage, size_bytes: None,
) -> SimulatedStep:
    """A pipeline's schedule, simulated in its order from the stages' times; one micro-step.

    slowdown:  how much longer the ranks compute than in these steps
    transit_s: the seconds that a message takes from a stage to the next one, by the stage and the bytes; None: as
               between two processes of this host
    """
    degrees = spec.resolve_dims()
    busy_s = {name: slowdown * seconds for run in runs.values() for name, seconds in run.times.busy_s.items()}
    schedule, accumulate = spec.parallel.schedule, spec.parallel.accumulate
    micro = spec.parallel.num_micro_batches(degrees)
    stages = range(1 + max(stage for stage, _ in busy_s))
    forward_s, backward_s = (
        [busy_s.get((stage, way), 0.0) / (micro * accumulate) for stage in stages] for way in ("forward", "backward")
    )
    num_works = sum(len(works) for works in plan_actions(schedule, degrees.pipeline, micro)) * accumulate
    between_s = slowdown * sum(run.times.besides_s for run in runs.values()) / num_works
    messages = []
    if choose_device(spec.device, 0).type == "cpu":
        handed = {stage: size for run in runs.values() for stage, size in run.handed_bytes.items()}
        is_shared = spec.parallel.uses_shared_memory("cpu")
        for stage, size in sorted(handed.items()):
            transfer = measure_transfer(int(size) if is_shared else 0)
            elsewhere_s = transit_s(stage, size)
            messages.append(transfer if elsewhere_s is None else replace(transfer, transit_s=elsewhere_s))
    return simulate_step(schedule, degrees.pipeline, micro, forward_s, backward_s, messages, between_s)


def measure_transfer(size_bytes: int) -> TransferTime:
    """A message between two ranks of this host, as the median of some within this process.

    Its way is that of a tiny one, from the end of `send` to the end of `wait` of a rank that waits; 0 if most are
    received before `send` returns. It is the least that a network between hosts takes, which is unknown before the
    ranks exist. size_bytes: 0: neither sending nor receiving it takes time of the ranks, as a group does it
    """
    ours, theirs = socket.socketpair()
    sent_s, received_s, send_s, take_s = (list[float]() for _ in range(4))

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
        tensor = torch.empty(size_bytes, dtype=torch.uint8)
        for _ in range(NUM_ROUNDS if size_bytes else 0):
            began_s = time.thread_time()
            messages.send(tensor, 1)
            given_s = time.thread_time()
            others.receive(tensor, 0).wait()
            send_s.append(given_s - began_s)
            take_s.append(time.thread_time() - given_s)
    transit_s = statistics.median(received - sent for sent, received in zip(sent_s, received_s, strict=True))
    return TransferTime(statistics.median(send_s or [0.0]), max(0.0, transit_s), statistics.median(take_s or [0.0]))
