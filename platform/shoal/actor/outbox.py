"""An actor's unacknowledged segments: numbering, credit and resending, without a socket.

Called by the client, which sends the segments of `take_sendable`. The rules are in docs/protocol.md: *Flow control*,
*Sequence numbers* and *Reconnecting*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shoal.wire import PackedSegment


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
        self._first_seq, self._num_sent, self.send_limit = next_seq, 0, send_limit

    def clear(self) -> None:
        """Drop everything: it belongs to another run."""
        self._unacknowledged.clear()
        self._num_sent = self.num_acknowledged = 0
