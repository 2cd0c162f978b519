"""Rounds of local steps that end without a barrier: when a quorum of workers has pushed, and a grace window has passed.

A round is what the workers do between two merges. Once a quorum has pushed, the others are called to push what they
have, which takes them one step of their own: a slow worker contributes fewer local steps, and is not waited for. When
all have pushed, or the window is over, the changes are merged: their mean, weighted by local steps. A change that comes
after its merge is late: every server adds it to what the next merge takes the mean of, and its worker goes on at once.
So each change is merged once. Quorum, grace window, weights by what each has done: Decoupled DiLoCo, 2604.21428; mean
weighted by samples: 1602.05629, algorithm 1. With fragments, round r is of fragment r modulo their number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.libs.asynchronous.clock import Clock, Push, Update
from shoal.libs.asynchronous.config import LocalStepsConfig, ServersConfig


@dataclass
class RoundClock(Clock):
    """A Clock whose updates are merges.

    quorum:  workers that must have pushed, or the fraction of those that take part; None: all
    grace_s: how long a merge waits for the others after that
    """

    quorum: int | float | None = None
    grace_s: float = 0.0
    num_late: int = 0  # changes that came after their merge
    round: int = 0
    closes_at_s: float | None = None  # the end of the grace window, once there is a quorum

    @property
    def steps(self) -> int:
        return self._first_step + self._num_steps // self.num_workers

    def join(self, worker: int) -> int:
        """A worker, or its replacement, takes part in the present round."""
        incarnation = super().join(worker)
        self._workers[worker].clock = self.round
        return incarnation

    def leave(self, worker: int, incarnation: int) -> list[Update]:
        """A worker is gone. A change that it has pushed is not lost."""
        push = self._prepared.get(worker)
        if push is None or push.incarnation != incarnation:
            return super().leave(worker, incarnation)
        return [self._add_late(push), *super().leave(worker, incarnation)]

    def prepare(self, push: Push, now_s: float = 0.0) -> list[Update]:
        if self._find_worker(push) is None:
            return []
        if push.clock < self.round:
            return [self._add_late(push)]
        self._prepared[push.worker] = push
        return self.advance(now_s)

    def advance(self, now_s: float) -> list[Update]:
        has_quorum = len(self._prepared) >= self._count_needed() and not self.is_short_of_workers
        if self.closes_at_s is None and has_quorum:
            self.closes_at_s = now_s + self.grace_s
        is_over = self.closes_at_s is not None and now_s >= self.closes_at_s
        return self._merge() if is_over else self._close_round()

    def is_closing(self, clock: int) -> bool:
        """Whether a worker in the round of this number is to push what it has."""
        return clock < self.round or (clock == self.round and self.closes_at_s is not None)

    def take_back(self) -> list[int]:
        self.closes_at_s = None
        return super().take_back()

    def _count_needed(self) -> int:
        num_present = len(self._workers) + len(self._expected)
        match self.quorum:
            case None:
                needed = num_present
            case int():
                needed = min(self.quorum, num_present)
            case _:
                needed = math.ceil(self.quorum * num_present)
        return max(1, needed)

    def _close_round(self) -> list[Update]:
        """The merge, if no worker is left to push."""
        return self._merge() if len(self._prepared) >= len(self._workers) + len(self._expected) else []

    def _merge(self) -> list[Update]:
        if not self._prepared or self.is_short_of_workers:
            return []
        pushes = [self._prepared[worker] for worker in sorted(self._prepared)]
        self._prepared.clear()
        self.closes_at_s = None
        self.sequence += 1
        self.round += 1
        for push in pushes:
            self._num_steps += push.num_steps
            self._workers[push.worker].clock = self.round
        return [Update(self.sequence, pushes)]

    def _add_late(self, push: Push) -> Update:
        self._prepared.pop(push.worker, None)
        self.num_late += 1
        self.sequence += 1
        self._num_steps += push.num_steps
        self._workers[push.worker].clock = self.round
        return Update(self.sequence, [push], is_late=True)


def make_clock(spec: ServersConfig, num_workers: int, min_workers: int | None = None) -> Clock:
    """The clock of a run with `num_workers` places, which goes on with `min_workers`."""
    if isinstance(spec, LocalStepsConfig) and spec.staleness == 0:
        return RoundClock(num_workers, 0, min_workers=min_workers, quorum=spec.quorum, grace_s=spec.grace_s)
    return Clock(num_workers, spec.staleness, spec.num_backups, min_workers=min_workers)
