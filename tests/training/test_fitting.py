"""Out of memory at a step: what is said to have fitted, for micro-steps, and where trying it is not possible."""

import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import OutOfMemory
from shoal.train.loop.oom import explain_error
from train_task import CLASSES, FEATURES, Toy
from training.toy_run import train_toy


class Bounded(nn.Module):
    """Runs out of memory at more than `most` samples; `least` of them it must have."""

    def __init__(self, most: int, least: int) -> None:
        super().__init__()
        self.most = most
        self.least = least
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, features: Tensor) -> Tensor:
        if len(features) > self.most:
            raise torch.OutOfMemoryError("tried to allocate")
        if len(features) < self.least:
            raise ValueError("Expected more than 1 value per channel when training")
        outputs: Tensor = self.layer(features)
        return outputs


class Large(Toy):
    def __init__(self, most: int, least: int = 1) -> None:
        super().__init__()
        self.most, self.least = most, least

    def model(self) -> nn.Module:
        return Bounded(self.most, self.least)


@pytest.mark.parametrize(
    ("most", "plan", "batch_size", "said"),
    [
        (7, {"accumulate": 2}, 32, "16 samples at a time .*; 4 would have fitted: multiply parallel.accumulate by 4"),
        (5, {"accumulate": 3}, 36, "12 samples at a time .*; 3 would have fitted: multiply parallel.accumulate by 4"),
        (1, {"accumulate": 2}, 40, "20 samples at a time .*; 1 would have fitted: multiply parallel.accumulate by 20"),
        (13, {}, 50, "50 samples at a time .*; 12 would have fitted: multiply parallel.accumulate by 5"),
        (26, {}, 49, "49 samples at a time .*; 24 would have fitted: multiply parallel.accumulate by 7"),
        (0, {"accumulate": 2}, 32, "not even one would have fitted"),
    ],
)
def test_what_would_have_fitted_is_a_micro_step_that_divides_the_batch(
    tmp_path: Path, most: int, plan: dict[str, int], batch_size: int, said: str
) -> None:
    with pytest.raises(OutOfMemory, match=said):
        train_toy(tmp_path, Large(most), parallel=plan, batch_size=batch_size)


def test_what_a_smaller_batch_raises_does_not_hide_that_memory_ran_out(tmp_path: Path) -> None:
    with pytest.raises(OutOfMemory, match=r"32 samples at a time .*\. Raise parallel\.accumulate, or lower batch_size"):
        train_toy(tmp_path, Large(most=1, least=2))


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
