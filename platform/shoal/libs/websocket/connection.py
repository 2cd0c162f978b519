"""One WebSocket connection: the socket and, of the library `websockets`, the protocol without its input and output."""

from __future__ import annotations

import logging
import select
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus

from websockets.exceptions import InvalidMessage
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol

from shoal.libs.websocket.framing import Dialect

READ_BYTES = 64 * 1024  # at once; more than a record of TLS, of which nothing may stay in the socket
PARSE_BYTES, PARSE_BYTES_BEFORE = 1024, 256  # at once, since small frames take long: in a session, and before
MAX_FRAMES_BEFORE = 16  # without a session
MAX_TURN_FRAMES = MAX_FRAMES_BEFORE + 2  # of one connection before the others have their turn
MAX_IDLE_ANSWERS = 64  # of a session in a heartbeat: what is answered with an error, a pong or a welcome is no play
MAX_REQUEST_BYTES = 32 * 1024  # of HTTP, with the cookies that a browser has for this host
TLS_HELLO = b"\x16"  # with which a client begins TLS
MAX_HELLO_BYTES = 32 * 1024  # of a message without a session
MAX_UNSENT_BYTES = 16 * 1024 * 1024  # of a client that does not read: beyond, it gets no further message
MAX_UNSENT_PARTS = 4096  # likewise, of answers to its pings
LINGER_S = 2.0  # for the client to read why the connection ends
_WAITING = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_LOGGER = logging.getLogger("shoal.websocket")
_LOGGER.setLevel(logging.CRITICAL)  # what clients send wrong is answered, and counted by the gateway

Judge = Callable[[Request], tuple[HTTPStatus, str] | str | None]


