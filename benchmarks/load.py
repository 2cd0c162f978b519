"""The load generator: raw keep-alive sockets on one event loop, in a process of its own; the same for every server.

    python -m benchmarks.load URL BODY_FILE --connections 16 --seconds 5              # closed loop
    python -m benchmarks.load URL BODY_FILE --rate 200 --seconds 5 --tell-answers     # open loop

Closed loop: each connection sends its next request when it has the answer. Open loop: requests leave at fixed times
whatever became of the others, and their latency counts from the moment they were due. Says one line of results.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.talk import say

VERSION_HEADER = b"shoal-model-version: "
LAST_CHUNK = b"\r\n0\r\n\r\n"  # of an answer without a length; no JSON ends like this


@dataclass
class Answers:
    """What came back, in order."""

    latencies_s: list[float] = field(default_factory=list)
    done_at: list[float] = field(default_factory=list)  # Unix
    versions: list[int] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, latency_s: float, head: bytes) -> None:
        """Count one whole answer."""
        if head[9:12] != b"200":
            self.failures.append(head[9:40].decode(errors="replace"))
            return
        self.latencies_s.append(latency_s)
        self.done_at.append(time.time())
        _, found, rest = head.partition(VERSION_HEADER)
        self.versions.append(int(rest.partition(b"\r")[0]) if found else 0)


class Connection(asyncio.Protocol):
    """One keep-alive connection with one request on its way at a time."""

    def __init__(self, answers: Answers) -> None:
        self._answers, self._received = answers, b""
        self._sent_s = 0.0
        self._whole: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    async def ask(self, request: bytes, due_s: float | None = None) -> None:
        """Send and wait for the answer; its latency counts from `due_s` (perf_counter), by default from now."""
        self._sent_s = time.perf_counter() if due_s is None else due_s
        self._whole = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        await self._whole

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = self._received[:end].lower()
        _, found, rest = head.partition(b"content-length: ")
        if found:
            whole = len(self._received) >= end + 4 + int(rest.partition(b"\r")[0])
        else:
            whole = self._received.endswith(LAST_CHUNK)
        if not whole:
            return
        self._received = b""
        self._answers.add(time.perf_counter() - self._sent_s, head)
        if self._whole is not None and not self._whole.done():
            self._whole.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self._whole is not None and not self._whole.done():
            self._answers.failures.append(f"connection lost: {error}")
            self._whole.set_exception(ConnectionResetError(str(error)))


def request_of(url: str, body: bytes) -> bytes:
    """The bytes of one request."""
    parts = urlsplit(url)
    head = f"POST {parts.path or '/'} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def closed_loop(url: str, request: bytes, num_connections: int, seconds: float, answers: Answers) -> None:
    """Keep `num_connections` busy for so long."""
    end_s = time.perf_counter() + seconds

    async def client() -> None:
        connection = await _connect(url, answers)
        while time.perf_counter() < end_s:
            await connection.ask(request)
        connection.transport.close()

    await asyncio.gather(*(client() for _ in range(num_connections)))


async def open_loop(url: str, request: bytes, rate: float, seconds: float, answers: Answers) -> None:
    """Send `rate` requests a second for so long, on as many connections as it takes."""
    idle: list[Connection] = []
    begin_s = time.perf_counter() + 0.1
    tasks: list[asyncio.Task[None]] = []

    async def client(due_s: float) -> None:
        connection = idle.pop() if idle else await _connect(url, answers)
        try:
            await connection.ask(request, due_s)
        except ConnectionResetError:
            return  # counted as a failure already
        idle.append(connection)

    for index in range(int(rate * seconds)):
        due_s = begin_s + index / rate
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        tasks.append(asyncio.create_task(client(due_s)))
    await asyncio.wait(tasks, timeout=30.0)
    answers.failures += ["no answer in 30 s" for task in tasks if not task.done()]


async def _connect(url: str, answers: Answers) -> Connection:
    parts = urlsplit(url)
    _, connection = await asyncio.get_running_loop().create_connection(
        lambda: Connection(answers), parts.hostname, parts.port
    )
    return connection


def wait_until_served(url: str, body: bytes, timeout_s: float = 60.0) -> None:
    """Return when a request is answered with 200. Raises TimeoutError."""
    parts = urlsplit(url)
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        connection = http.client.HTTPConnection(str(parts.netloc), timeout=5.0)
        try:
            connection.request("POST", parts.path or "/", body, {"Content-Type": "application/json"})
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # not up yet
        finally:
            connection.close()
        time.sleep(0.1)
    raise TimeoutError(f"{url} does not answer with 200 after {timeout_s:.0f} s")


def percentile(values: list[float], percent: int) -> float:
    """Of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("body", type=Path)
    load = parser.add_mutually_exclusive_group(required=True)
    load.add_argument("--connections", type=int)
    load.add_argument("--rate", type=float)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tell-answers", action="store_true")
    chosen = parser.parse_args()
    request, answers = request_of(chosen.url, chosen.body.read_bytes()), Answers()
    begin_s = time.perf_counter()
    if chosen.rate:
        asyncio.run(open_loop(chosen.url, request, chosen.rate, chosen.seconds, answers))
    else:
        asyncio.run(closed_loop(chosen.url, request, chosen.connections, chosen.seconds, answers))
    elapsed_s = time.perf_counter() - begin_s
    result: dict[str, object] = {
        "requests_per_s": len(answers.latencies_s) / elapsed_s,
        "p50_ms": 1e3 * statistics.median(answers.latencies_s),
        "p99_ms": 1e3 * percentile(answers.latencies_s, 99),
        "failures": answers.failures,
    }
    if chosen.tell_answers:
        result |= {"done_at": answers.done_at, "versions": answers.versions}
    say(**result)


if __name__ == "__main__":
    main()
