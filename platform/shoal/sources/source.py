"""The seam behind which messages come from: a broker, files, a database, a test.

Called by the Loader, through `MessageDataset`, and by the loop of the stream library. A message is handed out at least
once, and again after a restart unless it was committed. Knows neither torch nor a broker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec


class StreamMessage(Protocol):
    """A message, which its publisher's name and `sequence`, the publisher's own count, identify. "" where the publisher
    does not count: then `sequence` is a hash of topic and payload."""

    @property
    def publisher(self) -> str: ...
    @property
    def sequence(self) -> int: ...


class Sample(msgspec.Struct, frozen=True):
    """A message whose `value` is a sample of a dataset."""

    value: Any
    publisher: str
    sequence: int


class MalformedPayload(msgspec.Struct, frozen=True):
    """A message that cannot be read. It is counted, acknowledged and never learnt.

    origin: its topic, or file and row
    text:   the beginning of its payload
    reason: a word by which such messages are counted
    """

    origin: str
    problem: str
    text: str
    reason: str = "other"


@dataclass(frozen=True)
class Delivery:
    """What one poll has brought, in the order of their delivery.

    num_redelivered: how many the broker marked as sent before
    received_s:      when the last one arrived, by this process's clock: seconds since the epoch
    """

    messages: list[Any] = field(default_factory=list)
    malformed: list[MalformedPayload] = field(default_factory=list)
    num_redelivered: int = 0
    received_s: float = 0.0


@dataclass(frozen=True)
class StreamState:
    """How far a stream is learnt, as of a durable checkpoint.

    num_delivered: deliveries of this process's source that the checkpoint accounts for, malformed ones included
    sequences:     the highest sequence learnt of each publisher
    """

    num_delivered: int = 0
    sequences: Mapping[str, int] = field(default_factory=dict)


class StreamSource(Protocol):
    """Where messages come from.

    A source hands out each message at least once, and again after a restart unless it was committed.
    """

    @property
    def num_delivered(self) -> int:
        """How many messages `poll` has returned so far, malformed ones included."""
        ...

    @property
    def is_exhausted(self) -> bool:
        """Whether no message will ever follow; never true of a live source."""
        ...

    def example(self) -> Any:
        """A message of the stream, which is not consumed. Raises DataError when none comes."""
        ...

    def open(self, state: StreamState) -> None:
        """Begin to deliver what follows `state`; may deliver earlier messages again."""
        ...

    def poll(self, max_messages: int, timeout_s: float) -> Delivery:
        """The messages that are there, at most `max_messages`; waits up to `timeout_s` for the first one."""
        ...

    def commit(self, state: StreamState) -> None:
        """Acknowledge what `state` covers. Called after the checkpoint that contains it is on the disk."""
        ...

    def close(self) -> None:
        """Stop delivering. What was not committed will be delivered to the next one. Idempotent."""
        ...
