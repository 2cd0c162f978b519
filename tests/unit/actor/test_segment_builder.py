"""What the ready loop makes of the steps of an environment, whatever kind of numbers that has."""

import re
from contextlib import nullcontext
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch

from rl_setting import EXPERIENCE, segment
from shoal.actor.exchange import Outbox
from shoal.actor.segment_builder import SegmentBuilder, require_numbers
from shoal.errors import InvalidSegment
from shoal.wire import PackedSegment, Segment, pack_segment
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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (np.bool_(True), ""),
        (np.float16(2), ""),
        (Fraction(1, 3), ""),
        (torch.tensor(1.0), ""),
        ([np.bool_(True), 1.0], ""),
        ([torch.tensor(1.0), 2.0], ""),
        (np.array([1, 2], np.float16), ""),
        (np.array([1, 2], object), ""),
        (np.float16(np.inf), "x of agent 7: infinite in float32"),
        (np.array([1, -np.inf], np.float16), "x[1] of agent 7: infinite in float32"),
        ([10**400, 1.0], "x[0] of agent 7: infinite in float32"),
        ([0.0, torch.tensor(torch.nan)], "x[1] of agent 7: NaN"),
        ([1.0, "2"], "x[1] of agent 7: no number"),
        (np.array(["1", "2"]), "x[0] of agent 7: no number"),
        ([b"1", 2.0], "x[0] of agent 7: no number"),
        (None, "x of agent 7: no number"),
        (np.complex64(1), "x of agent 7: no number"),
        ([1j, 2.0], "x[0] of agent 7: no number"),
        ([1.0, {}], "x[1] of agent 7: no number"),
    ],
)
def test_what_can_be_a_float_is_a_number(values: object, problem: str) -> None:
    size = 2 if np.ndim(values) else 1  # type: ignore[arg-type]
    with nullcontext() if not problem else pytest.raises(InvalidSegment, match=re.escape(problem) + "$"):
        require_numbers("x", values, 7, size)


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        (["a", "b", "c", "d"], "<U1, expected float32"),
        ({"position": 1.0}, r"\(\), expected \(4,\)"),
        (np.zeros(1), r"\(1,\), expected \(4,\)"),
        (np.zeros((4, 4)), r"\(4, 4\), expected \(4,\)"),
        ([[0.0, 1.0], [2.0], [3.0], [4.0]], "a list of parts of several sizes"),
        (np.zeros(4, np.complex128), "complex128, expected float32"),
    ],
)
def test_an_observation_that_is_no_array_of_numbers_is_refused(other: object, problem: str) -> None:
    builder = SegmentBuilder(EXPERIENCE)
    with pytest.raises(InvalidSegment, match=f"observation: {problem}"):
        builder.begin(other)
    builder.begin(np.zeros(4))
    with pytest.raises(InvalidSegment, match=f"observation: {problem}"):
        builder.step(1, -0.5, 3, 1.0, other, False, False)


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


def filled(num_segments: int, send_limit: int) -> Outbox:
    outbox = Outbox()
    outbox.begin_session(0, send_limit)
    for _ in range(num_segments):
        outbox.add(PackedSegment.from_segment(segment()))
    return outbox


def numbers(outbox: Outbox) -> list[int]:
    return [seq for seq, _ in outbox.take_sendable()]


def test_nothing_is_sent_beyond_the_limit_and_nothing_twice() -> None:
    outbox = filled(5, send_limit=3)
    assert numbers(outbox) == [0, 1, 2]
    assert numbers(outbox) == []
    assert not outbox.has_credit
    outbox.raise_send_limit(2)
    outbox.raise_send_limit(6)
    assert numbers(outbox) == [3, 4]
    assert outbox.has_credit


def test_an_acknowledgement_settles_everything_before_it() -> None:
    outbox = filled(5, send_limit=5)
    numbers(outbox)
    outbox.acknowledge(2)
    outbox.acknowledge(1)
    assert len(outbox) == 2
    assert outbox.add(PackedSegment.from_segment(segment())) == 5


def test_a_new_session_sends_again_what_the_gateway_does_not_have_as_far_as_there_is_credit() -> None:
    outbox = filled(6, send_limit=6)
    numbers(outbox)
    outbox.begin_session(next_seq=2, send_limit=4)
    assert numbers(outbox) == [2, 3]
    assert outbox.next_seq == 6


def test_a_gateway_that_lost_its_record_gets_the_rest_under_its_own_numbers() -> None:
    outbox = filled(4, send_limit=4)
    numbers(outbox)
    outbox.acknowledge(1)
    outbox.begin_session(next_seq=0, send_limit=9)
    assert numbers(outbox) == [0, 1]
    assert outbox.next_seq == 2
