"""Holds the clients' connections of a replica that answers at HAProxy's own port: none is cut when the replica ends.

A process beside the replica, the *guard*, holds a duplicate of each connection's socket. Of a replica that ends or is
killed it resumes HAProxy's front, and then each connection by what the replica has read and written of it. The kernel
has counted it, and the replica has said in shared memory at which counts the connection is idle:

- idle, also with a request that the replica has not read: passed on to HAProxy (`RETURN_SOCKET`), byte by byte;
- more is read, and no more written: 503, and come again, as HAProxy says it;
- with a part of an answer written: closed, as HAProxy does it.

A replica may return a connection while it runs. The guard imports the standard library only, and asyncio when it has
something to do. `serve.http.front_protocol` calls `ConnectionGuard`, on the event loop.
"""

from __future__ import annotations

import fcntl
import mmap
import resource
import socket
import struct
import sys
import termios
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from concurrent.futures import Future, wait
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.cluster.ingress.backup_listener import MAX_HTTP, MAX_RETURNED
from shoal.cluster.ingress.guard_process import GuardProcess
from shoal.cluster.ingress.haproxy_config import build_error
from shoal.cluster.ingress.shared_listener import RETURN_SOCKET, pause_front, read_mark
from shoal.cluster.ingress.time_limits import CLIENT_SILENCE_S

if TYPE_CHECKING:
    import asyncio

HOLD, RELEASE, RETURN = b"+-<"
HEAD = struct.Struct("<BI")  # of a message: what to do, and the connection's number
MAX_MESSAGE_BYTES = 65_536
PLACE_S = 10.0  # in which one of `MAX_RETURNED` is free, or the client comes again
# Of each connection two pairs of bytes read and written: at both it is idle. The replica writes them in turns.
NUM_COUNTS = 4
STATES_BYTES = 8 * NUM_COUNTS * (MAX_HTTP + 1)
NEVER = 2**64 - 1
# Linux's tcp_info: received, not sent yet, sent, sent again.
RECEIVED = struct.Struct("=Q")
NOT_SENT = struct.Struct("=I")
SENT = struct.Struct("=QQ")
RECEIVED_AT = 128
NOT_SENT_AT = 144
SENT_AT = 200
TCP_INFO_BYTES = 216


class ConnectionGuard(GuardProcess):
    """The replica's side: starts the guard, and hands it sockets."""

    def __init__(self, folder: Path, server: str) -> None:
        """folder: of HAProxy's configuration; server: host:port of the replica's own server, as its mark has it"""
        super().__init__(__name__, STATES_BYTES, str(folder), server)
        self.states = self.states.cast("Q")
        self._free = list(range(MAX_HTTP + 1))

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def hold(self, connection: socket.socket) -> int:
        """Hold a connection; returns its number. Of more than `MAX_HTTP` one is returned at once."""
        number = self._free.pop()
        for at in range(NUM_COUNTS):
            self.states[NUM_COUNTS * number + at] = 0
        self.send(HEAD.pack(HOLD, number), connection.fileno())
        return number

    def mark_idle(self, number: int, read: int, written: int) -> None:
        """Call it before a connection becomes idle: with what will have been read of it and written by then."""
        older = NUM_COUNTS * number
        if self.states[older + 1] > self.states[older + 3]:
            older += 2
        self.states[older + 1] = NEVER  # this process may be killed in between
        self.states[older] = read
        self.states[older + 1] = written

    def release(self, number: int) -> None:
        """Let go of a connection that the replica closes."""
        self.send(HEAD.pack(RELEASE, number))
        self._free.append(number)

    def return_connection(self, number: int, read: bytes) -> None:
        """Have HAProxy answer a connection from now on. read: what the client has sent and nobody answered"""
        for at in range(0, len(read), MAX_MESSAGE_BYTES):
            self.send(HEAD.pack(RETURN, number) + read[at : at + MAX_MESSAGE_BYTES])
        self.send(HEAD.pack(RETURN, number))
        self._free.append(number)


