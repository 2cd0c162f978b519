"""The check of a run that splits its batches: that the loss of a batch is the mean of its parts'.

Called by the Trainer before a step, from the first one until a batch has shown it. A loss that divides by something
else than the number of samples would be trained on other gradients than in one process. Costs four forward passes of at
most a micro-batch each time.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from shoal.batch_tree import count_samples, slice_samples
from shoal.errors import ConfigError
from shoal.parallel import ParallelModel, World
from shoal.parallel.loss_trace import REMEDY
from shoal.parallel.micro_batches import split_micro_batches
from shoal.random_state import preserve_rng

TOLERANCE = 3e-4  # relative: sums of another order differ by 1e-6
NUM_ROUNDINGS = 2  # of a loss or a network in a type of less digits, as bf16
NOISE = 1e-6
NUM_FIRST = 8  # steps that are all checked; after them, one in each doubling


class SplitLossCheck:
    """Refuses a loss whose value depends on how a batch is split.

    num_parts: micro-batches of a step: the memory may be too small for several at once, so the samples of one are tried

    Until a batch has shown that the parts have the mean of the whole, the model's `loss_reader` refuses whatever may
    differ. A loss that draws random numbers in evaluation mode cannot be judged, and passes unless the
    reader refuses it.
    """

    def __init__(self, model: ParallelModel, world: World, task: str, num_parts: int = 1) -> None:
        self._model, self._world, self._task, self._num_parts = model, world, task, num_parts
        self._num_steps, self.is_done = 0, False
        model.loss_reader.is_accepted = False

    def before_step(self, batch: Any) -> None:
        """Collective. Raises ConfigError, on every rank, when the losses of two halves of a part have another mean."""
        step = self._num_steps
        self._num_steps += 1
        if self.is_done or (step >= NUM_FIRST and step & (step - 1)):
            return
        verdicts = self._world.gather(self._compare(batch))
        for whole, mean in (each for each in verdicts if isinstance(each, tuple)):
            problem = (
                f"is {whole:.6g} for a batch and {mean:.6g} as the mean of its halves, so the run, which splits "
                "batches, would train on other gradients than one process"
            )
            raise ConfigError("Task.loss", self._task, problem, REMEDY)
        self._model.loss_reader.is_accepted = "equal" in verdicts
        self.is_done = "equal" in verdicts or set(verdicts) == {"no scalar"}

    def _compare(self, batch: Any) -> str | tuple[float, float]:
        """`equal` if the loss is the mean of its parts, where another loss would not be; `unclear`; `no scalar`, which
        cannot be compared; or the loss, and another mean of its parts."""
        size = max(2, count_samples(batch) // self._num_parts)
        spread = slice_samples(batch, slice(None, None, max(1, count_samples(batch) // size)))
        few = slice_samples(spread, slice(size))
        is_split = count_samples(few) > 1
        halves = split_micro_batches(few, 2, is_even=False) if is_split else [few, few]  # as often on every rank
        with preserve_rng():
            measured = [self._model.measure_loss(each) for each in (few, few, *halves)]
        losses = [each for each in measured if each is not None]
        if len(losses) < len(measured):
            return "no scalar"
        whole, again, *parts = (float(each.value) for each in losses)
        weights = [
            float(count_samples(half) if loss.weight is None else loss.weight)
            for half, loss in zip(halves, losses[2:], strict=True)
        ]
        parameters = (each for module in self._model.modules for each in module.parameters())
        types = {each.dtype for each in (losses[0].value, *parameters) if each.is_floating_point()}
        if self._model.forward_dtype is not None:
            types.add(self._model.forward_dtype)
        tolerance = max(TOLERANCE, *(NUM_ROUNDINGS * torch.finfo(each).eps for each in types))
        if not math.isfinite(whole):
            return "unclear"
        if not _is_close(whole, again, parts, tolerance):
            return "unclear" if losses[0].divisors else "no scalar"
        mean = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / (sum(weights) or 1.0)
        if not _is_close(whole, mean, parts, tolerance):
            return whole, mean
        first, second = (loss.divisors / count_samples(half) for half, loss in zip(halves, losses[2:], strict=True))
        is_telling = not (first or second) or abs(first - second) > tolerance * max(first, second)
        return "equal" if is_telling and not _is_close(parts[0], parts[1], parts, 4 * tolerance) else "unclear"


def _is_close(one: float, other: float, parts: list[float], tolerance: float) -> bool:
    scale = max(abs(one), *(abs(part) for part in parts if math.isfinite(part)), 0.0)
    return abs(one - other) <= tolerance * scale + NOISE
