"""The division of a batch into micro-batches. Called by every plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from shoal.batch_tree import count_samples, map_tensors, slice_samples
from shoal.errors import PlanError


def split_micro_batches(batch: Any, parts: int, *, is_even: bool = True) -> list[Any]:
    """`batch` as `parts` micro-batches of equal size; micro-batch m takes every `parts`-th sample, from the m-th.

    Ranks have contiguous shares of a global batch. With this stride, the micro-batches m of all ranks together are the
    samples m, m + parts, ... of the global batch, in order: the same for any number of ranks, so that batch statistics
    and dropout masks of a micro-batch equal those of one process.

    is_even: False: the last micro-batches may have one sample less

    Raises PlanError when the samples cannot be divided.
    """
    if parts == 1:
        return [batch]
    size = count_samples(batch)
    if size < parts or (is_even and size % parts):
        problem = f"cannot be divided into {parts} micro-batches"
        raise PlanError("batch_size", size, problem, "change batch_size, accumulate or micro_batches")
    strided = [slice_samples(batch, slice(first, None, parts)) for first in range(parts)]
    return [map_tensors(each, Tensor.contiguous) for each in strided]  # a Task may take a `view` of its labels


def iter_chunks(batch: Any, parts: int) -> Iterator[tuple[Any, float]]:
    """At most `parts` contiguous pieces of any batch, each with its share of the samples."""
    size = count_samples(batch)
    each = max(1, -(-size // parts))
    for begin in range(0, size, each):
        end = min(size, begin + each)
        yield slice_samples(batch, slice(begin, end)), (end - begin) / size
