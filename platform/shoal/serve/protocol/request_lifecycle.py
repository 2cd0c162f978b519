"""Where requests enter an endpoint, the limits on each, and how it ends: answered, too slow, abandoned or late.

`EndpointApp` is the ASGI application: REST and the protocols of libraries stand side by side below it. Each checks a
request's head before any allocation, and reads its body within a `RequestLifecycle`. HAProxy, where present, has its
own lower limits (`cluster.ingress.haproxy_config`). It waits for the first 32 kB of an HTTP body, for nothing of a gRPC
body, and passes on the rest at any pace, so the pace is checked here.

Detecting a disconnect at once takes two tasks per request (Serve's default, which costs a fifth of the throughput,
measured). Here a request is polled once it has waited for `poll_s`. One timer polls all of them, so a request answered
sooner costs a dict entry. Models enforce the deadlines of their calls; one known before the body is read (gRPC's) has
its own timer here. Runs on one event loop; knows ASGI and nothing else of HTTP, and no model.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Self

from shoal.errors import InferenceError
from shoal.plugins.find import find_extension, load_sound_extensions
from shoal.serve.messages.inference import Disconnected, ModelManagerProtocol, TracerProtocol
from shoal.serve.protocol.request_limits import RequestLimits, read_length
from shoal.serve.spec.endpoint import PROTOCOLS

if TYPE_CHECKING:
    from shoal.serve.protocol.access import AccessControl

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]

# Messages of `receive`, by their type: the client has ended its side of the connection within a body, and may read an
# answer; the server is closing, so that an endless stream can end.
INCOMPLETE_MESSAGE = "shoal.incomplete"
CLOSING_MESSAGE = "shoal.closing"
PREFLIGHT = [
    (b"access-control-allow-methods", b"GET, HEAD, POST"),
    (b"access-control-max-age", b"600"),
    (b"content-length", b"0"),
]


class RequestLifecycle:
    """One request: reads its body, and is cancelled when its answer is of no more use.

    A context manager around the work, which it cancels. Raises Disconnected, or InferenceError (408, 504), in place of
    the cancellation.
    """

    # Class-level defaults, so that each request sets only its differences.
    cancel_reason: Exception | None = None
    waits: tuple[asyncio.Task[None] | asyncio.TimerHandle, ...] = ()
    _reading = True
    _received_bytes = 0
    _watched = False
    _sending_since_s: float | None = None

    def __init__(self, in_progress: RequestsInProgress, receive: Receive) -> None:
        self._in_progress = in_progress
        self._receive = receive
        self.limits = in_progress.limits

    def __enter__(self) -> Self:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._task, self.since_s = task, loop.time()
        self._in_progress.running[task] = self
        if self._in_progress.timer is None:
            self._in_progress.start_timer(loop)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        del self._in_progress.running[self._task]
        self.close()
        reason = self.cancel_reason
        if reason is not None and isinstance(error, asyncio.CancelledError) and not self._task.uncancel():
            raise reason from None

    async def read_body(self, length_bytes: int | None) -> bytes:
        """Read the full body, whose Content-Length is `length_bytes`.

        Raises InferenceError: 413 as soon as the body is, or is declared, too large, 408 when it is too slow, 400 when
        it ends early.
        """
        limit = self.limits.max_body_bytes
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

    async def await_send(self, sending: Awaitable[None]) -> None:
        """Wait until a part of a stream is sent, as fast as the client reads. A client that reads nothing ends it."""
        self._sending_since_s = asyncio.get_running_loop().time()
        await sending
        self._sending_since_s = None

    async def _watch_disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel(Disconnected())

    def poll(self, now_s: float) -> None:
        """Check whether a long request should continue: that its client is connected, and takes what it gets."""
        if self._sending_since_s is not None and now_s - self._sending_since_s > self.limits.answer_grace_s:
            self._cancel(Disconnected())
        self._poll_input(now_s)

    def _poll_input(self, now_s: float) -> None:
        if not self._reading:
            if not self._watched:
                self._watched = True
                self.waits += (asyncio.get_running_loop().create_task(self._watch_disconnect()),)
        elif now_s - self.since_s > self.limits.body_deadline_s(self._received_bytes):
            self._cancel(self.limits.build_slow_body_error(self._received_bytes))

    def close(self) -> None:
        """End what waits for it."""
        for wait in self.waits:
            wait.cancel()


class RequestsInProgress:
    """The requests of one protocol that are in progress, each in its own task; polls them every `poll_s`."""

    def __init__(self, limits: RequestLimits, poll_s: float = 0.1) -> None:
        self.limits, self._poll_s = limits, poll_s
        self.running: dict[asyncio.Task[Any], RequestLifecycle] = {}  # in the order of their arrival
        self.timer: asyncio.TimerHandle | None = None  # None while no request needs to be polled

    def start_timer(self, loop: asyncio.AbstractEventLoop) -> None:
        """Poll after `poll_s`."""
        self.timer = loop.call_later(self._poll_s, self._poll_all)

    def _poll_all(self) -> None:
        """Poll the long requests; they come first, so the loop ends at the first short one."""
        loop = asyncio.get_running_loop()
        now_s, self.timer = loop.time(), None
        for progress in self.running.values():
            if now_s - progress.since_s < self._poll_s:
                break
            progress.poll(now_s)
        if self.running:
            self.start_timer(loop)


class EndpointApp:
    """The ASGI application of an endpoint: what a library's protocol answers goes to it, all else to `rest`.

    An extension of the group `shoal.protocols` is a function of the other arguments. It returns the prefix of the paths
    that its protocol answers, or several, and an application.

    HEAD is GET, whose body the server leaves out.

    root:     the path before all of the endpoint's
    required: of these; others that cannot be loaded, or raise when they are called, are left out
    origins:  of web pages that may call it: `EndpointSpec.allow_origins`. Their preflights take no key
    """

    def __init__(
        self,
        rest: Application,
        manager: ModelManagerProtocol,
        access: AccessControl,
        limits: RequestLimits,
        tracer: TracerProtocol | None = None,
        required: Iterable[str] = (),
        root: str = "",
        origins: Collection[str] = (),
    ) -> None:
        others = load_sound_extensions(PROTOCOLS, lambda make: make(manager, access, limits, tracer))
        for name in {*required} - others.keys():  # raises
            others[name] = find_extension(name, PROTOCOLS)(manager, access, limits, tracer)
        self._root = root.rstrip("/")
        self._rest = rest
        self._origins = origins
        self._others: list[tuple[str | tuple[str, ...], Application]] = [*others.values()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        application = self._rest
        if scope["type"] == "http":
            path = scope["path"]
            root = scope.get("root_path") or self._root
            if root and path.startswith(root):
                path = path[len(root) :]
                scope = {**scope, "path": path}
            for prefix, other in self._others:
                if path.startswith(prefix):
                    application = other
            if scope["method"] == "HEAD":
                scope = {**scope, "method": "GET"}
            if self._origins:
                await self._share(application, scope, receive, send)
                return
        await application(scope, receive, send)

    async def _share(self, application: Application, scope: Scope, receive: Receive, send: Send) -> None:
        """Call with the headers that let pages read the answer (https://fetch.spec.whatwg.org/#http-cors-protocol)."""
        given, more = dict(scope["headers"]), [(b"vary", b"origin")]
        origin = given.get(b"origin", b"")

        async def share(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if "*" in self._origins or origin.decode("latin-1") in self._origins:
            more += [(b"access-control-allow-origin", origin or b"*"), (b"access-control-expose-headers", b"*")]
            if scope["method"] == "OPTIONS" and b"access-control-request-method" in given:
                more.append((b"access-control-allow-headers", given.get(b"access-control-request-headers", b"")))
                await share({"type": "http.response.start", "status": 200, "headers": PREFLIGHT})
                await share({"type": "http.response.body"})
                return
        await application(scope, receive, share)


async def read_body(progress: RequestLifecycle, headers: Mapping[bytes, bytes]) -> bytes:
    """Read a request's body, decompressed. Raises InferenceError (400, 408, 413, 415), Disconnected."""
    body = await progress.read_body(read_length(headers, b"content-length"))
    encoding = headers.get(b"content-encoding")
    return body if encoding is None else await decompress_in_thread(progress.limits, body, encoding)


async def decompress_in_thread(limits: RequestLimits, body: bytes, encoding: bytes) -> bytes:
    """`RequestLimits.decompress`, off the event loop; a body of the encoding `identity` stays as it is."""
    if encoding.strip().lower() == b"identity":
        return body
    return await asyncio.to_thread(limits.decompress, body, encoding)
