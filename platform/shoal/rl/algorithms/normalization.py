"""Observations and rewards in units of their own running statistics, and weights that act without them.

Owned by an algorithm, updated by the learner after each batch. Actors and endpoints know nothing of it: the statistics
are folded into the layers that take the observations when weights are published, so that a version always has its own.
Legend: N steps, S segments laid end to end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from shoal.rl.experience.queue import ExperienceBatch
from shoal.rl.spec import RLSpec
from shoal.wire import ExperienceSpec

# A deviation below this part of the mean is the rounding of a constant; float32 has 6e-8 of it.
ROUNDING = 1e-6
# A number so many times the others' counts as the largest of them, as long as it is one of few: beside it they are
# nothing in float32, and one of 1e30 would make them equal for ever.
HUGE = 1e8
ROWS_PER_HUGE = 250
TARGET_STEPS = 200_000  # each counts in every epoch
LARGER = 10.0
SMALLEST_DEVIATION, ROUNDING_OF_SQUARES = 1e-8, 1e-5
_OBSERVED, _REWARDED = ("observations", "next_observations"), ("rewards", "returns")
_IN_REWARDS = ("value_scale", "value_shift", "head.value_scale", "head.value_shift")  # tensors of models


class ExperienceMoments:
    """Mean and deviation of all rows so far, in float64, by the updates of Chan, Golub and LeVeque (1979)."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.count = 0
        self.mean = np.zeros(shape)
        self.squares = np.zeros(shape)

    def add(self, rows: np.ndarray) -> None:
        """Take further rows [n, *shape]."""
        wide, total = self.limit(rows), self.count + len(rows)
        mean = wide.mean(0)
        shift = mean - self.mean
        self.squares = (
            self.squares + np.square(wide - mean).sum(0) + np.square(shift) * (self.count * len(rows) / total)
        )
        self.mean, self.count = self.mean + shift * (len(rows) / total), total

    def limit(self, rows: np.ndarray) -> np.ndarray:
        """The rows with their huge numbers as large as the largest others, or as 0, in float64."""
        wide = rows.astype(np.float64)
        sizes, place = np.abs(wide), -min(len(rows), 2 + len(rows) // ROWS_PER_HUGE)
        largest = np.partition(sizes, place, 0)[place]
        is_huge = sizes > HUGE * np.maximum(largest, self.deviation)
        return np.where(is_huge, wide.clip(-largest, largest), wide)

    @property
    def deviation(self) -> np.ndarray:
        """1 for what has not varied."""
        result = np.sqrt(self.squares / max(self.count, 1))
        return np.where(result <= ROUNDING * np.abs(self.mean), 1.0, result)

    def state_dict(self) -> dict[str, Any]:
        return {name: torch.tensor(each, dtype=torch.float64) for name, each in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.count = int(state["count"])
        self.mean, self.squares = state["mean"].numpy(), state["squares"].numpy()


class TargetMoments:
    """Mean and mean square of value targets, in which those of the last TARGET_STEPS count most.

    Values are learned in these units (van Hasselt et al., 1602.07714, without the step that preserves outputs: the
    values of a policy that gets better grow together), so that the size of rewards does not matter.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self.mean = 0.0
        self.square = 0.0

    def add(self, num_steps: int, mean: float, square: float) -> None:
        """Take the moments of further targets; of much larger ones as if they were LARGER times as large."""
        if not num_steps:
            return
        if self.num_steps and square > (limit := LARGER**2 * self.square) > 0:
            mean *= math.sqrt(limit / square)
            square = limit
        self.num_steps = min(self.num_steps + num_steps, max(num_steps, TARGET_STEPS))
        share = num_steps / self.num_steps
        self.mean += share * (mean - self.mean)
        self.square += share * (square - self.square)

    @property
    def deviation(self) -> float:
        """1 before the first targets; at least what rounding leaves of their size."""
        if not self.num_steps:
            return 1.0
        variance = max(self.square - self.mean**2, ROUNDING_OF_SQUARES * self.square)
        return max(math.sqrt(variance), SMALLEST_DEVIATION)


class Normalizer:
    """The statistics of one learner. Where neither observations nor rewards are normalised everything stays as it is.

    Rewards are divided by the deviation of their discounted sums since the beginning of a segment, as gymnasium's
    NormalizeReward does since that of an episode. Values are learned in these units, and published in the game's.
    """

    def __init__(self, spec: RLSpec, experience: ExperienceSpec) -> None:
        self._discount = float(getattr(spec.algorithm, "discount", 1.0))
        self._moments = dict[str, ExperienceMoments]()
        if spec.normalize_observations:
            self._moments["observations"] = ExperienceMoments(experience.observation.shape)
        if spec.has_normalized_rewards:
            self._moments["rewards"] = ExperienceMoments(())
        self._is_preliminary = False

    @property
    def is_empty(self) -> bool:
        """Whether some statistics are wanted, and have seen nothing yet."""
        return any(not each.count for each in self._moments.values())

    def prepare(self, batch: ExperienceBatch) -> ExperienceBatch:
        """The batch in the present units, those of the newest weights. The first batch gives its own, until `learn`
        says which of its segments are good."""
        if self.is_empty:
            self._add(batch)
            self._is_preliminary = True
        return self.normalize(batch)

    def learn(self, batch: ExperienceBatch, learnt: np.ndarray) -> None:
        """Take the segments of the batch where `learnt` (bool [S]) is true into the statistics."""
        if self._is_preliminary:
            for each in self._moments.values():
                each.count = 0
                each.mean = np.zeros_like(each.mean)
                each.squares = np.zeros_like(each.squares)
            self._is_preliminary = False
        if self._moments and learnt.any():
            self._add(batch.select(learnt))

    def normalize(self, batch: ExperienceBatch) -> ExperienceBatch:
        """Observations and rewards of a batch in the present units."""
        if not self._moments:
            return batch
        result = self.apply({"observations": batch.observations, "rewards": batch.rewards})
        return replace(batch, observations=result["observations"], rewards=result["rewards"])

    def apply(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Normalise arrays by name, as a replay draws them."""
        result = dict(arrays)
        if (seen := self._moments.get("observations")) is not None:
            deviation = seen.deviation
            for name in result.keys() & _OBSERVED:
                with np.errstate(over="ignore"):
                    result[name] = ((result[name] - seen.mean) / deviation).astype(np.float32)
        if (gained := self._moments.get("rewards")) is not None:
            for name in result.keys() & _REWARDED:
                result[name] = (result[name] / gained.deviation).astype(np.float32)
        return result

    def fold(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Weights that compute from observations as they are what `arrays` compute from normalised ones, and values in
        the game's rewards."""
        result = dict(arrays)
        if (gained := self._moments.get("rewards")) is not None:
            for name in result.keys() & _IN_REWARDS:
                result[name] = np.asarray(result[name] * gained.deviation, np.float32)
        if (seen := self._moments.get("observations")) is None:
            return result
        if "network.shift" in result:
            result["network.shift"] = seen.mean.astype(np.float32)
            result["network.scale"] = (1 / seen.deviation).astype(np.float32)
            return result
        for weight, bias in find_input_layers(result):
            scaled = result[weight] / seen.deviation
            result[bias] = (result[bias] - scaled @ seen.mean).astype(np.float32)
            result[weight] = scaled.astype(np.float32)
        return result

    def state_dict(self) -> dict[str, Any]:
        return {name: each.state_dict() for name, each in self._moments.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, each in self._moments.items():
            each.load_state_dict(state[name])

    def _add(self, batch: ExperienceBatch) -> None:
        if "observations" in self._moments:
            self._moments["observations"].add(batch.observations)
        if "rewards" in self._moments:
            gained = self._moments["rewards"]
            rewards = gained.limit(batch.rewards)  # a huge one would be in the sums after it, too
            gained.add(sum_discounted(rewards, batch.lengths, self._discount))


def find_input_layers(names: Iterable[str]) -> list[tuple[str, str]]:
    """The (weight, bias) of each linear layer that takes the observations, of a model with these tensors."""
    known = set(names)
    for weight, bias in (("trunk.0.weight", "trunk.0.bias"), ("core.rnn.weight_ih_l0", "core.rnn.bias_ih_l0")):
        if weight in known:
            return [(weight, bias)]
    layers = [(f"{name}.0.weight", f"{name}.0.bias") for name in ("policy", "value", "advantage")]
    return [each for each in layers if each[0] in known]


def sum_discounted(rewards: np.ndarray, lengths: np.ndarray, discount: float) -> np.ndarray:
    """Sum the discounted rewards from the beginning of its segment to each step. [N]"""
    starts = np.cumsum(lengths) - lengths
    sums = rewards.astype(np.float64)
    for step in range(1, int(lengths.max())):
        rows = (starts + step)[lengths > step]
        sums[rows] += discount * sums[rows - 1]
    return sums
