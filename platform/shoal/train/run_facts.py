"""What a Task may know of its run. Made where a run is checked or built; knows no spec."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ROUNDING = 1e-9  # 0.07 epochs of 100 steps are 7 steps, not 7.000000000000001


@dataclass(frozen=True)
class RunFacts:
    """A run before its model is built.

    epochs, steps:   when it ends, as far as `stop` says
    steps_per_epoch: None if the data has no length
    batch_size, accumulate, clip_norm, precision: as in the spec
    rank, num_ranks: this process, and how many take part; of a check before the workers start, the first
    """

    epochs: float | None
    steps: int | None
    steps_per_epoch: int | None
    batch_size: int
    accumulate: int
    clip_norm: float | None
    precision: str
    rank: int = 0
    num_ranks: int = 1

    @property
    def total_steps(self) -> int | None:
        """Steps until the nearest end in steps or epochs; None where neither is known."""
        per_epoch, epochs = self.steps_per_epoch, self.epochs
        by_epochs = None if epochs is None or per_epoch is None else epochs_to_steps(epochs, per_epoch)
        return min((each for each in (self.steps, by_epochs) if each is not None), default=None)


def epochs_to_steps(epochs: float, steps_per_epoch: int) -> int:
    """The smallest number of steps that completes `epochs` epochs."""
    return max(math.ceil(epochs * steps_per_epoch - _ROUNDING), 1)
