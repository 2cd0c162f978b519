"""The console's HTTP server: routes, static files and the process around them.

Each part of the console has a module with its ROUTES, whose functions read the record, the registry or an endpoint in
threads, and a file of `static/pages/` that draws them.
"""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from shoal.errors import ConfigError, ShoalError
from shoal.libs.console import films_api, live, run_api, runs_api
from shoal.libs.console.access import Access, Guard
from shoal.libs.console.answers import answer_json

STATIC = Path(__file__).parent / "static"
GRACE_S = 1  # for open answers, when the console ends


def build_app(access: Access) -> Guard:
    """The console as an ASGI application."""
    routes = [
        Route("/", _send_page),
        Route("/api/session", _describe_session),
        *runs_api.ROUTES,
        *run_api.ROUTES,
        *films_api.ROUTES,
        *live.ROUTES,
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, exception_handlers={ShoalError: _send_error})
    app.state.access = access
    return Guard(app, access)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen(128)
    except OSError:
        listening.close()
        raise
    return listening


def serve(listening: socket.socket, access: Access) -> None:
    """Answer until the process is told to end."""
    config = uvicorn.Config(
        build_app(access),
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        limit_concurrency=256,
    )
    uvicorn.Server(config).run(sockets=[listening])


async def _send_page(request: Request) -> Response:
    return FileResponse(STATIC / "index.html")


async def _describe_session(request: Request) -> Response:
    return answer_json({"may_write": request.scope["state"]["may_write"]})


async def _send_error(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, ConfigError) else 404
    return answer_json({"error": str(error)}, status)
