"""A client's connection at a replica that answers at HAProxy's own port.

The replica answers plain requests alone (`PLAIN`). A connection whose next bytes are anything else, or do not come, is
returned to HAProxy with them, so that they have HAProxy's own answer. So are the idle connections of a server that
stops. `DirectFront` has the connections, and looks at each once a second: requests that are not whole, answers that
nobody reads or that take too long. `cluster.ingress.connection_guard` sees to the rest when this process is killed.

`FrontFollower` has a replica answer clients whenever there is nothing to balance. HAProxy marks the only replica of the
only endpoint whenever it starts (`haproxy_config.find_only_replica`), which is whenever replicas or endpoints change.
The replica takes a duplicate of HAProxy's listening sockets, and then pauses HAProxy's front. Where the mark is gone, a
new HAProxy accepts connections at the same sockets already. Both may accept at once, so neither change loses a
connection.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import socket
from collections.abc import Collection
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from shoal.cluster.ingress.backup_listener import MAX_HTTP
from shoal.cluster.ingress.connection_guard import ConnectionGuard
from shoal.cluster.ingress.haproxy_config import PATHS_OF_CHANGES, REQUEST_TIMEOUT_S, build_error
from shoal.cluster.ingress.serve_environment import BUFFER_BYTES
from shoal.cluster.ingress.shared_listener import Mark, is_running, pause_front, read_mark, take_listeners
from shoal.cluster.ingress.time_limits import CLIENT_SILENCE_S
from shoal.network_address import is_loopback
from shoal.serve.http.direct_protocol import DirectProtocol
from shoal.serve.protocol.access import FORWARDED_FROM_HEADER

CHECK_S = 1.0
STUCK_CHECKS = 3  # in a row, in which the guard has left a message unread
HALF_CLOSED_S = 0.1  # in which a client that has ended its side may have its answer
SPARE_FILES = 256  # of those that the process may open: for all but clients
MAX_HEAD_BYTES = 4096  # of a plain request: HAProxy adds headers, and the endpoint limits them
# The head of a request that HAProxy and this server read alike, if each header of `ONCE` is there once at most.
PLAIN = re.compile(
    rb"(?:GET|POST) (?!/-/|%b)/[\w.~:@!$&'()*+,;=/-]*(?:\?[\w.~:@!$&'()*+,;=/?%%-]*)? HTTP/1\.1\r\n"
    rb"(?i:(?:host: *(?:[\w.-]+|\[[\da-f:.]+\])(?::\d+)?|connection: *(?:keep-alive|close)"
    rb"|content-length: *(?P<length>\d{1,15})|(?!(?:host|connection|content-length|transfer-encoding|te|trailer|upgrade"
    rb"|http2-settings|expect|keep-alive|proxy-connection|shoal-from):)[!#$%%&'*+.^`|~\w-]+:[\t -~]*)\r\n){1,40}\r\n"
    % PATHS_OF_CHANGES[1:].encode()
)
ONCE = b"\r\nhost:", b"\r\ncontent-length:", b"\r\nconnection:"


class DirectFront:
    """The clients' connections of one server of uvicorn's. `is_leaving`: each is returned when it is idle.

    answer_s: the longest that an answer may take
    """

    def __init__(self, server: Any, guard: ConnectionGuard, answer_s: float) -> None:
        self.guard = guard
        self.answer_s = answer_s
        self.is_leaving = False
        self._max_connections = min(MAX_HTTP, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES)
        self.connections: set[FrontProtocol] = set()
        self._accepted: set[asyncio.Task[Any]] = set()
        self._num_stuck = 0
        self._server, self._loop = server, asyncio.get_running_loop()
        self._timer = self._loop.call_later(CHECK_S, self._check)

    def listen(self, listener: socket.socket) -> None:
        """Accept connections. The guard has each one before anything else is done with it."""
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept, listener)

    def stop_listening(self, listener: socket.socket) -> None:
        """Accept what waits at the socket of an HAProxy that may have been killed, and close it."""
        self._loop.remove_reader(listener)
        while self._accept(listener):
            pass
        listener.close()

    def _accept(self, listener: socket.socket) -> bool:
        """Whether a connection has come."""
        if not self.guard.flush():  # clients wait at the socket, where HAProxy may accept them
            return False
        try:
            connection, _address = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # HAProxy had it, or the client has gone
            return False
        number = self.guard.hold(connection)
        if len(self.connections) + len(self._accepted) >= self._max_connections:
            self.guard.return_connection(number, b"")
            connection.close()
            return True
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        make = partial(FrontProtocol, self, self._server, connection, number)
        accepted = self._loop.create_task(self._loop.connect_accepted_socket(make, connection))
        self._accepted.add(accepted)
        accepted.add_done_callback(self._accepted.discard)
        return True

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
        self._num_stuck = 0 if self.guard.flush() else self._num_stuck + 1
        if self._num_stuck >= STUCK_CHECKS:
            self.guard.process.kill()  # `FrontFollower` then leaves the clients to HAProxy


class FrontProtocol(DirectProtocol):
    """One connection. uvicorn's parser gets one plain request at a time."""

    _pending = b""  # what has come, and is of no request that has begun
    _num_read = _num_missing = 0  # bytes: of all that has come; of the body of the request that has begun
    _num_written = _num_answered = 0  # bytes: of all answers; when the last one had ended
    _is_returned = False
    _seen: tuple[Any, ...] = ()  # what the last check saw, and since when
    _seen_s = 0.0

    def __init__(self, front: DirectFront, server: Any, connection: socket.socket, number: int) -> None:
        super().__init__(server.config, server.server_state, server.lifespan.state)
        self._front = front
        self._guard = front.guard
        self._socket = connection
        self._number = number

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._front.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._front.connections.discard(self)
        if not self._is_returned:
            self._guard.release(self._number)
            with suppress(OSError):  # the client has gone
                self._socket.shutdown(socket.SHUT_RDWR)  # else it ends when the guard has read that it ends

    def data_received(self, data: bytes) -> None:
        self._num_read += len(data)
        if self._num_missing:
            part, data = data[: self._num_missing], data[self._num_missing :]
            self._num_missing -= len(part)
            super().data_received(part)
        if data:
            self._pending += data
            self._proceed()

    def _is_idle(self) -> bool:
        cycle: Any = self.cycle
        return not self._num_missing and (cycle is None or cycle.response_complete)

    def _proceed(self, is_late: bool = False) -> None:
        """Begin the next request, or return the connection with it. is_late: it is not awaited any longer"""
        data, transport = self._pending, self.transport
        if transport.is_closing():
            return
        if not self._is_idle():
            self.flow.pause_reading()  # until the answer has ended
            return
        size, is_whole = find_plain(data)
        is_answered = not transport.get_write_buffer_size()
        is_leaving = self._front.is_leaving and is_answered and self._guard.is_alive
        if is_whole and not is_leaving:
            self._pending = data[size:]
            self._num_missing = max(0, size - len(data))
            super().data_received(data[:size])
        elif is_answered and (size == 0 or is_late or is_leaving):
            if self._guard.is_alive:
                self._return()
            else:
                self._refuse(503)
        elif not size:
            self.flow.pause_reading()  # until the client has its answer: see `check`

    def on_headers_complete(self) -> None:
        self.headers.append((FORWARDED_FROM_HEADER, self.client[0].encode() if self.client else b""))
        super().on_headers_complete()
        if self._front.is_leaving:
            self.cycle.keep_alive = False

    def before_write(self, num_bytes: int, is_last: bool) -> None:
        self._num_written += num_bytes
        if is_last:  # it may be the answer to a body whose rest has not come
            read = self._num_read - len(self._pending) + self._num_missing
            self._guard.mark_idle(self._number, read, self._num_written)

    def on_response_complete(self) -> None:
        self._num_answered = self._num_written
        super().on_response_complete()
        if self._pending:
            self._proceed()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """HAProxy takes such a client for one that has gone, unless it has its answer already."""
        if not self._num_read:
            self._refuse(400)
        elif self._pending:
            self._proceed(is_late=True)
        elif not self._is_idle() and not self._num_missing:
            self.cycle.keep_alive = False
            self.loop.call_later(HALF_CLOSED_S, self._give_up, self.cycle, 400)
            return True
        return None

    def _refuse(self, code: int) -> None:
        if self._num_written == self._num_answered:  # not into an answer that has begun
            self.transport.write(build_error(code, closes=True))
        self.transport.close()

    def _give_up(self, cycle: Any, code: int) -> None:
        """End a request that has no whole answer yet."""
        if not cycle.response_complete:
            cycle.disconnected = True  # for the application
            cycle.message_event.set()
            self._refuse(code)

    def shutdown(self) -> None:
        """Called by uvicorn when its server stops."""
        if self._is_idle() and not self.transport.get_write_buffer_size():
            self._return()
        else:
            super().shutdown()

    def _return(self) -> None:
        if not self._is_returned:
            self._is_returned = True
            self._guard.return_connection(self._number, self._pending)
        self.transport.abort()

    def check(self, now_s: float) -> None:
        """End what has made no progress for too long. Called once a second."""
        cycle: Any = self.cycle
        unread_bytes = self.transport.get_write_buffer_size()
        read = self._num_read - len(self._pending)  # the start of another request is no progress of this one
        if self._pending and self._is_idle() and not unread_bytes:
            self._proceed(is_late=True)
        elif self._seen != (seen := (unread_bytes, self._num_written, read)):
            self._seen, self._seen_s = seen, now_s
        elif unread_bytes:
            if now_s - self._seen_s > CLIENT_SILENCE_S:
                self.transport.abort()
        elif cycle is None:
            if now_s - self._seen_s > REQUEST_TIMEOUT_S:
                self._refuse(408)
        elif not cycle.more_body and now_s - self._seen_s > self._front.answer_s:  # the application sees to a body
            self._give_up(cycle, 504)


