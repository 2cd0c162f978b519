"""A long time at 70% load, with new weights every second, replicas killed, and bad input all along.

    python -m benchmarks.serving.soak [--minutes 30] [--quick]

Two replicas; the load is an open loop at 70% of what a closed loop of 32 gets under the same troubles, with more kills
than later: the two cores carry server, driver and replicas that start. Every answer is compared with the
version that it names. Memory and p99 are flat when the last quarter is like the second; the p99 is that of a quarter,
which the few kills in it make, and that of the typical `WINDOW_S`: the bar holds for both. Nothing is lost when each
request has an answer or a code, but for the few that a killed replica had half answered: they see it by the length.
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
from urllib.parse import urlsplit

import numpy as np

from benchmarks.children import scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import Drive, Outcome, closed, http_request
from benchmarks.serving.exchange import OK
from benchmarks.serving.servers import OURS, Server, server_of

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
LOSSES = ("lost", "hung", "mixed")


class Trouble:
    """Publishes, kills and asks nonsense on threads of its own until `close()`; samples memory."""

    def __init__(self, server: Server, kill_every_s: float) -> None:
        self._server, self._stop = server, threading.Event()
        self.num_published = self.num_killed = self.num_bad = 0
        self.bad_answers: set[str] = set()
        self.memory: list[tuple[float, int]] = []  # time.monotonic(), bytes
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


def quarters(times_s: np.ndarray, values: np.ndarray, judge: Callable[[np.ndarray], float]) -> tuple[float, float]:
    """`judge` of the second and of the last quarter of the time."""
    begin_s, length_s = times_s.min(), np.ptp(times_s) / 4
    second = values[(times_s >= begin_s + length_s) & (times_s < begin_s + 2 * length_s)]
    return judge(second), judge(values[times_s >= begin_s + 3 * length_s])


def p99(values: np.ndarray) -> float:
    return float(np.percentile(values, 99))


def p99_of_windows(times_s: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """When each window of `WINDOW_S` began, and the p99 of the values in it; of windows in which there are any."""
    windows = ((times_s - times_s.min()) // WINDOW_S).astype(int)
    order = np.argsort(windows, kind="stable")
    numbers, starts = np.unique(windows[order], return_index=True)
    parts = np.split(values[order], starts[1:])
    return times_s.min() + WINDOW_S * numbers, np.array([p99(part) for part in parts])


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


def by_minute(outcome: Outcome) -> list[str]:
    ok = outcome.kinds == OK
    times_s, values = p99_of_windows(outcome.due_s[ok], 1e3 * (outcome.done_s - outcome.due_s)[ok])
    minutes = ((times_s - times_s.min()) // 60.0).astype(int)
    return [f"{np.median(values[minutes == minute]):.0f}" for minute in range(minutes.max() + 1)]


def rows_of(outcome: Outcome, trouble: Trouble, rate: float, minutes: float) -> list[Row]:
    """Flatness and losses."""
    ok = outcome.kinds == OK
    latency_ms = 1e3 * (outcome.done_s - outcome.due_s)[ok]
    whole_early_ms, whole_late_ms = quarters(outcome.due_s[ok], latency_ms, p99)
    early_ms, late_ms = quarters(*p99_of_windows(outcome.due_s[ok], latency_ms), lambda each: float(np.median(each)))
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
        compare(f"{title}: p99 of the median {WINDOW_S:g} s, last quarter over the second", "ms", "lower", [late_ms],
                [early_ms], "second quarter", P99_BAR, "ratio"),
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
    print("p99 of the median window, by minute, in ms:", *by_minute(outcome), flush=True)
    for kind, example in outcome.examples.items():
        print(f"{kind}: {example}", flush=True)
    write("serving_soak", rows_of(outcome, trouble, rate, minutes), chosen.results)


if __name__ == "__main__":
    main()
