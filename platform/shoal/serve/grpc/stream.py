"""The messages of a gRPC stream that comes as the body of one request of HTTP/1.1, for as long as its client likes.

A message stands behind five bytes: whether it is compressed, and its length. Silence between two messages is waited
for; within one, the pace of a body holds, and its length is looked at before the rest is taken in. A client that takes
no answers stops its stream, and after a while has left it. HAProxy 2.8 does not get to read of a client's windows while
it has more of its requests than it can pass on: who stops reading may be stopped for good.

Called by `grpc_http1`, which runs each stream as one of its requests in progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, MutableMapping
from typing import Any, NamedTuple

from shoal.errors import InferenceError
from shoal.serve.http.fast_path import CLOSING_MESSAGE
from shoal.serve.messages.inference import Disconnected
from shoal.serve.protocol.limits import RequestLimits
from shoal.serve.protocol.request_lifecycle import Receive, RequestLifecycle

HEAD_BYTES = 5


class Frame(NamedTuple):
    """One message as it was sent."""

    compressed: bool
    content: bytes


class StreamLifecycle(RequestLifecycle):
    """A call of any number of messages: who reads them asks for one after the other.

    While nobody asks, since the window of the stream is full or its client takes no answers, what comes is read ahead
    all the same, up to `max_body_bytes`: so it is seen when the client goes, and HAProxy comes to what lies behind it.
    """

    def __init__(self, task: asyncio.Task[Any], receive: Receive, limits: RequestLimits, since_s: float) -> None:
        super().__init__(task, receive, limits, since_s)
        self._buffer = bytearray()
        self._message_since_s: float | None = None  # since when the rest of a message is waited for
        self._sending_since_s: float | None = None
        self._asking = self._server_closes = False
        self._ahead: asyncio.Task[None] | None = None

    async def read_frame(self) -> Frame | None:
        """The next message; None when there is none left.

        Raises InferenceError: 413 as soon as a message claims to be too large, 400 when the last one is not whole, 503
        when the server is to end and the client has more to send; Disconnected.
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
        found = Frame(self._buffer[0] != 0, bytes(memoryview(self._buffer)[HEAD_BYTES:end]))
        del self._buffer[:end]
        return found

    def _find_frame_end(self) -> int | None:
        """Where the first message in the buffer ends; None when that is not yet there. Raises InferenceError (413)."""
        if len(self._buffer) < HEAD_BYTES:
            return None
        size_bytes = int.from_bytes(self._buffer[1:HEAD_BYTES], "big")
        if size_bytes > (limit := self._limits.max_body_bytes):
            raise InferenceError(413, f"the message has {size_bytes} bytes, the limit is {limit}")
        end = HEAD_BYTES + size_bytes
        return end if len(self._buffer) >= end else None

    async def _receive_more(self) -> None:
        """Wait for the next piece of the body. Raises Disconnected, which also ends the call."""
        if self._ahead is not None:  # it waits for the same, and has taken nothing that is not in the buffer
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

    def _append_message(self, message: MutableMapping[str, Any]) -> bool:
        """What has come; False when that is the client's departure."""
        if message["type"] == "http.disconnect":
            self._cancel(Disconnected())
            return False
        self._server_closes = self._server_closes or message["type"] == CLOSING_MESSAGE
        self._buffer += message.get("body", b"")
        self._reading = message.get("more_body", False)
        return True

    async def await_send(self, sending: Awaitable[None]) -> None:
        """Wait for an answer to be sent, which may wait for a client that reads."""
        self._sending_since_s = asyncio.get_running_loop().time()
        await sending
        self._sending_since_s = None

    def poll(self, now_s: float) -> None:
        """See that the rest of a message comes in time, that answers are taken, and that somebody is there at all."""
        if self._sending_since_s is not None and now_s - self._sending_since_s > self._limits.answer_grace_s:
            self._cancel(Disconnected())
        if self._asking:
            if self._message_since_s is not None and now_s - self._message_since_s > self._limits.body_deadline_s(
                len(self._buffer)
            ):
                self._cancel(self._slow_body_error(len(self._buffer)))
        elif self._ahead is None or self._ahead.done():
            self._ahead = asyncio.get_running_loop().create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        while len(self._buffer) < self._limits.max_body_bytes and self._append_message(await self._receive()):
            pass

    def close(self) -> None:
        super().close()
        if self._ahead is not None:
            self._ahead.cancel()
