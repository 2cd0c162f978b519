"""The WebSocket side of a gateway: a listening socket and its connections, in the gateway's thread.

The gateway's poller waits for `fileno`; each call of `receive` reads what has arrived, from a bounded number of
connections, and returns messages of the protocol by route, as the ROUTER socket does. Knows neither sessions nor the
ledger.

| what waits                      | capacity                    | who unblocks | close()       |
|---------------------------------|-----------------------------|--------------|---------------|
| a message that is not complete  | its limit, of a connection  | its client   | drops it      |
| bytes that a client has not read| 16 MiB, and one message     | its client   | tries once    |
"""

from __future__ import annotations

import itertools
import select
import socket
import ssl
import time
from collections.abc import Container, Iterator, Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from websockets.frames import CloseCode
from websockets.http11 import Request

from shoal.errors import ConfigError, ProtocolViolation
from shoal.extend.rl import GatewaySetting
from shoal.libs.websocket.connection import Connection
from shoal.libs.websocket.framing import Dialect, join_binary, join_text, split_binary, split_text
from shoal.wire import encode
from shoal.wire.messages import ErrorMessage

ROUTE_PREFIX = b"\x00ws"  # no client of the ROUTER has such a name: those that begin with 0 are its own, of 5 bytes
MAX_READY = 64  # connections that are read in one round
BACKLOG = 1024
MAX_CONNECTIONS = 16_384


class WebSocketListener:
    """Listen on `spec.host:spec.websocket`, or if that is 0, on the remembered port while it is free, or any.

    Raises ConfigError when that fails.
    """

    def __init__(self, setting: GatewaySetting, remembered_port: int = 0) -> None:
        self._setting, self._spec = setting, setting.spec
        experience = setting.experience
        self._dtypes = {"observation": experience.observation.dtype, "mask": "bool"}
        self._tls: ssl.SSLContext | None = None
        self._socket = self._listen(remembered_port)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._epoll = select.epoll()
        self._epoll.register(self._socket, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}  # by file descriptor
        self._routes: dict[bytes, Connection] = {}
        self._numbers = itertools.count()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def __contains__(self, route: bytes) -> bool:
        return route.startswith(ROUTE_PREFIX)

    @property
    def address(self) -> str:
        """As games connect to it."""
        host = f"[{self._spec.host}]" if ":" in self._spec.host else self._spec.host
        return f"{'wss' if self._tls else 'ws'}://{host}:{self.port}"

    def receive(self) -> Iterator[tuple[bytes, list[bytes]]]:
        """(route, frames) of what has arrived; no frames: the connection has ended."""
        for descriptor, mask in self._epoll.poll(0, MAX_READY):
            if descriptor == self._socket.fileno():
                self._accept()
                continue
            connection = self._connections[descriptor]
            if mask & select.EPOLLOUT:
                connection.flush()
            if mask & ~select.EPOLLOUT:
                yield from self._read(connection)
            self._settle(connection)
            if connection.is_closed:
                yield connection.route, []

    def send(self, route: bytes, frames: Sequence[bytes]) -> str:
        """Send a message of the protocol in the client's dialect; returns why it was not sent, or ""."""
        connection = self._routes.get(route)
        if connection is None:
            return "unreachable"
        if frames[0].find(b"\xa7welcome", 0, 16) >= 0:
            connection.raise_limit(self._spec.max_message_bytes)
        is_text = connection.dialect is Dialect.TEXT
        message = join_text(frames) if is_text else join_binary(frames, connection.dialect)
        problem = connection.send(message, is_text)
        self._settle(connection)
        return problem

    def sweep(self, sessions: Container[bytes]) -> None:
        """End the connections that have no session for too long."""
        before = time.monotonic() - self._spec.timeout_s
        for connection in list(self._connections.values()):
            if connection.opened_at < before and connection.route not in sessions:
                connection.end(CloseCode.POLICY_VIOLATION, "no hello")
                self._settle(connection)

    def close(self) -> None:
        """End all connections."""
        for connection in list(self._connections.values()):
            connection.end(CloseCode.GOING_AWAY, "the gateway stops")
            self._settle(connection)
        self._epoll.close()
        self._socket.close()

    def _listen(self, remembered_port: int) -> socket.socket:
        spec = self._spec
        family = socket.AF_INET6 if ":" in spec.host else socket.AF_INET
        for port in dict.fromkeys([spec.websocket or remembered_port, spec.websocket or 0]):
            try:
                return socket.create_server((spec.host, port), family=family, backlog=BACKLOG)
            except OSError as error:
                problem = f"cannot be bound on {spec.host}: {error}"
        raise ConfigError("gateway.websocket", spec.websocket, problem, "choose another port, or 0 for any free one")

    def _accept(self) -> None:
        for _ in range(MAX_READY):
            try:
                sock, _ = self._socket.accept()
            except OSError:  # none waits, it has gone, or there is no descriptor for it
                return
            if len(self._connections) >= MAX_CONNECTIONS:
                sock.close()
                continue
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            route = ROUTE_PREFIX + next(self._numbers).to_bytes(8, "big")
            connection = Connection(sock, route, self._find_refusal)
            self._connections[sock.fileno()] = self._routes[route] = connection
            self._epoll.register(sock, select.EPOLLIN)

    def _read(self, connection: Connection) -> Iterator[tuple[bytes, list[bytes]]]:
        for is_text, message in connection.receive():
            try:
                if is_text:
                    connection.dialect, frames = Dialect.TEXT, split_text(message, self._dtypes)
                else:
                    connection.dialect, frames = split_binary(message)
            except ProtocolViolation as violation:
                self.send(connection.route, [encode(ErrorMessage(violation.code, violation.message))])
            else:
                if frames:
                    yield connection.route, frames

    def _settle(self, connection: Connection) -> None:
        """Wait for what the connection needs now, or forget it."""
        if connection.route not in self._routes:
            return
        descriptor = connection.socket.fileno()
        if connection.is_closed:
            self._epoll.unregister(descriptor)
            del self._connections[descriptor], self._routes[connection.route]
            connection.socket.close()
        else:
            self._epoll.modify(descriptor, select.EPOLLIN | (select.EPOLLOUT if connection.is_sending else 0))

    def _find_refusal(self, request: Request) -> str:
        """Why a page's handshake is refused: pages of other sites are, but for those in `origins`."""
        origin = request.headers.get("Origin")
        if origin is None or origin in self._spec.origins:
            return ""
        host, own = urlsplit(origin).hostname, urlsplit(f"//{request.headers.get('Host', '')}").hostname
        if host is not None and host == own and _is_unambiguous(host):
            return ""
        return f"pages of {origin} may not connect: gateway.origins names those that may"


def _is_unambiguous(host: str) -> bool:
    """Whether no one else can make this name mean another machine."""
    try:
        return host == "localhost" or bool(ip_address(host))
    except ValueError:
        return False
