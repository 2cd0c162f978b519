"""The thread that follows the weights of a run: it takes what is newer, skips what does not fit, and never spins."""

import threading
import time

import numpy as np
import pytest

from shoal.errors import WeightsError
from shoal.serve.replica.watchers import WeightFollower
from shoal.weights import WeightSnapshot, WeightStore
from waiting import wait_for


def weights(version: int) -> WeightSnapshot:
    return WeightSnapshot.of(version, {"bias": np.full(2, version, np.float32)})


class Taker:
    """Takes what is not in `damaged`."""

    def __init__(self, *damaged: int) -> None:
        self.damaged = damaged
        self.version = 0
        self.rejected = 0

    def __call__(self, snapshot: WeightSnapshot) -> None:
        if snapshot.version in self.damaged:
            self.rejected = snapshot.version
            raise WeightsError(f"version {snapshot.version} is damaged")
        self.version = snapshot.version


class Scripted:
    """A source that says what it is told to, and counts its questions. Versions may go back, as an alias does."""

    is_reachable = True

    def __init__(self) -> None:
        self.now: WeightSnapshot | Exception | None = None
        self.asked = 0

    def latest(self) -> WeightSnapshot | None:
        return self.wait_newer(0, 0.0)

    def wait_newer(self, than: int, timeout_s: float) -> WeightSnapshot | None:
        self.asked += 1
        if isinstance(self.now, Exception):
            raise self.now
        if self.now is None or self.now.version == than:
            time.sleep(timeout_s)
            return None
        return self.now


def test_what_is_published_is_taken_and_what_does_not_fit_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    store, taker = WeightStore(), Taker(2)
    follower = WeightFollower(store, taker, poll_s=0.05)
    store.publish(weights(1))
    wait_for(lambda: taker.version == 1)
    store.publish(weights(2))
    wait_for(lambda: taker.rejected == 2)
    assert (taker.version, follower.is_alive) == (1, True)
    assert "serving continues" in caplog.text
    store.publish(weights(3))
    wait_for(lambda: taker.version == 3)
    follower.close()
    follower.close()
    assert not follower.is_alive


@pytest.mark.parametrize("fits", [True, False])
def test_it_has_polled_when_what_was_published_is_taken_or_rejected(fits: bool) -> None:
    """A replica that served earlier would answer 503, and attract the retries, while others could answer."""
    store = WeightStore()
    began, release = threading.Event(), threading.Event()
    taker = Taker(*([] if fits else [1]))
    store.publish(weights(1))
    follower = WeightFollower(store, lambda snapshot: [began.set(), release.wait(60), taker(snapshot)], poll_s=0.02)
    assert began.wait(60)
    assert not follower.has_polled
    release.set()
    wait_for(lambda: follower.has_polled)
    assert (taker.version, taker.rejected) == ((1, 0) if fits else (0, 1))
    follower.close()


def test_it_has_polled_when_nothing_is_published() -> None:
    follower = WeightFollower(WeightStore(), Taker(), poll_s=0.02)
    wait_for(lambda: follower.has_polled)
    follower.close()


def test_it_has_not_polled_while_its_source_is_away() -> None:
    """A store that restarts, or a machine that is too busy: what was published is unknown."""
    source = Scripted()
    source.is_reachable = False
    follower = WeightFollower(source, Taker(), poll_s=0.02)
    wait_for(lambda: source.asked > 2)
    assert not follower.has_polled
    source.is_reachable = True
    wait_for(lambda: follower.has_polled)
    follower.close()


def test_it_goes_back_with_its_source_and_rests_when_there_is_nothing_new() -> None:
    source, taker = Scripted(), Taker(4)
    follower = WeightFollower(source, taker, poll_s=0.02)
    source.now = weights(3)
    wait_for(lambda: taker.version == 3)
    source.now = weights(4)
    wait_for(lambda: taker.rejected == 4)
    source.now = weights(2)
    wait_for(lambda: taker.version == 2)
    asked = source.asked
    wait_for(lambda: source.asked >= asked + 3)  # each of these waited for poll_s: no busy loop
    assert taker.version == 2
    source.now = WeightsError("the file is damaged")
    asked = source.asked
    wait_for(lambda: source.asked >= asked + 3)
    assert follower.is_alive
    source.now = weights(5)
    wait_for(lambda: taker.version == 5)
    follower.close()
