"""Replays a trace of requests on simulated replicas whose number a policy decides: its cost, and who waited too long.

The replicas are those of `shoal.libs.capacity.replica_set`; one costs
from the decision that starts it until it has answered its last request, and serves `start_s` after that decision.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from shoal.extend.serve import EndpointLoad, ReplicaLoad, ScalePolicy
from shoal.libs.capacity.replica_set import ReplicaSet

TICK_S = 1.0
METRICS_LAG_S = 1.0  # what a replica counts reaches the policy so much later


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
