"""Which pushes become updates, in which order, and which worker may go on: the consistency of asynchronous training.

Owns the clocks of all workers and the order of updates; knows neither weights, time nor sockets. Called by the
controller's process. Sources: SSP, 1302.0079 (Ho et al., 2013); backup workers, 1604.00981 (Chen et al., 2016).

    a worker's clock   how many of its steps it has finished
    a version          how many updates are in the weights: the sequence number of the newest
    τ of an update     how many updates came between the pull and the update
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

Settings = list[dict[str, Any]]  # of each group of the optimiser: learning rate, momentum


class Push(msgspec.Struct, frozen=True, array_like=True):
    """A gradient that all servers hold: of one step of one life of a worker.

    clock:               the number of the step, from 0
    version:             of the weights that it was computed with
    server_incarnations: of the servers that have the gradient
    absent:              the parameters without a gradient, by index
    settings:            of the optimiser's groups at this step
    num_bytes:           that the gradient has, as it was sent
    num_steps:           of the worker since its push before
    weight:              of the gradient in the mean of an update: the micro-batches of which it is the mean, or the
                         local steps that are in a change; if the loss is a `Mean`, the counts of these
    batch_s:             that one of them took
    """

    worker: int
    incarnation: int
    clock: int
    version: int
    server_incarnations: list[int] = []
    absent: list[int] = []
    settings: Settings = []
    num_bytes: int = 0
    num_steps: int = 1
    weight: float = 1.0
    batch_s: float = 0.0


class Update(msgspec.Struct, frozen=True, array_like=True):
    """The next step of the optimiser, on every server: over the mean of all micro-batches of `pushes`.

    is_late: no step is taken now, the next one also has these gradients in its mean
    """

    sequence: int
    pushes: list[Push]
    is_late: bool = False

    @property
    def staleness(self) -> list[int]:
        """τ of each push."""
        return [self.sequence - 1 - push.version for push in self.pushes]


@dataclass
class _Worker:
    incarnation: int
    clock: int
    is_waiting: bool = False  # for leave to begin its next step


@dataclass
class Clock:
    """The clocks of a run with `num_workers` places.

    staleness: steps that a worker may be ahead of the slowest; 0: one update for a step of all; None: no bound
    backups:   with 0, how many of the workers an update does not wait for
    min_workers: with fewer no worker goes on; None: all are waited for at the beginning, and none later
    """

    num_workers: int
    staleness: int | None = 0
    backups: int = 0
    sequence: int = 0  # updates so far
    num_dropped: int = 0  # pushes that came after their update (backups), or from an earlier life
    min_workers: int | None = None
    _first_step: int = 0  # of this attempt
    _num_steps: int = 0  # of all workers together since then
    _workers: dict[int, _Worker] = field(default_factory=dict)
    _prepared: dict[int, Push] = field(default_factory=dict)  # of the present round, by worker
    _incarnations: dict[int, int] = field(default_factory=dict)
    _expected: set[int] = field(default_factory=set)  # workers that have not joined yet: they are waited for

    def __post_init__(self) -> None:
        self._expected = set(range(self.num_workers)) if self.min_workers is None else set()

    @property
    def steps(self) -> int:
        """Finished steps of the run: so many global batches are in the weights."""
        return self.sequence if self.staleness == 0 else self._first_step + self._num_steps // self.num_workers

    @property
    def is_short_of_workers(self) -> bool:
        """Whether fewer take part than the run needs to go on."""
        return len(self._workers) < (self.min_workers or 0)

    def resume(self, steps: int) -> None:
        """Continue after so many steps."""
        self._first_step, self._num_steps = steps, 0
        self.sequence = self.version_after(steps)

    def version_after(self, steps: int) -> int:
        """The version of the weights after so many steps."""
        return steps if self.staleness == 0 else steps * self.num_workers

    def join(self, worker: int) -> int:
        """A worker, or its replacement, begins with the slowest; returns its incarnation."""
        self._incarnations[worker] = incarnation = self._incarnations.get(worker, 0) + 1
        others = [each.clock for number, each in self._workers.items() if number != worker]
        self._prepared.pop(worker, None)
        self._expected.discard(worker)
        self._workers[worker] = _Worker(incarnation, min(others, default=0))
        return incarnation

    def leave(self, worker: int, incarnation: int) -> list[Update]:
        """A worker is gone, or will not come (incarnation 0): it is waited for no more. Its updates stay.

        Returns the updates that follow.
        """
        if incarnation == 0:
            self._expected.discard(worker)
            return self._close_round()
        present = self._workers.get(worker)
        if present is None or present.incarnation != incarnation:
            return []
        del self._workers[worker]
        self._prepared.pop(worker, None)
        return self._close_round()

    def prepare(self, push: Push, now_s: float = 0.0) -> list[Update]:
        """A gradient has reached all servers at this time. Returns the updates that follow, in order.

        Until `take_released` names the worker, it may not begin another step.
        """
        worker = self._find_worker(push)
        if worker is None:
            return []
        if self.staleness != 0:
            worker.clock += 1
            self.sequence += 1
            self._num_steps += push.num_steps
            return [Update(self.sequence, [push])]
        if push.clock < worker.clock:  # its round was closed without it
            self.num_dropped += 1
            return []
        self._prepared[push.worker] = push
        return self._close_round()

    def _find_worker(self, push: Push) -> _Worker | None:
        """The worker of this push, which waits from now on; None: it was taken for dead."""
        worker = self._workers.get(push.worker)
        if worker is None or worker.incarnation != push.incarnation:
            self.num_dropped += 1
            return None
        worker.is_waiting = True
        return worker

    def advance(self, now_s: float) -> list[Update]:
        """The updates that are due at this time, or because workers have joined."""
        return self._close_round()

    def is_closing(self, clock: int) -> bool:
        """Whether the step of this number waits for late workers no longer than they need to push what they have."""
        return False

    def take_back(self) -> list[int]:
        """A server has lost the gradients that are prepared and no update yet: their workers, which push them again."""
        workers = sorted(self._prepared)
        for number in workers:
            self._workers[number].is_waiting = False
        self._prepared.clear()
        return workers

    def take_released(self) -> list[int]:
        """The waiting workers that may begin their next step now."""
        if self.is_short_of_workers:
            return []
        ahead = self.staleness or math.inf  # of the slowest; with 0 the rounds hold them together
        slowest = 0 if self._expected else min((each.clock for each in self._workers.values()), default=0)
        released = []
        for number, worker in self._workers.items():
            if worker.is_waiting and number not in self._prepared and worker.clock - slowest <= ahead:
                worker.is_waiting = False
                released.append(number)
        return released

    def get_clock(self, worker: int) -> int:
        """The number of its next step."""
        return self._workers[worker].clock

    @property
    def workers(self) -> list[int]:
        """Those that take part now."""
        return sorted(self._workers)

    def _close_round(self) -> list[Update]:
        """With staleness 0: the update of this round, if enough workers have pushed."""
        enough = max(1, len(self._workers) + len(self._expected) - self.backups)
        is_short = self.is_short_of_workers or len(self._prepared) < enough
        if self.staleness != 0 or not self._prepared or is_short:
            return []
        pushes = [self._prepared[worker] for worker in sorted(self._prepared)]
        self._prepared.clear()
        self.sequence += 1
        for worker in self._workers.values():
            worker.clock += 1
        return [Update(self.sequence, pushes)]


@dataclass
class RoundClock(Clock):
    """A Clock whose updates are merges: rounds of local steps that end without a barrier.

    A round is what the workers do between two merges. Once a quorum of workers has pushed, the others are called to
    push what they have, which takes them one step of their own: a slow worker contributes fewer local steps, and is not
    waited for. When all have pushed, or a grace window is over, the changes are merged: their mean, weighted by local
    steps. A change that comes after its merge is late: every server adds it to what the next merge takes the mean of,
    and its worker goes on at once. So each change is merged once. Quorum, grace window, weights by what each has done:
    Decoupled DiLoCo, 2604.21428; mean weighted by samples: 1602.05629, algorithm 1. With fragments, round r is of
    fragment r modulo their number.

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
