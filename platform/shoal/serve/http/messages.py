"""One HTTP request, its target by the table of paths, and one answer, as the REST application sees them.

    GET  /v2                                    GET  /v2/models/{m}[/versions/{v}]
    GET  /v2/health/live                        GET  /v2/models/{m}[/versions/{v}]/ready
    GET  /v2/health/ready                       GET  /v2/models/{m}[/versions/{v}]/config
    GET  /v2/models/stats                       GET  /v2/models/{m}[/versions/{v}]/stats
    POST /v2/repository/index                   POST /v2/models/{m}[/versions/{v}]/infer
    POST /v2/repository/models/{m}/load         GET  /shoal/v1/status
    POST /v2/repository/models/{m}/unload       POST /shoal/v1/rollout
    POST /shoal/v1/episodes                     GET  /metrics
    GET  /openapi.json

Called by `app` and `admin`. Owns the headers of answers and errors, and how answers are sent over ASGI; knows no model.
`openapi.json` describes the same table; every path has one method.

Compressing tensors costs more than it saves on most networks. So an answer is compressed, in a thread, only for a
client that accepts exactly one coding, as tritonclient does on request. Clients that list every coding by default
(curl, httpx, browsers) get plain answers.
"""

from __future__ import annotations

import asyncio
import functools
import math
import zlib
from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from shoal.errors import InferenceError
from shoal.open_inference.messages import Error
from shoal.serve.messages.inference import Caller, format_origin
from shoal.serve.protocol.access import FORWARDED_FROM_HEADER
from shoal.serve.protocol.request_lifecycle import WINDOW_BITS, Send

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = b"application/json"
BINARY_TYPE = b"application/octet-stream"
MAX_JOINED_BYTES = 1 << 16  # smaller parts are joined: another message costs more than the copy
MIN_COMPRESSED_BYTES = 1024  # smaller answers are not compressed
COMPRESSION_LEVEL = 1
RETRY_AFTER_S = 1.0  # of a 429 or 503 without its own time


class RouteAction(Enum):
    """The action of a request."""

    SERVER = auto()
    LIVE = auto()
    READY = auto()
    MODEL = auto()
    MODEL_READY = auto()
    MODEL_CONFIG = auto()
    INFER = auto()
    STATISTICS = auto()
    INDEX = auto()
    LOAD = auto()
    UNLOAD = auto()
    STATUS = auto()
    ROLLOUT = auto()
    EPISODES = auto()
    METRICS = auto()
    OPENAPI = auto()


POST_ACTIONS = frozenset(
    {
        *(RouteAction.INFER, RouteAction.INDEX, RouteAction.LOAD, RouteAction.UNLOAD),
        *(RouteAction.ROLLOUT, RouteAction.EPISODES),
    }
)
UNAUTHENTICATED_ACTIONS = frozenset({RouteAction.LIVE, RouteAction.READY})  # no key required
ADMIN_ACTIONS = frozenset({RouteAction.LOAD, RouteAction.UNLOAD, RouteAction.STATUS, RouteAction.ROLLOUT})

FIXED_ROUTES: dict[tuple[str, ...], RouteAction] = {
    ("v2",): RouteAction.SERVER,
    ("v2", "health", "live"): RouteAction.LIVE,
    ("v2", "health", "ready"): RouteAction.READY,
    ("v2", "models", "stats"): RouteAction.STATISTICS,
    ("v2", "repository", "index"): RouteAction.INDEX,
    ("shoal", "v1", "status"): RouteAction.STATUS,
    ("shoal", "v1", "rollout"): RouteAction.ROLLOUT,
    ("shoal", "v1", "episodes"): RouteAction.EPISODES,
    ("metrics",): RouteAction.METRICS,
    ("openapi.json",): RouteAction.OPENAPI,
}
MODEL_ROUTES: dict[tuple[str, ...], RouteAction] = {
    (): RouteAction.MODEL,
    ("ready",): RouteAction.MODEL_READY,
    ("config",): RouteAction.MODEL_CONFIG,
    ("infer",): RouteAction.INFER,
    ("stats",): RouteAction.STATISTICS,
}
REPOSITORY_ROUTES: dict[tuple[str, ...], RouteAction] = {("load",): RouteAction.LOAD, ("unload",): RouteAction.UNLOAD}


class RouteTarget(NamedTuple):
    """The target of a path. `model` and `version` are None where the path has none."""

    action: RouteAction
    method: str
    model: str | None = None
    version: str | None = None


@functools.lru_cache(maxsize=1024)
def match_route(path: str) -> RouteTarget | None:
    """Match a path; None when it is unknown."""
    segments = tuple(path.removesuffix("/").split("/")[1:])
    action = FIXED_ROUTES.get(segments)
    model: str | None = None
    version: str | None = None
    if action is None and len(segments) > 2 and segments[:2] == ("v2", "models"):
        model, rest = segments[2], segments[3:]
        if len(rest) > 1 and rest[0] == "versions":
            version, rest = rest[1], rest[2:]
        action = MODEL_ROUTES.get(rest)
    elif action is None and len(segments) > 3 and segments[:3] == ("v2", "repository", "models"):
        model = segments[3]
        action = REPOSITORY_ROUTES.get(segments[4:])
    if action is None or model == "" or version == "":
        return None
    return RouteTarget(action, "POST" if action in POST_ACTIONS else "GET", model, version)


class RestRequest(msgspec.Struct, frozen=True, gc=False):
    """A request other than an inference, without its body."""

    target: RouteTarget
    headers: dict[bytes, bytes]
    caller: Caller

    @property
    def caller_origin(self) -> str:
        """The caller and its address as known to the ingress, for the record of changes."""
        return format_origin(self.caller.name, self.headers.get(FORWARDED_FROM_HEADER, b"").decode("latin-1"))


class RestResponse(msgspec.Struct, frozen=True, gc=False):
    """An answer. `parts` follow `body` and are byte buffers that no longer change."""

    status: int
    body: bytes
    content_type: bytes = JSON_TYPE
    headers: Headers = []
    parts: list[memoryview | bytes] = []


def read_length(headers: Mapping[bytes, bytes], name: bytes) -> int | None:
    """The value of a header that is a length in bytes; None without it. Raises InferenceError (400)."""
    value = headers.get(name)
    if value is None:
        return None
    if not value.isdigit() or len(value) > 18:
        shown = value[:40].decode("latin-1")
        raise InferenceError(400, f"{name.decode().title()} = {shown!r}: expected a number of bytes")
    return int(value)


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


async def compress_response(answer: RestResponse, accepted: bytes) -> RestResponse:
    """Compress the answer if the client asks for it. `accepted`: the value of Accept-Encoding."""
    coding = accepted.strip().lower()
    window_bits = WINDOW_BITS.get(coding)
    if window_bits is None or len(answer.body) + sum(map(len, answer.parts)) < MIN_COMPRESSED_BYTES:
        return answer

    def compress() -> bytes:
        compressor = zlib.compressobj(COMPRESSION_LEVEL, wbits=window_bits)
        pieces = [compressor.compress(piece) for piece in (answer.body, *answer.parts)]
        return b"".join((*pieces, compressor.flush()))

    headers = [*answer.headers, (b"content-encoding", coding)]
    return RestResponse(answer.status, await asyncio.to_thread(compress), answer.content_type, headers)
