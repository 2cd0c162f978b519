"""The replay against an oracle that keeps every step in lists: returns, priorities, overwriting, and files."""

import os
from pathlib import Path

import numpy as np
import psutil
import pytest

from rl_setting import EXPERIENCE, random_batch
from shoal.errors import ConfigError
from shoal.libs.off_policy.replay import Replay
from shoal.libs.off_policy.ring import SMALLEST_PRIORITY, SumTree
from shoal.rl.experience.queue import ExperienceBatch

DISCOUNT = 0.9
MB = 2**20


def make_replay(rows: int = 1000, exponent: float = 0.6, folder: Path | None = None) -> Replay:
    row_bytes = 16 + 8 + 4 + 4 + 1 + 8 + 8 + 8 / 64
    replay = Replay(EXPERIENCE, int(np.ceil(rows * row_bytes)), exponent, np.random.default_rng(0), folder)
    assert replay.capacity == rows
    return replay


def list_steps(batch: ExperienceBatch, num_steps: int) -> dict[bytes, tuple[float, float, np.ndarray, int]]:
    """By the observation of each step: its return, discount, next observation and action; step by step."""
    found = {}
    row = step = 0
    for length, terminated in zip(batch.lengths, batch.terminated, strict=True):
        for t in range(length):
            total, t_next = 0.0, t
            while t_next < length and t_next < t + num_steps:
                total += DISCOUNT ** (t_next - t) * float(batch.rewards[step + t_next])
                t_next += 1
            discount = 0.0 if terminated and t_next == length else DISCOUNT ** (t_next - t)
            following = batch.observations[row + t_next]
            found[batch.observations[row + t].tobytes()] = (total, discount, following, int(batch.actions[step + t]))
        row, step = row + length + 1, step + length
    return found


def test_a_tree_draws_in_proportion_and_never_what_is_zero() -> None:
    random = np.random.default_rng(0)
    values = random.random(700) * (random.random(700) < 0.7)
    tree = SumTree(700)
    tree.set(np.arange(700), values)
    fractions = np.linspace(0, 1, 100_000, endpoint=False)
    found = tree.find(fractions)
    # Where each fraction falls by the running sum of all numbers; a fraction on a border may fall on either side.
    expected = np.searchsorted(np.cumsum(values) / values.sum(), fractions, side="right")
    assert np.mean(found == expected) > 0.9999
    assert (values[found] > 0).all()
    counts = np.bincount(found, minlength=700)
    np.testing.assert_allclose(counts / len(fractions), values / values.sum(), atol=2 / len(fractions))
    assert (values[tree.find(np.array([0.0, 1 - 2**-53]))] > 0).all()


def test_a_tree_follows_changes_and_an_empty_one_draws_nothing() -> None:
    tree = SumTree(40)
    with pytest.raises(ValueError, match="nothing to draw"):
        tree.find(np.array([0.5]))
    tree.set(np.array([3, 39]), np.array([1.0, 3.0]))
    assert tree.total == 4.0
    assert tree.find(np.array([0.2, 0.3])).tolist() == [3, 39]
    tree.set(np.array([39, 39]), np.array([7.0, 0.0]))  # the last one counts
    assert tree.total == 1.0


@pytest.mark.parametrize("num_steps", [1, 3, 7])
def test_returns_end_with_the_segment_and_bootstrap_unless_it_terminated(num_steps: int) -> None:
    batches = [random_batch(1, [5, 1, 12], [True, False, False]), random_batch(2, [3, 8], [False, True])]
    replay = make_replay()
    expected: dict[bytes, tuple[float, float, np.ndarray, int]] = {}
    for batch in batches:
        replay.insert(batch)
        expected |= list_steps(batch, num_steps)
    assert replay.num_steps == len(expected) == 29
    sample = replay.sample(600, num_steps, DISCOUNT, beta=0.4)
    seen = set()
    for index, observation in enumerate(sample.observations):
        total, discount, following, action = expected[observation.tobytes()]
        seen.add(observation.tobytes())
        np.testing.assert_allclose(sample.returns[index], total, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sample.discounts[index], discount, rtol=1e-6)
        np.testing.assert_array_equal(sample.next_observations[index], following)
        assert sample.actions[index] == action
    assert seen == set(expected)  # each step can be drawn, and no observation after a segment's end
    np.testing.assert_allclose(sample.weights, 1.0)  # all priorities are equal


