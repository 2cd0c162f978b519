"""Batches of any form: a tensor, or a tuple, list or mapping of batches; dimension 0 is the sample. Or an object of its
own, such as a batch of trees, that says itself how it is divided (`SampleBatch`).

Called by code that feeds, moves or divides batches. Pure functions; imports torch and nothing of Shoal.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from heapq import heapreplace
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor


class SampleBatch(ABC):
    """A batch whose samples are not the rows of its tensors."""

    @abstractmethod
    def count_samples(self) -> int:
        """The number of samples."""

    @abstractmethod
    def tensors(self) -> Iterator[Tensor]:
        """Every tensor, in order."""

    @abstractmethod
    def map_tensors(self, function: Callable[[Tensor], Any]) -> Self:
        """The same samples, with `function` applied to each tensor."""

    @abstractmethod
    def slice_samples(self, part: slice) -> Self:
        """Some of the samples."""


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor in `batch`, in order."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, SampleBatch):
        yield from batch.tensors()
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from tensors_of(value)
    elif isinstance(batch, (tuple, list)):
        for value in batch:
            yield from tensors_of(value)


def count_samples(batch: Any) -> int:
    """The number of samples: the first tensor's dimension 0; 0 without a tensor."""
    while not isinstance(batch, Tensor):
        if isinstance(batch, SampleBatch):
            return batch.count_samples()
        if isinstance(batch, Mapping):
            batch = list(batch.values())
        if not isinstance(batch, (tuple, list)) or not batch:
            return 0
        batch = batch[0]
    return batch.shape[0] if batch.ndim else 1


def map_tensors(batch: Any, function: Callable[[Tensor], Any]) -> Any:
    """A batch of the same form, with `function` applied to each tensor."""
    return _map_leaves(
        batch, lambda leaf: leaf.map_tensors(function) if isinstance(leaf, SampleBatch) else function(leaf)
    )


def slice_samples(batch: Any, part: slice) -> Any:
    """`part` of the samples of each tensor; a tensor without dimensions stays."""
    return _take(batch, part, part)


def take_samples(batch: Any, rows: list[int]) -> Any:
    """Some of the samples, in this order, each as often as it is named; of a `SampleBatch`, from the first to the
    last."""
    return _take(batch, rows, slice(rows[0], rows[-1] + 1))


def _take(batch: Any, rows: slice | list[int], part: slice) -> Any:
    """`rows` of tensors; `part` of a `SampleBatch`."""

    def take(leaf: Tensor | SampleBatch) -> Any:
        if isinstance(leaf, SampleBatch):
            return leaf.slice_samples(part)
        return leaf[rows] if leaf.ndim else leaf

    return _map_leaves(batch, take)


def has_own_samples(batch: Any) -> bool:
    """Whether some samples are those of a `SampleBatch`."""
    kinds: list[bool] = []
    _map_leaves(batch, lambda leaf: kinds.append(isinstance(leaf, SampleBatch)))
    return any(kinds)


def join_samples(first: Any, second: Any) -> Any:
    """The samples of both batches; those of the first alone where their tensors do not fit together."""
    pairs = list(zip(tensors_of(first), tensors_of(second), strict=False))
    if not pairs or has_own_samples(first) or any(one.shape[1:] != other.shape[1:] for one, other in pairs):
        return first
    joined = iter([torch.cat(pair) if pair[0].ndim else pair[0] for pair in pairs])
    return map_tensors(first, lambda _: next(joined))


def _map_leaves(batch: Any, function: Callable[[Any], Any]) -> Any:
    if isinstance(batch, Tensor | SampleBatch):
        return function(batch)
    if isinstance(batch, Mapping):
        return {name: _map_leaves(value, function) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map_leaves(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map_leaves(value, function) for value in batch)
    return batch


def move_to_device(batch: Any, device: torch.device) -> Any:
    """`batch` on `device`."""
    return map_tensors(batch, lambda tensor: tensor.to(device))


def balance_by_size(sizes: np.ndarray, num_parts: int) -> np.ndarray:
    """The part of each item [B], so that the parts' sums of sizes are about equal, and none is without an item.

    sizes: [B], B >= num_parts. Greedy, largest first (Graham 1969): the largest sum is at most 4/3 of the best one.
    """
    parts = np.zeros(len(sizes), np.int64)
    loads = [(0, 0, part) for part in range(num_parts)]  # (has an item, the sum so far, part)
    for item in np.argsort(-sizes, kind="stable").tolist():
        _, load, part = loads[0]
        parts[item] = part
        heapreplace(loads, (1, load + int(sizes[item]), part))
    return parts
