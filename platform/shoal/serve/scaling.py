"""How many replicas an endpoint should have now: a decision from what its replicas counted.

Owns the rates of the last minute and the curve of forwards. Called by the Ray shell every second, and by replays of
traces. Decides and never acts: it starts no replica and reads no clock.

- Up: the least number whose predicted 99th percentile meets the objective at the rate of the last `UP_WINDOW_S`, and at
  which the waiting requests are answered within `CATCH_UP_S`.
- Down: the most that was needed within the last `DOWN_WINDOW_S`.
- A replica's event loop parses and answers one request at a time: replicas are also enough to keep it free for a part.
- Floors and `min` hold always, a spent budget nothing above them.

A replica reports the counts and forwards of its models as one `ReplicaLoad`, and that as flat numbers, since Ray Serve
carries numbers by name. A request is the unit, not a row: a request of several rows arrives at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import accumulate
from statistics import median
from typing import Literal, Protocol

from shoal.batching.batcher import BatcherCounts
from shoal.batching.latency_model import ForwardTime, Measured
from shoal.plugins.find import find_extension
from shoal.serve.spec.scale import MINUTES_PER_WEEK, ScaleSpec

GROUP = "shoal.capacity"  # of entry points; the library `capacity` simulates
UP_WINDOW_S = 5.0
DOWN_WINDOW_S = 60.0
CATCH_UP_S = 5.0
# The rate may rise on while a replica starts, which takes seconds (benchmarks/serving/autoscaling.py).
RATE_MARGIN = 1.4
MAX_LOOP_SHARE = 0.7  # of an event loop's time
CURVE_CHANGE, RELEARN_S = 0.15, 10.0  # a smaller or sooner change of the curve leaves the rates that were found
SETTLE_S = 10.0
MAX_SEEN = 256  # replicas, of which a late report could still come
Reason = Literal["load", "floor", "idle", "budget", "unmeasured"]


class Budget:
    """The account of an endpoint's replica-hours in the present day or month, in UTC.

    `min` and the floors of the rest of the period are set aside first; replicas beyond them run only on what is left.

    spent_s: replica-seconds, charged until `charged_s`; both may be those of an earlier object of this `period`
    """

    def __init__(self, spec: ScaleSpec, charged_s: float | None = None, spent_s: float = 0.0) -> None:
        hours, self.period = spec.budget_hours
        self._budget_s = hours * 3600
        self._floors = spec.list_week_floors()
        self._reserved = [0, *accumulate(each * 60 for each in self._floors)]
        self.charged_s, self.spent_s = charged_s, spent_s

    def spend(self, replicas: int, now_s: float) -> None:
        """Charge replicas that ran until now, since the last call."""
        start_s, since_s = self._find_start(now_s), now_s if self.charged_s is None else self.charged_s
        if since_s < start_s:
            since_s, self.spent_s = start_s, 0.0
        self.spent_s += replicas * (now_s - since_s)
        self.charged_s = now_s

    def is_available(self, now_s: float) -> bool:
        """Whether replicas beyond `min` and the floors may run."""
        reserved_s = self._reserve_until(self._find_end(now_s)) - self._reserve_until(now_s)
        return self.spent_s + reserved_s < self._budget_s

    def find_rejection_end(self, now_s: float) -> float:
        """Until when it allows no replica: its next period, or the next floor; 0 when it allows one now."""
        minute = math.floor(_count_minutes(now_s))
        weeks_floors = (self._floors[(minute + each) % MINUTES_PER_WEEK] for each in range(MINUTES_PER_WEEK))
        to_floor = next((number for number, floor in enumerate(weeks_floors) if floor), None)
        if to_floor == 0 or self.is_available(now_s):
            return 0.0
        end_s = self._find_end(now_s)
        return end_s if to_floor is None else min(end_s, math.floor(now_s / 60) * 60.0 + to_floor * 60)

    def _find_start(self, now_s: float) -> float:
        now = datetime.fromtimestamp(now_s, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        return (now.replace(day=1) if self.period == "month" else now).timestamp()

    def _find_end(self, now_s: float) -> float:
        start = datetime.fromtimestamp(self._find_start(now_s), UTC)
        end = (start.replace(day=28) + timedelta(days=4)).replace(day=1) if self.period == "month" else (
            start + timedelta(days=1)
        )  # fmt: skip
        return end.timestamp()

    def _reserve_until(self, now_s: float) -> float:
        """Since the beginning of some week long ago."""
        weeks, minute = divmod(_count_minutes(now_s), MINUTES_PER_WEEK)
        before, after = self._reserved[int(minute)], self._reserved[int(minute) + 1]
        return weeks * self._reserved[-1] + before + (minute % 1) * (after - before)


def _count_minutes(now_s: float) -> float:
    """Since the beginning of some week long ago."""
    return now_s / 60 - 4 * 24 * 60  # 1970 began on a Thursday: four days before a Monday


@dataclass(frozen=True)
class ReplicaLoad:
    """The newest figures of a replica.

    requests: that it has received since its start, rejected ones too
    waiting:  requests in its queues
    loop_s:   processor time of its event loop since its start
    curve:    (requests in a batch, seconds), of the models together; empty before the first forward
    """

    requests: float
    waiting: float
    loop_s: float
    curve: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class EndpointLoad:
    """The newest figures of an endpoint.

    running:  replicas that answer
    planned:  those that should, the starting ones included
    unrouted: requests that wait at the ingress, since no replica runs
    """

    now_s: float
    replicas: Mapping[str, ReplicaLoad]
    running: int
    planned: int
    unrouted: float = 0.0


@dataclass(frozen=True)
class Decision:
    """replicas: how many there should be. reason: what decided. requests_per_s: of the last few seconds."""

    replicas: int
    reason: Reason
    requests_per_s: float = 0.0


class CapacityModel(Protocol):
    """The rates that replicas sustain, of the seconds of forwards over 1, 2, ... requests and of the seconds that the
    99th percentile must not exceed."""

    def count_replicas(self, requests_per_s: float, most: int) -> int:
        """The least number of replicas that meets the objective at this rate; `most` where none does."""
        ...


class ScalePolicy:
    """`decide` is called with the present load, in the order of time, about once a second."""

    def __init__(self, spec: ScaleSpec, objective_s: float, budget: Budget | None = None) -> None:
        self._spec, self._objective_s = spec, objective_s
        self._floors = spec.parse_floors()
        self.budget = budget or (Budget(spec) if spec.budget else None)
        self._seen: dict[str, ReplicaLoad] = {}
        self._arrived = self._loop_s = 0.0
        self._history: deque[tuple[float, float, float]] = deque()  # time, requests and loop time until then
        self._needs: deque[tuple[float, int]] = deque()  # time and need, later needs lower
        self._curve: tuple[tuple[int, float], ...] = ()
        self._make_capacity: Callable[[list[float], float], CapacityModel] = find_extension("simulated", GROUP)
        self._capacity: CapacityModel | None = None
        self._requested_s = self._learned_s = -math.inf
        self._began_s, self._planned = math.inf, -1

    def decide(self, load: EndpointLoad) -> Decision:
        """The number of replicas that the endpoint should have."""
        self._count(load)
        self._learn([each.curve for each in load.replicas.values() if each.curve], load.now_s)
        since_s, arrived, loop_s = self._history[0]
        elapsed_s = load.now_s - since_s  # 0 at the first call
        rate = (self._arrived - arrived) / elapsed_s if elapsed_s > 0 else 0.0
        loop_share = (self._loop_s - loop_s) / elapsed_s if elapsed_s > 0 else 0.0
        waiting = load.unrouted + sum(each.waiting for each in load.replicas.values())
        need = self._find_need(rate, loop_share, waiting, load)
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((load.now_s, need))
        while self._needs[0][0] < load.now_s - DOWN_WINDOW_S:
            self._needs.popleft()
        reason: Reason = "load" if self._capacity is not None else "unmeasured"
        return self._bound(self._needs[0][1], reason, rate, load)

    def _count(self, load: EndpointLoad) -> None:
        self._began_s = min(self._began_s, load.now_s)
        # It is not idle before it can be asked. Serve itself starts the replica that ends its sleep.
        is_starting, is_woken = load.running == 0 < load.planned, self._planned == 0 < load.planned
        self._planned = load.planned
        is_new = load.now_s - self._began_s < SETTLE_S  # then replicas have counted before this policy
        for name, now in load.replicas.items():
            before = self._seen.pop(name, None)
            arrived = now.requests - (before.requests if before else now.requests if is_new else 0.0)
            self._arrived += arrived
            self._loop_s += now.loop_s - (before.loop_s if before else now.loop_s)
            if arrived:
                self._requested_s = load.now_s
        if load.unrouted or is_starting or is_woken or self._requested_s == -math.inf:
            self._requested_s = load.now_s
        self._seen |= load.replicas  # the newest last, since the first are forgotten
        while len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]
        self._history.append((load.now_s, self._arrived, self._loop_s))
        while len(self._history) > 2 and self._history[1][0] <= load.now_s - UP_WINDOW_S:
            self._history.popleft()

    def _learn(self, curves: Sequence[tuple[tuple[int, float], ...]], now_s: float) -> None:
        """Take the median of the replicas' curves, if it differs from the present one."""
        if not curves or now_s < self._learned_s + RELEARN_S:
            return
        sizes = min(curves, key=len)
        curve = tuple((rows, median([dict(each).get(rows, seconds) for each in curves])) for rows, seconds in sizes)
        known = dict(self._curve)
        if len(curve) == len(known) and all(
            rows in known and abs(seconds - known[rows]) <= CURVE_CHANGE * known[rows] for rows, seconds in curve
        ):
            return
        self._curve, self._learned_s = curve, now_s
        seconds = ForwardTime(curve).tabulate(max(rows for rows, _ in curve))
        self._capacity = self._make_capacity(seconds, self._objective_s)

    def _find_need(self, rate: float, loop_share: float, waiting: float, load: EndpointLoad) -> int:
        if self._capacity is None:  # as many as there are, until the first forward is measured
            return max(1, min(load.planned, self._spec.max)) if rate or waiting or load.planned else 0
        # Half an objective's worth of waiting requests is normal.
        backlog = max(0.0, waiting - rate * self._objective_s / 2)
        need = self._capacity.count_replicas(rate * RATE_MARGIN + backlog / CATCH_UP_S, self._spec.max)
        return min(self._spec.max, max(need, math.ceil(loop_share / MAX_LOOP_SHARE)))

    def _bound(self, need: int, reason: Reason, rate: float, load: EndpointLoad) -> Decision:
        spec, now_s = self._spec, load.now_s
        floor = spec.find_floor(datetime.fromtimestamp(now_s, UTC), self._floors)
        replicas = max(1, need)
        if spec.min == 0 and now_s - self._requested_s >= spec.idle_s:
            replicas, reason = 0, "idle"
        if self.budget is not None:
            self.budget.spend(load.running, now_s)
            if replicas > floor and not self.budget.is_available(now_s):
                replicas, reason = floor, "budget"
        if replicas < floor:
            replicas, reason = floor, "floor"
        return Decision(min(replicas, spec.max), reason, rate)


