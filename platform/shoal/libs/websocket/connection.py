"""One WebSocket connection: the socket and, of the library `websockets`, the protocol without its input and output."""

from __future__ import annotations

import logging
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from http import HTTPStatus

from websockets.frames import Frame, Opcode
from websockets.http11 import Request, Response
from websockets.server import ServerProtocol

from shoal.libs.websocket.framing import Dialect

READ_BYTES = 256 * 1024
MAX_UNSENT_BYTES = 16 * 1024 * 1024  # of a client that does not read: beyond, it gets no further message
MAX_HELLO_BYTES = 64 * 1024  # of a message before the session
_WAITING = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_LOGGER = logging.getLogger("shoal.websocket")
_LOGGER.setLevel(logging.CRITICAL)  # what clients send wrong is answered, and counted by the gateway


class Connection:
    """A non-blocking socket, from its first byte to its end.

    route:  the gateway's name of it
    accept: says why a handshake is refused, or ""
    """

    def __init__(self, sock: socket.socket, route: bytes, accept: Callable[[Request], str]) -> None:
        self.socket, self.route, self._accept = sock, route, accept
        self.dialect = Dialect.TEXT
        self.opened_at = time.monotonic()
        self.is_closed = False
        self._protocol = ServerProtocol(max_size=MAX_HELLO_BYTES, logger=_LOGGER)
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._parts: list[bytes] = []  # of a message in several frames
        self._is_text = True

    def raise_limit(self, max_message_bytes: int) -> None:
        """Admit larger messages: the session has begun."""
        self._protocol.max_message_size = max_message_bytes

    @property
    def is_sending(self) -> bool:
        """Whether it waits until the client reads."""
        return bool(self._unsent)

    def receive(self) -> Iterator[tuple[bool, bytes]]:
        """The messages that have arrived: (whether it is text, its bytes). `is_closed` is True after the last."""
        is_pending = True
        while is_pending and not self.is_closed:
            try:
                data = self.socket.recv(READ_BYTES)
            except _WAITING:
                return
            except OSError:
                data = b""
            is_pending = isinstance(self.socket, ssl.SSLSocket) and self.socket.pending() > 0
            if data:
                self._protocol.receive_data(data)
            else:
                self._protocol.receive_eof()
            yield from self._take_events()
            if not data or self._protocol.close_expected():
                self.is_closed = True
        self.flush()

    def _take_events(self) -> Iterator[tuple[bool, bytes]]:
        for event in self._protocol.events_received():
            if isinstance(event, Request):
                self._protocol.send_response(self._answer(event))
            elif isinstance(event, Frame) and event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                if event.opcode is not Opcode.CONT:
                    self._is_text = event.opcode is Opcode.TEXT
                self._parts.append(bytes(event.data))
                if event.fin:
                    message, self._parts = b"".join(self._parts), []
                    yield self._is_text, message

    def _answer(self, request: Request) -> Response:
        if problem := self._accept(request):
            return self._protocol.reject(HTTPStatus.FORBIDDEN, problem + "\n")
        return self._protocol.accept(request)

    def send(self, message: bytes, is_text: bool) -> str:
        """Send a message; returns why it was not, or ""."""
        if self.is_closed or self._protocol.close_expected():
            return "unreachable"
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            return "does not read"
        if is_text:
            self._protocol.send_text(message)
        else:
            self._protocol.send_binary(message)
        self.flush()
        return ""

    def end(self, code: int, reason: str) -> None:
        """Say goodbye with a code of WebSocket."""
        self._protocol.fail(code, reason)
        self.flush()
        self.is_closed = True

    def flush(self) -> None:
        """Send what the socket takes now."""
        for data in self._protocol.data_to_send():
            if data:  # otherwise the end of the stream: the socket is closed after that
                self._unsent.append(memoryview(data))
                self._unsent_bytes += len(data)
        try:
            while self._unsent:
                sent = self.socket.send(self._unsent[0])
                self._unsent_bytes -= sent
                if sent == len(self._unsent[0]):
                    self._unsent.popleft()
                else:
                    self._unsent[0] = self._unsent[0][sent:]
        except _WAITING:
            return
        except OSError:
            self.is_closed = True
