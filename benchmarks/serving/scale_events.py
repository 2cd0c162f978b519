"""Answers of 50 s while replicas come and go, and an endpoint whose only replica is killed: none is cut, none hangs.

    python -m benchmarks.serving.scale_events [--runs N] [--quick] [--only events kills]

Beside Ray Serve with its own HAProxy, as shipped, in one run. Streams (ours over gRPC, the peer's over HTTP) begin all
along the scale events, and each has an answer a second; so do requests on connections that are kept. Then the only
replica is killed (SIGKILL) while requests of 1 kB and 1 MB are in hand, on fresh and on kept connections, and cannot
start again for a minute, in which each second one request of each kind is sent.

`kills`, in a file of its own: clients send one small request after the other, while the only replica of ours is killed
again and again, on IPv4 and on IPv6. A client connects anew where an answer said so; each fourth client also after each
fourth answer.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import os
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import numpy as np

from benchmarks.children import OUR_PYTHON, Child, pause_until, scratch
from benchmarks.result import Row, compare, options, write
from shoal.libs.grpc import inference_pb2 as pb
from shoal.libs.grpc.methods import METHODS, SERVICE

ANSWER_S = 1.0
SILENCE_S = 90.0  # above every limit of either server: then it hangs
SIZES = (1_000, 1_000_000)
NUM_IN_HAND = 5  # of each kind
START_S = 180.0
PEER = "Ray Serve with HAProxy"


@dataclass(frozen=True)
class Extent:
    """How much of it."""

    num_streams: int = 100
    stream_s: int = 50
    num_events: int = 20
    event_s: float = 2.5
    restart_s: float = 60.0

    num_kills: int = 20
    num_kept: int = 200


QUICK = Extent(num_streams=20, stream_s=10, num_events=6, event_s=2.0, restart_s=10.0, num_kills=3)


@dataclass
class Found:
    """What became of each stream and request of one run, by kind."""

    streams: Counter[str] = field(default_factory=Counter)
    kept: Counter[str] = field(default_factory=Counter)
    num_displaced: int = 0
    gone_s: float = 0.0  # after the last answer
    killed: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0  # of those that no replica could answer, from the kill or from their sending on


class Server:
    """One of the two."""

    def __init__(self, child: Child, said: dict[str, Any], start: Path) -> None:
        self.child, self.start, self.url, self.grpc = child, start, urlsplit(said["url"]), said["grpc"]

    def stream(self, num: int) -> str:
        """What becomes of a stream of so many answers."""
        try:
            count = sum(1 for _ in (self._grpc_stream(num) if self.grpc else self._http_stream(num)))
        except (OSError, http.client.HTTPException, grpc.RpcError) as error:
            is_late = isinstance(error, TimeoutError) or "DEADLINE_EXCEEDED" in str(error)
            return "hung" if is_late else "cut"
        return "answered" if count == num else "cut"

    def _grpc_stream(self, num: int) -> Iterator[object]:
        method = METHODS["ModelStreamInfer"]
        request = pb.ModelInferRequest(model_name="model", raw_input_contents=[np.zeros(1, "<f4").tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=[1, 1])
        with grpc.insecure_channel(self.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            begin = channel.stream_stream(
                f"/{SERVICE}/ModelStreamInfer", method.request.SerializeToString, method.response.FromString
            )
            for answer in begin(itertools.repeat(request, num), timeout=num * ANSWER_S * 3 + SILENCE_S):
                if not answer.error_message:
                    yield answer

    def _http_stream(self, num: int) -> Iterator[object]:
        with closing(self.connect()) as connection:
            connection.request("GET", f"/stream?{num}")
            yield from connection.getresponse()

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(str(self.url.netloc), timeout=SILENCE_S)

    def ask(self, connection: http.client.HTTPConnection, size_bytes: int) -> str:
        """What becomes of a request."""
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0.0]}
        try:
            connection.request("POST", self.url.path, json.dumps({"inputs": [tensor]}).ljust(size_bytes))
            response = connection.getresponse()
            response.read()
        except TimeoutError:
            connection.close()
            return "hung"
        except (OSError, http.client.HTTPException):
            connection.close()
            return "closed without a status"
        if response.status == 503 and response.headers["retry-after"]:
            return "503, come again"
        return "answered" if response.status == 200 else str(response.status)

    def ingresses(self) -> set[int]:
        """HAProxy's processes."""
        return {each.pid for each in self.child.processes("haproxy.cfg") if each.name() == "haproxy"}


@contextmanager
def server_of(kind: str, folder: Path, answer_s: float = ANSWER_S, host: str = "127.0.0.1") -> Iterator[Server]:
    mine = folder / os.urandom(2).hex()
    mine.mkdir()
    words = [OUR_PYTHON, "-m", "benchmarks.serving.scaled", kind, str(mine), str(mine / "start")]
    words += [str(answer_s), host]
    with Child(words, mine, {"SHOAL_HOME": str(mine / "home")}, mine / "r", goodbye_s=30.0) as child:
        yield Server(child, child.answer(START_S), mine / "start")


