"""Ends the streams of a replica that is killed as their protocol has it: by a status of gRPC, by an event that says so.

A killed process says no more. Its kernel closes its connections in the middle of an answer. HAProxy then resets the
client's stream, which gRPC reports as CANCELLED, and closes that of a text. So another process, the *guard*, holds a
duplicate of the socket of each stream that is being answered, with its last bytes. It starts with a replica's first
stream. When the replica's end of their socket closes, the guard writes these bytes to each stream in
the replica's place, unless a part had been written incompletely. A stream that begins while the guard reads nothing
has none.

An application names `guard_stream(end)` at the start of a stream, and the connection calls it, on the event loop.
Imports the standard library only, for the guard's sake.
"""

from __future__ import annotations

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

from shoal.cluster.ingress.guard_process import GuardProcess

MAX_STREAMS = 16_384  # more at once end as without a guard
LINGER_S = 2.0  # in which HAProxy reads the end; a socket that is closed with unread input would take it back
MAX_END_BYTES = 4096


class StreamGuard(GuardProcess):
    """The replica's side: starts the guard, and hands it sockets."""

    def __init__(self) -> None:
        super().__init__(__name__, MAX_STREAMS)  # of each stream 1 while a message may have been written in part
        self._free = list(range(MAX_STREAMS))
        threading.Thread(target=self.process.wait, daemon=True).start()  # it forks, and ends: not as a zombie

    def hold(self, end: bytes, transport: Any) -> GuardedStream | None:
        if not self.flush() or not self._free or len(end) > MAX_END_BYTES:
            return None
        number = self._free.pop()
        self.states[number] = 1
        self.send(number.to_bytes(4, "big") + end, transport.get_extra_info("socket").fileno())
        return GuardedStream(self, number, transport)

    def release(self, number: int) -> None:
        self.send(number.to_bytes(4, "big"))
        self._free.append(number)


_start_guard = cache(StreamGuard)  # of this process


def guard_stream(end: bytes) -> Callable[[Any], GuardedStream | None]:
    """A function that guards the answer that begins now on a transport; it returns None where that is not possible.
    The first answer starts the guard.

    end: what ends the answer: its last chunks
    """
    return partial(_hold, end)  # not a lambda: Ray Serve pickles the messages of the requests that pass through it


def _hold(end: bytes, transport: Any) -> GuardedStream | None:
    return _start_guard().hold(end, transport)


class GuardedStream:
    """A stream that the guard ends if the replica cannot. `release` it once its answer has ended."""

    __slots__ = ("_guard", "_number", "_transport")

    def __init__(self, guard: StreamGuard, number: int, transport: Any) -> None:
        self._guard = guard
        self._number = number
        self._transport = transport

    def begin_write(self) -> None:
        """Call it before each write."""
        self._guard.states[self._number] = 1

    def end_write(self) -> None:
        """Call it after each write of whole messages, but the last one."""
        if not self._transport.get_write_buffer_size():
            self._guard.states[self._number] = 0

    def release(self) -> None:
        self._guard.release(self._number)


def run_guard(control: socket.socket, states: mmap.mmap) -> None:
    """The guard's process: returns when the replica has ended, and with it the streams."""
    held: dict[int, tuple[int, bytes]] = {}
    while True:
        message, fds, *_ = socket.recv_fds(control, 4 + MAX_END_BYTES, 1)
        if not message:
            break
        number = int.from_bytes(message[:4], "big")
        if fds:
            held[number] = fds[0], message[4:]
        else:
            os.close(held.pop(number)[0])
    streams = [(socket.socket(fileno=fd), end) for number, (fd, end) in held.items() if not states[number]]
    for stream, end in streams:
        stream.settimeout(LINGER_S)
        with suppress(OSError):
            stream.sendall(end)
            stream.shutdown(socket.SHUT_WR)
    ends_s = time.monotonic() + LINGER_S
    for stream, _ in streams:
        with suppress(OSError):
            while (left_s := ends_s - time.monotonic()) > 0:
                stream.settimeout(left_s)
                if not stream.recv(65_536):
                    break


def main(control: str, states: str) -> None:
    if os.fork() == 0:  # no child of the replica's, since Ray kills those before it
        run_guard(socket.socket(fileno=int(control)), mmap.mmap(int(states), MAX_STREAMS))
