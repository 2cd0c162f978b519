"""The batches of one rank, in an exact order that survives a stop at any step.

Owns the position in the data, counted in samples of the whole group, and the time spent waiting. Called by the
Trainer. Never communicates: every rank works out its own share.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch

from shoal.data.order import MapOrder, Share
from shoal.data.reader import Made, MapReader
from shoal.data.source import Batch, Collate, Source, is_iterable
from shoal.data.spec import LoaderSpec
from shoal.errors import ConfigError, DataError, SpecMismatch


class Loader:
    """Gives this rank's share of each global batch, on the device.

        loader = Loader(data.train, batch_size=64, share=(rank, num_ranks), seed=0)
        for batch in loader:            # to the end of the epoch; the next `for` is the next epoch
            ...

    batch_size: of the whole group; every rank gets a contiguous part of it
    drop_last:  training: an incomplete last global batch is left out, so that every step is over equally many samples.
                Evaluation (`shuffle=False, drop_last=False`): every sample is given once; of the last batch a rank may
                get fewer, or none. A rank with none gets one filler sample and `num_samples == 0`: it takes part in
                the step, and its mean counts with weight 0.
    After each batch: `num_samples` (this rank's), `num_global`, `indices` (None for an iterable), `wait_s` (so far).
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
    ) -> None:
        self.spec = spec or LoaderSpec()
        self.device = torch.device(device)
        self.epoch = 0
        self.position = 0
        self.wait_s = 0.0
        self.num_samples = self.num_global = 0
        self.last_indices: list[int] | None = None
        shuffle = self.spec.shuffle if shuffle is None else shuffle
        num_samples = _count(source, batch_size, Share(*share), drop_last)
        self._order = MapOrder(num_samples, batch_size, Share(*share), seed, shuffle, drop_last)
        self._reader = MapReader(source, collate, seed)

    @property
    def num_batches(self) -> int | None:
        """Of a whole epoch, the same on every rank; None when an iterable does not tell."""
        return self._order.num_batches

    def __len__(self) -> int:
        return self._order.num_batches

    def __iter__(self) -> Iterator[Batch]:
        """From the position to the end of the epoch; then the position is the next epoch's beginning."""
        while (made := self._next()) is not None:
            self.position += made.num_global
            self.num_samples, self.num_global = made.num_samples, made.num_global
            self.last_indices = None if made.indices is None else made.indices[: made.num_samples].tolist()
            yield made.batch
        self.seek(self.epoch + 1)

    def _next(self) -> Made | None:
        began_s = time.perf_counter()
        request = self._order.request(self.epoch, self.position)
        made = None if request is None else self._reader.read_inline(request)
        self.wait_s += time.perf_counter() - began_s
        return made

    def seek(self, epoch: int, position: int = 0) -> None:
        """Go on from `position` global samples of `epoch`."""
        self.epoch, self.position = epoch, position

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands, in global samples: any number of ranks, workers or samples per batch goes on there.

        Taken within the last step of an epoch and loaded again, it gives one empty iteration: the end of the epoch.
        """
        order = self._order
        return {
            "kind": "map",
            "epoch": self.epoch,
            "position": self.position,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "num_samples": order.num_samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state` was taken. Raises SpecMismatch when the order of the samples is not the same any more."""
        mine = self.state_dict()
        for name in ("kind", "num_samples", "shuffle", "seed"):
            if state.get(name) != mine[name]:
                problem = f"the position was taken with {name} = {state.get(name)!r}: samples would repeat or be missed"
                raise SpecMismatch(f"data.{name}", mine[name], problem, "resume with what the run began with")
        self.seek(state["epoch"], state["position"])

    def close(self) -> None:
        """End the workers. May be called again."""


def _count(source: Source, batch_size: int, share: Share, drop_last: bool) -> int:
    """The number of samples. Raises ConfigError or DataError when they do not make one batch for every rank."""
    if batch_size < 1 or (drop_last and batch_size % share.size):
        near = max(batch_size // share.size, 1) * share.size
        problem = f"does not divide by {share.size} data ranks"
        raise ConfigError("batch_size", batch_size, problem, f"for example {near} or {near + share.size}")
    name = type(source).__name__
    if is_iterable(source):
        raise ConfigError("data", name, "is iterable", "give it __len__ and __getitem__")
    num_samples = len(source)
    if not num_samples:
        raise DataError("data", name, "is empty")
    if drop_last and num_samples < batch_size:
        problem = f"has {num_samples} samples, not one whole batch of {batch_size}"
        raise DataError("data", name, problem, f"set batch_size to {num_samples} or less")
    return num_samples
