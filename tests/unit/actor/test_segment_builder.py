"""What the ready loop makes of the steps of an environment, whatever kind of numbers that has."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from rl_setting import EXPERIENCE
from shoal.actor.segment_builder import SegmentBuilder
from shoal.errors import InvalidSegment
from shoal.wire import Segment, pack_segment
from shoal.wire.experience_spec import TensorSpec


def played(observations: list[object], *, reward: object = 1.0, terminated: object = True) -> Segment:
    """The segment of an episode that shows `observations` and ends with the last of them."""
    builder = SegmentBuilder(EXPERIENCE)
    builder.begin(observations[0])
    for observation in observations[1:-1]:
        assert builder.step(1, -0.5, 3, reward, observation, False, False) is None  # type: ignore[arg-type]
    segment = builder.step(1, -0.5, 3, reward, observations[-1], terminated, False)  # type: ignore[arg-type]
    assert segment is not None
    return segment


def test_an_environment_may_give_the_same_array_each_time() -> None:
    builder, state = SegmentBuilder(EXPERIENCE), np.zeros(4)
    builder.begin(state)
    for number in range(1, 4):
        state += 1.0
        segment = builder.step(1, -0.5, 3, 1.0, state, number == 3, False)
    assert segment is not None
    assert segment.observations[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_segment_is_not_changed_by_the_steps_after_it() -> None:
    builder = SegmentBuilder(EXPERIENCE)
    builder.begin(np.zeros(4))
    segments = [
        segment
        for number in range(1, 33)
        if (segment := builder.step(1, -0.5, 3, 1.0, np.full(4, number), False, False)) is not None
    ]
    assert [segment.observations[:, 2].tolist() for segment in segments] == [
        list(map(float, range(17))),
        list(map(float, range(16, 33))),
    ]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64, float, int])
def test_numbers_of_any_kind_can_be_sent(kind: type) -> None:
    segment = played([[0.0] * 4, np.ones(4), (2,) * 4], reward=kind(2), terminated=np.bool_(True))
    assert pack_segment(segment, seq=0)
    assert (segment.episode_return, segment.episode_length, segment.terminated) == (4.0, 2, True)


@pytest.mark.parametrize(
    ("other", "shape"), [(np.zeros(1), r"\(1,\)"), (5.0, r"\(\)"), (np.zeros((4, 4)), r"\(4, 4\)")]
)
def test_an_observation_of_another_shape_is_refused_where_it_comes_from(other: object, shape: str) -> None:
    builder = SegmentBuilder(EXPERIENCE)
    with pytest.raises(InvalidSegment, match=rf"observation: {shape}, expected \(4,\)"):
        builder.begin(other)
    builder.begin(np.zeros(4))
    with pytest.raises(InvalidSegment, match=rf"observation: {shape}, expected \(4,\)"):
        builder.step(1, -0.5, 3, 1.0, other, False, False)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (["a", "b", "c", "d"], "<U1, expected float32"),
        ({"position": 1.0}, r"\(\), expected \(4,\)"),
        ([[0.0, 1.0], [2.0], [3.0], [4.0]], "a list of parts of several sizes"),
        (np.zeros(4, np.complex128), "complex128, expected float32"),
    ],
)
def test_an_observation_that_is_no_array_of_numbers_is_refused(other: object, problem: str) -> None:
    with pytest.raises(InvalidSegment, match=f"observation: {problem}"):
        SegmentBuilder(EXPERIENCE).begin(other)


def test_a_step_that_was_refused_leaves_no_trace() -> None:
    """A game may take the observation again; what lay in the builder's memory before must not be learnt from."""
    builder = SegmentBuilder(EXPERIENCE)
    builder.begin(np.zeros(4))
    with pytest.raises(InvalidSegment):
        builder.step(0, -0.5, 3, 7.0, np.zeros(3), False, False)
    segment = builder.step(1, -0.5, 3, 1.0, np.ones(4), True, False)
    assert segment is not None
    assert (segment.actions.tolist(), segment.rewards.tolist()) == ([1], [1.0])
    assert segment.observations.tolist() == [[0.0] * 4, [1.0] * 4]


BYTES = msgspec.structs.replace(EXPERIENCE, observation=TensorSpec("uint8", (3,)))


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (np.array([0.25, 0.5, 1.0]), "float64, expected uint8"),
        ([0.25, 0.5, 1.0], "float64, expected uint8"),
        (np.array([0, 300, 1]), "from 0 to 300, expected uint8"),
        ([-1, 0, 1], "from -1 to 1, expected uint8"),
    ],
)
def test_numbers_that_bytes_cannot_hold_are_refused_and_not_cut_or_wrapped(other: object, problem: str) -> None:
    builder = SegmentBuilder(BYTES)
    with pytest.raises(InvalidSegment, match=f"observation: {problem}"):
        builder.begin(other)
    builder.begin(np.zeros(3, np.uint8))
    with pytest.raises(InvalidSegment, match=f"observation: {problem}"):
        builder.step(1, -0.5, 3, 1.0, other, False, False)


def test_an_action_that_is_no_whole_number_is_refused() -> None:
    builder = SegmentBuilder(EXPERIENCE)
    builder.begin(np.zeros(4))
    with pytest.raises(InvalidSegment, match="action: float64, expected int64"):
        builder.step(1.9, -0.5, 3, 1.0, np.zeros(4), True, False)
