"""One answer of the REST application: its status, headers and body; of an error, too.

Called by `app`, `admin`, the codec and the handlers of an exported folder. Pure: knows no model and no transport.
"""

from __future__ import annotations

import math

import msgspec

from shoal.errors import InferenceError
from shoal.open_inference.messages import Error

Headers = list[tuple[bytes, bytes]]

JSON_TYPE = b"application/json"
BINARY_TYPE = b"application/octet-stream"
RETRY_AFTER_S = 1.0  # of a 429 or 503 without its own time


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
            headers.append((b"allow", allowed.replace("GET", "GET, HEAD").encode()))
        case 408 | 413:
            headers.append((b"connection", b"close"))  # the rest of the body is not read
    return RestResponse(error.status, msgspec.json.encode(Error(str(error), error.field)), JSON_TYPE, headers)
