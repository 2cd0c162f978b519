"""Rounds of local steps: when they end, who is waited for how long, and that each change is merged exactly once."""

import heapq
import math
import random
from dataclasses import dataclass
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.libs.asynchronous.clock import Clock, Push, RoundClock, Update
from shoal.libs.asynchronous.config import DiLoCoConfig, ParameterServerConfig
from shoal.libs.asynchronous.parameter_server.controller import make_clock
from shoal.train.spec import TrainSpec

EVERY = 8
LATENCY_S = 0.01  # of a push
Key = tuple[int, int, int]  # worker, incarnation, clock


@dataclass
class SimulatedWorker:
    incarnation: int
    clock: int
    step_s: float
    num_local: int = 0


class Simulation:
    """Workers of different speeds that take local steps, push when they have enough or are called, and may die."""

    def __init__(self, clock: RoundClock, seed: int) -> None:
        self.clock = clock
        self.random = random.Random(seed)
        self.now_s = 0.0
        self._events: list[tuple[float, int, int, int, str]] = []  # time, order, worker, incarnation, what
        self._order = count()
        self.updates: list[tuple[float, int, Update]] = []  # when, the round that it was in, which
        self.pushed: dict[Key, tuple[int, float]] = {}  # the round in which it arrived, and when
        self.workers: dict[int, SimulatedWorker] = {}
        for worker in range(clock.num_workers):
            self._start(worker)

    def _start(self, worker: int) -> None:
        incarnation = self.clock.join(worker)
        self.workers[worker] = SimulatedWorker(incarnation, self.clock.get_clock(worker), self.random.uniform(0.1, 2.0))
        self._schedule(worker, self.workers[worker].step_s, "step")

    def _schedule(self, worker: int, delay_s: float, what: str) -> None:
        entry = (self.now_s + delay_s, next(self._order), worker, self.workers[worker].incarnation, what)
        heapq.heappush(self._events, entry)

    def run(self, until_s: float) -> None:
        """Events in their order; the clock is advanced at its deadlines too, as by a timer."""
        while True:
            deadline_s = self.clock.closes_at_s
            event_s = self._events[0][0] if self._events else until_s
            self.now_s = min(until_s, event_s, deadline_s if deadline_s is not None else until_s)
            if self.now_s >= until_s:
                return
            if deadline_s is not None and self.now_s >= deadline_s:
                self._apply(self.clock.advance(self.now_s))
                continue
            _, _, number, incarnation, what = heapq.heappop(self._events)
            worker = self.workers.get(number)
            if worker is None or worker.incarnation != incarnation:
                continue
            if what == "step":
                self._finish_step(number, worker)
            else:
                key = (number, worker.incarnation, worker.clock)
                self.pushed[key] = self.clock.round, self.now_s
                self._apply(self.clock.prepare(Push(*key, 0, weight=worker.num_local), self.now_s))

    def _finish_step(self, number: int, worker: SimulatedWorker) -> None:
        worker.num_local += 1
        if worker.num_local == EVERY or self.clock.is_closing(worker.clock):
            self._schedule(number, LATENCY_S, "push")
        else:
            self._schedule(number, worker.step_s * self.random.uniform(0.5, 3.0), "step")

    def kill(self, number: int, *, replace: bool) -> None:
        dead = self.workers.pop(number)
        self._apply(self.clock.leave(number, dead.incarnation))
        if replace:
            self._start(number)

    def _apply(self, updates: list[Update]) -> None:
        for update in updates:
            self.updates.append((self.now_s, self.clock.round, update))
        for number in self.clock.take_released():
            worker = self.workers[number]
            worker.clock, worker.num_local = self.clock.get_clock(number), 0
            self._schedule(number, worker.step_s, "step")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_workers=st.integers(1, 6),
    quorum=st.one_of(st.none(), st.integers(1, 6), st.floats(0.1, 0.95)),
    grace_s=st.sampled_from([0.0, 0.3, 5.0]),
    deaths=st.integers(0, 4),
)
def test_each_change_is_merged_once_and_no_merge_waits_longer_than_the_grace_window(
    seed: int, num_workers: int, quorum: float | None, grace_s: float, deaths: int
) -> None:
    clock = RoundClock(num_workers, quorum=quorum, grace_s=grace_s)
    simulation = Simulation(clock, seed)
    for index in range(6):
        simulation.run(15.0 * (index + 1))
        if index < deaths and len(simulation.workers) > 1:
            number = simulation.random.choice(sorted(simulation.workers))
            simulation.kill(number, replace=simulation.random.random() < 0.5)
    assert clock.round > 1
    updates = [update for _, _, update in simulation.updates]
    assert [update.sequence for update in updates] == list(range(1, len(updates) + 1))
    merged = [(push.worker, push.incarnation, push.clock) for update in updates for push in update.pushes]
    assert len(merged) == len(set(merged))
    assert all(key[2] == clock.round for key in set(simulation.pushed) - set(merged))  # they wait for the next merge
    for at_s, at_round, update in simulation.updates:
        arrivals = [simulation.pushed[push.worker, push.incarnation, push.clock] for push in update.pushes]
        # `round` is the next one after a merge; a late change is in the merge of the round in which it arrived.
        assert {arrived for arrived, _ in arrivals} == {at_round if update.is_late else at_round - 1}
        if deaths == 0 and not update.is_late:
            needed = num_workers if quorum is None else quorum if isinstance(quorum, int) else quorum * num_workers
            had_quorum_s = sorted(arrived_s for _, arrived_s in arrivals)[math.ceil(min(needed, num_workers)) - 1]
            assert at_s <= had_quorum_s + grace_s + 1e-9
    if quorum is None:
        assert clock.num_late <= deaths  # only of workers that died after their push
        weights = {push.weight for update in updates if not update.is_late for push in update.pushes}
        assert weights == {EVERY}