RETAINED = 0.9  # of the models' past shares, at each report
SECONDS = "seconds_"  # and the number of requests in a batch


@dataclass(frozen=True)
class ModelLoad:
    """One model on a replica. latency: (rows, seconds) of its forwards, empty before the first."""

    counts: BatcherCounts
    waiting: int
    latency: Measured
    max_rows: int


class LoadMeter:
    """`measure` is called about once a second; the models' shares are those of the last seconds."""

    def __init__(self, loop_seconds: Callable[[], float]) -> None:
        self._loop_seconds = loop_seconds  # processor time of the calling thread, which runs the event loop
        self._requests: dict[str, int] = {}  # of the present models
        self._num_arrived = 0
        self._recent: dict[str, float] = {}

    def measure(self, models: Mapping[str, ModelLoad], num_unloaded: int = 0) -> ReplicaLoad:
        """num_unloaded: requests that wait for a model to be loaded"""
        requests = {}
        for name, model in models.items():
            counts = model.counts
            count = requests[name] = counts.submitted + counts.refused_full + counts.refused_late
            before = self._requests.get(name, 0)
            arrived = count - before if count >= before else count  # a model that is loaded again begins at 0
            self._recent[name] = RETAINED * self._recent.get(name, 0.0) + arrived
            self._num_arrived += arrived
        self._requests = requests
        total = sum(self._recent[name] for name in models)
        shares = {name: self._recent[name] / total if total > 1e-6 else 1 / len(models) for name in models}
        waiting = num_unloaded + sum(each.waiting for each in models.values())
        curve = _merge_forwards([(shares[name], each) for name, each in models.items() if shares[name] > 1e-3])
        return ReplicaLoad(self._num_arrived, waiting, self._loop_seconds(), curve)


