"""The check, at the first step of a run that splits its batches, that the loss of a batch is the mean of its parts'.

Called by the Trainer. A loss that divides by something else than the number of samples would be trained on other
gradients than in one process. Costs three forward passes of one batch, once.
"""

from __future__ import annotations

import math
from typing import Any

from shoal.batch_tree import count_samples
from shoal.errors import ConfigError
from shoal.parallel import ParallelModel, World
from shoal.parallel.micro_batches import split_micro_batches
from shoal.random_state import preserve_rng

TOLERANCE = 3e-4  # relative: sums of another order differ by 1e-6
NOISE = 1e-6


def check_split_loss(model: ParallelModel, batch: Any, world: World, task: str) -> None:
    """Raises ConfigError, on every rank, when the losses of two halves of `batch` have another mean. Collective.

    A loss that draws random numbers in evaluation mode cannot be judged, and passes.
    """
    size = count_samples(batch)
    halves = split_micro_batches(batch, 2, is_even=False) if size > 1 else [batch, batch]  # as often on every rank
    with preserve_rng():
        found = [model.measure_loss(each) for each in (batch, batch, *halves)]
    losses = [float(each) for each in found if each is not None]
    finding: tuple[float, float] | None = None
    if len(losses) == len(found):
        whole, again, *parts = losses
        weights = [count_samples(half) for half in halves]
        mean = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
        is_judged = math.isfinite(whole) and _is_close(whole, again, parts)
        finding = (whole, mean) if is_judged and not _is_close(whole, mean, parts) else None
    for whole, mean in filter(None, world.gather(finding)):
        problem = (
            f"is {whole:.6g} for a batch and {mean:.6g} as the mean of its halves, so the run, which splits batches, "
            "would train on other gradients than one process"
        )
        remedy = "return shoal.Mean(total, count) from it; check_loss=false accepts the mean of the parts"
        raise ConfigError("Task.loss", task, problem, remedy)


def _is_close(one: float, other: float, parts: list[float]) -> bool:
    scale = max(abs(one), *(abs(part) for part in parts if math.isfinite(part)), 0.0)
    return abs(one - other) <= TOLERANCE * scale + NOISE
