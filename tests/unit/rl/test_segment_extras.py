"""Named extra tensors of a segment, from the builder over the wire and the queue to a batch, bad ones included."""

import re
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from abandoned_ledgers import ledgers_may_stay_open  # noqa: F401
from shoal.actor.segment_builder import SegmentBuilder
from shoal.errors import InvalidSegment
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.wire import (
    DropReason,
    ExperienceSpec,
    ExtraSpec,
    MessageLimits,
    Segment,
    SegmentMessage,
    TensorSpec,
    decode,
    unpack_segment,
)
from shoal.wire.segment import estimate_segment_bytes, largest_segment_bytes
from wire_cases import SPEC, frames_of, valid_segment

STATE = ExtraSpec("state", TensorSpec("float32", (3,), -1.0, 1.0), "segment")
MASK = ExtraSpec("mask", TensorSpec("bool", (2,)), "observation")
WITH_EXTRAS = msgspec.structs.replace(SPEC, extras=(STATE, MASK))


def segment_with_extras(num_steps: int = 3) -> Segment:
    mask = np.arange(2 * (num_steps + 1)).reshape(-1, 2) % 3 == 0
    return replace(valid_segment(num_steps), extras={"state": np.full((1, 3), 0.5, np.float32), "mask": mask})


def unpack(segment: Segment, spec: ExperienceSpec = WITH_EXTRAS) -> Segment:
    frames = frames_of(segment)
    message = decode(frames, MessageLimits())
    assert isinstance(message, SegmentMessage)
    return unpack_segment(message, frames[1:], spec)


# -- the wire ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, SPEC.segment_length))
def test_extras_come_back_equal(num_steps: int) -> None:
    segment = segment_with_extras(num_steps)
    received = unpack(segment).extras
    assert received.keys() == {"state", "mask"}
    for name, array in received.items():
        np.testing.assert_array_equal(array, segment.extras[name])
        assert array.dtype == segment.extras[name].dtype


def test_a_run_without_extras_ignores_them_and_sends_the_spec_without_the_word() -> None:
    assert unpack(segment_with_extras(), SPEC).extras == {}
    assert b"extras" not in msgspec.msgpack.encode(SPEC)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(WITH_EXTRAS), type=ExperienceSpec) == WITH_EXTRAS


@pytest.mark.parametrize(
    ("name", "array", "reason", "problem"),
    [
        ("state", np.zeros((1, 3), np.float64), DropReason.INVALID_DTYPE, "float64, expected float32"),
        ("state", np.zeros(3, np.float32), DropReason.INVALID_SHAPE, r"\[3\], expected \[1, 3\]"),
        ("state", np.zeros((4, 3), np.float32), DropReason.INVALID_SHAPE, r"\[4, 3\], expected \[1, 3\]"),
        ("state", np.full((1, 3), np.nan, np.float32), DropReason.NON_FINITE, "nan is not finite in float32"),
        ("state", np.full((1, 3), 1.5, np.float32), DropReason.INVALID_RANGE, "1.5 is above 1.0"),
        ("mask", np.ones((3, 2), np.bool_), DropReason.INVALID_SHAPE, r"\[3, 2\], expected \[4, 2\]"),
        ("mask", np.ones((4, 2), np.uint8), DropReason.INVALID_DTYPE, "uint8, expected bool"),
        ("mask", np.full((4, 2), 2, np.uint8).view(np.bool_), DropReason.INVALID_RANGE, "neither 0 nor 1"),
    ],
)
def test_an_extra_that_does_not_fit_is_refused(name: str, array: np.ndarray, reason: DropReason, problem: str) -> None:
    segment = segment_with_extras()
    with pytest.raises(InvalidSegment, match=problem) as caught:
        unpack(replace(segment, extras={**segment.extras, name: array}))
    assert (caught.value.reason, caught.value.field) == (reason, name)


@pytest.mark.parametrize(
    ("name", "array", "reason", "problem"),
    [
        ("observations", np.full((4, 4), 1e300), DropReason.NON_FINITE, "1e+300 is not finite in float32"),
        ("observations", np.full((4, 4), -np.inf), DropReason.NON_FINITE, "-inf is not finite in float32"),
        ("rewards", np.array([0, 0, 1e30], np.float32), DropReason.INVALID_RANGE, "e+30 is above 1000000000000.0"),
        ("rewards", np.array([0, -2e12, 0], np.float32), DropReason.INVALID_RANGE, "is below -1000000000000.0"),
        ("rewards", np.array([1e12, -1e12, 0], np.float32), None, ""),
        ("observations", np.full((4, 4), 3e38), None, ""),
    ],
)
def test_a_number_that_the_learner_cannot_take_is_refused_with_its_value(
    name: str, array: np.ndarray, reason: DropReason | None, problem: str
) -> None:
    spec = msgspec.structs.replace(SPEC, observation=TensorSpec("float64", (4,)))
    sent = replace(valid_segment(), observations=np.zeros((4, 4)))
    frames = frames_of(replace(sent, **{name: array}))  # type: ignore[arg-type]
    message = decode(frames, MessageLimits())
    assert isinstance(message, SegmentMessage)
    if reason is None:
        assert unpack_segment(message, frames[1:], spec).num_steps == 3
        return
    with pytest.raises(InvalidSegment, match=re.escape(problem)) as caught:
        unpack_segment(message, frames[1:], spec)
    assert (caught.value.reason, caught.value.field) == (reason, name)


