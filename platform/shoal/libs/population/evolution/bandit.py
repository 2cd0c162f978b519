"""A time-varying bandit over a search space: it proposes the hyper-parameters that promise the largest gain.

PB2 (2002.02518, section 4): a Gaussian process of the change of the score, given hyper-parameters,
the score before and the time; the proposal has the highest upper confidence bound, where hyper-parameters that others
are about to be trained with count as seen.

Not of the paper: changes are replaced by normal quantiles of their ranks, as in BG-PBT (2207.09405), so that one
diverged member does not flatten the rest; options are dimensions of the same process, one for each option; the bound
is maximised over random candidates, not by gradients.

The process is scikit-learn's, with a kernel that forgets (1601.06650):

    k((x, t), (x', t')) = exp(-|x - x'|² / 2ℓ²) · (1 - ε)^(|t - t'| / 2)

The length ℓ, the rate of forgetting ε and the noise are those of a grid with the largest marginal likelihood, so that
the same observations give the same process on every machine. Legend: N observations, M questions, D dimensions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal.errors import needs_extra
from shoal.search.space import Options, SearchSpace, Values

if TYPE_CHECKING:
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import Kernel

MAX_OBSERVATIONS = 100  # the newest, as in BG-PBT: costs grow with the third power
MIN_OBSERVATIONS = 4
NUM_CANDIDATES = 512
LOCAL_WIDTH = 0.2  # of the box around the parent from which half of the candidates come
LENGTHS = (0.1, 0.2, 0.4, 0.8, 1.6)  # in units of √D, which the diagonal of the unit cube measures
NOISES = (1e-3, 1e-2, 0.1, 0.5)  # variance, of targets with a variance of 1
FORGETTING = (0.0, 0.02, 0.1, 0.3)
JITTER = 1e-8


def make_kernel(num_dimensions: int, length: float, forgetting: float) -> Kernel:
    """The kernel of inputs [N, D + 1], whose last column is the time. Raises MissingExtra without scikit-learn."""
    with needs_extra("recipes"):
        from sklearn.gaussian_process.kernels import RBF, Matern

    # A column of infinite length counts for nothing. A Matérn kernel with ν = 1/2 is exp(-|t - t'| / length).
    lasting = -2 / math.log1p(-forgetting) if forgetting else math.inf
    similar = RBF([length] * num_dimensions + [math.inf], "fixed")
    return similar * Matern([math.inf] * num_dimensions + [lasting], "fixed", nu=0.5)


def fit(inputs: np.ndarray, targets: np.ndarray) -> GaussianProcessRegressor:
    """The process of observations: inputs [N, D + 1], targets [N] with a mean of 0 and a variance of 1."""
    num_dimensions = inputs.shape[1] - 1
    rates = FORGETTING if np.ptp(inputs[:, -1]) else (0.0,)
    processes = (
        _condition(
            make_kernel(num_dimensions, length * math.sqrt(num_dimensions), rate), noise + JITTER, inputs, targets
        )
        for length, rate, noise in itertools.product(LENGTHS, rates, NOISES)
    )
    return max(processes, key=lambda process: process.log_marginal_likelihood_value_)


def condition_on_mean(process: GaussianProcessRegressor, inputs: np.ndarray) -> GaussianProcessRegressor:
    """The process that has also seen its own mean at these inputs: less uncertain there, of the same mean."""
    targets = np.concatenate([process.y_train_, process.predict(inputs)])
    return _condition(process.kernel_, process.alpha, np.concatenate([process.X_train_, inputs]), targets)


def _condition(kernel: Kernel, noise: float, inputs: np.ndarray, targets: np.ndarray) -> GaussianProcessRegressor:
    from sklearn.gaussian_process import GaussianProcessRegressor

    return GaussianProcessRegressor(kernel, alpha=noise, optimizer=None).fit(inputs, targets)


class Bandit:
    """Observations of what hyper-parameters gained, and proposals. Raises MissingExtra without scikit-learn."""

    def __init__(self, space: SearchSpace) -> None:
        with needs_extra("recipes"):  # before the run, not at its first proposal
            import sklearn.gaussian_process  # noqa: F401

        self.space = space
        self._units: list[list[float]] = []  # positions in the unit cube
        self._others: list[list[float]] = []  # score before, time, gain
        self._process: GaussianProcessRegressor | None = None  # of these observations, once it is needed

    @property
    def is_ready(self) -> bool:
        """Whether there are enough observations for a proposal."""
        return len(self._units) >= MIN_OBSERVATIONS

    def observe(self, values: Mapping[str, Any], before: float, time: float, gain: float) -> None:
        """Add that a member with the score `before` gained `gain` with these hyper-parameters."""
        self._units.append([float(unit) for unit in self.space.to_unit(values)])
        self._others.append([float(before), float(time), float(gain)])
        self._process = None
        del self._units[:-MAX_OBSERVATIONS], self._others[:-MAX_OBSERVATIONS]

    def propose(
        self,
        parent: Mapping[str, Any],
        before: float,
        time: float,
        taken: Sequence[Mapping[str, Any]],
        rng: np.random.Generator,
    ) -> Values:
        """Hyper-parameters for a member that continues from a parent with the score `before`.

        taken: those of other members in the coming round
        """
        if self._process is None:
            scores, times, gains = np.array(self._others).T
            self._process = fit(self._encode(np.array(self._units), scores, times), standardize_ranks(gains))
        process = self._process
        if taken:  # the mean stays as it is
            process = condition_on_mean(
                process, self._encode(np.array([self.space.to_unit(each) for each in taken]), before, time)
            )
        candidates = _draw_candidates(self.space, self.space.to_unit(parent), rng)
        mean, deviation = process.predict(self._encode(candidates, before, time), return_std=True)
        best = int(np.argmax(mean + compute_exploration(len(self._units)) * deviation))
        return self.space.from_unit(candidates[best])

    def _encode(self, units: np.ndarray, before: np.ndarray | float, time: np.ndarray | float) -> np.ndarray:
        """Positions, scores before and times as inputs of the process; the observed scores span one unit."""
        observed = np.array(self._others)[:, 0]
        span = float(np.ptp(observed)) or 1.0
        score, time = (np.broadcast_to(column, len(units)) for column in ((before - observed.min()) / span, time))
        return np.column_stack([_encode(self.space, units), score, time])

    def state_dict(self) -> dict[str, Any]:
        """The observations."""
        return {"units": [list(each) for each in self._units], "others": [list(each) for each in self._others]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the observations of `state_dict`."""
        self._units = [list(each) for each in state["units"]]
        self._others, self._process = [list(each) for each in state["others"]], None


