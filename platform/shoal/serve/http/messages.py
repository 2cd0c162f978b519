"""One HTTP request and one answer, as the REST application sees them, and how an answer is sent over ASGI.

Called by `app` and `admin`. Owns the headers of answers and errors; knows no path and no model.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.errors import InferenceError
from shoal.open_inference.messages import Error
from shoal.serve.http.routes import RouteTarget
from shoal.serve.messages.inference import Caller, format_origin

if TYPE_CHECKING:
    from shoal.serve.protocol.tracing import RequestTrace

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]

FORWARDED_FROM_HEADER = b"shoal-from"  # set by the ingress, over the client's value
JSON_TYPE = b"application/json"
BINARY_TYPE = b"application/octet-stream"
MAX_JOINED_BYTES = 1 << 16  # smaller parts are joined: another message costs more than the copy
RETRY_AFTER_S = 1.0  # of a 429 or 503 without its own time


class RestRequest(msgspec.Struct, frozen=True, gc=False):
    """A request without its body. `trace`: its span, when it is traced."""

    target: RouteTarget
    headers: dict[bytes, bytes]
    caller: Caller
    trace: RequestTrace | None = None

    @property
    def caller_origin(self) -> str:
        """The caller and its address as known to the ingress, for the record of changes."""
        return format_origin(self.caller.name, self.get_header(FORWARDED_FROM_HEADER))

    def get_header(self, name: bytes) -> str:
        """The value of a header; "" when there is none."""
        value = self.headers.get(name)
        return "" if value is None else value.decode("latin-1")

    def get_length_header(self, name: bytes) -> int | None:
        """The value of a header that is a length in bytes; None without it. Raises InferenceError (400)."""
        value = self.headers.get(name)
        if value is None:
            return None
        if not value.isdigit() or len(value) > 18:
            shown = value[:40].decode("latin-1")
            raise InferenceError(400, f"{name.decode().title()} = {shown!r}: expected a number of bytes")
        return int(value)


class RestResponse(msgspec.Struct, frozen=True, gc=False):
    """An answer. `parts` follow `body` and are byte buffers that no longer change."""

    status: int
    body: bytes
    content_type: bytes = JSON_TYPE
    headers: Headers = []
    parts: list[memoryview | bytes] = []


def build_json_response(value: object) -> RestResponse:
    """Build an answer with `value` as JSON."""
    return RestResponse(200, msgspec.json.encode(value))


def build_error_response(error: InferenceError, allowed: str = "") -> RestResponse:
    """Build the answer for `error`. `allowed`: the path's method, for 405."""
    headers: Headers = []
    match error.status:
        case 429 | 503:
            wait_s = RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
            headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        case 401:
            headers.append((b"www-authenticate", b'Bearer realm="shoal"'))
        case 405:
            headers.append((b"allow", allowed.encode()))
        case 408 | 413:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
    return RestResponse(error.status, msgspec.json.encode(Error(str(error))), JSON_TYPE, headers)


async def send_response(answer: RestResponse, send: Send) -> None:
    body: memoryview | bytes = answer.body
    parts, length = answer.parts, len(answer.body)
    if parts:
        length += sum(map(len, parts))
        if length <= MAX_JOINED_BYTES:
            body, parts = b"".join((body, *parts)), []
    headers = [(b"content-type", answer.content_type), (b"content-length", b"%d" % length), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    for part in parts:
        await send({"type": "http.response.body", "body": body, "more_body": True})
        body = part
    await send({"type": "http.response.body", "body": body})
