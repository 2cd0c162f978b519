"""What the driver itself can do, before it judges others: its cost, its clock, and how a stall looks through it.

    python -m benchmarks.serving.validate [--quick]

Cost: processor time for each request to a server that answers every one with the same bytes. Clock: how late requests
leave. Stall: the server sleeps for a second in the middle; an open loop at R requests a second must find about R
requests that waited, on average for half a second. A driver that waits for answers before it sends (the closed loop
beside it) finds one for each connection: the omission that hides every stall.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.children import OUR_PYTHON, Child, scratch
from benchmarks.result import Row, compare, options, write
from benchmarks.serving.drive import Target, closed, http_request, poisson
from benchmarks.talk import say

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
STALL_S = 1.0
STALL_RATE = 500.0


def serve(stall_after_s: float) -> None:
    """Answer for ever, and stall once, `stall_after_s` after the first request (0: never)."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    poll, lines = select.epoll(), {}
    poll.register(listener, select.EPOLLIN)
    say(port=listener.getsockname()[1])
    stall_at_s = 0.0
    while True:
        for number, _ in poll.poll():
            if number == listener.fileno():
                line, _ = listener.accept()
                line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                lines[line.fileno()] = line
                poll.register(line, select.EPOLLIN)
                continue
            line = lines[number]
            try:
                data = line.recv(65536)
            except ConnectionResetError:
                data = b""
            if data:
                line.send(ANSWER)
            else:
                poll.unregister(line)
                lines.pop(number).close()
            if stall_after_s:
                stall_at_s = stall_at_s or time.monotonic() + stall_after_s
                if time.monotonic() >= stall_at_s:
                    time.sleep(STALL_S)
                    stall_after_s = 0.0


@contextmanager
def server(folder: Path, stall_after_s: float = 0.0) -> Iterator[Target]:
    """The server, as a child."""
    words = [OUR_PYTHON, "-m", "benchmarks.serving.validate", "serve", str(stall_after_s)]
    with Child(words, folder, goodbye_s=0.0) as child:
        url = f"http://127.0.0.1:{child.answer()['port']}/"
        yield Target(url, [http_request(url, b"{}")])


def stalled(latency_s: np.ndarray) -> tuple[float, float]:
    """How many requests waited for more than 50 ms, and for how long on average."""
    waited = latency_s[latency_s > 0.05]
    return float(len(waited)), float(waited.mean()) if len(waited) else 0.0


def measure(folder: Path, seconds: float) -> dict[str, float]:
    """One run of each check."""
    found: dict[str, float] = {}
    with server(folder) as target:
        for num in (1, 64):
            outcome = closed(folder, target, num, seconds)
            print(f"cost, {num} connections: {outcome.line()}", flush=True)
            found[f"cost {num}"], found[f"per_s {num}"] = outcome.driver_us, outcome.per_s
        outcome = poisson(folder, target, 1000.0, seconds)
        print(f"clock, 1000/s: {outcome.line()}", flush=True)
        found["late"] = outcome.late_ms
    with server(folder, stall_after_s=1.0) as target:
        found["open"], found["wait"] = stalled(poisson(folder, target, STALL_RATE, 4.0, warm_up_s=0.0).latency_s)
    with server(folder, stall_after_s=1.0) as target:
        found["closed"], _ = stalled(closed(folder, target, 16, 4.0, warm_up_s=0.0).latency_s)
    return found


def rows_of(runs: list[dict[str, float]]) -> list[Row]:
    """What was found, beside what must be."""

    def of(key: str) -> list[float]:
        return [run[key] for run in runs]

    expected = [STALL_RATE * STALL_S * 0.95]
    note = "on the two cores that it shares with that server"
    waits = f"they wait {np.median(of('wait')):.2f} s on average (arithmetic: 0.5)"
    rows = [
        compare(f"driver, processor time of a request, {num} connections", "µs", "lower", of(f"cost {num}"),
                bar=40.0, bar_kind="value", note=f"{np.median(of(f'per_s {num}')):,.0f} requests/s {note}")
        for num in (1, 64)
    ]  # fmt: skip
    return [
        *rows,
        compare("driver, how late requests leave, p99, 1,000/s", "ms", "lower", of("late"), bar=1.0,
                bar_kind="value"),
        compare("driver, requests that a stall of 1 s delays, open loop at 500/s", "requests", "higher", of("open"),
                expected, "arithmetic", 0.9, "ratio", f"{waits}; a closed loop finds {np.median(of('closed')):.0f}"),
    ]  # fmt: skip


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(float(sys.argv[2]))
    chosen = options(__doc__, runs=3)
    with scratch() as folder:
        runs = [measure(folder, 1.0 if chosen.quick else 3.0) for _ in range(chosen.runs)]
    write("serving_driver", rows_of(runs), chosen.results)


if __name__ == "__main__":
    main()
