"""Clients that send slowly, or too much, against the application behind a real server."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from serving.fake_host import FakeHost
from shoal.serve.http.app import RestApp
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_limits import RequestLimits
from waiting import wait_for

ANSWER_S = 60.0
LIMITS = RequestLimits(max_body_bytes=1 << 20, body_grace_s=1.5, min_body_bytes_per_s=1 << 20)
ROW = b'{"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1, 2, 3]}]}'


class Server:
    """The application in a thread of its own, as a replica serves it."""

    def __init__(self) -> None:
        self._server: uvicorn.Server | None = None
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        wait_for(lambda: self._server is not None and self._server.started, what="server")

    def _run(self) -> None:
        async def serve() -> None:
            app = RestApp(FakeHost(), AccessControl(None, []), limits=LIMITS)
            config = uvicorn.Config(app, log_level="error", lifespan="off", access_log=False)
            self._server = uvicorn.Server(config)
            await self._server.serve([self._socket])

        asyncio.run(serve())

    def connect(self, content_length: int, *headers: bytes) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self.port), ANSWER_S)
        lines = [b"POST /v2/models/m/infer HTTP/1.1", b"host: x", b"content-length: %d" % content_length, *headers]
        connection.sendall(b"\r\n".join([*lines, b"", b""]))
        return connection

    def close(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(ANSWER_S)
        self._socket.close()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server()
    yield started
    started.close()


def answer(connection: socket.socket) -> tuple[int, str, bool]:
    """(status, error, whether the connection was closed)"""
    received = b""
    while b"\r\n\r\n" not in received or not received.endswith(b"}"):
        chunk = connection.recv(65536)
        if not chunk:
            break
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    closed = b"connection: close" in head.lower()
    return int(head.split()[1]), json.loads(body).get("error", ""), closed


def test_a_body_that_does_not_come_is_cut_off(server: Server) -> None:
    with server.connect(1000) as connection:
        status, error, closed = answer(connection)
    assert (status, closed) == (408, True)
    assert "0 bytes have arrived" in error


def test_a_body_that_trickles_is_cut_off_however_long_it_would_last(server: Server) -> None:
    """A byte at a time keeps every timeout of inactivity quiet."""
    began_s = time.monotonic()
    with server.connect(1000) as connection:
        connection.settimeout(0.02)
        received = b""
        while not received:
            try:
                connection.sendall(b"x")
                received = connection.recv(65536)
            except TimeoutError:
                assert time.monotonic() < began_s + ANSWER_S
        assert received.startswith(b"HTTP/1.1 408")


def test_a_body_too_large_is_refused_before_it_is_sent(server: Server) -> None:
    with server.connect(LIMITS.max_body_bytes + 1) as connection:
        status, error, closed = answer(connection)
    assert (status, closed) == (413, True)
    assert str(LIMITS.max_body_bytes) in error


def test_an_honest_client_is_answered_meanwhile(server: Server) -> None:
    with server.connect(1000), server.connect(1000), server.connect(len(ROW)) as honest:
        honest.sendall(ROW)
        assert answer(honest)[0] == 200


def test_a_slow_one_that_is_fast_enough_is_answered(server: Server) -> None:
    padded = ROW + b" " * 500_000
    with server.connect(len(padded)) as connection:
        for start in range(0, len(padded), 100_000):
            connection.sendall(padded[start : start + 100_000])
        assert answer(connection)[0] == 200


@pytest.mark.parametrize(
    ("headers", "status"), [([b"h%d: y" % i for i in range(70)], 431), ([b"h: " + b"y" * 9000], 431)]
)
def test_too_many_headers(server: Server, headers: list[bytes], status: int) -> None:
    with server.connect(0, *headers) as connection:
        assert answer(connection)[0] == status


def test_a_path_too_long(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), ANSWER_S) as connection:
        connection.sendall(b"GET /" + b"x" * 2000 + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        assert answer(connection)[0] == 414
