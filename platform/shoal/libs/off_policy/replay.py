"""The replay: the newest steps of experience in a ring of bounded bytes, drawn in proportion to their priority.

An algorithm inserts each batch that the learner takes, which is when its segments count as consumed, and draws from it
as often as it likes. Knows neither torch nor a discount before `sample`. Prioritised as in Schaul et al.
(arXiv:1511.05952, the proportional variant). Legend: N steps, S segments, B sampled steps, C rows of the ring.

A segment of L steps takes L + 1 rows, one for each observation, so that an observation is stored once. Rows are counted
from 0 without end; row r is at r % C. A new row overwrites the oldest one, and its priority with it.
"""

from __future__ import annotations

from collections.abc import Mapping
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


def lay_out(batch: ExperienceBatch) -> dict[str, np.ndarray]:
    """Segments in R rows, one for each observation: the columns of a Replay. In a segment's last row, `rewards` and
    `actions` are 0. steps_remaining int32 [R]: to the end of the segment."""
    num_rows_S = batch.lengths + 1
    ends_S = np.cumsum(num_rows_S)
    steps_remaining = (np.repeat(ends_S, num_rows_S) - 1 - np.arange(len(batch.observations))).astype(np.int32)
    is_step = steps_remaining > 0
    masks = {MASKS: batch.extras[MASKS]} if MASKS in batch.extras else {}
    return {
        "observations": batch.observations,
        "actions": _spread(batch.actions, is_step),
        "rewards": _spread(batch.rewards, is_step),
        "steps_remaining": steps_remaining,
        "terminated": np.repeat(batch.terminated, num_rows_S),
        **masks,
    }


def collect_all(batch: ExperienceBatch, num_steps: int, discount: float) -> ReplaySample:
    """Every step of a batch, in order, as a sample of a replay."""
    columns = lay_out(batch)
    slots = np.flatnonzero(columns["steps_remaining"])
    return collect_steps(columns, slots, num_steps, discount, slots, np.ones(len(slots), np.float32))


def collect_steps(
    columns: Mapping[str, np.ndarray],
    slots: np.ndarray,
    num_steps: int,
    discount: float,
    rows: np.ndarray,
    weights: np.ndarray,
) -> ReplaySample:
    """The steps at `slots` [B] of columns that may be a ring. Returns of extreme rewards may be infinite."""
    steps_remaining = columns["steps_remaining"][slots]
    num_taken = np.minimum(steps_remaining, num_steps)
    offsets = np.arange(num_steps)
    factors = np.where(offsets < num_taken[:, None], discount**offsets, 0.0)  # [B, n]
    rewards = columns["rewards"][(slots[:, None] + offsets) % len(columns["rewards"])]
    with np.errstate(over="ignore"):
        returns = (factors * rewards).sum(1).astype(np.float32)
    is_terminal = columns["terminated"][slots] & (num_taken == steps_remaining)
    discounts = np.where(is_terminal, 0.0, discount**num_taken).astype(np.float32)
    following, observations = (slots + num_taken) % len(columns["rewards"]), columns["observations"]
    masks = columns[MASKS][following] if MASKS in columns else None
    fields = observations[slots], columns["actions"][slots], returns, discounts, observations[following], weights
    return ReplaySample(rows, *fields, masks)


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

    @property
    def num_steps(self) -> int:
        """The steps that can be drawn."""
        return self.num_drawable

    def insert(self, batch: ExperienceBatch, errors: np.ndarray | None = None) -> None:
        """Store a batch's segments, in place of the oldest rows. errors: [N], for the priorities; by default all 1."""
        columns = lay_out(batch)
        priorities = np.ones(batch.num_steps) if errors is None else self.compute_priorities(errors)
        self.write(columns, _spread(priorities, columns["steps_remaining"] > 0))

    def sample(self, batch_size: int, num_steps: int, discount: float, beta: float) -> ReplaySample:
        """Draw `batch_size` steps, each with returns of `num_steps` (n) at most. Raises ValueError when it is empty."""
        slots, weights = self.draw(batch_size, beta)
        return collect_steps(self._arrays, slots, num_steps, discount, self._row_of_slot[slots], weights)

    def _find_complete(self, newest: int) -> np.ndarray:
        steps_remaining = self._arrays["steps_remaining"]
        is_complete: np.ndarray = (steps_remaining > 0) & (self._row_of_slot + steps_remaining <= newest)
        return is_complete
