"""How a conversation is had over HTTP: one pool of kept connections, blocking or not. The only place that knows httpx.

Owned by the clients. Never decides what is tried again: that is `exchange`'s.
"""

from __future__ import annotations

import asyncio
import os
import time

import httpx

from shoal.addresses import is_loopback
from shoal.client.address import host_of
from shoal.client.exchange import Broken, Conversation, NotSent, Outcome, Reply, Send, TooLong, Wait
from shoal.errors import Closed, ConfigError

KEEP_ALIVE_S = 30.0
_HEADERS = {"accept": "application/json", "accept-encoding": "identity", "user-agent": "shoal"}


def _settings(url: str, token: str, num_connections: int) -> dict[str, object]:
    host = host_of(url)
    if num_connections < 1:
        raise ConfigError("num_connections", num_connections, "must be at least 1")
    if not all("!" <= letter <= "~" for letter in token):
        problem = "has a blank, a line break or a letter that no header can hold"
        raise ConfigError("token", "(not shown)", problem, "give it without them")
    return {
        "base_url": url,
        "headers": {**_HEADERS, "authorization": f"Bearer {token}"} if token else dict(_HEADERS),
        "limits": httpx.Limits(
            max_connections=num_connections, max_keepalive_connections=num_connections, keepalive_expiry=KEEP_ALIVE_S
        ),
        # A proxy of the environment is for the world outside; it would send the endpoint of this machine elsewhere.
        "trust_env": not is_loopback(host),
    }


class Transport:
    """Blocking; for any number of threads. A forked process opens connections of its own."""

    def __init__(self, url: str, token: str, num_connections: int) -> None:
        self._settings = _settings(url, token, num_connections)
        self._open()

    def _open(self) -> None:
        self._pid = os.getpid()
        self._http = httpx.Client(**self._settings)  # type: ignore[arg-type]

    def have(self, conversation: Conversation) -> Reply:
        """Do what the conversation says, to its end. Raises what it raises, and Closed."""
        if self._http.is_closed:
            conversation.close()
            raise Closed("the client is closed")
        if os.getpid() != self._pid:  # else two processes would read each other's answers
            self._open()
        outcome: Outcome = None
        try:
            while True:
                step = conversation.send(outcome)
                if isinstance(step, Wait):
                    time.sleep(step.seconds)
                    outcome = None
                else:
                    outcome = self._send(step)
        except StopIteration as ended:
            reply: Reply = ended.value
            return reply

    def _send(self, send: Send) -> Outcome:
        end_s = time.monotonic() + send.timeout_s
        request = _request(self._http, send)
        try:
            response = self._http.send(request, stream=True)
            try:
                chunks = []
                for chunk in response.iter_raw():
                    chunks.append(chunk)
                    if time.monotonic() > end_s:  # httpx limits the time of each read, not of all
                        return TooLong()
            finally:
                response.close()
        except httpx.TransportError as error:
            return _trouble(error)
        return _reply(response, chunks)

    def close(self) -> None:
        self._http.close()


class AsyncTransport:
    """For one event loop.

    A conversation begins when a connection is free for it, so that httpx, which looks at all connections for each
    request that waits, never has one waiting: first come, first served, by as many at once as there are connections.
    """

    def __init__(self, url: str, token: str, num_connections: int) -> None:
        self._http = httpx.AsyncClient(**_settings(url, token, num_connections))  # type: ignore[arg-type]
        self._free = asyncio.Semaphore(num_connections)
        self._loop: asyncio.AbstractEventLoop | None = None  # that the first call was made on

    async def have(self, conversation: Conversation, queue_s: float | None = None) -> Reply:
        """As `Transport.have`; cancelling it closes the connection, which tells the endpoint that nobody waits.

        Raises TimeoutError when no connection was free within `queue_s`; None waits for one as long as that takes.
        """
        try:
            self._require_own_loop()
            async with asyncio.timeout(queue_s):
                await self._free.acquire()
            try:
                return await self._converse(conversation)
            finally:
                self._free.release()
        finally:
            conversation.close()

    def _require_own_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise Closed("the client belongs to another event loop: make a client in each")

    async def _converse(self, conversation: Conversation) -> Reply:
        if self._http.is_closed:
            raise Closed("the client is closed")
        outcome: Outcome = None
        try:
            while True:
                step = conversation.send(outcome)
                if isinstance(step, Wait):
                    await asyncio.sleep(step.seconds)
                    outcome = None
                else:
                    outcome = await self._send(step)
        except StopIteration as ended:
            reply: Reply = ended.value
            return reply

    async def _send(self, send: Send) -> Outcome:
        request = _request(self._http, send)
        try:
            async with asyncio.timeout(send.timeout_s):
                response = await self._http.send(request, stream=True)
                try:
                    chunks = [chunk async for chunk in response.aiter_raw()]
                finally:
                    await response.aclose()
        except TimeoutError:
            return TooLong()
        except httpx.TransportError as error:
            return _trouble(error)
        return _reply(response, chunks)

    async def close(self) -> None:
        await self._http.aclose()


def _request(http: httpx.Client | httpx.AsyncClient, send: Send) -> httpx.Request:
    asked = send.request
    return http.build_request(
        asked.method, asked.path, headers=asked.headers, content=asked.body or None, timeout=send.timeout_s
    )


def _reply(response: httpx.Response, chunks: list[bytes]) -> Reply:
    return Reply(response.status_code, dict(response.headers), chunks[0] if len(chunks) == 1 else b"".join(chunks))


def _trouble(error: httpx.TransportError) -> Outcome:
    reason = str(error) or type(error).__name__
    if isinstance(error, httpx.TimeoutException):
        return TooLong()
    return NotSent(reason) if isinstance(error, httpx.ConnectError) else Broken(reason)
