"""One step of a ParallelModel on this rank, as numbers of the cost table.

A dry run and a running Trainer measure alike: the only difference is whether the other ranks are real. Called by
`dry_run` and `step_profiler`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.cost.measure.memory import MemoryGrowth, bytes_of, state_of, storages_of, to_local, track_growth
from shoal.cost.measure.op_counter import OpCounts, count_ops
from shoal.parallel.model import ParallelModel


@contextmanager
def profile_step(
    model: ParallelModel,
    optimizer: Optimizer,
    is_fake: bool = False,
    average: Sequence[Tensor] = (),
    collectives: dict[tuple[int, ...], tuple[int, float]] | None = None,
    counts: list[OpCounts] | None = None,
) -> Iterator[dict[str, float]]:
    """Profile the one step in the body; the numbers are complete when it has ended.

    average:     of the weights, which is stored all the time
    collectives: takes those of torch.distributed, by their ranks: how many, and the bytes that this rank sends
    counts:      takes what the operators took, for fake tensors, whose peak memory is only there
    """
    found: dict[str, float] = {}
    state = state_of(model.modules, optimizer)
    parameters = [parameter for _, parameter in model.named_parameters()]
    device = next((each.device for each in state["parameters"]), torch.device("cpu"))
    buckets = _find_retained_buckets(parameters)
    resident = [*state["parameters"], *state["optimizer"], *average]
    past_group_bytes = model.shm_sent_bytes
    growth = track_growth(device) if counts is None else nullcontext(MemoryGrowth())  # fake tensors allocate nothing
    with growth as grown, count_ops(grown, resident, buckets, is_fake, model.shared_memory) as reading:
        yield found
    if collectives is not None:
        collectives |= reading.collectives
    if counts is not None:
        counts.append(reading)
    saved = model.model_state()  # without weights that are frozen for good, which no count of parameters has
    counted = [parameter for name, parameter in model.named_parameters() if name in saved]
    found |= {
        "parameters_rank": float(sum(to_local(parameter).numel() for parameter in counted)),
        "flops_rank": reading.flops,
        "memory_parameters": float(bytes_of(state["parameters"])),
        "memory_gradients": float(bytes_of(_gradients(parameters))),
        "memory_optimizer": float(bytes_of(state["optimizer"])),
        "memory_average": float(bytes_of(average)),
        "memory_activations": float(reading.saved_bytes),
        "memory_peak": float(reading.resident_bytes + grown.peak_bytes),
        "sent_bytes": reading.sent_bytes + model.shm_sent_bytes - past_group_bytes,
    }


def _find_retained_buckets(parameters: list[torch.nn.Parameter]) -> list[torch.UntypedStorage]:
    """Clear the gradients, as the step will, and return their memory that stays: DDP's buckets."""
    storages = {id(each): each for gradient in _gradients(parameters) for each in storages_of(gradient)}
    references = [weakref.ref(each) for each in storages.values()]
    storages.clear()
    for parameter in parameters:
        parameter.grad = None
    return [storage for storage in (reference() for reference in references) if storage is not None]


def _gradients(parameters: list[torch.nn.Parameter]) -> Iterator[Tensor]:
    return (parameter.grad for parameter in parameters if parameter.grad is not None)
