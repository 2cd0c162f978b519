"""Sends requests over HTTP/1.1 when they are due, and records what became of each.

Closed loop: each of so many callers sends its next request when it has its answer. Open loop: requests leave at Poisson
times whatever became of the others, and latency counts from the moment at which a request was due. So an endpoint that
stalls is charged for all that should have been asked meanwhile, of which callers that wait would ask nothing:
coordinated omission (Gil Tene, How NOT to measure latency; wrk2). Called by `shoal bench`, and by benchmarks.
"""

from __future__ import annotations

import asyncio
import resource
import select
import selectors
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import numpy as np

OK = "ok"
LOST = "connection lost"
INCOMPLETE = "incomplete answer"
UNANSWERED = "no answer in time"
RETRY_S = 0.02  # a server that is gone is asked again after a moment, not as fast as the loop can turn
EXAMPLE_BYTES = 300
NAMES = "due_s,sent_s,first_s,done_s,payload,kind,version,tokens"


class _PreciseSelector(selectors.EpollSelector):
    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        select.select([self], [], [], timeout)  # epoll's own wait knows milliseconds only
        return super().select(0)


@dataclass
class LoadSender:
    """Sends the payloads, which are complete requests, in turn to a URL's host and port.

    seconds:     after the warm-up
    connections: closed loop: callers; open loop: the most that may be open
    rate:        open loop: requests/s on average, at the same times for the same seed; 0: closed loop
    warm_up_s:   at the beginning; what was due then is not recorded
    timeout_s:   from when a request was due; without an answer until then it fails
    tls:         for https

    After `run`: examples, by kind the first body that was no answer; end_s, when sending ended; cpu_share, of a core;
    is_full, whether requests have waited for one of the connections.
    """

    url: str
    payloads: Sequence[bytes]
    seconds: float
    connections: int
    rate: float = 0.0
    warm_up_s: float = 0.0
    timeout_s: float = 10.0
    seed: int = 0
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self.examples: dict[str, str] = {}
        self.end_s = self.cpu_share = 0.0
        self.is_full = False
        self._rows: list[tuple[float | str, ...]] = []
        self._idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._num_sent = 0

    def run(self) -> Any:
        """Send, and wait for what is on its way, `timeout_s` at most after the end.

        Returns a record array of what was due after the warm-up: due_s, sent_s, first_s (of the answer's first byte)
        and done_s, by time.monotonic(), each done_s where it did not come to that; payload, the index of what was sent;
        kind: "ok", an error's status, LOST, INCOMPLETE or UNANSWERED; version of the answering model, or "-"; tokens.
        """
        allow_connections()
        used_s = time.thread_time()
        begin_s = time.monotonic()
        since_s = begin_s + self.warm_up_s
        self.end_s = since_s + self.seconds
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(_PreciseSelector())) as runner:
            runner.run(self._send_all(begin_s, since_s))
        self.cpu_share = (time.thread_time() - used_s) / (time.monotonic() - begin_s)
        rows: Any = np.rec.fromarrays(list(zip(*self._rows, strict=True)), names=NAMES)  # type: ignore[call-overload]
        return rows[rows.due_s >= since_s]

    def judge(self, payload: int, kind: str, version: str, body: bytes) -> tuple[str, int]:
        """The kind of an answer, and how many tokens it has."""
        if kind != OK:
            self.examples.setdefault(kind, body[:EXAMPLE_BYTES].decode(errors="replace"))
        return kind, 0

    async def exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, payload: bytes, times_s: list[float]
    ) -> tuple[str, str, bytes, bool]:
        """Send a request. Returns the answer's kind, version and body, and whether the connection ends with it; adds
        to `times_s` when its first byte came. Raises OSError, EOFError."""
        writer.write(payload)
        head = (await reader.readuntil(b"\r\n\r\n")).lower().decode("latin-1")
        times_s.append(time.monotonic())
        status = head[9:12]
        body = b""
        if length := find_header(head, "content-length"):
            body = await reader.readexactly(int(length))
        else:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                body += await reader.readexactly(size)
                await reader.readuntil(b"\r\n")
            await reader.readuntil(b"\r\n")
        is_last = find_header(head, "connection") == "close"
        return OK if status == "200" else status, find_header(head, "shoal-model-version"), body, is_last

    async def _send_all(self, begin_s: float, since_s: float) -> None:
        self._free = asyncio.Semaphore(self.connections)
        spans_s = ((begin_s, since_s), (since_s, self.end_s))
        async with asyncio.TaskGroup() as tasks:
            for _ in range(0 if self.rate else self.connections):
                tasks.create_task(self._call_repeatedly())
            for due_s in (due_s for span_s in spans_s for due_s in draw_arrivals(self.rate, *span_s, self.seed)):
                if (wait_s := due_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.create_task(self._send(due_s))
        for _, writer in self._idle:
            writer.transport.abort()
        await asyncio.sleep(0)  # in which the sockets are closed

    async def _call_repeatedly(self) -> None:
        while (now_s := time.monotonic()) < self.end_s:
            if await self._send(now_s) != OK:
                await asyncio.sleep(RETRY_S)

    async def _send(self, due_s: float) -> str:
        payload = self._num_sent % len(self.payloads)
        self._num_sent += 1
        self.is_full |= self._free.locked()
        times_s = [due_s]
        kind = UNANSWERED
        version = "-"
        tokens = 0
        writer = None
        try:
            async with asyncio.timeout_at(due_s + self.timeout_s), self._free:
                reader, writer = await self._connect()
                times_s.append(time.monotonic())
                kind, version, body, is_last = await self.exchange(reader, writer, self.payloads[payload], times_s)
                times_s.append(time.monotonic())
                kind, tokens = self.judge(payload, kind, version, body)
                if not is_last:
                    self._idle.append((reader, writer))
                    writer = None
        except TimeoutError:
            pass
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError):
            kind = INCOMPLETE if len(times_s) > 2 else LOST
        if writer is not None:
            writer.transport.abort()
        times_s += [time.monotonic()] * (4 - len(times_s))
        self._rows.append((*times_s, payload, kind, version, tokens))
        return kind

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while self._idle:
            reader, writer = self._idle.pop()
            if not reader.at_eof():
                return reader, writer
            writer.transport.abort()
        url = urlsplit(self.url)
        return await asyncio.open_connection(url.hostname, url.port or url.scheme, ssl=self.tls)


def allow_connections() -> None:
    """As many as the system permits to this process: each is an open file."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def find_header(head: str, name: str) -> str:
    """The value of a header, "" without it. head: in lower case"""
    return head.partition(f"\n{name}: ")[2].partition("\r")[0]


def draw_arrivals(rate: float, begin_s: float, end_s: float, seed: int) -> list[float]:
    """Times of a Poisson process, given that as many come as do on average."""
    times_s = np.random.default_rng(seed).uniform(begin_s, end_s, round(rate * (end_s - begin_s)))
    arrivals: list[float] = np.sort(times_s).tolist()
    return arrivals
