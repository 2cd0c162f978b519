"""The messages of a gRPC stream, which arrives as the body of one HTTP/1.1 request of any duration.

A message follows five bytes: whether it is compressed, and its length. The time between two messages is unlimited.
Within one, the pace of a body applies, and its length is checked before the rest is read. A client that takes no
answers stops its stream and after a time counts as disconnected. HAProxy 2.8 does not read a client's window updates
while it has more of its requests than it can pass on, so a stream that stops reading may stop for good.

Called by `app`, which runs each stream as one of its requests in progress.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from shoal.errors import InferenceError
from shoal.extend.serve import CLOSING_MESSAGE, Disconnected, Message, Receive, RequestLifecycle, RequestsInProgress

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
