"""The check, at the first step of a run that splits its batches, that the loss of a batch is the mean of its parts'.

Called by the Trainer. A loss that divides by something else than the number of samples would be trained on other
gradients than in one process. Costs three forward passes of a micro-batch, once.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from shoal.batch_tree import count_samples, slice_samples
from shoal.errors import ConfigError
from shoal.parallel import ParallelModel, World
from shoal.parallel.micro_batches import split_micro_batches
from shoal.random_state import preserve_rng

TOLERANCE = 3e-4  # relative: sums of another order differ by 1e-6
NUM_ROUNDINGS = 2  # of a loss or a network in a type of less digits, as bf16
NOISE = 1e-6


def check_split_loss(model: ParallelModel, batch: Any, world: World, task: str, num_parts: int = 1) -> None:
    """Raises ConfigError, on every rank, when the losses of two halves of `batch` have another mean. Collective.

    num_parts: micro-batches of a step: the memory may be too small for several at once, so one is tried, or two samples

    A loss that draws random numbers in evaluation mode cannot be judged, and passes.
    """
    batch = slice_samples(batch, slice(max(2, count_samples(batch) // num_parts)))
    is_split = count_samples(batch) > 1
    halves = split_micro_batches(batch, 2, is_even=False) if is_split else [batch, batch]  # as often on every rank
    with preserve_rng():
        found = [model.measure_loss(each) for each in (batch, batch, *halves)]
    losses = [float(each) for each in found if each is not None]
    finding: tuple[float, float] | None = None
    if len(losses) == len(found):
        whole, again, *parts = losses
        weights = [count_samples(half) for half in halves]
        mean = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
        tolerance = _find_tolerance(model, found[0])
        is_judged = math.isfinite(whole) and _is_close(whole, again, parts, tolerance)
        finding = (whole, mean) if is_judged and not _is_close(whole, mean, parts, tolerance) else None
    for whole, mean in filter(None, world.gather(finding)):
        problem = (
            f"is {whole:.6g} for a batch and {mean:.6g} as the mean of its halves, so the run, which splits batches, "
            "would train on other gradients than one process"
        )
        remedy = "return shoal.Mean(total, count) from it; check_loss=false accepts the mean of the parts"
        raise ConfigError("Task.loss", task, problem, remedy)


def _find_tolerance(model: ParallelModel, loss: Tensor | None) -> float:
    parameters = (each for module in model.modules for each in module.parameters())
    types = {each.dtype for each in (loss, *parameters) if each is not None and each.is_floating_point()}
    if model.forward_dtype is not None:
        types.add(model.forward_dtype)
    return max(TOLERANCE, *(NUM_ROUNDINGS * torch.finfo(each).eps for each in types))


def _is_close(one: float, other: float, parts: list[float], tolerance: float) -> bool:
    scale = max(abs(one), *(abs(part) for part in parts if math.isfinite(part)), 0.0)
    return abs(one - other) <= tolerance * scale + NOISE
