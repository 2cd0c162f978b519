"""Sends requests over HTTP: a pool of persistent connections, blocking or not. The only place that knows httpx2.

Owned by the clients. Never decides on retries: `retry` does.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from typing import TypeVar

from shoal.client.address import find_proxy, parse_host
from shoal.client.retry import EndpointRequest, Reply
from shoal.client.tls import CA_VARIABLE, CERTIFICATE_VARIABLE, create_tls_context
from shoal.errors import Closed, ConfigError, ConnectionLost, RequestLost, needs_extra

with needs_extra("client"):
    import httpx2

KEEP_ALIVE_S = 30.0
_HEADERS = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "shoal"}
Http = TypeVar("Http", httpx2.Client, httpx2.AsyncClient)


def _build_httpx_options(url: str, token: str, num_connections: int, ca: str, certificate: str) -> dict[str, object]:
    host = parse_host(url)
    if num_connections < 1:
        raise ConfigError("num_connections", num_connections, "must be at least 1")
    if not all("!" <= letter <= "~" for letter in token):
        problem = "has a blank, a line break or a letter that no header can hold"
        raise ConfigError("token", "(not shown)", problem, "give it without them")
    proxy = find_proxy(url)  # which may have TLS where the endpoint has none
    return {
        "base_url": url,
        "headers": {**_HEADERS, "authorization": f"Bearer {token}"} if token else dict(_HEADERS),
        "limits": httpx2.Limits(
            max_connections=num_connections, max_keepalive_connections=num_connections, keepalive_expiry=KEEP_ALIVE_S
        ),
        # Only the environment's entries for this host: httpx2 would read all, and raises for networks in NO_PROXY.
        "trust_env": False,
        "proxy": proxy,
        # The system's authorities take 20 ms to load, and nothing on the way to plain HTTP has a certificate.
        "verify": create_tls_context(host, ca, certificate) if url.startswith("https") else proxy is not None,
    }


def _open_client(kind: Callable[..., Http], settings: dict[str, object]) -> Http:
    """Open an HTTP client. Raises ConfigError for a proxy that httpx2 does not support."""
    try:
        return kind(**settings)
    except (httpx2.InvalidURL, ValueError, ImportError) as error:
        # An invalid address may contain a password.
        problem = "is not the address of a proxy" if isinstance(error, httpx2.InvalidURL) else str(error)
        remedy = "correct the variable, or unset it; NO_PROXY takes hosts that need no proxy"
        raise ConfigError("environment", "HTTP_PROXY, HTTPS_PROXY or ALL_PROXY", problem, remedy) from None


# Of an endpoint that wants a certificate of clients, in the text of OpenSSL.
NO_CERTIFICATE = ("ALERT_CERTIFICATE_REQUIRED", "ALERT_UNKNOWN_CA", "ALERT_HANDSHAKE_FAILURE")


class BlockingTransport:
    """The transport of any number of threads: nothing of it suspends. A forked process opens its own connections."""

    def __init__(self, url: str, token: str, num_connections: int, ca: str = "", certificate: str = "") -> None:
        self._settings = _build_httpx_options(url, token, num_connections, ca, certificate)
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._http = _open_client(httpx2.Client, self._settings)

    async def send(self, request: EndpointRequest, timeout_s: float) -> Reply:
        if os.getpid() != self._pid and not self._http.is_closed:  # else two processes would read each other's answers
            self._open()
        end_s = time.monotonic() + timeout_s
        built = _build_request(self._http, request, timeout_s)
        try:
            response = self._http.send(built, stream=True)
            if request.streams and response.is_success:
                next(body := _read_on(response))
                return Reply(response.status_code, dict(response.headers), b"", body)
            try:
                chunks = []
                for chunk in response.iter_raw():
                    chunks.append(chunk)
                    if time.monotonic() > end_s:  # httpx2 limits the time of each read, not the total
                        raise TimeoutError
            finally:
                response.close()
        except httpx2.TransportError as error:
            raise _to_failure(error) from None
        return _reply(response, chunks)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def close(self) -> None:
        self._http.close()


class AsyncTransport:
    """The transport of one event loop.

    A call begins when a connection is free (`reserve`), in order of arrival. So no request waits in httpx2, which scans
    all connections for each waiting request. Cancelling a call closes its connection, so that the endpoint drops the
    request.
    """

    def __init__(self, url: str, token: str, num_connections: int, ca: str = "", certificate: str = "") -> None:
        self._http = _open_client(
            httpx2.AsyncClient, _build_httpx_options(url, token, num_connections, ca, certificate)
        )
        self._free = asyncio.Semaphore(num_connections)
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop of the first call

    @asynccontextmanager
    async def reserve(self, queue_s: float | None = None) -> AsyncIterator[None]:
        """Hold one of the connections. Raises TimeoutError when none was free within `queue_s` (None: no limit), and
        Closed on another event loop."""
        loop = asyncio.get_running_loop()
        self._loop = self._loop or loop
        if self._loop is not loop:
            raise Closed("the client belongs to another event loop: make a client in each")
        async with asyncio.timeout(queue_s):
            await self._free.acquire()
        try:
            yield
        finally:
            self._free.release()

    async def send(self, request: EndpointRequest, timeout_s: float) -> Reply:
        built = _build_request(self._http, request, timeout_s)
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._http.send(built, stream=True)
                try:
                    chunks = [chunk async for chunk in response.aiter_raw()]
                finally:
                    await response.aclose()
        except httpx2.TransportError as error:
            raise _to_failure(error) from None
        return _reply(response, chunks)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def close(self) -> None:
        await self._http.aclose()


def _build_request(
    http: httpx2.Client | httpx2.AsyncClient, request: EndpointRequest, timeout_s: float
) -> httpx2.Request:
    """Raises Closed: the client may have been closed while it waited before a retry."""
    if http.is_closed:
        raise Closed("the client is closed")
    return http.build_request(
        request.method, request.path, headers=request.headers, content=request.body or None, timeout=timeout_s
    )


def _read_on(response: httpx2.Response) -> Generator[bytes]:
    try:
        yield b""  # it has begun, so that closing it closes the response
        yield from response.iter_raw()
    except httpx2.TransportError as error:
        raise ConnectionLost(f"the connection broke before the answer was complete: {error!r}") from None
    finally:
        response.close()


def _reply(response: httpx2.Response, chunks: list[bytes]) -> Reply:
    return Reply(response.status_code, dict(response.headers), chunks[0] if len(chunks) == 1 else b"".join(chunks))


def _to_failure(error: httpx2.TransportError) -> Exception:
    reason = str(error) or type(error).__name__
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        reason += f"; trust its authority by ca=FILE, --ca FILE or ${CA_VARIABLE}"
    is_unread = isinstance(error, httpx2.ConnectError)
    if any(alert in reason for alert in NO_CERTIFICATE):  # the endpoint has read nothing
        reason += f"; show a certificate that it trusts by certificate=FILE or ${CERTIFICATE_VARIABLE}"
        is_unread = True
    if isinstance(error, httpx2.TimeoutException):
        return TimeoutError()
    if is_unread:
        return ConnectionLost(f"the endpoint cannot be reached: {reason}")
    return RequestLost(f"the connection broke before the answer was complete: {reason}")
