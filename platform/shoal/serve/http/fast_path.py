"""Passes requests from a replica's socket directly to the application, past the per-request work of Serve and uvicorn.

Serve's replica runs HTTP with uvicorn and makes two identifiers, a context, metrics and a slot for each request. The
application counts, refuses and answers by itself and needs none of it. It costs more than the inference of a small
model: half of the replica's CPU time for a request (decision 009). So `install_application` gives uvicorn a protocol
class that passes requests directly to the application and writes each answer at once. Serve's own paths, below `/-/`,
still go to Serve: health, and with it draining.

Called by the Ray shell before Serve starts the replica's HTTP server. uvicorn still handles parsing, bodies, pipelined
requests, keep-alive and shutdown. Serve no longer sees these requests: its count of ongoing requests stays at zero, so
an endpoint that scales by it installs no application. Then only gRPC calls bypass uvicorn, which cannot write the
trailers of their answers (`over_http1`), and no request bypasses Serve.

The protocol class extends one of uvicorn's, whose internals may change with any version. Where they do not match,
`install_application` warns once and changes nothing: requests go through Serve and uvicorn, and gRPC is off.
"""

from __future__ import annotations

import asyncio
import http
import importlib
import inspect
import logging
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from shoal.serve.protocol.request_lifecycle import INCOMPLETE_MESSAGE

if TYPE_CHECKING:
    from uvicorn.protocols.http.flow_control import FlowControl

logger = logging.getLogger(__name__)

Message = MutableMapping[str, Any]
Application = Callable[
    [MutableMapping[str, Any], Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]
]
SERVE_PATH_PREFIX = b"/-/"
CLOSING_MESSAGE = "shoal.closing"  # the type of a message
GRPC_PATH_PREFIX = b"/inference.GRPCInferenceService/"
# For the rest of a request that was answered before it was complete: as long as HAProxy waits for a client.
UNREAD_BODY_TIMEOUT_S = 30.0
HIGH_WATER_BYTES = 65536  # a shorter first part of an answer is sent together with its head
# The methods and connection attributes of uvicorn's HttpToolsProtocol that `direct_protocol` uses.
USED_OF_UVICORN = frozenset(
    {"shutdown", "connection_lost", "on_response_complete", "on_headers_complete", "_unset_keepalive_if_required"}
    | {"app", "cycle", "expect_100_continue", "flow", "loop", "parser", "pipeline", "scope", "server_state", "tasks"}
    | {"transport", "url"}
)
STATUS_LINES = {each.value: f"HTTP/1.1 {each.value} {each.phrase}\r\n".encode() for each in http.HTTPStatus}

_application: list[
    Application | None
] = []  # of this process; uvicorn constructs its protocol class without our arguments


def install_application(application: Application | None) -> bool:
    """Let HTTP servers that uvicorn starts in this process from now on pass requests to `application`; None: to Serve.

    Returns False, with a warning and no change, when this version of uvicorn does not match.
    """
    if problem := find_mismatch():
        logger.warning("requests go through Serve and uvicorn, and gRPC is off: %s", problem)
        return False
    _application[:] = [application]
    importlib.import_module("uvicorn.config").HTTP_PROTOCOLS["auto"] = f"{__package__}.direct_protocol:DirectProtocol"
    return True


def direct_application() -> Application | None:
    """The application installed last."""
    return _application[0]


def find_mismatch() -> str:
    """How uvicorn differs from what `direct_protocol` needs; "" for a match."""
    try:
        protocols = importlib.import_module("uvicorn.config").HTTP_PROTOCOLS
        connection = importlib.import_module("uvicorn.protocols.http.httptools_impl").HttpToolsProtocol
        source = inspect.getsource(connection)
    except (ImportError, AttributeError, OSError, TypeError) as error:
        return f"uvicorn's HttpToolsProtocol is not there: {error}"
    if "auto" not in protocols:
        return "uvicorn has no protocol called auto"
    known = {name for each in inspect.getmro(connection) for name in _names(each)}
    if missing := sorted(USED_OF_UVICORN - known):
        return f"uvicorn's HttpToolsProtocol has no {', '.join(missing)}"
    if unknown := sorted(set(re.findall(r"\bcycle\.(\w+)", source)) - set(dir(DirectCycle))):
        return f"uvicorn's HttpToolsProtocol uses {', '.join(unknown)} of a request"
    return ""


def _names(of: type) -> set[str]:
    """The names of methods and class attributes, and those that the methods use, instance attributes included."""
    functions = [each for each in vars(of).values() if inspect.isfunction(each)]
    return {*vars(of), *(name for each in functions for name in each.__code__.co_names)}


class DirectCycle:
    """One request and its answer: ASGI's `receive` and `send`.

    The application sets a content-length or writes chunks.
    """

    __slots__ = (
        "_closing",
        "_flow",
        "_head",
        "_headers",
        "_is_body_delivered",
        "_is_incomplete",
        "_on_finished",
        "_transport",
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "scope",
    )  # fmt: skip

    def __init__(
        self,
        scope: Any,
        transport: asyncio.Transport,
        flow: FlowControl,
        keep_alive: bool,
        headers: list[tuple[bytes, bytes]],
        finished: Callable[[], None],
    ) -> None:
        self.scope, self._transport, self._flow = scope, transport, flow
        self._headers, self._on_finished = headers, finished
        self.keep_alive, self.disconnected, self.response_complete = keep_alive, False, False
        self.body, self.more_body = bytearray(), True
        self._is_body_delivered = self._closing = self._is_incomplete = False
        self.message_event = asyncio.Event()
        self._head: list[bytes] = []

    async def run_asgi(self, application: Application) -> None:
        """Run the application. An exception in it is a bug and ends the connection."""
        try:
            await application(self.scope, self.receive, self.send)
        except Exception:
            logger.exception("the application failed")
        finally:
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
        if self._head:
            if len(content) < HIGH_WATER_BYTES:
                self._head.append(content)
                content = b""
            self._transport.write(b"".join(self._head))
            self._head = []
        if content:
            self._transport.write(content)
        if not message.get("more_body", False):
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                # The kernel discards an unread answer when a connection closes with unread input.
                lingers = self.more_body and not (self._is_incomplete or self._transport.is_closing())
                self._transport.write_eof() if lingers else self._transport.close()
            self._on_finished()

    def _start_response(self, message: Message) -> None:
        head = [STATUS_LINES[message["status"]]]
        for name, value in (*self._headers, *message["headers"]):
            head += (name, b": ", value, b"\r\n")
            if name == b"connection" and value == b"close":
                self.keep_alive = False
        head.append(b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n")
        self._head = head
