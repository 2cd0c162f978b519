"""Servers in threads of a test: of HTTP that answers by the path that is asked, and of any application."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from socketserver import BaseServer
from typing import Any

import uvicorn

from waiting import start_thread, wait_for


class Answering(ThreadingHTTPServer):
    """find: what a path is answered with: bytes, or what becomes JSON; None: an error. seen: the last path and token"""

    find: Callable[[str], Any]
    seen: tuple[str, str | None] = ("", None)
    posted: list[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Answering

    def do_GET(self) -> None:
        self.server.seen = (self.path, self.headers["Authorization"])
        found = self.server.find(self.path.partition("?")[0])
        body = found if isinstance(found, bytes) else json.dumps(found).encode()
        self.send_response(500 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.server.posted.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.do_GET()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def answering(find: Callable[[str], Any]) -> Iterator[Answering]:
    """As long as it answers so."""
    with Answering(("127.0.0.1", 0), _Handler) as server, run_server(server):
        server.find, server.posted = find, []  # type: ignore[method-assign]
        yield server


@contextmanager
def run_server(server: BaseServer) -> Iterator[None]:
    """Until the end of the block."""
    thread = start_thread(server.serve_forever, 0.01)
    try:
        yield
    finally:
        server.shutdown()
        thread.join()


@contextmanager
def run_app(app: Any, listener: socket, **options: Any) -> Iterator[None]:
    """An application of ASGI, until the end of the block."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none", **options))
    thread = start_thread(server.run, [listener])
    try:
        wait_for(lambda: server.started, what="the server")
        yield
    finally:
        server.should_exit = True
        thread.join(60.0)
    assert not thread.is_alive()
