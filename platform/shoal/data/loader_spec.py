"""The `loader` part of a TrainSpec. Used by specs and by the loader."""

from __future__ import annotations

from pydantic import Field

from shoal.config import Spec


class LoaderSpec(Spec):
    """How batches are read and copied to the device.

    workers:   reading processes of each rank; 0: batches are read in the training process, between two steps
    prefetch:  batches that each worker has ready or in progress; a socket holds some 250 messages, and with more in
               flight loader and worker would block each other
    shuffle:   shuffle training data by (seed, epoch) alone; validation data is never shuffled
    pin:       copy through pinned memory; None: when the device is CUDA
    timeout_s: until a worker without a batch counts as lost
    """

    workers: int = Field(default=0, ge=0)
    prefetch: int = Field(default=2, ge=1, le=128)
    shuffle: bool = True
    pin: bool | None = None
    timeout_s: float = Field(default=600.0, gt=0)
