"""Which snapshot a store gives to whom."""

import threading

import numpy as np

from shoal.weights import WeightSnapshot, WeightStore


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
