"""Segments of experience as tensors: end to end, as they come, and side by side in a grid, for recursions over time.

Called by the algorithms. Legend: N steps, S segments laid end to end, B = S segments padded to T = the longest one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from shoal.models.action_distribution import mask_logits
from shoal.models.actor_critic import AnyActorCritic
from shoal.rl.experience.queue import ExperienceBatch
from shoal.wire.action_masks import MASKS
from shoal.wire.experience_spec import STATE

CPU = torch.device("cpu")
MOMENTS = ("error", "squared_error", "target", "squared_target")  # of values: see `compute_moments`


class SegmentBatch(NamedTuple):
    """S segments laid end to end: observations [N+S, *obs] (one more a segment), actions, rewards and behaviour
    log_probabilities [N], lengths_B int64 [S], terminated_B bool [S]; of a recurrent policy, the states [S, size]
    before their first observations; masks bool [N+S, K], where the run has action masks."""

    observations: Tensor
    actions: Tensor
    rewards: Tensor
    log_probabilities: Tensor
    lengths_B: Tensor
    terminated_B: Tensor
    masks: Tensor | None = None
    states: Tensor | None = None


class SegmentGrid(NamedTuple):
    """Where each observation and step of a batch is in a flat [T+1, B] grid.

    step_rows: [N], the row of the observation before each step
    position:  [N], of each step in the grid; position_of_row: [N+S], of each observation
    """

    step_rows: Tensor
    position: Tensor
    position_of_row: Tensor
    longest: int
    num_segments: int

    def spread(self, per_step: Tensor) -> Tensor:
        """Values of steps [K, N] as grids [K, T, B], with 0 on padding."""
        size = (self.longest + 1) * self.num_segments
        flat = per_step.new_zeros(len(per_step), size).index_copy_(1, self.position, per_step)
        return flat.view(len(per_step), self.longest + 1, self.num_segments)[:, :-1]

    def spread_rows(self, per_row: Tensor) -> Tensor:
        """Values of observations [N+S] as a grid [T+1, B]."""
        flat = per_row.new_zeros((self.longest + 1) * self.num_segments)
        return flat.index_copy_(0, self.position_of_row, per_row).view(self.longest + 1, self.num_segments)

    def collect(self, grid_TB: Tensor) -> Tensor:
        """The values [N] of a grid [T, B] at the steps."""
        return grid_TB.flatten()[self.position]


def build_batch(
    observations: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    log_probabilities: np.ndarray,
    lengths: np.ndarray,
    terminated: np.ndarray,
    device: torch.device = CPU,
    masks: np.ndarray | None = None,
) -> SegmentBatch:
    """Tensors from the arrays of an experience batch; observations become float32, but for frames of bytes."""
    arrays = [*map(np.array, (actions, rewards, log_probabilities, lengths, terminated))]
    if masks is not None:
        arrays.append(np.array(masks))
    return SegmentBatch(to_observations(observations, device), *(torch.from_numpy(each).to(device) for each in arrays))


def to_observations(observations: np.ndarray, device: torch.device = CPU) -> Tensor:
    """float32 [N, *obs], in memory of its own; frames of bytes stay uint8."""
    is_bytes = observations.dtype == np.uint8 and observations.ndim > 2
    return torch.from_numpy(np.array(observations, np.uint8 if is_bytes else np.float32)).to(device)


def to_tensors(batch: ExperienceBatch, device: torch.device = CPU) -> SegmentBatch:
    """The tensors of a batch as it comes from the queue."""
    tensors = build_batch(
        batch.observations,
        batch.actions,
        batch.rewards,
        batch.log_probabilities,
        batch.lengths,
        batch.terminated,
        device,
        batch.extras.get(MASKS),
    )
    states = batch.extras.get(STATE)
    return tensors if states is None else tensors._replace(states=torch.from_numpy(np.array(states)).to(device))


def evaluate_rows(model: AnyActorCritic, batch: SegmentBatch) -> tuple[Tensor, Tensor]:
    """The model's outputs [N+S, ...], of which action masks leave the allowed ones, and values [N+S] at every
    observation; a recurrent one unrolls each segment from its stored state."""
    outputs: Tensor
    values: Tensor
    if batch.states is None:
        outputs, values = model(batch.observations)
        return mask_logits(outputs, batch.masks), values
    grid = make_grid(batch.lengths_B)
    size = (grid.longest + 1, grid.num_segments)
    rows = batch.observations.new_zeros(size[0] * size[1], *batch.observations.shape[1:])
    observations = rows.index_copy_(0, grid.position_of_row, batch.observations).unflatten(0, size)
    outputs, values, _ = model(observations, batch.states)
    outputs, values = outputs.flatten(0, 1)[grid.position_of_row], values.flatten()[grid.position_of_row]
    return mask_logits(outputs, batch.masks), values


def compute_log_pi(model: AnyActorCritic, batch: SegmentBatch) -> Tensor:
    """log π(a|x) of each step [N], differentiable."""
    outputs, _ = evaluate_rows(model, batch)
    step_rows = make_grid(batch.lengths_B).step_rows
    log_pi, _ = model.distribution.evaluate(outputs.index_select(0, step_rows), batch.actions)
    return log_pi


@torch.no_grad()
def compute_log_ratios(model: AnyActorCritic, batch: SegmentBatch) -> np.ndarray:
    """log π(a|x) - log μ(a|x) of each step [N]: of `model`, and of the policy that has acted."""
    result: np.ndarray = (compute_log_pi(model, batch) - batch.log_probabilities).cpu().numpy()
    return result


@torch.no_grad()
def compute_moments(values: Tensor, targets: Tensor, num_steps: int) -> Tensor:
    """[4]: sums of errors, their squares, targets, their squares, over steps [N], divided by the `num_steps` of all
    learners, which add theirs up for `explain_variance`."""
    errors = targets - values
    return torch.stack([errors, errors.square(), targets, targets.square()]).sum(1) / num_steps


def explain_variance(error: float, squared_error: float, target: float, squared_target: float) -> float:
    """1 - Var(targets - values) / Var(targets), at least -1; 0 where the targets are all alike."""
    variance = squared_target - target**2
    if variance <= 1e-5 * squared_target:  # what rounding leaves
        return 0.0
    return max(-1.0, 1.0 - (squared_error - error**2) / variance)


def make_grid(lengths_B: Tensor) -> SegmentGrid:
    """The grid of segments of these lengths.

    Observation rows: segment b starts at sum(lengths[:b]) + b and has lengths[b] + 1 rows, the last the bootstrap.
    """
    device = lengths_B.device
    num_segments = len(lengths_B)
    longest = int(lengths_B.max())
    num_rows_B = lengths_B + 1
    end_B = num_rows_B.cumsum(0)
    num_rows = int(end_B[-1])
    step_rows = (
        torch.ones(num_rows, dtype=torch.bool, device=device).index_fill_(0, end_B - 1, False).nonzero().squeeze(-1)
    )
    column_of_row = torch.repeat_interleave(torch.arange(num_segments, device=device), num_rows_B)
    row_in_column = torch.arange(num_rows, device=device) - (end_B - num_rows_B)[column_of_row]
    position_of_row = row_in_column * num_segments + column_of_row
    return SegmentGrid(step_rows, position_of_row[step_rows], position_of_row, longest, num_segments)


def get_discounts(batch: SegmentBatch, discount: float) -> Tensor:
    """[N]: γ; 0 on a step that terminated its episode."""
    discounts = torch.full_like(batch.rewards, discount)
    last_of_terminated = (batch.lengths_B.cumsum(0) - 1)[batch.terminated_B]
    discounts[last_of_terminated] = 0.0
    return discounts
