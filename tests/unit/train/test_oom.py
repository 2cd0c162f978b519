"""Out of memory: the size that fits is found with the memory of the failed step released."""

from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import torch

from shoal.errors import OutOfMemory
from shoal.train.loop.oom import explain_error


class Activations:
    """What a frame of the failed step has in it."""


def fail(left: list[weakref.ref[Activations]]) -> None:
    activations = Activations()
    left.append(weakref.ref(activations))
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def test_a_smaller_batch_is_tried_without_the_failed_steps_tensors() -> None:
    left: list[weakref.ref[Activations]] = []
    tried: list[int] = []

    def train_step(batch: torch.Tensor, step: int) -> None:
        assert left[0]() is None
        tried.append(len(batch))
        if len(batch) > 2:
            fail([])

    parts: Any = SimpleNamespace(
        spec=SimpleNamespace(parallel=SimpleNamespace(accumulate=1)),
        degrees=SimpleNamespace(workers=1),
        model=SimpleNamespace(train_step=train_step),
    )
    try:
        fail(left)
    except RuntimeError as error:
        found = explain_error(error, parts, torch.zeros(16, 3), 4)
    assert tried == [8, 4, 2]
    assert isinstance(found, OutOfMemory)
    assert "step 5: the memory is too small for 16 samples" in str(found)
    assert "2 would have fitted: multiply parallel.accumulate by 8" in str(found)