def measure_events(server: Server, extent: Extent, found: Found) -> None:
    """Streams and requests while replicas come and go."""
    begin_s, seen, is_over = time.monotonic(), server.ingresses(), threading.Event()
    events_s = extent.num_events * extent.event_s

    def stream(number: int) -> str:
        pause_until(begin_s + events_s * number / extent.num_streams)
        return server.stream(extent.stream_s)

    def request() -> Counter[str]:
        became: Counter[str] = Counter()
        with closing(server.connect()) as connection:
            while not is_over.is_set():
                became[server.ask(connection, SIZES[0])] += 1
        return became

    with ThreadPoolExecutor(extent.num_streams + 4) as pool:
        streams = [pool.submit(stream, number) for number in range(extent.num_streams)]
        requests = [pool.submit(request) for _ in range(4)]
        for number in range(extent.num_events):
            pause_until(begin_s + number * extent.event_s)
            server.child.ask(90.0, do="scale", num_replicas=1 if number % 2 else 2)
            seen |= server.ingresses()
        found.streams.update(each.result() for each in streams)
        is_over.set()
        for each in requests:
            found.kept += each.result()
    last_s = time.monotonic()
    while len(server.ingresses()) > 1 and time.monotonic() < last_s + SILENCE_S:
        time.sleep(0.2)
    found.num_displaced, found.gone_s = len(seen) - 1, time.monotonic() - last_s


def measure_kill(server: Server, extent: Extent, found: Found) -> None:
    """Requests at the only replica when it is killed, and while it cannot start."""
    killed_s: list[float] = []

    def request(size_bytes: int, is_kept: bool, is_in_hand: bool) -> tuple[str, float]:
        with closing(server.connect()) as connection:
            if is_kept:
                connection.request("GET", "/v2" if server.grpc else "/stream?0")
                connection.getresponse().read()
            ready.wait()
            sent_s = time.monotonic()
            became = server.ask(connection, size_bytes)
            return became, time.monotonic() - (killed_s[0] if is_in_hand else sent_s)

    kinds = list(itertools.product(SIZES, (False, True)))
    num = NUM_IN_HAND * len(kinds)
    ready = threading.Barrier(num + 1)
    while len(victims := server.child.processes("ray::ServeReplica")) > 1:  # one that was removed drains
        time.sleep(0.2)
    with ThreadPoolExecutor(num + len(kinds) * int(extent.restart_s)) as pool:
        futures = [pool.submit(request, *kind, True) for kind in kinds * NUM_IN_HAND]
        ready.wait()
        time.sleep(ANSWER_S / 2)
        server.start.touch()
        killed_s.append(time.monotonic())
        os.kill(victims[0].pid, signal.SIGKILL)
        ready = threading.Barrier(1)
        for second in range(1, int(extent.restart_s)):
            pause_until(killed_s[0] + second)
            futures += [pool.submit(request, *kind, False) for kind in kinds]
        server.start.unlink()
        results = [each.result() for each in futures]
    found.killed.update(became for became, _ in results)
    found.slowest_s = max(took_s for _, took_s in results)


