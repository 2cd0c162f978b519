"""What the console reads of a request, and how it answers."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shoal.errors import ConfigError

MAX_BODY_BYTES = 1 << 20


def answer_json(content: Any, status: int = 200) -> Response:
    """JSON, in which numbers that are not finite are null."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request for a change. Raises ConfigError for another body, and one that is too long."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            raise ConfigError("body", f"{len(body):,} bytes", "is too long", f"send {MAX_BODY_BYTES:,} at most")
    try:
        content: dict[str, Any] = msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("body", "***", f"is no JSON object: {error}") from None
    return content
