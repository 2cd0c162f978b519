"""Connections between two processes of ours, of which each proves to the other that it knows a secret.

Owns the sockets. A message is any object; its arrays and tensors go as they lie in memory, and arrive as memory of the
reader's own. Messages of one end come in their order, and none is sent again: when the peer's process or its host is
gone, each call raises ConnectionLost. For calls that outlast a connection, see `rpc`.

| queue                       | capacity     | what blocks | who unblocks      | close()                    |
|-----------------------------|--------------|-------------|-------------------|----------------------------|
| of connections that are not | MAX_STRANGERS| nothing:    | proof, or its     | they end after PROOF_S     |
| proved                      |              | more end    | time              |                            |
| of those that are           | unbounded    | `accept`    | the next one      | ends what waits            |
| of messages                 | the system's | `send`      | the reader        | ends what waits, both ends |
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from secrets import token_bytes
from typing import Any, NamedTuple

import numpy as np

from shoal.channel.packing import SIZE, Packer, unpack
from shoal.errors import ConnectionLost
from shoal.network_address import watch_host

PROOF_S = 10.0  # for a connection, and for the proof of the secret
LOST_S = 4  # after which a host that acknowledges nothing is lost
MAX_STRANGERS = 64  # connections that have not proved the secret
_ACCEPT_PAUSE_S = 0.5
_JOINED_BYTES = 2**16


class ChannelAddress(NamedTuple):
    """Where a process listens, and the secret that those know who may connect."""

    host: str
    port: int
    secret: bytes


class Channel:
    """One end of a connection. One thread may send while another receives.

    pid: of the process at the other end, at the end that has accepted it
    """

    def __init__(self, opened: socket.socket, lost_s: int) -> None:
        self._socket = opened
        self._limit_s = 0.0
        weakref.finalize(self, opened.close)  # not before: another thread may be about to read from it
        self.pid = 0
        opened.settimeout(None)
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_host(opened, lost_s)

    def prove(self, secret: bytes, *challenges: Callable[[Connection, bytes], None]) -> None:
        """Prove the secret to each other. Raises ConnectionLost to an end that does not know it."""
        self._limit_silence(PROOF_S)
        try:
            with Connection(os.dup(self._socket.fileno())) as proving:
                for challenge in challenges:
                    challenge(proving, secret)
        except (AuthenticationError, EOFError, OSError) as error:
            self.close()
            raise ConnectionLost(f"it has not proved the secret: {error}") from error

    def send(self, message: object) -> None:
        """Raises ConnectionLost, and as pickle does."""
        self.send_packed(Packer().pack(message))

    def send_bytes(self, content: memoryview) -> None:
        """For `receive_bytes`: where what it is is known, as between two steps of a sum. Raises ConnectionLost."""
        self.send_packed([SIZE.pack(SIZE.size + content.nbytes), content])

    def send_packed(self, chunks: Sequence[bytes | memoryview]) -> None:
        """Send what a `Packer` has packed. Raises ConnectionLost."""
        is_small = sum(map(len, chunks)) < _JOINED_BYTES  # then each system call may cost this thread its turn
        *others, last = [b"".join(chunks)] if is_small else chunks
        try:
            for chunk in others:
                self._socket.sendall(chunk, socket.MSG_MORE)  # so that the reader is woken up once
            self._socket.sendall(last)
        except OSError as error:
            raise ConnectionLost(str(error)) from error

    def receive(self, timeout_s: float | None = None) -> Any:
        """The next message. Raises ConnectionLost, also when the peer sends nothing for so long."""
        return unpack(self._receive(timeout_s))

    def receive_bytes(self, timeout_s: float | None = None) -> memoryview:
        """The same of bytes."""
        return self._receive(timeout_s)[SIZE.size :]

    def _receive(self, timeout_s: float | None) -> memoryview:
        self._limit_silence(timeout_s or 0.0)
        head = memoryview(bytearray(SIZE.size))
        self._read_into(head)
        (size,) = SIZE.unpack(head)
        memory = np.empty(size, np.uint8).data
        memory[: SIZE.size] = head
        self._read_into(memory[SIZE.size :])
        return memory

    def close(self) -> None:
        """End what waits here, in any thread, and at the other end. Idempotent."""
        with suppress(OSError):  # the peer is gone
            self._socket.shutdown(socket.SHUT_RDWR)

    def _read_into(self, memory: memoryview) -> None:
        while memory:
            try:
                received = self._socket.recv_into(memory, flags=socket.MSG_WAITALL)
            except OSError as error:
                raise ConnectionLost(str(error)) from error
            if not received:
                raise ConnectionLost("its connection has ended")
            memory = memory[received:]

    def _limit_silence(self, timeout_s: float) -> None:
        """Make reading raise when nothing comes for so long; 0: never."""
        if timeout_s == self._limit_s:
            return
        self._limit_s = timeout_s
        seconds = int(timeout_s)
        limit = struct.pack("ll", seconds, int(1e6 * (timeout_s - seconds)))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)


class ChannelListener:
    """Accepts connections from processes that know the secret of its address.

    lost_s: as of `connect`
    """

    def __init__(self, host: str, lost_s: int = LOST_S) -> None:
        self._server = socket.create_server((host, 0))
        self.address = ChannelAddress(host, self._server.getsockname()[1], token_bytes())
        self._lost_s = lost_s
        self._is_closed = False
        self._strangers = threading.Semaphore(MAX_STRANGERS)
        self._proved: queue.SimpleQueue[Channel | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="channels", daemon=True).start()

    def accept(self, timeout_s: float | None = None) -> Channel | None:
        """The next connection; None when none comes in time, or the listener is closed."""
        try:
            return self._proved.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def close(self) -> None:
        """What is connected stays so. Idempotent."""
        self._is_closed = True
        with suppress(OSError):  # closed before
            self._server.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._server.close()
        self._proved.put(None)

    def _run(self) -> None:
        while True:
            try:
                opened, _ = self._server.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(_ACCEPT_PAUSE_S)  # out of files, for instance
                continue
            if self._strangers.acquire(blocking=False):
                threading.Thread(target=self._admit, args=(opened,), daemon=True).start()
            else:
                opened.close()

    def _admit(self, opened: socket.socket) -> None:
        try:
            with suppress(OSError):  # no process of ours
                channel = Channel(opened, self._lost_s)
                channel.prove(self.address.secret, deliver_challenge, answer_challenge)
                channel.pid = channel.receive(PROOF_S)
                self._proved.put(channel)
        finally:
            self._strangers.release()


def connect(address: ChannelAddress, lost_s: int = LOST_S) -> Channel:
    """Raises ConnectionLost when no process that knows the secret listens there.

    lost_s: after which a host that acknowledges nothing is lost, also where its process reads nothing of what is sent
    """
    try:
        channel = Channel(socket.create_connection(address[:2], PROOF_S), lost_s)
    except OSError as error:
        raise ConnectionLost(f"nothing listens at {address.host}:{address.port}: {error}") from error
    channel.prove(address.secret, answer_challenge, deliver_challenge)
    channel.send(os.getpid())
    return channel
