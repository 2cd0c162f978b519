"""The gateway's outgoing messages, in order. Messages about the ledger wait until it is written.

Owned by the gateway's thread; touches no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.rl.experience.group_commit import GroupCommit
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
    """Outgoing messages, taken all at once, or without those that wait. group_commit: acknowledgements wait for it"""

    def __init__(self, group_commit: GroupCommit | None) -> None:
        self._group_commit = group_commit
        self._pending: list[QueuedMessage] = []

    def add(self, route: bytes, message: Message) -> None:
        """Queue a message without a payload."""
        group = self._group_commit.await_group() if self._group_commit and isinstance(message, Ack) else 0
        awaits_commit = not isinstance(message, LEDGER_INDEPENDENT)
        self._pending.append(QueuedMessage(route, [encode(message)], awaits_commit, group))

    def add_frames(self, route: bytes, frames: Sequence[bytes]) -> None:
        """Queue a message with its payload."""
        self._pending.append(QueuedMessage(route, frames))

    def drop_route(self, route: bytes) -> None:
        """Drop the messages of this connection, which begins another session."""
        self._pending = [message for message in self._pending if message.route != route]

    def take(self, is_written: bool) -> list[QueuedMessage]:
        """The messages that may be sent; while the ledger is not written, only those that do not depend on it."""
        num_groups = self._group_commit.num_uploaded if self._group_commit else 0
        pending, self._pending = self._pending, []
        taken: list[QueuedMessage] = []
        for message in pending:
            is_waiting = message.group > num_groups or (message.should_await_commit and not is_written)
            (self._pending if is_waiting else taken).append(message)
        return taken

    def clear(self) -> None:
        self._pending.clear()
