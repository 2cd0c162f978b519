"""A gateway that ends and begins again: where it is found, what it gets again, how it goes on counting."""

import socket as network
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from loop.gateway_asking import Raw, client
from rl_setting import TOKEN, Parts, segment, serving, weights
from shoal.actor import ActorClient
from shoal.errors import ConfigError, LedgerUnwritable, StoreError
from shoal.flows.rl_metrics import count_lost
from shoal.rl.experience.segment_ledger import Ledger
from shoal.store.folder import FolderStore
from shoal.wire import pack_segment
from shoal.wire.messages import Bye, Hello
from waiting import start_thread, wait_for


def test_a_gateway_that_died_is_found_where_it_was_and_gets_what_it_did_not_acknowledge(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        port = first.gateway.port
        actor = client(first)
        actor.connect()
        for _ in range(3):
            actor.send(segment())
        assert actor.drain(60)
        first.gateway.close()
        sender = start_thread(lambda: [actor.send(segment()) for _ in range(2)])  # nobody is there
        with serving(tmp_path) as second:
            assert second.gateway.port == port
            sender.join(60)
            assert actor.drain(60)
            account = second.ledger.get_account((actor.actor_id, actor.incarnation))
            assert (account.received, account.queued) == (5, 2)
            assert account.dropped == {"shutdown": 3}
            assert actor.reconnects >= 1
            actor.close()


def has_ipv6() -> bool:
    try:
        with network.create_server(("::1", 0), family=network.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no address of IPv6")
def test_a_gateway_on_an_address_of_ipv6_is_reached_where_it_says_that_it_is() -> None:
    with serving(host="::1") as parts, client(parts) as actor:
        assert parts.address == f"tcp://[::1]:{parts.gateway.port}"
        actor.send(segment())
        assert actor.drain(60)


@contextmanager
def taken(port: int = 0) -> Iterator[int]:
    """A port on which something else listens."""
    with network.create_server(("127.0.0.1", port)) as server:
        yield server.getsockname()[1]


def test_a_port_of_before_that_another_process_has_taken_is_given_up_for_a_free_one(tmp_path: Path) -> None:
    with serving(tmp_path) as first:
        before = first.gateway.port
    with taken(before), serving(tmp_path) as second, client(second):
        assert second.gateway.port != before
        moved = second.gateway.port
    with serving(tmp_path) as third:
        assert third.gateway.port == moved


def test_a_port_that_was_asked_for_and_is_taken_is_named_with_what_to_do() -> None:
    with taken() as port:
        parts = Parts(port=port)
        with pytest.raises(ConfigError, match=r"end the process .*, choose another port, or 0"):
            parts.gateway.start()
        parts.gateway.close()
        parts.ledger.close()


def test_a_gateways_next_life_goes_on_counting(tmp_path: Path) -> None:
    with serving(tmp_path) as first, client(first) as actor:
        actor.send(segment(2, terminated=True, episode_return=7.0, episode_length=2))
        assert actor.drain(60)
    with serving(tmp_path) as second, client(second, "two") as actor:
        actor.send(segment(3, terminated=True, episode_return=9.0, episode_length=3))
        assert actor.drain(60)
        stats = second.gateway.stats()
        assert (stats["steps"], stats["episodes"], stats["mean_return"]) == (5, 2, 8.0)


def test_what_a_failed_learner_holds_at_the_end_of_a_run_is_dropped(tmp_path: Path) -> None:
    with serving(tmp_path) as parts, client(parts) as actor:
        for _ in range(3):
            actor.send(segment(2))
        assert actor.drain(60)
        parts.take(max_segments=2)
        parts.gateway.close(finished=True)
        found = parts.gateway.stats()["segments"]
    assert (found["queued"], found["dropped"]) == (0, {"learner_crash": 2, "shutdown": 1})


def test_a_gateway_waits_for_weights_that_a_store_on_its_way_back_does_not_have_at_once(tmp_path: Path) -> None:
    parts = Parts(tmp_path)
    answers = [None, None, weights(7)]
    parts.store.wait_newer = lambda than, timeout_s: answers.pop(0) if answers else None  # type: ignore[method-assign]
    parts.gateway.start()
    assert parts.gateway.stats()["weights_version"] == 7
    parts.gateway.close()


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_ledger_that_cannot_be_written_for_a_while_holds_up_acknowledgements_and_nothing_else(
    tmp_path: Path, is_locked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full, or a backup that locks the file: SQLite itself would wait for that for 5 s at each commit,
    and every actor with it."""
    with ExitStack() as lock, serving(tmp_path, timeout_s=2.0) as parts, client(parts) as actor:
        actor.send(segment())
        assert actor.drain(60)
        if is_locked:
            other = lock.enter_context(closing(sqlite3.connect(tmp_path / "ledger.sqlite", isolation_level=None)))
            other.execute("BEGIN IMMEDIATE")
        else:
            refuse_commits(lock.enter_context(monkeypatch.context()))
        actor.send(segment())
        assert not actor.drain(parts.gateway.spec.timeout_s + 0.5)
        lock.close()
        assert actor.drain(60)
        assert actor.reconnects == 0
        assert parts.ledger.get_account((actor.actor_id, actor.incarnation)).received == 2
        kinds = [kind for _, kind, _ in parts.gateway.take_events()]
        assert kinds == ["actor_joined", "ledger_unwritable", "ledger_writable"]
        assert parts.gateway.is_alive


def refuse_commits(patch: pytest.MonkeyPatch) -> None:
    def refuse(ledger: Ledger) -> None:
        raise LedgerUnwritable("the ledger cannot be written: database or disk is full")

    patch.setattr(Ledger, "commit", refuse)


def test_a_gateway_that_closes_while_the_disk_is_full_tells_nobody_what_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path) as parts, Raw(parts) as raw, Raw(parts) as again:
        raw.enter("one")
        assert raw.send(0, segment()).seq == 0
        with monkeypatch.context() as full:
            refuse_commits(full)
            raw.socket.send_multipart(pack_segment(segment(), 1))
            wait_for(lambda: parts.ledger.get_account(("one", 1)).received == 2)
            again.say(Hello(1, TOKEN, "one", 1))
            wait_for(lambda: [kind for _, kind, _ in parts.gateway.take_events()].count("actor_left"))
            with pytest.raises(LedgerUnwritable):
                parts.gateway.close()
        heard = [message for asking in (raw, again) for message in asking.rest()]
        assert {type(message) for message in heard} == {Bye}


def test_a_gateway_begins_on_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as first, client(first) as actor:
        actor.send(segment())
        assert actor.drain(60)
    with monkeypatch.context() as full:
        refuse_commits(full)
        second = Parts(tmp_path)
        second.gateway.start()
        wait_for(lambda: [kind for _, kind, _ in second.gateway.take_events()] == ["ledger_unwritable"])
    with client(second) as again:
        again.send(segment())
        assert again.drain(60)
    second.gateway.close()
    second.ledger.close()


def test_what_a_gateway_had_acknowledged_that_is_lost_with_its_disk_is_counted() -> None:
    with serving() as first:
        actor = client(first)
        actor.connect()
        for _ in range(3):
            actor.send(segment())
        assert actor.drain(60)
        port = first.gateway.port
        first.gateway.close()
        with serving(port=port) as second:
            actor.send(segment())
            assert actor.drain(60)
            account = second.ledger.get_account((actor.actor_id, actor.incarnation))
            assert (account.received, account.queued, account.dropped) == (4, 1, {"gateway_lost": 3})
            segments = second.gateway.stats()["segments"]
            assert [count_lost(segments, {"consumed": learnt}) for learnt in (0, 2, 3)] == [3, 1, 0]
            actor.close()


class BreakableStore(FolderStore):
    is_down = False

    def create(self, key: str, payload: bytes) -> None:
        if self.is_down:
            raise StoreError("the store is down")
        super().create(key, payload)


def test_actors_go_on_at_a_gateway_of_another_host(tmp_path: Path) -> None:
    store = BreakableStore(tmp_path / "store")
    with serving(log=store) as first:
        actor = client(first)
        actor.connect()
        for _ in range(3):
            actor.send(segment())
        assert actor.drain(60)
        store.is_down = True  # what the first host still does reaches nothing
        for _ in range(2):
            actor.send(segment())
        key, port = (actor.actor_id, actor.incarnation), first.gateway.port
        wait_for(lambda: first.ledger.get_account(key).received == 5)
        assert len(actor._outbox) == 2
        first.gateway.close()
        store.is_down = False
        with serving(None, store, port=port) as second:
            assert second.gateway.port == port
            assert len(second.queue) == 3
            assert actor.drain(60)
            assert actor.acknowledged == {"accepted": 5, "dropped": 0, "duplicate": 0}
            assert second.ledger.get_account(key).queued == 5
            batch = second.take(1, 1000, 10, 0.0)
            assert len(batch.lengths) == 5
            actor.close()


@pytest.mark.parametrize("finds_by", ["address", "file"])
def test_an_actor_follows_a_gateway_that_has_moved(tmp_path: Path, finds_by: str) -> None:
    """By a second address, or by a file that has the new one."""
    store, place = FolderStore(tmp_path / "store"), tmp_path / "gateway.address"
    with serving(log=store) as first, serving() as other:
        port = other.gateway.port
    place.write_text(first.address)
    further = f"tcp://127.0.0.1:{port}" if finds_by == "address" else str(place)
    with serving(log=store) as first:
        actor = ActorClient(f"{first.address}|{further}", TOKEN, "one", timeout_s=60.0)
        actor.connect()
        actor.send(segment())
        assert actor.drain(60)
        first.gateway.close()
        with serving(None, store, port=port) as second:
            place.write_text(second.address)
            actor.send(segment(), timeout_s=60)
            assert actor.drain(60)
            assert (actor.acknowledged["accepted"], len(second.queue)) == (2, 1)
            actor.close()


def test_while_the_store_is_down_actors_keep_their_session_and_wait(tmp_path: Path) -> None:
    store = BreakableStore(tmp_path / "store")
    with serving(None, store, queue_capacity=4, timeout_s=2.0) as parts, client(parts) as actor:
        actor.send(segment())
        assert actor.drain(60)
        store.is_down = True
        while actor.has_credit:
            actor.send(segment())
        assert not actor.drain(parts.gateway.spec.timeout_s + 0.5)
        assert actor.reconnects == 0
        assert not actor.has_credit
        store.is_down = False
        assert actor.drain(60)
        wait_for(lambda: parts.gateway.stats()["segments"]["received"] == sum(actor.acknowledged.values()))
        kinds: list[str] = []

        def is_told() -> bool:
            kinds.extend(kind for _, kind, _ in parts.gateway.take_events() if kind.startswith("ledger"))
            return "ledger_writable" in kinds

        wait_for(is_told)
        assert kinds == ["ledger_unwritable", "ledger_writable"]


def test_a_session_that_begins_again_is_asked_for_what_is_not_in_the_store(tmp_path: Path) -> None:
    store = BreakableStore(tmp_path / "store")
    with serving(None, store) as parts, client(parts) as actor:
        actor.send(segment())
        assert actor.drain(60)
        store.is_down = True
        actor.send(segment())
        account = parts.ledger.get_account((actor.actor_id, actor.incarnation))
        wait_for(lambda: account.received == 2)
        actor.connect()
        assert len(actor._outbox) == 1
        wait_for(lambda: account.duplicates == 1)
        store.is_down = False
        assert actor.drain(60)
        assert (account.received, account.queued) == (2, 2)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rl.experience.group_commit.RETRY_S", 0.05)
