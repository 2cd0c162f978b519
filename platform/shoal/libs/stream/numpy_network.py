"""One step of `StreamNetwork` in NumPy, with which the trainer answers.

Legend: B sensors, D values of a message, H units.

A batch of answers has a few rows, so its time goes into starting operations: NumPy starts one in a third of torch's
time. The weights are views of the network's own, so an update changes both. Called by `OnlineTrainer` and
`SensorTable`. Pure functions of arrays; a test holds them to `StreamNetwork.forward`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shoal.libs.stream.network import MAX_DEVIATIONS, SMALLEST_VARIANCE, StreamNetwork


class RunningMoments(NamedTuple):
    """`ScalerState` as arrays: counts [B] int64, means and variances [B, D], change_variances [B], float64."""

    counts: np.ndarray
    means: np.ndarray
    variances: np.ndarray
    change_variances: np.ndarray

    @property
    def change_deviations(self) -> np.ndarray:
        """[B] the unit of forecasts and targets."""
        deviations: np.ndarray = np.sqrt(self.change_variances + SMALLEST_VARIANCE)
        return deviations


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
        """Of a network on the CPU; follows its updates."""
        of_input, of_state, input_bias, state_bias, head, head_bias = (
            parameter.detach().numpy() for parameter in network.parameters()
        )
        return cls(of_input.T, of_state.T, input_bias, state_bias, head[0], head_bias)


def observe(
    values: np.ndarray, earlier: np.ndarray, moments: RunningMoments, horizon: int, memory: int
) -> tuple[np.ndarray, RunningMoments]:
    """`StreamNetwork.observe` of values [B, D] and earlier [B]: features [B, D + 1] float32, and the new moments."""
    counts = moments.counts + 1
    weights = np.maximum(1.0 / counts, 1.0 / memory)[:, None]
    deviations = values - moments.means
    means = moments.means + weights * deviations
    variances = (1 - weights) * (moments.variances + weights * deviations * deviations)
    has_change = counts > horizon
    changes = np.where(has_change, values[:, 0] - earlier, 0.0)
    change_weights = np.maximum(1.0 / np.maximum(counts - horizon, 1), 1.0 / memory) * has_change
    change_variances = moments.change_variances + change_weights * (changes * changes - moments.change_variances)
    moments = RunningMoments(counts, means, variances, change_variances)
    features = np.empty((len(values), values.shape[1] + 1))
    features[:, :-1] = (values - means) / np.sqrt(variances + SMALLEST_VARIANCE)
    features[:, -1] = changes / moments.change_deviations
    return np.clip(features, -MAX_DEVIATIONS, MAX_DEVIATIONS).astype(np.float32), moments


def step(
    features: np.ndarray, state: tuple[np.ndarray, np.ndarray], weights: StepWeights
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """`StreamNetwork.step` of features [B, D + 1] and state ([B, H], [B, H]): outputs [B], and the next state."""
    hidden, cell = state
    gates = features @ weights.of_input
    gates += hidden @ weights.of_state
    gates += weights.input_bias
    gates += weights.state_bias
    size = hidden.shape[1]
    content = np.tanh(gates[:, 2 * size : 3 * size])
    opened = 0.5 + 0.5 * np.tanh(0.5 * gates)  # the logistic function, without overflow
    cell = opened[:, size : 2 * size] * cell + opened[:, :size] * content
    hidden = opened[:, 3 * size :] * np.tanh(cell)
    return hidden @ weights.head + weights.head_bias, (hidden, cell)
