"""The batches of one incarnation of a learner: it leases one at a time, and acknowledges it.

Called by the learner. Knows no algorithm.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from shoal.errors import Closed
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceSource
from shoal.wire import DropReason

POLL_S = 1.0  # how long a learner waits for experience before it checks whether to stop


class BatchLease:
    """The lease of the newest batch. `consumer` names this incarnation: the queue revokes the leases of earlier ones.

    request:       what the newest batch was asked for with; `position`: up to which the log was learnt
    outcomes:      what `acknowledge` has still to report
    is_superseded: another incarnation of this learner has taken over
    """

    def __init__(self, source: ExperienceSource, request: BatchRequest) -> None:
        self.consumer = f"learner-{os.getpid()}-{time.time_ns()}"
        self._source = source
        self.request = request
        self._timeout_s = request.timeout_s
        self._waiting_since: float | None = None  # for the next batch, by time.monotonic()
        self.outcomes: tuple[int, Sequence[DropReason | None], Sequence[float]] | None = None
        self.is_superseded = False

    def take(self, version: int, max_steps: int) -> ExperienceBatch | None:
        """A batch, or None after POLL_S, so that stopping or pausing does not wait for all of the timeout. version: the
        weights that all of it must be of, if actors pause; otherwise 0"""
        now = time.monotonic()
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        left_s = self._waiting_since + self._timeout_s - now
        is_patient = left_s > POLL_S
        self.request = self.request._replace(
            number=self.request.number + 1,
            timeout_s=POLL_S if is_patient else max(0.0, left_s),
            is_patient=is_patient,
            version=version,
            max_steps=max_steps,
        )
        batch = self._source.take(self.consumer, self.request)
        if batch is not None or not is_patient:
            self._waiting_since = None
        return batch

    def set_outcomes(
        self, batch: ExperienceBatch, outcomes: Sequence[DropReason | None], evidence: Sequence[float]
    ) -> None:
        """Set what `acknowledge` reports: the outcome of each segment, and the evidence against its actor."""
        self.outcomes = (batch.lease_id, outcomes, evidence)
        position = max(self.request.position, batch.position)
        self.request = self.request._replace(position=position, lease=batch.lease_id)

    def acknowledge(self) -> None:
        """Report the outcomes of the newest batch. Raises LedgerUnwritable when that cannot be recorded now: try again.

        Raises Closed when another incarnation of this learner has taken over.
        """
        assert self.outcomes is not None
        is_mine = self._source.acknowledge(*self.outcomes)
        self.outcomes = None
        if not is_mine:
            self.is_superseded = True
            raise Closed("another life of this learner has taken over")
