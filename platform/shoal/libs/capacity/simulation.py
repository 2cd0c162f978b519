"""Simulates a model's latency under a load: the batcher's own scheduler, run against a simulated clock.

Owns the simulated clock and the server that it drives: `scheduler`, the code that serves. Called by `shoal serve
simulate`, and by benchmarks and tests, which also drive other servers (`benchmarks.serving.classic`). Starts no thread,
loads no model and never waits. The forward is a measured table, l(rows); arrivals are Poisson. The time of parsing and
answering is left out.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shoal.batching.fair_queue import QueuedRequest
from shoal.batching.latency_model import ForwardTime, Measured
from shoal.batching.scheduler import Batch, BatchScheduler
from shoal.errors import ConfigError


@dataclass(frozen=True)
class LoadResult:
    """The result at one rate. Latencies are of answered requests; nan when there are none.

    goodput_per_s: requests answered within the deadline, a second (all that were answered, without a deadline)
    refused:       requests refused on arrival or dropped from the queue; answered + refused = requests
    utilisation:   the part of the slots' time in which forwards ran
    """

    requests_per_s: float
    requests: int
    answered: int
    refused: int
    p50_s: float
    p90_s: float
    p99_s: float
    goodput_per_s: float
    utilisation: float
    mean_batch_rows: float


class Server(Protocol):
    """A server driven by the simulated clock. Requests are numbered and have one row each."""

    def arrive(self, number: int, now_s: float, deadline_s: float | None) -> bool:
        """Admit a request; False refuses it."""
        ...

    def start(self, now_s: float) -> list[int]:
        """Start a batch in a free slot; empty for none."""
        ...

    def finish(self, batch: list[int], now_s: float, seconds: float) -> None: ...

    def due_s(self) -> float:
        """When `start` would return more, if no request arrives; infinity for never."""
        ...


class ScheduleServer:
    """Shoal's server: the batcher's scheduler with one queue."""

    def __init__(
        self,
        max_batch_rows: int,
        *,
        max_queue_rows: int = 1 << 20,
        slots: int = 1,
        warm: Measured = (),
        admission: bool = True,
    ) -> None:
        """`warm` seeds the latency model, as a warm-up does; without `admission` the scheduler sees no deadline."""
        self._schedule: BatchScheduler[_Numbered] = BatchScheduler(slots)
        self._queue = self._schedule.add_queue(
            "simulated", max_batch_rows=max_batch_rows, max_queue_rows=max_queue_rows
        )
        self._admission = admission
        self._in_hand: dict[int, Batch[_Numbered]] = {}
        for rows, seconds in warm:
            self._queue.latency.observe(rows, seconds, 0.0)

    def arrive(self, number: int, now_s: float, deadline_s: float | None) -> bool:
        request = _Numbered(number, now_s, deadline_s if self._admission else None)
        refusal, _ = self._schedule.admit(self._queue, request, now_s)
        return refusal is None

    def start(self, now_s: float) -> list[int]:
        batch, _ = self._schedule.take(now_s)
        if batch is None:
            return []
        numbers = [request.sequence for request in batch.requests]
        self._in_hand[numbers[0]] = batch
        return numbers

    def finish(self, batch: list[int], now_s: float, seconds: float) -> None:
        self._schedule.finish_batch(self._in_hand.pop(batch[0]), now_s, [(len(batch), seconds)])

    def due_s(self) -> float:
        return math.inf


class _Numbered(QueuedRequest):
    __slots__ = ("sequence",)

    def __init__(self, number: int, now_s: float, deadline_s: float | None) -> None:
        super().__init__(1, now_s, deadline_s)
        self.sequence = number


def simulate(
    measured: Measured,
    requests_per_s: float,
    *,
    max_batch_rows: int,
    max_queue_rows: int = 1024,
    deadline_s: float | None = None,
    slots: int = 1,
    num_requests: int = 20_000,
    seed: int = 0,
) -> LoadResult:
    """Simulate the batcher at this rate, for a model with measured forwards (rows, seconds).

    deadline_s: after its arrival, for every request. Raises ConfigError for values that make no sense.
    """
    if deadline_s is not None and not deadline_s > 0:
        raise ConfigError("deadline_s", deadline_s, "must be above zero")
    forward = ForwardTime(measured)
    server = ScheduleServer(
        max_batch_rows, max_queue_rows=max(max_queue_rows, max_batch_rows), slots=slots, warm=measured
    )
    arrivals = poisson(requests_per_s, num_requests, seed)
    return drive(server, forward, arrivals, deadline_s=deadline_s, slots=slots)


def poisson(requests_per_s: float, num_requests: int, seed: int = 0) -> list[float]:
    """Generate Poisson arrival times in seconds."""
    if not 0 < requests_per_s < math.inf:
        raise ConfigError("requests_per_s", requests_per_s, "must be above zero, and finite")
    if num_requests < 1:
        raise ConfigError("num_requests", num_requests, "must be at least 1")
    gaps = np.random.default_rng(seed).exponential(1 / requests_per_s, num_requests)
    times: list[float] = np.cumsum(gaps).tolist()
    return times


def drive(
    server: Server,
    forward: ForwardTime,
    arrivals: Sequence[float],
    *,
    deadline_s: float | None = None,
    slots: int = 1,
    spread: float = 0.0,
    seed: int = 0,
) -> LoadResult:
    """Run a server over these arrivals until all are answered. `spread` is the sigma of a log-normal factor on l."""
    noise = np.random.default_rng(seed)
    ends: list[float] = [math.nan] * len(arrivals)
    running: list[tuple[float, int, list[int], float]] = []  # end, tie breaker, batch, seconds
    now_s = 0.0
    next_arrival = 0
    batches = 0
    busy_s = 0.0
    while True:
        while len(running) < slots and (batch := server.start(now_s)):
            batches += 1
            seconds = forward.seconds(len(batch)) * (math.exp(noise.normal(0, spread)) if spread else 1.0)
            busy_s += seconds
            heapq.heappush(running, (now_s + seconds, batches, batch, seconds))
        arrival_s = arrivals[next_arrival] if next_arrival < len(arrivals) else math.inf
        end_s = running[0][0] if running else math.inf
        due_s = server.due_s() if len(running) < slots else math.inf
        now_s = min(arrival_s, end_s, due_s)
        if now_s == math.inf:
            break
        if end_s == now_s:
            _, _, batch, seconds = heapq.heappop(running)
            server.finish(batch, now_s, seconds)
            for number in batch:
                ends[number] = now_s
        elif arrival_s == now_s:
            server.arrive(next_arrival, now_s, None if deadline_s is None else now_s + deadline_s)
            next_arrival += 1
    return _summary(np.asarray(arrivals), np.asarray(ends), batches, busy_s, deadline_s, slots)


def _summary(
    arrivals: np.ndarray, ends: np.ndarray, batches: int, busy_s: float, deadline_s: float | None, slots: int
) -> LoadResult:
    answered = ~np.isnan(ends)
    latencies = (ends - arrivals)[answered]
    in_time = len(latencies) if deadline_s is None else int((latencies <= deadline_s + 1e-9).sum())
    p50, p90, p99 = np.percentile(latencies, [50, 90, 99]) if len(latencies) else (math.nan,) * 3
    span_s = max(float(arrivals[-1]), float(ends[answered].max()) if len(latencies) else 0.0)
    return LoadResult(
        requests_per_s=len(arrivals) / float(arrivals[-1]),
        requests=len(arrivals),
        answered=len(latencies),
        refused=len(arrivals) - len(latencies),
        p50_s=float(p50),
        p90_s=float(p90),
        p99_s=float(p99),
        goodput_per_s=in_time / span_s,
        utilisation=busy_s / (span_s * slots),
        mean_batch_rows=len(latencies) / batches if batches else math.nan,
    )
