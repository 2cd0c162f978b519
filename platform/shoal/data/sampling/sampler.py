"""The samples of each batch: pure functions of (seed, epoch, position), the same for any number of ranks.

The order of an epoch is the stable argsort of N raw 64-bit draws of Philox keyed by (seed, epoch). NumPy guarantees
that bit stream for all time, which it does not for `Generator.permutation`. Step k of the epoch is
`order[k * B : (k + 1) * B]`, and each rank takes its contiguous share of that; of samples with sizes, such as trees, as
much as the others rather than as many. A sampler of torch gives an order of its own (`SamplerOrder`).

Called by the loader, and by `Data`. Reads no sample.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.batch_tree import balance_by_size
from shoal.errors import DataError
from shoal.random_state import preserve_rng, seed_all

Indices = NDArray[np.int64]
PREVIOUS_EPOCH = -1  # instead of a position: the end of the previous epoch
_WORD = 2**64 - 1


class RankShare(NamedTuple):
    """Rank `rank` of `size`, for which a part of each global batch is made."""

    rank: int
    size: int

    def get_slice(self, count: int) -> slice:
        """This rank's part of `count` samples: contiguous; the first `count % size` ranks have one more."""
        each, rest = divmod(count, self.size)
        start = self.rank * each + min(self.rank, rest)
        return slice(start, start + each + (self.rank < rest))


class MapRequest(NamedTuple):
    """One batch of a map-style dataset. `num_samples` is 0 for a rank without a share: its only index is a filler."""

    epoch: int
    position: int  # global samples of the epoch before this batch
    num_global: int
    num_samples: int
    indices: Indices


class StreamRequest(NamedTuple):
    """The batch of an iterable that begins after `position` global samples of the epoch.

    restart: from a fresh iterator; with `state` from its place, (position, the dataset's own state); a state at
             PREVIOUS_EPOCH is of the end of that epoch, after which this one begins
    """

    epoch: int
    position: int
    restart: bool
    state: tuple[int, Any] | None
    indices: None = None


Request = MapRequest | StreamRequest


@lru_cache(maxsize=2)
def compute_permutation(num_samples: int, seed: int | None, epoch: int) -> Indices:
    """The order of an epoch, [num_samples]; without a seed, as it is. Read-only."""
    if seed is None:
        order = np.arange(num_samples)
        order.flags.writeable = False
        return order
    draws = np.random.Philox(key=np.array([seed & _WORD, epoch & _WORD], dtype=np.uint64)).random_raw(num_samples)
    order = np.argsort(draws, kind="stable").astype(np.int64, copy=False)
    order.flags.writeable = False
    return order


class MapOrder(NamedTuple):
    """The batches of a map-style dataset for one rank."""

    num_samples: int
    batch_size: int  # global
    share: RankShare
    seed: int
    shuffle: bool
    drop_last: bool
    sizes: Indices | None = None  # of each sample: ranks get shares of about equal size, and not of equally many
    order: SamplerOrder | None = None  # instead of `shuffle`; batch k of a batch sampler is at position k * batch_size

    def num_global(self, position: int) -> int:
        """The samples of the global batch at `position`; 0 when the epoch is over."""
        rest = max(self.num_samples - position, 0)
        return self.batch_size if rest >= self.batch_size else 0 if self.drop_last else rest

    @property
    def num_batches(self) -> int:
        """Of a full epoch, the same on every rank."""
        whole, rest = divmod(self.num_samples, self.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def make_request(self, epoch: int, position: int) -> MapRequest | None:
        """This rank's share of the global batch at `position`; None when the epoch is over."""
        if not self.num_global(position):
            return None
        everyone = self._get_batch(epoch, position)
        count = len(everyone)
        if self.sizes is not None and count >= self.share.size > 1:
            mine = everyone[balance_by_size(self.sizes[everyone], self.share.size) == self.share.rank]
            return MapRequest(epoch, position, count, len(mine), mine)
        part = self.share.get_slice(count)
        num_samples = part.stop - part.start
        if not num_samples:  # its rank must still step, because steps are collective
            part = slice(count - 1, count)
        return MapRequest(epoch, position, count, num_samples, everyone[part].copy())

    def _get_batch(self, epoch: int, position: int) -> Indices:
        """The samples of the global batch. Read-only."""
        if self.order is not None and self.order.gives_batches:
            return self.order.get_batches(self.seed, epoch)[position // self.batch_size]
        if self.order is not None:
            samples = self.order.get_batches(self.seed, epoch)[0]
        else:
            seed, shuffled = (self.seed, epoch) if self.shuffle else (None, 0)
            samples = compute_permutation(self.num_samples, seed, shuffled)
        return samples[position : position + self.num_global(position)]


class SamplerOrder:
    """The order of a sampler, or of a batch sampler, whose random numbers follow from (seed, epoch): the same on every
    rank, and after a resume.

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