def _merge_forwards(models: Iterable[tuple[float, ModelLoad]]) -> tuple[tuple[int, float], ...]:
    """(requests, seconds) for the models of a replica, which compute one after the other; empty before a forward.

    k requests belong to a model of share s with the probability 1 - (1 - s)^k, and are then k s of it on average.
    """
    parts = []
    for share, model in models:
        answered = model.counts.answered + model.counts.failed
        rows = max(1.0, model.counts.rows / answered) if answered else 1.0
        if not model.latency:
            return ()
        parts.append((share, rows, ForwardTime(model.latency), model.max_rows))
    most = min((max_rows / (share * rows) for share, rows, _, max_rows in parts), default=0.0)
    curve, size = [], 1
    while size <= max(1.0, most) and parts:
        seconds = 0.0
        for share, rows, forward, max_rows in parts:
            has_any = 1.0 - (1.0 - share) ** size
            seconds += has_any * forward.seconds(min(max_rows, round(size * share * rows / has_any)))
        curve.append((size, seconds))
        size *= 2
    return tuple(curve)


def encode(load: ReplicaLoad) -> dict[str, float]:
    seconds = {f"{SECONDS}{size}": each for size, each in load.curve}
    return {"requests": load.requests, "waiting": load.waiting, "loop_s": load.loop_s, **seconds}


def decode(numbers: Mapping[str, float]) -> ReplicaLoad:
    """What `encode` was given; other numbers are ignored."""
    curve = sorted((int(name[len(SECONDS) :]), each) for name, each in numbers.items() if name.startswith(SECONDS))
    return ReplicaLoad(numbers["requests"], numbers["waiting"], numbers["loop_s"], tuple(curve))
