"""The acknowledged experience of a run in a store: groups of segments, each an object, in the order of their numbers.

    000000000017.group    segments, and the accounts of the ledger that have changed since the group before, or all

An object is only ever created, by the number after the last one: of two gateways of one run, the later to create a
number finds it taken. Called by `group_commit`. Never deletes a segment that may still be queued.
"""

from __future__ import annotations

import secrets
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from shoal.atomic_file import require_known_format
from shoal.errors import ConfigError, InvalidSegment, ProtocolViolation, RunError
from shoal.rl.experience.segment_ledger import ActorKey, LedgerChanges
from shoal.store import KeyTaken, Store, open_store, store_variable
from shoal.wire import ExperienceSpec, MessageLimits, Segment, decode, pack_segment, unpack_segment
from shoal.wire.messages import SegmentMessage

FOLDER = "experience"  # of a run, in the store
FORMAT = 1
MAX_CLAIMS = 100  # while the gateway before still writes
_SUFFIX = ".group"
_LIMITS = MessageLimits(max_message_bytes=2**40)  # they were checked when they came


class Positioned(NamedTuple):
    """A segment with its place in the order of all of the run's: each is above the one before."""

    position: int
    key: ActorKey
    seq: int
    segment: Segment


class Unlogged(NamedTuple):
    """What a queue has received since the group before.

    first_queued: segments of lower positions have left it
    dropped:      positions of others that have
    end:          the position of the next segment
    """

    segments: list[Positioned]
    first_queued: int
    dropped: list[int]
    end: int


class Group(msgspec.Struct, frozen=True):
    """One object.

    segments:     actor id, incarnation, sequence number and frames of each; the first one has the position `first`
    first_queued: segments of lower positions have left the queue
    dropped:      positions of others that have left it since the group before
    ledger:       None: nothing has changed
    """

    format: int
    writer: str
    is_full: bool = False
    first: int = 0
    segments: tuple[tuple[str, int, int, tuple[bytes, ...]], ...] = ()
    first_queued: int = 0
    dropped: tuple[int, ...] = ()
    ledger: LedgerChanges | None = None

    @property
    def end(self) -> int:
        """The position after its last segment."""
        return self.first + len(self.segments)


class Recovered(NamedTuple):
    """What a log has. ledger: None where no gateway has logged before"""

    ledger: LedgerChanges | None
    segments: list[Positioned]
    next_position: int


def require_store() -> None:
    """Raise ConfigError unless `$SHOAL_STORE` names a store."""
    if not store_variable():
        remedy = "set SHOAL_STORE to a bucket, or to a folder that outlives the host; or use gateway.durable=disk"
        raise ConfigError("gateway.durable", "store", "needs a store, and SHOAL_STORE is not set", remedy)


def open_log(run_folder: str, experience: ExperienceSpec) -> SegmentLog:
    """The log of a run, or of one of its policies. run_folder: below `runs/`. Raises ConfigError, StoreError."""
    require_store()
    return SegmentLog(open_store().open_folder(f"runs/{run_folder}/{FOLDER}"), experience)


# msgspec learns a type at its first use, and crashes when another thread uses it meanwhile: groups are read by several.
_GROUP_DECODER = msgspec.msgpack.Decoder(Group)