def test_a_late_change_is_added_at_once_and_its_worker_goes_on_in_the_present_round() -> None:
    clock = RoundClock(3, quorum=2, grace_s=0.0)
    lives = [clock.join(worker) for worker in range(3)]
    assert clock.prepare(Push(0, lives[0], 0, 0, weight=8), 1.0) == []
    assert not clock.is_closing(0)
    [merge] = clock.prepare(Push(1, lives[1], 0, 0, weight=8), 2.0)
    assert [push.worker for push in merge.pushes] == [0, 1]
    assert clock.take_released() == [0, 1]
    assert clock.is_closing(0)  # worker 2 is called
    [late] = clock.prepare(Push(2, lives[2], 0, 0, weight=3), 2.5)
    assert (late.is_late, late.sequence, clock.take_released(), clock.get_clock(2)) == (True, 2, [2], 1)
    assert (clock.num_late, clock.num_dropped) == (1, 0)


def test_the_grace_window_lets_a_called_worker_push_what_it_has() -> None:
    clock = RoundClock(3, quorum=0.6, grace_s=1.0)
    lives = [clock.join(worker) for worker in range(3)]
    clock.prepare(Push(0, lives[0], 0, 0, weight=8, num_steps=8), 1.0)
    assert clock.prepare(Push(1, lives[1], 0, 0, weight=8, num_steps=8), 2.0) == []
    assert clock.is_closing(0)
    assert clock.advance(2.9) == []
    [merge] = clock.prepare(Push(2, lives[2], 0, 0, weight=2, num_steps=2), 2.95)  # all are there
    assert [push.weight for push in merge.pushes] == [8, 8, 2]
    assert clock.steps == 18 // 3
    clock.prepare(Push(0, lives[0], 1, 1), 3.0)
    clock.prepare(Push(1, lives[1], 1, 1), 3.5)
    assert clock.advance(4.4) == []
    [merge] = clock.advance(4.5)
    assert [push.worker for push in merge.pushes] == [0, 1]


def test_the_change_of_a_worker_that_died_before_the_merge_is_not_lost() -> None:
    clock = RoundClock(2)
    lives = [clock.join(worker) for worker in range(2)]
    clock.prepare(Push(1, lives[1], 0, 0), 1.0)
    [late] = clock.leave(1, lives[1])
    assert (late.is_late, late.pushes[0].worker) == (True, 1)
    [merge] = clock.prepare(Push(0, lives[0], 0, 0), 2.0)
    assert [push.worker for push in merge.pushes] == [0]


@pytest.mark.parametrize("make", [lambda: RoundClock(4, min_workers=2), lambda: Clock(4, None, min_workers=2)])
def test_with_fewer_workers_than_the_minimum_none_goes_on_until_another_joins(make: type[Clock]) -> None:
    clock = make()
    first = clock.join(0)
    assert clock.is_short_of_workers
    clock.prepare(Push(0, first, 0, 0), 1.0)
    assert clock.take_released() == []
    second = clock.join(1)
    updates = clock.advance(2.0)
    assert not clock.is_short_of_workers
    if clock.staleness is None:
        assert clock.take_released() == [0]
    else:
        assert updates == []
        assert [push.worker for push in clock.prepare(Push(1, second, 0, 0), 3.0)[0].pushes] == [0, 1]


def test_local_steps_have_rounds_unless_their_workers_never_wait() -> None:
    assert isinstance(make_clock(DiLoCoConfig(), 2), RoundClock)
    assert type(make_clock(DiLoCoConfig(staleness=None), 2)) is Clock
    assert type(make_clock(ParameterServerConfig(), 2)) is Clock


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kind": "diloco", "quorum": 1.0}, "quorum"),
        ({"kind": "diloco", "quorum": 0.5, "staleness": 2}, "quorum"),
        ({"kind": "parameter_server", "quorum": 2}, "quorum"),
        ({"kind": "diloco", "backups": 1}, "quorum"),
        ({"kind": "diloco", "every": 4, "fragments": 5}, "fragments"),
        ({"kind": "diloco", "every": 8, "fragments": 4, "delay": 2}, "delay"),
        ({"kind": "parameter_server", "fragments": 2}, "fragments"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainSpec.parse({"sync": changes})
