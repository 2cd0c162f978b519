"""A replica's HTTP server in this process, with the protocols of libraries."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import uvicorn

from serving.fake_host import FakeHost
from shoal.serve.http import fast_path
from shoal.serve.http.app import RestApp
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.request_lifecycle import EndpointApp
from shoal.serve.protocol.request_limits import RequestLimits

TIMEOUT_S = 60.0
LIMITS = RequestLimits(max_body_bytes=1 << 20)


@asynccontextmanager
async def served(
    host: FakeHost,
    http_port: int,
    access: AccessControl | None = None,
    limits: RequestLimits = LIMITS,
    origins: Sequence[str] = (),
) -> AsyncIterator[uvicorn.Server]:
    access = access or AccessControl(None, [])
    app = EndpointApp(RestApp(host, access, limits=limits), host, access, limits, origins=origins)
    before = uvicorn.config.HTTP_PROTOCOLS["auto"]
    fast_path.install_application(app)
    with socket.create_server(("127.0.0.1", http_port)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off", ws="none"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield server
        finally:
            uvicorn.config.HTTP_PROTOCOLS["auto"] = before
            server.should_exit = True
            await serving


async def exchange(http_port: int, line: str, body: bytes, header: str) -> bytes:
    """What the replica's server answers to these bytes, until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
    head = [line, "host: x", "connection: close", f"content-length: {len(body)}", *filter(None, [header]), "", ""]
    writer.write("\r\n".join(head).encode() + body)
    answer = await asyncio.wait_for(reader.read(), TIMEOUT_S)
    writer.close()
    await writer.wait_closed()
    return answer
