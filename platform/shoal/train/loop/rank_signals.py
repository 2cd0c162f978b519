"""How ranks agree on what only one of them may have noticed: a request to stop, a clock, a loss that is not finite.

Every so many steps the ranks exchange a few numbers, in one collective, and all see the same. How many steps lie
between two exchanges follows from what is exchanged, so that a step of a millisecond is not burdened with one each.
Called by the Trainer; decides nothing.
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
    """What a rank has noticed; after an exchange, what any has, the mean of the clocks, and the sum of the losses.

    stop:          somebody asked for an end
    elapsed_s:     of this life of the run
    is_not_finite: a loss or gradient was not
    loss:          the sum of the steps' since the last exchange
    """

    stop: bool = False
    elapsed_s: float = 0.0
    is_not_finite: bool = False
    loss: float = 0.0


class RankSync:
    """Exchanges signs after every `interval` steps, the same on all ranks; alone it only keeps the time."""

    def __init__(self, world: World) -> None:
        self._world = world
        # A back end for CPU tensors of its own, so that an exchange never waits for the device.
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        self._interval, self._steps, self._last_s = 1, 0, time.monotonic()

    def is_due(self) -> bool:
        """Call once after each step: whether this is a step after which signs are exchanged."""
        self._steps += 1
        return self._steps >= self._interval

    def exchange(self, mine: RankSignals) -> RankSignals:
        """What all ranks have noticed together. Collective."""
        now, size = time.monotonic(), self._world.size
        step_s = (now - self._last_s) / max(self._steps, 1)
        loss = 0.0 if mine.is_not_finite else mine.loss
        values = torch.tensor([mine.stop, mine.elapsed_s, mine.is_not_finite, loss, step_s], dtype=torch.double)
        if self._group is not None:
            dist.all_reduce(values, group=self._group)
        stop, elapsed_s, is_not_finite, loss, step_s = values.tolist()
        wanted = int(INTERVAL_S * size / max(step_s, 1e-6))
        self._interval = min(MAX_INTERVAL, 2 * self._interval, max(1, wanted))
        self._steps, self._last_s = 0, now
        return RankSignals(stop > 0, elapsed_s / size, is_not_finite > 0, loss)
