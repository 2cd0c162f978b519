"""The accounts of experience: for every actor, received = consumed + queued + dropped(reason), also after a crash.

One row per (actor id, incarnation). The gateway commits a row before it acknowledges the row's segments, so every
acknowledgement is backed by the disk, and none is sent while the disk is full. SQLite without fsync survives the death
of the process, which is the promised fault (a power cut may lose the last moments). A segment on its way to the
learner is *leased*, counted in `queued`, until the learner acknowledges the lease. Called by the queue and the gateway;
never touches a socket.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shoal.atomic_file import connect_private, describe_newer_format, is_newer_format, log_unknown_fields
from shoal.errors import LedgerUnwritable, RunError
from shoal.wire.segment import DropReason

# Temporary errors: a full or failing disk, or another process that locks the file.
_TRANSIENT_ERRORS = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})

LEDGER_NAME = "ledger.sqlite"  # in a run's folder
LEASE_GAP = 1_000_000  # in their numbers, after leases of which this ledger may not know
BUSY_TIMEOUT_MS = 100  # for a commit while another process locks the file; the gateway answers no actor meanwhile

ActorKey = tuple[str, int]  # (actor id, incarnation)

FORMAT = 1  # in the file's user_version
_SCHEMA = """
CREATE TABLE IF NOT EXISTS accounts (
    actor_id TEXT, incarnation INTEGER, next_seq INTEGER, received INTEGER, consumed INTEGER,
    duplicates INTEGER, dropped TEXT, PRIMARY KEY (actor_id, incarnation)
);
CREATE TABLE IF NOT EXISTS leases (lease_id INTEGER PRIMARY KEY, consumer TEXT, keys TEXT);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS quarantine (actor_id TEXT PRIMARY KEY, reason TEXT);
"""
_COLUMNS = ("actor_id", "incarnation", "next_seq", "received", "consumed", "duplicates", "dropped")
_WRITE_ACCOUNT = (  # retains columns of a later Shoal
    f"INSERT INTO accounts ({', '.join(_COLUMNS)}) VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    + ", ".join(f"{name} = excluded.{name}" for name in _COLUMNS[2:])
)


@dataclass
class Account:
    """Counts of segments. The identity `received == consumed + queued + dropped` holds after every method call."""

    next_seq: int = 0
    received: int = 0
    consumed: int = 0
    queued: int = 0  # in the queue or leased to the learner
    duplicates: int = 0  # received again after they were counted: not part of `received`
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def is_balanced(self) -> bool:
        return self.received == self.consumed + self.queued + self.dropped.total()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "received": self.received,
            "consumed": self.consumed,
            "queued": self.queued,
            "duplicates": self.duplicates,
            "dropped": dict(self.dropped),
            "balanced": self.is_balanced,
        }


class Lease(NamedTuple):
    consumer: str
    keys: tuple[ActorKey, ...]  # one for each segment, in batch order


class LedgerChanges(msgspec.Struct, frozen=True):
    """What a log has of a ledger: rows of `accounts`, and all leases and facts.

    leases: by their ids
    """

    accounts: list[tuple[str, int, int, int, int, int, str]]
    leases: dict[int, Lease]
    facts: dict[str, str]


class Ledger:
    """The accounts of one run, in memory and in a SQLite file. Safe to use from any thread."""

    def __init__(self, path: Path | None = None) -> None:
        """Open or create the ledger; None keeps it in memory. Segments that a crash left queued become
        GATEWAY_CRASH."""
        self.lock = threading.RLock()
        options: dict[str, Any] = {"check_same_thread": False, "isolation_level": None}
        self._database = sqlite3.connect(":memory:", **options) if path is None else connect_private(path, **options)
        try:
            self._open(path)
        except (sqlite3.DatabaseError, RunError) as error:
            self._database.close()
            if isinstance(error, sqlite3.OperationalError | RunError):
                raise
            raise RunError(
                f"the ledger {path} cannot be read: {error}: put a copy in its place, or begin a new run"
            ) from error
        self._accounts: dict[ActorKey, Account] = {}
        self._totals = Account()  # of all accounts; its `next_seq` is unused
        self._newest_incarnations: dict[str, int] = {}  # incarnation of each actor
        self._leases: dict[int, Lease] = {}
        self._dirty: set[ActorKey] = set()
        self._dirty_leases: set[int] = set()
        self._new_facts: dict[str, str] = {}
        self._unlogged: set[ActorKey] = set()  # changed since `take_changes`
        self.quarantined: dict[str, str] = {}  # actor id -> reason; see `load_quarantine`
        self._new_quarantined: dict[str, str] = {}
        self._next_lease = 1  # never reused, also after a crash: a late acknowledgement must not hit another lease
        self._last_opened = 0  # a learner asks for no lease before its last one is settled
        self._last_acknowledged = 0
        self._closed = False
        self._load()
        self._database.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")

    def _open(self, path: Path | None) -> None:
        stored = self._database.execute("PRAGMA user_version").fetchone()[0]
        if path is not None and is_newer_format(stored, FORMAT):
            raise RunError(describe_newer_format(path, stored, FORMAT))
        self._database.execute("PRAGMA journal_mode=WAL")
        # OFF could damage the file itself at a power cut, not just lose the newest rows.
        self._database.execute("PRAGMA synchronous=NORMAL")
        self._database.executescript(_SCHEMA)
        if stored != FORMAT:
            with suppress(sqlite3.OperationalError):  # a full disk: a later start writes it
                self._database.execute(f"PRAGMA user_version = {FORMAT}")
        if path is not None:
            rows = self._database.execute("SELECT name FROM pragma_table_info('accounts')")
            log_unknown_fields(path, [f"accounts.{name}" for (name,) in rows if name not in _COLUMNS])

    def get_account(self, key: ActorKey) -> Account:
        """The account of an actor's incarnation, created if new. The caller must not change it."""
        with self.lock:
            if (stored := self._accounts.get(key)) is None:  # setdefault would create an account for every segment
                stored = self._add_account(key, Account())
            return stored

    def newest_incarnation(self, actor_id: str) -> int | None:
        """The highest incarnation under which this actor has ever been seen."""
        with self.lock:
            return self._newest_incarnations.get(actor_id)

    def open_account(self, key: ActorKey) -> Account:
        """The account, stored from the next commit on even if nothing was received yet."""
        with self.lock:
            self._touch(key)
            return self.get_account(key)

    def record_received(self, key: ActorKey, seq: int, reason: DropReason | None = None) -> None:
        """Count segment `seq` as received, and as queued, or as dropped for `reason`."""
        with self.lock:
            account = self.get_account(key)
            account.next_seq = seq + 1
            for each in (account, self._totals):
                each.received += 1
                if reason is None:
                    each.queued += 1
                else:
                    each.dropped[reason.value] += 1
            self._touch(key)

    def record_lost(self, key: ActorKey, count: int) -> None:
        """Count the segments that a gateway has acknowledged, of whose ledger this disk has nothing."""
        with self.lock:
            if key in self._accounts or count <= 0:
                return
            for each in (self.get_account(key), self._totals):
                each.received += count
                each.dropped[DropReason.GATEWAY_LOST.value] += count
            self._touch(key)

    def count_duplicate(self, key: ActorKey) -> None:
        with self.lock:
            self.get_account(key).duplicates += 1
            self._totals.duplicates += 1
            self._touch(key)

    def open_lease(self, consumer: str, keys: Iterable[ActorKey]) -> int:
        """Record that `consumer` receives one segment of each key; returns the lease's id, durable on return.

        Raises LedgerUnwritable; there is no lease then.
        """
        with self.lock:
            lease_id, self._next_lease = self._next_lease, self._next_lease + 1
            self._last_opened = lease_id
            self._new_facts |= {"next_lease": str(self._next_lease), "last_opened": str(lease_id)}
            self._leases[lease_id] = Lease(consumer, tuple(keys))
            self._dirty_leases.add(lease_id)
            try:
                self.commit()
            except LedgerUnwritable:
                del self._leases[lease_id]  # its segments stay queued
                raise
            self._unlogged.update(self._leases[lease_id].keys)  # a log must know who has what has left the queue
            return lease_id

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None]) -> bool:
        """Close a lease: each of its segments was dropped for a reason, or consumed (None).

        Durable on return. Repeating it changes nothing and returns True again, since an answer may be lost. False for a
        lease that was revoked. Raises LedgerUnwritable: retry.
        """
        with self.lock:
            if lease_id not in self._leases:
                self.commit()  # the first acknowledgement may have failed to commit
                is_lost = lease_id > self._last_opened  # of a gateway that is gone
                return lease_id == self._last_acknowledged or is_lost
            self._last_acknowledged = lease_id
            self._new_facts["last_settled"] = str(lease_id)
            keys = self._close_lease(lease_id)
            for (key, outcome), count in Counter(zip(keys, outcomes, strict=True)).items():
                self._close_queued(key, count, outcome)
            self.commit()
            return True

    def acknowledge_seen(self, consumer: str, last_lease: int, keys: Iterable[ActorKey]) -> None:
        """Count as consumed what `consumer` has acknowledged to a gateway that was lost before it could log that: its
        leases up to `last_lease`, and one queued segment of each key."""
        with self.lock:
            self._next_lease = max(self._next_lease, last_lease + 1)  # the lost gateway may not have logged it
            seen = [number for number, each in self._leases.items() if each.consumer == consumer]
            leased = [key for number in seen if number <= last_lease for key in self._close_lease(number)]
            for key, count in Counter([*leased, *keys]).items():
                self._close_queued(key, count, None)

    def revoke_open_leases(self, consumer: str) -> int:
        """Revoke the open leases because `consumer` asks for a new one: its own, whose answer was lost (LEASE_LOST),
        and those of other, dead consumers (LEARNER_CRASH). Returns their number of segments. Durable on return, like
        the lease that follows: a crash between the two must not reopen them."""
        with self.lock:
            ended = list(self._leases.items())
            for lease_id, lease in ended:
                reason = DropReason.LEASE_LOST if lease.consumer == consumer else DropReason.LEARNER_CRASH
                self.drop_queued(self._close_lease(lease_id), reason)
            if ended:
                self.commit()
            return sum(len(lease.keys) for _, lease in ended)

    def drop_queued(self, keys: Iterable[ActorKey], reason: DropReason) -> None:
        """Count one queued segment of each key as dropped."""
        with self.lock:
            for key, count in Counter(keys).items():
                self._close_queued(key, count, reason)

    def get_leased(self, lease_id: int) -> tuple[ActorKey, ...]:
        """The keys of an open lease's segments, in batch order; empty for a lease that is not open."""
        with self.lock:
            lease = self._leases.get(lease_id)
            return () if lease is None else lease.keys

    def take_changes(self, is_full: bool) -> LedgerChanges | None:
        """The accounts changed or leased since the last call, or all; None where none is."""
        with self.lock:
            keys = self._accounts.keys() if is_full else self._unlogged
            self._unlogged = set()
            if not keys:
                return None
            facts = dict(self._database.execute("SELECT name, value FROM facts")) | self._new_facts
            return LedgerChanges([self._to_row(key) for key in keys], dict(self._leases), facts)

    @property
    def is_changed(self) -> bool:
        """Whether `take_changes` has any."""
        return bool(self._unlogged)

    def restore(self, logged: LedgerChanges, queued: Mapping[ActorKey, int]) -> None:
        """Take the accounts and leases of a log in place of those of this disk. queued: segments that are queued again,
        of each account; others that were become GATEWAY_CRASH."""
        with self.lock:
            unknown = self._accounts.keys() - {(actor_id, incarnation) for actor_id, incarnation, *_ in logged.accounts}
            self._dirty_leases.update(self._leases, logged.leases)
            self._accounts, self._totals = {}, Account()
            for key in unknown:  # what was received was not acknowledged
                self._add_account(key, Account())
            self._leases = dict(logged.leases)
            self._load_accounts(logged.accounts, queued)
            for key in self._accounts:
                self._touch(key)
            own = {name: value for name in logged.facts if (value := self.get_fact(name)) is not None}
            self._next_lease = int(logged.facts.get("next_lease", 1)) + LEASE_GAP
            self._last_opened = int(logged.facts.get("last_opened", 0))
            self._last_acknowledged = int(logged.facts.get("last_settled", 0))
            lease_facts = {
                "next_lease": str(self._next_lease),
                "last_opened": str(self._last_opened),
                "last_settled": str(self._last_acknowledged),
            }
            self._new_facts |= {**logged.facts, **own, **lease_facts}

    def quarantine(self, actor_id: str, reason: str) -> None:
        """Put an actor in quarantine, until `release_actor`."""
        with self.lock:
            self.quarantined[actor_id] = self._new_quarantined[actor_id] = reason

    def load_quarantine(self) -> None:
        """Notice whom another process has released."""
        with self.lock:
            rows = self._database.execute("SELECT actor_id, reason FROM quarantine")
            self.quarantined = {**dict(rows), **self._new_quarantined}

    def get_totals(self) -> Account:
        """The sum of all accounts."""
        with self.lock:
            return replace(self._totals, dropped=self._totals.dropped.copy())

    def get_accounts(self) -> dict[ActorKey, Account]:
        """A copy of the ledger's index; the accounts themselves are live."""
        with self.lock:
            return dict(self._accounts)

    def set_fact(self, name: str, value: str) -> None:
        """Store a small fact (the gateway's port) across restarts, from the next commit on."""
        with self.lock:
            self._new_facts[name] = value

    def get_fact(self, name: str) -> str | None:
        with self.lock:
            if name in self._new_facts:
                return self._new_facts[name]
            row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
            return None if row is None else str(row[0])

    def commit(self) -> None:
        """Write the changes in one transaction. Raises LedgerUnwritable; the next commit then writes them all."""
        with self.lock:
            if not (self._dirty or self._dirty_leases or self._new_facts or self._new_quarantined):
                return
            try:
                self._database.execute("BEGIN")
                write = self._database.executemany
                write(_WRITE_ACCOUNT, map(self._to_row, self._dirty))
                closed = self._dirty_leases - self._leases.keys()
                opened = [(each, self._leases[each]) for each in self._dirty_leases - closed]
                leases = [(each, lease.consumer, json.dumps(lease.keys)) for each, lease in opened]
                write("DELETE FROM leases WHERE lease_id = ?", ((each,) for each in closed))
                write("INSERT OR REPLACE INTO leases (lease_id, consumer, keys) VALUES (?, ?, ?)", leases)
                write("INSERT OR REPLACE INTO facts (name, value) VALUES (?, ?)", self._new_facts.items())
                quarantined = self._new_quarantined.items()
                write("INSERT OR REPLACE INTO quarantine (actor_id, reason) VALUES (?, ?)", quarantined)
                self._database.execute("COMMIT")
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF not in _TRANSIENT_ERRORS:
                    raise
                if self._database.in_transaction:  # on a full disk SQLite has ended it already
                    self._database.execute("ROLLBACK")
                raise LedgerUnwritable(f"the ledger cannot be written: {error}") from error
            self._dirty.clear()
            self._dirty_leases.clear()
            self._new_facts.clear()
            self._new_quarantined.clear()

    def close(self) -> None:
        """Commit and close the file, which is closed even if the commit fails (LedgerUnwritable). Idempotent."""
        with self.lock:
            if not self._closed:
                self._closed = True
                try:
                    self.commit()
                finally:
                    self._database.close()

    def _close_queued(self, key: ActorKey, count: int, outcome: DropReason | None) -> None:
        """Count queued segments as dropped for a reason, or as consumed (None)."""
        if not count:
            return
        for each in (self._accounts[key], self._totals):
            each.queued -= count
            if outcome is None:
                each.consumed += count
            else:
                each.dropped[outcome.value] += count
        self._touch(key)

    def _touch(self, key: ActorKey) -> None:
        """Mark the account as to be written, and to be logged."""
        self._dirty.add(key)
        self._unlogged.add(key)

    def _add_account(self, key: ActorKey, account: Account) -> Account:
        actor_id, incarnation = key
        self._accounts[key] = account
        self._newest_incarnations[actor_id] = max(incarnation, self._newest_incarnations.get(actor_id, incarnation))
        return account

    def _close_lease(self, lease_id: int) -> tuple[ActorKey, ...]:
        self._dirty_leases.add(lease_id)
        keys = self._leases.pop(lease_id).keys
        for key in set(keys):
            self._touch(key)
        return keys

    def _to_row(self, key: ActorKey) -> tuple[str, int, int, int, int, int, str]:
        account = self._accounts[key]
        dropped = json.dumps(account.dropped)
        return (*key, account.next_seq, account.received, account.consumed, account.duplicates, dropped)

    def _load(self) -> None:
        """Read the ledger, and drop the segments queued in a gateway that did not close it."""
        self.load_quarantine()
        self._next_lease = int(self.get_fact("next_lease") or 1)
        self._last_opened = int(self.get_fact("last_opened") or 0)
        self._last_acknowledged = int(self.get_fact("last_settled") or 0)
        for lease_id, consumer, text in self._database.execute("SELECT lease_id, consumer, keys FROM leases"):
            keys = tuple((actor_id, incarnation) for actor_id, incarnation in json.loads(text))
            self._leases[lease_id] = Lease(consumer, keys)
        self._load_accounts(self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM accounts"), {})
        with suppress(LedgerUnwritable):  # a later commit writes it, or the next start repeats this
            self.commit()

    def _load_accounts(self, rows: Iterable[Sequence[Any]], queued: Mapping[ActorKey, int]) -> None:
        """Add accounts; of their segments that were queued, `queued` still are."""
        for actor_id, incarnation, next_seq, received, consumed, duplicates, dropped in rows:
            account = Account(next_seq, received, consumed, 0, duplicates, Counter(json.loads(dropped)))
            self._add_account((actor_id, incarnation), account)
        leased = Counter(key for lease in self._leases.values() for key in lease.keys)
        for key, account in self._accounts.items():
            account.queued = account.received - account.consumed - account.dropped.total()
            self._totals.received += account.received
            self._totals.consumed += account.consumed
            self._totals.queued += account.queued
            self._totals.duplicates += account.duplicates
            self._totals.dropped.update(account.dropped)
            self._close_queued(key, account.queued - leased[key] - queued.get(key, 0), DropReason.GATEWAY_CRASH)
