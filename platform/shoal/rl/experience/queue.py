"""The bounded queue between the gateway and the learner, and the batch of experience that leaves it.

Called by the gateway (put) and by the learner, directly or through Ray (take, acknowledge). Every queued segment leaves
exactly once: acknowledged by the learner, or dropped with a reason in the ledger.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import NamedTuple, Protocol

import numpy as np

from shoal.errors import Closed, LedgerUnwritable
from shoal.rl.experience.quarantine import EvidenceTable
from shoal.rl.experience.segment_ledger import ActorKey, Ledger
from shoal.rl.experience.segment_log import Positioned, Unlogged
from shoal.weights import decode_tensors, encode_tensors
from shoal.wire.segment import TENSORS, DropReason, Segment

MEAN_SEGMENTS = 32
UNWRITABLE_PAUSE_S = 0.5
_NUMBERS = ("lease_id", "position")
_EXTRA = "extra."  # before the name of an extra, where a batch is one flat mapping


@dataclass(frozen=True, eq=False)
class ExperienceBatch:
    """S segments laid end to end; N steps in all. Legend: S segments, N = sum of lengths.

    observations [N+S, *obs] (each segment has one more observation than steps), actions [N, *act], rewards [N],
    log_probabilities [N], versions [N], lengths int64 [S], terminated bool [S]; `acknowledge` takes the lease_id.
    extras: the segments' further tensors by name, [S, ...] or [N+S, ...] as they are given for a segment or observation
    position: of its last segment in the log of the run; 0 without a log
    """

    lease_id: int
    observations: np.ndarray
    actions: np.ndarray
    rewards: np.ndarray
    log_probabilities: np.ndarray
    versions: np.ndarray
    lengths: np.ndarray
    terminated: np.ndarray
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)
    position: int = 0

    @classmethod
    def from_segments(cls, lease_id: int, segments: list[Segment], position: int = 0) -> ExperienceBatch:
        """Lay segments end to end."""
        return cls(
            lease_id,
            **{name: np.concatenate([getattr(segment, name) for segment in segments]) for name in TENSORS},
            lengths=np.array([segment.num_steps for segment in segments], np.int64),
            terminated=np.array([segment.terminated for segment in segments], np.bool_),
            extras={name: np.concatenate([each.extras[name] for each in segments]) for name in segments[0].extras},
            position=position,
        )

    @property
    def num_steps(self) -> int:
        return len(self.rewards)

    def to_bytes(self) -> bytes:
        """The batch, serialised for another process."""
        extras = {_EXTRA + name: array for name, array in self.extras.items()}
        arrays = {name: each for name, each in vars(self).items() if name != "extras"}
        numbers = {name: np.array([getattr(self, name)]) for name in _NUMBERS}
        return encode_tensors({**arrays, **extras, **numbers})

    @classmethod
    def from_bytes(cls, payload: bytes) -> ExperienceBatch:
        """The inverse of `to_bytes`; the arrays are views of `payload`."""
        arrays = decode_tensors(payload)
        names = [name for name in arrays if name.startswith(_EXTRA)]
        extras = {name.removeprefix(_EXTRA): arrays.pop(name) for name in names}
        numbers = {name: int(arrays.pop(name)[0]) for name in _NUMBERS}
        return cls(extras=extras, **numbers, **arrays)  # type: ignore[arg-type]

    def oldest_versions(self) -> np.ndarray:
        """The oldest weights version in each segment. [S]"""
        starts = np.concatenate([[0], np.cumsum(self.lengths)[:-1]])
        oldest: np.ndarray = np.minimum.reduceat(self.versions, starts)
        return oldest

    def select(self, keep: np.ndarray) -> ExperienceBatch:
        """The batch without the segments where `keep` (bool [S]) is false."""
        steps = np.repeat(keep, self.lengths)
        rows = np.repeat(keep, self.lengths + 1)
        return ExperienceBatch(
            self.lease_id,
            **{name: getattr(self, name)[rows if name == "observations" else steps] for name in TENSORS},
            lengths=self.lengths[keep],
            terminated=self.terminated[keep],
            extras={name: each[keep if len(each) == len(keep) else rows] for name, each in self.extras.items()},
            position=self.position,
        )


class BatchRequest(NamedTuple):
    """A learner's request: at least `min_steps`, and all queued segments up to `max_steps` (to within one segment) or
    `max_segments`; after `timeout_s` everything queued, or nothing when `is_patient`. `number` grows with every request
    of one consumer, so that an abandoned request that arrives late takes nothing. `version`, if actors pause: the
    weights that all of the batch must be of. `position` and `lease`: of the newest batch that has been learnt."""

    min_steps: int
    max_steps: int
    max_segments: int
    timeout_s: float
    number: int = 0
    is_patient: bool = False
    version: int = 0
    position: int = 0
    lease: int = 0


class ExperienceSource(Protocol):
    """Where a learner gets experience. Implemented by ExperienceQueue and by the client of Ray's remote gateway."""

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        """Lease a batch, or None when nothing came in time. `consumer` names one incarnation of the learner: the leases
        of any other are revoked."""
        ...

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float] = ()) -> bool:
        """Close a lease: each of its S segments was dropped for a reason, or consumed (None). `evidence`, if given: of
        each, against its actor (see `quarantine`).

        Safe to repeat. False: the lease was revoked, because another incarnation of the learner has taken over. Raises
        LedgerUnwritable when it cannot be recorded now: retry.
        """
        ...


