"""Segments in groups in a store: none that was acknowledged is lost with the gateway's host, and none comes twice."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from abandoned_ledgers import ledgers_may_stay_open  # noqa: F401
from python_program import run_python
from rl_setting import EXPERIENCE, segment
from shoal.errors import ConfigError, RunError, StoreError
from shoal.rl.batch_lease import BatchLease
from shoal.rl.experience import group_commit
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import ActorKey, Ledger
from shoal.rl.experience.segment_log import SegmentLog, require_store
from shoal.store import Store
from shoal.store.folder import FolderStore
from waiting import wait_for

pytestmark = pytest.mark.usefixtures("ledgers_may_stay_open")
A, B = ("a", 1), ("b", 1)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_commit, "GROUP_INTERVAL_S", 0.002)
    monkeypatch.setattr(group_commit, "RETRY_S", 0.002)
    monkeypatch.setattr(group_commit, "COUNTS_INTERVAL_S", 0.002)
    monkeypatch.setattr(group_commit, "GROUPS_PER_FULL", 4)


class DyingStore(FolderStore):
    """From its `calls_left`-th change on, every call fails; the first one that fails may have had its effect."""

    def __init__(self, root: Path, calls_left: float, has_effect: bool = False) -> None:
        super().__init__(root)
        self.calls_left, self.has_effect = calls_left, has_effect

    def create(self, key: str, payload: bytes) -> None:
        if self._is_dying() and self.has_effect:
            self.has_effect = False
            super().create(key, payload)
            raise StoreError("the answer was lost")
        self._require_life()
        super().create(key, payload)

    def delete(self, keys: Iterable[str]) -> None:
        self._is_dying()
        self._require_life()
        super().delete(keys)

    def read(self, key: str) -> bytes:
        self._require_life()
        return super().read(key)

    def _is_dying(self) -> bool:
        self.calls_left -= 1
        return self.calls_left < 0

    def _require_life(self) -> None:
        if self.calls_left < 0:
            raise StoreError("the host is gone")


class Host:
    """A gateway's queue and ledger on an empty disk."""

    def __init__(self, store: Store, capacity: int = 64) -> None:
        self.queue = ExperienceQueue(capacity, Ledger())
        self.commit = GroupCommit(SegmentLog(store, EXPERIENCE), self.queue)

    def put(self, key: ActorKey, value: int) -> int:
        """Receive the next segment of an actor; returns the group for which its acknowledgement waits."""
        seq = self.queue.ledger.get_account(key).next_seq
        assert self.queue.put(key, seq, numbered(value))
        return self.commit.await_group()

    def put_logged(self, key: ActorKey, *values: int) -> None:
        for value in values:
            group = self.put(key, value)
        wait_for(lambda: self.commit.num_uploaded >= group)


def numbered(value: int, version: int = 1) -> Any:
    return segment(1, version, rewards=np.array([value], np.float32))


def values_of(batch: ExperienceBatch | None) -> list[int]:
    return [] if batch is None else batch.rewards.astype(int).tolist()


def lease(host: Host, max_segments: int = 64, position: int = 0) -> BatchLease:
    return BatchLease(host.queue, BatchRequest(1, 64, max_segments, 0.0, position=position))


def learn(before: BatchLease) -> list[int]:
    """Take a batch, to be acknowledged; returns its numbers."""
    batch = before.take(0, 64)
    if batch is not None:
        before.set_outcomes(batch, [None] * len(batch.lengths), [])
    return values_of(batch)


class Actor:
    """Sends the numbers from `first` on, again from where the gateway says, and notes which were acknowledged."""

    def __init__(self, key: ActorKey, first: int) -> None:
        self.key, self.first = key, first
        self.num_sent = self.num_acknowledged = 0
        self._waiting: list[tuple[int, int]] = []

    def say_hello(self, host: Host) -> None:
        self.num_sent, self._waiting = host.commit.get_acknowledged(self.key), []
        assert self.num_sent >= self.num_acknowledged

    def send(self, host: Host) -> int:
        group = host.put(self.key, self.first + self.num_sent)
        self.num_sent += 1
        self._waiting.append((group, self.num_sent))
        return group

    def hear(self, host: Host) -> None:
        uploaded = [count for group, count in self._waiting if group <= host.commit.num_uploaded]
        self.num_acknowledged = max(self.num_acknowledged, *uploaded, 0)


class Learner:
    """Survives the gateways. Its acknowledgement may be due while one is lost."""

    def __init__(self, chance: random.Random) -> None:
        self.learnt: list[int] = []
        self._chance, self._lease = chance, None

    _lease: BatchLease | None

    def connect(self, host: Host) -> None:
        self._lease = self._lease or lease(host, 3)
        self._lease._source = host.queue

    def learn(self) -> int:
        """Acknowledge, or take the next batch; returns how many segments that had."""
        assert self._lease is not None
        if self._lease.outcomes is not None:
            self._lease.acknowledge()
        learnt = learn(self._lease)
        self.learnt += learnt
        if learnt and self._chance.random() < 0.7:
            self._lease.acknowledge()
        return len(learnt)


