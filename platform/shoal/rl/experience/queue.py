"""The bounded queue between the gateway and the learner, and the batch of experience that leaves it.

Called by the gateway (put) and by the learner, directly or through Ray (take, acknowledge). Every queued segment leaves
exactly once: acknowledged by the learner, or dropped with a reason in the ledger.
"""

from __future__ import annotations

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
from shoal.weights import decode_tensors, encode_tensors
from shoal.wire.segment import DropReason, Segment

UNWRITABLE_PAUSE_S = 0.5
_EXTRA = "extra."  # before the name of an extra, where a batch is one flat mapping


@dataclass(frozen=True, eq=False)
class ExperienceBatch:
    """S segments laid end to end; N steps in all. Legend: S segments, N = sum of lengths.

    observations [N+S, *obs] (each segment has one more observation than steps), actions [N, *act], rewards [N],
    log_probabilities [N], versions [N], lengths int64 [S], terminated bool [S]; `acknowledge` takes the lease_id.
    extras: the segments' further tensors by name, [S, ...] or [N+S, ...] as they are given for a segment or observation
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

    @classmethod
    def from_segments(cls, lease_id: int, segments: list[Segment]) -> ExperienceBatch:
        """Lay segments end to end."""
        return cls(
            lease_id,
            np.concatenate([segment.observations for segment in segments]),
            np.concatenate([segment.actions for segment in segments]),
            np.concatenate([segment.rewards for segment in segments]),
            np.concatenate([segment.log_probabilities for segment in segments]),
            np.concatenate([segment.versions for segment in segments]),
            np.array([segment.num_steps for segment in segments], np.int64),
            np.array([segment.terminated for segment in segments], np.bool_),
            {name: np.concatenate([segment.extras[name] for segment in segments]) for name in segments[0].extras},
        )

    @property
    def num_steps(self) -> int:
        return len(self.rewards)

    def to_bytes(self) -> bytes:
        """The batch, serialised for another process."""
        extras = {_EXTRA + name: array for name, array in self.extras.items()}
        arrays = {name: each for name, each in vars(self).items() if name != "extras"}
        return encode_tensors({**arrays, **extras, "lease_id": np.array([self.lease_id])})

    @classmethod
    def from_bytes(cls, payload: bytes) -> ExperienceBatch:
        """The inverse of `to_bytes`; the arrays are views of `payload`."""
        arrays = decode_tensors(payload)
        names = [name for name in arrays if name.startswith(_EXTRA)]
        extras = {name.removeprefix(_EXTRA): arrays.pop(name) for name in names}
        return cls(lease_id=int(arrays.pop("lease_id")[0]), extras=extras, **arrays)

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
            self.observations[rows],
            self.actions[steps],
            self.rewards[steps],
            self.log_probabilities[steps],
            self.versions[steps],
            self.lengths[keep],
            self.terminated[keep],
            {name: each[keep if len(each) == len(keep) else rows] for name, each in self.extras.items()},
        )


class BatchRequest(NamedTuple):
    """A learner's request: at least `min_steps`, and all queued segments up to `max_steps` (to within one segment) or
    `max_segments`; after `timeout_s` everything queued, or nothing when `is_patient`. `number` grows with every request
    of one consumer, so that an abandoned request that arrives late takes nothing. `version`, if actors pause: the
    weights that all of the batch must be of."""

    min_steps: int
    max_steps: int
    max_segments: int
    timeout_s: float
    number: int = 0
    is_patient: bool = False
    version: int = 0


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
        self._segments: deque[tuple[ActorKey, Segment]] = deque()
        self._num_steps = 0
        self._newest_take = ("", 0)  # consumer, number
        self._wanted = (0, 0)  # steps, segments: either wakes `take`
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
            self._segments.append((key, segment))
            self._num_steps += segment.num_steps
            self.ledger.record_received(key, seq)
            if self._has_enough(*self._wanted):
                self._arrived.notify()  # not for every segment: needless wake-ups of the learner slow the actors
            return True

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        min_steps, max_steps, max_segments, timeout_s, number, is_patient, version = request
        deadline = time.monotonic() + timeout_s
        with self._arrived:
            if self._newest_take[0] == consumer and number < self._newest_take[1]:
                return None  # a newer request has overtaken this one: its lease is in use
            with suppress(LedgerUnwritable):  # the following lease writes it, or there is none
                self.ledger.revoke_open_leases(consumer)
            self._newest_take = (consumer, number)
            self._wanted = (min_steps, max_segments)
            if version:
                self._await_version(version)
            while not self._closed and not self._has_enough(min_steps, max_segments):
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0:
                    break
                self._arrived.wait(remaining_s)
            if self._newest_take != (consumer, number):
                return None  # abandoned by the learner: a newer request is waiting
            if is_patient and not self._has_enough(min_steps, max_segments):
                return None
            keys, segments = self._pop(max_steps, max_segments)
            if not segments:
                return None
            try:
                lease_id = self.ledger.open_lease(consumer, keys)
            except LedgerUnwritable:
                self._put_back(keys, segments)
                self._arrived.wait_for(
                    lambda: self._closed, UNWRITABLE_PAUSE_S
                )  # otherwise the caller would retry without a pause
                return None
            self.awaited_version, self.num_batches = 0, self.num_batches + 1
        self.on_space_freed()
        return ExperienceBatch.from_segments(lease_id, segments)

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
            return is_mine

    def take_unlearnable(self) -> Counter[ActorKey]:
        """How many segments of each actor had no finite loss, since the last call."""
        with self._arrived:
            taken, self._unlearnable = self._unlearnable, Counter()
            return taken

    def close(self) -> None:
        """Drop the rest as SHUTDOWN and wake `take`. Idempotent. Raises LedgerUnwritable, but closes all the same."""
        with self._arrived:
            self._closed = True
            self.ledger.drop_queued((key for key, _ in self._segments), DropReason.SHUTDOWN)
            self._segments.clear()
            self._num_steps = 0
            self._arrived.notify_all()  # the waiters continue when this lock is released
            self.ledger.commit()

    def count_missing(self, segment_length: int) -> int:
        """How many segments of this length complete the batch that the learner waits for; 0 while it waits for none."""
        with self._arrived:
            min_steps, max_segments = self._wanted
            num_segments = math.ceil((min_steps - self._num_steps) / segment_length)
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
        queued, self._segments = self._segments, deque()
        for key, segment in queued:
            if is_dropped(key, segment):
                self._num_steps -= segment.num_steps
                self.ledger.drop_queued([key], reason)
            else:
                self._segments.append((key, segment))

    def _has_enough(self, min_steps: int, max_segments: int) -> bool:
        return self._num_steps >= min_steps or len(self._segments) >= max_segments

    def _pop(self, max_steps: int, max_segments: int) -> tuple[list[ActorKey], list[Segment]]:
        keys: list[ActorKey] = []
        segments: list[Segment] = []
        num_steps = 0
        while self._segments and num_steps < max_steps and len(segments) < max_segments:
            key, segment = self._segments.popleft()
            keys.append(key)
            segments.append(segment)
            num_steps += segment.num_steps
        self._num_steps -= num_steps
        return keys, segments

    def _put_back(self, keys: list[ActorKey], segments: list[Segment]) -> None:
        self._segments.extendleft(reversed(list(zip(keys, segments, strict=True))))
        self._num_steps += sum(segment.num_steps for segment in segments)
