"""A client's connection at a replica that answers at HAProxy's own port: what HAProxy does there for a client.

`DirectFront` has the connections, and looks at each once a second: heads that do not come, answers that nobody reads or
that take too long. What `DirectProtocol` does not answer takes Serve's way, without the headers that steer it. A
connection that this server cannot answer (HTTP/2, one too many) is returned to HAProxy, as are the idle ones of a
server that stops. `cluster.ingress.connection_guard` sees to the rest when this process is killed.
"""

from __future__ import annotations

import asyncio
import re
import resource
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from shoal.cluster.ingress.backup_listener import MAX_HTTP
from shoal.cluster.ingress.connection_guard import IN_HAND, IS_CHANGE, MAX_MESSAGE_BYTES, NUM_FLAGS, ConnectionGuard
from shoal.cluster.ingress.haproxy_config import PATHS_OF_CHANGES, REQUEST_TIMEOUT_S, build_error
from shoal.cluster.ingress.serve_environment import BUFFER_BYTES
from shoal.cluster.ingress.time_limits import CHANGE_S, CLIENT_SILENCE_S
from shoal.serve.http.direct_protocol import SERVE_PATH_PREFIX, DirectProtocol
from shoal.serve.protocol.access import FORWARDED_FROM_HEADER

CHECK_S = 1.0
MAX_ACCEPTED = 32  # in one turn of the loop
SPARE_FILES = 256  # of those that the process may open: for all but clients
HTTP2 = b"PRI * HTTP/2.0"  # how a connection of HTTP/2 begins
STEERS_SERVE = re.compile(
    rb"x-(request-timeout-seconds|request-id|session-id|shoal-asleep|serve-router-.*|forwarded-.*)"
    rb"|serve[_-]multiplexed[_-]model[_-]id|forwarded|upgrade"
)
CHANGES = re.compile(PATHS_OF_CHANGES)


class DirectFront:
    """The clients' connections of one server of uvicorn's. `is_leaving`: each ends with its next answer.

    answer_s: the longest that an answer may take
    """

    def __init__(self, server: Any, guard: ConnectionGuard, answer_s: float) -> None:
        self.guard, self.answer_s, self.is_leaving = guard, answer_s, False
        self._max_connections = min(MAX_HTTP, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES)
        self.connections: set[FrontProtocol] = set()
        self._accepted: set[asyncio.Task[Any]] = set()
        self._server, self._loop = server, asyncio.get_running_loop()
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections. The guard has each one before anything else is done with it."""
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept, listener)

    def stop_listening(self, listener: socket.socket) -> None:
        self._loop.remove_reader(listener)
        listener.close()

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(MAX_ACCEPTED):
            try:
                connection, _address = listener.accept()
            except (BlockingIOError, ConnectionAbortedError):  # HAProxy had it, or the client has gone
                return
            self._connect(connection)

    def _connect(self, connection: socket.socket) -> None:
        number = self.guard.hold(connection)
        if len(self.connections) + len(self._accepted) >= self._max_connections:
            self.guard.return_connection(number, b"")
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        make = partial(FrontProtocol, self, self._server, number)
        accepted = self._loop.create_task(self._loop.connect_accepted_socket(make, connection))
        self._accepted.add(accepted)
        accepted.add_done_callback(self._accepted.discard)

    def leave(self) -> None:
        """Have all connections end with their next answer."""
        self.is_leaving = True
        for each in self.connections:
            each.leave()

    def close(self) -> None:
        """Stop the connections that have come since the server began to stop."""
        self._timer.cancel()
        for each in list(self.connections):
            each.shutdown()

    def _check(self) -> None:
        self._timer = self._loop.call_later(CHECK_S, self._check)
        now_s = self._loop.time()
        for each in list(self.connections):
            each.check(now_s)


class CountingTransport:
    """A connection's transport, with the bytes written into it."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self.written = 0
        self._write = transport.write
        for name in ("abort", "close", "get_write_buffer_size", "is_closing", "pause_reading", "resume_reading"):
            setattr(self, name, getattr(transport, name))
        self.get_extra_info, self.write_eof = transport.get_extra_info, transport.write_eof

    def write(self, data: bytes) -> None:
        self.written += len(data)
        self._write(data)


