"""Makes requested batches from a map-style dataset, with errors that name unreadable samples.

Called by the loader in the training process, or by a worker process, with the same result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import Subset, TensorDataset, default_collate, default_convert

from shoal.data.dataset import Batch, Collate, Source, has_shoal_method
from shoal.data.sampling.sampler import Indices, MapRequest, Request
from shoal.errors import DataError, ShoalError
from shoal.random_state import preserve_rng, seed_all

NUM_NAMED = 8  # sample indices that an error message lists


class ReadBatch(NamedTuple):
    """A batch, this rank's samples in it, and the samples of the full global batch. `state` is of an iterable."""

    batch: Batch
    num_samples: int
    num_global: int
    indices: Indices | None
    state: Any = None


class EpochEnd(NamedTuple):
    """Instead of a batch: the iterable has no more."""

    num_items: int  # yielded in this epoch, as far as this reader knows


class Reader(Protocol):
    """Makes batches. Picklable, so that a worker process can do it."""

    is_random: bool  # whether the dataset may draw random numbers

    def read(self, request: Any) -> ReadBatch | EpochEnd:
        """The requested batch. Raises DataError."""
        ...

    def close(self) -> None:
        """Release the source."""
        ...


class InProcessReader:
    """Reads in the training process, on request. The process's random state stays unchanged."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._plan: Iterator[Request] = iter(())

    def restart(self, plan: Iterator[Request], first_worker: int = 0) -> None:
        """Follow this plan from now on."""
        self._plan = plan

    def next(self) -> ReadBatch | EpochEnd:
        """The batch of the plan's next request. Raises DataError."""
        request = next(self._plan)
        if not self._reader.is_random:
            return self._reader.read(request)
        with preserve_rng(has_cuda=False):
            return self._reader.read(request)

    def pids(self) -> list[int]:
        return []

    def close(self) -> None:
        """Release the source."""
        self._reader.close()


class MapReader:
    """Reads a map-style dataset, a full batch at once if the dataset can.

    Random numbers of a dataset (augmentation) follow from (seed, epoch, the sample): the same for any number of workers
    and ranks, and after a resume. If it reads a full batch at once, or draws none (`deterministic = True`) while the
    collate function may, they follow from the batch's first sample.
    """

    def __init__(self, source: Source, collate: Collate | None, seed: int) -> None:
        self._source = source
        self._collate = collate
        self._seed = seed
        # Samples that are just rows of tensors: a subclass may augment them.
        self._is_tensor_dataset = (
            isinstance(source, TensorDataset)
            and not has_shoal_method(source, "batch")
            and not hasattr(source, "__getitems__")
            and type(source).__getitem__ is TensorDataset.__getitem__
        )
        inner = source
        while type(inner) is Subset:  # which always has `__getitems__`, and may read samples one by one
            inner = inner.dataset
        self._has_getitems = hasattr(inner, "__getitems__")
        self._has_batch_method = collate is None and has_shoal_method(source, "batch")
        self._is_source_random = not (getattr(source, "deterministic", False) or self._is_tensor_dataset)
        self.is_random = self._is_source_random or collate is not None

    def read(self, request: MapRequest) -> ReadBatch:
        """The batch of the request. Raises DataError naming the samples."""
        try:
            batch = self._make_batch(request.epoch, request.indices)
        except Exception as error:  # user code may raise anything; the error names the samples
            raise make_read_error(error, self._source, request.indices) from error
        return ReadBatch(batch, request.num_samples, request.num_global, request.indices)

    def close(self) -> None:
        """Nothing to release."""

    def _make_batch(self, epoch: int, indices: Indices) -> Batch:
        source = self._source
        if self._collate is None and self._is_tensor_dataset:
            chosen = torch.from_numpy(indices if indices.flags.writeable else indices.copy())
            rows = ((tensor, chosen.to(tensor.device)) for tensor in source.tensors)
            return tuple(tensor.index_select(0, places) for tensor, places in rows)  # a quarter of tensor[chosen]
        listed = indices.tolist()
        if self.is_random:
            seed_all(self._seed, epoch, listed[0])
        if self._has_batch_method:
            return default_convert(source.batch(indices))
        samples: Any = []
        if self._has_getitems:
            samples = source.__getitems__(listed)
        else:
            for index in listed:
                if self._is_source_random:
                    seed_all(self._seed, epoch, index)
                samples.append(source[index])
        if isinstance(samples, list) and len(samples) != len(listed):
            problem = f"gives {len(samples)} samples where {len(listed)} are asked for"
            remedy = "give one for each index: its __getitems__ does not"
            raise DataError("data", type(source).__name__, problem, remedy)
        collate: Collate = self._collate or default_collate
        return collate(samples)


def make_read_error(error: Exception, source: Source, indices: Indices | None) -> DataError:
    """`error` as a DataError, with its samples."""
    place = "" if indices is None else f" (in samples {format_samples(indices)})"
    if isinstance(error, DataError):
        return DataError(error.field, error.value, error.problem + place, error.remedy)
    words = str(error) if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
    remedy = "" if indices is None else f"try dataset[{int(indices[0])}] and its neighbours by hand"
    return DataError("data", type(source).__name__, f"cannot be read{place}: {words}", remedy)


def format_samples(indices: Indices) -> str:
    """A few of them, for a message."""
    named = ", ".join(str(index) for index in indices[:NUM_NAMED].tolist())
    return f"{named}, ... {len(indices)} in all" if len(indices) > NUM_NAMED else named
