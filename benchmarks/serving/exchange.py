"""How requests and answers look on one connection, one at a time: HTTP/1.1 with keep-alive, gRPC by call and by stream.

Called by `driver` with the bytes that came; gives it whole answers. Owns no socket and no clock, reads no more of an
answer than is needed to know that it is whole and what it is: the driver must not be what limits a measurement.
"""

from __future__ import annotations

import struct
from typing import NamedTuple, Protocol

OK = "ok"
STREAM_PATH = "/inference.GRPCInferenceService/ModelStreamInfer"
LAST_CHUNK = b"\r\n0\r\n\r\n"  # of a short answer without a length; no body here ends like this
SHORT_BYTES = 1 << 16  # longer answers are counted, not kept


class Answer(NamedTuple):
    """A whole answer: what it is (`ok` or `refused CODE`), and its body when it is short."""

    kind: str
    version: int
    body: bytes
    closing: bool = False  # the server closes the connection after it


class Exchange(Protocol):
    """One side of a connection. `begun` says whether part of an answer has come.

    fewest_bytes: that are worth being woken for; what is shorter, a refusal that is a frame alone, is found later
    """

    begun: bool
    fewest_bytes: int

    def opening(self) -> bytes:
        """What a fresh connection sends first."""
        ...

    def request(self, payload: bytes) -> bytes:
        """The bytes of the next request."""
        ...

    def feed(self, data: bytes) -> tuple[Answer | None, bytes]:
        """What came is an answer, or not yet one; and what must be sent back at once."""
        ...


class Http1:
    """`payload` is the whole request, head and body."""

    fewest_bytes = 1

    def __init__(self) -> None:
        self.begun = False
        self._received = b""  # head, and the body of a short answer
        self._missing = 0  # bytes still to come of a long one
        self._answer: Answer | None = None

    def opening(self) -> bytes:
        return b""

    def request(self, payload: bytes) -> bytes:
        return payload

    def feed(self, data: bytes) -> tuple[Answer | None, bytes]:
        if self._missing > 0:
            self._missing -= len(data)
            return (self._finish() if self._missing <= 0 else None), b""
        self.begun = True
        self._received = whole = self._received + data if self._received else data
        end = whole.find(b"\r\n\r\n")
        if end < 0:
            return None, b""
        head = whole[:end].lower()
        length = _after(head, b"\ncontent-length: ")
        missing = int(length) - (len(whole) - end - 4) if length else int(not whole.endswith(LAST_CHUNK))
        if missing > 0 and len(whole) + missing < SHORT_BYTES:
            return None, b""
        status = head[9:12].decode()
        version = _after(head, b"\nshoal-model-version: ")
        kind = OK if status == "200" else f"refused {status}"
        self._answer = Answer(kind, int(version or 0), whole[end + 4 :], b"\nconnection: close" in head)
        self._missing = missing
        return (self._finish() if missing <= 0 else None), b""

    def _finish(self) -> Answer | None:
        self.begun, self._received = False, b""
        return self._answer


def _after(head: bytes, mark: bytes) -> bytes:
    _, _, rest = head.partition(mark)
    return rest.partition(b"\r")[0]


DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
OF_STREAM = (DATA, HEADERS, RST_STREAM)
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME_HEAD = struct.Struct(">BHBBI")  # length, kind, flags, stream
WIDEST = 2**31 - 1
SMALLEST_WINDOW = 65_535


class Grpc:
    """Unary calls of one method. `payload` is the serialised message, of at most one frame (16 kB)."""

    fewest_bytes = 2 * (FRAME_HEAD.size + 4) + 1  # more than two frames that widen a window

    def __init__(self, authority: str, path: str) -> None:
        self.begun = False
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
            self.begun = self._answered = True
            self._body = content
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.begun = False
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
