"""Requests in progress: ended when their body is too slow, their client disconnects or their deadline passes.

HAProxy waits for the first 32 kB of an HTTP body, for nothing of a gRPC body, and passes on the rest at any pace, so
the application checks the pace itself. Detecting a disconnect at once takes two tasks per request (Serve's default,
which costs a fifth of the throughput, measured). Here a request is polled once it has waited for `look_s`. One timer
polls all of them, so a request answered sooner costs a dict entry. Models enforce the deadlines of their calls; a
deadline known before the body is read (gRPC's) has its own timer here.

Called by the applications of REST and gRPC, on one event loop; knows ASGI's `receive` and nothing else of HTTP.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any, TypeVar

from shoal.errors import InferenceError
from shoal.serve.messages.inference import Disconnected
from shoal.serve.protocol.limits import RequestLimits

T = TypeVar("T")
A = TypeVar("A")
P = TypeVar("P", bound="RequestLifecycle")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


# A message of `receive`: the client has ended its side of the connection within a body, and may read an answer.
INCOMPLETE_MESSAGE = "shoal.incomplete"


class RequestLifecycle:
    """One request: reads its body, and is cancelled when its answer is of no more use."""

    # Class-level defaults, so that each request sets only its differences.
    cancel_reason: Exception | None = None
    waits: tuple[asyncio.Task[None] | asyncio.TimerHandle, ...] = ()
    _reading = True
    _received_bytes = 0
    _watched = False

    def __init__(self, task: asyncio.Task[Any], receive: Receive, limits: RequestLimits, since_s: float) -> None:
        self._task, self._receive, self._limits, self.since_s = task, receive, limits, since_s

    async def read_body(self, length_bytes: int | None) -> bytes:
        """Read the full body, whose Content-Length is `length_bytes`.

        Raises InferenceError: 413 as soon as the body is, or is declared, too large, 408 when it is too slow, 400 when
        it ends early.
        """
        limit = self._limits.max_body_bytes
        if length_bytes is not None and length_bytes > limit:
            raise InferenceError(413, f"the body has {length_bytes} bytes, the limit is {limit}")
        message = await self._receive()
        if message["type"] == "http.request" and not message.get("more_body", False):
            whole: bytes = message.get("body", b"")
            if len(whole) <= limit:
                self._reading = False
                return whole
        chunks: list[bytes] = []
        while message["type"] != "http.disconnect":
            chunk: bytes = message.get("body", b"")
            self._received_bytes += len(chunk)
            if self._received_bytes > limit:
                raise InferenceError(413, f"the body is larger than the limit of {limit} bytes")
            if message["type"] == INCOMPLETE_MESSAGE:
                raise InferenceError(400, f"the body ends after {self._received_bytes} of {length_bytes} bytes")
            chunks.append(chunk)
            if not message.get("more_body", False):
                self._reading = False
                return b"".join(chunks)
            message = await self._receive()
        raise Disconnected

    def set_deadline(self, deadline_s: float) -> None:
        """End the request with 504 at `deadline_s` of `time.monotonic()`."""
        wait_s = deadline_s - time.monotonic()
        error = InferenceError(504, "the deadline has passed")
        self.waits += (asyncio.get_running_loop().call_later(wait_s, self._cancel, error),)

    def _cancel(self, why: Exception) -> None:
        """Cancel the work; the first reason counts."""
        if self.cancel_reason is None:
            self.cancel_reason = why
            self._task.cancel()

    async def _watch_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel(Disconnected())

    def poll(self, now_s: float) -> None:
        """Check whether a long request should continue."""
        if not self._reading:
            if not self._watched:
                self._watched = True
                self.waits += (asyncio.get_running_loop().create_task(self._watch_disconnect()),)
        elif now_s - self.since_s > self._limits.body_deadline_s(self._received_bytes):
            self._cancel(self._slow_body_error(self._received_bytes))

    def _slow_body_error(self, received_bytes: int) -> InferenceError:
        limits, received = self._limits, f"{received_bytes} bytes have arrived"
        pace = f"{limits.body_grace_s:g} s, and one second for each {limits.min_body_bytes_per_s} bytes"
        return InferenceError(408, f"the body is too slow: {received}; it may take {pace}")

    def close(self) -> None:
        """End the request."""
        for wait in self.waits:
            wait.cancel()


class RequestsInProgress:
    """Runs any number of requests, each in its own task, and polls them every `look_s`."""

    def __init__(self, limits: RequestLimits, look_s: float = 0.1) -> None:
        self._limits, self._look_s = limits, look_s
        self._running: dict[asyncio.Task[Any], RequestLifecycle] = {}
        self._timer: asyncio.TimerHandle | None = None

    def run(
        self, receive: Receive, work: Callable[[RequestLifecycle, A], Awaitable[T]], argument: A
    ) -> Coroutine[Any, Any, T]:
        """Run `work(progress, argument)`, which is cancelled when the request is ended.

        Raises Disconnected, or InferenceError (408, 504).
        """
        return self.run_as(RequestLifecycle, receive, work, argument)

    async def run_as(self, kind: type[P], receive: Receive, work: Callable[[P, A], Awaitable[T]], argument: A) -> T:
        """`run` with another class of progress."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        progress = self._running[task] = kind(task, receive, self._limits, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._look_s, self._poll_all)
        try:
            return await work(progress, argument)
        except asyncio.CancelledError:
            if progress.cancel_reason is None or task.uncancel():
                raise
            raise progress.cancel_reason from None
        finally:
            del self._running[task]
            progress.close()

    def _poll_all(self) -> None:
        """Poll the long requests; they come first, so the loop ends at the first short one."""
        now_s = asyncio.get_running_loop().time()
        self._timer = None
        for progress in self._running.values():
            if now_s - progress.since_s < self._look_s:
                break
            progress.poll(now_s)
        if self._running:
            self._timer = asyncio.get_running_loop().call_later(self._look_s, self._poll_all)
