"""A relay of TCP on loopback, whose connections a campaign stops, slows, cuts or answers with errors.

It stands between the actors of a run and its gateway, and between all of the run and a store that speaks HTTP.
"""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress

CHUNK_BYTES = 2**16
SLOW_S = 0.2  # for each chunk: at most 330 kB/s, and a delay
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FaultyLink:
    """host, port: to which it relays, from `self.port`, in a thread of its own until `close`"""

    def __init__(self, host: str, port: int) -> None:
        self._target = host, port
        self._fault = ""
        self._writers = set[asyncio.StreamWriter]()
        self._passing = asyncio.Event()
        self._passing.set()
        self._is_over = asyncio.Event()
        bound = Future[tuple[asyncio.AbstractEventLoop, int]]()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(bound)), name="link", daemon=True)
        self._thread.start()
        self._loop, self.port = bound.result()

    def inject(self, fault: str) -> None:
        """partition: nothing comes through; slow; errors: requests of HTTP get a 503; cut: connections end, at once;
        "": all is well."""
        self._loop.call_soon_threadsafe(self._set, fault)

    def close(self) -> None:
        """Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._is_over.set)
            self._thread.join()

    def _set(self, fault: str) -> None:
        if fault in ("cut", "errors"):
            for writer in self._writers:
                writer.transport.abort()
        if fault == "cut":  # another one may last
            return
        self._fault = fault
        if fault == "partition":
            self._passing.clear()
        else:
            self._passing.set()

    async def _serve(self, bound: Future[tuple[asyncio.AbstractEventLoop, int]]) -> None:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        bound.set_result((asyncio.get_running_loop(), server.sockets[0].getsockname()[1]))
        await self._is_over.wait()
        server.close()
        self._set("cut")

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        self._writers.add(writer)
        with suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            await self._passing.wait()
            if self._fault == "errors":
                await reader.readuntil(b"\r\n\r\n")
                writer.write(UNAVAILABLE)
                await writer.drain()
            else:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                writers.append(far_writer)
                self._writers.add(far_writer)
                await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        for each in writers:
            self._writers.discard(each)
            each.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(CHUNK_BYTES):
            if self._fault == "slow":
                await asyncio.sleep(SLOW_S)
            await self._passing.wait()
            sink.write(data)
            await sink.drain()
        if sink.can_write_eof():
            sink.write_eof()
