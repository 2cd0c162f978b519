"""The batches of one rank, in an exact order that can be resumed at any step.

Owns the data position, counted in samples over all ranks, and the time spent waiting. Called by the Trainer. Never
communicates: every rank computes its own share.
"""

from __future__ import annotations

import operator
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate

from shoal.batch_tree import map_tensors
from shoal.data.dataset import Batch, Collate, Data, Source, is_iterable, is_stream, length_of
from shoal.data.loader_spec import LoaderSpec
from shoal.data.readers.iterable_reader import make_stream_reader
from shoal.data.readers.map_reader import EpochEnd, InProcessReader, MapReader, ReadBatch, Reader
from shoal.data.readers.message_dataset import MessageDataset
from shoal.data.sampling.epoch_plan import EpochPlan, MapEpochPlan, StreamEpochPlan
from shoal.data.sampling.sampler import Indices, MapOrder, RankShare, SamplerOrder
from shoal.data.workers.pool import WorkerPool
from shoal.errors import ConfigError, DataError


class Loader:
    """Yields this rank's share of each global batch, on the device.

        loader = Loader(data.train, batch_size=64, share=(rank, num_ranks), seed=0)
        for batch in loader:            # to the end of the epoch; the next `for` is the next epoch
            ...

    batch_size: over all ranks; every rank gets a contiguous part of it. If the dataset has `sample_sizes`, an array of
                the size of each sample (the nodes of a tree), ranks get parts of about equal size, and `relative_share`
                says by how much the number of samples differs
    share:      (rank, number of ranks); ranks count from 0
    drop_last:  training: an incomplete last global batch is left out, so that every step is over equally many samples.
                Evaluation (`shuffle=False, drop_last=False`): every sample is given once; of the last batch a rank may
                get fewer, or none. A rank with none gets one filler sample and `num_samples == 0`: it takes part in
                the step, and its mean counts with weight 0.
    order:      of a map-style dataset, from a sampler of torch, in place of `shuffle`; a batch sampler's batches are
                the global ones, of any sizes
    After each batch: `num_samples`, `last_indices` (of this rank; None for an iterable), `num_global`, `wait_s`, and
    `host_batch`, which is not on the device.
    """

    def __init__(
        self,
        source: Source,
        *,
        batch_size: int,
        share: tuple[int, int] = (0, 1),
        seed: int = 0,
        spec: LoaderSpec | None = None,
        device: torch.device | str = "cpu",
        collate: Collate | None = None,
        shuffle: bool | None = None,
        drop_last: bool = True,
        order: SamplerOrder | None = None,
    ) -> None:
        batch_size, seed = _as_int("batch_size", batch_size), _as_int("seed", seed)
        self.source, self.spec = source, spec or LoaderSpec()
        self.device = torch.device(device)
        self.epoch = self.position = self.num_samples = self.num_global = 0
        self.wait_s = 0.0
        self.last_indices: list[int] | None = None
        self.host_batch: Batch = None
        share = RankShare(*share)
        self._num_ranks = share.size
        if not 0 <= share.rank < share.size:
            remedy = "ranks are 0 to size - 1, as in (0, 2), (1, 2)"
            raise ConfigError("share", tuple(share), "is no rank of so many", remedy)
        if batch_size < 1 or ((drop_last or hasattr(source, "batches")) and batch_size % share.size):
            near = max(batch_size // share.size, 1) * share.size
            problem = f"does not divide by {share.size} data ranks"
            raise ConfigError("batch_size", batch_size, problem, f"for example {near} or {near + share.size}")
        shuffle = self.spec.shuffle if shuffle is None else shuffle
        self._messages: MessageDataset | None = None
        if is_stream(source):
            name = type(source).__name__
            if share.size > 1:
                problem = f"is a stream, which {share.size} data ranks cannot share"
                raise ConfigError("data", name, problem, "use workers=1")
            if self.spec.workers:
                problem = f"{name} is read in the training process"
                raise ConfigError("loader.workers", self.spec.workers, problem, "leave it out")
            source = self._messages = MessageDataset(source)
        reader: Reader
        self._epoch_plan: EpochPlan
        if is_iterable(source):
            reader = make_stream_reader(source, collate, seed, batch_size, share, drop_last, self.spec.workers)
            self._epoch_plan = StreamEpochPlan(reader)
        else:
            reader = MapReader(source, collate, seed)
            num_samples = _count_samples(source, batch_size, drop_last, order)
            sizes = _read_sample_sizes(source, len(source))
            ordered = MapOrder(num_samples, batch_size, share, seed, shuffle and order is None, drop_last, sizes, order)
            self._epoch_plan = MapEpochPlan(ordered)
        self._feed = WorkerPool(reader, self.spec) if self.spec.workers else InProcessReader(reader)
        self._transfer = make_transfer(self.device, self.spec.pin)
        self._in_flight: deque[ReadBatch | EpochEnd] = deque()
        self._is_feed_positioned = False  # whether the feed is at the position

    @property
    def num_batches(self) -> int | None:
        """Of a full epoch, the same on every rank; None for an iterable."""
        return self._epoch_plan.num_batches

    @property
    def is_stream(self) -> bool:
        """Whether the data is a stream of messages: `commit` acknowledges them."""
        return self._messages is not None

    @property
    def relative_share(self) -> float:
        """The samples of the last batch on this rank, relative to an equal division: the weight of its mean."""
        return self.num_samples * self._num_ranks / self.num_global if self.num_global else 1.0

    @property
    def state_is_per_rank(self) -> bool:
        """Whether every rank must save its own state (`shard`, `batches`); otherwise one state serves all."""
        return self._epoch_plan.is_per_rank

    def __iter__(self) -> Iterator[Batch]:
        """Yield from the position to the end of the epoch; then the position is the next epoch's beginning.

        Raises DataError, naming the samples if known.
        """
        while not self._epoch_plan.is_over(self.position):
            self._read_ahead(1 if self.is_stream else 1 + self._transfer.ahead)  # the next message may never come
            first = self._in_flight.popleft()
            self._is_feed_positioned = isinstance(first, ReadBatch)
            if isinstance(first, EpochEnd):
                self._epoch_plan.on_epoch_end(first, self.position)
                break
            self.host_batch, moving = first.batch
            batch = self._transfer.finish(moving)
            self._epoch_plan.on_batch_delivered(first, self.position)
            self.position = self._epoch_plan.advance(self.position, first.num_global)
            self.num_samples, self.num_global = first.num_samples, first.num_global
            self.last_indices = None if first.indices is None else first.indices[: first.num_samples].tolist()
            yield batch
        self.epoch, self.position = self.epoch + 1, 0

    def is_at_end(self) -> bool:
        """Whether the epoch has begun and has no further batch. Reads and stores an iterable's next batch for that.

        Raises DataError.
        """
        if not self.position or self.num_batches is not None:
            return self._epoch_plan.is_over(self.position)
        self._read_ahead(1)
        return isinstance(self._in_flight[0], EpochEnd)

    def _read_ahead(self, count: int) -> None:
        """Start copying so many batches to the device, or the remaining ones of the epoch and its end."""
        began_s = time.perf_counter()
        if not self._is_feed_positioned:
            self._in_flight.clear()
            requests = self._epoch_plan.iter_requests(self.epoch, self.position)
            self._feed.restart(requests, self._epoch_plan.worker_index(self.position))
        self._is_feed_positioned = False  # until this succeeds
        while len(self._in_flight) < count and not (self._in_flight and isinstance(self._in_flight[-1], EpochEnd)):
            item = self._feed.next()
            if isinstance(item, ReadBatch):
                item = item._replace(batch=(item.batch, self._transfer.begin(item.batch)))
            self._in_flight.append(item)
        self._is_feed_positioned = True
        self.wait_s += time.perf_counter() - began_s

    def seek(self, epoch: int, position: int = 0) -> None:
        """Continue from `position` global samples of `epoch`."""
        self._epoch_plan.reset()
        self.epoch = epoch
        self.position = position
        self._is_feed_positioned = False

    def state_dict(self) -> dict[str, Any]:
        """The data position, in global samples: any number of ranks, workers or samples per batch can resume from it
        (except `state_is_per_rank`). Prefetched batches that were not yielded do not count.

        Saved within the last step of an epoch and loaded again, it gives one empty iteration: the end of the epoch.
        """
        return {"epoch": self.epoch, "position": self.position, **self._epoch_plan.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state`. Raises SpecMismatch when the order of samples would differ."""
        self._epoch_plan.load_state_dict(state)
        self.epoch = state["epoch"]
        self.position = state["position"]
        self._is_feed_positioned = False

    def commit(self, state: dict[str, Any]) -> None:
        """Tell a stream of messages that a `state` is on the disk; nothing for other data."""
        if self._messages is not None and state["states"][0] is not None:
            self._messages.commit(state["states"][0][1])

    def close(self) -> None:
        """End the worker processes. Idempotent; the loader yields nothing more."""
        self._in_flight.clear()
        self._is_feed_positioned = False
        self._feed.close()
        if self._messages is not None:
            self._messages.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def make_loader(
    data: Data,
    part: Literal["train", "validation"],
    *,
    batch_size: int,
    spec: LoaderSpec | None = None,
    is_even: bool = False,
    **options: Any,
) -> Loader:
    """The Loader of a part, for training or for an evaluation, as its DataLoader of torch says, if it was one.

    is_even: every step needs the full batch: an incomplete last one is left out, whatever the DataLoader says
    options: of Loader

    Raises ConfigError and DataError.
    """
    found, spec = data.get_settings(part), spec or LoaderSpec()
    if part == "validation":
        options |= {"shuffle": False, "drop_last": False}
    else:
        if is_even and found.order is not None and found.order.gives_batches:
            problem = "is a batch sampler, and this run needs batches of one size"
            raise ConfigError("data.train", found.order.name, problem, "give batch_size and sampler instead")
        shuffle = spec.shuffle if found.shuffle is None else found.shuffle
        options |= {"shuffle": shuffle, "drop_last": found.drop_last or is_even, "order": found.order}
    return Loader(getattr(data, part), batch_size=batch_size, spec=spec, collate=found.collate, **options)


def _as_int(field: str, value: Any) -> int:
    """Convert NumPy's and torch's numbers too, which JSON cannot hold in the state. Raises ConfigError."""
    try:
        return operator.index(value)
    except TypeError:
        raise ConfigError(field, value, "is no whole number") from None


def _count_samples(source: Source, batch_size: int, drop_last: bool, order: SamplerOrder | None) -> int:
    """The number of samples; of a batch sampler, as if each batch had `batch_size`. Raises DataError when they do not
    fill one batch."""
    name = str(getattr(source, "file", type(source).__name__))
    num_samples = length_of(source)
    if num_samples is None:
        remedy = "give it a __len__, or, where nobody knows it, an __iter__ alone"
        raise DataError("data", name, "has no length", remedy)
    if order is not None:
        name, num_samples = order.name, len(order) * (batch_size if order.gives_batches else 1)
    if not num_samples:
        raise DataError("data", name, "is empty")
    if drop_last and num_samples < batch_size:
        problem = f"has {num_samples} samples, not one whole batch of {batch_size}"
        raise DataError("data", name, problem, f"set batch_size to {num_samples} or less")
    return num_samples


def _read_sample_sizes(source: Source, num_samples: int) -> Indices | None:
    """`sample_sizes` of the dataset, if it has them. Raises DataError."""
    given = getattr(source, "sample_sizes", None)
    if given is None:
        return None
    sizes = np.asarray(given)
    if sizes.shape != (num_samples,) or sizes.dtype.kind not in "iu" or (sizes < 0).any():
        problem = f"is of the shape {[*sizes.shape]} and type {sizes.dtype}, and there are {num_samples} samples"
        raise DataError("data.sample_sizes", type(source).__name__, problem, "give a whole number >= 0 for each sample")
    return sizes.astype(np.int64, copy=False)


def load_first_batch(
    data: Data, num_samples: int, device: torch.device | str = "cpu", *, is_exact: bool = False
) -> Batch:
    """The first `num_samples` samples of the training data, collated, or as many as there are. Raises DataError.

    is_exact: fewer samples are a DataError

    Of a stream it is one message, repeated, which is not consumed.
    """
    if is_stream(data.train):
        example = data.train.example()
        batch = (data.get_settings("train").collate or default_collate)(
            [getattr(example, "value", example)] * num_samples
        )
        return map_tensors(batch, lambda tensor: tensor.to(device))
    collate = data.get_settings("train").collate
    with Loader(
        data.train, batch_size=num_samples, device=device, collate=collate, shuffle=False, drop_last=is_exact
    ) as loader:
        return next(iter(loader))


class DeviceTransfer(Protocol):
    """Copies batches to a device, in two halves; `ahead` batches are started before the current one is finished."""

    ahead: int

    def begin(self, batch: Batch) -> Any: ...

    def finish(self, moving: Any) -> Batch: ...


class PlainTransfer:
    """A device without streams of its own: a plain copy, and none to the CPU."""

    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, batch: Batch) -> Any:
        if self._device.type == "cpu":
            return batch
        return map_tensors(batch, lambda tensor: tensor.to(self._device))

    def finish(self, moving: Any) -> Batch:
        return moving


class _InFlight(NamedTuple):
    batch: Batch
    arrived: torch.cuda.Event


class PinnedTransfer:
    """One batch ahead, through pinned memory, on a separate stream; the computing stream waits for its arrival.

    The pinned memory is torch's own pool, which keeps a block until the copy out of it is over.
    """

    ahead = 1

    def __init__(self, device: torch.device, pin: bool) -> None:
        self._device, self._pin = device, pin
        self._stream = torch.cuda.Stream(device)

    def begin(self, batch: Batch) -> _InFlight:
        with torch.cuda.stream(self._stream):

            def copy(tensor: Tensor) -> Tensor:
                source = tensor.pin_memory() if self._pin and can_be_pinned(tensor) else tensor
                return source.to(self._device, non_blocking=True)

            return _InFlight(map_tensors(batch, copy), self._stream.record_event())

    def finish(self, moving: _InFlight) -> Batch:
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(moving.arrived)
        # allocated on one stream, used on another: must not be reused before that use is over
        map_tensors(moving.batch, lambda tensor: tensor.record_stream(computing))
        return moving.batch


def can_be_pinned(tensor: Tensor) -> bool:
    """Host memory that is not pinned yet. Tensors that a dataset has put on a device need no copy."""
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_pinned()


def make_transfer(device: torch.device, pin: bool | None) -> DeviceTransfer:
    return PinnedTransfer(device, pin is not False) if device.type == "cuda" else PlainTransfer(device)
