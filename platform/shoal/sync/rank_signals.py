"""Synchronise between ranks what only one of them may have noticed: a stop request, a clock, a non-finite loss.

After a number of steps the ranks exchange a few numbers in one collective, so that all have the same. The interval
follows from the exchanged numbers, so that a step of a millisecond does not pay for an exchange. Called by `AllReduce`;
decides nothing.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
import torch.distributed as dist

from shoal.parallel import World

INTERVAL_S = 0.5
MAX_INTERVAL = 1_000


class RankSignals(NamedTuple):
    """One rank's observations; after an exchange, those of any rank, the mean of the clocks, and the sum of the losses.

    stop:          a stop was requested
    elapsed_s:     of this attempt of the run
    is_not_finite: a loss or gradient was not finite
    loss:          the sum over the steps since the last exchange, of `num_losses` of them, or of steps with this weight
    ends:          a callback wants the run to end
    named_losses:  the sums of further losses, in the order of their names, which all ranks have
    """

    stop: bool = False
    elapsed_s: float = 0.0
    is_not_finite: bool = False
    loss: float = 0.0
    num_losses: float = 0.0
    ends: bool = False
    named_losses: tuple[float, ...] = ()


class RankSync:
    """Exchanges signals after every `interval` steps, the same on all ranks; with one rank it only measures time."""

    def __init__(self, world: World) -> None:
        self._world = world
        # A CPU back end of its own, so that an exchange never waits for the device.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._interval = 1
        self._steps = 0
        self._last_s = time.monotonic()

    def is_due(self) -> bool:
        """Call once after each step: whether to exchange signals now."""
        self._steps += 1
        return self._steps >= self._interval

    def exchange(self, mine: RankSignals) -> RankSignals:
        """Combine the signals of all ranks. Collective."""
        now, size = time.monotonic(), self._world.size
        step_s = (now - self._last_s) / max(self._steps, 1)
        loss = 0.0 if mine.is_not_finite else mine.loss
        values = torch.tensor(
            [
                mine.stop,
                mine.elapsed_s,
                mine.is_not_finite,
                loss,
                mine.num_losses,
                step_s,
                mine.ends,
                *mine.named_losses,
            ],
            dtype=torch.double,
        )
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        stop, elapsed_s, is_not_finite, loss, num_losses, step_s, ends, *named = values.tolist()
        wanted = int(INTERVAL_S * size / max(step_s, 1e-6))
        self._interval = min(MAX_INTERVAL, 2 * self._interval, max(1, wanted))
        self._steps, self._last_s = 0, now
        return RankSignals(stop > 0, elapsed_s / size, is_not_finite > 0, loss, num_losses, ends > 0, tuple(named))