def find_plain(data: bytes) -> tuple[int, bool]:
    """The bytes of the plain request that `data` begins with, and whether it may begin: HAProxy, too, waits for the
    first bytes of a body. 0: it is none; 1: it may become one."""
    end = data.find(b"\r\n\r\n", 0, MAX_HEAD_BYTES) + 4
    if end < 4:
        return int(len(data) < MAX_HEAD_BYTES), False
    size = measure_plain(data[:end])
    return size, 0 < min(size, BUFFER_BYTES) <= len(data)


@lru_cache(maxsize=256)  # a client's heads are alike
def measure_plain(head: bytes) -> int:
    """The bytes of the plain request that has this head; 0: it is none."""
    match = PLAIN.fullmatch(head)
    counts = [head.lower().count(name) for name in ONCE]
    return len(head) + int(match["length"] or 0) if match and counts[0] == max(counts) == 1 else 0


logger = logging.getLogger(__name__)
POLL_S = 0.1


class FrontFollower:
    """Follows the mark of the HAProxy whose configuration is in `folder`.

    server:      uvicorn's, at `port` of `hosts`
    answer_s:    see `DirectFront`
    """

    def __init__(self, server: Any, hosts: Collection[str], port: int, folder: Path, answer_s: float) -> None:
        self._server = server
        self._hosts = hosts
        self._port = port
        self._folder = folder
        self._answer_s = answer_s
        self._mark: Mark | None = None
        self._front: DirectFront | None = None
        self._listeners: dict[int, socket.socket] = {}  # by their sockets' inodes

    async def run(self) -> None:
        """Returns when the server stops."""
        while not self._server.should_exit:
            try:
                await self._follow(read_mark(self._folder))
            except OSError as error:  # HAProxy ends or starts: see again
                logger.debug("HAProxy's sockets cannot be had: %s", error)
            await asyncio.sleep(POLL_S)
        if self._front is not None:
            with suppress(OSError):  # the guard does it again when this process has ended
                await self._leave(read_mark(self._folder))
            self._close_listeners()
            self._front.close()

    async def _follow(self, mark: Mark | None) -> None:
        is_ours = mark is not None and self._names_us(mark)
        is_guarded = self._front is None or self._front.guard.is_alive
        if self._listeners and not (is_ours and is_guarded):
            await self._leave(mark)
        elif mark is not None and mark != self._mark and is_ours and is_guarded:
            await self._enter(mark)

    def _names_us(self, mark: Mark) -> bool:
        host, _, port = mark.server.rpartition(":")
        return int(port) == self._port and (is_loopback(host) or host in self._hosts)

    async def _enter(self, mark: Mark) -> None:
        """Accept connections at the sockets of the HAProxy of a mark, in place of it."""
        if not await asyncio.to_thread(is_running, mark, self._folder):
            return
        if self._front is None:
            self._front = DirectFront(self._server, ConnectionGuard(self._folder, mark.server), self._answer_s)
        self._front.is_leaving = False
        for each in await asyncio.to_thread(take_listeners, self._folder, mark.port):
            inode = os.fstat(each.fileno()).st_ino
            if inode in self._listeners:  # HAProxy has it from the one before
                each.close()
            else:
                self._listeners[inode] = each
                self._front.listen(each)
        if self._listeners:
            await asyncio.to_thread(pause_front, self._folder, True)
        self._mark = mark

    async def _leave(self, mark: Mark | None) -> None:
        """Leave the connections to HAProxy. mark: the present one"""
        assert self._front is not None
        self._front.is_leaving = True
        if mark is None or self._names_us(mark):  # or another replica has paused the front
            await asyncio.to_thread(pause_front, self._folder, False)
        self._mark = None
        self._close_listeners()

    def _close_listeners(self) -> None:
        assert self._front is not None
        while self._listeners:
            self._front.stop_listening(self._listeners.popitem()[1])
