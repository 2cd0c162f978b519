"""Requests whose client has gone away: found late, cheaply, and cancelled.

To notice a disconnect at once takes two tasks per request (Serve's default: a fifth of the throughput, measured). Here
a request is looked at only when it has waited for `after_s`, by one timer for all: who is answered sooner costs one
entry in a dict. Called by `open_inference`, on one event loop; knows ASGI's `receive` and nothing else of HTTP.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

T = TypeVar("T")
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class Disconnected(Exception):
    """The client has gone away: nobody is there to answer."""


class _Waiting:
    __slots__ = ("gone", "receive", "since_s", "watcher")

    def __init__(self, receive: Receive, since_s: float) -> None:
        self.receive, self.since_s = receive, since_s
        self.watcher: asyncio.Task[None] | None = None
        self.gone = False


class DisconnectWatch:
    """Guards any number of requests; each from its own task."""

    def __init__(self, after_s: float = 0.1) -> None:
        self._after_s = after_s
        self._waiting: dict[asyncio.Task[Any], _Waiting] = {}
        self._timer: asyncio.TimerHandle | None = None

    async def guard(self, receive: Receive, work: Awaitable[T]) -> T:
        """The result of `work`. Cancels it and raises Disconnected when `receive` says that the client has gone."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        waiting = self._waiting[task] = _Waiting(receive, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(self._after_s, self._look)
        try:
            return await work
        except asyncio.CancelledError:
            if waiting.gone and not task.uncancel():
                raise Disconnected from None
            raise
        finally:
            del self._waiting[task]
            if waiting.watcher is not None:
                waiting.watcher.cancel()

    def _look(self) -> None:
        """Watch those that have waited long enough; they come first, so the look ends at the first that has not."""
        loop = asyncio.get_running_loop()
        self._timer = None
        for task, waiting in self._waiting.items():
            if loop.time() - waiting.since_s < self._after_s:
                break
            if waiting.watcher is None:
                waiting.watcher = loop.create_task(_watch(task, waiting))
        if self._waiting:
            self._timer = loop.call_later(self._after_s, self._look)


async def _watch(task: asyncio.Task[Any], waiting: _Waiting) -> None:
    while (await waiting.receive())["type"] != "http.disconnect":
        pass
    waiting.gone = True
    task.cancel()
