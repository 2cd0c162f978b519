"""The network of a stream: an LSTM that takes one step for each message, between a running scaler and its inverse.

Legend: B sensors, T messages of each, D values of a message, H units, K steps of a window.

Used by `OnlineTrainer`, which has the state of every sensor, and by endpoints, whose requests bring a history. Both
scale by `observe`. A batch of answers has a few rows, so its time goes into starting operations, which NumPy does in a
third of torch's time: the trainer answers by `StepWeights.step`, an endpoint by torch. A test holds one to the other.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

MAX_DEVIATIONS = 10.0  # an outlier counts as so many standard deviations
SMALLEST_VARIANCE = 1e-12

ArrayT = TypeVar("ArrayT", np.ndarray, Tensor)


class RunningMoments(NamedTuple, Generic[ArrayT]):
    """Of each sensor, as arrays or tensors.

    counts:           [B] messages so far
    means, variances: [B, D] float64
    change_variances: [B] float64 mean square of the change of the first value over the horizon
    """

    counts: ArrayT
    means: ArrayT
    variances: ArrayT
    change_variances: ArrayT

    @property
    def change_deviations(self) -> ArrayT:
        """[B] the unit of forecasts and targets."""
        return (self.change_variances + SMALLEST_VARIANCE) ** 0.5


def observe(
    values: ArrayT, earlier: ArrayT, moments: RunningMoments[ArrayT], horizon: int, memory: int
) -> tuple[ArrayT, RunningMoments[ArrayT]]:
    """Take a message of each sensor into its moments, then scale it.

    values:  [B, D] float64
    earlier: [B] the first value, `horizon` messages before; any finite number where there was none
    Returns features [B, D + 1] float64, and the new moments. These are of West, "Updating mean and variance estimates"
    (1979), with a weight that does not fall below 1 / memory.
    """
    join = np.concatenate if isinstance(values, np.ndarray) else torch.cat
    counts = moments.counts + 1
    weights = (1.0 / counts).clip(min=1.0 / memory)[:, None]
    deviations = values - moments.means
    means = moments.means + weights * deviations
    variances = (1 - weights) * (moments.variances + weights * deviations * deviations)
    has_change = counts > horizon
    changes = (values[:, 0] - earlier) * has_change
    change_weights = (1.0 / (counts - horizon).clip(min=1)).clip(min=1.0 / memory) * has_change
    change_variances = moments.change_variances + change_weights * (changes * changes - moments.change_variances)
    moments = RunningMoments(counts, means, variances, change_variances)
    scaled = (values - means) / (variances + SMALLEST_VARIANCE) ** 0.5
    features = join([scaled, (changes / moments.change_deviations)[:, None]], 1)
    return features.clip(-MAX_DEVIATIONS, MAX_DEVIATIONS), moments


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
        self.width = width
        self.hidden = hidden
        self.horizon = horizon
        self.memory = memory
        self.lstm = nn.LSTM(width + 1, hidden)
        self.head = nn.Linear(hidden, 1)
        nn.init.zeros_(self.head.weight)  # the first forecasts are "as now"
        nn.init.zeros_(self.head.bias)

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
        nothing, features = histories.new_zeros(size), []
        means, variances = histories.new_zeros(2, size, width).unbind()
        moments = RunningMoments(nothing, means, variances, nothing)
        for position in range(length):
            earlier = histories[:, max(position - self.horizon, 0), 0]
            scaled, moments = observe(histories[:, position], earlier, moments, self.horizon, self.memory)
            features.append(scaled.float())
        state = self.head.weight.new_zeros(size, self.hidden)
        outputs = self.unroll(torch.stack(features), (state, state))[-1]
        return (histories[:, -1, 0] + outputs * moments.change_deviations).to(values.dtype)


class StepWeights(NamedTuple):
    """Views of a network's parameters: of_input [D + 1, 4H], of_state [H, 4H], two biases [4H], head [H] and [1]."""

    of_input: np.ndarray
    of_state: np.ndarray
    input_bias: np.ndarray
    state_bias: np.ndarray
    head: np.ndarray
    head_bias: np.ndarray

    @classmethod
    def view(cls, network: StreamNetwork) -> StepWeights:
        """Make them of a network on the CPU; follows its updates."""
        of_input, of_state, input_bias, state_bias, head, head_bias = (
            parameter.detach().numpy() for parameter in network.parameters()
        )
        return cls(of_input.T, of_state.T, input_bias, state_bias, head[0], head_bias)

    def step(
        self, features: np.ndarray, state: tuple[np.ndarray, np.ndarray]
    ) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
        """Take one step of features [B, D + 1] and state ([B, H], [B, H]): outputs [B], and the next state."""
        hidden, cell = state
        gates = features @ self.of_input
        gates += hidden @ self.of_state
        gates += self.input_bias
        gates += self.state_bias
        size = hidden.shape[1]
        content = np.tanh(gates[:, 2 * size : 3 * size])
        opened = 0.5 + 0.5 * np.tanh(0.5 * gates)  # the logistic function, without overflow
        cell = opened[:, size : 2 * size] * cell + opened[:, :size] * content
        hidden = opened[:, 3 * size :] * np.tanh(cell)
        return hidden @ self.head + self.head_bias, (hidden, cell)
