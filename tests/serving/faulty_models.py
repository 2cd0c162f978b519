"""Models with faults by name, chosen by the first number of a row: what a server must survive, in one place.

`Faulty` has all of them from the start; a version of `Moody` the one that its weights say, so that another one answers.

0      answers with the row's second number, plus its only weight
RAISE  raises          SHAPE  answers with too many columns       NAN  answers with NaN
HANG   waits until the file that `hold` names is gone             LEAK keeps 64 MB more for each such row
"""

from __future__ import annotations

import os
import time

import numpy as np
import torch
from torch import nn

from registered import tensors
from shoal.registry import ModelFactory, Signature
from shoal.weights import WeightSnapshot

FINE = 0.0
RAISE = 1.0
SHAPE = 2.0
NAN = 3.0
HANG = 4.0
LEAK = 5.0
ASKED, SLOW = 7.0, 8.0  # of Moody
SLOW_S = 0.004
FORWARD_S = 0.003  # too long for the event loop, which a forward that hangs would take along
LEAK_BYTES = 64 * 1024 * 1024
LONGEST_HANG_S = 120.0
SIGNATURE = Signature(
    inputs=tensors(x=[-1, 2]),
    outputs=tensors(y=[-1, 1]),
)


class Faulty(nn.Module):
    """x [B, 2] to y [B, 1]."""

    def __init__(self, hold: str = "", start: str = "") -> None:
        super().__init__()
        self.hold = hold
        _wait_while_there(start)
        self.weight = nn.Parameter(torch.zeros(1))
        self._kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        faults = set(x[:, 0].tolist())
        time.sleep(FORWARD_S)
        if RAISE in faults:
            raise RuntimeError("on purpose")
        if HANG in faults:
            _wait_while_there(self.hold)
        if LEAK in faults:
            self._kept.append(torch.ones(LEAK_BYTES // 4))
        y = x[:, 1:] + self.weight
        if NAN in faults:
            return y * torch.where(x[:, :1] == NAN, torch.nan, 1.0)
        return torch.cat([y, y], 1) if SHAPE in faults else y


def _wait_while_there(file: str) -> None:
    ends_s = time.monotonic() + LONGEST_HANG_S
    while os.path.exists(file) and time.monotonic() < ends_s:
        time.sleep(0.01)


class Moody(nn.Module):
    """x [B, 2] to y [B, 1]: the version. Its mood is its fault for rows whose first number is `ASKED`; SLOW is one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.mood = nn.Parameter(torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mood = float(self.mood) if ASKED in x[:, 0].tolist() else FINE
        y = self.weight.expand(len(x), 1).clone()
        if mood == SLOW:
            ends_s = time.perf_counter() + SLOW_S
            while time.perf_counter() < ends_s:
                pass
        if mood == RAISE or RAISE in x[:, 1].tolist():
            raise RuntimeError("on purpose")
        if mood == NAN:
            return y * torch.nan
        return torch.cat([y, y], 1) if mood == SHAPE else y


def moody(version: int, mood: float = 0.0) -> WeightSnapshot:
    """Every answer is `version`, for rows [ASKED, ...] if that is what it is in the mood for."""
    weight, moods = np.full(1, version, np.float32), np.full(1, mood, np.float32)
    return WeightSnapshot.of(version, {"weight": weight, "mood": moods})


def factory(hold: str = "", start: str = "") -> ModelFactory:
    """`hold` is the file as long as which a hanging forward hangs; `start`, the one as long as which none is made."""
    return ModelFactory(factory="serving.faulty_models:Faulty", kwargs={"hold": hold, "start": start})


def weights(version: int) -> WeightSnapshot:
    """Every answer is the row's second number plus `version`."""
    return WeightSnapshot.of(version, {"weight": np.full(1, version, np.float32)})