class _Guard:
    """The guard's process."""

    def __init__(self, control: socket.socket, states: memoryview, folder: Path, server: str) -> None:
        self._control = control
        self._states = states
        self._folder = folder
        self._server = server
        self._connections: dict[int, socket.socket] = {}
        self._read: defaultdict[int, bytes] = defaultdict(bytes)
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
            elif read := message[HEAD.size :]:
                self._read[number] += read
            else:
                self._begin(self._pass_on(self._connections.pop(number), self._read.pop(number, b"")))
        with suppress(OSError):  # HAProxy is gone as well
            mark = read_mark(self._folder)
            if mark is not None and mark.server == self._server:
                pause_front(self._folder, False)
        for number, connection in self._connections.items():
            self._begin(self._end(connection, self._states[NUM_COUNTS * number :][:NUM_COUNTS].tolist()))
        wait(self._pending)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        import asyncio

        if self._loop is None:
            self._loop, self._capacity = asyncio.new_event_loop(), asyncio.Semaphore(MAX_RETURNED)
            threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._pending = [each for each in self._pending if not each.done()]
        self._pending.append(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def _end(self, connection: socket.socket, idle: list[int]) -> None:
        """End a connection of a replica that has ended. idle: its counts in `_states`"""
        read, written = count_bytes(connection)
        if [read, written] in (idle[:2], idle[2:]):
            await self._pass_on(connection, b"")
        elif written in idle[1::2]:
            async with open_streams(connection) as streams:
                await refuse(*streams)
        else:
            connection.close()

    async def _pass_on(self, connection: socket.socket, read: bytes) -> None:
        """Connect HAProxy to the client once that has sent something, and pass on what they send, until HAProxy ends
        it."""
        import asyncio

        assert self._capacity is not None
        addresses = describe_addresses(connection)
        async with open_streams(connection) as (reader, writer), AsyncExitStack() as place:
            async with asyncio.timeout(CLIENT_SILENCE_S):
                first = read or await reader.read(MAX_MESSAGE_BYTES)
            if not first:
                return
            try:
                async with asyncio.timeout(PLACE_S):
                    await place.enter_async_context(self._capacity)
                from_haproxy, to_haproxy = await asyncio.open_unix_connection(self._folder / RETURN_SOCKET)
            except OSError:  # also a TimeoutError; or HAProxy has died, and Serve starts it again
                await refuse(reader, writer)
                return
            to_haproxy.write(addresses + first)
            upwards = asyncio.ensure_future(copy(reader, to_haproxy))
            try:
                await copy(from_haproxy, writer, CLIENT_SILENCE_S)
            finally:
                upwards.cancel()
                to_haproxy.close()


@asynccontextmanager
async def open_streams(connection: socket.socket) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Streams of a client's connection, which are closed once the client has all that was written, or has gone."""
    import asyncio

    reader, writer = await asyncio.open_connection(sock=connection)
    with suppress(OSError, TimeoutError):
        try:
            yield reader, writer
        finally:
            writer.close()  # by its transport: the loop would mistake another one for a socket that was closed as such
            async with asyncio.timeout(CLIENT_SILENCE_S):
                await writer.wait_closed()
    writer.transport.abort()  # of a client that reads nothing


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Have the client come again."""
    import asyncio

    writer.write(build_error(503, closes=True))
    writer.write_eof()
    async with asyncio.timeout(CLIENT_SILENCE_S):
        while await reader.read(MAX_MESSAGE_BYTES):  # unread input would take the answer back
            pass


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, silence_s: float | None = None) -> None:
    """Copy until the end. silence_s: raise TimeoutError if the other side reads nothing for so long"""
    import asyncio

    while data := await reader.read(MAX_MESSAGE_BYTES):
        writer.write(data)
        async with asyncio.timeout(silence_s):
            await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def describe_addresses(connection: socket.socket) -> bytes:
    """The line of HAProxy's PROXY protocol, version 1."""
    theirs, ours = connection.getpeername(), connection.getsockname()
    kind = "TCP6" if connection.family == socket.AF_INET6 else "TCP4"
    hosts = " ".join(host.split("%")[0] for host in (theirs[0], ours[0]))
    return f"PROXY {kind} {hosts} {theirs[1]} {ours[1]}\r\n".encode()


def count_bytes(connection: socket.socket) -> tuple[int, int]:
    """How many bytes have been read from a connection of TCP, and written into it, by any process."""
    received = -1
    while True:  # what comes in between is counted by one of the two
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
        if received == (received := RECEIVED.unpack_from(info, RECEIVED_AT)[0]):
            break
        unread = int.from_bytes(fcntl.ioctl(connection, termios.FIONREAD, bytes(4)), sys.byteorder)
    sent, again = SENT.unpack_from(info, SENT_AT)
    return received - unread, sent - again + NOT_SENT.unpack_from(info, NOT_SENT_AT)[0]


def main(control: str, states: str, folder: str, server: str) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a returned connection takes two, and the replica's go on
    table = memoryview(mmap.mmap(int(states), STATES_BYTES)).cast("Q")
    _Guard(socket.socket(fileno=int(control)), table, Path(folder), server).run()
