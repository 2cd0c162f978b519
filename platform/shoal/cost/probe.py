"""What a running Trainer's steps cost, measured on a few of them.

Owns the counting of a life's first steps: some to warm up, some on the clock, and one looked at operator by operator;
all others run as if there were no probe. Called by the Trainer, on every rank at the same steps.

    probe = CostProbe(model, optimizer, world)
    with probe.step():                    # around train_step, clip and optimizer.step
        ...
    if probe.is_due:                      # true once, after the last of its steps, on every rank alike
        journal.event(MEASURED, **probe.measured().details())
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch.optim import Optimizer

from shoal.cost.reading import metering
from shoal.cost.table import CostTable, most
from shoal.parallel.model import ParallelModel
from shoal.parallel.world import World

WARM, TIMED = 3, 4


class CostProbe:
    """One for each rank and life of a run."""

    def __init__(self, model: ParallelModel, optimizer: Optimizer, world: World) -> None:
        self._model, self._optimizer, self._world = model, optimizer, world
        self._num_seen = 0
        self._seconds: list[float] = []
        self._busy_s = self._scheduled_s = 0.0
        self._found: dict[str, float] = {}
        self._is_told = False

    @property
    def is_due(self) -> bool:
        """Whether all is measured and nobody has asked for it yet."""
        return bool(self._found) and not self._is_told

    @property
    def is_done(self) -> bool:
        """Whether the probe can be dropped."""
        return self._is_told

    def step(self) -> AbstractContextManager[object]:
        """The context of the next step."""
        self._num_seen += 1
        if self._num_seen <= WARM or self._found:
            return nullcontext()
        return self._timed() if self._num_seen <= WARM + TIMED else self._metered()

    @contextmanager
    def _timed(self) -> Iterator[None]:
        busy_s, scheduled = sum(self._model.busy_by_stage.values()), self._model.scheduled_s
        began_s = self._now_s()
        yield
        self._seconds.append(self._now_s() - began_s)
        self._busy_s += sum(self._model.busy_by_stage.values()) - busy_s
        self._scheduled_s += self._model.scheduled_s - scheduled

    @contextmanager
    def _metered(self) -> Iterator[None]:
        with metering(self._model, self._optimizer) as found:
            yield
        found["step_s"] = sorted(self._seconds)[len(self._seconds) // 2]
        if self._scheduled_s > 0:
            found["bubble"] = 1.0 - self._busy_s / self._scheduled_s
        self._found = found

    def _now_s(self) -> float:
        if self._world.device.type == "cuda":
            torch.cuda.synchronize(self._world.device)
        return time.perf_counter()

    def measured(self) -> CostTable:
        """The table of all ranks. Collective."""
        self._is_told = True
        ranks = dict(enumerate(self._world.gather(self._found)))
        return CostTable(most(ranks), ranks=ranks)
