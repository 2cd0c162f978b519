"""Replays a trace of requests on simulated replicas whose number a policy decides: its cost, and who waited too long.

Called by `shoal serve simulate --trace` and benchmarks. The replicas are those of `replica_set`; one costs
from the decision that starts it until it has answered its last request, and serves `start_s` after that decision.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from shoal.errors import DataError, needs_extra
from shoal.extend.serve import EndpointLoad, ReplicaLoad, ScalePolicy
from shoal.frame import find_names, to_floats
from shoal.libs.capacity.replica_set import ReplicaSet

TICK_S = 1.0
METRICS_LAG_S = 1.0  # what a replica counts reaches the policy so much later
MAX_REQUESTS = 20_000_000  # half a minute of simulation, and a gigabyte
MINUTE_S = 60.0
MAX_TIME_S = 253_402_000_000.0  # what a date can be
REMEDY = "a trace has the column `time`, or `time` and `count` (requests of the minute that begins then)"


def read_trace(path: Path, seed: int = 0) -> np.ndarray:
    """The arrival times in seconds, ascending. Raises DataError naming the file, column and row that do not fit.

    A CSV or Parquet file with a column `time` has a row for each request; with a column `count` too, a row for each
    minute that began at `time`, whose requests are spread over it at random. Times are seconds (since 1970, or since
    anything) or dates with times.
    """
    table = _read_table(path)
    names = find_names(table) or []
    if "time" not in names:
        raise DataError("trace", str(path), f"has no column `time`, but {', '.join(names) or 'none'}", REMEDY)
    if twice := [name for name in ("time", "count") if names.count(name) > 1]:
        raise DataError("trace", str(path), f"has the column `{twice[0]}` more than once", REMEDY)
    columns = ["time", "count"] if "count" in names else ["time"]
    values = to_floats("trace", table.select(columns), columns)
    if not len(values):
        raise DataError("trace", str(path), "has no rows", REMEDY)
    for column, each in zip(columns, values.T, strict=True):
        if (bad := np.flatnonzero(~np.isfinite(each))).size:
            raise DataError("trace", str(path), f"`{column}` of row {bad[0]} is missing or not finite", REMEDY)
    if np.abs(values[:, 0]).max(initial=0.0) > MAX_TIME_S:
        raise DataError("trace", str(path), "has times after the year 9999", "times are in seconds, not milliseconds")
    times = values[:, 0] if len(columns) == 1 else _spread_counts(path, values, seed)
    if len(times) < 2 or times.max() <= times.min():
        raise DataError("trace", str(path), "has fewer than two times", "give a trace of some minutes at least")
    _require_few(path, len(times))
    return np.sort(times)


def _read_table(path: Path) -> Any:
    with needs_extra("data"):
        import pyarrow
        import pyarrow.csv
        import pyarrow.parquet

    try:
        if path.suffix == ".parquet":
            return pyarrow.parquet.read_table(path)
        if path.suffix == ".csv":
            return pyarrow.csv.read_csv(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        raise DataError("trace", str(path), f"cannot be read: {error}", REMEDY) from None
    raise DataError("trace", str(path), "is neither .csv nor .parquet", REMEDY)


def _spread_counts(path: Path, values: np.ndarray, seed: int) -> np.ndarray:
    starts, counts = values.T
    if (bad := np.flatnonzero((counts < 0) | (counts != np.floor(counts)))).size:
        raise DataError("trace", str(path), f"`count` of row {bad[0]} is {counts[bad[0]]:g}, no count of requests")
    if len(np.unique(starts)) < len(starts):
        raise DataError("trace", str(path), "has a minute twice", "add up its counts")
    if (np.diff(np.sort(starts)) < MINUTE_S).any():
        raise DataError("trace", str(path), "has rows less than a minute apart", "a row counts one minute")
    _require_few(path, counts.sum())
    spread: np.ndarray = np.repeat(starts, counts.astype(int))
    return spread + np.random.default_rng(seed).uniform(0.0, MINUTE_S, len(spread))


def _require_few(path: Path, requests: float) -> None:
    if requests > MAX_REQUESTS:
        problem = f"has {requests:,.0f} requests, and a simulation at most {MAX_REQUESTS:,}"
        raise DataError("trace", str(path), problem, "give a part of it, such as the busiest day")


@dataclass(frozen=True)
class ObservedLoad:
    """What a policy may see: `replicas` with the counts of `METRICS_LAG_S` ago, `ongoing` requests likewise."""

    now_s: float
    replicas: dict[str, ReplicaLoad]
    ongoing: int
    running: int
    planned: int
    unrouted: int


@dataclass(frozen=True)
class ReplayedTrace:
    """The result. replica_s: replica-seconds paid. within: the part of all requests that were answered within the
    objective; rejected ones were not. planned: (time, replicas) at each change."""

    requests: int
    rejected: int
    replica_s: float
    within: float
    p50_s: float
    p99_s: float
    planned: list[tuple[float, int]] = field(default_factory=list)


class _Cluster:
    """The replicas that start, serve and drain, and their cost."""

    def __init__(self, seconds: Sequence[float], max_queue: int, start_s: float, initial: int) -> None:
        self.set = ReplicaSet(seconds, max_queue)
        self._curve, self._start_s = tuple(enumerate(seconds, 1)), start_s
        self._starting: deque[float] = deque()  # when each is ready
        self.unrouted: list[float] = []
        self.replica_s = 0.0
        self._names: dict[int, str] = {}
        self._samples: deque[tuple[dict[str, ReplicaLoad], int]] = deque()
        for _ in range(initial):
            self._add()

    @property
    def planned(self) -> int:
        return len(self.set.serving) + len(self._starting)

    def _add(self) -> None:
        self._names[id(self.set.add())] = f"r{len(self._names)}"

    def step(self, now_s: float) -> None:
        """Compute until now, let started replicas serve, and pay for the last tick."""
        self.set.advance(now_s)
        self.replica_s += (self.planned + len(self.set.draining)) * TICK_S
        while self._starting and self._starting[0] <= now_s:
            self._starting.popleft()
            self._add()
        if self.unrouted and self.set.serving:
            for arrived_s in self.unrouted:
                self.set.arrive(arrived_s, now_s)
            self.unrouted.clear()

    def observe(self, now_s: float) -> ObservedLoad:
        counts = {
            self._names[id(each)]: ReplicaLoad(each.received, len(each.waiting), 0.0, self._curve)
            for each in self.set.serving
        }
        self._samples.append((counts, sum(each.load for each in self.set.serving)))
        while len(self._samples) > 1 + METRICS_LAG_S / TICK_S:
            self._samples.popleft()
        past, ongoing = self._samples[0]
        past = {name: each for name, each in past.items() if name in counts}
        return ObservedLoad(now_s, past, ongoing, len(counts), self.planned, len(self.unrouted))

    def scale(self, target: int, now_s: float) -> None:
        while self.planned < target:
            self._starting.append(now_s + self._start_s)
        while self.planned > target and self._starting:
            self._starting.pop()
        while self.planned > target:
            self.set.remove()


def replay(
    arrivals_s: np.ndarray,
    decide: Callable[[ObservedLoad], int],
    seconds: Sequence[float],
    objective_s: float,
    *,
    start_s: float,
    initial: int = 1,
    max_queue: int = 1024,
) -> ReplayedTrace:
    """Replay arrivals, ascending, on replicas whose forwards last `seconds` (as of ReplicaSet). They all end answered.

    initial: replicas at the beginning, ready
    """
    cluster = _Cluster(seconds, max_queue, start_s, initial)
    tick_s = math.floor(float(arrivals_s[0]))
    planned = [(float(tick_s), initial)]
    times: list[float] = arrivals_s.tolist()
    at, arrive = 0, cluster.set.arrive
    serving, unrouted = cluster.set.serving, cluster.unrouted
    bounds = np.searchsorted(arrivals_s, np.arange(tick_s + TICK_S, times[-1] + 2 * TICK_S, TICK_S))
    for number, until in enumerate(bounds.tolist(), 1):
        for arrived_s in times[at:until]:
            if serving:
                arrive(arrived_s, arrived_s)
            else:
                unrouted.append(arrived_s)
        at, now_s = until, tick_s + number * TICK_S
        cluster.step(now_s)
        target = decide(cluster.observe(now_s))
        if target != cluster.planned:
            planned.append((now_s, target))
        cluster.scale(target, now_s)
    end_s = times[-1] + start_s + TICK_S
    if unrouted:  # the trace ended while the first replica started
        cluster.scale(max(1, cluster.planned), end_s - start_s)
        cluster.step(end_s)
    cluster.set.advance(math.inf)
    latencies = np.array(cluster.set.latencies_s)
    in_time = int((latencies <= objective_s + 1e-9).sum())
    p50, p99 = np.percentile(latencies, [50, 99]) if len(latencies) else (math.nan, math.nan)
    rejected = cluster.set.rejected
    return ReplayedTrace(len(times), rejected, cluster.replica_s, in_time / len(times), float(p50), float(p99), planned)


def replay_policy(
    arrivals_s: np.ndarray, policy: ScalePolicy, seconds: Sequence[float], objective_s: float, **setting: float
) -> ReplayedTrace:
    """`replay` with an endpoint's own policy. setting: start_s, initial, max_queue."""

    def decide(seen: ObservedLoad) -> int:
        load = EndpointLoad(seen.now_s, seen.replicas, seen.running, seen.planned, seen.unrouted)
        return policy.decide(load).replicas

    return replay(arrivals_s, decide, seconds, objective_s, **setting)  # type: ignore[arg-type]


def replay_fixed(
    arrivals_s: np.ndarray, replicas: int, seconds: Sequence[float], objective_s: float, max_queue: int = 1024
) -> ReplayedTrace:
    """`replay` with a number of replicas that stays."""
    return replay(
        arrivals_s, lambda _: replicas, seconds, objective_s, start_s=0.0, initial=replicas, max_queue=max_queue
    )
