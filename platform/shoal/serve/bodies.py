"""Bodies of requests, read with a limit and a deadline: a client that sends slowly is cut off.

HAProxy waits for the first 16 kB of a body and passes on the rest as it comes, however slowly; so the application
looks at the pace itself. One timer looks at all bodies that are being read, once every `look_s`: who sends at once
costs an entry in a dict. Called by the protocol application, on one event loop; knows ASGI's `receive` and nothing else
of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from shoal.errors import InferenceError
from shoal.serve.disconnects import Disconnected
from shoal.serve.limits import Limits

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]


class _Reading:
    __slots__ = ("expired", "received_bytes", "since_s")

    def __init__(self, since_s: float) -> None:
        self.since_s, self.received_bytes, self.expired = since_s, 0, False


class BodyReader:
    """Reads any number of bodies; each from its own task."""

    def __init__(self, limits: Limits, look_s: float = 1.0) -> None:
        self._limits, self._look_s = limits, look_s
        self._reading: dict[asyncio.Task[Any], _Reading] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def read(self, receive: Receive, length_bytes: int) -> bytes:
        """The whole body of a request whose Content-Length is `length_bytes`, or -1.

        Raises InferenceError: 413 as soon as the body is, or claims to be, too large, 408 when it comes too slowly, at
        most `look_s` after its deadline; Disconnected when the client has gone.
        """
        limit = self._limits.max_body_bytes
        if length_bytes > limit:
            raise InferenceError(413, f"the body has {length_bytes} bytes, the limit is {limit}")
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        reading = self._reading[task] = _Reading(loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._look_s, self._look)
        try:
            return await self._read(receive, reading)
        except asyncio.CancelledError:
            if reading.expired and not task.uncancel():
                raise self._too_slow(reading) from None
            raise
        finally:
            del self._reading[task]

    async def _read(self, receive: Receive, reading: _Reading) -> bytes:
        limit = self._limits.max_body_bytes
        chunks: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Disconnected
            chunk: bytes = message.get("body", b"")
            reading.received_bytes += len(chunk)
            if reading.received_bytes > limit:
                raise InferenceError(413, f"the body is larger than the limit of {limit} bytes")
            if not message.get("more_body", False):
                return b"".join((*chunks, chunk)) if chunks else chunk
            chunks.append(chunk)

    def _look(self) -> None:
        """Cancel those that are past their deadline."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for task, reading in self._reading.items():
            if loop.time() > reading.since_s + self._limits.body_deadline_s(reading.received_bytes):
                reading.expired = True
                task.cancel()
        if self._reading:
            self._timer = loop.call_later(self._look_s, self._look)

    def _too_slow(self, reading: _Reading) -> InferenceError:
        limits = self._limits
        return InferenceError(
            408,
            f"the body comes too slowly: {reading.received_bytes} bytes have arrived; it may take "
            f"{limits.body_grace_s:g} s, and one second for each {limits.min_body_bytes_per_s} bytes",
        )
