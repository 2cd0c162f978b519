"""What an actor has said and nobody has acknowledged yet: numbering, credit and resending, without a socket.

Called by the client, which puts on the wire what `sendable` yields. The rules are those of docs/protocol.md: *Flow
control*, *Sequence numbers* and *Reconnecting*.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from shoal.wire import PackedSegment


class Outbox:
    """Segments in order of their numbers, the oldest first; a prefix of them is on its way.

    | capacity             | what blocks | who unblocks | close() |
    |----------------------|-------------|--------------|---------|
    | `send_limit`, by the | nothing:    | ack, credit  | none    |
    | client waiting for   | `has_credit`|              |         |
    | credit before `add`  | is asked    |              |         |
    """

    def __init__(self) -> None:
        self._unacknowledged: deque[PackedSegment] = deque()
        self._first_seq = 0  # the number of the oldest kept segment
        self._num_sent = 0  # of the kept ones, in this session
        self.send_limit = 0

    def __len__(self) -> int:
        return len(self._unacknowledged)

    @property
    def next_seq(self) -> int:
        """The number of the next segment that is added."""
        return self._first_seq + len(self._unacknowledged)

    @property
    def has_credit(self) -> bool:
        """Whether a segment that is added now may be sent at once."""
        return self.next_seq < self.send_limit

    def add(self, segment: PackedSegment) -> int:
        """Keep a segment until it is acknowledged; returns its number."""
        self._unacknowledged.append(segment)
        return self.next_seq - 1

    def take_sendable(self) -> Iterator[tuple[int, PackedSegment]]:
        """The segments that there is credit for and that have not been sent in this session, now counted as sent."""
        while self._num_sent < len(self._unacknowledged) and self._first_seq + self._num_sent < self.send_limit:
            self._num_sent += 1
            yield self._first_seq + self._num_sent - 1, self._unacknowledged[self._num_sent - 1]

    def acknowledge(self, seq: int) -> None:
        """Everything up to `seq` is settled."""
        while self._unacknowledged and self._first_seq <= seq:
            self._unacknowledged.popleft()
            self._first_seq += 1
            self._num_sent = max(0, self._num_sent - 1)

    def raise_send_limit(self, send_limit: int) -> None:
        """Within a session the limit only grows."""
        self.send_limit = max(self.send_limit, send_limit)

    def begin_session(self, next_seq: int, send_limit: int) -> None:
        """A gateway has everything below `next_seq`; the rest goes on its way again, numbered from there."""
        self.acknowledge(next_seq - 1)
        self._first_seq, self._num_sent, self.send_limit = next_seq, 0, send_limit

    def clear(self) -> None:
        """Forget everything: it was meant for another run."""
        self._unacknowledged.clear()
        self._num_sent = 0
