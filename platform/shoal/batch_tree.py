"""Batches of any form: a tensor, or a tuple, list or mapping of batches; dimension 0 is the sample.

Called by code that feeds, moves or divides batches. Pure functions; imports torch and nothing of Shoal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


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


def count_samples(batch: Any) -> int:
    """The number of samples: the first tensor's dimension 0; 0 without a tensor."""
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


def slice_samples(batch: Any, part: slice) -> Any:
    """`part` of the samples of each tensor; a tensor without dimensions stays."""
    return map_tensors(batch, lambda tensor: tensor[part] if tensor.ndim else tensor)


def move_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` on `device`."""
    return map_tensors(batch, lambda tensor: tensor.to(device))
