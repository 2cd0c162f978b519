"""The base of datasets in files: opened in the reading process, and full batches at once.

Formats derive from it. Never keeps a file open across a pickle or a fork.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.sampling.sampler import Indices
from shoal.errors import DataError
from shoal.store import fetch


class FileDataset(ABC):
    """A map-style dataset in files. The constructor checks the files, so that errors appear before any worker starts,
    and closes them again; they are opened for reading with the first batch."""

    deterministic = True  # draws no random numbers

    def __init__(self, paths: Sequence[Path], num_samples: int) -> None:
        self.paths, self.num_samples = tuple(paths), num_samples
        self._opened: tuple[int, Any] | None = None  # (process id, result of `_open`)
        if not num_samples:
            raise DataError("data", str(self.paths[0]), "is empty")

    @abstractmethod
    def _open(self) -> Any:
        """Open the data of the batches, in this process."""

    @abstractmethod
    def batch(self, indices: Indices) -> Any:
        """The samples as one batch, in this order. Raises DataError."""

    @abstractmethod
    def shapes(self) -> dict[str, str]:
        """The fields of a sample: dtype, shape and, within a file, place by name. Part of the fingerprint."""

    @property
    def _files(self) -> Any:
        if self._opened is None or self._opened[0] != os.getpid():
            fetch(self.paths)
            self._opened = (os.getpid(), self._open())
        return self._opened[1]

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> Any:
        if not -self.num_samples <= index < self.num_samples:
            raise IndexError(index)
        return get_first_sample(self.batch(np.array([index % self.num_samples])))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None}


def get_first_sample(batch: Any) -> Any:
    """The only sample of a batch of one."""
    if isinstance(batch, Mapping):
        return {name: get_first_sample(value) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(get_first_sample(value) for value in batch)
    return batch[0]
