"""The seam behind which messages come from: a broker, files, a database, a test; and which of them came before.

Called by the Loader, through `MessageDataset`, and by the loop of the stream library. A message is handed out at least
once, and again after a restart unless it was committed. Knows neither torch nor a broker.
"""

from __future__ import annotations

from collections import OrderedDict
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


WINDOW = 4096  # messages


class Deduplicator:
    """Admits each (publisher, sequence) once.

    Of each publisher it has the highest sequence and one bit for each of the `WINDOW` before it: the anti-replay window
    of IPsec (RFC 4303, section 3.4.3). A message may arrive late by up to that many; an earlier one counts as a
    duplicate, and as `num_stale`: a publisher that begins to count again needs a new name. Messages without a publisher
    are compared by hash with the last `WINDOW` of their kind.
    """

    def __init__(self, window: int = WINDOW) -> None:
        self._window, self._mask = window, (1 << window) - 1
        self._seen: dict[str, tuple[int, int]] = {}  # publisher -> highest sequence, bits: bit i is `highest - i`
        self._hashes: OrderedDict[int, None] = OrderedDict()
        self.num_duplicates = self.num_stale = self.num_gaps = 0

    @property
    def sequences(self) -> dict[str, int]:
        """The highest sequence of each publisher."""
        return {publisher: highest for publisher, (highest, _) in self._seen.items()}

    def admit(self, message: StreamMessage, is_first: bool = False) -> bool:
        """Whether it is new; from now on it is not. is_first: it is, though its hash may be that of another one"""
        if is_first:
            self._hashes.pop(message.sequence, None)
        if message.publisher:
            is_new = self._admit_counted(message)
        elif is_new := message.sequence not in self._hashes:
            self._hashes[message.sequence] = None
            if len(self._hashes) > self._window:
                self._hashes.popitem(last=False)
        self.num_duplicates += not is_new
        return is_new

    def _admit_counted(self, message: StreamMessage) -> bool:
        highest, bits = self._seen.get(message.publisher, (message.sequence - 1, 0))
        ahead = message.sequence - highest
        if ahead > 0:
            self.num_gaps += ahead - 1
            shifted = (bits << ahead) & self._mask if ahead < self._window else 0
            self._seen[message.publisher] = (message.sequence, shifted | 1)
            return True
        if -ahead >= self._window:
            self.num_stale += 1
            return False
        if bits >> -ahead & 1:
            return False
        self.num_gaps -= self.num_gaps > 0  # it was counted as missing
        self._seen[message.publisher] = (highest, bits | 1 << -ahead)
        return True

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return {
            "seen": {publisher: [highest, f"{bits:x}"] for publisher, (highest, bits) in self._seen.items()},
            "hashes": [f"{digest:x}" for digest in self._hashes],
            "counts": [self.num_duplicates, self.num_stale, self.num_gaps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Become the one that made `state`."""
        self._seen = {publisher: (highest, int(bits, 16)) for publisher, (highest, bits) in state["seen"].items()}
        self._hashes = OrderedDict((int(digest, 16), None) for digest in state["hashes"])
        self.num_duplicates, self.num_stale, self.num_gaps = state["counts"]
