"""A ring of items in bounded bytes, in memory or in files, drawn in proportion to their priority.

What an item is, subclasses say: a step of experience, or a sequence of them. Prioritised as in Schaul et al.
(arXiv:1511.05952, the proportional variant). Legend: C slots of the ring, B drawn items.

Items are counted from 0 without end; item i is in slot i % C. A new one overwrites the oldest and its priority.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from shoal.atomic_file import create_private, make_folder
from shoal.errors import ConfigError

GROUP_SIZE = 64  # of a SumTree
SMALLEST_PRIORITY = 1e-6  # added to every error, so that each item is drawn some day


class SumTree:
    """Sums over groups of non-negative numbers: draws an index in proportion to its number, for many draws at once.

    A tree of two levels: NumPy walks twenty levels of a binary one more slowly than it sums 16,000 groups, which is a
    million numbers. Legend: K indices, G groups.

    Numbers 0 to `size` - 1, at first zero. Sums are computed from their numbers, so no rounding errors add up.

    numbers: their array, for instance a file's, of `padded_size(size)` float64; by default one in memory
    """

    def __init__(self, size: int, numbers: np.ndarray | None = None) -> None:
        numbers = np.zeros(padded_size(size)) if numbers is None else numbers
        self._groups = numbers.reshape(-1, GROUP_SIZE)  # [G, GROUP_SIZE], a view
        self._numbers, self._sums = numbers, self._groups.sum(1)
        self._num_used = len(np.trim_zeros(self._sums, "b"))  # groups that ever had a number: a ring fills for long

    @property
    def total(self) -> float:
        return float(self._sums[: self._num_used].sum())

    def get(self, indices: np.ndarray) -> np.ndarray:
        """The numbers at `indices`. [K]"""
        result: np.ndarray = self._numbers[indices]
        return result

    def set(self, indices: np.ndarray, values: np.ndarray | float) -> None:
        """Replace the numbers at `indices` [K]; of equal indices, the last one counts."""
        self._numbers[indices] = values
        groups = np.unique(indices // GROUP_SIZE)
        self._sums[groups] = self._groups[groups].sum(1)
        self._num_used = max(self._num_used, int(groups.max(initial=-1)) + 1)

    def find(self, fractions: np.ndarray) -> np.ndarray:
        """The index at each fraction, in [0, 1), of the running total; never one whose number is 0. [K]

        Raises ValueError if every number is 0.
        """
        ends = self._sums[: self._num_used].cumsum()  # [G]
        if not self._num_used or not ends[-1] > 0:
            raise ValueError("every number of the tree is 0: there is nothing to draw")
        targets = np.minimum(fractions * ends[-1], np.nextafter(ends[-1], 0))  # rounding may reach the end
        groups = ends.searchsorted(targets, side="right")
        targets -= ends[groups] - self._sums[groups]
        inner = self._groups[groups].cumsum(1)  # [K, GROUP_SIZE]
        targets = np.minimum(targets, np.nextafter(inner[:, -1], 0))
        result: np.ndarray = groups * GROUP_SIZE + (inner > targets[:, None]).argmax(1)
        return result


def padded_size(size: int) -> int:
    """The length of complete groups for `size` numbers."""
    return -(-size // GROUP_SIZE) * GROUP_SIZE


class Ring:
    """A ring of as many items as fit `size_bytes`, priorities included.

    columns:           by name the dtype and shape of the parts of an item
    needed, needed_by: how many slots it has at least, and for what
    priority_exponent: α of equation (1): 0 draws uniformly, 1 in proportion to the error
    random:            draws the samples
    folder:            holds the ring in files there, allocated at once, which outlive the process; by default in memory

    Raises ConfigError when `size_bytes` is below `needed` slots, or above the free space of the disk or the machine's
    memory.
    """

    def __init__(
        self,
        size_bytes: int,
        columns: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
        needed: int,
        needed_by: str,
        priority_exponent: float,
        random: np.random.Generator,
        folder: Path | None = None,
    ) -> None:
        self._size_bytes, self._priority_exponent = size_bytes, priority_exponent
        self._random, self._folder = random, folder
        columns = {**columns, "row_of_slot": (np.dtype(np.int64), ())}  # the item's number; -1 while it is written
        item_bytes = sum(dtype.itemsize * math.prod(shape) for dtype, shape in columns.values())
        self.capacity = int(size_bytes / (item_bytes + 8 + 8 / GROUP_SIZE))  # with the priority and its sums
        if self.capacity < needed:
            problem = f"holds {self.capacity} rows; {needed_by} takes {needed} of {item_bytes} bytes"
            raise ConfigError("algorithm.replay_mb", size_bytes / 2**20, problem, "raise it, or shorten segment_length")
        priorities_shape = (padded_size(self.capacity),)
        self._require_space(item_bytes * self.capacity + 8 * priorities_shape[0])
        self._arrays = {
            name: self._allocate(name, dtype, (self.capacity, *shape)) for name, (dtype, shape) in columns.items()
        }
        self._row_of_slot = self._arrays["row_of_slot"]
        priorities = self._allocate("priorities", np.dtype(np.float64), priorities_shape)
        self.num_inserted = 0  # items, since the run began
        if folder is not None:
            self._recover(priorities)
        self._tree = SumTree(self.capacity, priorities)
        self.num_drawable = int(np.count_nonzero(priorities))  # items with a priority

    def write(self, columns: Mapping[str, np.ndarray], priorities: np.ndarray) -> None:
        """Store K items in place of the oldest ones: each part of them [K, ...]; a priority of 0 is never drawn."""
        stored = slice(max(0, len(priorities) - self.capacity), None)  # earlier ones would be overwritten at once
        rows = (self.num_inserted + np.arange(len(priorities)))[stored]
        slots = rows % self.capacity
        self.num_drawable += int(np.count_nonzero(priorities[stored])) - int(np.count_nonzero(self._tree.get(slots)))
        self._row_of_slot[slots] = -1  # a process that dies from here on leaves items that `_recover` rejects
        for name, values in columns.items():
            self._arrays[name][slots] = values[stored]
        self._tree.set(slots, priorities[stored])
        self._row_of_slot[slots] = rows
        self.num_inserted += len(priorities)

    def draw(self, batch_size: int, beta: float) -> tuple[np.ndarray, np.ndarray]:
        """(slots, weights float32) of `batch_size` drawn items [B]. Raises ValueError when there is none.

        Draws are stratified (appendix B.2.1). Weights are (num_drawable · P)^-β, divided by the largest of the batch
        (§3.4).
        """
        fractions = (np.arange(batch_size) + self._random.random(batch_size)) / batch_size
        slots = self._tree.find(fractions)
        probabilities = self._tree.get(slots) / self._tree.total
        weights = (self.num_drawable * probabilities) ** -beta
        return slots, (weights / weights.max()).astype(np.float32)

    def update_priorities(self, rows: np.ndarray, errors: np.ndarray) -> None:
        """Set the priorities of drawn items, by number [B], by their new errors; of items overwritten meanwhile,
        nothing."""
        slots = rows % self.capacity
        is_stored = self._row_of_slot[slots] == rows
        self._tree.set(slots[is_stored], self.compute_priorities(errors[is_stored]))

    def remove(self, rows: np.ndarray) -> None:
        """Never draw these items again, by number; they stay until they are overwritten."""
        slots = np.unique(rows % self.capacity)
        self.num_drawable -= int(np.count_nonzero(self._tree.get(slots)))
        self._tree.set(slots, 0.0)

    def compute_priorities(self, errors: np.ndarray) -> np.ndarray:
        priorities: np.ndarray = (np.abs(errors).astype(np.float64) + SMALLEST_PRIORITY) ** self._priority_exponent
        return priorities

    def state_dict(self) -> dict[str, Any]:
        """The index. The contents are in the files of `folder`, or are lost with the process."""
        return {"num_inserted": self.num_inserted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Count items from the index on; items that were written to the files after it stay."""
        self.num_inserted = max(self.num_inserted, int(state["num_inserted"]))

    def _find_complete(self, newest: int) -> np.ndarray:
        """Which slots do not need an item after the `newest` one, that is in the files. bool [C]"""
        return np.ones(self.capacity, np.bool_)

    def _require_space(self, needed_bytes: int) -> None:
        if self._folder is None:  # the system promises more memory than it has, and kills the process as the ring fills
            location = "memory"
            free_bytes = psutil.virtual_memory().total
            remedy = ", or use algorithm.replay_on_disk=true"
        else:
            make_folder(self._folder)
            existing_bytes = sum(path.stat().st_size for path in self._folder.iterdir())
            free_bytes = shutil.disk_usage(self._folder).free + existing_bytes
            location = str(self._folder)
            remedy = ""
        if needed_bytes > free_bytes:
            problem = f"takes {needed_bytes:,} bytes in {location}, and there are {free_bytes:,}"
            raise ConfigError("algorithm.replay_mb", self._size_bytes / 2**20, problem, "lower it" + remedy)

    def _allocate(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray:
        if self._folder is None:
            return np.zeros(shape, dtype)  # memory is taken as the ring fills
        path = self._folder / f"{name}.bin"
        size_bytes = math.prod(shape) * dtype.itemsize
        if path.exists() and path.stat().st_size != size_bytes:
            path.unlink()  # of another size of the ring: the experience in it is given up
        # Now: a full disk would kill the process at some later write to its pages.
        with create_private(path).open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
        return np.memmap(path, dtype, "r+", shape=shape)

    def _recover(self, priorities: np.ndarray) -> None:
        """Go on with the files of an earlier process, without the items that it was writing when it died."""
        slots = np.arange(self.capacity)
        rows = self._row_of_slot
        newest = int(rows.max())
        is_newest = (rows % self.capacity == slots) & (rows >= 0) & (rows > newest - self.capacity)
        priorities[: self.capacity][~(self._find_complete(newest) & is_newest)] = 0.0
        if priorities.any():
            self.num_inserted = newest + 1
