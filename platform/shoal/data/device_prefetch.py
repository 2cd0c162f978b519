"""Copies batches to the device while the device computes. Called by the loader."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.batch_tree import map_tensors
from shoal.data.dataset import Batch


class DeviceTransfer(Protocol):
    """Copies batches to a device, in two halves; `ahead` batches are started before the current one is finished."""

    ahead: int

    def begin(self, batch: Batch) -> Any: ...

    def finish(self, moving: Any) -> Batch: ...


class NoTransfer:
    """The CPU: no copy is needed."""

    ahead = 0

    def begin(self, batch: Batch) -> Any:
        return batch

    def finish(self, moving: Any) -> Batch:
        return moving


class SyncTransfer:
    """A device without streams of its own: a plain copy."""

    ahead = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, batch: Batch) -> Any:
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
    if device.type == "cpu":
        return NoTransfer()
    if device.type == "cuda":
        return PinnedTransfer(device, pin is not False)
    return SyncTransfer(device)
