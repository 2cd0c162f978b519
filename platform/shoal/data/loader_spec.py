"""How a run's data is loaded: the `loader` part of a TrainSpec. Called by specs and by the loader."""

from __future__ import annotations

from pydantic import Field

from shoal.config import Spec


class LoaderSpec(Spec):
    """How batches are made and brought to the device.

    workers:   processes of each rank that make batches; 0: made in the training process, between two steps
    prefetch:  batches that each worker has ready or in the making; a socket holds some 250 messages, and with more than
               that under way loader and worker would wait for each other
    shuffle:   training data in an order that (seed, epoch) alone decides; validation data is never shuffled
    pin:       copy through pinned memory; None: when the device is CUDA
    timeout_s: after which a worker that gives no batch is given up
    """

    workers: int = Field(default=0, ge=0)
    prefetch: int = Field(default=2, ge=1, le=128)
    shuffle: bool = True
    pin: bool | None = None
    timeout_s: float = Field(default=600.0, gt=0)
