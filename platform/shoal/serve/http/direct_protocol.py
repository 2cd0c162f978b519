"""uvicorn's protocol class of a connection, which passes requests directly to the application.

Owns the code that depends on uvicorn's internals: `fast_path` compares them with `USED_OF_UVICORN` before uvicorn uses
this class. Called by uvicorn alone.
"""

from __future__ import annotations

import asyncio
import http
import logging
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shoal.serve.protocol.request_lifecycle import (
    CLOSING_MESSAGE,
    INCOMPLETE_MESSAGE,
    Application,
    Message,
)

logger = logging.getLogger(__name__)

SERVE_PATH_PREFIX = b"/-/"
# For the rest of a request that was answered before it was complete: as long as HAProxy waits for a client.
UNREAD_BODY_TIMEOUT_S = 30.0
FRAMING_HEADERS = (b"content-length", b"transfer-encoding")
HIGH_WATER_BYTES = 65536  # a shorter first part of an answer is sent together with its head
# The methods and connection attributes of uvicorn's HttpToolsProtocol that `DirectProtocol` uses.
USED_OF_UVICORN = frozenset(
    {"shutdown", "connection_lost", "on_response_complete", "on_headers_complete", "timeout_keep_alive_handler"}
    | {
        "cycle",
        "expect_100_continue",
        "flow",
        "headers",
        "loop",
        "parser",
        "pipeline",
        "scope",
        "server_state",
        "tasks",
    }
    | {"timeout_keep_alive", "transport", "url"}
)
STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in http.HTTPStatus}


class WriteGuard(Protocol):
    """Has an answer ended for its client if this process is killed, unless a write has not ended."""

    def begin_write(self) -> None:
        """Called before each write."""
        ...

    def end_write(self) -> None:
        """Called after each write but the last one."""
        ...

    def release(self) -> None:
        """Called once the answer has ended."""
        ...


class DirectProtocol(HttpToolsProtocol):
    """One connection. uvicorn makes it without our arguments, so `application` is the process's."""

    application: Application
    _unread: asyncio.TimerHandle | None = None
    _idle: asyncio.TimerHandle | None = None  # looks once in `timeout_keep_alive`, where uvicorn sets a timer a request
    _idle_since_s = 0.0

    def shutdown(self) -> None:
        """Called by uvicorn: close the connection once the requests in progress are answered."""
        super().shutdown()
        cycle: Any = self.cycle
        if isinstance(cycle, DirectCycle):
            cycle.announce_close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._unread, self._idle):  # each keeps a reset connection in memory
            if timer is not None:
                timer.cancel()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Stay open for the answer to a body that ends early. Any other end of input is a client that has gone: so is
        that of a gRPC stream, whose body has no length."""
        cycle: Any = self.cycle
        if not isinstance(cycle, DirectCycle) or not cycle.more_body or cycle.response_complete:
            return None
        if all(name != b"content-length" for name, _ in cycle.scope["headers"]):
            return None
        cycle.announce_incomplete()
        return True

    def before_write(self, num_bytes: int, is_last: bool) -> None:
        """Called before a part of an answer is written."""

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        cycle: Any = self.cycle
        if cycle.response_complete and cycle.more_body:
            if self._unread is not None:
                self._unread.cancel()
            self._unread = self.loop.call_later(UNREAD_BODY_TIMEOUT_S, self._leave, cycle)
        if self.pipeline:
            self._start(*self.pipeline.pop())  # or uvicorn's own cycle and Serve's application
            return
        self._idle_since_s = self.loop.time()
        if self._idle is None:
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _check_idle(self) -> None:
        """Close the connection if it was idle for `timeout_keep_alive`. A request's answer sets the timer again."""
        self._idle = None
        idle_s = self.loop.time() - self._idle_since_s
        cycle: Any = self.cycle
        if not cycle.response_complete or cycle.more_body or cycle.scope is not self.scope:  # the next head has begun
            return
        if idle_s >= self.timeout_keep_alive:
            self.timeout_keep_alive_handler()
        else:
            self._idle = self.loop.call_later(self.timeout_keep_alive - idle_s, self._check_idle)

    def _leave(self, cycle: object) -> None:
        """Abort the connection unless another request has begun. A client that sends single bytes would postpone
        uvicorn's timer."""
        if cycle is self.cycle:
            self.transport.abort()

    def on_headers_complete(self) -> None:
        url = self.url
        self.scope["headers"] = self.headers.copy()  # uvicorn adds a body's trailers to its own
        if url.startswith(SERVE_PATH_PREFIX) or self.expect_100_continue or self.parser.should_upgrade():
            super().on_headers_complete()
            return
        path, _, query = url.partition(b"?")
        if b"%" in path or not path.startswith(b"/"):
            super().on_headers_complete()  # uvicorn splits such a path; the application gets it through Serve
            return
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["path"] = path.decode("ascii")
        scope["raw_path"] = path
        scope["query_string"] = query
        earlier = self.cycle
        keep_alive = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
        # It replaces uvicorn's own cycle: uvicorn reads and sets the same attributes.
        cycle: Any = DirectCycle(scope, self, keep_alive)
        self.cycle = cycle
        if earlier is None or earlier.response_complete:
            self._start(cycle, DirectProtocol.application)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, DirectProtocol.application))  # type: ignore[arg-type]

    def _start(self, cycle: Any, application: Any) -> None:
        task = self.loop.create_task(cycle.run_asgi(application))
        task.add_done_callback(self.tasks.discard)
        self.tasks.add(task)


