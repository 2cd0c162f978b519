"""gRPC calls without streams in HTTP/1.1: HAProxy speaks HTTP/2 to the clients, and hands them on like this.

gRPC is one message each way, each after five bytes, and a status behind the answer; HTTP/1.1 has a place for that too,
behind the last chunk. Python's gRPC server takes 0.3 ms of a processor for a call, most of it in threads and a loop of
its own; as a request of the replica's HTTP server a call costs what one of JSON does, and less to decode (docs/log.md).
HAProxy (`cluster.haproxy`) chooses this way for inference. Streams go to the gRPC server.

`GrpcOverHttp1` is an ASGI application around that of REST. It writes the chunks of its answers itself, so it needs a
server that does not (`direct_http`). Bodies, deadlines and clients that go away are watched as those of REST are.
"""

from __future__ import annotations

import re
import time
import urllib.parse
from collections.abc import Iterable
from typing import Any, NamedTuple

import grpc
from google.protobuf.message import DecodeError, Message

from shoal.errors import InferenceError
from shoal.serve.call import Disconnected
from shoal.serve.protocol.compression import decompressed
from shoal.serve.protocol.grpc_server import FOREVER_S, METHODS, OPEN, SERVICE, Method, answer, refuse
from shoal.serve.protocol.grpc_service import InferenceServicer, Invocation
from shoal.serve.protocol.http_messages import Receive, Scope, Send
from shoal.serve.protocol.in_progress import Progress, RequestsInProgress
from shoal.serve.protocol.limits import Limits

PREFIX = f"/{SERVICE}/"
TYPE = (b"content-type", b"application/grpc")
CHUNKED = [TYPE, (b"transfer-encoding", b"chunked"), (b"trailer", b"grpc-status")]
HEAD_BYTES = 5  # of a message: whether it is compressed, and its length
UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
_PRINTABLE = "".join(map(chr, range(0x20, 0x7F))).replace("%", "")  # what a message may hold as it is


class Call:
    """One call: what `grpc_server.Context` asks for, kept until the answer is written."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.metadata = {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}
        self._code, self._details = grpc.StatusCode.OK, ""
        self._trailing: list[tuple[str, str]] = []

    def invocation_metadata(self) -> Iterable[tuple[str, str | bytes]]:
        return self.metadata.items()

    def set_code(self, code: grpc.StatusCode) -> None:
        self._code = code

    def set_details(self, details: str) -> None:
        self._details = details

    def set_trailing_metadata(self, metadata: Iterable[tuple[str, str]]) -> None:
        self._trailing = list(metadata)

    @property
    def is_refused(self) -> bool:
        return self._code is not grpc.StatusCode.OK

    def trailers(self) -> list[tuple[bytes, bytes]]:
        """The status, and what goes with it."""
        number: int = self._code.value[0]
        found = [(b"grpc-status", b"%d" % number)]
        if self._details:
            found.append((b"grpc-message", urllib.parse.quote(self._details, safe=_PRINTABLE).encode()))
        return found + [(name.encode("latin-1"), value.encode("latin-1")) for name, value in self._trailing]


class _Asked(NamedTuple):
    method: Method
    call: Call


class GrpcOverHttp1:
    """Answers the paths of the service; all others are `other`'s."""

    def __init__(self, servicer: InferenceServicer, other: Any, limits: Limits) -> None:
        self._servicer, self._other, self._limits = servicer, other, limits
        self._in_progress = RequestsInProgress(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PREFIX):
            await self._other(scope, receive, send)
            return
        call = Call(scope["headers"])
        name = scope["path"][len(PREFIX) :]
        response: Message | None = None
        try:
            method = METHODS.get(name)
            if method is None or method.streams or scope["method"] != "POST":
                raise InferenceError(501, f"{name[:200]} is not served here")
            self._limits.check_head(scope["path"], scope["headers"])
            if name not in OPEN:
                self._servicer.require_known(Invocation(call.metadata))
            response = await self._in_progress.run(receive, self._answered, _Asked(method, call))
        except InferenceError as error:
            refuse(call, error)
        except Disconnected:
            return
        if response is None or call.is_refused:
            headers = [TYPE, (b"content-length", b"0"), *call.trailers()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return
        await send({"type": "http.response.start", "status": 200, "headers": CHUNKED})
        await send({"type": "http.response.body", "body": _chunks(response.SerializeToString(), call.trailers())})

    async def _answered(self, progress: Progress, asked: _Asked) -> Message:
        method, call = asked
        left_s = _timeout_s(call.metadata.get("grpc-timeout"))
        deadline_s = None if left_s is None else time.monotonic() + left_s
        if deadline_s is not None:
            progress.until(deadline_s)
        message = await self._message(await progress.body(None), call.metadata.get("grpc-encoding", "identity"))
        try:
            request = method.request.FromString(message)
        except DecodeError as error:
            raise InferenceError(400, f"not a message of {method.name}: {error}") from None
        left_s = None if deadline_s is None else deadline_s - time.monotonic()
        return await answer(self._servicer, method, request, call, left_s)

    async def _message(self, body: bytes, encoding: str) -> bytes:
        """The one message of a body. Raises InferenceError (400, 413, 415)."""
        if len(body) < HEAD_BYTES or len(body) - HEAD_BYTES != int.from_bytes(body[1:HEAD_BYTES], "big"):
            raise InferenceError(400, f"not one message of gRPC: a body of {len(body)} bytes")
        message = body[HEAD_BYTES:]
        return message if body[0] == 0 else await decompressed(message, encoding.encode("latin-1"), self._limits)


def _chunks(message: bytes, trailers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The answer's only message in one chunk, and the status behind it."""
    size_bytes = len(message)
    parts = [b"%x\r\n\0%b" % (HEAD_BYTES + size_bytes, size_bytes.to_bytes(4, "big")), message, b"\r\n0\r\n"]
    parts += [b"%b: %b\r\n" % trailer for trailer in trailers]
    return b"".join((*parts, b"\r\n"))


def _timeout_s(text: str | None) -> float | None:
    """The value of `grpc-timeout`; None for none, or one that means none. Raises InferenceError (400)."""
    if text is None:
        return None
    found = _TIMEOUT.fullmatch(text)
    if found is None:
        raise InferenceError(400, f"grpc-timeout = {text[:40]!r}: expected digits and one of H M S m u n")
    left_s = int(found[1]) * UNITS_S[found[2]]
    return None if left_s > FOREVER_S else left_s
