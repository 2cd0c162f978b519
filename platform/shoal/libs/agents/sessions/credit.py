"""The credit of a run's sessions: so many may be open, or wait for the learner, that none is too old when it is learnt.

A group takes the credit of all its sessions at its first opening, so that no group waits for its last ones. First
come, first served.
"""

from __future__ import annotations

import asyncio
from collections import deque


class SessionCredit:
    """total: sessions that may be open or unlearnt at once. Used on one event loop."""

    def __init__(self, total: int) -> None:
        self.total = self.available = total
        self._waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def take(self, num: int, timeout_s: float) -> bool:
        """Wait for the credit of `num` sessions; False when it does not come in time, or will not come."""
        if self._is_closed:
            return False
        if not self._waiting and num <= self.available:
            self.available -= num
            return True
        admitted: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        entry = (num, admitted)
        self._waiting.append(entry)
        await asyncio.wait([admitted], timeout=timeout_s)
        if not admitted.done():
            self._waiting.remove(entry)
            self._admit()  # behind it, a smaller group may wait
            return False
        return admitted.result()

    def close(self) -> None:
        """Nobody gets any more."""
        self._is_closed = True
        while self._waiting:
            self._waiting.popleft()[1].set_result(False)

    def give_back(self, num: int) -> None:
        """Sessions are over: learnt, or dropped."""
        self.available += num
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._waiting[0][0] <= self.available:
            num, admitted = self._waiting.popleft()
            self.available -= num
            admitted.set_result(True)
