"""What the ready loop makes of the steps of an environment, whatever kind of numbers that has."""

from __future__ import annotations

import numpy as np
import pytest

from rl_setting import EXPERIENCE
from shoal.actor.loop import SegmentBuilder
from shoal.errors import InvalidSegment
from shoal.wire import Segment, pack_segment


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


def test_an_observation_of_another_shape_is_refused_where_it_comes_from() -> None:
    builder = SegmentBuilder(EXPERIENCE)
    with pytest.raises(InvalidSegment, match=r"observation.*\(1,\).*\(4,\)"):
        builder.begin(np.zeros(1))
