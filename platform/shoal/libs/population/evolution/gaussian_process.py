"""Gaussian process regression with a kernel that forgets (2002.02518; 1601.06650).

    k((x, t), (x', t')) = exp(-|x - x'|² / 2ℓ²) · (1 - ε)^(|t - t'| / 2)

The length ℓ, the rate of forgetting ε and the noise are those of a small grid with the largest marginal likelihood
(Rasmussen & Williams, equation 2.30), so that the same observations give the same process on every machine. Pure
functions of arrays. Legend: N observations, M questions, D dimensions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

LENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6)  # in units of √D, which the diagonal of the unit cube measures
NOISES = (1e-3, 1e-2, 0.1, 0.5)  # variance, of targets with a variance of 1
FORGETTING = (0.0, 0.02, 0.1, 0.3)
JITTER = 1e-8


@dataclass(frozen=True)
class GaussianProcess:
    """A process with the observations that it is conditioned on."""

    inputs: np.ndarray  # [N, D]
    times: np.ndarray  # [N]
    length: float
    forgetting: float
    noise: float
    factor: np.ndarray  # [N, N], lower Cholesky factor of the observations' covariance
    weights: np.ndarray  # [N], covariance⁻¹ · targets

    def predict(self, inputs: np.ndarray, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Mean and standard deviation [M] of the noiseless function at inputs [M, D] and times [M]."""
        distances = _measure(inputs, times, self.inputs, self.times)
        cross = _compute_kernel(*distances, self.length, self.forgetting)  # [M, N]
        explained = np.linalg.solve(self.factor, cross.T)  # [N, M]
        variance = 1.0 - (explained**2).sum(axis=0)
        return cross @ self.weights, np.sqrt(np.maximum(variance, 0.0))

    def condition(self, inputs: np.ndarray, times: np.ndarray) -> GaussianProcess:
        """The process that has also seen its own mean at these inputs: less uncertain there, of the same mean."""
        mean, _ = self.predict(inputs, times)
        targets = np.concatenate([self.factor @ (self.factor.T @ self.weights), mean])
        inputs, times = np.concatenate([self.inputs, inputs]), np.concatenate([self.times, times])
        return _condition(inputs, times, targets, self.length, self.forgetting, self.noise)


def fit(inputs: np.ndarray, times: np.ndarray, targets: np.ndarray) -> GaussianProcess:
    """The process of observations: inputs [N, D], times [N], targets [N] with a mean of 0 and a variance of 1."""
    distances = _measure(inputs, times, inputs, times)
    lengths = [length * math.sqrt(inputs.shape[1]) for length in LENGTHS]
    rates = FORGETTING if distances[1].any() else (0.0,)
    chosen = max(
        itertools.product(lengths, rates, NOISES),
        key=lambda each: _compute_likelihood(_compute_kernel(*distances, each[0], each[1]), each[2], targets),
    )
    return _condition(inputs, times, targets, *chosen)


def _condition(
    inputs: np.ndarray, times: np.ndarray, targets: np.ndarray, length: float, forgetting: float, noise: float
) -> GaussianProcess:
    kernel = _compute_kernel(*_measure(inputs, times, inputs, times), length, forgetting)
    factor = _factorize(kernel, noise)
    weights = np.linalg.solve(factor.T, np.linalg.solve(factor, targets))
    return GaussianProcess(inputs, times, length, forgetting, noise, factor, weights)


def _compute_likelihood(kernel: np.ndarray, noise: float, targets: np.ndarray) -> float:
    """The log marginal likelihood, up to a constant."""
    factor = _factorize(kernel, noise)
    whitened = np.linalg.solve(factor, targets)
    return float(-0.5 * whitened @ whitened - np.log(np.diag(factor)).sum())


def _factorize(kernel: np.ndarray, noise: float) -> np.ndarray:
    factor: np.ndarray = np.linalg.cholesky(kernel + (noise + JITTER) * np.eye(len(kernel)))
    return factor


def _measure(
    inputs: np.ndarray, times: np.ndarray, others: np.ndarray, other_times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Squared distances and differences of time, [M, N] each."""
    squares = (inputs**2).sum(axis=1)[:, None] + (others**2).sum(axis=1)[None, :] - 2 * inputs @ others.T
    return np.maximum(squares, 0.0), np.abs(times[:, None] - other_times[None, :])


def _compute_kernel(squares: np.ndarray, ages: np.ndarray, length: float, forgetting: float) -> np.ndarray:
    kernel: np.ndarray = np.exp(-0.5 * squares / length**2 + 0.5 * math.log1p(-forgetting) * ages)
    return kernel
