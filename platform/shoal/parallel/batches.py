"""Batches as trees of tensors: how many samples they hold, and their division into micro-batches.

Called by every plan. A batch is a tensor, or a tuple, list or mapping of batches; dimension 0 is the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.errors import PlanError


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in `batch`, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)


def num_samples(batch: Any) -> int:
    """The samples of `batch`: the first tensor's dimension 0; 0 where there is no tensor."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, Mapping):
            batch = list(batch.values())
        if not isinstance(batch, (tuple, list)) or not batch:
            return 0
        batch = batch[0]
    return batch.shape[0] if batch.ndim else 1


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """A batch of the same form, with `function` applied to each tensor."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: map_tensors(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(map_tensors(value, function) for value in batch)
    return batch


def micro_batches(batch: Any, parts: int) -> list[Any]:
    """`batch` in `parts` micro-batches of equal size; micro-batch m takes every `parts`-th sample, from the m-th.

    Ranks hold contiguous shares of a global batch. Taken with a stride, the micro-batches m of all ranks together are
    the samples m, m + parts, ... of the global batch, in order: the same ones for any number of ranks, so that batch
    statistics and dropout masks of a micro-batch are those of one process.

    Raises PlanError when the samples cannot be divided.
    """
    if parts == 1:
        return [batch]
    size = num_samples(batch)
    if size % parts:
        problem = f"cannot be divided into {parts} micro-batches"
        raise PlanError("batch_size", size, problem, "change batch_size, accumulate or micro_batches")
    return [map_tensors(batch, partial(_every, first=first, stride=parts)) for first in range(parts)]


def _every(tensor: Tensor, first: int, stride: int) -> Tensor:
    return tensor[first::stride] if tensor.ndim else tensor


def pieces(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """At most `parts` contiguous pieces of any batch, each with its share of the samples."""
    size = num_samples(batch)
    each = max(1, -(-size // parts))
    for begin in range(0, size, each):
        end = min(size, begin + each)
        yield map_tensors(batch, partial(_rows, begin=begin, end=end)), (end - begin) / size


def _rows(tensor: Tensor, begin: int, end: int) -> Tensor:
    return tensor[begin:end] if tensor.ndim else tensor


def moved(batch: Any, device: torch.device) -> Any:
    """`batch` on `device`."""
    return map_tensors(batch, lambda tensor: tensor.to(device))
