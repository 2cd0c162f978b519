"""What a Task will cost under its plan, told before any worker is started.

Looks at the whole model once, then runs each kind of rank of the plan dry. A step that would take long is run on fewer
samples and scaled. Called by `shoal inspect` and, before a run, by the Trainer's shells. Leaves random numbers, threads
and process groups as they were.
"""

from __future__ import annotations

import os

import torch

from shoal.cost.alone import Alone, Costed, look, undisturbed
from shoal.cost.dry_run import Configured, MakeOptimizer, dry_run, representatives
from shoal.cost.table import CostTable, most
from shoal.data import Data
from shoal.parallel.plan import Degrees
from shoal.parallel.world import choose_device

BUDGET_S = 1.5  # of a step of a dry run; a longer one is scaled
NUM_LOOKED = 4  # samples with which a model is first looked at


def predict(task: Costed, spec: Configured, make_optimizer: MakeOptimizer) -> CostTable:
    """The table for `task` under `spec`. Call it in one process, before a process group is joined.

    make_optimizer: (task, spec.optimizer, parameters) -> the optimiser, as the run will make it

    Raises PlanError, DataError or ConfigError for what could not be run.
    """
    degrees = spec.degrees()
    samples = spec.parallel.samples(spec.batch_size, degrees)
    device = choose_device(spec.device, 0)
    threads = spec.threads or max(1, (os.cpu_count() or 1) // spec.workers)
    with undisturbed(spec.seed, threads):
        data = task.data()
        alone = look(task, task.model().to(device), data, min(NUM_LOOKED, samples), device)
        ranks, notes = _ranks(task, spec, data, alone, samples, degrees, device, make_optimizer)
    values = most(ranks) | _of_model(alone)
    values["flops_step"] *= degrees.workers / len(ranks)  # the ranks of a stage do alike
    return CostTable(values, alone.unknown, notes, ranks)


def _of_model(alone: Alone) -> dict[str, float]:
    return {
        "parameters": float(alone.parameters),
        "parameters_trainable": float(alone.trainable),
        "flops_forward_sample": alone.flops_forward / alone.num_samples,
        "flops_backward_sample": alone.flops_backward / alone.num_samples,
        "latency_s": alone.latency_s,
    }


def _ranks(
    task: Costed,
    spec: Configured,
    data: Data,
    alone: Alone,
    samples: int,
    degrees: Degrees,
    device: torch.device,
    make: MakeOptimizer,
) -> tuple[dict[int, dict[str, float]], tuple[str, ...]]:
    """What each representative rank does, at the real size of a micro-batch, or scaled to it from two smaller ones."""
    repeats = spec.batch_size // samples  # micro-batches of all ranks in a step
    affordable = int(BUDGET_S / max(alone.sample_s * repeats / degrees.data, 1e-9))
    chosen = representatives(degrees)
    if affordable >= samples:
        return {rank: dry_run(task, spec, data, rank, spec.batch_size, device, make) for rank in chosen}, ()
    small = max(1, min(affordable, samples // 2) // 2)
    found = {}
    for rank in chosen:
        one, two = (dry_run(task, spec, data, rank, size * repeats, device, make) for size in (small, 2 * small))
        found[rank] = {name: one[name] + (two[name] - one[name]) * (samples / small - 1) for name in one}
    return found, (f"scaled from steps of {small} and {2 * small} samples a micro-batch to {samples}",)
