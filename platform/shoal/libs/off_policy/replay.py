"""The replay: the newest steps of experience in a ring of bounded bytes, drawn in proportion to their priority.

An algorithm inserts each batch that the learner takes, which is when its segments count as consumed, and draws from it
as often as it likes. Knows neither torch nor a discount before `sample`. Prioritised as in Schaul et al.
(arXiv:1511.05952, the proportional variant). Legend: N steps, S segments, B sampled steps, C rows of the ring.

A segment of L steps takes L + 1 rows, one for each observation, so that an observation is stored once. Rows are counted
from 0 without end; row r is at r % C. A new row overwrites the oldest one, and its priority with it.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.extend.rl import ExperienceBatch
from shoal.libs.off_policy.ring import Ring
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import MASKS


class ReplaySample(NamedTuple):
    """B steps, drawn by priority.

    rows int64 [B] for `update_priorities`; observations [B, *obs], actions [B, *act]
    returns float32 [B]:   the rewards of up to n steps, discounted; fewer where the segment ended before
    discounts float32 [B]: γ to the number of these steps; 0 if the last of them terminated the episode
    next_observations:     [B, *obs], after these steps: the environment's real one, also where an episode was truncated
    weights float32 [B]:   of importance sampling, at most 1
    next_masks bool [B, K]: the actions allowed at next_observations, in a run with action masks
    """

    rows: np.ndarray
    observations: np.ndarray
    actions: np.ndarray
    returns: np.ndarray
    discounts: np.ndarray
    next_observations: np.ndarray
    weights: np.ndarray
    next_masks: np.ndarray | None = None

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Collect those that there are, by name."""
        return {name: each for name, each in self._asdict().items() if each is not None}


class ObservationRows(NamedTuple):
    """Segments laid out in R rows, one for each observation. Of a segment's last row, `rewards` is 0.

    rewards float32, steps_remaining int32 to the end of the segment, terminated bool of the segment, is_step bool: [R]
    """

    rewards: np.ndarray
    steps_remaining: np.ndarray
    terminated: np.ndarray
    is_step: np.ndarray

    @classmethod
    def from_batch(cls, batch: ExperienceBatch) -> ObservationRows:
        num_rows_S = batch.lengths + 1
        ends_S = np.cumsum(num_rows_S)
        steps_remaining = (np.repeat(ends_S, num_rows_S) - 1 - np.arange(len(batch.observations))).astype(np.int32)
        is_step = steps_remaining > 0
        return cls(_spread(batch.rewards, is_step), steps_remaining, np.repeat(batch.terminated, num_rows_S), is_step)


def sum_returns(
    rows: ObservationRows, chosen: np.ndarray, num_steps: int, discount: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(returns, discounts, rows after them) of the steps in the rows `chosen` [B], as `ReplaySample` has them.

    `rows` may be a ring. Returns of extreme rewards may be infinite.
    """
    steps_remaining = rows.steps_remaining[chosen]
    num_taken = np.minimum(steps_remaining, num_steps)
    offsets = np.arange(num_steps)
    factors = np.where(offsets < num_taken[:, None], discount**offsets, 0.0)  # [B, n]
    rewards = rows.rewards[(chosen[:, None] + offsets) % len(rows.rewards)]
    with np.errstate(over="ignore"):
        returns = (factors * rewards).sum(1).astype(np.float32)
    is_terminal = rows.terminated[chosen] & (num_taken == steps_remaining)
    discounts = np.where(is_terminal, 0.0, discount**num_taken).astype(np.float32)
    return returns, discounts, (chosen + num_taken) % len(rows.rewards)


def _spread(per_step: np.ndarray, is_step: np.ndarray) -> np.ndarray:
    """Values of steps [N, ...] in their rows [R, ...], 0 in the others."""
    full = np.zeros((len(is_step), *per_step.shape[1:]), per_step.dtype)
    full[is_step] = per_step
    return full


class Replay(Ring):
    """A ring of steps, in rows. Raises ConfigError when `size_bytes` is below one segment, and as a Ring does."""

    def __init__(
        self,
        experience: ExperienceSpec,
        size_bytes: int,
        priority_exponent: float,
        random: np.random.Generator,
        folder: Path | None = None,
    ) -> None:
        columns = {
            "observations": (experience.observation.numpy_dtype(), experience.observation.shape),
            "actions": (experience.action.numpy_dtype(), experience.action.shape),
            "rewards": (np.dtype(np.float32), ()),
            "steps_remaining": (np.dtype(np.int32), ()),
            "terminated": (np.dtype(np.bool_), ()),
        }
        for each in experience.extras:
            if each.name == MASKS:
                columns[MASKS] = (each.tensor.numpy_dtype(), each.tensor.shape)
        needed = experience.segment_length + 1
        super().__init__(size_bytes, columns, needed, "a segment", priority_exponent, random, folder)
        self._observations, self._actions = self._arrays["observations"], self._arrays["actions"]
        rewards, steps_remaining, terminated = (
            self._arrays[name] for name in ("rewards", "steps_remaining", "terminated")
        )
        self._masks = self._arrays.get(MASKS)
        self._rows = ObservationRows(rewards, steps_remaining, terminated, np.empty(0))

    @property
    def num_steps(self) -> int:
        """The steps that can be drawn."""
        return self.num_drawable

    def insert(self, batch: ExperienceBatch, errors: np.ndarray | None = None) -> None:
        """Store a batch's segments, in place of the oldest rows. errors: [N], for the priorities; by default all 1."""
        laid_out = ObservationRows.from_batch(batch)
        priorities = np.ones(batch.num_steps) if errors is None else self.compute_priorities(errors)
        columns = {
            "observations": batch.observations,
            "actions": _spread(batch.actions, laid_out.is_step),
            "rewards": laid_out.rewards,
            "steps_remaining": laid_out.steps_remaining,
            "terminated": laid_out.terminated,
        }
        if self._masks is not None:
            columns[MASKS] = batch.extras[MASKS]
        self.write(columns, _spread(priorities, laid_out.is_step))

    def sample(self, batch_size: int, num_steps: int, discount: float, beta: float) -> ReplaySample:
        """Draw `batch_size` steps, each with returns of `num_steps` (n) at most. Raises ValueError when it is empty."""
        slots, weights = self.draw(batch_size, beta)
        returns, discounts, following = sum_returns(self._rows, slots, num_steps, discount)
        return ReplaySample(
            self._row_of_slot[slots],
            self._observations[slots],
            self._actions[slots],
            returns,
            discounts,
            self._observations[following],
            weights,
            None if self._masks is None else self._masks[following],
        )

    def _find_complete(self, newest: int) -> np.ndarray:
        steps_remaining = self._arrays["steps_remaining"]
        is_complete: np.ndarray = (steps_remaining > 0) & (self._row_of_slot + steps_remaining <= newest)
        return is_complete