class Asking:
    """Clients that ask one request after the other, until `stop`. `became`: what became of each."""

    def __init__(self, server: Server) -> None:
        tensor = {"name": "x", "shape": [1, 1], "datatype": "FP32", "data": [0.0]}
        body = json.dumps({"inputs": [tensor]})
        head = f"POST {server.url.path} HTTP/1.1\r\nhost: a\r\ncontent-length: {len(body)}\r\n\r\n"
        self._url, self._request = server.url, (head + body).encode()
        self.became: Counter[str] = Counter()
        self.is_over = False
        self.num_answered: list[int] = []  # of each client

    async def ask(self, number: int) -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        while not self.is_over:
            kind = "kept" if streams else "new"
            try:
                async with asyncio.timeout(SILENCE_S):
                    streams = streams or await asyncio.open_connection(self._url.hostname, self._url.port)
                    streams[1].write(self._request)
                    head = await streams[0].readuntil(b"\r\n\r\n")
                    (length,) = (line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                    await streams[0].readexactly(int(length.split()[1]))
            except (OSError, EOFError, TimeoutError) as error:
                self.became[f"{kind}: {type(error).__name__}"] += 1
                closes = True
            else:
                status, closes = head.split()[1].decode(), b"connection: close" in head.lower()
                self.became[f"{kind}: {status}"] += 1
                self.num_answered[number] += status == "200"
            if streams and (closes or (number % 4 == 0 and self.num_answered[number] % 4 == 0)):
                streams[1].close()
                streams = None
            if closes:
                await asyncio.sleep(0.05)

    async def wait_for_answers(self) -> None:
        before = list(self.num_answered)
        async with asyncio.timeout(START_S):
            while any(now - then < 5 for then, now in zip(before, self.num_answered, strict=True)):
                await asyncio.sleep(0.05)


async def measure_kills(server: Server, extent: Extent) -> Counter[str]:
    asking = Asking(server)
    asking.num_answered = [0] * extent.num_kept
    async with asyncio.TaskGroup() as clients:
        for number in range(extent.num_kept):
            clients.create_task(asking.ask(number))
        for _ in range(extent.num_kills):
            await asking.wait_for_answers()
            await asyncio.sleep(1.0)  # more than the replica needs to take over from HAProxy, ten times
            (victim,) = server.child.processes("ray::ServeReplica")
            held = [each for each in victim.net_connections("tcp") if each.laddr.port == server.url.port]
            asking.became["connections at the replica when it was killed"] += len(held)
            victim.kill()
        await asking.wait_for_answers()
        asking.is_over = True
    return asking.became


def measure_all_kills(folder: Path, extent: Extent) -> list[Row]:
    rows = []
    for host in ("127.0.0.1", "::1"):
        with server_of("ours", folder, 0.0, host) as server:
            became = asyncio.run(measure_kills(server, extent))
        print(host, became, flush=True)
        told = ("kept: 200", "kept: 503", "new: 200", "new: 503")
        lost = sum(num for what, num in became.items() if ": " in what and what not in told)
        name = f"{extent.num_kills} times kill -9 of the only replica at {host} under {extent.num_kept} clients"
        rows.append(compare(f"{name}: requests without an answer", "requests", "lower", [lost], bar=0.0,
                            bar_kind="value", note=str(dict(became))))  # fmt: skip
    return rows


def measure(kind: str, folder: Path, extent: Extent) -> Found:
    found = Found()
    with server_of(kind, folder) as server:
        measure_events(server, extent, found)
        server.child.ask(90.0, do="scale", num_replicas=1)
        measure_kill(server, extent, found)
    print(kind, found, flush=True)
    return found


def rows_of(ours: list[Found], peer: list[Found], extent: Extent) -> list[Row]:
    of = f"{extent.num_streams} streams of {extent.stream_s} s over {extent.num_events} scale events"
    dead = f"the only replica killed, and not back for {extent.restart_s:g} s"

    def lost(which: Callable[[Found], Counter[str]], allowed: set[str]) -> list[list[float]]:
        return [
            [sum(n for name, n in which(each).items() if name not in allowed) for each in runs] for runs in (ours, peer)
        ]

    def notes(which: Callable[[Found], Counter[str]]) -> str:
        return f"ours {dict(sum(map(which, ours), Counter()))}, peer {dict(sum(map(which, peer), Counter()))}"

    displaced = [statistics.median(each.num_displaced for each in runs) for runs in (ours, peer)]
    fine = {"answered", "503, come again"}
    value = {"bar_kind": "value"}
    return [
        compare(f"{of}: cut or hung", "streams", "lower", *lost(lambda each: each.streams, {"answered"}), PEER, 0.0,
                note=notes(lambda each: each.streams), **value),
        compare(f"{of}: requests meanwhile without an answer", "requests", "lower",
                *lost(lambda each: each.kept, {"answered"}), PEER, 0.0, note=notes(lambda each: each.kept), **value),
        compare(f"{of}: last displaced HAProxy gone after the last answer", "s", "lower",
                [each.gone_s for each in ours], [each.gone_s for each in peer], PEER, 30.0,
                note=f"displaced: ours {displaced[0]:g}, peer {displaced[1]:g} (median of the runs)", **value),
        compare(f"{dead}: requests without an answer or a 503", "requests", "lower",
                *lost(lambda each: each.killed, fine), PEER, 0.0, note=notes(lambda each: each.killed), **value),
        compare(f"{dead}: the slowest answer or 503", "s", "lower", [each.slowest_s for each in ours],
                [each.slowest_s for each in peer], PEER, 2.0, **value),
    ]  # fmt: skip


def main() -> None:
    chosen = options(__doc__, runs=1, only=("events", "kills"))
    extent = QUICK if chosen.quick else Extent()
    found: dict[str, list[Found]] = {"ours": [], "peer": []}
    with scratch() as folder:
        if "events" in chosen.only:
            for _ in range(chosen.runs):
                for kind, runs in found.items():
                    runs.append(measure(kind, folder, extent))
            write("serving_scale_events", rows_of(found["ours"], found["peer"], extent), chosen.results)
        if "kills" in chosen.only:
            write("serving_kills", measure_all_kills(folder, extent), chosen.results)


if __name__ == "__main__":
    main()
