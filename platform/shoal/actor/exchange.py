"""What a client exchanges, without a socket: the segments that are not acknowledged, and the weights that have come.

Owned by the client, which hands it the messages, and sends the segments of `take_sendable` and what it asks for. The
rules of the outbox are in docs/protocol.md: *Flow control*, *Sequence numbers* and *Reconnecting*.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterator

import numpy as np

from shoal.channel.memory import IS_AVAILABLE, MemoryAddress, map_memory
from shoal.errors import ProtocolViolation
from shoal.weights import decode_tensors
from shoal.weights.shared_memory import view_tensors
from shoal.wire import PackedSegment
from shoal.wire.messages import OpponentMessage, Pull, WeightsMessage

Tensors = dict[str, np.ndarray]


class Outbox:
    """Segments in order of their numbers, the oldest first; a prefix of them is in flight.

    | capacity             | what blocks | who unblocks | close() |
    |----------------------|-------------|--------------|---------|
    | `send_limit`, by the | nothing:    | ack, credit  | none    |
    | client waiting for   | `has_credit`|              |         |
    | credit before `add`  | is asked    |              |         |
    """

    def __init__(self) -> None:
        self._unacknowledged: deque[PackedSegment] = deque()
        self._first_seq = 0  # the number of the oldest segment
        self._num_sent = 0  # of these segments, in this session
        self.send_limit = self.num_acknowledged = 0  # by the present run

    def __len__(self) -> int:
        return len(self._unacknowledged)

    @property
    def next_seq(self) -> int:
        """The number of the next segment to be added."""
        return self._first_seq + len(self._unacknowledged)

    @property
    def has_credit(self) -> bool:
        """Whether a segment added now may be sent at once."""
        return self.num_credits > 0

    @property
    def num_credits(self) -> int:
        """How many segments added now may be sent at once."""
        return max(0, self.send_limit - self.next_seq)

    def add(self, segment: PackedSegment) -> int:
        """Keep a segment until it is acknowledged; returns its number."""
        self._unacknowledged.append(segment)
        return self.next_seq - 1

    def take_sendable(self) -> Iterator[tuple[int, PackedSegment]]:
        """The unsent segments within the credit, which now count as sent in this session."""
        while self._num_sent < len(self._unacknowledged) and self._first_seq + self._num_sent < self.send_limit:
            self._num_sent += 1
            yield self._first_seq + self._num_sent - 1, self._unacknowledged[self._num_sent - 1]

    def acknowledge(self, seq: int) -> None:
        """Remove all segments up to `seq`."""
        while self._unacknowledged and self._first_seq <= seq:
            self._unacknowledged.popleft()
            self.num_acknowledged += 1
            self._first_seq += 1
            self._num_sent = max(0, self._num_sent - 1)

    def discard(self, seq: int) -> bool:
        """Remove one segment that the gateway can never count; the next session numbers the later ones."""
        position = seq - self._first_seq
        if not 0 <= position < len(self._unacknowledged):
            return False
        del self._unacknowledged[position]
        return True

    def raise_send_limit(self, send_limit: int) -> None:
        """Raise the limit; within a session it only grows."""
        self.send_limit = max(self.send_limit, send_limit)

    def begin_session(self, next_seq: int, send_limit: int) -> None:
        """Remove all segments below `next_seq`, which the gateway has; the rest is sent again, numbered from there."""
        self.acknowledge(next_seq - 1)
        self._first_seq = next_seq
        self._num_sent = 0
        self.send_limit = send_limit

    def clear(self) -> None:
        """Drop everything: it belongs to another run."""
        self._unacknowledged.clear()
        self._num_sent = self.num_acknowledged = 0


class ReceivedWeights:
    """The newest version, and the pool of opponents in a run with self-play. The fields are replaced, never changed, so
    that other threads read them without a lock.

    latest:    version and arrays by name, read-only where they are mapped
    opponents: arrays of the pool, by version
    max_bytes: of one version; more is a violation of the protocol
    """

    def __init__(self, max_bytes: int) -> None:
        self.latest: tuple[int, Tensors] | None = None
        self.opponents: dict[int, Tensors] = {}
        self.max_bytes = max_bytes
        self.shares_memory = self._is_gateways = self._has_mapped = self._is_late = False

    def set_machine(self, is_gateways: bool) -> None:
        """Whether this machine is the gateway's, so that its memory can perhaps be mapped."""
        if is_gateways != self._is_gateways:
            # Until a mapping fails, and none has worked.
            self.shares_memory = is_gateways and IS_AVAILABLE
            self._is_gateways = is_gateways
            self._has_mapped = False
            self._is_late = False

    def clear(self) -> None:
        """Another run begins."""
        self.latest, self.opponents = None, {}

    def take(self, message: WeightsMessage, frames: list[bytes]) -> int | None:
        """Take a version, and return it; None where it could not be mapped: then the next one is sent, and where none
        has ever been mapped, all are. Raises ProtocolViolation, WeightsError."""
        if not message.size:
            self._is_late = False
            self.latest = message.version, _decode(message, frames)
            return message.version
        if message.size > self.max_bytes:
            raise ProtocolViolation("too_large", f"weights {message.version}: {message.size} bytes")
        payload = map_memory(MemoryAddress(message.pid, message.fd, message.inode, message.size))
        if payload is None:
            self._is_late, self.shares_memory = True, self._has_mapped
            return None
        self._has_mapped = True
        self.latest = message.version, view_tensors(payload)
        return message.version

    def take_opponent(self, message: OpponentMessage, frames: list[bytes]) -> None:
        """Take a member of the pool, and forget those that have left it. Raises as `take`."""
        known = {**self.opponents, message.version: _decode(message, frames)}
        members = message.members or known.keys()
        self.opponents = {version: tensors for version, tensors in known.items() if version in members}

    def make_pull(self) -> Pull:
        """The request for a newer version; one is always open."""
        return Pull(self.latest[0] if self.latest else 0, self.shares_memory and not self._is_late)


def _decode(message: WeightsMessage | OpponentMessage, frames: list[bytes]) -> Tensors:
    if len(frames) != 2 or hashlib.sha256(frames[1]).hexdigest() != message.sha256:
        raise ProtocolViolation("malformed", f"weights {message.version}: the checksum does not match")
    return decode_tensors(frames[1])
