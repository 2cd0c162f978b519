"""The gateway's outgoing messages, in order. Messages about the ledger wait until it is written.

Owned by the gateway's thread; touches no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.wire import encode
from shoal.wire.messages import ErrorMessage, Message, Pong

LEDGER_INDEPENDENT = (Pong, ErrorMessage)


class QueuedMessage(NamedTuple):
    """The frames of a message, and its receiver."""

    route: bytes
    frames: Sequence[bytes]
    should_await_commit: bool = True


class SendQueue:
    """Outgoing messages, taken all at once, or without those about the ledger."""

    def __init__(self) -> None:
        self._pending: list[QueuedMessage] = []

    def add(self, route: bytes, message: Message) -> None:
        """A message without a payload."""
        self._pending.append(QueuedMessage(route, [encode(message)], not isinstance(message, LEDGER_INDEPENDENT)))

    def add_frames(self, route: bytes, frames: Sequence[bytes]) -> None:
        """A message with its payload."""
        self._pending.append(QueuedMessage(route, frames))

    def drop_route(self, route: bytes) -> None:
        """Drop the messages of this connection, whose session starts anew."""
        self._pending = [answer for answer in self._pending if answer.route != route]

    def take(self, is_written: bool) -> list[QueuedMessage]:
        """All messages; while the ledger is not written, only those that do not depend on it."""
        taken, self._pending = self._pending, []
        if not is_written:
            self._pending = [answer for answer in taken if answer.should_await_commit]
            taken = [answer for answer in taken if not answer.should_await_commit]
        return taken

    def clear(self) -> None:
        """Drop everything."""
        self._pending.clear()
