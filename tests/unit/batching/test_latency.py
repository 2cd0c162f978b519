"""The latency model: close to what was measured, rising with the rows, unmoved by a slow batch, quick to follow."""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.batching.latency_model import FRESH_S, QUANTILE, WINDOW, ForwardTime, LatencyModel, size_class

observations = st.lists(st.tuples(st.integers(1, 300), st.floats(1e-5, 10.0)), min_size=1, max_size=80)


def learned(points: list[tuple[int, float]]) -> LatencyModel:
    model = LatencyModel()
    for rows, seconds in points:
        model.observe(rows, seconds, 0.0)
    return model


def test_nothing_is_promised_before_the_first_batch() -> None:
    model = LatencyModel()
    assert model.seconds(1) == model.seconds(1000) == 0.0
    assert model.rows_within(0.0) == math.inf
    assert model.list_points() == []


@settings(max_examples=60)
@given(points=observations)
def test_it_never_falls_with_the_rows_and_stays_within_what_was_seen(points: list[tuple[int, float]]) -> None:
    model = learned(points)
    estimates = [model.seconds(rows) for rows in range(1, 310)]
    assert all(after >= before - 1e-12 for before, after in pairwise(estimates))
    seen = [seconds for _, seconds in points]
    assert min(seen) - 1e-12 <= estimates[0] <= estimates[-1] <= max(seen) + 1e-12


@settings(max_examples=60)
@given(points=observations, seconds=st.floats(-1.0, 11.0))
def test_rows_within_is_the_other_way_round(points: list[tuple[int, float]], seconds: float) -> None:
    model = learned(points)
    rows = model.rows_within(seconds)
    if rows == math.inf:
        assert model.seconds(10_000) <= seconds
    else:
        assert rows == 0 or model.seconds(rows) <= seconds + 1e-9
        assert model.seconds(rows + 2) > seconds - 1e-9


def test_between_the_sizes_that_were_seen_it_is_a_straight_line_and_flat_outside() -> None:
    model = learned([(4, 0.04), (8, 0.08)])
    assert model.seconds(6) == pytest.approx(0.06)
    assert (model.seconds(1), model.seconds(100)) == (0.04, 0.08)
    assert (model.rows_within(0.06), model.rows_within(0.03), model.rows_within(0.09)) == (6, 0, math.inf)


def test_a_noisy_affine_model_is_learned_to_its_high_quantile() -> None:
    draw = random.Random(7)
    model = LatencyModel()
    for _ in range(4000):
        rows = draw.randint(1, 64)
        model.observe(rows, (0.02 + 0.0005 * rows) * draw.uniform(0.9, 1.1), 0.0)
    for rows in (1, 5, 17, 32, 64):
        assert model.seconds(rows) == pytest.approx((0.02 + 0.0005 * rows) * (0.9 + 0.2 * QUANTILE), rel=0.05)


@pytest.mark.parametrize("outliers", [1, 3])
def test_slow_batches_now_and_then_do_not_move_it(outliers: int) -> None:
    model = learned([(8, 0.01)] * WINDOW)
    for _ in range(outliers):
        model.observe(8, 5.0, 0.0)
    assert model.seconds(8) == 0.01


def test_a_slow_first_batch_is_forgotten_with_the_second() -> None:
    model = learned([(1, 60.0)])
    model.observe(1, 0.02, 0.0)
    assert model.seconds(1) == 0.02
    model.observe(1, 0.03, 0.0)
    assert model.seconds(1) == 0.03


