"""The WebSocket side of a gateway: a listening socket and its connections, in the gateway's thread.

The gateway's poller waits for `fileno`; each call of `receive` gives every connection that has something a turn, and
returns messages of the protocol by route, as the ROUTER socket does. Knows neither sessions' content nor the ledger.

| what waits                        | capacity                     | who unblocks | close()               |
|-----------------------------------|------------------------------|--------------|-----------------------|
| a message that is not complete    | its limit, of a connection   | its client   | drops it              |
| bytes that are not parsed         | 64 KiB, of a connection      | its next turn| drops them            |
| bytes that a client has not read  | 16 MiB, and one message      | its client   | sends for 0.5 s       |
| connections without a session     | 16,384, and half of the files| `timeout_s`, or a newer one | drops them |
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
import ssl
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from itertools import chain, count, islice

from websockets.frames import CloseCode
from websockets.http11 import Request

from shoal.errors import ConfigError, ProtocolViolation
from shoal.extend.rl import GatewaySetting, Received
from shoal.libs.websocket.connection import GameConnection
from shoal.libs.websocket.framing import Dialect, join_binary, join_text, read_message, split_binary, split_text
from shoal.libs.websocket.handshake import HandshakeRules, find_policy
from shoal.libs.websocket.relay import Relays
from shoal.wire import ErrorMessage, Message, MessageLimits, Pong, Welcome

ROUTE_PREFIX = b"\x00ws"  # no client of the ROUTER has such a name: those that begin with 0 are its own, of 5 bytes
BACKLOG = 1024
MAX_READY = 256  # connections with a session that have a turn in one round
MAX_STRANGERS = 16  # likewise, without one; while games play, one: their answers wait for it
MAX_WAITING = 16_384  # without a session
BUSY_S = 0.1  # since a session's newest message: then those without one have
REST = 9  # times as long a rest as their turns have taken of the processor
PING_S = 20.0  # of silence, after which a client's library is asked for a pong
FAREWELL_S = 0.5  # for the clients to read the last messages of a gateway that stops
_PORT_WAIT_S = 1.0  # for the previous gateway to release the port
_HOSTS = {"localhost": "127.0.0.1", "*": "0.0.0.0"}
_IDLE_ANSWERS = (Welcome, ErrorMessage, Pong)
_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# As for the ROUTER: a peer that vanishes silently frees its descriptor after 60 + 4 * 15 s.
_LOST_PEER = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
)


class WebSocketListener:
    """Listen on `spec.host:spec.websocket`, or if that is 0, on the remembered port while it is free, or any.

    Raises ConfigError when that fails, or the certificate cannot be used.
    """

    def __init__(self, setting: GatewaySetting, remembered_port: int = 0) -> None:
        self._spec = spec = setting.spec
        self._limits = MessageLimits(max_message_bytes=spec.max_message_bytes)
        observed, self._action = setting.experience.observation.dtype, setting.experience.action
        self._dtypes = {"observation": observed, "mask": "bool", "observations": observed, "rewards": "float32"}
        self._dtypes |= {"flags": "uint8", "masks": "bool"}
        self._certificate = None if spec.tls is None else ServerCertificate(spec.tls.certificate, spec.tls.key)
        self._rules = HandshakeRules(setting.policy, spec.origins, spec.tls is not None)
        self._ping_s = min(PING_S, spec.pause_s / 4)
        self._max_waiting = min(MAX_WAITING, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._socket = self._listen(remembered_port)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self.scheme = "ws" if spec.tls is None else "wss"
        self._waiting_epoll = select.epoll()  # the listening socket, and the connections without a session
        self._waiting_epoll.register(self._socket, select.EPOLLIN)
        self._busy_at = self._rested_at = 0.0
        self._is_resting = False
        self._again = os.eventfd(0, os.EFD_NONBLOCK)  # readable while a connection has bytes that are not parsed
        self._epoll = select.epoll()
        self._relays = Relays(None if spec.tls is None else spec.tls.certificate)
        for ready in (self._again, self._relays, self._waiting_epoll):
            self._epoll.register(ready, select.EPOLLIN)
        self._is_accepting = True
        self._connections: dict[int, GameConnection] = {}  # by file descriptor
        self._routes: dict[bytes, GameConnection] = {}
        self._waiting: dict[bytes, GameConnection] = {}  # those without a session, the longest waiting first
        self._ending: dict[bytes, GameConnection] = {}  # those that may still read why they end, likewise
        self._unread: dict[GameConnection, None] = {}
        self._numbers = count()

    def fileno(self) -> int:
        return self._epoll.fileno()

    def __contains__(self, route: bytes) -> bool:
        return route.startswith(ROUTE_PREFIX)

    def relay(self, addresses: Mapping[str, str]) -> None:
        """Pass connections to the paths of other policies on to the addresses of their gateways."""
        self._relays.addresses = addresses

    def receive(self, is_busy: bool) -> Iterator[Received]:
        """One turn of each connection that has something; of those without a session, only of a few."""
        ready = dict(self._epoll.poll(0, MAX_READY))
        if ready.pop(self._relays.fileno(), 0):
            self._relays.transfer()
        if ready.pop(self._again, 0):
            for connection in self._unread:
                ready.setdefault(connection.socket.fileno(), select.EPOLLIN)
        strangers_wait = ready.pop(self._waiting_epoll.fileno(), 0)
        for descriptor, mask in ready.items():
            yield from self._handle(self._connections[descriptor], mask)
        now = time.monotonic()
        self._busy_at = now if ready or is_busy else self._busy_at
        is_busy = now < self._busy_at + BUSY_S
        if (strangers_wait or self._has_old(now)) and not (is_busy and now < self._rested_at):
            limit, begun = 1 if is_busy else MAX_STRANGERS, time.thread_time()
            self._end_old(now, 1 if is_busy else MAX_READY)
            for descriptor, mask in self._waiting_epoll.poll(0, limit):
                if descriptor == self._socket.fileno():
                    self._accept(limit)
                elif (stranger := self._connections.get(descriptor)) is not None:  # not dropped in this round
                    yield from self._handle(stranger, mask)
            self._rested_at = time.monotonic() + REST * (time.thread_time() - begun)
        should_rest = is_busy and now < self._rested_at
        if should_rest != self._is_resting:  # sessions wake the gateway meanwhile, or else it wakes within 0.1 s
            self._is_resting = should_rest
            self._epoll.modify(self._waiting_epoll, 0 if should_rest else select.EPOLLIN)

    def _handle(self, connection: GameConnection, mask: int) -> Iterator[Received]:
        if mask & select.EPOLLOUT:
            connection.flush()
        if mask & (select.EPOLLERR | select.EPOLLHUP) and connection.is_slowed:
            connection.is_closed = True  # it is not read, and would be ready all the time
        elif mask & ~select.EPOLLOUT:
            yield from self._read(connection)
        if connection.relayed is not None:
            self._hand_over(connection, *connection.relayed)
            return
        if connection.is_ending:
            yield connection.route, None, ()
        self._follow(connection)

    def send(self, route: bytes, message: Message, frames: Sequence[bytes]) -> str:
        """Send a message of the protocol in the client's dialect; returns why it was not sent, or ""."""
        connection = self._routes.get(route)
        if connection is None:
            return "unreachable"
        if isinstance(message, Welcome):
            connection.begin_session(self._spec.max_message_bytes)
            self._waiting.pop(route, None)
            self._move(connection, self._epoll)
        if isinstance(message, _IDLE_ANSWERS):
            connection.count_idle()
        if is_text := connection.dialect is Dialect.TEXT:
            data = join_text(message, frames, self._action)
        else:
            data = join_binary(message, frames, connection.dialect)
        problem = connection.send(data, is_text)
        self._follow(connection)
        return problem

    def sweep(self, sessions: Container[bytes]) -> Iterator[bytes]:
        """End sessions without a sign of life. Connections without a session end when strangers have their turn: many
        at once would hold up the games."""
        now = time.monotonic()
        for connection in [each for each in self._routes.values() if each.alone_at is None]:
            connection.renew()
            if connection.route not in sessions:
                connection.reset_session()
                (self._ending if connection.is_ending else self._waiting)[connection.route] = connection
                self._move(connection, self._waiting_epoll)
            elif now > connection.received_at + self._spec.pause_s:
                connection.end(CloseCode.POLICY_VIOLATION, f"silent for {self._spec.pause_s:g} s")
                yield connection.route
            elif now > max(connection.received_at, connection.pinged_at) + self._ping_s:
                connection.ping()
            self._follow(connection)
        if not self._is_accepting:
            self._is_accepting = True
            self._waiting_epoll.register(self._socket, select.EPOLLIN)
        self._relays.sweep()
        if self._certificate is not None:
            self._certificate.refresh()

    def close(self) -> None:
        """End all connections; their clients may read what was sent for a moment, and those that have got a `bye` close
        by themselves: some libraries, as Godot 4's, lose a message that is followed at once by the end."""
        self._socket.close()
        self._read_farewells(len(self._waiting) + len(self._ending))
        for connection in list(self._routes.values()):
            connection.end(CloseCode.GOING_AWAY, "the gateway stops")
            self._move(connection, self._epoll)
            self._follow(connection)
        self._read_farewells(0)
        for connection in self._connections.values():
            connection.socket.close()
        self._relays.close()
        self._waiting_epoll.close()
        self._epoll.close()
        os.close(self._again)

    def _read_farewells(self, num_remaining: int) -> None:
        """Until no more connections than these are left, or for half of the time."""
        deadline = time.monotonic() + FAREWELL_S / 2
        while len(self._connections) > num_remaining and (left_s := deadline - time.monotonic()) > 0:
            for descriptor, mask in self._epoll.poll(left_s, MAX_READY):
                if (client := self._connections.get(descriptor)) is not None:
                    client.flush()
                    if mask & ~select.EPOLLOUT:
                        list(client.receive())
                    self._follow(client)

    def _listen(self, remembered_port: int) -> socket.socket:
        spec, deadline = self._spec, time.monotonic() + _PORT_WAIT_S
        host = _HOSTS.get(spec.host, spec.host)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        is_dual = host == "::" and socket.has_dualstack_ipv6()
        port = spec.websocket or remembered_port
        while True:
            try:
                return socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=is_dual)
            except OSError as error:
                if spec.websocket or not port:
                    problem, remedy = f"cannot be bound on {spec.host}: {error}", "choose another port, or 0 for any"
                    raise ConfigError("gateway.websocket", spec.websocket, problem, remedy) from None
            if time.monotonic() > deadline:
                port = 0
            else:
                time.sleep(0.05)

    def _accept(self, limit: int) -> None:
        for _ in range(limit):
            try:
                sock, _ = self._socket.accept()
            except OSError as error:
                if error.errno in _NO_DESCRIPTOR and not self._drop_oldest():
                    self._waiting_epoll.unregister(self._socket)  # it would be ready all the time
                    self._is_accepting = False
                if error.errno in _NO_DESCRIPTOR and self._is_accepting:
                    continue
                return  # none waits, or it has gone
            if len(self._waiting) + len(self._ending) >= self._max_waiting:
                self._drop_oldest()
            sock.setblocking(False)
            with suppress(OSError):  # it may have gone
                for option in _LOST_PEER:
                    sock.setsockopt(*option)
                self._add(sock if self._certificate is None else self._certificate.wrap(sock))

    def _add(self, sock: socket.socket) -> None:
        route = ROUTE_PREFIX + next(self._numbers).to_bytes(8, "big")
        connection = GameConnection(sock, route, self._judge, self._waiting_epoll)
        self._connections[sock.fileno()] = self._routes[route] = self._waiting[route] = connection
        connection.poller.register(sock, connection.awaited)

    def _move(self, connection: GameConnection, poller: select.epoll) -> None:
        """Let the connection wait among those with a session, or without one."""
        if connection.poller is not poller and not connection.is_closed:
            connection.poller.unregister(connection.socket)
            connection.poller = poller
            poller.register(connection.socket, connection.awaited)

    def _has_old(self, now: float) -> bool:
        """Whether a connection without a session has had its time."""
        ending, waiting = next(iter(self._ending.values()), None), next(iter(self._waiting.values()), None)
        return (ending is not None and ending.is_over(now)) or (
            waiting is not None and waiting.has_waited(now, self._spec.timeout_s)
        )

    def _end_old(self, now: float, limit: int) -> None:
        """End connections that have had their time, at most twice as many."""
        for ending in list(islice(self._ending.values(), limit)):
            if ending.is_over(now):
                ending.is_closed = True
                self._follow(ending)
        for waiting in list(islice(self._waiting.values(), limit)):
            if waiting.has_waited(now, self._spec.timeout_s):
                waiting.end(CloseCode.POLICY_VIOLATION, "no session: say hello")
                self._follow(waiting)

    def _drop_oldest(self) -> bool:
        """Close the connection that ends, or else has had no session, for the longest time; False without any."""
        for connection in chain(self._ending.values(), self._waiting.values()):
            connection.is_closed = True
            self._follow(connection)
            return True
        return False

    def _read(self, connection: GameConnection) -> Iterator[Received]:
        for is_text, data in connection.receive():
            connection.dialect = Dialect.of(is_text, data)
            try:
                header, frames = split_text(data, self._dtypes) if is_text else split_binary(data)
                message = read_message(header, frames, self._limits)
            except ProtocolViolation as violation:
                yield connection.route, violation, ()
            else:
                yield connection.route, message, frames

    def _follow(self, connection: GameConnection) -> None:
        """Wait for what the connection needs now, or forget it."""
        if self._routes.get(connection.route) is not connection:
            return
        if connection.has_unread:
            self._unread[connection] = None
            os.eventfd_write(self._again, 1)
        elif self._unread.pop(connection, 0) is None and not self._unread:
            os.eventfd_read(self._again)
        if connection.is_closed:
            del self._connections[connection.socket.fileno()], self._routes[connection.route]
            self._waiting.pop(connection.route, None)
            self._ending.pop(connection.route, None)
            connection.socket.close()  # the epoll forgets it, too
        elif connection.is_ending:
            self._waiting.pop(connection.route, None)
            self._ending.setdefault(connection.route, connection)
        if not connection.is_closed and connection.awaited != (awaited := connection.find_awaited()):
            connection.awaited = awaited
            connection.poller.modify(connection.socket, awaited)

    def _hand_over(self, connection: GameConnection, address: str, request: bytes) -> None:
        """What a client sends before it is answered is no part of WebSocket, and is dropped."""
        connection.poller.unregister(connection.socket)
        del self._connections[connection.socket.fileno()], self._routes[connection.route]
        del self._waiting[connection.route]
        self._unread.pop(connection, None)
        self._relays.open(connection.socket, address, request)

    def _judge(self, request: Request) -> tuple[HTTPStatus, str] | str | None:
        hosts, origins = request.headers.get_all("Host"), request.headers.get_all("Origin")
        others, policy = self._relays.addresses, find_policy(request.path)
        if policy in others:
            return others[policy]
        return self._rules.find_problem(request.path, "".join(hosts[:1]), origins[0] if origins else None, others)


class ServerCertificate:
    """A certificate with its chain and its private key, in PEM. Raises ConfigError when they cannot be used."""

    def __init__(self, certificate: str, key: str) -> None:
        self._files = (certificate, key)
        self._seen = self._read_state()
        try:
            self._context = self._load()
        except (OSError, ValueError) as error:
            remedy = "give the certificate with its chain and its private key, in PEM, which the gateway may read"
            raise ConfigError("gateway.tls", list(self._files), f"cannot be used: {error}", remedy) from None

    def wrap(self, sock: socket.socket) -> ssl.SSLSocket:
        """A socket whose handshake happens when it is read. Raises OSError when the client has gone."""
        return self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)

    def refresh(self) -> None:
        """Load the files if they have changed; those that do not fit each other, as between two writes, later."""
        if (state := self._read_state()) != self._seen:
            self._seen = state
            try:
                self._context = self._load()
            except (OSError, ValueError):
                return  # it goes on with what it has

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files, password=lambda: "")  # an encrypted key must not ask at a terminal
        return context

    def _read_state(self) -> list[tuple[int, int, int] | None]:
        return [
            None if (it := _stat(path)) is None else (it.st_ino, it.st_mtime_ns, it.st_size) for path in self._files
        ]


def _stat(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:
        return None