class SegmentLog:
    """The groups below `store`, of which one process at a time writes. Every method raises StoreError when the store
    cannot be reached; not for several threads."""

    def __init__(self, store: Store, experience: ExperienceSpec) -> None:
        self._store, self._experience = store, experience
        self._writer = secrets.token_hex(8)
        self._ends: dict[int, int] = {}  # of the groups that are there: the position after the last segment
        self.next_number = 1

    def recover(self) -> Recovered:
        """Claim the log for this process, and read it. Raises RunError when it is damaged, or of a newer Shoal."""
        groups: dict[int, Group] = {}
        for _ in range(MAX_CLAIMS):
            keys = [each.key for each in self._store.list_entries() if each.key.endswith(_SUFFIX)]
            new = {number: key for key in keys if (number := int(key.removesuffix(_SUFFIX))) not in groups}
            with ThreadPoolExecutor(8) as readers:
                read = zip(new, readers.map(self._read_group, new.values()), strict=True)
                groups.update((number, group) for number, group in read if group is not None)
            self.next_number = max(groups, default=0) + 1
            try:
                self.append(Group(FORMAT, self._writer))
            except KeyTaken:
                continue  # the gateway before has logged meanwhile
            self._store = self._store.without_waiting()  # from now on the gateway says why it acknowledges nothing
            return self._assemble(groups)
        raise RunError(f"another gateway writes {self._store.url}: end it first")

    def append(self, group: Group) -> None:
        """Create the next group; again after an error, with the same group. Raises KeyTaken when another process has
        claimed the log."""
        payload, key = msgspec.msgpack.encode(group), _format_key(self.next_number)
        try:
            self._store.create(key, payload)
        except KeyTaken:  # perhaps by an attempt whose answer was lost
            if self._store.read(key) != payload:
                raise
        self._ends[self.next_number] = group.end
        self.next_number += 1

    def make_group(self, received: Unlogged, ledger: LedgerChanges | None, is_full: bool) -> Group:
        """The next group."""
        segments, first_queued, dropped, end = received
        packed = tuple((*each.key, each.seq, tuple(pack_segment(each.segment, each.seq))) for each in segments)
        return Group(FORMAT, self._writer, is_full, end - len(packed), packed, first_queued, tuple(dropped), ledger)

    def delete_consumed(self, first_queued: int) -> None:
        """Delete the groups of which every segment has left the queue, but the last, which is full."""
        consumed = []
        for number, end in sorted(self._ends.items())[:-1]:
            if end > first_queued:
                break
            consumed.append(number)
        self._store.delete(map(_format_key, consumed))
        for number in consumed:
            del self._ends[number]

    def _read_group(self, key: str) -> Group | None:
        """None: the gateway before has deleted it meanwhile."""
        location = f"{self._store.url}/{key}"
        try:
            payload = self._store.read(key)
        except FileNotFoundError:
            return None
        try:
            fields = msgspec.msgpack.decode(payload)
            require_known_format(location, fields, FORMAT, RunError)
            return msgspec.convert(fields, Group)
        except (msgspec.MsgspecError, TypeError, KeyError) as error:
            raise RunError(f"{location} is damaged ({error}): put a copy in its place, or begin a new run") from None

    def _assemble(self, groups: dict[int, Group]) -> Recovered:
        self._ends |= {number: group.end for number, group in groups.items()}
        full = max((number for number, group in groups.items() if group.is_full), default=0)
        numbers = range(full, max(groups, default=0) + 1)
        if full and (missing := [number for number in numbers if number not in groups]):
            raise RunError(f"{self._store.url} lacks {_format_key(missing[0])}: begin a new run")
        ledger: LedgerChanges | None = None
        first_queued = next_position = 0
        dropped: set[int] = set()
        segments = []
        for number, group in sorted(groups.items()):
            dropped.update(group.dropped)
            segments += [(group.first + index, each) for index, each in enumerate(group.segments)]
            first_queued, next_position = max(first_queued, group.first_queued), max(next_position, group.end)
            if number >= full and group.ledger is not None:
                accounts = {row[:2]: row for row in (*(ledger.accounts if ledger else ()), *group.ledger.accounts)}
                ledger = LedgerChanges(list(accounts.values()), group.ledger.leases, group.ledger.facts)
        queued = [self._unpack(*each) for each in segments if each[0] >= first_queued and each[0] not in dropped]
        return Recovered(ledger, queued, next_position)

    def _unpack(self, position: int, logged: tuple[str, int, int, tuple[bytes, ...]]) -> Positioned:
        actor_id, incarnation, seq, frames = logged
        try:
            message = decode(frames, _LIMITS)
            assert isinstance(message, SegmentMessage)
            segment = unpack_segment(message, frames[1:], self._experience)
        except (InvalidSegment, ProtocolViolation) as error:
            problem = f"has a segment that does not fit the run: {error}"
            raise RunError(f"{self._store.url} {problem}: begin a new run") from None
        return Positioned(position, (actor_id, incarnation), seq, segment)


def _format_key(number: int) -> str:
    return f"{number:012d}{_SUFFIX}"