def test_priorities_are_errors_to_the_exponent_and_weights_undo_them() -> None:
    replay = make_replay(exponent=0.6)
    batch = random_batch(3, [10])
    errors = np.linspace(-2, 3, 10).astype(np.float32)
    replay.insert(batch, errors)
    priorities = (np.abs(errors.astype(np.float64)) + SMALLEST_PRIORITY) ** 0.6
    probabilities = priorities / priorities.sum()
    step_of = {observation.tobytes(): step for step, observation in enumerate(batch.observations)}
    sample = replay.sample(50_000, 1, DISCOUNT, beta=0.7)
    steps = np.array([step_of[observation.tobytes()] for observation in sample.observations])
    np.testing.assert_allclose(np.bincount(steps) / 50_000, probabilities, atol=1e-4)  # stratified: nearly exact
    weights = (10 * probabilities[steps]) ** -0.7
    np.testing.assert_allclose(sample.weights, weights / weights.max(), rtol=1e-5)

    replay.update_priorities(sample.rows, np.where(steps == 4, 1.0, 0.0).astype(np.float32))
    drawn = replay.sample(1000, 1, DISCOUNT, beta=0.7)
    share = np.mean([step_of[observation.tobytes()] == 4 for observation in drawn.observations])
    assert share > 0.99


def test_new_rows_replace_the_oldest_and_their_priorities_vanish() -> None:
    replay = make_replay(rows=40)
    batches = [random_batch(seed, [7, 4]) for seed in range(9)]  # 13 rows each
    for number, batch in enumerate(batches):
        before = replay.sample(64, 3, DISCOUNT, 0.4) if number else None
        replay.insert(batch, np.full(11, 1.0, np.float32))
        expected: dict[bytes, tuple[float, float, np.ndarray, int]] = {}
        stored = np.concatenate([each.observations for each in batches[: number + 1]])[-40:]
        for each in batches[: number + 1]:
            expected |= list_steps(each, 3)
        if before is not None:  # late priorities, of rows that may have been overwritten
            replay.update_priorities(before.rows, np.full(64, 1.0, np.float32))
        can_be_drawn = {row.tobytes() for row in stored} & set(expected)
        assert replay.num_steps == len(can_be_drawn)
        assert replay._tree.total == pytest.approx(len(can_be_drawn))
        sample = replay.sample(400, 3, DISCOUNT, 0.4)
        assert {row.tobytes() for row in sample.observations} == can_be_drawn
        for index, observation in enumerate(sample.observations):
            total, discount, following, _ = expected[observation.tobytes()]
            np.testing.assert_allclose(sample.returns[index], total, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(sample.discounts[index], discount, rtol=1e-6)
            np.testing.assert_array_equal(sample.next_observations[index], following)


def test_a_batch_above_the_capacity_leaves_its_newest_rows() -> None:
    replay = make_replay(rows=20)
    batch = random_batch(5, [16, 16, 16])
    replay.insert(batch)
    sample = replay.sample(300, 2, DISCOUNT, 0.4)
    # 20 rows: the last segment with its 17, and two steps and the end of the one before
    newest = np.concatenate([batch.observations[31:33], batch.observations[34:50]])
    assert {row.tobytes() for row in sample.observations} == {row.tobytes() for row in newest}


def test_a_ring_below_one_segment_is_refused() -> None:
    with pytest.raises(ConfigError, match="replay_mb"):
        Replay(EXPERIENCE, 200, 0.6, np.random.default_rng(0))


def test_files_outlive_the_process_but_for_the_rows_that_it_was_writing(tmp_path: Path) -> None:
    first = make_replay(rows=40, folder=tmp_path)
    batches = [random_batch(seed, [7, 4]) for seed in range(5)]
    for batch in batches:
        first.insert(batch)
    again = make_replay(rows=40, folder=tmp_path)
    again.load_state_dict({"num_inserted": 26})  # of an older checkpoint
    assert (again.num_steps, again.num_inserted) == (first.num_steps, first.num_inserted)
    assert {row.tobytes() for row in again.sample(400, 1, DISCOUNT, 0).observations} == {
        row.tobytes() for row in first.sample(400, 1, DISCOUNT, 0).observations
    }
    again.insert(random_batch(9, [5]))  # it writes where the first one would have
    np.testing.assert_array_equal(again._row_of_slot, first._row_of_slot)

    first._row_of_slot[np.arange(71, 75) % 40] = -1  # dies as it begins to write four rows
    first._arrays["observations"][np.arange(71, 74) % 40] = np.nan
    last = make_replay(rows=40, folder=tmp_path)
    assert np.isfinite(last.sample(400, 3, DISCOUNT, 0).next_observations).all()
    assert np.isfinite(last.sample(400, 3, DISCOUNT, 0).observations).all()


def test_another_size_begins_with_nothing(tmp_path: Path) -> None:
    make_replay(rows=40, folder=tmp_path).insert(random_batch(1, [7]))
    assert make_replay(rows=60, folder=tmp_path).num_steps == 0


def test_files_larger_than_the_disk_are_refused_at_once(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    too_large = 2 * free.f_bavail * free.f_frsize
    with pytest.raises(ConfigError, match="and there are"):
        Replay(EXPERIENCE, too_large, 0.6, np.random.default_rng(0), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size_bytes", [2 * psutil.virtual_memory().total, 2**60])
def test_a_ring_larger_than_the_memory_is_refused_at_once(size_bytes: int) -> None:
    with pytest.raises(ConfigError, match=r"bytes in memory.*replay_on_disk=true"):
        Replay(EXPERIENCE, size_bytes, 0.6, np.random.default_rng(0))
