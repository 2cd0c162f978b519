"""Makes batches from an iterable dataset: the same for any number of ranks and workers, if possible.

    plain      `__iter__`: every reader iterates the full stream and keeps its share of each global batch, so that
               batch k is the k-th B samples of the stream, as with a map-style dataset
    sharded    `shard(index, count)` and `__len__` (in total): an iterable of one share; each of ranks x workers
               reads its own. For training only; the number of batches is what every share of an equal division has
    batching   `batches(batch_size, *, epoch, drop_last, share)`: this rank's batches, made elsewhere (Ray Data)

A dataset, or its iterator, with `state_dict` and `load_state_dict` (torchdata's `Stateful`) is restored from its state;
for any other, a resume reads over the earlier samples. `set_epoch(epoch)` is called if it exists. Called by the loader,
in the training process or in a worker.

Random numbers of `shard` itself are the same on every rank and worker, so that all divide the same order; those of its
iterables follow from the position of this rank's part in the epoch.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch.utils.data import default_collate, default_convert

from shoal.batch_tree import tensors_of
from shoal.data.dataset import Batch, Collate, Source, has_shoal_method, length_of
from shoal.data.readers.map_reader import EpochEnd, ReadBatch, make_read_error
from shoal.data.sampling.sampler import PREVIOUS_EPOCH, RankShare, StreamRequest
from shoal.errors import ConfigError, DataError
from shoal.random_state import seed_all


@dataclass
class StreamReader(ABC):
    """The common part of the three kinds. `_at` is the position in the epoch, in global samples."""

    source: Source
    collate: Collate | None
    seed: int
    batch_size: int  # global
    share: RankShare
    drop_last: bool
    num_workers: int  # 0 and 1 alike: one reader per rank

    is_replicated = False  # whether every rank and worker sees the same stream, so that one position serves all

    def __post_init__(self) -> None:
        self.is_random = self.collate is not None or not getattr(self.source, "deterministic", False)
        self.stride = max(self.num_workers, 1)
        self._at = 0
        self._iterator: Iterator[Any] = iter(())
        self._stateful: Any = None  # the object with a state: the iterator, or its dataset

    def read(self, request: StreamRequest) -> ReadBatch | EpochEnd:
        """The batch of the request; this reader's requests come in order. Raises DataError."""
        try:
            if request.restart:
                self._at = self._get_start(request)
                self._seed(request, 0)
                if hasattr(self.source, "set_epoch"):
                    self.source.set_epoch(request.epoch)
                stream = self._open(request)
                self._seed(request, self._get_seed_position())
                self._iterator = iter(stream)
                if request.state is not None:
                    self._at, state = copy.deepcopy(request.state)  # the dataset may modify it after loading
                    if _has_state_dict(self._iterator):
                        self._iterator.load_state_dict(state)  # type: ignore[attr-defined]
                    elif _has_state_dict(stream):
                        stream.load_state_dict(state)
                        self._iterator = iter(stream)
                    if self._at == PREVIOUS_EPOCH:
                        deque(self._iterator, maxlen=0)  # the samples that filled no batch there
                        self._at = self._get_start(request)
                        self._seed(request, self._get_seed_position())
                        self._iterator = iter(stream)
                self._stateful = next((each for each in (self._iterator, stream) if _has_state_dict(each)), None)
            while self._at < request.position and self._take_samples(request):
                pass
            return self._make_batch(request)
        except Exception as error:  # user code may raise anything; reported as the data's error
            raise make_read_error(error, self.source, None) from error

    @property
    def has_epoch_state(self) -> bool:
        """Whether the dataset's state may include the epoch, which is not set from outside."""
        return self.is_replicated and not hasattr(self.source, "set_epoch")

    def close(self) -> None:
        """Release the stream: an unfinished generator ends now, and not at the interpreter's exit."""
        left, self._iterator = self._iterator, iter(())
        if isinstance(left, Generator):  # anything else may be the dataset itself, which is read again
            left.close()

    def _get_start(self, request: StreamRequest) -> int:
        return 0

    def _take_samples(self, request: StreamRequest, wanted: int | None = None) -> list[Any]:
        """The next samples of the stream, at most up to the request's position, or as many as `wanted`."""
        self._seed(request, self._get_seed_position())
        taken = list(islice(self._iterator, wanted or self._count_unread(request)))
        self._at += self._count_advance(len(taken))
        return taken

    def _seed(self, request: StreamRequest, position: int) -> None:
        """Seed the dataset's random numbers by its position. If it draws none, the process's random state is left
        alone, since nothing would restore it: see `InProcessReader`."""
        if self.is_random:
            seed_all(self.seed, request.epoch, position)

    def _get_seed_position(self) -> int:
        """The position of the next samples: readers of different samples never share one."""
        each = self.batch_size // self.share.size
        return self._at if self.is_replicated else self._at + self.share.rank * each

    def _state(self) -> tuple[int, Any] | None:
        """The present state; a copy, since the dataset may modify its own."""
        return None if self._stateful is None else (self._at, copy.deepcopy(self._stateful.state_dict()))

    def _count_unread(self, request: StreamRequest) -> int:
        return min(self.batch_size, request.position - self._at)

    def _count_advance(self, num_taken: int) -> int:
        return num_taken

    @abstractmethod
    def _open(self, request: StreamRequest) -> Any:
        """The iterable for this reader."""

    @abstractmethod
    def _make_batch(self, request: StreamRequest) -> ReadBatch | EpochEnd:
        """The batch at the present position."""

    def _collate_samples(self, samples: list[Any]) -> Batch:
        collate: Collate = self.collate or default_collate
        return collate(samples)

    def _name(self) -> str:
        return type(self.source).__name__


