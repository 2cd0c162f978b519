"""The order that a sampler of torch gives, epoch after epoch: the same on every rank, and after a resume.

Called by `Data`, and by the loader's MapOrder. Reads no sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.random_state import preserve_rng, seed_all


class SamplerOrder:
    """A sampler, or a batch sampler, whose random numbers follow from (seed, epoch).

    loaders: the generator of the DataLoader, of which that draws a number before each epoch

    Those of a torch generator of its own follow from the generator's state, which stays as it is. What keeps random
    numbers in any other way is iterated once for each earlier epoch, so that a resumed run has the same order.

    gives_batches: whether it yields the indices of a batch, and not an index

    Raises DataError for a sampler without a length.
    """

    def __init__(self, sampler: Any, *, gives_batches: bool, loaders: torch.Generator | None = None) -> None:
        self.name, self.gives_batches = type(sampler).__name__, gives_batches
        self._sampler, self._loaders = sampler, loaders
        owners = [sampler, getattr(sampler, "sampler", None)]
        found = [getattr(owner, "generator", None) for owner in owners]
        self._generators = [(each, each.get_state()) for each in found if isinstance(each, torch.Generator)]
        is_known = all(type(each).__module__.startswith("torch.utils.data") for each in owners if each is not None)
        self._is_replayed = bool(self._generators) or not is_known
        self._epoch, self._states = -1, [state for _, state in self._generators]
        self._read: list[NDArray[np.int64]] = []
        try:
            self._length = len(sampler)
        except TypeError:
            raise DataError("data", self.name, "is a sampler without a length", "give it a __len__") from None

    def __len__(self) -> int:
        """Samples of an epoch; of a batch sampler, batches."""
        return self._length

    def get_batches(self, seed: int, epoch: int) -> list[NDArray[np.int64]]:
        """The batches of an epoch; of a sampler of single indices, one with all of them. Raises DataError."""
        if epoch != self._epoch:
            if epoch < self._epoch or not self._is_replayed:
                self._epoch, self._states = -1, [state for _, state in self._generators]
            first = self._epoch + 1 if self._is_replayed else epoch
            for each in range(first, epoch + 1):
                self._read = self._read_epoch(seed, each)
            self._epoch = epoch
        return self._read

    def _read_epoch(self, seed: int, epoch: int) -> list[NDArray[np.int64]]:
        with preserve_rng(has_cuda=False):
            seed_all(seed, epoch, 0)
            for (generator, _), state in zip(self._generators, self._states, strict=True):
                generator.set_state(state)
            if any(generator is self._loaders for generator, _ in self._generators):
                torch.empty((), dtype=torch.int64).random_(generator=self._loaders)
            if hasattr(self._sampler, "set_epoch"):
                self._sampler.set_epoch(epoch)
            given = list(self._sampler)
            self._states = [generator.get_state() for generator, _ in self._generators]
            for generator, begin in self._generators:
                generator.set_state(begin)
        if len(given) < self._length:
            problem = f"yields {len(given)} in epoch {epoch + 1}, less than its length of {self._length}"
            raise DataError("data", self.name, problem, "let its __len__ tell how much it yields")
        return [to_indices(each) for each in given] if self.gives_batches else [to_indices(given)]


def to_indices(given: Iterable[Any]) -> NDArray[np.int64]:
    """[N]"""
    return np.fromiter((int(each) for each in given), np.int64)