def compute_exploration(num_observations: int) -> float:
    """√β of the upper confidence bound, β = 0.2 ln(0.4 n), the constants of PB2's published code; at least 0.2."""
    return math.sqrt(max(0.2 * math.log(0.4 * max(num_observations, 1)), 0.2))


def standardize_ranks(numbers: np.ndarray) -> np.ndarray:
    """Normal quantiles of the ranks, equal numbers at the highest of theirs (the copula transform of BG-PBT)."""
    ranks = (numbers[None, :] <= numbers[:, None]).sum(axis=1)
    normal = NormalDist()
    return np.array([normal.inv_cdf(rank / (len(numbers) + 1)) for rank in ranks])


def _encode(space: SearchSpace, units: np.ndarray) -> np.ndarray:
    """Positions [N, P] as inputs of the process [N, D]: two options are as far apart as the ends of an interval."""
    columns = []
    for column, distribution in zip(units.T, space.values(), strict=True):
        if isinstance(distribution, Options) and not distribution.is_ordered:
            size = len(distribution.options)
            index = np.minimum((column * size).astype(int), size - 1)
            columns.append(np.eye(size)[index] * math.sqrt(0.5))
        else:
            columns.append(column[:, None])
    return np.concatenate(columns, axis=1)


def _draw_candidates(space: SearchSpace, parent: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """[NUM_CANDIDATES, P]: half of them near the parent."""
    uniform = rng.random((NUM_CANDIDATES, len(parent)))
    low = np.clip(parent - LOCAL_WIDTH / 2, 0, 1)
    high = np.clip(parent + LOCAL_WIDTH / 2, 0, 1)
    local = low + uniform * (high - low)
    is_local = np.arange(NUM_CANDIDATES) % 2 == 0
    candidates = np.where(is_local[:, None], local, uniform)
    for column, distribution in enumerate(space.values()):  # options have no neighbours: one in four is drawn again
        if isinstance(distribution, Options) and not distribution.is_ordered:
            is_parents = is_local & (rng.random(NUM_CANDIDATES) < 0.75)
            candidates[:, column] = np.where(is_parents, parent[column], rng.random(NUM_CANDIDATES))
    return candidates
