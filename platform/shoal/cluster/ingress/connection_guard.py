"""Holds the clients' connections of a replica that answers at HAProxy's own port: none is cut when the replica ends.

A process beside the replica, the *guard*, holds a duplicate of each connection's socket. Of a replica that ends or is
killed it resumes HAProxy's front, and then each connection by the state that the replica has left in shared memory:

- idle, also with a request that the replica has not read: passed on to HAProxy (`RETURN_SOCKET`), byte by byte;
- with a request in hand, and nothing of its answer written: 503, and come again, as HAProxy says it;
- with a part of an answer written: closed, as HAProxy does it.

A replica may return a connection while it runs. The guard imports the standard library only, and asyncio when it has
something to do. `serve.http.front_protocol` calls `ConnectionGuard`, on the event loop.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cluster.ingress.backup_listener import MAX_HTTP, MAX_RETURNED
from shoal.cluster.ingress.haproxy_config import build_error
from shoal.cluster.ingress.shared_listener import RETURN_SOCKET, pause_front, read_mark
from shoal.cluster.ingress.time_limits import CLIENT_SILENCE_S

if TYPE_CHECKING:
    import asyncio

COMMAND = "import sys; sys.path.append({root!r}); from shoal.cluster.ingress.connection_guard import main; main()"
HOLD, RELEASE, RETURN = b"+-<"
HEAD = struct.Struct("<BI")  # of a message: what to do, and the connection's number
MAX_MESSAGE_BYTES = 100_000  # a client of HTTP/2 sends 65,535 of a body, and heads, before it has heard of the server
IN_HAND, IS_CHANGE, NUM_FLAGS = 1, 2, 2  # of a connection's state; above them the bytes written before this request
# Linux's tcp_info: not sent yet, sent, sent again.
NOT_SENT, SENT = struct.Struct("=I"), struct.Struct("=QQ")
NOT_SENT_AT, SENT_AT, TCP_INFO_BYTES = 144, 200, 216


class ConnectionGuard:
    """The replica's side: starts the guard, and hands it sockets.

    states: of each connection `bytes written << NUM_FLAGS | flags`
    """

    def __init__(self, folder: Path, server: str) -> None:
        """folder: of HAProxy's configuration; server: host:port of the replica's own server, as its mark has it"""
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        states = os.memfd_create("connections")
        os.truncate(states, 8 * (MAX_HTTP + 1))
        self.states = memoryview(mmap.mmap(states, 8 * (MAX_HTTP + 1))).cast("Q")
        self._free = list(range(MAX_HTTP + 1))
        command = COMMAND.format(root=str(Path(__file__).parents[3]))
        words = [sys.executable, "-I", "-S", "-c", command, str(theirs.fileno()), str(states), str(folder), server]
        fds = (theirs.fileno(), states)
        self._process = subprocess.Popen(words, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        os.close(states)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def hold(self, connection: socket.socket) -> int:
        """Hold a connection; returns its number. Of more than `MAX_HTTP` one is returned at once."""
        number = self._free.pop()
        self.states[number] = 0
        with suppress(OSError):  # the guard was killed
            socket.send_fds(self._control, [HEAD.pack(HOLD, number)], [connection.fileno()])
        return number

    def release(self, number: int) -> None:
        """Let go of a connection that the replica closes."""
        self._send(RELEASE, number)

    def return_connection(self, number: int, read: bytes) -> None:
        """Have HAProxy answer a connection from now on. read: what the client has sent and nobody answered"""
        self._send(RETURN, number, read)

    def _send(self, what: int, number: int, read: bytes = b"") -> None:
        with suppress(OSError):
            self._control.send(HEAD.pack(what, number) + read)
        self._free.append(number)


class _Guard:
    """The guard's process."""

    def __init__(self, control: socket.socket, states: memoryview, folder: Path, server: str) -> None:
        self._control, self._states, self._folder, self._server = control, states, folder, server
        self._connections: dict[int, socket.socket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._capacity: asyncio.Semaphore | None = None  # of HAProxy's, whose queue of connections is short
        self._pending: list[Future[None]] = []

    def run(self) -> None:
        """Returns when the replica has ended and its connections have their answers."""
        while True:
            message, fds, *_ = socket.recv_fds(self._control, HEAD.size + MAX_MESSAGE_BYTES, 1)
            if not message:
                break
            what, number = HEAD.unpack_from(message)
            if what == HOLD:
                self._connections[number] = socket.socket(fileno=fds[0])
            elif what == RELEASE:
                self._connections.pop(number).close()
            else:
                self._begin(self._pass_on(self._connections.pop(number), message[HEAD.size :]))
        with suppress(OSError):  # HAProxy is gone as well
            mark = read_mark(self._folder)
            if mark is not None and mark.server == self._server:
                pause_front(self._folder, False)
        for number, connection in self._connections.items():
            self._begin(self._end(connection, self._states[number]))
        wait(self._pending)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        import asyncio

        if self._loop is None:
            self._loop, self._capacity = asyncio.new_event_loop(), asyncio.Semaphore(MAX_RETURNED)
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._pending = [each for each in self._pending if not each.done()]
        self._pending.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _end(self, connection: socket.socket, state: int) -> None:
        """End a connection of a replica that has ended."""
        written = state >> NUM_FLAGS
        if count_written(connection) != written:
            connection.close()
        elif state & IN_HAND:
            await self._refuse(connection, bool(state & IS_CHANGE))
        else:
            await self._pass_on(connection, b"")

    async def _refuse(self, connection: socket.socket, is_change: bool) -> None:
        import asyncio

        answer = build_error(503, closes=True)
        if is_change:  # it may have been made: nothing may repeat it by itself
            answer = answer.replace(b"retry-after: 1\r\n", b"")
        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(sock=connection)
            writer.write(answer)
            writer.write_eof()
            async with asyncio.timeout(CLIENT_SILENCE_S):
                while await reader.read(MAX_MESSAGE_BYTES):  # unread input would take the answer back
                    pass
        connection.close()

    async def _pass_on(self, connection: socket.socket, read: bytes) -> None:
        """Connect HAProxy to the client once that has sent something."""
        import asyncio

        with suppress(OSError, TimeoutError):
            reader, writer = await asyncio.open_connection(sock=connection)
            async with asyncio.timeout(CLIENT_SILENCE_S):
                first = read or await reader.read(MAX_MESSAGE_BYTES)
            assert self._capacity is not None
            if first:
                async with self._capacity:
                    await self._exchange(reader, writer, describe_addresses(connection) + first)
            writer.close()
        connection.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first: bytes) -> None:
        """Pass on what a client and HAProxy send each other, until HAProxy ends it."""
        import asyncio

        from_haproxy, to_haproxy = await asyncio.open_unix_connection(self._folder / RETURN_SOCKET)
        to_haproxy.write(first)
        upwards = asyncio.ensure_future(copy(reader, to_haproxy))
        try:
            await copy(from_haproxy, writer)
        finally:
            upwards.cancel()
            to_haproxy.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end."""
    while data := await reader.read(MAX_MESSAGE_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def describe_addresses(connection: socket.socket) -> bytes:
    """The line of HAProxy's PROXY protocol, version 1."""
    theirs, ours = connection.getpeername(), connection.getsockname()
    kind = "TCP6" if connection.family == socket.AF_INET6 else "TCP4"
    hosts = " ".join(host.split("%")[0] for host in (theirs[0], ours[0]))
    return f"PROXY {kind} {hosts} {theirs[1]} {ours[1]}\r\n".encode()


def count_written(connection: socket.socket) -> int:
    """How many bytes have been written into a connection of TCP, by any process."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    sent, again = SENT.unpack_from(info, SENT_AT)
    return int(sent - again + NOT_SENT.unpack_from(info, NOT_SENT_AT)[0])


def main() -> None:
    control, states, folder, server = sys.argv[1:]
    table = memoryview(mmap.mmap(int(states), 8 * (MAX_HTTP + 1))).cast("Q")
    _Guard(socket.socket(fileno=int(control)), table, Path(folder), server).run()
