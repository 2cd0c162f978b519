"""The replay of sequences: consecutive steps of one segment, stored with the recurrent state before them.

Called by R2D2. A segment is divided into sequences: each trains up to U steps, burns in over the steps before these,
and ends with the up to n steps that its last targets need. So sequences overlap, and each step is trained by one.

Legend: K sequences, B sampled ones, U sequence_length, R = burn_in + U + n rows of observations, S the size of a state.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

from shoal.extend.rl import ExperienceBatch
from shoal.libs.off_policy.ring import Ring
from shoal.wire import ExperienceSpec
from shoal.wire.action_masks import MASKS


class SequenceShape(NamedTuple):
    """sequence_length: U, trained steps; burn_in: steps before them, at most U; num_steps: n of the targets."""

    sequence_length: int
    burn_in: int
    num_steps: int

    @property
    def num_rows(self) -> int:
        return self.burn_in + self.sequence_length + self.num_steps


class Sequences(NamedTuple):
    """K sequences, padded to one length; row `burn_in` of the observations belongs to the first trained step.

    observations [K, R, *obs]; actions [K, U, *act] and rewards float32 [K, U+n-1] from the first trained step on
    states float32 [K, S]: before the first row of the burn-in, or of the trained steps where there is none
    has_burn_in bool [K]:  false at the beginning of a segment, whose first observation the state belongs to
    num_trained int32 [K]: trained steps; num_steps int32 [K]: steps from the first of them on
    terminated bool [K]:   the last of the `num_steps` terminated the episode
    masks bool [K, U+n, A]: the actions allowed at the observations from the first trained step on, in a run with masks
    """

    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    states: np.ndarray
    has_burn_in: np.ndarray
    num_trained: np.ndarray
    num_steps: np.ndarray
    terminated: np.ndarray
    masks: np.ndarray | None = None

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Collect those that there are, by name."""
        return {name: each for name, each in self._asdict().items() if each is not None}


class SequenceStarts(NamedTuple):
    """The segment of each sequence [K], its first trained step there, and the first row that needs its state."""

    segments: np.ndarray
    first_steps: np.ndarray
    state_rows: np.ndarray


def find_starts(lengths: np.ndarray, shape: SequenceShape) -> SequenceStarts:
    """Where the sequences of segments of these lengths [S] begin; those that begin at the same step stand together."""
    firsts = np.arange(0, int(lengths.max()), shape.sequence_length)
    first_index, segments = np.nonzero(lengths > firsts[:, None])
    first_steps = firsts[first_index]
    return SequenceStarts(segments, first_steps, np.maximum(first_steps - shape.burn_in, 0))


def split_segments(
    batch: ExperienceBatch, starts: SequenceStarts, states: np.ndarray, shape: SequenceShape
) -> Sequences:
    """The sequences that begin at `starts` [K], with their states [K, S]. Padding repeats observations and actions."""
    lengths, first_steps = batch.lengths[starts.segments], starts.first_steps
    num_left = lengths - first_steps
    num_steps = np.minimum(num_left, shape.sequence_length + shape.num_steps - 1)
    step_offsets = (np.cumsum(batch.lengths) - batch.lengths)[starts.segments]
    row_offsets = step_offsets + starts.segments

    def index(offsets: np.ndarray, begin: int, count: int, last: np.ndarray) -> np.ndarray:
        steps = first_steps[:, None] + np.arange(begin, begin + count)
        result: np.ndarray = offsets[:, None] + np.clip(steps, 0, last[:, None])
        return result

    is_step = np.arange(shape.sequence_length + shape.num_steps - 1) < num_steps[:, None]
    rewards = batch.rewards[index(step_offsets, 0, is_step.shape[1], lengths - 1)]
    masks = batch.extras.get(MASKS)
    return Sequences(
        batch.observations[index(row_offsets, -shape.burn_in, shape.num_rows, lengths)],
        batch.actions[index(step_offsets, 0, shape.sequence_length, lengths - 1)],
        np.where(is_step, rewards, np.float32(0)),
        states,
        (first_steps > 0) & (shape.burn_in > 0),
        np.minimum(num_left, shape.sequence_length).astype(np.int32),
        num_steps.astype(np.int32),
        batch.terminated[starts.segments] & (num_steps == num_left),
        None if masks is None else masks[index(row_offsets, 0, shape.num_rows - shape.burn_in, lengths)],
    )


class SequenceReplay(Ring):
    """A ring of sequences. Raises ConfigError when `size_bytes` is below those of one segment, and as a Ring does."""

    def __init__(
        self,
        experience: ExperienceSpec,
        shape: SequenceShape,
        state_size: int,
        size_bytes: int,
        priority_exponent: float,
        random: np.random.Generator,
        folder: Path | None = None,
    ) -> None:
        observation = experience.observation
        action = experience.action
        real = np.dtype(np.float32)
        columns = {
            "observations": (observation.numpy_dtype(), (shape.num_rows, *observation.shape)),
            "actions": (action.numpy_dtype(), (shape.sequence_length, *action.shape)),
            "rewards": (real, (shape.sequence_length + shape.num_steps - 1,)),
            "states": (real, (state_size,)),
            "has_burn_in": (np.dtype(np.bool_), ()),
            "num_trained": (np.dtype(np.int32), ()),
            "num_steps": (np.dtype(np.int32), ()),
            "terminated": (np.dtype(np.bool_), ()),
        }
        for each in experience.extras:
            if each.name == MASKS:
                columns[MASKS] = (each.tensor.numpy_dtype(), (shape.num_rows - shape.burn_in, *each.tensor.shape))
        needed = -(-experience.segment_length // shape.sequence_length)
        super().__init__(size_bytes, columns, needed, "a segment", priority_exponent, random, folder)

    @property
    def num_steps(self) -> int:
        """Trained steps of the sequences that can be drawn."""
        is_drawable = self._tree.get(np.arange(self.capacity)) > 0
        return int(self._arrays["num_trained"][is_drawable].sum())

    def insert(self, sequences: Sequences, errors: np.ndarray) -> None:
        """Store sequences in place of the oldest ones. errors: [K], for the priorities."""
        self.write(sequences.to_arrays(), self.compute_priorities(errors))

    def sample(self, batch_size: int, beta: float) -> tuple[np.ndarray, Sequences, np.ndarray]:
        """(rows int64 for `update_priorities`, sequences, weights float32), of `batch_size` drawn sequences [B].

        Raises ValueError when it is empty.
        """
        slots, weights = self.draw(batch_size, beta)
        result = Sequences(**{name: self._arrays[name][slots] for name in Sequences._fields if name in self._arrays})
        return self._row_of_slot[slots], result, weights
