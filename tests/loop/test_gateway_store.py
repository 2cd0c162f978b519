"""A gateway with `durable: store`: what it acknowledged outlives its host; a store that is down loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from loop.gateway_asking import client
from rl_setting import TOKEN, segment, serving
from shoal.actor import ActorClient
from shoal.errors import StoreError
from shoal.store.folder import FolderStore
from waiting import wait_for


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
        assert actor.num_unacknowledged == 2
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
        kinds = [kind for _, kind, _ in parts.gateway.take_events() if kind.startswith("ledger")]
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
        assert actor.num_unacknowledged == 1
        wait_for(lambda: account.duplicates == 1)
        store.is_down = False
        assert actor.drain(60)
        assert (account.received, account.queued) == (2, 2)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.rl.experience.group_commit.RETRY_S", 0.05)