class PlainReader(StreamReader):
    """Iterates the full stream, and keeps this rank's share."""

    is_replicated = True

    def _open(self, request: StreamRequest) -> Any:
        return self.source if hasattr(self.source, "__iter__") else self.source.shard(0, 1)

    def _make_batch(self, request: StreamRequest) -> ReadBatch | EpochEnd:
        samples = self._take_samples(request, self.batch_size)
        length = length_of(self.source) if len(samples) < self.batch_size else None
        if length is not None and self._at < length:
            problem = f"has yielded {self._at} samples, and says that it has {length}"
            raise DataError("data", self._name(), problem, "let its __len__ tell the truth")
        if not samples or (self.drop_last and len(samples) < self.batch_size):
            return EpochEnd(self._at)
        part = self.share.get_slice(len(samples))
        mine = samples[part] or samples[-1:]  # a rank without a share uses a filler
        if self.collate is not None:  # all ranks have the same samples, and each collates its own part
            self._seed(request, -1 - (self._at - len(samples) + part.start))
        return ReadBatch(self._collate_samples(mine), part.stop - part.start, len(samples), None, self._state())


class ShardReader(StreamReader):
    """Iterates one share of the stream, which no other reader sees."""

    def _open(self, request: StreamRequest) -> Any:
        shard = self.share.rank * self.stride + request.position // self.batch_size % self.stride
        return self.source.shard(shard, self.share.size * self.stride)

    def _get_start(self, request: StreamRequest) -> int:
        return request.position // self.batch_size % self.stride * self.batch_size

    def _count_unread(self, request: StreamRequest) -> int:
        return self.batch_size // self.share.size

    def _count_advance(self, num_taken: int) -> int:
        return self.batch_size * self.stride

    def _make_batch(self, request: StreamRequest) -> ReadBatch | EpochEnd:
        each = self.batch_size // self.share.size
        of_each_share = len(self.source) // (self.share.size * self.stride)
        if request.position // self.batch_size >= of_each_share // each * self.stride:
            return EpochEnd(len(self.source))
        samples = self._take_samples(request, each)
        if len(samples) < each:
            problem = f"yields too few samples: one of its shares has less than {of_each_share}"
            raise DataError("data", self._name(), problem, "let shard() divide equally, and __len__ tell the truth")
        return ReadBatch(self._collate_samples(samples), each, self.batch_size, None, self._state())


class BatchesReader(StreamReader):
    """Takes batches that are made elsewhere."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_workers:
            problem = f"{self._name()} makes its batches in processes of its own"
            raise ConfigError("loader.workers", self.num_workers, problem, "set loader.workers=0")
        if self.collate is not None:
            raise ConfigError("collate", self.collate, f"{self._name()} gives batches, not samples", "leave it out")

    def _open(self, request: StreamRequest) -> Any:
        size = self.batch_size // self.share.size
        return self.source.batches(size, epoch=request.epoch, drop_last=self.drop_last, share=self.share)

    def _count_unread(self, request: StreamRequest) -> int:
        return 1

    def _count_advance(self, num_taken: int) -> int:
        return self.batch_size

    def _make_batch(self, request: StreamRequest) -> ReadBatch | EpochEnd:
        taken = self._take_samples(request, 1)
        if not taken:
            return EpochEnd(0)
        batch = default_convert(taken[0])
        num_samples = next(tensors_of(batch)).shape[0]
        return ReadBatch(batch, num_samples, num_samples * self.share.size, None, self._state())


def make_stream_reader(
    source: Source,
    collate: Collate | None,
    seed: int,
    batch_size: int,
    share: RankShare,
    drop_last: bool,
    num_workers: int,
) -> StreamReader:
    kind: type[StreamReader] = PlainReader
    if hasattr(source, "batches"):
        kind = BatchesReader
    elif drop_last and has_shoal_method(source, "shard"):
        kind = ShardReader
        if length_of(source) is None:
            problem = "has shard(), but no length: ranks could not agree on the number of steps"
            raise ConfigError("data", type(source).__name__, problem, "give it __len__, of the whole")
    return kind(source, collate, seed, batch_size, share, drop_last, num_workers)


def _has_state_dict(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")
