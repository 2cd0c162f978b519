"""What a gateway is to send, in order. What speaks of the ledger waits until that has been written.

Owned by the gateway's thread; touches no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shoal.wire import encode
from shoal.wire.messages import Error, Message, Pong

OF_NO_LEDGER = (Pong, Error)


class Answer(NamedTuple):
    """The frames of a message, and who is to get it."""

    route: bytes
    frames: Sequence[bytes]
    is_of_ledger: bool = True


class Answers:
    """A list that is taken whole, or without what speaks of the ledger."""

    def __init__(self) -> None:
        self._waiting: list[Answer] = []

    def add(self, route: bytes, message: Message) -> None:
        """A message without a payload."""
        self._waiting.append(Answer(route, [encode(message)], not isinstance(message, OF_NO_LEDGER)))

    def add_frames(self, route: bytes, frames: Sequence[bytes]) -> None:
        """A message with its payload."""
        self._waiting.append(Answer(route, frames))

    def forget(self, route: bytes) -> None:
        """Who is there has begun anew."""
        self._waiting = [answer for answer in self._waiting if answer.route != route]

    def take(self, is_written: bool) -> list[Answer]:
        """All; while the ledger is not written, what says nothing of it."""
        taken, self._waiting = self._waiting, []
        if not is_written:
            self._waiting = [answer for answer in taken if answer.is_of_ledger]
            taken = [answer for answer in taken if not answer.is_of_ledger]
        return taken

    def clear(self) -> None:
        """Say nothing of it, ever."""
        self._waiting.clear()
