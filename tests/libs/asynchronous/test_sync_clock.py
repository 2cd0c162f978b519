"""The clock of asynchronous training: who may go on, which gradient becomes an update, whatever the workers' speeds."""

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.libs.asynchronous.clock import Clock, Push, Update


@dataclass
class SimulatedWorker:
    incarnation: int
    clock: int = 0
    version: int = 0
    is_computing: bool = True


class Simulation:
    """Workers that take a random time for each step, on a clock that is advanced by hand."""

    def __init__(self, clock: Clock, seed: int) -> None:
        self.clock, self.random = clock, random.Random(seed)
        self.workers = {worker: self._start(worker) for worker in range(clock.num_workers)}
        self.updates: list[Update] = []

    def _start(self, worker: int) -> SimulatedWorker:
        incarnation = self.clock.join(worker)
        return SimulatedWorker(incarnation, self.clock.get_clock(worker), self.clock.sequence)

    def finish_one_step(self) -> None:
        """One of the computing workers is done, and pushes."""
        number = self.random.choice([number for number, each in self.workers.items() if each.is_computing])
        worker = self.workers[number]
        worker.is_computing = False
        self._apply(self.clock.prepare(Push(number, worker.incarnation, worker.clock, worker.version)))

    def kill_one(self, *, replace: bool) -> None:
        number = self.random.choice(list(self.workers))
        dead = self.workers.pop(number)
        self._apply(self.clock.leave(number, dead.incarnation))
        if replace:
            self.workers[number] = self._start(number)

    def _apply(self, updates: list[Update]) -> None:
        self.updates += updates
        for number in self.clock.take_released():
            worker = self.workers[number]
            worker.is_computing, worker.version = True, self.clock.sequence
            worker.clock = self.clock.get_clock(number)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_workers=st.integers(1, 6),
    staleness=st.one_of(st.none(), st.integers(0, 5)),
    deaths=st.integers(0, 4),
)
def test_no_worker_is_further_ahead_than_the_bound_and_no_push_counts_twice(
    seed: int, num_workers: int, staleness: int | None, deaths: int
) -> None:
    clock = Clock(num_workers, staleness)
    simulation = Simulation(clock, seed)
    for index in range(200):
        simulation.finish_one_step()
        if index % 50 == 25 and index // 50 < deaths and len(simulation.workers) > 1:
            simulation.kill_one(replace=bool(index % 2) or simulation.random.random() < 0.5)
        clocks = [worker.clock for worker in simulation.workers.values() if worker.is_computing]
        slowest = min(clock.get_clock(number) for number in simulation.workers)
        if staleness is not None:
            assert max(clocks) - slowest <= staleness
        assert clocks, "every worker waits for another"
    assert [update.sequence for update in simulation.updates] == list(range(1, len(simulation.updates) + 1))
    keys = [(push.worker, push.incarnation, push.clock) for update in simulation.updates for push in update.pushes]
    assert len(keys) == len(set(keys))
    if staleness == 0:
        assert all(update.staleness == [0] * len(update.pushes) for update in simulation.updates)


def test_an_update_does_not_wait_for_backups_whose_gradient_is_dropped() -> None:
    clock = Clock(3, backups=1)
    lives = [clock.join(worker) for worker in range(3)]
    clock.prepare(Push(0, lives[0], 0, 0))
    [update] = clock.prepare(Push(1, lives[1], 0, 0))
    assert [push.worker for push in update.pushes] == [0, 1]
    assert clock.take_released() == [0, 1]
    assert clock.prepare(Push(2, lives[2], 0, 0)) == []  # late
    assert (clock.num_dropped, clock.take_released(), clock.get_clock(2)) == (1, [2], 1)


def test_a_dead_worker_is_waited_for_no_more_and_its_late_push_is_dropped() -> None:
    clock = Clock(2)
    first, second = clock.join(0), clock.join(1)
    clock.prepare(Push(0, first, 0, 0))
    [update] = clock.leave(1, second)
    assert [push.worker for push in update.pushes] == [0]
    replacement = clock.join(1)
    assert replacement != second
    assert clock.get_clock(1) == 1
    assert clock.prepare(Push(1, second, 0, 0)) == []
    assert clock.num_dropped == 1
    assert clock.leave(1, second) == []  # again, of an earlier life
    assert clock.workers == [0, 1]


def test_steps_are_global_batches() -> None:
    free = Clock(4, staleness=None)
    lives = [free.join(worker) for worker in range(4)]
    for clock in range(6):
        free.prepare(Push(0, lives[0], clock, free.sequence))
    assert (free.sequence, free.steps) == (6, 1)
    free.resume(10)
    assert (free.sequence, free.steps) == (40, 10)
