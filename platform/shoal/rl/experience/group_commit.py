"""With `gateway.durable: store`: segments are acknowledged, and may be learnt, once their group is in the store.

One upload is on its way while the next group fills. A gateway that starts again, also on another host, queues what
was acknowledged and not yet learnt. Called by the gateway.
"""

from __future__ import annotations

import logging
import time
from collections import Counter

from shoal.rl.experience.queue import ExperienceQueue
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.experience.segment_log import Group, SegmentLog
from shoal.store import KeyTaken, Mirror

GROUP_INTERVAL_S = 0.1  # between two uploads, while actors have credit for more
COUNTS_INTERVAL_S = 1.0  # until counts are uploaded for which no actor waits
RETRY_S = 1.0
GROUPS_PER_FULL = 64
CLOSE_TIMEOUT_S = 10.0

_log = logging.getLogger(__name__)


class GroupCommit:
    """Uploads what a queue receives, as groups of segments and accounts.

    | capacity        | what blocks | who unblocks | close()                                       |
    |-----------------|-------------|--------------|-----------------------------------------------|
    | that of the     | nothing:    | an upload    | uploads the rest, within CLOSE_TIMEOUT_S,      |
    | queue, segments | no credit   |              | ends the thread                               |

    num_uploaded: the number of the newest group that is there, of this process
    """

    def __init__(self, log: SegmentLog, queue: ExperienceQueue) -> None:
        """Claim the log, and fill the queue and its ledger from it. Raises StoreError, RunError."""
        self._log, self._queue = log, queue
        recovered = log.recover()
        ledger = queue.ledger
        if recovered.ledger is not None:
            ledger.restore(recovered.ledger, Counter(each.key for each in recovered.segments))
        # A log that was removed has positions that a learner has seen: those of a new one are above them.
        queue.begin_log(recovered.segments, recovered.next_position or time.time_ns() // 1000)
        self._acknowledged = {key: account.next_seq for key, account in ledger.get_accounts().items()}
        self._filling, self.num_uploaded = 1, 0  # numbers of groups of this process
        self._is_awaited = False  # an acknowledgement waits for the group that is filling
        self._since_full, self._counted_at = GROUPS_PER_FULL, time.monotonic()
        self._uploading: tuple[int, Group, dict[ActorKey, int]] | None = None
        self._is_closed = False
        queue.on_closed = self.close
        self._mirror = Mirror("group-commit", self._upload_next, GROUP_INTERVAL_S, RETRY_S)

    def await_group(self) -> int:
        """The number of the group with all that the ledger has now; `num_uploaded` reaches it."""
        with self._queue.ledger.lock:
            self._is_awaited = True
            return self._filling

    @property
    def is_alive(self) -> bool:
        return self._mirror.is_alive or self._is_closed

    @property
    def problem(self) -> str:
        """Why the store takes nothing now; "" where it does."""
        return self._mirror.problem

    def get_acknowledged(self, key: ActorKey) -> int:
        """The sequence number after the last segment of an actor that is in the store."""
        return self._acknowledged.get(key, 0)

    def hurry_if(self, open_credit: int) -> None:
        """Upload as soon as the present upload has ended, if more segments wait than may still come. open_credit: of
        all sessions"""
        if 0 < self._queue.num_unlogged >= open_credit:
            self._mirror.wake()

    def close(self) -> None:
        """Upload the rest, if the store takes it. Idempotent."""
        self._is_closed = True
        self._mirror.close(CLOSE_TIMEOUT_S)

    def _upload_next(self) -> bool:
        """Upload the next group, if there is need of one, or once more the one that did not arrive. False: another
        process has claimed the log."""
        self._uploading = self._uploading or self._take_group()
        if self._uploading is None:
            return True
        number, group, rows = self._uploading
        try:
            self._log.append(group)
        except KeyTaken:
            _log.error("another gateway of this run has taken over: this one acknowledges nothing more")
            return False
        self._uploading = None
        self._since_full = 0 if group.is_full else self._since_full + 1
        self._acknowledged |= rows
        self.num_uploaded = number
        self._queue.admit_logged(group.end)
        if group.is_full:
            self._log.delete_consumed(group.first_queued)  # after an error, the next full group tries again
        return True

    def _take_group(self) -> tuple[int, Group, dict[ActorKey, int]] | None:
        """The next group, its number, and the next sequence numbers of its accounts; None while there is no need."""
        queue, ledger = self._queue, self._queue.ledger
        is_full = self._is_closed or self._since_full >= GROUPS_PER_FULL
        with ledger.lock:
            is_due = ledger.is_changed and time.monotonic() - self._counted_at >= COUNTS_INTERVAL_S
            if not (self._is_awaited or is_due or queue.num_unlogged or self._is_closed):
                return None
            self._is_awaited, self._counted_at = False, time.monotonic()
            number, self._filling = self._filling, self._filling + 1
            unlogged = queue.take_unlogged()
            changes = ledger.take_changes(is_full)
        rows = {(row[0], row[1]): row[2] for row in changes.accounts} if changes else {}
        return number, self._log.make_group(unlogged, changes, is_full), rows
