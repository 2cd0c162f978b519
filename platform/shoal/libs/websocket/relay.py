"""Connections of games to the gateways of other policies of the run, which one address reaches by their paths.

Bytes pass as they are, in the thread of the gateway. The other one judges the request; its session is as any other.

| what waits                        | capacity                | who unblocks                         | close()   |
|-----------------------------------|-------------------------|--------------------------------------|-----------|
| bytes that one side has not read  | 1 MiB, and 64 KiB more  | that side; 2 s after the other's end | drops them|
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

from shoal.libs.websocket.connection import LINGER_S

MAX_UNSENT_BYTES = 1024 * 1024  # beyond, the other side is not read
READ_BYTES = 64 * 1024
AWAY = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 45\r\nConnection: close\r\n\r\n" + (
    b"the gateway of this policy is away: try again"
)
MAX_READY = 64  # sides that have a turn in one round


class RelayedSide:
    """One of the two sockets of a relayed connection.

    context:   of TLS to another gateway, which begins when the socket is connected
    if_absent: what the other side gets when this one ends before it has sent anything
    closes_at: until when it may read what is left, once the other side has ended
    """

    peer: RelayedSide

    def __init__(
        self, sock: socket.socket, unsent: bytes = b"", context: ssl.SSLContext | None = None, if_absent: bytes = b""
    ) -> None:
        self.socket = sock
        self.descriptor = sock.fileno()
        self._context = context
        self._if_absent = if_absent
        self.unsent = bytearray(unsent)
        self.is_closed = self._awaits_read = False
        self.closes_at = math.inf
        self.awaited = 0

    def find_awaited(self) -> int:
        reads = len(self.peer.unsent) < MAX_UNSENT_BYTES
        writes = bool(self.unsent) and not self._awaits_read
        return (select.EPOLLIN if reads or self._awaits_read else 0) | (select.EPOLLOUT if writes else 0)

    def transfer(self, mask: int) -> None:
        """Send what waits, and give the other side what has come."""
        try:
            if number := self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, "the other gateway is away")
            if self._context is not None:  # it is connected
                self.socket = self._context.wrap_socket(self.socket, do_handshake_on_connect=False)
                self._context = None
            if mask & ~select.EPOLLOUT:
                self._receive()
            self.flush()  # after it, since reading may end the handshake of TLS that a flush has waited for
        except OSError:
            self.is_closed = True

    def _receive(self) -> None:
        try:
            data = self.socket.recv(READ_BYTES)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        self.is_closed = not data
        if data and not self.peer.is_closed:  # otherwise it is read for its end
            self._if_absent = b""
            self.peer.unsent += data
            self.peer.flush()

    def flush(self) -> None:
        """Raises OSError when the other end has gone."""
        try:
            self._awaits_read = False
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]
            if self.peer.is_closed:
                self.socket.shutdown(socket.SHUT_WR)
        except (BlockingIOError, ssl.SSLWantWriteError):
            return
        except ssl.SSLWantReadError:
            self._awaits_read = True

    def close(self) -> None:
        """Nothing more comes from here: the other side ends when it has read what is left."""
        self.is_closed = True
        self.socket.close()
        if not self.peer.is_closed:
            self.peer.closes_at = time.monotonic() + LINGER_S
            self.peer.unsent += self._if_absent
            self.unsent.clear()
            with suppress(OSError):  # it will be found closed, too
                self.peer.flush()


class Relays:
    """All relayed connections of one listener.

    addresses:   of the other gateways, by policy
    certificate: the file of the run's, which these have too; None: their addresses are plain
    """

    def __init__(self, certificate: str | None) -> None:
        self.addresses: Mapping[str, str] = {}
        self._certificate = certificate
        self._epoll = select.epoll()
        self._sides: dict[int, RelayedSide] = {}  # by file descriptor

    def fileno(self) -> int:
        return self._epoll.fileno()

    def open(self, sock: socket.socket, address: str, request: bytes) -> None:
        """Relay a game's connection from now on; it ends when the other gateway cannot be reached."""
        url = urlsplit(address)
        assert url.hostname is not None
        upstream = socket.socket(socket.AF_INET6 if ":" in url.hostname else socket.AF_INET)
        upstream.setblocking(False)
        upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        upstream.connect_ex((url.hostname, url.port))
        game, other = RelayedSide(sock), RelayedSide(upstream, request, self._trust(), AWAY)
        game.peer, other.peer = other, game
        for side in (game, other):
            self._sides[side.descriptor] = side
            side.awaited = side.find_awaited()
            self._epoll.register(side.descriptor, side.awaited)

    def transfer(self) -> None:
        """Pass on what has come."""
        for descriptor, mask in self._epoll.poll(0, MAX_READY):
            side = self._sides[descriptor]
            side.transfer(mask)
            if side.is_closed:
                self._end(side)
            for each in (side, side.peer):
                if not each.is_closed and each.awaited != (awaited := each.find_awaited()):
                    each.awaited = awaited
                    self._epoll.modify(each.descriptor, awaited)

    def sweep(self) -> None:
        """End those that do not, though nothing more comes to them."""
        for side in list(self._sides.values()):
            if time.monotonic() > side.closes_at:
                self._end(side)

    def close(self) -> None:
        for side in list(self._sides.values()):
            side.socket.close()
        self._epoll.close()

    def _end(self, side: RelayedSide) -> None:
        del self._sides[side.descriptor]
        side.close()

    def _trust(self) -> ssl.SSLContext | None:
        """The other gateways have the certificate of the run, and no other one is trusted."""
        if self._certificate is None:
            return None
        context = ssl.create_default_context(cafile=self._certificate)
        context.check_hostname = False  # it is of the name by which games reach them
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        return context
