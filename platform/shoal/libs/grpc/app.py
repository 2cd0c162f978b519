"""gRPC calls in HTTP/1.1: HAProxy speaks HTTP/2 to the clients and forwards their calls in this form.

A gRPC call is messages each way, each after a prefix of five bytes, and a final status, which HTTP/1.1 carries after
the last chunk. Python's gRPC server takes 0.3 ms of CPU time for a call, most of it in its own threads and loop. As a
request of the replica's HTTP server a call costs as much as one in JSON, and less to decode (decision 009). HAProxy
(`cluster.ingress.haproxy_config`) forwards all calls of the service in this form.

`GrpcApp` is an ASGI application beside the REST application. It writes the chunks of its answers itself, so it needs a
server that does not (`serve.http.fast_path`). Bodies, deadlines and disconnects are handled as for REST, the messages
of a stream by `StreamLifecycle`. `guard_stream` ends a stream if this process is killed.

The time between two messages of a stream is unlimited. Within one, the pace of a body applies, and its length is
checked before the rest is read. A client that takes no answers stops its stream and after a time counts as
disconnected. HAProxy 2.8 does not read a client's window updates while it has more of its requests than it can pass on,
so a stream that stops reading may stop for good.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import NamedTuple

from shoal.errors import InferenceError
from shoal.extend.serve import (
    CLOSING_MESSAGE,
    AccessControl,
    Disconnected,
    Message,
    ModelManagerProtocol,
    Receive,
    RequestLifecycle,
    RequestsInProgress,
    Scope,
    Send,
    TracerProtocol,
    decompress_in_thread,
    guard_stream,
    to_inference_error,
)
from shoal.libs.grpc.methods import (
    ACTIONS,
    METHODS,
    PATH_PREFIX,
    UNAUTHENTICATED_METHODS,
    UNSUPPORTED_METHODS,
    GrpcCall,
    GrpcMethod,
)
from shoal.libs.grpc.service import InferenceServicer, parse_message
from shoal.serve.protocol.request_limits import RequestLimits

HEAD_BYTES = 5


class Frame(NamedTuple):
    """One message as received."""

    compressed: bool
    content: bytes


class StreamLifecycle(RequestLifecycle):
    """A call of any number of messages, read one after the other.

    While the caller reads none, since the stream's window is full or its client takes no answers, input is still read
    ahead up to `max_body_bytes`. So a disconnect is detected, and HAProxy reaches the input that follows.
    """

    def __init__(self, in_progress: RequestsInProgress, receive: Receive) -> None:
        super().__init__(in_progress, receive)
        self._buffer = bytearray()
        self._message_since_s: float | None = None  # when the wait for the rest of a message began
        self._asking = self._server_closes = False
        self._ahead: asyncio.Task[None] | None = None

    async def read_frame(self) -> Frame | None:
        """Read the next message; None at the end.

        Raises InferenceError: 413 as soon as a message declares too large a length, 400 when the last one is
        incomplete, 503 when the server is closing and the client has more to send; Disconnected.
        """
        while True:
            if self._server_closes and self._reading:
                raise InferenceError(503, "this replica is closing; begin another stream", retry_after_s=0.0)
            end = self._find_frame_end()
            if end is not None:
                break
            if not self._reading:
                if self._buffer:
                    raise InferenceError(400, f"the stream ends after {len(self._buffer)} bytes of a message")
                return None
            await self._receive_more()
        self._message_since_s = None
        frame = Frame(self._buffer[0] != 0, bytes(memoryview(self._buffer)[HEAD_BYTES:end]))
        del self._buffer[:end]
        return frame

    def _find_frame_end(self) -> int | None:
        """The end of the first message in the buffer; None while it is incomplete. Raises InferenceError (413)."""
        if len(self._buffer) < HEAD_BYTES:
            return None
        size_bytes = int.from_bytes(self._buffer[1:HEAD_BYTES], "big")
        if size_bytes > (limit := self.limits.max_body_bytes):
            raise InferenceError(413, f"the message has {size_bytes} bytes, the limit is {limit}")
        end = HEAD_BYTES + size_bytes
        return end if len(self._buffer) >= end else None

    async def _receive_more(self) -> None:
        """Wait for the next piece of the body. Raises Disconnected, which also ends the call."""
        if self._ahead is not None:  # it waits for the same input, and all it read is in the buffer
            self._ahead.cancel()
            self._ahead = None
        if self._buffer and self._message_since_s is None:
            self._message_since_s = asyncio.get_running_loop().time()
        self._asking = True
        try:
            is_here = self._append_message(await self._receive())
        finally:
            self._asking = False
        if not is_here:
            raise Disconnected

    def _append_message(self, message: Message) -> bool:
        """Append received input; False for a disconnect."""
        if message["type"] == "http.disconnect":
            self._cancel(Disconnected())
            return False
        self._server_closes = self._server_closes or message["type"] == CLOSING_MESSAGE
        self._buffer += message.get("body", b"")
        self._reading = message.get("more_body", False)
        return True

    def _poll_input(self, now_s: float) -> None:
        """Check that a message's rest arrives in time, and that the client is connected."""
        if self._asking:
            if self._message_since_s is not None and now_s - self._message_since_s > self.limits.body_deadline_s(
                len(self._buffer)
            ):
                self._cancel(self.limits.build_slow_body_error(len(self._buffer)))
        elif self._ahead is None or self._ahead.done():
            self._ahead = asyncio.get_running_loop().create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        while len(self._buffer) < self.limits.max_body_bytes and self._append_message(await self._receive()):
            pass

    def close(self) -> None:
        super().close()
        if self._ahead is not None:
            self._ahead.cancel()


