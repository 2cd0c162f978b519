"""What a replica reports of its models: requests, and the time of a batch of them."""

from dataclasses import replace

import pytest

from shoal.batching.batcher import BatcherCounts
from shoal.serve.scaling.replica_counts import LoadMeter, ModelLoad, decode, encode

NONE = BatcherCounts()
MODEL = ModelLoad(NONE, 3, [(1, 0.01), (8, 0.08)], 8)


def test_one_model_is_its_own_curve_and_counts_rejected_requests() -> None:
    counts = BatcherCounts(submitted=10, refused_full=2, refused_late=1)
    load = LoadMeter(lambda: 1.5).measure({"a": replace(MODEL, counts=counts)})
    assert (load.requests, load.waiting, load.loop_s) == (13, 3, 1.5)
    assert [size for size, _ in load.curve] == [1, 2, 4, 8]
    assert [seconds for _, seconds in load.curve] == pytest.approx([0.01, 0.02, 0.04, 0.08])
    assert decode(encode(load) | {"ongoing": 7.0}) == load


def test_a_request_of_four_rows_takes_as_long_as_four() -> None:
    counts = BatcherCounts(submitted=5, answered=5, rows=20)
    load = LoadMeter(lambda: 0.0).measure({"a": replace(MODEL, counts=counts)})
    assert dict(load.curve) == pytest.approx({1: 0.04, 2: 0.08})


def test_two_models_share_a_replica_by_what_is_asked_of_them() -> None:
    meter, slow = LoadMeter(lambda: 0.0), replace(MODEL, latency=[(1, 0.1)])
    assert dict(meter.measure({"a": MODEL, "b": slow}).curve)[1] == pytest.approx((0.01 + 0.1) / 2)
    busy = replace(MODEL, counts=BatcherCounts(submitted=100))
    load = meter.measure({"a": busy, "b": slow})
    assert dict(load.curve)[1] == pytest.approx(0.01)
    assert load.requests == 100
    assert meter.measure({"b": slow}).requests == 100  # of a model that is gone, too


def test_without_a_measured_forward_there_is_no_curve() -> None:
    assert LoadMeter(lambda: 0.0).measure({"a": replace(MODEL, latency=[])}).curve == ()
    assert LoadMeter(lambda: 0.0).measure({}).curve == ()


def test_a_model_that_was_dropped_and_loaded_again_counts_on() -> None:
    meter = LoadMeter(lambda: 0.0)
    measured = [
        meter.measure({"a": replace(MODEL, counts=BatcherCounts(submitted=submitted))} if submitted else {}).requests
        for submitted in (20, 0, 5, 25, 3)
    ]
    assert measured == [20, 20, 25, 45, 48]
