"""An LSTM forecasts the next twelve hours of a series with trend, daily season and weather, better than yesterday did.

    shoal run forecaster                                         # a cluster, the job and a live picture
    shoal run forecaster args.window=72 args.horizon=24
    shoal run forecaster parallel=ddp workers=2                  # two workers share each batch
    shoal run forecaster parallel=fsdp workers=2                 # ... and the parameters
    shoal run forecaster parallel=pipeline workers=2             # one LSTM layer each
    ray job submit --working-dir . -- python jobs/forecaster.py  # the same on a cluster that is up
    python -m shoal.train task=forecaster                        # in this process, without Ray

Tensor ranks have nothing to share: an LSTM's step depends on the step before, and its gates are not split.

The baseline is what a forecaster has to beat: the seasonal-naive forecast, "as at this hour yesterday". Both errors
are in the record, `mae` and `mae_seasonal_naive`, over the same windows. To forecast your own series, replace `series`.
"""

from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from shoal.data import Data
from shoal.models.forecaster import Forecaster
from shoal.train import Task, TrainSpec

SEASON = 24  # hours


def series(num_hours: int, seed: int = 0) -> np.ndarray:
    """An hourly load, float64 [num_hours]: level, trend, two daily waves, weather that acts most at night, noise."""
    random = np.random.default_rng(seed)
    hour = np.arange(num_hours)
    day = 2 * np.pi * hour / SEASON
    weather = np.zeros(num_hours)
    for index, shock in enumerate(random.normal(0, 0.25, num_hours - 1)):
        weather[index + 1] = 0.97 * weather[index] + shock
    load = 20 + hour / 4380 - 4 * np.cos(day) + 1.5 * np.sin(2 * day)
    load += weather * (1 - 0.6 * np.sin(day)) + random.normal(0, 0.2, num_hours)
    return load


class LoadTask(Task):
    """The next `horizon` hours from the last `window`; both as differences from the same hours of the day before.

    So the network sees neither trend nor season, and a forecast of zero is the seasonal-naive one.

    num_hours: of the series, whose last fifth is for validation
    calendar:  whether the network is also told the time of day, as a point on a circle
    """

    parts: ClassVar = {"calendar": {"calendar": False}, "second layer": {"depth": 1}, "memory": {"window": 4}}

    def __init__(
        self,
        *,
        num_hours: int = 17_520,
        window: int = 36,
        horizon: int = 12,
        hidden: int = 32,
        depth: int = 2,
        calendar: bool = True,
    ) -> None:
        self.num_hours, self.window, self.horizon = num_hours, window, horizon
        self.hidden, self.depth, self.calendar = hidden, depth, calendar

    def model(self) -> nn.Module:
        return Forecaster(3 if self.calendar else 1, self.horizon, self.hidden, self.depth)

    def data(self) -> Data:
        load = series(self.num_hours)
        change = load[SEASON:] - load[:-SEASON]  # in float64: a meter's readings may be a million times larger
        day = 2 * np.pi * np.arange(SEASON, self.num_hours) / SEASON
        columns = [change, np.sin(day), np.cos(day)] if self.calendar else [change]
        table = np.stack(columns, axis=1).astype(np.float32)  # [num_hours - SEASON, 3]
        split = len(table) * 4 // 5
        return Data(
            LoadWindows(table[:split], self.window, self.horizon),
            validation=LoadWindows(table[split:], self.window, self.horizon),
        )

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return nn.functional.l1_loss(outputs, batch[1])

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Tensor]:
        return {"mae": (outputs - batch[1]).abs().mean(), "mae_seasonal_naive": batch[1].abs().mean()}


class LoadWindows:
    """Every window of the table with what follows it: float32 [B, window, columns] and [B, horizon]."""

    deterministic = True  # draws no random numbers

    def __init__(self, table: np.ndarray, window: int, horizon: int) -> None:
        self.table, self.window, self.horizon = table, window, horizon

    def __len__(self) -> int:
        return max(len(self.table) - self.window - self.horizon + 1, 0)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        past, future = self.batch(np.array([range(len(self))[index]]))
        return past[0], future[0]

    def batch(self, indices: np.ndarray) -> tuple[Tensor, ...]:
        hours = indices[:, None] + np.arange(self.window + self.horizon)
        past, future = self.table[hours[:, : self.window]], self.table[hours[:, self.window :], 0]
        return torch.from_numpy(past), torch.from_numpy(future)


def spec() -> TrainSpec:
    """The recipe: until three evaluations are no better than the one before them, whose network is kept."""
    return TrainSpec.parse(
        {
            "task": __file__,
            "name": "load",
            "batch_size": 64,
            "threads": 1,  # its steps are too small to share
            "optimizer": {"name": "adam", "learning_rate": 3e-3},
            "clip_norm": 1.0,
            "stop": {"epochs": 10, "convergence": {"metric": "mae", "direction": "min", "patience": 3}},
        }
    )


if __name__ == "__main__":
    from shoal.flows.training import train_main

    train_main(spec())
