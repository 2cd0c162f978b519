"""Tells requests that their deadline has passed, with one timer for all whose deadlines fall together.

Owns the event loop's timers of a batcher's queue. Called on the event loop only. A timer of its own for every request
would cost more than the rest of the request's way through the batcher.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

TICK_S = 0.005
ItemT = TypeVar("ItemT")


class Expiry(Generic[ItemT]):
    """Calls `expired(item)` for each item that is not discarded before its time, up to `TICK_S` late, never early."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, clock: Callable[[], float], expired: Callable[[ItemT], None]
    ) -> None:
        self._loop, self._clock, self._expired = loop, clock, expired
        self._ticks: dict[int, set[ItemT]] = {}  # each has a timer, which ends it

    def add(self, item: ItemT, deadline_s: float) -> int:
        """The tick under which the item is known to `discard`."""
        tick = int(deadline_s / TICK_S) + 1
        items = self._ticks.get(tick)
        if items is None:
            items = self._ticks[tick] = set()
            self._loop.call_later(tick * TICK_S - self._clock(), self._fire, tick)
        items.add(item)
        return tick

    def discard(self, item: ItemT, tick: int) -> None:
        """The item needs no telling any more. It may have been told."""
        items = self._ticks.get(tick)
        if items is not None:
            items.discard(item)

    def _fire(self, tick: int) -> None:
        for item in self._ticks.pop(tick):
            self._expired(item)
