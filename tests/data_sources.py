"""Datasets that worker processes can import."""

from __future__ import annotations

import atexit
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


class Numbers:
    """Sample i is (i, a random number, the process that made it)."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"inputs": index, "noise": torch.rand(()) + random.random() + np.random.rand(), "pid": os.getpid()}


class Deadly(Numbers):
    """Raises at sample 5, and ends its process at sample 9."""

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == 5:
            raise OSError("sector 5 is gone")
        if index == 9:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Leaving(Numbers):
    """The first of its batches cannot travel, and with the third its process ends, which takes a while."""

    def batch(self, indices: np.ndarray[Any, Any]) -> Any:
        if 4 in indices:
            atexit.register(time.sleep, 1.0)
            sys.exit(3)
        return {"inputs": threading.Lock() if 0 in indices else indices}


class Refusing(Numbers):
    """Is of an object that says itself that it cannot travel."""

    def __getstate__(self) -> Any:
        raise OSError("this file is of another process")


class Held:
    """Holds an array that every worker reads in the same memory."""

    deterministic = True

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.values = values

    def __len__(self) -> int:
        return len(self.values)

    def batch(self, indices: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return self.values[indices]


class Stream:
    """0, 1, 2, ... with noise, in an order of each epoch's own; the sum so far is a state that must be kept."""

    def __init__(self, num_samples: int, stateful: bool) -> None:
        self.num_samples = num_samples
        self.stateful = stateful
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return Counting(self) if self.stateful else counted(self)


def counted(stream: Stream) -> Iterator[dict[str, Any]]:
    for number in range(stream.num_samples):
        yield {"inputs": 1000 * stream.epoch + number, "noise": torch.rand(())}


class Counting:
    """An iterator with a state; it cannot be read over, because it counts how often it was asked."""

    asked = 0

    def __init__(self, stream: Stream) -> None:
        self.stream, self.next = stream, 0

    def __iter__(self) -> Counting:
        return self

    def __next__(self) -> dict[str, Any]:
        if self.next == self.stream.num_samples:
            raise StopIteration
        Counting.asked += 1
        self.next += 1
        return {"inputs": 1000 * self.stream.epoch + self.next - 1, "noise": torch.rand(())}

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Shards:
    """A stream that divides itself; `short` lets the last share be too short for the length that it tells."""

    def __init__(self, num_samples: int, short: int = 0) -> None:
        self.num_samples, self.short = num_samples, short

    def __len__(self) -> int:
        return self.num_samples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.num_samples))

    def shard(self, index: int, count: int) -> range:
        return range(index, self.num_samples - self.short * (index == count - 1), count)
