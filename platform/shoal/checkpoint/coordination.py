"""The ranks that write one checkpoint together: a separate gloo group, or one process alone.

Called by `checkpointer`, also from its background thread, which needs the separate group. Every wait ends: a rank that
is gone, or silent for longer than the timeout, raises RankLost on all the others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.errors import RankLost, summarize_error

T = TypeVar("T")


class CheckpointGroup:
    """Constructed on every rank at the same point of the program (a new group is a collective)."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self.rank, self.size = 0, 1
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def is_first(self) -> bool:
        """Whether this is the first rank, which decides."""
        return self.rank == 0

    def all_reduce_max(self, *numbers: int) -> list[int]:
        """The maximum of each number over the ranks."""
        values = torch.tensor(numbers, dtype=torch.int64)
        if self._group is not None:
            with self._translate_errors("agree"):
                dist.all_reduce(values, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in values]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on the first; elsewhere an empty list."""
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self._translate_errors("gather"):
            dist.gather_object(value, gathered if self.is_first else None, dst=0, group=self._group)
        return gathered if self.is_first else []

    def all_gather(self, value: T) -> list[T]:
        """The values of all ranks, on every rank."""
        if self._group is None:
            return [value]
        gathered: list[Any] = [None] * self.size
        with self._translate_errors("gather"):
            dist.all_gather_object(gathered, value, group=self._group)
        return gathered

    def broadcast(self, value: T) -> T:
        """The first rank's value."""
        if self._group is None:
            return value
        box: list[Any] = [value]
        with self._translate_errors("hear from rank 0"):
            dist.broadcast_object_list(box, src=0, group=self._group)
        received: T = box[0]
        return received

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.all_reduce_max(0)

    def close(self) -> None:
        """Release the group. Idempotent."""
        if self._group is not None and dist.is_initialized():
            dist.destroy_process_group(self._group)
        self._group = None

    @contextlib.contextmanager
    def _translate_errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # every trouble of gloo's is one
            reason = summarize_error(error)
            problem = f"rank {self.rank} of {self.size} could not {verb} within {self._timeout_s:g} s"
            raise RankLost(f"{problem}: another rank died or hangs ({reason})") from error
