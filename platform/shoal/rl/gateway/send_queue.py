"""What a gateway is to send, in order. What speaks of the ledger waits until that has been written.

Owned by the gateway's thread; touches no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.wire import encode
from shoal.wire.messages import ErrorMessage, Message, Pong

LEDGER_INDEPENDENT = (Pong, ErrorMessage)


class QueuedMessage(NamedTuple):
    """The frames of a message, and who is to get it."""

    route: bytes
    frames: Sequence[bytes]
    should_await_commit: bool = True


class SendQueue:
    """A list that is taken whole, or without what speaks of the ledger."""

    def __init__(self) -> None:
        self._pending: list[QueuedMessage] = []

    def add(self, route: bytes, message: Message) -> None:
        """A message without a payload."""
        self._pending.append(QueuedMessage(route, [encode(message)], not isinstance(message, LEDGER_INDEPENDENT)))

    def add_frames(self, route: bytes, frames: Sequence[bytes]) -> None:
        """A message with its payload."""
        self._pending.append(QueuedMessage(route, frames))

    def drop_route(self, route: bytes) -> None:
        """Who is there has begun anew."""
        self._pending = [answer for answer in self._pending if answer.route != route]

    def take(self, is_written: bool) -> list[QueuedMessage]:
        """All; while the ledger is not written, what says nothing of it."""
        taken, self._pending = self._pending, []
        if not is_written:
            self._pending = [answer for answer in taken if answer.should_await_commit]
            taken = [answer for answer in taken if not answer.should_await_commit]
        return taken

    def clear(self) -> None:
        """Say nothing of it, ever."""
        self._pending.clear()
