"""Which segments are queued, and why the others are dropped.

Called by the gateway in its thread, for the segments that actors send and for those that are assembled here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.errors import Closed, InvalidSegment
from shoal.rl.experience.segment_ledger import ActorKey
from shoal.rl.gateway.actor_stats import ActorProgress
from shoal.rl.gateway.sessions import Session
from shoal.rl.gateway.state import GatewayState
from shoal.wire import DropReason, Segment, unpack_segment
from shoal.wire.messages import SegmentMessage


class Admission:
    """Validates segments, counts them in the run's progress, and queues them."""

    def __init__(self, state: GatewayState) -> None:
        self._state, self._queue = state, state.queue

    def admit(
        self, session: Session, message: SegmentMessage, frames: Sequence[bytes]
    ) -> tuple[DropReason | None, str]:
        """Validate and queue. Returns why the segment must be dropped and a detail, or (None, "") when it is queued."""
        state = self._state
        try:
            segment = unpack_segment(message, frames, state.setting.experience, session.behaviour)
            if int(segment.versions.max()) > state.version:
                problem = f"{segment.versions.max()} was never published"
                raise InvalidSegment(DropReason.INVALID_RANGE, "versions", problem)
            for opponent in (segment.opponent, *(each.opponent for each in segment.unrecorded)):
                if opponent and (state.opponents is None or opponent not in state.opponents):
                    problem = f"{opponent} is not in the pool of opponents"
                    raise InvalidSegment(DropReason.INVALID_RANGE, "opponent", problem)
        except InvalidSegment as error:
            detail = f"{error.field}: {error.problem}"
            state.progress.record_rejection(session.progress, error.reason, detail)
            return DropReason(error.reason), detail
        if (reason := self._queue.ledger.quarantined.get(session.key[0])) is not None:
            return DropReason.QUARANTINED, reason
        return self._enqueue(session.key, session.progress, message.seq, segment, session.send_limit)

    def store(self, key: ActorKey, progress: ActorProgress, segment: Segment) -> None:
        """Count a segment that was assembled here, and queue it."""
        seq = self._queue.ledger.get_account(key).next_seq
        reason, _ = self._enqueue(key, progress, seq, segment, seq + 1)
        if reason is not None:
            self._queue.ledger.record_received(key, seq, reason)

    def record_unlearnable(self) -> None:
        """Name the actors whose accepted segments the learner has dropped since the last call."""
        for key, count in self._queue.take_unlearnable().items():
            actor = self._state.actors.find(key) or ActorProgress(*key)
            detail = "segment: within the spec, and its loss is not finite: are its numbers plausible?"
            detail += " If all actors are named, lower algorithm.learning_rate"  # the weights have diverged
            self._state.progress.record_rejection(actor, DropReason.NON_FINITE, detail, count)

    def _enqueue(
        self, key: ActorKey, progress: ActorProgress, seq: int, segment: Segment, send_limit: int
    ) -> tuple[DropReason | None, str]:
        """Count and queue a valid segment, unless it is too old."""
        state = self._state
        if state.episodes is not None:
            version = segment.settings or progress.settings
            state.episodes.add(key, segment, version, state.find_settings(version))
        if segment.behaviour:
            return self._keep(key, progress, seq, segment)
        state.progress.record_segment(progress, segment)
        lag = 0 if state.weights is None else int(state.weights.measure_lag(segment.oldest_version))
        if lag > (max_lag := state.setting.spec.max_version_lag):
            return DropReason.STALE_ADMISSION, f"{lag} versions old, at most {max_lag}"
        if seq >= send_limit:
            return DropReason.OVER_CREDIT, f"the send limit is {send_limit}"
        try:
            queued = self._queue.put(key, seq, segment)
        except Closed:
            return DropReason.SHUTDOWN, "the run is ending"
        return (None, "") if queued else (DropReason.OVER_CREDIT, "the queue is full")

    def _keep(
        self, key: ActorKey, progress: ActorProgress, seq: int, segment: Segment
    ) -> tuple[DropReason | None, str]:
        """Keep a demonstration, which is not the policy's: the run counts neither its steps nor its return."""
        problem, demonstrations = "this run keeps no demonstrations", self._state.demonstrations
        if demonstrations is not None:
            try:
                demonstrations.store(key, seq, segment, self._state.progress.steps)
            except OSError as error:
                problem = str(error)
            else:
                progress.steps += segment.num_steps
                progress.segments += 1
                progress.weights_version = self._state.version  # none of them lags
                self._queue.ledger.record_received(key, seq, DropReason.DEMONSTRATION)
                return None, ""
        self._state.progress.record_rejection(progress, DropReason.NOT_STORED, problem)
        return DropReason.NOT_STORED, problem
