"""How requests and answers of gRPC look on one connection, one at a time: by call and by stream.

Called by `driver` with the bytes that came; gives it whole answers. Owns no socket and no clock, reads no more of an
answer than is needed to know that it is whole and what it is: the driver must not be what limits a measurement.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from shoal.libs.bench.sender import OK

STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"


class Answer(NamedTuple):
    """A whole answer: what it is (`ok` or `refused CODE`), and its body when it is short."""

    kind: str
    version: int
    body: bytes
    closing: bool = False  # the server closes the connection after it


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
OF_STREAM = (DATA, HEADERS, RST_STREAM)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME_HEAD = struct.Struct(">BHBBI")  # length, kind, flags, stream
WIDEST = 2**31 - 1
SMALLEST_WINDOW = 65_535


class Grpc:
    """Unary calls of one method. `payload` is the serialised message, of at most one frame (16 kB)."""

    def __init__(self, authority: str, path: str) -> None:
        headers = {
            ":method": "POST", ":scheme": "http", ":path": path, ":authority": authority,
            "content-type": "application/grpc", "te": "trailers",
        }  # fmt: skip
        # Literals without indexing: the block means the same on every stream.
        self._headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in headers.items())
        self._stream = -1
        self._buffer = b""
        self._answered = False  # a message came, which only a call that succeeds has
        self._body = b""
        self._window = SMALLEST_WINDOW

    def opening(self) -> bytes:
        settings = b"\0\x02" + (0).to_bytes(4, "big") + b"\0\x04" + WIDEST.to_bytes(4, "big")
        widen = (WIDEST - SMALLEST_WINDOW).to_bytes(4, "big")
        preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        return preface + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, widen)

    def request(self, payload: bytes) -> bytes:
        self._stream += 2
        self._answered = False
        message = b"\0" + len(payload).to_bytes(4, "big") + payload
        self._window -= len(message)
        assert self._window > 0, "the server widens the connection's window too late for calls one at a time"
        data = _frame(DATA, END_STREAM, self._stream, message)
        return _frame(HEADERS, END_HEADERS, self._stream, self._headers) + data

    def feed(self, data: bytes) -> tuple[Answer | None, bytes]:
        whole = self._buffer + data if self._buffer else data
        answer, reply, begin, size = None, b"", 0, len(whole)
        while size - begin >= FRAME_HEAD.size:
            high, low, kind, flags, stream = FRAME_HEAD.unpack_from(whole, begin)
            end = begin + FRAME_HEAD.size + (high << 16 | low)
            if end > size:
                break
            content, begin = whole[begin + FRAME_HEAD.size : end], end
            if kind == WINDOW_UPDATE:
                self._widened(int.from_bytes(content, "big"), stream)
            elif kind in OF_STREAM:
                answer = self._of_stream(kind, flags, content) or answer
            elif kind == SETTINGS and not flags & ACK:
                reply += _frame(SETTINGS, ACK, 0, b"")
            elif kind == PING and not flags & ACK:
                reply += _frame(PING, ACK, 0, content)
        self._buffer = whole[begin:]
        return answer, reply

    def _widened(self, num_bytes: int, stream: int) -> None:
        if not stream:  # a call is shorter than the window of its stream
            self._window += num_bytes

    def _of_stream(self, kind: int, flags: int, content: bytes) -> Answer | None:
        if kind == DATA and content:
            self._answered = True
            self._body = content
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            good = self._answered and kind != RST_STREAM
            return Answer(OK if good else "refused grpc", 0, self._body)
        return None


class GrpcStream(Grpc):
    """One stream of a connection's only call of ModelStreamInfer: a message is answered by a message."""

    ANSWERED = 0x12  # how a ModelStreamInferResponse begins that has an answer, and no error

    def __init__(self, authority: str, path: str) -> None:
        super().__init__(authority, path)
        self._stream, self._stream_window = 1, SMALLEST_WINDOW

    def opening(self) -> bytes:
        return super().opening() + _frame(HEADERS, END_HEADERS, self._stream, self._headers)

    def request(self, payload: bytes) -> bytes:
        message = b"\0" + len(payload).to_bytes(4, "big") + payload
        self._window -= len(message)
        self._stream_window -= len(message)
        assert min(self._window, self._stream_window) > 0, "the server widens its windows too late for one at a time"
        return _frame(DATA, 0, self._stream, message)

    def _widened(self, num_bytes: int, stream: int) -> None:
        if stream:
            self._stream_window += num_bytes
        else:
            self._window += num_bytes

    def _of_stream(self, kind: int, flags: int, content: bytes) -> Answer | None:
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self._body = b""
            return Answer("refused grpc", 0, content, closing=True)
        if kind != DATA:
            return None
        self._body += content
        if len(self._body) < 6 or len(self._body) < 5 + int.from_bytes(self._body[1:5], "big"):
            return None
        message, self._body = self._body[5:], b""
        return Answer(OK if message[0] == self.ANSWERED else "refused grpc", 0, message)


def _frame(kind: int, flags: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + content


def _text(word: str) -> bytes:
    assert len(word) < 127
    return bytes([len(word)]) + word.encode()
