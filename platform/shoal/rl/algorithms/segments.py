"""Segments of experience as tensors: end to end, as they come, and side by side in a grid, for recursions over time.

Called by the algorithms. Legend: N steps, S segments laid end to end, B = S segments padded to T = the longest one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.rl.experience.queue import ExperienceBatch


class SegmentBatch(NamedTuple):
    """S segments laid end to end: observations [N+S, *obs] (one more a segment), actions, rewards and behaviour
    log_probabilities [N], lengths_B int64 [S], terminated_B bool [S]."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    log_probabilities: Tensor
    lengths_B: Tensor
    terminated_B: Tensor


class SegmentGrid(NamedTuple):
    """Where each observation and step of a batch is in a flat [T+1, B] grid.

    step_rows: [N], the row of the observation before each step
    place:     [N], of each step in the grid; place_of_row: [N+S], of each observation
    """

    step_rows: Tensor
    place: Tensor
    place_of_row: Tensor
    longest: int
    num_segments: int

    def spread(self, per_step: Tensor) -> Tensor:
        """Values of steps [K, N] as grids [K, T, B], with 0 on padding."""
        size = (self.longest + 1) * self.num_segments
        flat = per_step.new_zeros(len(per_step), size).index_copy_(1, self.place, per_step)
        return flat.view(len(per_step), self.longest + 1, self.num_segments)[:, :-1]

    def spread_rows(self, per_row: Tensor) -> Tensor:
        """Values of observations [N+S] as a grid [T+1, B]."""
        flat = per_row.new_zeros((self.longest + 1) * self.num_segments)
        return flat.index_copy_(0, self.place_of_row, per_row).view(self.longest + 1, self.num_segments)

    def collect(self, grid_TB: Tensor) -> Tensor:
        """The values [N] of a grid [T, B] at the steps."""
        return grid_TB.flatten()[self.place]


def build_batch(
    observations: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    log_probabilities: np.ndarray,
    lengths: np.ndarray,
    terminated: np.ndarray,
) -> SegmentBatch:
    """Tensors from the arrays of an experience batch; observations become float32."""
    return SegmentBatch(
        torch.from_numpy(np.array(observations, np.float32)),
        torch.from_numpy(np.array(actions)),
        torch.from_numpy(np.array(rewards)),
        torch.from_numpy(np.array(log_probabilities)),
        torch.from_numpy(np.array(lengths)),
        torch.from_numpy(np.array(terminated)),
    )


def to_tensors(batch: ExperienceBatch) -> SegmentBatch:
    """The tensors of a batch as it comes from the queue."""
    return build_batch(
        batch.observations,
        batch.actions,
        batch.rewards,
        batch.log_probabilities,
        batch.lengths,
        batch.terminated,
    )


def make_grid(lengths_B: Tensor) -> SegmentGrid:
    """The grid of segments of these lengths.

    Observation rows: segment b starts at sum(lengths[:b]) + b and has lengths[b] + 1 rows, the last the bootstrap.
    """
    num_segments, longest = len(lengths_B), int(lengths_B.max())
    num_rows_B = lengths_B + 1
    end_B = num_rows_B.cumsum(0)
    num_rows = int(end_B[-1])
    step_rows = torch.ones(num_rows, dtype=torch.bool).index_fill_(0, end_B - 1, False).nonzero().squeeze(-1)
    column_of_row = torch.repeat_interleave(torch.arange(num_segments), num_rows_B)
    place_of_row = (torch.arange(num_rows) - (end_B - num_rows_B)[column_of_row]) * num_segments + column_of_row
    return SegmentGrid(step_rows, place_of_row[step_rows], place_of_row, longest, num_segments)


def get_discounts(batch: SegmentBatch, discount: float) -> Tensor:
    """[N]: γ; 0 on a step that terminated its episode."""
    discounts = torch.full_like(batch.rewards, discount)
    last_of_terminated = (batch.lengths_B.cumsum(0) - 1)[batch.terminated_B]
    discounts[last_of_terminated] = 0.0
    return discounts
