"""A long time at 70% load, with new weights every second, replicas killed, and bad input all along.

    python -m benchmarks.serving.soak [--minutes 30] [--quick]

Two replicas; the load is an open loop at 70% of what a closed loop of 32 gets under the same troubles, with more kills
than later: the two cores carry server, driver and replicas that start. Every answer is compared with the
version that it names. Memory and p99 are flat when the last quarter is like the second; the p99 is that of a quarter,
which the few kills in it make, and that of the typical `WINDOW_S`: the bar holds for both. A host that gives the
machine's time to others makes latency of its own, so the typical one is of the calm half: the windows of a quarter in
which it took the least (of all of them in the note). Nothing is lost when each request has an answer or a code, but
for the few that a killed replica had half answered: they see it by the length.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, stolen_s, write
from benchmarks.serving.drive import Drive, Outcome, closed, http_request
from benchmarks.serving.servers import OURS, Server, server_of
from shoal.libs.bench.sender import LOST, OK, UNANSWERED

LOAD = 0.7
DEADLINE_S = 2.0  # what cannot be answered by then, as when a killed replica leaves all to the other, is refused
TIMEOUT_S = 75.0  # above what HAProxy waits for an answer
PUBLISH_EVERY_S, BAD_EVERY_S, SAMPLE_EVERY_S = 1.0, 0.2, 2.0
NUM_KILLS = 12  # over the whole time
TRIAL_S, TRIAL_KILL_EVERY_S = 45.0, 15.0
WINDOW_S = 5.0
SETTLE_S = 15.0  # for a replica that has just been started to be let in
REPLICA = "ServeReplica"
MEMORY_BAR, P99_BAR = 1.05, 1.2
LOSSES = (LOST, UNANSWERED, "mixed")


class Trouble:
    """Publishes, kills and asks nonsense on threads of its own until `close()`; samples memory."""

    def __init__(self, server: Server, kill_every_s: float) -> None:
        self._server, self._stop = server, threading.Event()
        self.num_published = self.num_killed = self.num_bad = 0
        self.bad_answers: set[str] = set()
        self.memory: list[tuple[float, int]] = []  # time.monotonic(), bytes
        self.stolen: list[tuple[float, float]] = []  # time.monotonic(), seconds that the host has taken so far
        self._bad = itertools.cycle(bad_requests(server.url))
        plans = (
            (self._publish, PUBLISH_EVERY_S),
            (self._ask_nonsense, BAD_EVERY_S),
            (self._sample, SAMPLE_EVERY_S),
            (self._kill, kill_every_s),
        )
        self._threads = [threading.Thread(target=self._repeat, args=plan, daemon=True) for plan in plans]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)

    def _repeat(self, action: Callable[[], None], every_s: float) -> None:
        while not self._stop.wait(every_s):
            action()

    def _publish(self) -> None:
        self._server.child.ask(do="publish")
        self.num_published += 1

    def _sample(self) -> None:
        self.memory.append((time.monotonic(), self._server.child.memory_bytes()))
        self.stolen.append((time.monotonic(), stolen_s()))

    def _kill(self) -> None:
        replicas = self._server.child.processes(REPLICA)
        if len(replicas) > 1:  # not while the other is being replaced
            os.kill(replicas[0].pid, signal.SIGKILL)
            self.num_killed += 1

    def _ask_nonsense(self) -> None:
        parts = urlsplit(self._server.url)
        self.num_bad += 1
        try:
            with socket.create_connection((str(parts.hostname), int(parts.port or 80)), 10.0) as line:
                line.sendall(next(self._bad))
                self.bad_answers.add(line.recv(4096)[9:12].decode() or "closed")
        except OSError as error:
            self.bad_answers.add(type(error).__name__)


def bad_requests(url: str) -> list[bytes]:
    """What must get a 4xx and harm nobody."""

    def tensor(**changes: object) -> bytes:
        content = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [0.0] * 4} | changes
        return http_request(url, json.dumps({"inputs": [content]}).encode())

    return [
        http_request(url, b"{"),
        tensor(shape=[1, 5]),
        tensor(name="z"),
        tensor(datatype="INT64"),
        tensor(data=["a"] * 4),
        tensor(shape=[10**9, 4]),
        http_request(url.replace("/infer", "/nothing"), b"{}"),
        b"\x00\x01 nonsense\r\n\r\n",
    ]


class Windows(NamedTuple):
    """Each `WINDOW_S` in which there are answers: when it began, its p99, and the share that the host took of it."""

    begin_s: np.ndarray
    p99_ms: np.ndarray
    stolen: np.ndarray

    def calm(self) -> float:
        """The median p99 of the half of the windows in which the host took the least."""
        return float(np.median(self.p99_ms[self.stolen <= np.median(self.stolen)]))

    def part(self, begin_s: float, end_s: float) -> Windows:
        inside = (self.begin_s >= begin_s) & (self.begin_s < end_s)
        return Windows(*(values[inside] for values in self))


def quarters(times_s: np.ndarray, values: np.ndarray, judge: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """`judge` of the second and of the last quarter of the time."""
    begin_s, length_s = times_s.min(), np.ptp(times_s) / 4
    second = values[(times_s >= begin_s + length_s) & (times_s < begin_s + 2 * length_s)]
    return judge(second), judge(values[times_s >= begin_s + 3 * length_s])


def p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


def windows_of(outcome: Outcome, trouble: Trouble) -> Windows:
    ok = outcome.kinds == OK
    times_s, values_ms = outcome.due_s[ok], 1e3 * (outcome.done_s - outcome.due_s)[ok]
    windows = ((times_s - times_s.min()) // WINDOW_S).astype(int)
    order = np.argsort(windows, kind="stable")
    numbers, starts = np.unique(windows[order], return_index=True)
    parts = np.split(values_ms[order], starts[1:])
    begin_s = times_s.min() + WINDOW_S * numbers
    sampled_s, stolen = np.array(trouble.stolen).T
    taken_s = np.interp(begin_s + WINDOW_S, sampled_s, stolen) - np.interp(begin_s, sampled_s, stolen)
    return Windows(begin_s, np.array([p99(part) for part in parts]), taken_s / WINDOW_S / (os.cpu_count() or 1))


def capacity(server: Server, folder: Path) -> float:
    """Requests a second of a closed loop under the same troubles, and kills; both replicas answer again afterwards."""
    trouble = Trouble(server, TRIAL_KILL_EVERY_S)
    outcome = closed(folder, server.target(), 32, TRIAL_S, 1.0)
    trouble.close()
    until = time.monotonic() + TIMEOUT_S
    while len(server.child.processes(REPLICA)) < 2 and time.monotonic() < until:
        time.sleep(1.0)
    time.sleep(SETTLE_S)
    return outcome.per_s


def measure(folder: Path, minutes: float) -> tuple[Outcome, Trouble, float]:
    """The whole time, the trouble that was made, and the load in requests a second."""
    seconds = 60.0 * minutes
    model = {"deadline_s": DEADLINE_S}
    with server_of(OURS, "numbered", folder, num_replicas=2, num_cpus=0.5, model=model) as server:
        target = server.target()
        rate = LOAD * capacity(server, folder)
        print(f"{minutes:g} minutes at {rate:,.0f}/s", flush=True)
        plan = {"rate": rate, "seconds": seconds, "warm_up_s": 5.0, "timeout_s": TIMEOUT_S, "check": "version"}
        with Drive(folder, target, **plan) as drive:
            trouble = Trouble(server, max(15.0, seconds / NUM_KILLS))
            outcome = drive.outcome()
            trouble.close()
    return outcome, trouble, rate


def by_minute(windows: Windows) -> list[str]:
    """The median p99, and in brackets the percent that the host took."""
    first_s = windows.begin_s.min()
    minutes = [windows.part(begin_s, begin_s + 60.0) for begin_s in np.arange(first_s, windows.begin_s.max(), 60.0)]
    return [f"{np.median(each.p99_ms):.0f} ({100 * each.stolen.mean():.1f})" for each in minutes]


def rows_of(outcome: Outcome, trouble: Trouble, rate: float, minutes: float) -> list[Row]:
    """Flatness and losses."""
    ok = outcome.kinds == OK
    latency_ms = 1e3 * (outcome.done_s - outcome.due_s)[ok]
    whole_early_ms, whole_late_ms = quarters(outcome.due_s[ok], latency_ms, p99)
    windows = windows_of(outcome, trouble)
    begin_s, length_s = windows.begin_s.min(), (np.ptp(windows.begin_s) + WINDOW_S) / 4
    early, late = (windows.part(begin_s + n * length_s, begin_s + (n + 1) * length_s) for n in (1, 3))
    every_ms = [float(np.median(each.p99_ms)) for each in (late, early)]
    calm = (
        f"of all windows {every_ms[0]:.0f} and {every_ms[1]:.0f} ms; the host took {100 * late.stolen.mean():.1f}% and"
        f" {100 * early.stolen.mean():.1f}% of the processors' time"
    )
    times_s, sizes = np.array(trouble.memory).T
    early_mb, late_mb = quarters(times_s, sizes / 1e6, lambda values: float(np.median(values)))
    title = f"soak of {minutes:g} minutes"
    lost = sum(outcome.failures.get(kind, 0) for kind in LOSSES)
    note = (
        f"{len(outcome.due_s):,} requests at {rate:,.0f}/s, {trouble.num_published} versions, {trouble.num_killed}"
        " kills,"
        f" {trouble.num_bad} bad requests (answers: {', '.join(sorted(trouble.bad_answers))});"
        f" failures: {json.dumps(outcome.failures) if outcome.failures else 'none'}"
    )
    return [
        compare(f"{title}: requests without an answer or a code, or mixed", "requests", "lower", [lost], bar=0.0,
                bar_kind="value", note=note),
        compare(f"{title}: p99 of the median calm {WINDOW_S:g} s, last quarter over the second", "ms", "lower",
                [late.calm()], [early.calm()], "second quarter", P99_BAR, "ratio", note=calm),
        compare(f"{title}: p99 of a whole quarter with its kills, last over the second", "ms", "lower", [whole_late_ms],
                [whole_early_ms], "second quarter", P99_BAR, "ratio", note=f"p99 of all: {outcome.ms(99):,.0f} ms"),
        compare(f"{title}: memory of all processes, last quarter over the second", "MB", "lower", [late_mb], [early_mb],
                "second quarter", MEMORY_BAR, "ratio"),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=1, minutes=30.0)
    minutes = 1.0 if chosen.quick else chosen.minutes
    with scratch() as folder:
        outcome, trouble, rate = measure(folder, minutes)
    print(outcome.line(), flush=True)
    told = by_minute(windows_of(outcome, trouble))
    print("p99 of the median window, by minute, in ms (and what the host took, in percent):", *told, flush=True)
    for kind, example in outcome.examples.items():
        print(f"{kind}: {example}", flush=True)
    write("serving_soak", rows_of(outcome, trouble, rate, minutes), chosen.results)


if __name__ == "__main__":
    main()