class DirectCycle:
    """One request and its answer: ASGI's `receive` and `send`.

    The start of an answer may have `guard`: a function of the connection's transport that returns the answer's
    `WriteGuard`, or None. Without a content-length or transfer-encoding of the application, the parts of its answer are
    sent as chunks.
    """

    __slots__ = (
        "_closing",
        "_flow",
        "_guarded",
        "_head",
        "_is_body_delivered",
        "_is_chunked",
        "_is_incomplete",
        "_protocol",
        "_transport",
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "scope",
    )  # fmt: skip

    def __init__(self, scope: Any, protocol: DirectProtocol, keep_alive: bool) -> None:
        self.scope, self._protocol = scope, protocol
        self._transport, self._flow = protocol.transport, protocol.flow
        self.keep_alive = keep_alive
        self.disconnected = False
        self.response_complete = False
        self.body, self.more_body = bytearray(), True
        self._is_body_delivered = self._closing = self._is_incomplete = self._is_chunked = False
        self.message_event = asyncio.Event()
        self._head: list[bytes] = []
        self._guarded: WriteGuard | None = None

    async def run_asgi(self, application: Application) -> None:
        """Run the application. An exception in it is a bug and ends the connection."""
        try:
            await application(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("the application failed")
        finally:
            if self._guarded is not None:
                self._guarded.release()
            if not self.response_complete:  # or the answer is missing or incomplete
                # A client that reads nothing would not see the end either, and `close` waits until all is read.
                self._transport.abort() if self._flow.write_paused else self._transport.close()

    def announce_close(self) -> None:
        """Let `receive` report once, by its message's type, that the server is closing, so that an endless stream can
        end."""
        self._closing = True
        self.message_event.set()

    def announce_incomplete(self) -> None:
        """Let `receive` report that the rest of the body will not come."""
        self._is_incomplete, self.keep_alive = True, False
        self.message_event.set()

    async def receive(self) -> Message:
        lacks_body = self.more_body and not self.body
        if (lacks_body or self._is_body_delivered) and not (
            self.disconnected or self.response_complete or self._closing or self._is_incomplete
        ):
            self._flow.resume_reading()
            self.message_event.clear()
            await self.message_event.wait()  # for more of the body, or for a disconnect
        if self.disconnected or self.response_complete:
            return {"type": "http.disconnect"}
        body, self.body = bytes(self.body), bytearray()
        if self._is_incomplete:
            return {"type": INCOMPLETE_MESSAGE, "body": body, "more_body": True}
        kind, self._closing = CLOSING_MESSAGE if self._closing else "http.request", False
        self._is_body_delivered = not self.more_body
        return {"type": kind, "body": body, "more_body": self.more_body}

    async def send(self, message: Message) -> None:
        if self._flow.write_paused and not self.disconnected:
            await self._flow.drain()
        if self.disconnected:
            return
        if message["type"] == "http.response.start":
            self._start_response(message)
            return
        content = message.get("body", b"")
        if self.scope["method"] == "HEAD":
            content = b""
        elif self._is_chunked:
            end = b"" if message.get("more_body", False) else b"0\r\n\r\n"
            content = b"%x\r\n%b\r\n%b" % (len(content), content, end) if content else end
        if self._guarded is not None:
            self._guarded.begin_write()
        has_more = message.get("more_body", False)
        self._protocol.before_write(sum(map(len, self._head)) + len(content), not has_more)
        if self._head:
            if len(content) < HIGH_WATER_BYTES:
                self._head.append(content)
                content = b""
            self._transport.write(b"".join(self._head))
            self._head = []
        if content:
            self._transport.write(content)
        if has_more:
            if self._guarded is not None:
                self._guarded.end_write()
        else:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                # The kernel discards an unread answer when a connection closes with unread input.
                lingers = self.more_body and not (self._is_incomplete or self._transport.is_closing())
                self._transport.write_eof() if lingers else self._transport.close()
            self._protocol.on_response_complete()

    def _start_response(self, message: Message) -> None:
        if guard := message.get("guard"):
            self._guarded = guard(self._transport)
        head = [STATUS_LINES[message["status"]]]
        is_chunked = True
        for name, value in (*self._protocol.server_state.default_headers, *message["headers"]):
            head += (name, b": ", value, b"\r\n")
            if name == b"connection" and value == b"close":
                self.keep_alive = False
            elif name in FRAMING_HEADERS:
                is_chunked = False
        if is_chunked:
            self._is_chunked = True
            head.append(b"transfer-encoding: chunked\r\n")
        head.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = head