@pytest.mark.parametrize("name", ["state", "mask"])
def test_a_missing_extra_is_refused(name: str) -> None:
    segment = segment_with_extras()
    others = {each: array for each, array in segment.extras.items() if each != name}
    with pytest.raises(InvalidSegment, match="is missing") as caught:
        unpack(replace(segment, extras=others))
    assert (caught.value.reason, caught.value.field) == (DropReason.INVALID_FRAMES, name)


def test_the_largest_message_counts_the_extras() -> None:
    longest = segment_with_extras(SPEC.segment_length)
    message_bytes = sum(map(len, frames_of(longest, 2**62)))
    assert message_bytes <= estimate_segment_bytes(longest) == largest_segment_bytes(WITH_EXTRAS)
    rows_bytes = 3 * 4 + (SPEC.segment_length + 1) * 2
    assert largest_segment_bytes(WITH_EXTRAS) - largest_segment_bytes(SPEC) >= rows_bytes


# -- the builder ------------------------------------------------------------------------------------------------------


def build_segments(num_steps: int, ends: bool = True) -> list[Segment]:
    """Of an episode whose t-th state and mask tell t; arrays are reused as environments do."""
    builder = SegmentBuilder(WITH_EXTRAS)
    observation = np.zeros(4)
    state = np.zeros(3)
    mask = np.zeros(2, np.bool_)
    builder.begin(observation, {"state": state, "mask": mask})
    segments = []
    for t in range(1, num_steps + 1):
        observation[:] = t / 10
        state[:] = t / 100
        mask[:] = t % 2
        is_last = ends and t == num_steps
        segment = builder.step(0, -0.5, 3, 1.0, observation, is_last, False, {"state": state, "mask": mask})
        segments += [segment] if segment is not None else []
    return segments


def test_each_segment_has_the_state_of_its_first_observation_and_a_mask_for_each() -> None:
    segments = build_segments(19)
    assert [segment.num_steps for segment in segments] == [8, 8, 3]
    for begin, segment in zip((0, 8, 16), segments, strict=True):
        np.testing.assert_allclose(segment.extras["state"], np.full((1, 3), begin / 100), rtol=1e-6)
        times = np.arange(begin, begin + segment.num_steps + 1)
        assert segment.extras["mask"].tolist() == [[bool(t % 2)] * 2 for t in times]
        assert unpack(segment).num_steps == segment.num_steps


def test_segments_of_one_step_have_their_states() -> None:
    builder = SegmentBuilder(msgspec.structs.replace(WITH_EXTRAS, segment_length=1, extras=(STATE,)))
    builder.begin(np.zeros(4), {"state": [0.0] * 3})
    states = []
    for t in range(1, 4):
        segment = builder.step(0, -0.5, 3, 1.0, np.zeros(4), False, False, {"state": [float(t)] * 3})
        assert segment is not None
        states.append(segment.extras["state"].tolist())
    assert states == [[[0.0] * 3], [[1.0] * 3], [[2.0] * 3]]


@pytest.mark.parametrize("given", [{}, {"state": np.zeros(3)}, {"state": np.zeros(3), "mask": np.ones(2), "more": 1}])
def test_other_extras_than_those_of_the_run_are_refused_by_name(given: dict[str, object]) -> None:
    builder = SegmentBuilder(WITH_EXTRAS)
    with pytest.raises(InvalidSegment, match=r"expected \['state', 'mask'\]"):
        builder.begin(np.zeros(4), given)
    builder.begin(np.zeros(4), {"state": np.zeros(3), "mask": np.ones(2, np.bool_)})
    with pytest.raises(InvalidSegment, match=r"expected \['state', 'mask'\]"):
        builder.step(0, -0.5, 3, 1.0, np.zeros(4), False, False, given)


# -- the batch --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("ledgers_may_stay_open")
def test_a_batch_has_the_extras_end_to_end_also_in_another_process() -> None:
    queue, segments = ExperienceQueue(10, Ledger()), build_segments(19)
    for seq, segment in enumerate(segments):
        assert queue.put(("a", 1), seq, unpack(segment))
    taken = queue.take("learner", BatchRequest(1, 100, 10, 0))
    assert taken is not None
    for batch in (taken, ExperienceBatch.from_bytes(taken.to_bytes())):
        np.testing.assert_allclose(batch.extras["state"][:, 0], [0.0, 0.08, 0.16], rtol=1e-6)
        assert batch.extras["mask"].shape == (19 + 3, 2)
        for name in ("state", "mask"):
            np.testing.assert_array_equal(
                batch.extras[name], np.concatenate([segment.extras[name] for segment in segments])
            )


@given(st.lists(st.integers(1, 8), min_size=1, max_size=5), st.data())
def test_a_selection_has_the_extras_of_the_segments_in_it(lengths: list[int], data: st.DataObject) -> None:
    segments = [build_segments(length)[0] for length in lengths]
    keep = data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)).filter(any))
    selected = ExperienceBatch.from_segments(1, segments).select(np.array(keep))
    expected = ExperienceBatch.from_segments(1, [segment for segment, kept in zip(segments, keep, strict=True) if kept])
    for name in ("state", "mask"):
        np.testing.assert_array_equal(selected.extras[name], expected.extras[name])
