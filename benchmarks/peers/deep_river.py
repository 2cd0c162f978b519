"""deep-river's RollingRegressor on a real series of river: each value forecast from those before, then learnt.

    python -m benchmarks.peers.deep_river

Runs in .venv-deepriver, and answers commands (see `benchmarks.talk`): {series} with the values; {series, hidden,
window, rate, count} with messages a second and errors, over the first `count` messages; 0: all. The regressor learns
what our trainer does: the scaled change to the next value, from windows of the scaled value and the scaled change.
"""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from deep_river.regression import RollingRegressor
from river import datasets, preprocessing
from torch import Tensor, nn

from benchmarks.talk import commands, say

SERIES = {"water flow": datasets.WaterFlow, "approval": datasets.TrumpApproval}


def load(name: str) -> list[float]:
    """The values of a series; missing ones are left out."""
    return [float(value) for _, value in SERIES[name]() if value is not None and value == value]


class LastLSTM(nn.Module):
    """An LSTM over a window [T, 1, D], and a linear layer on its last state."""

    def __init__(self, num_features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_features, hidden)
        self.head = nn.Linear(hidden, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, window: Tensor) -> Tensor:
        output: Tensor = self.head(self.lstm(window)[0][-1])
        return output


def measure(values: list[float], hidden: int, window: int, rate: float) -> dict[str, Any]:
    """Messages a second, mean absolute error, and that of the forecast "as now"."""
    torch.manual_seed(0)
    regressor = RollingRegressor(
        module=LastLSTM(2, hidden), loss_fn="smooth_l1", optimizer_fn="adam", lr=rate, window_size=window, seed=0
    )
    model = preprocessing.StandardScaler() | preprocessing.TargetStandardScaler(regressor=regressor)
    errors, naive, features = [], [], {"value": values[0], "change": 0.0}
    began_s = time.perf_counter()
    for before, value in pairwise(values):
        forecast = before + model.predict_one(features)
        errors.append(abs(value - forecast))
        naive.append(abs(value - before))
        model.learn_one(features, value - before)
        features = {"value": value, "change": value - before}
    seconds = time.perf_counter() - began_s
    return {"per_s": len(errors) / seconds, "mae": sum(errors) / len(errors), "as_now": sum(naive) / len(naive)}


def main() -> None:
    torch.set_num_threads(1)
    for asked in commands():
        values = load(asked["series"])
        if "rate" not in asked:
            say(values=values)
        else:
            say(**measure(values[: asked["count"] or None], asked["hidden"], asked["window"], asked["rate"]))


if __name__ == "__main__":
    main()