GRPC_CONTENT_TYPE = (b"content-type", b"application/grpc")
DIED = b"0\r\ngrpc-status: 14\r\ngrpc-message: the replica has died: begin another stream\r\n\r\n"
CHUNKED_HEADERS = [GRPC_CONTENT_TYPE, (b"transfer-encoding", b"chunked")]
UNITS_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_TIMEOUT = re.compile(r"(\d{1,8})([HMSmun])")
FOREVER_S = 1e9  # gRPC writes no deadline as one in some hundred years


def make_app(
    manager: ModelManagerProtocol, access: AccessControl, limits: RequestLimits, tracer: TracerProtocol | None
) -> tuple[str, GrpcApp]:
    """The application of a replica, and the prefix of its paths: an extension of the group `shoal.protocols`."""
    return PATH_PREFIX, GrpcApp(InferenceServicer(manager, access, tracer), limits)


class GrpcApp:
    """Answers the paths of the service, and no others."""

    def __init__(self, servicer: InferenceServicer, limits: RequestLimits) -> None:
        self._servicer, self._limits = servicer, limits
        self._in_progress = RequestsInProgress(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, name = GrpcCall(dict(scope["headers"])), scope["path"][len(PATH_PREFIX) :]
        reply = _ResponseWriter(send, call)
        try:
            method = METHODS.get(name)
            if method is None or scope["method"] != "POST":
                what = UNSUPPORTED_METHODS.get(name)
                problem = f"{name[:200]} is not served here" + (f": {what} is not offered" if what else "")
                raise InferenceError(501, problem)
            self._limits.check_head(scope["path"], scope["headers"])
            if name not in UNAUTHENTICATED_METHODS:
                self._servicer.require_known_key(call)
            with (StreamLifecycle if method.streams else RequestLifecycle)(self._in_progress, receive) as progress:
                _apply_deadline(progress, call)
                if isinstance(progress, StreamLifecycle):
                    await self._answer_stream(progress, call, reply)
                else:
                    reply.last_message = await self._answer_unary(progress, method, call)
        except Disconnected:
            return
        except Exception as error:  # noqa: BLE001  # a call's top: `to_inference_error` logs a bug
            call.set_error(to_inference_error(error))
        if not reply.has_started:
            await reply.finish()
            return
        with suppress(TimeoutError):  # a client that takes no answers does not take this either
            async with asyncio.timeout(self._limits.answer_grace_s):
                await reply.finish()

    async def _answer_unary(self, progress: RequestLifecycle, method: GrpcMethod, call: GrpcCall) -> bytes:
        body = await progress.read_body(None)
        if len(body) < HEAD_BYTES or len(body) - HEAD_BYTES != int.from_bytes(body[1:HEAD_BYTES], "big"):
            raise InferenceError(400, f"not one message of gRPC: a body of {len(body)} bytes")
        content = await self._decompress(Frame(body[0] != 0, body[HEAD_BYTES:]), call)
        if method.name in ACTIONS:
            request = parse_message(method.request, content)
            return (await self._servicer.describe(method, request, call)).SerializeToString()
        return await self._servicer.model_infer(content, call)

    async def _answer_stream(self, progress: StreamLifecycle, call: GrpcCall, reply: _ResponseWriter) -> None:
        async def requests() -> AsyncGenerator[bytes, None]:
            while (frame := await progress.read_frame()) is not None:
                yield await self._decompress(frame, call)

        async with (
            aclosing(requests()) as incoming,
            aclosing(self._servicer.model_stream_infer(incoming, call)) as responses,
        ):
            async for response in responses:
                await progress.await_send(reply.send_message(response))

    async def _decompress(self, frame: Frame, call: GrpcCall) -> bytes:
        """The message of a frame. Raises InferenceError (400, 413, 415)."""
        if not frame.compressed:
            return frame.content
        encoding = call.metadata.get(b"grpc-encoding", b"identity")
        return await decompress_in_thread(self._limits, frame.content, encoding)


class _ResponseWriter:
    """Writes a call's answer: any number of messages, each in its own chunk, and the status after the last one.

    A call refused before its first message has only the status.
    """

    def __init__(self, send: Send, call: GrpcCall) -> None:
        self._send = send
        self._call = call
        self.has_started = False
        self.last_message: bytes | None = None  # sent with the status

    async def send_message(self, message: bytes) -> None:
        """Send one message, with more to follow."""
        await self._send_headers(is_stream=True)
        chunk = b"%b\r\n" % _chunk(message)
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self) -> None:
        """Send `last`, if given, and the status."""
        trailers = self._call.build_trailers()
        if self.last_message is None and not self.has_started:
            headers = [GRPC_CONTENT_TYPE, (b"content-length", b"0"), *trailers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": b""})
            return
        await self._send_headers()
        chunk = b"" if self.last_message is None else b"%b\r\n" % _chunk(self.last_message)
        end = b"".join((chunk, b"0\r\n", *(b"%b: %b\r\n" % trailer for trailer in trailers), b"\r\n"))
        await self._send({"type": "http.response.body", "body": end})

    async def _send_headers(self, *, is_stream: bool = False) -> None:
        if not self.has_started:
            self.has_started = True
            start = {"type": "http.response.start", "status": 200, "headers": CHUNKED_HEADERS}
            await self._send(start | {"guard": guard_stream(DIED)} if is_stream else start)


def _chunk(message: bytes) -> bytes:
    """A message after its five-byte prefix, as a chunk."""
    size_bytes = len(message)
    return b"%x\r\n\0%b%b" % (HEAD_BYTES + size_bytes, size_bytes.to_bytes(4, "big"), message)


def _apply_deadline(progress: RequestLifecycle, call: GrpcCall) -> None:
    """Apply the call's deadline, `grpc-timeout`, which ends it. Raises InferenceError (400)."""
    value = call.metadata.get(b"grpc-timeout")
    if value is None:
        return
    text = value.decode("latin-1")
    parts = _TIMEOUT.fullmatch(text)
    if parts is None:
        raise InferenceError(400, f"grpc-timeout = {text[:40]!r}: expected digits and one of H M S m u n")
    wait_s = int(parts[1]) * UNITS_S[parts[2]]
    if wait_s <= FOREVER_S:
        call.deadline_s = time.monotonic() + wait_s
        progress.set_deadline(call.deadline_s)
