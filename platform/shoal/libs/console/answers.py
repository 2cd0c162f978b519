"""What the console reads of a request, how it answers, and who may ask for what."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from shoal.errors import ConfigError
from shoal.extend.runs import Run, load
from shoal.extend.serve import AUDIT_FILE, AuditLog, format_origin
from shoal.home import home

MAX_BODY_BYTES = 1 << 20
PROGRAM = "console"  # in the audit log


def answer_json(content: Any, status: int = 200) -> Response:
    """JSON, in which numbers that are not finite are null."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def read_bytes(request: Request, most: int) -> bytes:
    """The body of a request. Raises ConfigError for more than `most` bytes."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > most:
            raise ConfigError("body", f"{len(body):,} bytes", "is too long", f"send {most:,} at most")
    return bytes(body)


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON object of a request for a change. Raises ConfigError for another body, and one that is too long."""
    try:
        content: dict[str, Any] = msgspec.json.decode(await read_bytes(request, MAX_BODY_BYTES), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError("body", "***", f"is no JSON object: {error}") from None
    return content


def read_number(request: Request, name: str, default: float) -> float:
    """A finite number of the query. Raises ConfigError."""
    text = request.query_params.get(name)
    if not text:
        return default
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ConfigError(name, text, "is no number")
    return number


def audit(request: Request, action: str, **change: str) -> AbstractContextManager[None]:
    """Log a change of a run, once its outcome is known, as endpoints log theirs."""
    by = format_origin("administrator", request.client.host if request.client else "", PROGRAM)
    return AuditLog(home() / AUDIT_FILE, "").audit_request(action, change, by)


def load_exactly(run_id: str) -> Run:
    """The run of this id: a change needs its full name. Raises RunError, and ConfigError for a shorter one."""
    run = load(run_id)
    if run.id != run_id:
        raise ConfigError("run", run_id, "is not the full name of a run", f"is it {run.id}?")
    return run


def with_fields(handle: Callable[[Request, dict[str, Any]], Response]) -> Callable[[Request], Awaitable[Response]]:
    """A handler that gets the JSON object of the request, and runs in a thread."""

    async def handle_fields(request: Request) -> Response:
        return await run_in_threadpool(handle, request, await read_body(request))

    return handle_fields


def require_session(request: Request) -> None:
    """Refuse one who has not logged in, also on this host: other users may be there."""
    if not request.scope["state"]["may_write"]:
        raise HTTPException(401, "log in with the access token first")
