"""An LSTM that reads a window of a series and forecasts the steps after it (Hochreiter and Schmidhuber, 1997).

Called by the recipe jobs/forecaster.py and by benchmarks. A sequence of layers, each of which gives one tensor, so that
it can be cut between any two of them. Legend: B windows, T steps.
"""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn


class Recurrent(nn.Module):
    """One LSTM layer: [B, T, num_inputs] to its outputs [B, T, hidden], without the state at the end."""

    def __init__(self, num_inputs: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(num_inputs, hidden, batch_first=True)

    def forward(self, steps: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(steps)[0]
        return outputs


class Forecast(nn.Module):
    """The last step's state, of [B, T, hidden], to all forecasts at once [B, horizon]; zero before any training."""

    def __init__(self, hidden: int, horizon: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, horizon)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Tensor) -> Tensor:
        forecasts: Tensor = self.linear(states[:, -1])
        return forecasts


class Forecaster(nn.Sequential):
    """Windows float [B, T, num_inputs] to forecasts float [B, horizon]."""

    def __init__(self, num_inputs: int, horizon: int, hidden: int = 32, depth: int = 2) -> None:
        sizes = [num_inputs] + [hidden] * depth
        layers: dict[str, nn.Module] = {
            f"layer{number}": Recurrent(sizes[number - 1], hidden) for number in range(1, depth + 1)
        }
        super().__init__(OrderedDict(layers, forecast=Forecast(hidden, horizon)))
