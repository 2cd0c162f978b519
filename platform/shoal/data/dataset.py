"""The data of a Task, and the kinds of dataset that Shoal reads.

Owns `Data` and the distinction of the kinds. Called by Tasks and by the loader. Opens nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler, Subset, default_collate
from torch.utils.data.distributed import DistributedSampler

from shoal.data.sampling.sampler import SamplerOrder
from shoal.errors import ConfigError

Source = Any  # map-style (`__len__`, `__getitem__`), iterable (`__iter__`), or a stream of messages (`poll`, `commit`)
Batch = Any  # a tensor, or a tuple, list or dict of tensors; dimension 0 is the sample
Collate = Callable[[list[Any]], Batch]

# First parameter names of other libraries' methods with the same names (Hugging Face's datasets, tf.data).
_OTHER_LIBRARIES = {"batch": "batch_size", "shard": "num_shards"}


@dataclass(frozen=True)
class LoaderSettings:
    """What a DataLoader of torch says beside its dataset.

    batch_size:  of a batch sampler that has none, the mean
    shuffle:     whether the order is random, by (seed, epoch); None: as the run's `loader.shuffle` says
    order:       that of a sampler of the user's own
    """

    collate: Collate | None = None
    batch_size: int | None = None
    shuffle: bool | None = None
    order: SamplerOrder | None = None
    drop_last: bool = True


@dataclass(frozen=True)
class Data:
    """The datasets of a Task, and how samples become a batch (None: stacked, as torch's `default_collate` does).

    A map-style dataset may have `batch(indices) -> batch`, which makes a full batch at once (`indices` is an int64
    NumPy array), or torch's `__getitems__(indices) -> list of samples`. With `collate`, the loader only reads samples.

    Each may be a DataLoader of torch: its dataset takes its place here. Its batch size is that of the whole group,
    unless the run says another; its order, sampler, collate function and `drop_last` are those of training. For
    validation and test data, every sample that its sampler gives counts once.

    notes: what a run says of its data when it begins, each a line
    """

    train: Source
    validation: Source | None = None
    test: Source | None = None
    collate: Collate | None = None
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    _settings: dict[str, LoaderSettings] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for part in ("train", "validation", "test"):
            loader = getattr(self, part)
            if isinstance(loader, DataLoader) and loader.batch_sampler is not None:
                collate = self.collate
                source = loader.dataset
                sampler = loader.sampler
                is_own_batches = loader.batch_size is None
                size = getattr(loader.batch_sampler, "batch_size", None) if is_own_batches else loader.batch_size
                shuffle, order = False, None
                if isinstance(source, IterableDataset):
                    pass
                elif is_own_batches:
                    order = SamplerOrder(loader.batch_sampler, gives_batches=True, loaders=loader.generator)
                elif type(sampler) is RandomSampler and not sampler.replacement and sampler.generator is None:
                    shuffle = sampler.num_samples == length_of(source)
                    order = None if shuffle else SamplerOrder(sampler, gives_batches=False, loaders=loader.generator)
                elif isinstance(sampler, DistributedSampler):  # the loader divides each batch itself
                    shuffle = sampler.shuffle
                elif type(sampler) is not SequentialSampler:
                    order = SamplerOrder(sampler, gives_batches=False, loaders=loader.generator)
                if part != "train" and order is not None:
                    source = Subset(source, [index for each in order.get_batches(0, 0) for index in each.tolist()])
                    order = None
                if order is not None and size is None:
                    size = max(1, round(sum(map(len, order.get_batches(0, 0))) / len(order)))
                if loader.collate_fn is not default_collate:
                    collate = loader.collate_fn
                dataset = source
                self._settings[part] = LoaderSettings(collate, size, shuffle, order, loader.drop_last)
                object.__setattr__(self, part, dataset)

    def get_settings(self, part: Literal["train", "validation", "test"]) -> LoaderSettings:
        """How the samples of a part become batches."""
        return self._settings.get(part) or LoaderSettings(self.collate)


def is_iterable(source: Source) -> bool:
    """False for a map-style dataset. Raises ConfigError for anything but a dataset, or one that yields batches."""
    if isinstance(source, DataLoader) and source.batch_sampler is not None:
        remedy = "give its dataset, and its collate function as Data(collate=...)"
        raise ConfigError("data", type(source).__name__, "gives batches, and not samples", remedy)
    if isinstance(source, IterableDataset) or is_stream(source):
        return True
    is_frame = hasattr(source, "iloc") and hasattr(source, "columns")
    if is_frame or (isinstance(source, Mapping) and 0 not in source):
        remedy = "give one of its entries, or its columns as torch's StackDataset(name=tensor, ...)"
        raise ConfigError("data", type(source).__name__, "is read by names, and not by numbers of samples", remedy)
    if hasattr(source, "__len__") and (hasattr(source, "__getitem__") or has_shoal_method(source, "batch")):
        return False
    if hasattr(source, "__next__"):
        remedy = "give an object whose __iter__ begins anew (a torchdata node: wrap it in torchdata.nodes.Loader)"
        raise ConfigError("data", type(source).__name__, "is an iterator, which is spent after one epoch", remedy)
    if hasattr(source, "__iter__") or has_shoal_method(source, "shard") or hasattr(source, "batches"):
        return True
    remedy = "give it __len__ and __getitem__, or __iter__"
    raise ConfigError("data", type(source).__name__, "is neither a map-style nor an iterable dataset", remedy)


def is_stream(source: Source) -> bool:
    """Whether it is a stream of messages (`shoal.sources`)."""
    return all(callable(getattr(source, name, None)) for name in ("open", "poll", "commit"))


def has_shoal_method(source: Source, name: Literal["batch", "shard"]) -> bool:
    """Whether the source has Shoal's method of this name, `batch(indices)` or `shard(index, count)`, and not another
    library's, such as `batch(batch_size)` and `shard(num_shards, index)` of Hugging Face's datasets."""
    method = getattr(source, name, None)
    if not callable(method):
        return False
    try:
        parameters = inspect.signature(method).parameters
    except (TypeError, ValueError):  # compiled: the signature is unknown
        return True
    return next(iter(parameters), "") != _OTHER_LIBRARIES[name]


def length_of(source: Source) -> int | None:
    """The number of samples; None for an iterable without a length, which may raise an error, as torch's do."""
    try:
        return len(source)
    except (TypeError, NotImplementedError):
        return None
