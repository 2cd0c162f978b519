"""A relay passes bytes on; it stops, cuts and refuses as it is told, and then passes them on again."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shoal.libs.chaos.link import UNAVAILABLE, FaultyLink

HEAD = b"GET / HTTP/1.1\r\n\r\n"


class Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        while data := self.request.recv(1024):
            self.request.sendall(data)


@pytest.fixture
def link() -> Iterator[FaultyLink]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Echo) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        opened = FaultyLink("127.0.0.1", server.server_address[1])
        yield opened
        opened.close()
        server.shutdown()


def connect(link: FaultyLink) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), timeout=60)


def ask(connection: socket.socket, text: bytes = b"x") -> bytes:
    connection.sendall(text)
    return connection.recv(1024)


def test_what_is_stopped_comes_once_the_partition_is_over(link: FaultyLink) -> None:
    with connect(link) as connection:
        assert ask(connection) == b"x"
        link.inject("partition")
        connection.settimeout(0.3)
        with pytest.raises(TimeoutError):
            ask(connection)
        connection.settimeout(60)
        link.inject("")
        assert connection.recv(1024) == b"x"


@pytest.mark.parametrize("fault", ["cut", "errors"])
def test_a_cut_ends_connections_and_errors_answer_new_ones(link: FaultyLink, fault: str) -> None:
    with connect(link) as connection:
        assert ask(connection) == b"x"
        link.inject(fault)
        with suppress(ConnectionError):
            assert connection.recv(1024) == b""
    with connect(link) as connection:
        assert ask(connection, HEAD) == (UNAVAILABLE if fault == "errors" else HEAD)
    link.inject("")
    with connect(link) as connection:
        assert ask(connection, HEAD) == HEAD
