"""The console's HTTP server: routes, static files and the process around them.

Each part of the console has a module with its ROUTES, whose functions read the record, the registry or an endpoint in
threads, and a file of `static/pages/` that draws them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import resource
import socket
import ssl
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from shoal.errors import ConfigError, ShoalError
from shoal.libs.console import films_api, live, runs_api
from shoal.libs.console.access import Access, ProtectedApp
from shoal.libs.console.answers import answer_json
from shoal.libs.console.serving import endpoints_api, models_api, try_api
from shoal.libs.console.serving.readings import SharedReading

STATIC = Path(__file__).parent / "static"
GRACE_S = 1  # for open answers, when the console ends
FIRST_REQUEST_S = 10.0  # after which a connection ends that has asked for nothing
MAX_OPEN_FILES = 20_000


def build_app(access: Access) -> ProtectedApp:
    """The console as an ASGI application."""
    digest = hashlib.sha256()
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(STATIC).as_posix().encode() + b"\0" + path.read_bytes())
    version = digest.hexdigest()[:16]
    modules = [
        path.relative_to(STATIC) for folder in ("lib", "pages") for path in sorted((STATIC / folder).glob("*.js"))
    ]
    preloads = "".join(f'<link rel="modulepreload" href="/static/{path}">\n' for path in modules)
    page = (STATIC / "index.html").read_text().replace("</head>", f"{preloads}</head>")
    page = page.replace("/static/", f"/static/{version}/")
    routes = [
        Route("/", lambda request: HTMLResponse(page)),
        Route("/api/session", _describe_session),
        *runs_api.ROUTES,
        *films_api.ROUTES,
        *live.ROUTES,
        Mount(f"/static/{version}", LastingFiles(directory=STATIC)),
        *models_api.ROUTES,
        *endpoints_api.ROUTES,
        *try_api.ROUTES,
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    app = Starlette(routes=routes, exception_handlers={ShoalError: _send_error})
    app.state.access = access
    app.state.endpoints, app.state.clusters = endpoints_api.Endpoints(), SharedReading(endpoints_api.read_clusters)
    return ProtectedApp(app, access)


class ImpatientProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """HTTP, where a connection that asks for nothing ends: thousands of them leave room for others."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._ending = asyncio.get_running_loop().call_later(FIRST_REQUEST_S, transport.close)

    def data_received(self, data: bytes) -> None:
        self._ending.cancel()
        super().data_received(data)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    is_ipv6 = ":" in host
    family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=is_ipv6)


def serve(listening: socket.socket, access: Access, context: ssl.SSLContext | None = None) -> None:
    """Answer until the process is told to end. context: of TLS"""
    config = uvicorn.Config(
        build_app(access),
        log_level=logging.WARNING,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_S,
        http=ImpatientProtocol,
    )
    config.load()
    config.ssl = context
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, MAX_OPEN_FILES), most))
    uvicorn.Server(config).run(sockets=[listening])


class LastingFiles(StaticFiles):
    """Files that browsers need not ask for again: their address has the version of them all."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers["cache-control"] = "max-age=31536000, immutable"
        return response


async def _describe_session(request: Request) -> Response:
    return answer_json({"may_write": request.scope["state"]["may_write"]})


async def _send_error(request: Request, error: Exception) -> Response:
    status = 400 if isinstance(error, ConfigError) else 404
    return answer_json({"error": str(error)}, status)