class FrontProtocol(DirectProtocol):
    """One connection."""

    _began = _is_change = _is_returned = _has_completed_head = False
    _head = b""  # of a request, as long as it is incomplete; none if it began with the end of another one
    _num_head_bytes = 0
    _seen: tuple[Any, int, int] = (None, 0, 0)  # what the last check saw, and since when
    _seen_s = 0.0

    def __init__(self, front: DirectFront, server: Any, number: int) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._front, self._number = front, number
        self._guard, self._states = front.guard, front.guard.states
        self.ws_protocol_class = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        counting: Any = CountingTransport(transport)
        super().connection_made(counting)
        self._from = (FORWARDED_FROM_HEADER, self.client[0].encode() if self.client else b"")
        self._front.connections.add(self)
        self._seen_s = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._front.connections.discard(self)
        if not self._is_returned:
            self._guard.release(self._number)

    def data_received(self, data: bytes) -> None:
        transport: Any = self.transport
        was_within = self._is_within_head()
        was_idle = not was_within and self._is_idle()
        is_http2 = not self._began and data.startswith(HTTP2)
        self._began = True
        if is_http2 or (was_idle and self._front.is_leaving and self._may_return(data)):  # maybe for a new endpoint
            self._return(data)
            return
        if was_idle:
            self._states[self._number] = transport.written << NUM_FLAGS | IN_HAND
        self._has_completed_head = False
        super().data_received(data)
        # Not a head that follows another request in this data: that one would be answered twice.
        if (was_within or was_idle) and not self._has_completed_head and self._is_within_head():
            self._num_head_bytes += len(data)
            if was_idle or self._head:
                self._head += data
            if self._num_head_bytes > BUFFER_BYTES:
                self._refuse(400)

    def _is_within_head(self) -> bool:
        """Whether the head of a request has come in part."""
        cycle: Any = self.cycle
        return self.scope is not None and (cycle is None or cycle.scope is not self.scope)

    def _is_idle(self) -> bool:
        cycle: Any = self.cycle
        return cycle is None or (cycle.response_complete and not cycle.more_body)

    def on_headers_complete(self) -> None:
        headers, url = self.headers, self.url
        self._head, self._num_head_bytes, self._has_completed_head = b"", 0, True
        headers.append(self._from)
        upgrades = self.parser.should_upgrade()
        if url.startswith(SERVE_PATH_PREFIX):
            self.url = b"/closed"
        elif upgrades or self.expect_100_continue or b"%" in url or not url.startswith(b"/"):
            headers[:] = [each for each in headers if STEERS_SERVE.fullmatch(each[0]) is None]
            headers.append((b"x-request-disconnect-disabled", b"?1"))
        super().on_headers_complete()
        path = self.scope["path"]
        if path.startswith("/-/"):  # in another form
            self.scope["path"] = "/closed"
        elif ("rollout" in path or "repository" in path) and CHANGES.match(path):
            self._is_change = True
            self._states[self._number] |= IS_CHANGE
        if upgrades or self._front.is_leaving:
            self.cycle.keep_alive = False

    def on_response_complete(self) -> None:
        transport: Any = self.transport
        # With more of the body to come, a number that is wrong: the guard then closes the connection.
        written = 0 if self.cycle.more_body and not self.pipeline else transport.written
        has_more = self.pipeline or self._is_within_head()
        self._states[self._number] = written << NUM_FLAGS | (IN_HAND if has_more else 0)
        self._is_change = False
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn for what is not HTTP."""
        self._refuse(400)

    def _refuse(self, code: int) -> None:
        transport: Any = self.transport
        if transport.written == self._states[self._number] >> NUM_FLAGS:  # not into an answer that has begun
            transport.write(build_error(code, closes=True))
        transport.close()

    def leave(self) -> None:
        """Have the connection end with its next answer."""
        if not self._is_idle():
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        """Called by uvicorn when its server stops."""
        if self._is_idle() and not self.transport.get_write_buffer_size():
            if self._head or not self._is_within_head():
                self._return(self._head)
            else:
                self._refuse(503)
        else:
            super().shutdown()

    def _may_return(self, read: bytes) -> bool:
        is_answered = not self.transport.get_write_buffer_size()
        return is_answered and len(read) < MAX_MESSAGE_BYTES and self._guard.is_alive

    def _return(self, read: bytes) -> None:
        if not self._is_returned and len(read) < MAX_MESSAGE_BYTES:
            self._is_returned = True
            self._guard.return_connection(self._number, read)
        self.transport.abort()

    def check(self, now_s: float) -> None:
        """End what has made no progress for too long. Called once a second."""
        transport: Any = self.transport
        seen: tuple[Any, int, int] = (self.scope, transport.get_write_buffer_size(), transport.written)
        if seen[0] is not self._seen[0] or seen[1:] != self._seen[1:]:
            self._seen, self._seen_s = seen, now_s
            return
        limit_s, end = self._find_limit(seen[1])
        if now_s - self._seen_s > limit_s:
            end()

    def _find_limit(self, unread_bytes: int) -> tuple[float, Callable[[], None]]:
        """How long the present state may last, and what ends it."""
        cycle: Any = self.cycle
        if unread_bytes:
            return CLIENT_SILENCE_S, self.transport.abort
        if self._is_within_head() and self._is_idle():
            return REQUEST_TIMEOUT_S, lambda: self._refuse(408)
        if cycle is None:
            return REQUEST_TIMEOUT_S, self.transport.close
        if cycle.response_complete or cycle.more_body:  # closed by `DirectProtocol`, or watched by the application
            return float("inf"), self.transport.close
        return CHANGE_S if self._is_change else self._front.answer_s, self._time_out

    def _time_out(self) -> None:
        cycle: Any = self.cycle
        cycle.disconnected = True  # for the application
        cycle.message_event.set()
        self._refuse(504)