class ExperienceQueue:
    """Segments on their way to the learner, first in, first out.

    | capacity            | what blocks             | who unblocks               | close()                           |
    |---------------------|-------------------------|----------------------------|-----------------------------------|
    | `capacity` segments | `take`, up to timeout_s | `put`, or `close()`        | the rest is dropped as SHUTDOWN,  |
    |                     | `put` never: False      |                            | `take` gives None, `put` raises   |
    """

    def __init__(self, capacity: int, ledger: Ledger) -> None:
        self.capacity = capacity
        self.ledger = ledger
        self.on_space_freed: Callable[[], None] = lambda: None  # called when there may be credit to grant
        self._arrived = Condition(ledger.lock)  # one lock: the ledger and the queue always agree
        self._segments: deque[Positioned] = deque()
        self.num_steps = 0
        self.mean_steps, self._num_put = 0.0, 0  # of the newest segments; 0 before the first
        self._num_ready = self._ready_steps = 0  # of those, the first ones: what may be taken
        self._next_position = 1
        self._logged_end: int | None = None  # with a log: segments of lower positions are ready; without, all
        self._unlogged: list[Positioned] = []
        self._dropped: list[int] = []  # positions, since `take_unlogged`
        self.on_closed: Callable[[], object] = lambda: None
        self._newest_take = ("", 0)  # consumer, number
        self._wanted = (0, 0)  # steps, segments: either wakes `take`
        self.is_awaited = False  # `take` waits for more
        self.awaited_version = 0  # of the batch that the learner waits for; 0: none, or actors do not pause
        self.num_batches = 0  # that were taken
        self._closed = False
        self._evidence = EvidenceTable()
        self._unlearnable = Counter[ActorKey]()

    def __len__(self) -> int:
        return len(self._segments)

    def put(self, key: ActorKey, seq: int, segment: Segment) -> bool:
        """Queue and count a segment; False, counting nothing, when the queue is full. Raises Closed."""
        with self._arrived:
            if self._closed:
                raise Closed("the experience queue is closed")
            if len(self._segments) >= self.capacity:
                return False
            entry = Positioned(self._next_position, key, seq, segment)
            self._next_position += 1
            self._segments.append(entry)
            self.num_steps += segment.num_steps
            self._num_put = min(self._num_put + 1, MEAN_SEGMENTS)
            self.mean_steps += (segment.num_steps - self.mean_steps) / self._num_put
            self.ledger.record_received(key, seq)
            if self._logged_end is not None:
                self._unlogged.append(entry)
            else:
                self._admit([entry])
            return True

    def begin_log(self, segments: Sequence[Positioned], next_position: int) -> None:
        """Queue segments of a log, in their order. Later ones wait for `admit_logged`."""
        with self._arrived:
            self._next_position = self._logged_end = next_position
            self._segments.extend(segments)
            self.num_steps += sum(each.segment.num_steps for each in segments)
            self._admit(segments)

    @property
    def num_unlogged(self) -> int:
        """How many segments wait for `take_unlogged`."""
        return len(self._unlogged)

    def take_unlogged(self) -> Unlogged:
        """What has come and gone since the last call, under the ledger's lock."""
        first_queued = self._segments[0].position if self._segments else self._next_position
        taken = Unlogged(self._unlogged, first_queued, self._dropped, self._next_position)
        self._unlogged, self._dropped = [], []
        return taken

    def admit_logged(self, end: int) -> None:
        """Segments of positions below `end` may be taken."""
        with self._arrived:
            self._logged_end = end
            waiting = itertools.islice(self._segments, self._num_ready, None)
            self._admit([each for each in waiting if each.position < end])
        self.on_space_freed()

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        min_steps, max_steps, max_segments, timeout_s, number, is_patient, version, *_ = request
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            if self._newest_take[0] == consumer and number < self._newest_take[1]:
                return None  # a newer request has overtaken this one: its lease is in use
            if self._logged_end is not None:  # count what was acknowledged to a gateway that died before it logged that
                seen = []
                while self._segments and self._segments[0].position <= request.position:
                    seen.append(self._remove_first())
                self.ledger.acknowledge_seen(consumer, request.lease, [each.key for each in seen])
            with suppress(LedgerUnwritable):  # the following lease writes it, or there is none
                self.ledger.revoke_open_leases(consumer)
            self._newest_take = (consumer, number)
            self._wanted = (min_steps, max_segments)
            if version:
                self._await_version(version)
            self.is_awaited = not self._has_enough(min_steps, max_segments)
            if self.is_awaited and not version:
                self.on_space_freed()  # the pace allows more
            while not self._closed and not self._has_enough(min_steps, max_segments):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                self._arrived.wait(remaining_s)
            self.is_awaited = False
            if self._newest_take != (consumer, number):
                return None  # abandoned by the learner: a newer request is waiting
            if is_patient and not self._has_enough(min_steps, max_segments):
                return None
            popped = self._pop(max_steps, max_segments)
            if not popped:
                return None
            try:
                lease_id = self.ledger.open_lease(consumer, [each.key for each in popped])
            except LedgerUnwritable:
                self._segments.extendleft(reversed(popped))
                self.num_steps += sum(each.segment.num_steps for each in popped)
                self._admit(popped)
                self._arrived.wait_for(lambda: self._closed, UNWRITABLE_PAUSE_S)  # the caller retries without a pause
                return None
            self.awaited_version, self.num_batches = 0, self.num_batches + 1
        self.on_space_freed()
        position = 0 if self._logged_end is None else popped[-1].position
        return ExperienceBatch.from_segments(lease_id, [each.segment for each in popped], position)

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float] = ()) -> bool:
        with self._arrived:
            keys = self.ledger.get_leased(lease_id)
            is_mine = self.ledger.acknowledge(lease_id, outcomes)
            accused = self._evidence.add(keys, evidence) if is_mine and keys and len(evidence) else {}
            for actor_id, reason in accused.items():
                self.ledger.quarantine(actor_id, reason)
            if is_mine:  # of an acknowledgement that is repeated there are no keys
                named = zip(keys, outcomes, strict=False)
                self._unlearnable.update(key for key, outcome in named if outcome is DropReason.NON_FINITE)
            if accused:
                self._drop(lambda key, _: key[0] in accused, DropReason.QUARANTINED)
        self.on_space_freed()  # for who waits until its segments are learnt
        return is_mine

    def take_unlearnable(self) -> Counter[ActorKey]:
        """How many segments of each actor had no finite loss, since the last call."""
        with self._arrived:
            taken, self._unlearnable = self._unlearnable, Counter()
            return taken

    def close(self, finished: bool = False) -> None:
        """Drop the rest as SHUTDOWN and wake `take`. Idempotent. Raises LedgerUnwritable, but closes all the same.

        finished: the run is over, so that nobody will acknowledge what is leased: a learner that has failed had it
        """
        try:
            with self._arrived:
                self._closed = True
                self.ledger.drop_queued((each.key for each in self._segments), DropReason.SHUTDOWN)
                self._segments.clear()
                self.num_steps = self._num_ready = self._ready_steps = 0
                self._arrived.notify_all()  # the waiters continue when this lock is released
                if finished:
                    self.ledger.revoke_open_leases("")
                self.ledger.commit()
        finally:
            self.on_closed()

    def count_missing(self, segment_length: int) -> int:
        """How many segments of this length complete the batch that the learner waits for; 0 while it waits for none."""
        with self._arrived:
            min_steps, max_segments = self._wanted
            num_segments = math.ceil((min_steps - self.num_steps) / segment_length)
            num_missing = max(0, min(num_segments, max_segments - len(self._segments)))
            return num_missing if self.awaited_version else 0

    def _await_version(self, version: int) -> None:
        """Actors pause between two batches: drop what came too late for the last one, and let them act."""
        if version == self.awaited_version:
            return
        self.awaited_version = version
        self._drop(lambda _, segment: segment.oldest_version < version, DropReason.STALE_CONSUMPTION)
        self.on_space_freed()  # the gateway grants credit for this batch

    def _drop(self, is_dropped: Callable[[ActorKey, Segment], bool], reason: DropReason) -> None:
        dropped = [each for each in self._segments if is_dropped(each.key, each.segment)]
        self.ledger.drop_queued([each.key for each in dropped], reason)
        positions = {each.position for each in dropped}
        if self._logged_end is not None:
            self._dropped += positions
        queued, num_ready = self._segments, self._num_ready
        self._segments = deque(each for each in queued if each.position not in positions)
        ready = [each for each in itertools.islice(queued, num_ready) if each.position not in positions]
        self.num_steps = sum(each.segment.num_steps for each in self._segments)
        self._num_ready, self._ready_steps = len(ready), sum(each.segment.num_steps for each in ready)

    def _admit(self, segments: Sequence[Positioned]) -> None:
        """The next ones are ready."""
        self._num_ready += len(segments)
        self._ready_steps += sum(each.segment.num_steps for each in segments)
        if self._has_enough(*self._wanted):
            self._arrived.notify()  # not for every segment: needless wake-ups of the learner slow the actors

    def _has_enough(self, min_steps: int, max_segments: int) -> bool:
        return self._ready_steps >= min_steps or self._num_ready >= max_segments

    def _pop(self, max_steps: int, max_segments: int) -> list[Positioned]:
        popped: list[Positioned] = []
        num_steps = 0
        while self._num_ready and num_steps < max_steps and len(popped) < max_segments:
            popped.append(self._remove_first())
            num_steps += popped[-1].segment.num_steps
        return popped

    def _remove_first(self) -> Positioned:
        removed = self._segments.popleft()
        num_steps = removed.segment.num_steps
        self._num_ready, self._ready_steps = self._num_ready - 1, self._ready_steps - num_steps
        self.num_steps -= num_steps
        return removed
