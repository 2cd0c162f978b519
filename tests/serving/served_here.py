"""The protocol's application on a real port of this process, for whoever speaks to it as a client would."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from answering import run_app
from serving.fake_host import FakeHost
from shoal.serve.http.app import RestApp
from shoal.serve.protocol.access import AccessControl

TOKEN = "a-token"


class Counting:
    """Counts the connections and requests that reach an application."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self.peers: set[tuple[str, int]] = set()
        self.paths: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.peers.add(tuple(scope["client"]))
            self.paths.append(scope["path"])
        await self._app(scope, receive, send)


@contextmanager
def served(host: FakeHost, token: str | None = TOKEN) -> Iterator[tuple[str, Counting]]:
    """The address of an endpoint of `host`, and what reached it; until the end of the block."""
    app = Counting(RestApp(host, AccessControl(token, [])))
    with socket.create_server(("127.0.0.1", 0)) as listener, run_app(app, listener):
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", app
