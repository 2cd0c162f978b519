"""The load generator: one epoll loop over raw sockets, in a process of its own; the same for every server.

    python -m benchmarks.serving.driver PLAN.json

Closed loop: each of so many connections sends its next request when it has its answer. Open loop: requests leave at
Poisson times whatever became of the others, and their latency counts from the moment they were due, so a server that
stalls is charged for everything that should have been asked meanwhile. How late requests left is reported too, and the
processor time of the driver: a measurement in which either is large says nothing. `drive` writes plans and reads the
outcome; `validate` shows what the driver itself can do. Where it may, it runs at a higher priority than the servers.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import socket
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.serving.exchange import OK, STREAM_PATH, Answer, Exchange, Grpc, GrpcStream, Http1
from benchmarks.talk import say

READ_BYTES = 1 << 20
IDLE_S = 5.0  # as HTTP clients do, a connection is left before the server may close it
LOOK_EVERY_S = 0.25  # for requests that are never answered
EXAMPLE_BYTES = 300
IN_BACKGROUND = (errno.EINPROGRESS, errno.EAGAIN)


@dataclass(frozen=True)
class Plan:
    """What to send, to whom, how.

    files:       the requests, taken in turn: for HTTP head and body, for gRPC the message
    connections: closed loop with so many; or, open loop, the most that may be opened
    rate:        open loop: requests a second on average; 0 for the closed loop
    warm_up_s:   at the beginning; what is asked meanwhile is not told
    timeout_s:   a request without an answer for so long is counted as hung
    check:       "" or "version": every number of the answer must be the version that the answer names
    """

    host: str
    port: int
    files: list[str]
    out: str
    seconds: float
    connections: int
    rate: float = 0.0
    warm_up_s: float = 0.0
    timeout_s: float = 10.0
    seed: int = 0
    check: str = ""
    grpc_path: str = ""
    pause_s: float = 0.0  # closed loop: between an answer and the next request


class Log:
    """What became of every request: times in seconds of time.monotonic(), a kind, a version. Compact, for a soak."""

    def __init__(self) -> None:
        self._due_s, self._sent_s, self._done_s = array("d"), array("d"), array("d")
        self._kinds, self._versions = array("B"), array("q")
        self._known: dict[str, int] = {}
        self.examples: dict[str, str] = {}  # the first body of each kind that is not ok

    def add(self, due_s: float, sent_s: float, kind: str, version: int = 0) -> None:
        self._due_s.append(due_s)
        self._sent_s.append(sent_s)
        self._done_s.append(time.monotonic())
        self._kinds.append(self._known.setdefault(kind, len(self._known)))
        self._versions.append(version)

    def save(self, path: str, since_s: float, cpu_s: float) -> None:
        """Keep what was due after `since_s`."""
        due_s = np.array(self._due_s)
        kept = due_s >= since_s
        columns = {"sent_s": self._sent_s, "done_s": self._done_s, "versions": self._versions}
        kinds = np.array(list(self._known))[np.array(self._kinds)][kept]
        arrays = {name: np.array(one)[kept] for name, one in columns.items()}
        arrays |= {"example_kinds": np.array(list(self.examples)), "examples": np.array(list(self.examples.values()))}
        np.savez(path, due_s=due_s[kept], kinds=kinds, cpu_s=cpu_s, **arrays)  # type: ignore[arg-type]


class Line:
    """One connection, with at most one request on its way."""

    def __init__(self, driver: Driver, exchange: Exchange) -> None:
        self._driver, self._exchange = driver, exchange
        self._socket = socket.socket()
        self._socket.setblocking(False)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # To be woken for an answer, and not before: by HTTP/2 windows are widened in a segment of their own.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, exchange.fewest_bytes)
        status = self._socket.connect_ex((driver.plan.host, driver.plan.port))
        self._out = memoryview(exchange.opening())
        self.busy, self.open = False, status in (0, *IN_BACKGROUND)
        self.due_s = self.sent_s = 0.0
        self.done_s = time.monotonic()
        self._writing = False
        if self.open:
            driver.poll.register(self.fileno(), select.EPOLLIN)

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, payload: bytes, due_s: float) -> None:
        self.busy, self.due_s, self.sent_s = True, due_s, time.monotonic()
        if not self.open:
            self._end("lost")
            return
        request = self._exchange.request(payload)
        self._out = memoryview(bytes(self._out) + request if self._out else request)
        self.write()

    def write(self) -> None:
        try:
            while self._out:
                self._out = self._out[self._socket.send(self._out) :]
        except BlockingIOError:
            pass
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, *IN_BACKGROUND):
                self.drop()
                return
        if bool(self._out) != self._writing:
            self._writing = bool(self._out)
            self._driver.poll.modify(self.fileno(), select.EPOLLIN | (select.EPOLLOUT if self._writing else 0))

    def read(self) -> None:
        try:
            data = self._socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.drop()
            return
        answer, reply = self._exchange.feed(data)
        if reply:
            self._out = memoryview(bytes(self._out) + reply)
            self.write()
        if answer is not None:
            kind = self._driver.judge(answer)
            if answer.closing:
                self._close()
            self._end(kind, answer.version)

    def drop(self, kind: str = "") -> None:
        """The connection is gone, and with it the request that was on its way."""
        begun = self._exchange.begun
        self._close()
        if self.busy:
            self._end(kind or ("cut short" if begun else "lost"))

    def _close(self) -> None:
        if self.open:
            self.open = False
            self._driver.poll.unregister(self.fileno())
            self._driver.lines.pop(self.fileno(), None)
        self._socket.close()

    def _end(self, kind: str, version: int = 0) -> None:
        self.busy, self.done_s = False, time.monotonic()
        self._driver.log.add(self.due_s, self.sent_s, kind, version)
        self._driver.ended(self)


class Driver:
    """Runs one plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.log = plan, Log()
        self.poll = select.epoll()
        self.lines: dict[int, Line] = {}
        self._payloads = [Path(file).read_bytes() for file in plan.files]
        self._num_sent = self._num_done = 0
        self._idle: list[Line] = []
        self._waiting: deque[float] = deque()  # open loop: due, and not sent
        self._resting: deque[tuple[float, Line]] = deque()  # closed loop: between an answer and the next request
        self._end_s = 0.0

    def run(self) -> None:
        """Send, wait for what is on its way, write the outcome."""
        cpu_s, begin_s = time.process_time(), time.monotonic() + 0.05
        self._end_s = begin_s + self.plan.seconds + self.plan.warm_up_s
        if self.plan.rate:
            self._open_loop(begin_s)
        else:
            self._closed_loop()
        self.log.save(self.plan.out, begin_s + self.plan.warm_up_s, time.process_time() - cpu_s)
        for line in list(self.lines.values()):
            line.drop()

    def judge(self, answer: Answer) -> str:
        """The kind of an answer, after a look into it when the plan asks for one."""
        if self.plan.check == "version" and answer.kind == OK:
            body = msgspec.json.decode(answer.body)
            values = {value for output in body["outputs"] for value in output["data"]}
            if values != {answer.version} or body["model_version"] != str(answer.version):
                return "mixed"
        if answer.kind != OK:
            self.log.examples.setdefault(answer.kind, answer.body[:EXAMPLE_BYTES].decode(errors="replace"))
        return answer.kind

    def ended(self, line: Line) -> None:
        """A request of `line` has its outcome. Closed loop: send the next one; open loop: the line is free."""
        self._num_done += 1
        if self.plan.rate:
            self._idle.append(line)
        elif time.monotonic() < self._end_s:
            # A server that is gone is asked again after a moment, not as fast as the loop can turn.
            wait_s = self.plan.pause_s if line.open else max(self.plan.pause_s, 0.02)
            if wait_s:
                self._resting.append((time.monotonic() + wait_s, line))
            else:
                self._send(time.monotonic(), line)

    def _closed_loop(self) -> None:
        for _ in range(self.plan.connections):
            self._send(time.monotonic(), None)
        look_s = 0.0
        while self._num_done < self._num_sent or self._resting:
            self._dispatch(0.005 if self._resting else LOOK_EVERY_S)
            now_s = time.monotonic()
            while self._resting and self._resting[0][0] <= now_s:
                _, line = self._resting.popleft()
                if now_s < self._end_s:
                    self._send(now_s, line if line.open else None)
            if now_s >= look_s:
                look_s = now_s + LOOK_EVERY_S
                self._look(now_s)

    def _open_loop(self, begin_s: float) -> None:
        due = arrivals(self.plan, begin_s)
        next_s = next(due, None)
        look_s = 0.0
        while next_s is not None or self._num_done < self._num_sent or self._waiting:
            now_s = time.monotonic()
            while next_s is not None and next_s <= now_s:
                self._waiting.append(next_s)
                next_s = next(due, None)
            while self._waiting and (self._idle or len(self.lines) < self.plan.connections):
                self._send(self._waiting.popleft(), self._idle.pop() if self._idle else None)
            if now_s >= look_s:
                look_s = now_s + LOOK_EVERY_S
                self._look(now_s)
            wait_s = min(look_s, next_s or look_s) - time.monotonic()
            if wait_s > 0:
                select.select([self.poll], [], [], wait_s)  # epoll's own wait knows milliseconds only
            self._dispatch(0.0)

    def _send(self, due_s: float, line: Line | None) -> None:
        if line is not None and time.monotonic() - line.done_s > IDLE_S:
            line.drop()
        if line is None or not line.open:
            line = self._connect()
        payload = self._payloads[self._num_sent % len(self._payloads)]
        self._num_sent += 1
        line.ask(payload, due_s)

    def _exchange(self) -> Exchange:
        plan = self.plan
        if not plan.grpc_path:
            return Http1()
        of_path = GrpcStream if plan.grpc_path == STREAM_PATH else Grpc
        return of_path(f"{plan.host}:{plan.port}", plan.grpc_path)

    def _connect(self) -> Line:
        line = Line(self, self._exchange())
        if line.open:
            self.lines[line.fileno()] = line
        return line

    def _dispatch(self, timeout_s: float) -> None:
        for number, events in self.poll.poll(timeout_s):
            line = self.lines.get(number)
            if line is not None and events & select.EPOLLOUT:
                line.write()
            if line is not None and line.open and events & ~select.EPOLLOUT:
                line.read()

    def _look(self, now_s: float) -> None:
        for line in list(self.lines.values()):
            if line.busy and now_s - line.sent_s > LOOK_EVERY_S:
                line.read()  # what is too short to be woken for
            if line.busy and now_s - line.sent_s > self.plan.timeout_s:
                line.drop("hung")


def arrivals(plan: Plan, begin_s: float) -> Iterator[float]:
    """Poisson times from `begin_s` to the end of the plan; the same for the same seed."""
    end_s = begin_s + plan.warm_up_s + plan.seconds
    generator = np.random.default_rng(plan.seed)
    due_s = begin_s
    while True:
        for gap_s in generator.exponential(1.0 / plan.rate, size=1000).tolist():
            due_s += gap_s
            if due_s >= end_s:
                return
            yield due_s


def main(path: str) -> None:
    # A client of another machine is not displaced by what it asks. Linux weighs sessions before processes where it has
    # autogroups: there a process's own priority counts only within its session, which is the driver's alone.
    with contextlib.suppress(OSError):
        os.nice(-15)
        Path("/proc/self/autogroup").write_text("-15")
    content: dict[str, Any] = json.loads(Path(path).read_text())
    plan = Plan(**content)
    say(begun_s=time.monotonic())
    Driver(plan).run()
    say(out=plan.out)


if __name__ == "__main__":
    main(sys.argv[1])
