"""Simulates replicas behind one ingress, and finds from that how many a rate of requests needs.

Owns the simulated replicas: each computes batches as the scheduler does for requests without deadlines (a free replica
takes what waits, in order, up to a full batch), and the ingress sends a request to the replica with the fewest
unanswered ones. `simulate.drive` runs the scheduler itself; this is the same schedule for millions of requests. Called
by the autoscaling policy and by `shoal serve simulate`. Knows no clock and no Ray.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from shoal.libs.capacity.simulation import poisson

# A prediction rests on so many requests. Near its capacity a replica's queue grows for longer than that lasts: such
# rates are not predicted but excluded.
PREDICTED_REQUESTS = 3000
MAX_UTILISATION = 0.95
BISECTIONS = 6
SIMULATED_REPLICAS = 4  # beyond, a replica carries what it does among four: more share the load even better


class SimulatedReplica:
    """One replica. `load` is the number of its unanswered requests, `received` that of all it was sent."""

    __slots__ = ("ends_s", "load", "received", "waiting")

    def __init__(self) -> None:
        self.waiting: list[float] = []  # their arrivals
        self.ends_s = math.inf  # of its batch
        self.load = self.received = 0


class ReplicaSet:
    """Replicas that are added and removed as time goes on; every call has a later time than the one before.

    seconds: the duration of a forward, by the number of its requests less one; as many as a full batch has requests
    latencies_s: of every answered request, in the order of their batches
    """

    def __init__(self, seconds: Sequence[float], max_queue: int = 1 << 60) -> None:
        self._seconds = list(seconds)
        self._max_batch = len(seconds)
        self._max_queue = max_queue
        self.serving: list[SimulatedReplica] = []
        self.draining: list[SimulatedReplica] = []
        self.latencies_s: list[float] = []
        self.rejected = 0
        self._next_s = math.inf  # the first end of a batch

    def add(self) -> SimulatedReplica:
        replica = SimulatedReplica()
        self.serving.append(replica)
        return replica

    def remove(self) -> None:
        """The newest replica receives no more requests, and answers those that it has."""
        self.draining.append(self.serving.pop())

    def arrive(self, arrived_s: float, now_s: float) -> None:
        """A request, sent to a replica at `now_s`; there must be one."""
        if self._next_s <= now_s:
            self.advance(now_s)
        chosen = self.serving[0]
        for replica in self.serving:
            # Of equals the one that has received the least: HAProxy takes them in turn.
            if replica.load < chosen.load or (replica.load == chosen.load and replica.received < chosen.received):
                chosen = replica
        chosen.received += 1
        if len(chosen.waiting) >= self._max_queue:
            self.rejected += 1
            return
        chosen.load += 1
        chosen.waiting.append(arrived_s)
        if chosen.ends_s == math.inf:
            self._start(chosen, now_s)
            self._next_s = min(self._next_s, chosen.ends_s)

    def advance(self, now_s: float) -> None:
        """Compute the batches that end by `now_s`."""
        for replica in (*self.serving, *self.draining):
            while replica.ends_s <= now_s and replica.load:
                replica.load = len(replica.waiting)
                self._start(replica, replica.ends_s)
        self.draining = [each for each in self.draining if each.load]
        self._next_s = min((each.ends_s for each in (*self.serving, *self.draining)), default=math.inf)

    def _start(self, replica: SimulatedReplica, now_s: float) -> None:
        batch = replica.waiting[: self._max_batch]
        if not batch:
            replica.ends_s = math.inf
            return
        del replica.waiting[: self._max_batch]
        ends_s = replica.ends_s = now_s + self._seconds[len(batch) - 1]
        self.latencies_s += [ends_s - arrived_s for arrived_s in batch]


def predict_p99(seconds: Sequence[float], replicas: int, requests_per_s: float, seed: int = 0) -> float:
    """The 99th percentile of the latency, from Poisson arrivals at this rate; infinity for one that is too high."""
    capacity_per_s = replicas * max(rows / each for rows, each in enumerate(seconds, 1))
    if requests_per_s > MAX_UTILISATION * capacity_per_s:
        return math.inf
    return float(np.percentile(run(seconds, replicas, poisson(requests_per_s, PREDICTED_REQUESTS, seed)), 99))


def run(seconds: Sequence[float], replicas: int, arrivals_s: Iterable[float]) -> list[float]:
    """The latencies of these arrivals at a fixed number of replicas."""
    simulated = ReplicaSet(seconds)
    for _ in range(replicas):
        simulated.add()
    for arrived_s in arrivals_s:
        simulated.arrive(arrived_s, arrived_s)
    simulated.advance(math.inf)
    return simulated.latencies_s


class SustainableRates:
    """The highest rate at which n replicas meet an objective: found by bisection when first asked for, then retained.

    seconds: as of ReplicaSet; objective_s: the 99th percentile that a rate must not exceed
    """

    def __init__(self, seconds: Sequence[float], objective_s: float) -> None:
        self._seconds, self._objective_s = list(seconds), objective_s
        self._capacity_per_s = MAX_UTILISATION * max(rows / each for rows, each in enumerate(seconds, 1))
        self._rates: list[float] = []

    def find(self, replicas: int) -> float:
        """Requests a second; 0 where even a single request takes longer than the objective."""
        while len(self._rates) < min(replicas, SIMULATED_REPLICAS):
            self._rates.append(self._bisect(len(self._rates) + 1))
        if replicas <= len(self._rates):
            return self._rates[replicas - 1]
        return self._rates[-1] / len(self._rates) * replicas

    def count_replicas(self, requests_per_s: float, most: int) -> int:
        """The least number of replicas that meets the objective at this rate; `most` where none does."""
        return next((each for each in range(1, most) if requests_per_s <= self.find(each)), most)

    def _bisect(self, replicas: int) -> float:
        if self._seconds[0] > self._objective_s:
            return 0.0
        # Together n replicas carry at least as much for each as n - 1 do.
        low = self._rates[-1] / (replicas - 1) * replicas if self._rates else 0.0
        high = replicas * self._capacity_per_s
        if low >= high or predict_p99(self._seconds, replicas, high) <= self._objective_s:
            return high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            if predict_p99(self._seconds, replicas, middle) <= self._objective_s:
                low = middle
            else:
                high = middle
        return low
