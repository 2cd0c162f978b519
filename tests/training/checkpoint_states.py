"""States to save, how two are compared, and what a Checkpointer has on disk; for the tests of checkpoints."""

import threading
from typing import Any

import pytest
import torch

from shoal.checkpoint import Checkpointer, Found, directory
from shoal.checkpoint.staging_buffer import StagingBuffer


def state_of(number: float, width: int = 5) -> dict[str, Any]:
    return {
        "model": {
            "layer.weight": torch.full((3, width), number),
            "layer.mask": torch.tensor([True, False, True]),
            "layer.half": torch.full((2, 2), number, dtype=torch.bfloat16),
            "count": torch.tensor(int(number)),
            "empty": torch.empty(0, 4),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(number), "exp_avg": torch.full((3, width), -number).T}},
            "param_groups": [{"lr": number / 7, "betas": (0.9, 0.999), "foreach": None, "params": [0]}],
        },
        "best": float("inf"),
    }


def assert_equal(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    else:
        assert one == other


def newest(checkpointer: Checkpointer) -> Found:
    found = checkpointer.latest()
    assert found is not None
    return found


def best_step(checkpointer: Checkpointer) -> int | None:
    found = checkpointer.best()
    return None if found is None else found.step


def names(checkpointer: Checkpointer) -> list[str]:
    checkpointer.wait()
    return sorted(path.name for path in checkpointer.folder.iterdir())


class Gate:
    """Holds the background thread in front of a shard."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        real = directory.write_file
        monkeypatch.setattr(directory, "write_file", lambda *words: self.open.wait(10.0) and real(*words))


class Copying:
    """Holds the background thread in front of what `save` has left to be copied."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        real = StagingBuffer.finish_copy

        def held(staging: StagingBuffer) -> None:
            self.go.wait(10.0)
            real(staging)

        monkeypatch.setattr(StagingBuffer, "finish_copy", held)
