"""Requests that change something, or show what is for the owner of the access token alone."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal.libs.console.answers import read_body


def with_fields(handle: Callable[[Request, dict[str, Any]], Response]) -> Callable[[Request], Awaitable[Response]]:
    """A handler that gets the JSON object of the request, and runs in a thread."""

    async def handle_fields(request: Request) -> Response:
        return await run_in_threadpool(handle, request, await read_body(request))

    return handle_fields


def require_session(request: Request) -> None:
    """Refuse one who has not logged in, also on this host: other users may be there."""
    if not request.scope["state"]["may_write"]:
        raise HTTPException(401, "log in with the access token first")
