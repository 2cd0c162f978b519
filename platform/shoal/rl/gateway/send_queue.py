"""The gateway's outgoing messages, in order. Messages about the ledger wait until it is written.

Owned by the gateway's thread; touches no socket.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shoal.wire import encode
from shoal.wire.messages import Ack, ErrorMessage, Message, Pong

LEDGER_INDEPENDENT = (Pong, ErrorMessage)


class QueuedMessage(NamedTuple):
    """The frames of a message, and its receiver. group: it waits until this one is in the store; 0: for none"""

    route: bytes
    frames: Sequence[bytes]
    should_await_commit: bool = True
    group: int = 0


class SendQueue:
    """Outgoing messages, taken all at once, or without those that wait.

    await_group: gives the number of the group for which the acknowledgements of now wait; 0: none
    """

    def __init__(self, await_group: Callable[[], int] = lambda: 0) -> None:
        self._pending: list[QueuedMessage] = []
        self._await_group = await_group

    def add(self, route: bytes, message: Message) -> None:
        """A message without a payload."""
        group = self._await_group() if isinstance(message, Ack) else 0
        awaits_commit = not isinstance(message, LEDGER_INDEPENDENT)
        self._pending.append(QueuedMessage(route, [encode(message)], awaits_commit, group))

    def add_frames(self, route: bytes, frames: Sequence[bytes]) -> None:
        """A message with its payload."""
        self._pending.append(QueuedMessage(route, frames))

    def drop_route(self, route: bytes) -> None:
        """Drop the messages of this connection, whose session starts anew."""
        self._pending = [answer for answer in self._pending if answer.route != route]

    def take(self, is_written: bool, num_groups: int = 0) -> list[QueuedMessage]:
        """The messages that may be sent; while the ledger is not written, only those that do not depend on it.
        num_groups: in the store"""
        pending, self._pending = self._pending, []
        taken: list[QueuedMessage] = []
        for answer in pending:
            is_waiting = answer.group > num_groups or (answer.should_await_commit and not is_written)
            (self._pending if is_waiting else taken).append(answer)
        return taken

    def clear(self) -> None:
        """Drop everything."""
        self._pending.clear()
