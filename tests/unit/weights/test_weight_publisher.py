"""The publisher never waits, sends the newest, and tells a store that was away or has forgotten."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from shoal.errors import Closed, ConnectionLost
from shoal.weights import WeightSnapshot, WeightStore
from shoal.weights.publisher import WeightPublisher
from waiting import wait_for


@dataclass
class FakeStore:
    """Takes a version when `open` is set; raises ConnectionLost while `away`."""

    sent: list[int] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    away: bool = False
    attempts: int = 0

    def send(self, snapshot: WeightSnapshot) -> None:
        self.attempts += 1
        if self.away:
            raise ConnectionLost("away")
        assert self.open.wait(5.0)
        self.sent.append(snapshot.version)

    def version(self) -> int:
        if self.away:
            raise ConnectionLost("away")
        return self.sent[-1] if self.sent else 0

    def publisher(self) -> WeightPublisher:
        return WeightPublisher(self.send, self.version, check_s=0.01, retry_s=0.01)


def snapshot(version: int) -> WeightSnapshot:
    return WeightSnapshot.from_payload(version, b"")


def is_true(condition: Callable[[], object]) -> None:
    wait_for(condition, 5.0)


def test_publishing_never_waits_and_skips_what_it_was_too_slow_for() -> None:
    store = FakeStore()
    publisher = store.publisher()
    publisher.publish(snapshot(1))
    is_true(lambda: store.attempts == 1)
    for version in range(2, 100):
        publisher.publish(snapshot(version))
    store.open.set()
    is_true(lambda: publisher.forwarded_version == 99)
    assert store.sent == [1, 99]
    publisher.close()


def test_a_store_that_forgot_is_told_again() -> None:
    store = FakeStore()
    store.open.set()
    publisher = store.publisher()
    publisher.publish(snapshot(1))
    is_true(lambda: store.sent == [1])
    store.sent.clear()
    is_true(lambda: store.sent == [1])
    publisher.close()


def test_close_sends_the_last_and_then_refuses() -> None:
    store = FakeStore()
    store.open.set()
    publisher = store.publisher()
    publisher.publish(snapshot(3))
    publisher.close()
    publisher.close()
    assert store.sent == [3]
    with pytest.raises(Closed):
        publisher.publish(snapshot(4))


def test_close_gives_up_when_the_store_stays_away(caplog: pytest.LogCaptureFixture) -> None:
    store = FakeStore(away=True)
    publisher = store.publisher()
    publisher.publish(snapshot(3))
    publisher.close(timeout_s=0.05)
    is_true(lambda: "version 3 was not forwarded" in caplog.text)


# -- which snapshot a store gives to whom


def weights(version: int) -> WeightSnapshot:
    return WeightSnapshot.of(version, {"w": np.full(1, version, np.float32)})


def test_a_held_snapshot_is_read_by_those_that_follow_holds_until_it_is_released() -> None:
    store = WeightStore()
    assert store.wait_newer(0, 0.0, follows_hold=True) is None
    store.publish(weights(1))
    store.hold(weights(2))  # before the learner's own has arrived
    store.publish(weights(2))
    store.publish(weights(3))
    for follows_hold, version in ((True, 2), (False, 3)):
        for found in (store.latest(follows_hold), store.wait_newer(1, 0.0, follows_hold)):
            assert found.version == version
    assert store.wait_newer(2, 0.0, follows_hold=True) is None
    assert (store.version, store.publish(weights(3))) == (3, False)
    threading.Timer(0.05, store.hold, [None]).start()
    released = store.wait_newer(2, 60.0, follows_hold=True)
    assert released.version == 3
