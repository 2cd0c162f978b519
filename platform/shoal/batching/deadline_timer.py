"""Expires requests at their deadline, with one timer for all deadlines of one tick.

Owns the event loop's timers of a batcher's queue. Called on the event loop only. A timer for each request would cost
more than the rest of its path through the batcher, and so would cancelling each unused timer. Unused ticks are swept
together once there are many.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

TICK_S = 0.005
MIN_SWEEP_TICKS = 1024  # ticks
ItemT = TypeVar("ItemT")


class DeadlineTimer(Generic[ItemT]):
    """Calls `expired(item)` for each item that is not discarded before its deadline: up to `TICK_S` late, never
    early."""

    def __init__(self, clock: Callable[[], float], expired: Callable[[ItemT], None]) -> None:
        self._clock, self._on_expired = clock, expired
        self._ticks: dict[int, set[ItemT]] = {}
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of each tick
        self._sweep_from = MIN_SWEEP_TICKS
        self._closing = False

    def add(self, item: ItemT, deadline_s: float) -> int:
        """Add an item; returns the tick that `discard` takes."""
        tick = int(deadline_s / TICK_S) + 1
        items = self._ticks.get(tick)
        if items is None:
            if len(self._ticks) >= self._sweep_from:
                self._sweep()
            items = self._ticks[tick] = set()
            after_s = tick * TICK_S - self._clock()
            self._timers[tick] = asyncio.get_running_loop().call_later(after_s, self._fire, tick)
        items.add(item)
        return tick

    def discard(self, item: ItemT, tick: int) -> None:
        """Remove an item. It may already have expired."""
        items = self._ticks.get(tick)
        if items is not None:
            items.discard(item)
            if self._closing and not items:
                self._forget(tick)

    def close(self) -> None:
        """Accept no more items. The present ones still expire unless they are discarded."""
        self._closing = True
        self._sweep()

    def _sweep(self) -> None:
        """Drop the ticks that have no items left."""
        for tick in [tick for tick, items in self._ticks.items() if not items]:
            self._forget(tick)
        self._sweep_from = max(MIN_SWEEP_TICKS, 2 * len(self._ticks))

    def _forget(self, tick: int) -> None:
        del self._ticks[tick]
        self._timers.pop(tick).cancel()

    def _fire(self, tick: int) -> None:
        del self._timers[tick]
        for item in self._ticks.pop(tick):
            self._on_expired(item)