def test_a_model_that_became_slower_is_known_within_a_few_batches_and_faster_within_a_window() -> None:
    model = learned([(8, 0.01)] * WINDOW)
    for _ in range(WINDOW // 5):
        model.observe(8, 0.02, 0.0)
    assert model.seconds(8) == 0.02
    for _ in range(WINDOW):
        model.observe(8, 0.005, 0.0)
    assert model.seconds(8) == 0.005


def test_sizes_that_were_not_seen_again_follow_those_that_were() -> None:
    model = learned([(1, 0.01), (64, 0.1)])
    model.observe(8, 0.2, 0.0)  # the model was replaced by a slower one
    model.observe(8, 0.2, 0.0)
    assert (model.seconds(1), model.seconds(64)) == (0.01, 0.2)
    model = learned([(1, 0.1), (64, 0.2)])
    model.observe(8, 0.03, 0.0)  # by a faster one
    assert (model.seconds(1), model.seconds(64)) == (0.03, 0.2)


def test_a_single_slow_batch_moves_no_other_size_and_costs_no_more_than_its_rows_did_elsewhere() -> None:
    model = learned([(1, 0.01), (4, 0.02), (8, 0.03)])
    model.observe(6, 5.0, 0.0)
    assert [model.seconds(rows) for rows in (1, 4, 6, 8)] == [0.01, 0.02, 0.03, 0.03]
    model.observe(16, 5.0, 0.0)
    assert model.seconds(16) == pytest.approx(0.06)


def test_a_slow_spell_of_one_size_is_forgotten_by_all_when_it_has_gone_from_that_one() -> None:
    model = learned([(1, 0.01), (2, 0.02), (64, 0.1)])
    for _ in range(WINDOW):
        model.observe(1, 5.0, 1.0)
    assert model.seconds(64) == 5.0
    for _ in range(WINDOW):
        model.observe(1, 0.01, 2.0)
    assert model.list_points() == [(1, 0.01), (2, 0.02), (64, 0.1)]


def test_where_two_sizes_that_are_known_contradict_each_other_the_cheaper_is_right() -> None:
    model = learned([(4, 5.0)] * 3 + [(8, 0.03)] * 3)
    assert model.seconds(4) == 0.03


def test_what_was_not_seen_while_others_were_is_doubted() -> None:
    model = learned([(8, 5.0)] * WINDOW)
    for _ in range(WINDOW):
        model.observe(4, 0.02, FRESH_S + 1)
    assert model.seconds(8) == pytest.approx(0.04)
    model.observe(8, 0.03, FRESH_S + 2)
    assert model.seconds(8) == 0.03


def test_time_alone_takes_nothing_away() -> None:
    model = learned([(8, 0.03)] * WINDOW)
    model.observe(16, 0.05, 100 * FRESH_S)
    assert (model.seconds(8), model.seconds(16)) == (0.03, 0.05)


def test_classes_grow_with_the_rows_and_are_at_most_a_quarter_wide() -> None:
    classes = [size_class(rows) for rows in range(1, 2000)]
    assert classes == sorted(classes)
    for key in set(classes):
        first, count = classes.index(key) + 1, classes.count(key)
        assert count <= max(1, first / 4)


def test_the_forward_is_a_line_through_the_points() -> None:
    forward = ForwardTime([(1, 0.0205), (32, 0.036)])
    assert forward.seconds(1) == 0.0205
    assert forward.seconds(16) == pytest.approx(0.028)
    assert forward.seconds(64) == pytest.approx(0.052)
    assert forward.capacity_per_s(32) == pytest.approx(32 / 0.036)
    assert ForwardTime([(8, 0.1)]).seconds(1) == ForwardTime([(8, 0.1)]).seconds(99) == 0.1


def test_the_forward_never_falls_with_the_rows_and_the_cheaper_is_right() -> None:
    falling = ForwardTime([(8, 0.01), (1, 0.02)])
    assert [falling.seconds(rows) for rows in (1, 4, 8, 64)] == [0.01] * 4
    assert falling.capacity_per_s(64) == pytest.approx(64 / 0.01)
    dented = ForwardTime([(1, 0.01), (8, 0.03), (16, 0.02), (32, 0.04)])
    assert dented.seconds(4) == pytest.approx(0.01 + 0.01 * 3 / 7)
    assert dented.seconds(12) == 0.02
    assert dented.seconds(48) == pytest.approx(0.06)
