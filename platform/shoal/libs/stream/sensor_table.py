"""What a stream's trainer knows of each sensor: its scaler, and the last messages with the LSTM's states.

Legend: S sensors, B of them in a batch, W positions of a ring, D values, H units, K steps of a window.

Called by `OnlineTrainer`. Message number n of a sensor, from 0, lies at position n % W of its ring.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.libs.stream.network import RunningMoments

FIRST_CAPACITY = 64  # sensors
SILENT_AFTER = 3  # times the longest pause so far


class Window(NamedTuple):
    """The last K steps of B sensors whose targets are known, aligned at their first step.

    features: [K, B, D + 1]
    targets:  [K, B] the change that came, in deviations
    is_known: [K, B] False where a sensor has sent fewer than K + horizon messages
    state:    ([B, H], [B, H]) of the LSTM before the first step, as it was when that message came
    """

    features: Tensor
    targets: Tensor
    is_known: Tensor
    state: tuple[Tensor, Tensor]


class SensorTable:
    """Rows of sensors, in the order of their first messages; grows by doubling. Arrays of NumPy, as answers need them.

    values:       [S, W] float64 first value of a message
    predictions:  [S, W] float64 forecast that was made at it
    features:     [S, W, D + 1], hidden, cell: [S, W, H] float32 input of the LSTM, and its state after it
    last_times_s: [S] float64
    """

    ARRAYS = (
        "counts",
        "means",
        "variances",
        "change_variances",
        "values",
        "predictions",
        "features",
        "hidden",
        "cell",
        "last_times_s",
    )

    def __init__(self, width: int, hidden: int, horizon: int, num_steps: int) -> None:
        self._horizon, self._num_steps = horizon, num_steps
        self._ring = num_steps + horizon + 1
        self._rows: dict[str, int] = {}
        size, ring = FIRST_CAPACITY, self._ring
        self.counts = np.zeros(size, np.int64)
        self.means, self.variances = np.zeros((size, width)), np.zeros((size, width))
        self.change_variances = np.zeros(size)
        self.values, self.predictions = np.zeros((size, ring)), np.zeros((size, ring))
        self.features = np.zeros((size, ring, width + 1), np.float32)
        self.hidden, self.cell = (np.zeros((size, ring, hidden), np.float32) for _ in range(2))
        self.last_times_s = np.full(size, -np.inf)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def names(self) -> list[str]:
        """The sensors', in the order of their rows."""
        return list(self._rows)

    def find_rows(self, names: list[str]) -> np.ndarray:
        """[B] the rows of the sensors; new ones get the next."""
        rows = [self._rows.setdefault(name, len(self._rows)) for name in names]
        while len(self._rows) > len(self.counts):
            for name in self.ARRAYS:
                old = getattr(self, name)
                new = np.full_like(old, -np.inf if name == "last_times_s" else 0)
                setattr(self, name, np.concatenate([old, new]))
        return np.array(rows, np.int64)

    def read_moments(self, rows: np.ndarray) -> RunningMoments[np.ndarray]:
        """Read those of these sensors."""
        return RunningMoments(self.counts[rows], self.means[rows], self.variances[rows], self.change_variances[rows])

    def read_state(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """([B, H], [B, H]) the LSTM's state after the newest message; zeros before the first one."""
        newest = (self.counts[rows] - 1) % self._ring
        return self.hidden[rows, newest], self.cell[rows, newest]

    def read_earlier(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """[B] the value `horizon` messages before the one to come, and the forecast that was made at it."""
        earlier = (self.counts[rows] - self._horizon) % self._ring
        return self.values[rows, earlier], self.predictions[rows, earlier]

    def append(
        self,
        rows: np.ndarray,
        values: np.ndarray,
        predictions: np.ndarray,
        features: np.ndarray,
        state: tuple[np.ndarray, np.ndarray],
        moments: RunningMoments[np.ndarray],
    ) -> None:
        """Add a message of each sensor; `rows` are all different."""
        at = self.counts[rows] % self._ring
        self.values[rows, at], self.predictions[rows, at] = values, predictions
        self.features[rows, at], self.hidden[rows, at], self.cell[rows, at] = features, *state
        self.counts[rows], self.means[rows], self.variances[rows], self.change_variances[rows] = moments

    def read_window(self, rows: np.ndarray) -> Window:
        """The windows of these sensors, each of which has a message with a known target."""
        counts = self.counts[rows]
        first = np.maximum(counts - self._horizon - self._num_steps, 0)  # [B]
        numbers = first + np.arange(self._num_steps)[:, None]  # [K, B]
        inputs, outcomes = numbers % self._ring, (numbers + self._horizon) % self._ring
        before = (first - 1) % self._ring
        has_before = (first > 0)[:, None]
        return Window(
            torch.from_numpy(self.features[rows, inputs]),
            # a change over the horizon is a feature where it has come
            torch.from_numpy(self.features[rows, outcomes, -1]),
            torch.from_numpy(numbers + self._horizon < counts),
            (
                torch.from_numpy(self.hidden[rows, before] * has_before),
                torch.from_numpy(self.cell[rows, before] * has_before),
            ),
        )

    def state_dict(self) -> dict[str, Any]:
        """A copy of the rows that are in use, as tensors."""
        size = len(self)
        return {"names": self.names} | {
            name: torch.from_numpy(getattr(self, name)[:size].copy()) for name in self.ARRAYS
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the table that made `state`."""
        self._rows = {}
        self.find_rows(state["names"])
        for name in self.ARRAYS:
            getattr(self, name)[: len(self)] = state[name].numpy()


class SilenceDetector:
    """Which sensors have stopped: none of their messages came for SILENT_AFTER times their longest pause so far.

    It compares the counts of a table from one call to the next: a pause is as exact as the time between calls. A sensor
    that has paused never is not judged. A silence is taken for a pause up to the limit at which it was noticed.
    """

    def __init__(self) -> None:
        self._counts, self._is_silent = np.zeros(0, np.int64), np.zeros(0, bool)
        self._seen_s, self._longest_s = np.zeros(0), np.zeros(0)

    @property
    def num_silent(self) -> int:
        """Sensors that have stopped, and are not back."""
        return int(self._is_silent.sum())

    def update(self, table: SensorTable, now_s: float) -> tuple[list[str], list[str]]:
        """The sensors that have stopped since the last call, and those that are back."""
        new = (0, len(table) - len(self._counts))
        self._counts, self._is_silent = np.pad(self._counts, new), np.pad(self._is_silent, new)
        self._seen_s, self._longest_s = np.pad(self._seen_s, new, constant_values=now_s), np.pad(self._longest_s, new)
        counts = table.counts[: len(table)]
        pauses_s = now_s - self._seen_s
        was_silent = self._is_silent
        limits_s, has_come = SILENT_AFTER * self._longest_s, counts > self._counts
        self._is_silent = ~has_come & (limits_s > 0) & (pauses_s > limits_s)
        learnt_s = np.where(was_silent, np.minimum(pauses_s, limits_s), pauses_s)
        self._longest_s = np.where(has_come, np.maximum(self._longest_s, learnt_s), self._longest_s)
        self._seen_s, self._counts = np.where(has_come, now_s, self._seen_s), counts.copy()
        names = np.array(table.names, object)
        return names[self._is_silent & ~was_silent].tolist(), names[was_silent & ~self._is_silent].tolist()
