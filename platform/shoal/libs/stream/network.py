"""The network of a stream: an LSTM that takes one step for each message, between a running scaler and its inverse.

Legend: B sensors, T messages of each, D values of a message, H units, K steps of a window.

Used by `OnlineTrainer`, which has the state of every sensor, and by endpoints, whose requests bring a history. Both go
through `observe` and `step`, so both compute the same forecast. Pure functions of tensors.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

MAX_DEVIATIONS = 10.0  # an outlier counts as so many standard deviations
SMALLEST_VARIANCE = 1e-12


class ScalerState(NamedTuple):
    """Running moments of each sensor, float64.

    counts:           [B] messages so far
    means, variances: [B, D]
    change_variances: [B] mean square of the change of the first value over the horizon
    """

    counts: Tensor
    means: Tensor
    variances: Tensor
    change_variances: Tensor

    @property
    def change_deviations(self) -> Tensor:
        """[B] the unit of forecasts and targets."""
        return (self.change_variances + SMALLEST_VARIANCE).sqrt()

    @classmethod
    def zeros(cls, size: int, width: int) -> ScalerState:
        """Of `size` sensors that have sent nothing."""
        means, variances = torch.zeros(2, size, width, dtype=torch.float64).unbind()
        return cls(torch.zeros(size, dtype=torch.int64), means, variances, torch.zeros(size, dtype=torch.float64))


class StreamNetwork(nn.Module):
    """Forecasts the first value of a sensor `horizon` messages ahead.

    The LSTM's input is the scaled message and its scaled change; the output is the change to come, in deviations of
    such changes. So a network that outputs 0 forecasts "as now".

    width:   D
    hidden:  H
    memory:  messages after which the scaler has forgotten two thirds
    """

    def __init__(self, width: int = 1, hidden: int = 32, horizon: int = 1, memory: int = 1000) -> None:
        super().__init__()
        self.width, self.hidden, self.horizon, self.memory = width, hidden, horizon, memory
        self.lstm = nn.LSTM(width + 1, hidden)
        self.head = nn.Linear(hidden, 1)
        nn.init.zeros_(self.head.weight)  # the first forecasts are "as now"
        nn.init.zeros_(self.head.bias)

    def observe(self, values: Tensor, earlier: Tensor, scaler: ScalerState) -> tuple[Tensor, ScalerState]:
        """Take a message of each sensor into the scaler, then scale it.

        values:  [B, D] float64
        earlier: [B] the first value, `horizon` messages before; of any content where there was none
        Returns features [B, D + 1] float32, and the new state. The moments are of West, "Updating mean and variance
        estimates" (1979), with a weight that does not fall below 1 / memory.
        """
        counts = scaler.counts + 1
        weights = (1.0 / counts.double()).clamp(min=1.0 / self.memory)
        deviations = values - scaler.means
        means = scaler.means + weights[:, None] * deviations
        variances = (1 - weights)[:, None] * (scaler.variances + weights[:, None] * deviations.square())
        has_change = counts > self.horizon
        changes = torch.where(has_change, values[:, 0] - earlier, 0.0)
        change_weights = (1.0 / (counts - self.horizon).clamp(min=1).double()).clamp(min=1.0 / self.memory)
        change_variances = torch.where(
            has_change, scaler.change_variances.lerp(changes.square(), change_weights), scaler.change_variances
        )
        scaler = ScalerState(counts, means, variances, change_variances)
        scaled = (values - means) / (variances + SMALLEST_VARIANCE).sqrt()
        features = torch.cat([scaled, (changes / scaler.change_deviations)[:, None]], 1)
        return features.clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS).float(), scaler

    def step(self, features: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """One step of features [B, D + 1] and state ([B, H], [B, H]): outputs [B], and the next state."""
        of_input, of_state, input_bias, state_bias = self.lstm.parameters()
        hidden, cell = torch.lstm_cell(features, state, of_input, of_state, input_bias, state_bias)
        return self.head(hidden).squeeze(1), (hidden, cell)

    def unroll(self, features: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        """Steps over features [K, B, D + 1] from state ([B, H], [B, H]): outputs [K, B]."""
        hidden, _ = self.lstm(features, (state[0][None], state[1][None]))
        outputs: Tensor = self.head(hidden).squeeze(2)
        return outputs

    def forward(self, values: Tensor) -> Tensor:
        """The forecast [B] after histories [B, T] or [B, T, D], oldest first: what the trainer would have answered to
        a new sensor that had sent them. Both are float32 or float64."""
        histories = values.double() if values.ndim == 3 else values.double().unsqueeze(2)
        size, length, width = histories.shape
        scaler = ScalerState(*(each.to(values.device) for each in ScalerState.zeros(size, width)))
        nothing = self.head.weight.new_zeros(size, self.hidden)
        state, outputs = (nothing, nothing), values.new_zeros(size)
        for position in range(length):
            newest, earlier = histories[:, position], histories[:, max(position - self.horizon, 0), 0]
            features, scaler = self.observe(newest, earlier, scaler)
            outputs, state = self.step(features, state)
        return (histories[:, -1, 0] + outputs * scaler.change_deviations).to(values.dtype)
