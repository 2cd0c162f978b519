"""Latency against the timeout of a classic batcher, and ours beside it: by simulation, and by running both.

    python -m benchmarks.batching [--seconds S]

A model of 20 ms + 0.5 ms a row (it sleeps), at most 32 rows, Poisson arrivals, one slot, everything in one process
without HTTP. Writes docs/pictures/batching.json, from which `benchmarks.batching_plots` draws the pages' plots.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from benchmarks.children import ROOT
from benchmarks.result import commit, machine
from benchmarks.serving.classic import ClassicServer
from shoal.batching.batcher import Batcher, DeadlineExceeded, PendingBatch
from shoal.batching.latency_model import ForwardTime
from shoal.libs.capacity.simulation import ScheduleServer, SimulatedLoad, drive, poisson

MEASURED = [(1, 0.0205), (32, 0.036)]
FORWARD = ForwardTime(MEASURED)
MAX_BATCH = 32
CAPACITY = FORWARD.capacity_per_s(MAX_BATCH)
RATES = (60, 200, 400, 800)
TIMEOUTS_MS = (0.5, 1, 2, 5, 10, 20, 35, 50, 75, 100)
MEASURED_TIMEOUTS_MS = (1, 5, 20, 50)
LOADS = (0.5, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0)
DEADLINE_S = 0.1
OVERLOAD = 1.2
DATA = ROOT / "docs" / "pictures" / "batching.json"
Submit = Callable[[float], Any]  # due_s -> an awaitable


def sleeping(batch: PendingBatch[None, int, int]) -> list[int]:
    """The model."""
    time.sleep(FORWARD.seconds(len(batch.requests)))
    return [entry.request for entry in batch.requests]


class ThreadedClassic:
    """The classic batcher for real: a thread waits until a batch is full or its oldest request is `timeout_s` old."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._queue: deque[tuple[float, asyncio.Future[int]]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    async def submit(self, request: int) -> int:
        future: asyncio.Future[int] = self._loop.create_future()
        with self._changed:
            self._queue.append((time.monotonic(), future))
            self._changed.notify()
        return await future

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while batch := self._batch():
            sleeping(None, [0] * len(batch))
            self._loop.call_soon_threadsafe(_settle, batch)

    def _batch(self) -> list[asyncio.Future[int]]:
        with self._changed:
            while not self._closed:
                wait_s = self._queue[0][0] + self._timeout_s - time.monotonic() if self._queue else None
                if len(self._queue) >= MAX_BATCH or (wait_s is not None and wait_s <= 0):
                    return [self._queue.popleft()[1] for _ in range(min(MAX_BATCH, len(self._queue)))]
                self._changed.wait(wait_s)
        return []


def _settle(batch: list[asyncio.Future[int]]) -> None:
    for future in batch:
        future.set_result(0)


async def open_loop(submit: Submit, arrivals: Sequence[float]) -> np.ndarray:
    """Latency of each request from the moment it was due; nan for one that was refused."""
    start_s = time.monotonic() + 0.1
    latencies = np.full(len(arrivals), np.nan)

    async def one(number: int, due_s: float) -> None:
        try:
            await submit(due_s)
        except DeadlineExceeded:
            return
        latencies[number] = time.monotonic() - due_s

    async with asyncio.TaskGroup() as group:
        for number, arrival_s in enumerate(arrivals):
            due_s = start_s + arrival_s
            if (wait_s := due_s - time.monotonic()) > 0:
                await asyncio.sleep(wait_s)
            group.create_task(one(number, due_s))
    return latencies


async def measure_classic(rate: float, timeout_s: float, seconds: float) -> dict[str, float]:
    batcher = ThreadedClassic(timeout_s)
    latencies = await open_loop(lambda due_s: batcher.submit(0), poisson(rate, int(rate * seconds)))
    batcher.close()
    return percentiles(latencies)


async def measure_ours(rate: float, seconds: float, deadline_s: float | None = None) -> dict[str, float]:
    """With a deadline, `goodput` is the share of the capacity that is answered in time."""
    batcher: Batcher[None, int, int] = Batcher()
    queue = batcher.add_queue("sleeping", sleeping, max_batch_rows=MAX_BATCH, max_queue_rows=1 << 20)
    arrivals = poisson(rate, int(rate * seconds))

    def submit(due_s: float) -> Any:
        return queue.submit(0, group=None, deadline_s=None if deadline_s is None else due_s + deadline_s)

    latencies = await open_loop(submit, arrivals)
    batcher.close()
    in_time = int((latencies <= DEADLINE_S).sum())
    return percentiles(latencies) | {"goodput": in_time / arrivals[-1] / CAPACITY}