def live(host: Host, actors: list[Actor], learner: Learner, chance: random.Random, num_segments: int) -> None:
    """Until the host is lost, or so many segments were sent."""
    learner.connect(host)
    for actor in actors:
        actor.say_hello(host)
    for _ in range(num_segments):
        group = chance.choice(actors).send(host)
        if chance.random() < 0.5:
            wait_for(lambda group=group: host.commit.problem or host.commit.num_uploaded >= group)  # type: ignore[misc]
        if chance.random() < 0.6:
            learner.learn()
        for actor in actors:
            actor.hear(host)
        if host.commit.problem:
            break


@pytest.mark.parametrize("seed", range(6))
def test_a_host_that_is_lost_at_any_moment_loses_no_acknowledged_segment_and_repeats_none(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    actors, learner = [Actor(A, 0), Actor(B, 1000)], Learner(chance)
    for _ in range(5):
        store = DyingStore(tmp_path, float("inf"))
        host = Host(store)
        store.calls_left, store.has_effect = chance.randint(1, 12), chance.random() < 0.5
        live(host, actors, learner, chance, 60)
        host.commit.close()
    host = Host(FolderStore(tmp_path))
    live(host, actors, learner, chance, 20)
    wait_for(lambda: not host.queue.num_unlogged and len(host.queue) == learner.learn() == 0)
    for actor in actors:
        mine = [value - actor.first for value in learner.learnt if value // 1000 == actor.first // 1000]
        assert mine == list(range(actor.num_sent))
    totals = host.queue.ledger.get_totals()
    assert totals.consumed == totals.received == len(learner.learnt)
    host.queue.close()


def test_what_was_dropped_does_not_come_again_and_what_was_learnt_is_deleted(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first = Host(store)
    first.put_logged(A, 1, 2, 3)
    first.queue.put(A, 3, numbered(4, version=7))
    first.put_logged(B, 11, 12)
    assert values_of(lease(first, 1).take(0, 64)) == [1]  # leased to a learner that dies
    first.queue.take("learner", BatchRequest(10**6, 10**6, 10**6, 0.0, version=5, is_patient=True))
    group = first.commit.await_group()
    wait_for(lambda: first.commit.num_uploaded >= group)
    abandon(first)
    second = Host(store)
    assert [int(each.segment.rewards[0]) for each in second.queue._segments] == [4]
    totals = second.queue.ledger.get_totals()
    assert (totals.dropped, totals.queued) == ({"stale_consumption": 4, "learner_crash": 1}, 1)
    taken = lease(second).take(0, 64)
    assert values_of(taken) == [4]
    for value in range(40):
        second.put_logged(A, value)
        lease(second).take(0, 64)
    second.queue.close()
    assert second.queue.ledger.get_totals().is_balanced
    assert len(store.list_entries()) == 1


def abandon(host: Host) -> None:
    """End its thread, and let nothing more of it reach the store."""
    host.commit._log._store = DyingStore(Path(host.commit._log._store.url), -1)
    host.commit.close()


def test_both_the_gateway_and_the_learner_may_be_lost(tmp_path: Path) -> None:
    """The learner's checkpoint says up to where: what the log has as queued, and the checkpoint has learnt, is not
    learnt again."""
    store = FolderStore(tmp_path)
    first = Host(store)
    first.put_logged(A, 1, 2, 3, 4)
    before = lease(first, 2)
    first.commit._log._store = DyingStore(tmp_path, -1)  # the log never hears of the following
    assert learn(before) == [1, 2]
    before.acknowledge()
    checkpointed = before.request.position
    assert values_of(before.take(0, 64)) == [3, 4]
    abandon(first)
    second = Host(store)
    assert len(second.queue) == 4
    assert values_of(lease(second, position=checkpointed).take(0, 64)) == [3, 4]
    totals = second.queue.ledger.get_totals()
    assert (totals.consumed, totals.queued, totals.dropped.total()) == (2, 2, 0)
    second.queue.close()


def test_a_lease_that_alone_has_changed_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The group that says that its segments have left the queue also says who has them."""
    monkeypatch.setattr(group_commit, "GROUPS_PER_FULL", 1000)  # a full group has all leases anyway
    store = FolderStore(tmp_path)
    first = Host(store)
    first.put_logged(A, 1, 2)
    before = lease(first)
    assert learn(before) == [1, 2]
    group = first.commit.await_group()  # of segments that the group before had
    wait_for(lambda: first.commit.num_uploaded >= group)
    abandon(first)
    second = Host(store)
    before._source = second.queue
    before.acknowledge()
    totals = second.queue.ledger.get_totals()
    assert (totals.consumed, totals.queued, totals.dropped) == (2, 0, {})
    second.queue.close()


def test_a_learner_may_acknowledge_after_two_gateways_were_lost(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first = Host(store)
    first.put_logged(A, 1)
    before = lease(first)
    first.commit._log._store = DyingStore(tmp_path, -1)  # the log never hears of the lease
    batch = before.take(0, 64)
    assert batch is not None
    before.set_outcomes(batch, [None], [])
    abandon(first)
    second = Host(store)
    second.put_logged(A, 2)
    abandon(second)
    third = Host(store)
    before._source = third.queue
    before.acknowledge()
    assert values_of(before.take(0, 64)) == [2]
    assert third.queue.ledger.get_totals().consumed == 1
    assert not third.queue.acknowledge(batch.lease_id, [None])  # by another life: this one has taken more
    third.queue.close()


def test_of_two_gateways_of_a_run_the_earlier_ends(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    first = Host(store)
    first.put_logged(A, 1)
    second = Host(store)
    group = first.put(A, 2)
    wait_for(lambda: not first.commit.is_alive)
    assert first.commit.num_uploaded < group
    assert values_of(lease(second).take(0, 64)) == [1]
    first.queue.close()
    second.queue.close()


def test_a_group_that_the_earlier_gateway_deletes_while_the_log_is_read_is_not_missed(tmp_path: Path) -> None:
    class Deleting(FolderStore):
        def list_entries(self, *args: Any) -> list[Any]:
            entries = super().list_entries(*args)
            self.delete([entries[0].key] if len(entries) > 1 else [])
            return entries

    first = Host(FolderStore(tmp_path))
    first.put_logged(A, 1)
    before = lease(first)
    assert learn(before) == [1]
    before.acknowledge()
    first.put_logged(A, 2)
    abandon(first)
    second = Host(Deleting(tmp_path))
    assert values_of(lease(second, position=before.request.position).take(0, 64)) == [2]
    second.queue.close()


def test_while_the_store_takes_nothing_nothing_is_acknowledged_or_learnt(tmp_path: Path) -> None:
    store = DyingStore(tmp_path, float("inf"))
    host = Host(store, capacity=4)
    host.put_logged(A, 1)
    store.calls_left = -1
    groups = [host.put(A, value) for value in (2, 3, 4)]
    assert not host.queue.put(A, 4, numbered(5))  # the queue is full: actors have no credit
    wait_for(lambda: host.commit.problem)
    assert "the host is gone" in host.commit.problem
    assert host.commit.num_uploaded < groups[0]
    assert host.commit.get_acknowledged(A) == 1
    assert values_of(lease(host).take(0, 64)) == [1]
    store.calls_left = float("inf")
    wait_for(lambda: host.commit.num_uploaded >= groups[-1])
    assert host.commit.problem == ""
    assert values_of(lease(host).take(0, 64)) == [2, 3, 4]
    host.queue.close()


def test_a_log_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    store = FolderStore(tmp_path)
    host = Host(store)
    host.put_logged(A, 1)
    host.queue.close()
    newest = store.list_entries()[-1].key
    payload = store.read(newest)
    store.write(newest, payload[:-1])
    with pytest.raises(RunError, match=rf"{newest} is damaged"):
        Host(store)
    store.write(newest, msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | {"format": 99}))
    with pytest.raises(RunError, match="newer Shoal"):
        Host(store)
    store.write(newest, payload)
    later = msgspec.msgpack.encode(msgspec.msgpack.decode(payload) | {"is_full": False})
    store.write(f"{int(newest[:12]) + 2:012d}.group", later)
    with pytest.raises(RunError, match="lacks"):
        Host(store)


def test_a_new_log_has_positions_that_no_learner_has_seen(tmp_path: Path) -> None:
    first = Host(FolderStore(tmp_path / "one"))
    first.put_logged(A, 1)
    before = lease(first)
    assert learn(before) == [1]
    first.queue.close()
    second = Host(FolderStore(tmp_path / "two"))
    second.put_logged(A, 2)
    assert values_of(lease(second, position=before.request.position).take(0, 64)) == [2]
    second.queue.close()


def test_durable_store_needs_a_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_STORE", raising=False)
    with pytest.raises(ConfigError, match=r"gateway\.durable.*SHOAL_STORE is not set"):
        require_store()


def test_groups_are_read_by_several_threads_in_a_process_that_has_read_none() -> None:
    """msgspec crashes when a thread uses a type that another one is just using for the first time."""
    program = """
import importlib, sys, threading
from concurrent.futures import ThreadPoolExecutor
import msgspec
from shoal.rl.experience import segment_ledger, segment_log
sys.setswitchinterval(1e-6)
with ThreadPoolExecutor(8) as readers:
    for _ in range(100):
        importlib.reload(segment_ledger)
        importlib.reload(segment_log)
        fields = {"format": 1, "writer": "a", "ledger": {"accounts": [], "leases": {}, "facts": {}}}
        begin = threading.Barrier(8)
        list(readers.map(lambda _: (begin.wait(), msgspec.convert(fields, segment_log.Group)), range(8)))
"""
    run_python(program)
