"""Ends the gRPC streams of a replica that is killed with a status that clients repeat: UNAVAILABLE.

A killed process says no more. Its kernel closes its connections in the middle of an answer, and HAProxy then resets the
client's stream, which gRPC reports as CANCELLED. So another process, the *guard*, holds a duplicate of the socket of
each stream that is being answered. It starts with a replica's first stream and runs this file. When the replica's end
of their socket closes, the guard writes the status to each stream in the replica's place, unless a message had been
written in part.

`app` names `guard_stream` at the start of a stream, and the connection calls it, on the event loop. Imports the
standard library only, for the guard's sake.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from contextlib import suppress
from functools import cache
from typing import Any

MAX_STREAMS = 16_384  # more at once end as without a guard
LINGER_S = 2.0  # in which HAProxy reads the end; a socket that is closed with unread input would take it back
END = b"0\r\ngrpc-status: 14\r\ngrpc-message: the replica has died: begin another stream\r\n\r\n"


class StreamGuard:
    """The replica's side: starts the guard, and hands it sockets."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        states = os.memfd_create("streams")
        os.truncate(states, MAX_STREAMS)
        self.states = mmap.mmap(states, MAX_STREAMS)  # of each stream 1 while a message may have been written in part
        self._free = list(range(MAX_STREAMS))
        command = [sys.executable, "-I", "-S", __file__, str(theirs.fileno()), str(states)]
        fds = (theirs.fileno(), states)
        self._process = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, start_new_session=True)
        theirs.close()
        os.close(states)

    def hold(self, transport: Any) -> GuardedStream | None:
        if not self._free:
            return None
        number = self._free.pop()
        self.states[number] = 1
        with suppress(OSError):
            socket.send_fds(self._control, [number.to_bytes(4, "big")], [transport.get_extra_info("socket").fileno()])
        return GuardedStream(self, number, transport)

    def release(self, number: int) -> None:
        with suppress(OSError):  # the guard was killed
            self._control.send(number.to_bytes(4, "big"))
        self._free.append(number)


@cache
def _start_guard() -> StreamGuard:
    """The guard of this process."""
    return StreamGuard()


def guard_stream(transport: Any) -> GuardedStream | None:
    """Guard the answer that begins now; None where it cannot be guarded. The first one starts the guard."""
    return _start_guard().hold(transport)


class GuardedStream:
    """A stream that the guard ends if the replica cannot. `release` it once its answer has ended."""

    __slots__ = ("_guard", "_number", "_transport")

    def __init__(self, guard: StreamGuard, number: int, transport: Any) -> None:
        self._guard, self._number, self._transport = guard, number, transport

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
    held: dict[int, int] = {}
    while True:
        message, fds, *_ = socket.recv_fds(control, 4, 1)
        if not message:
            break
        number = int.from_bytes(message, "big")
        if fds:
            held[number] = fds[0]
        else:
            os.close(held.pop(number))
    streams = [socket.socket(fileno=fd) for number, fd in held.items() if not states[number]]
    for stream in streams:
        stream.settimeout(LINGER_S)
        with suppress(OSError):
            stream.sendall(END)
            stream.shutdown(socket.SHUT_WR)
    ends_s = time.monotonic() + LINGER_S
    for stream in streams:
        with suppress(OSError):
            while (left_s := ends_s - time.monotonic()) > 0:
                stream.settimeout(left_s)
                if not stream.recv(65_536):
                    break


if __name__ == "__main__":
    run_guard(socket.socket(fileno=int(sys.argv[1])), mmap.mmap(int(sys.argv[2]), MAX_STREAMS))