class GameConnection:
    """A non-blocking socket, from its first byte to its end.

    route:     the gateway's name of it
    judge:     says why a handshake is rejected, or the address of another gateway that it is for, or None
    relayed:   that address, and the request
    awaited:   the events of the socket that the listener waits for
    received_at:  when its newest frame came
    alone_at:  since when it has had no session; None while it has one
    closes_at: of one that ends: until when the client may read why
    poller:    that the listener waits with
    """

    def __init__(self, sock: socket.socket, route: bytes, judge: Judge, poller: select.epoll) -> None:
        self.socket = sock
        self.route = route
        self._judge = judge
        self.poller = poller
        self.dialect = Dialect.TEXT
        self.received_at = self.pinged_at = time.monotonic()
        self.alone_at: float | None = self.received_at
        self.closes_at: float | None = None
        self.relayed: tuple[str, bytes] | None = None
        self.is_closed = False
        self.awaited = select.EPOLLIN
        self._num_frames = self._request_bytes = 0  # without a session
        self._num_idle = 0  # answers in this heartbeat
        self._unread = memoryview(b"")  # has arrived, and is not parsed
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self._message = bytearray()  # that comes in several frames
        self._is_text = self._awaits_write = self._is_shut = False

    @cached_property
    def _protocol(self) -> ServerProtocol:
        """From the first byte on: of thousands of connections that say nothing, its parts would hold up the games while
        Python's collector looks at them all."""
        return ServerProtocol(max_size=MAX_HELLO_BYTES, logger=_LOGGER)

    @property
    def is_ending(self) -> bool:
        """Whether no further message comes."""
        return self.is_closed or self.closes_at is not None

    def find_awaited(self) -> int:
        """The events that it needs now: it waits until the client reads, if it has something to send."""
        writes = select.EPOLLOUT if self._unsent or self._awaits_write else 0
        return writes | (0 if self.is_slowed and not self.is_ending else select.EPOLLIN)

    @property
    def is_slowed(self) -> bool:
        """Whether it has used its idle answers of this heartbeat: it is not read until the next one."""
        return self._num_idle > MAX_IDLE_ANSWERS

    def count_idle(self) -> None:
        """Count an answer that plays nothing."""
        self._num_idle += 1

    def renew(self) -> None:
        """A heartbeat has begun."""
        self._num_idle = 0

    @property
    def has_unread(self) -> bool:
        """Whether it is to be read again though its socket may have nothing."""
        return bool(self._unread) and not (self.is_closed or self.is_slowed)

    def begin_session(self, max_message_bytes: int) -> None:
        """Admit larger messages, and many."""
        self.alone_at, self._protocol.max_message_size = None, max_message_bytes

    def reset_session(self) -> None:
        """It is as it was before: it may say hello again."""
        self.alone_at = time.monotonic()
        self._num_frames = 0
        self._protocol.max_message_size = MAX_HELLO_BYTES
        self._num_idle = 0

    def has_waited(self, now: float, timeout_s: float) -> bool:
        """Whether it has had no session for so long."""
        return self.alone_at is not None and now > self.alone_at + timeout_s

    def is_over(self, now: float) -> bool:
        """Whether its client has had the time to read why it ends."""
        return self.closes_at is not None and now > self.closes_at

    def receive(self) -> Iterator[tuple[bool, bytes]]:
        """The messages of one turn: (whether it is text, its bytes)."""
        if not self._unread:
            try:
                self._awaits_write = False
                data = self.socket.recv(READ_BYTES)
            except _WAITING as error:
                self._awaits_write = isinstance(error, ssl.SSLWantWriteError)
                return
            except OSError as error:
                if getattr(error, "reason", "") == "HTTP_REQUEST":
                    self._answer_plainly("this address is wss, not ws: connect with TLS")
                data = b""
            if not data:
                self.is_closed = True
                return
            self._unread = memoryview(data)
            if self._request_bytes == 0 and data[:1] == TLS_HELLO:
                self._refuse(HTTPStatus.BAD_REQUEST, "this address is ws, not wss: connect without TLS")
        num_left = MAX_TURN_FRAMES
        while self._unread and num_left > 0 and not (self.is_ending or self.is_slowed) and self.relayed is None:
            size = PARSE_BYTES if self.alone_at is None else PARSE_BYTES_BEFORE
            chunk, self._unread = self._unread[:size], self._unread[size:]
            if self._protocol.state is State.CONNECTING:
                self._request_bytes += len(chunk)
                if self._request_bytes > MAX_REQUEST_BYTES:
                    problem = f"a request of more than {MAX_REQUEST_BYTES} bytes"
                    self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, problem)
                    break
            self._protocol.receive_data(bytes(chunk))
            for event in self._protocol.events_received():
                num_left -= 1
                yield from self._take(event)
            if isinstance(unread := self._protocol.handshake_exc, InvalidMessage):
                self._refuse(HTTPStatus.BAD_REQUEST, f"no request of WebSocket: {unread.__cause__}")
            elif self._protocol.close_expected():
                self._end_reading()
        if self.closes_at is not None:
            self._unread = memoryview(b"")
        self.flush()

    def _refuse(self, status: HTTPStatus, problem: str) -> None:
        """Answer a request that the protocol cannot read."""
        answer = self._protocol.reject(status, problem).serialize()
        self._unsent.append(memoryview(answer))
        self._unsent_bytes += len(answer)
        self._end_reading()

    def _answer_plainly(self, problem: str) -> None:
        """Answer a client that has begun no TLS. What is not read would take the answer from it."""
        answer = self._protocol.reject(HTTPStatus.BAD_REQUEST, problem).serialize()
        with suppress(OSError):
            socket.socket.recv(self.socket, READ_BYTES)
            socket.socket.send(self.socket, answer)

    def _take(self, event: object) -> Iterator[tuple[bool, bytes]]:
        self.received_at = time.monotonic()
        if isinstance(event, Request):
            verdict = self._judge(event)
            if isinstance(verdict, str):
                self.relayed = verdict, event.serialize()
                return
            answer = self._protocol.accept(event) if verdict is None else self._protocol.reject(*verdict)
            self._protocol.send_response(answer)
            return
        assert isinstance(event, Frame)
        if self.alone_at is not None:
            self._num_frames += 1
            if self._num_frames > MAX_FRAMES_BEFORE:
                return self.end(CloseCode.POLICY_VIOLATION, f"{MAX_FRAMES_BEFORE} frames without a session")
        if event.opcode is Opcode.PING:
            self.count_idle()
        if event.opcode in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
            if event.opcode is not Opcode.CONT:
                self._is_text = event.opcode is Opcode.TEXT
            if event.fin and not self._message:
                yield self._is_text, bytes(event.data)
                return
            self._message += event.data
            if event.fin:
                message, self._message = bytes(self._message), bytearray()
                yield self._is_text, message

    def send(self, message: bytes, is_text: bool) -> str:
        """Send a message; returns why it was not, or ""."""
        if self.is_ending:
            return "unreachable"
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            self.is_closed = True
            return "does not read"
        if is_text:
            self._protocol.send_text(message)
        else:
            self._protocol.send_binary(message)
        self.flush()
        return ""

    def ping(self) -> None:
        """Let the client's library answer, if it does so by itself."""
        self.pinged_at = time.monotonic()
        if self._protocol.state is State.OPEN:
            self._protocol.send_ping(b"")
            self.flush()

    def end(self, code: int, reason: str) -> None:
        """Say goodbye with a code of WebSocket. The socket stays open for LINGER_S: closed now, with bytes that are
        not read, it would take from the client what it has not read."""
        if self.closes_at is None and self._protocol.state is State.CONNECTING:
            self.is_closed = True  # its client waits for no code
        elif self.closes_at is None:
            self._protocol.fail(code, reason)
            self._end_reading()
            self.flush()

    def _end_reading(self) -> None:
        self.closes_at = time.monotonic() + LINGER_S
        if self._protocol.close_rcvd is not None:  # it has ended the connection, and knows
            self.closes_at = 0.0

    def flush(self) -> None:
        """Send what the socket takes now."""
        for data in self._protocol.data_to_send():
            if data:  # otherwise the end of the stream
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
            if self.closes_at is not None and not self._is_shut:
                self._is_shut = True
                self.is_closed = self.closes_at == 0.0
                self.socket.shutdown(socket.SHUT_WR)
        except _WAITING:
            self.is_closed = self.is_closed or len(self._unsent) > MAX_UNSENT_PARTS
        except OSError:
            self.is_closed = True