def percentiles(latencies: np.ndarray) -> dict[str, float]:
    p50, p99 = np.nanpercentile(latencies, [50, 99])
    return {"p50_ms": round(1e3 * float(p50), 2), "p99_ms": round(1e3 * float(p99), 2)}


def simulated(load: SimulatedLoad) -> dict[str, float]:
    return {
        "p50_ms": round(1e3 * load.p50_s, 2),
        "p99_ms": round(1e3 * load.p99_s, 2),
        "goodput": round(load.goodput_per_s / CAPACITY, 4),
    }


def simulate_all(num_requests: int = 40_000) -> dict[str, Any]:
    """The curves of the classic batcher, the oracle and ours; and goodput within a deadline, in four ways."""
    timeouts: dict[str, Any] = {}
    for rate in RATES:
        arrivals = poisson(rate, num_requests)
        timeouts[str(rate)] = {
            "oracle": simulated(drive(ClassicServer(MAX_BATCH, 0.0), FORWARD, arrivals)),
            "ours": simulated(drive(ScheduleServer(MAX_BATCH), FORWARD, arrivals)),
            "classic": {
                str(ms): simulated(drive(ClassicServer(MAX_BATCH, ms / 1e3), FORWARD, arrivals)) for ms in TIMEOUTS_MS
            },
        }
    servers = {
        "with admission": lambda: ScheduleServer(MAX_BATCH),
        "without admission": lambda: ScheduleServer(MAX_BATCH, admission=False),
        "without admission, 64 may wait": lambda: ScheduleServer(MAX_BATCH, max_queue_rows=64, admission=False),
        "classic, 5 ms": lambda: ClassicServer(MAX_BATCH, 0.005),
    }
    overload = {
        name: {
            str(load): simulated(
                drive(server(), FORWARD, poisson(load * CAPACITY, num_requests), deadline_s=DEADLINE_S)
            )
            for load in LOADS
        }
        for name, server in servers.items()
    }
    return {"timeouts": timeouts, "overload": overload}


async def measure_all(seconds: float, runs: int) -> dict[str, Any]:
    """The same by running it, at fewer points; of each point the run that other work on the machine disturbed least."""
    points: dict[tuple[str, ...], Callable[[], Any]] = {}
    for rate in RATES:
        points["timeouts", str(rate), "ours"] = partial(measure_ours, rate, seconds)
        for ms in MEASURED_TIMEOUTS_MS:
            points["timeouts", str(rate), "classic", str(ms)] = partial(measure_classic, rate, ms / 1e3, seconds)
    rate = OVERLOAD * CAPACITY
    points["overload", "with admission", str(OVERLOAD)] = partial(measure_ours, rate, seconds, DEADLINE_S)
    points["overload", "without admission", str(OVERLOAD)] = partial(measure_ours, rate, seconds)
    found: dict[tuple[str, ...], list[dict[str, float]]] = {path: [] for path in points}
    for _ in range(runs):
        for path, measure in points.items():
            found[path].append(await measure())
            print(*path, found[path][-1], flush=True)
    tree: dict[str, Any] = {}
    for path, results in found.items():
        *folders, leaf = path
        node = tree
        for folder in folders:
            node = node.setdefault(folder, {})
        node[leaf] = min(results, key=lambda result: result["p99_ms"]) | {"runs_p99_ms": [r["p99_ms"] for r in results]}
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=12.0, help="of each measured point")
    parser.add_argument("--runs", type=int, default=3, help="of each measured point, interleaved")
    chosen = parser.parse_args()
    found = {
        "machine": machine(),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "command": f"python -m benchmarks.batching --seconds {chosen.seconds:g} --runs {chosen.runs}",
        "simulated": simulate_all(),
        "measured": asyncio.run(measure_all(chosen.seconds, chosen.runs)),
    }
    DATA.write_text(json.dumps(found, indent=1) + "\n")
    print(f"written to {DATA.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
