"""The border of the wire: what is packed comes back equal, and whatever else arrives ends in a typed error."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hypothesis.extra.numpy as arrays
import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import InvalidSegment, ProtocolViolation
from shoal.wire import (
    DropReason,
    EpisodeSummary,
    ExperienceSpec,
    MessageLimits,
    PolicySpec,
    Segment,
    SegmentMessage,
    TensorHeader,
    TensorSpec,
    Welcome,
    decode,
    encode,
    pack_segment,
    unpack_segment,
)
from shoal.wire.experience_spec import DTYPES
from shoal.wire.messages import Message, RefusedRow
from shoal.wire.segment import LARGEST_FLOAT32, LARGEST_REWARD
from wire_cases import POLICY, SPEC, damaged_messages, frames_of, valid_segment

LIMITS = MessageLimits()
TENSORS = ("observations", "actions", "rewards", "log_probabilities", "versions")


def unpack(frames: list[bytes], spec: ExperienceSpec = SPEC) -> Segment:
    message = decode(frames, LIMITS)
    assert isinstance(message, SegmentMessage)
    return unpack_segment(message, frames[1:], spec)


def rejected(frames: list[bytes], spec: ExperienceSpec = SPEC) -> InvalidSegment:
    with pytest.raises(InvalidSegment) as caught:
        unpack(frames, spec)
    return caught.value


def edited(frames: list[bytes], **changes: object) -> list[bytes]:
    """The message with some fields of its header changed, by another msgpack library than the one under test."""
    return [msgpack.packb({**msgpack.unpackb(frames[0]), **changes}), *frames[1:]]


def with_header(name: str, **changes: object) -> list[bytes]:
    """A valid message, but for what it says of one tensor."""
    frames = frames_of(valid_segment())
    tensors = [{**t, **changes} if t["name"] == name else t for t in msgpack.unpackb(frames[0])["tensors"]]
    return edited(frames, tensors=tensors)


# -- round trips ------------------------------------------------------------------------------------------------------

integers = st.integers(-(2**63), 2**64 - 1)
floats = st.floats(allow_nan=False)
names = st.text(max_size=20)
Settings = Mapping[str, bool | int | float | str]
tensor_specs = st.builds(
    TensorSpec,
    st.sampled_from(sorted(DTYPES)),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.none() | floats,
    st.none() | floats,
)
experience_specs = st.builds(
    ExperienceSpec,
    tensor_specs,
    tensor_specs,
    st.integers(1, 512),
    st.builds(PolicySpec, names, names, st.lists(st.tuples(names, names), max_size=3).map(tuple)),
)
headers = st.builds(TensorHeader, names, names, st.lists(integers, max_size=4).map(tuple))
refusals = st.builds(RefusedRow, integers, integers, integers, names, names)
summaries = st.builds(EpisodeSummary, floats, integers, integers, st.none() | st.booleans())


def _field(field: msgspec.structs.FieldInfo) -> st.SearchStrategy[object]:
    by_type = {int: integers, str: names, float: floats, bool: st.booleans(), ExperienceSpec: experience_specs}
    by_type[tuple[TensorHeader, ...]] = st.lists(headers, max_size=3).map(tuple)
    by_type[tuple[EpisodeSummary, ...] | msgspec.UnsetType] = st.just(msgspec.UNSET) | st.lists(summaries).map(tuple)
    by_type[dict[str, Any]] = st.dictionaries(names, integers | names, max_size=3)
    by_type[tuple[RefusedRow, ...]] = st.lists(refusals, max_size=3).map(tuple)
    by_type[tuple[int, ...]] = st.lists(integers, max_size=3).map(tuple)
    by_type[float | None] = st.none() | floats
    by_type[bool | None] = st.none() | st.booleans()
    by_type[int | None] = st.none() | integers
    by_type[int | list[int | float] | None] = st.none() | integers | st.lists(integers | floats, max_size=3)
    numbers = integers | floats
    taken = st.just(msgspec.UNSET) | numbers | st.lists(numbers, max_size=3)
    by_type[int | float | list[int | float] | msgspec.UnsetType] = taken
    by_type[bool | msgspec.UnsetType] = st.just(msgspec.UNSET) | st.booleans()
    by_type[int | msgspec.UnsetType] = st.just(msgspec.UNSET) | integers
    by_type[str | msgspec.UnsetType] = st.just(msgspec.UNSET) | names
    values = st.dictionaries(names, st.booleans() | integers | floats | names, max_size=3)
    by_type[Settings] = values
    by_type[Settings | msgspec.UnsetType] = st.just(msgspec.UNSET) | values
    return by_type[field.type]


def _struct(kind: type) -> st.SearchStrategy[object]:
    return st.builds(kind, *[_field(field) for field in msgspec.structs.fields(kind)])


messages = st.one_of([_struct(kind) for kind in Message.__args__])


@given(messages)
@settings(max_examples=200, deadline=None)
def test_every_message_comes_back_equal(message: Message) -> None:
    assert decode([encode(message)], LIMITS) == message


@st.composite
def segments(draw: st.DrawFn) -> tuple[ExperienceSpec, Segment]:
    """A spec and a segment that fits it, over all dtypes, byte orders and shapes."""
    num_steps = draw(st.integers(1, 6))
    tensors, specs = {}, {}
    for name, rows in (("observations", num_steps + 1), ("actions", num_steps)):
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
        finite = {"allow_nan": False, "allow_infinity": False} if dtype.startswith("float") else None
        if dtype == "float64":  # the learner computes in float32
            finite = {"min_value": -LARGEST_FLOAT32, "max_value": LARGEST_FLOAT32}
        native = np.dtype(DTYPES[dtype])
        array = draw(arrays.arrays(native, (rows, *shape), elements=finite))
        tensors[name] = array.astype(native.newbyteorder(draw(st.sampled_from("<>"))))
        specs[name] = TensorSpec(dtype, shape)
    largest = float(np.float32(LARGEST_REWARD))
    single = st.floats(-largest, largest, width=32)
    tensors["rewards"] = np.array(draw(st.lists(single, min_size=num_steps, max_size=num_steps)), np.float32)
    tensors["log_probabilities"] = -np.abs(tensors["rewards"])
    tensors["versions"] = np.array(draw(st.lists(st.integers(1, 2**63 - 1), min_size=num_steps, max_size=num_steps)))
    terminated = draw(st.booleans())
    truncated = not terminated and draw(st.booleans())
    total = draw(floats.filter(np.isfinite)) if terminated or truncated else None
    length = draw(st.integers(num_steps, 2**40)) if terminated or truncated else None
    segment = Segment(
        **tensors, terminated=terminated, truncated=truncated, episode_return=total, episode_length=length
    )
    return ExperienceSpec(specs["observations"], specs["actions"], 6, POLICY), segment


@given(segments(), st.integers(0, 2**63))
@settings(max_examples=100, deadline=None)
def test_every_valid_segment_comes_back_equal(case: tuple[ExperienceSpec, Segment], seq: int) -> None:
    spec, segment = case
    frames = frames_of(segment, seq)
    message = decode(frames, LIMITS)
    assert isinstance(message, SegmentMessage)
    assert message.seq == seq
    received = unpack_segment(message, frames[1:], spec)
    for name in TENSORS:
        np.testing.assert_array_equal(getattr(received, name), getattr(segment, name))
        assert getattr(received, name).dtype == getattr(segment, name).dtype.newbyteorder("<")
    for name in ("terminated", "truncated", "episode_return", "episode_length"):
        assert getattr(received, name) == getattr(segment, name)


def test_a_segment_that_is_not_contiguous_comes_back_equal() -> None:
    segment = valid_segment(4)
    strided = replace(
        segment, observations=np.asfortranarray(segment.observations), rewards=np.ones(8, np.float32)[::2]
    )
    np.testing.assert_array_equal(unpack(frames_of(strided)).observations, segment.observations)


def test_packing_a_dtype_that_cannot_travel_names_it() -> None:
    segment = replace(valid_segment(), observations=np.zeros((4, 4), np.complex64))
    with pytest.raises(InvalidSegment, match=r"observations: .*complex64") as caught:
        pack_segment(segment, 0)
    assert caught.value.reason == DropReason.INVALID_DTYPE


# -- validation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", ["observations", "rewards", "log_probabilities"])
def test_a_float_that_is_not_finite_is_refused(name: str, value: float) -> None:
    segment = valid_segment()
    getattr(segment, name)[-1] = value
    error = rejected(frames_of(segment))
    assert (error.reason, error.field) == (DropReason.NON_FINITE, name)


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("observations", -10.5, "below -10.0"),
        ("observations", 10.5, "above 10.0"),
        ("actions", -1, "below 0"),
        ("actions", 2, "above 1"),
        ("actions", 2**63 - 1, "above 1"),
        ("log_probabilities", 0.01, r"above 0\.001"),
        ("versions", 0, "below 1"),
        ("versions", -(2**63), "below 1"),
    ],
)
def test_a_value_out_of_range_is_refused(name: str, value: float, limit: str) -> None:
    segment = valid_segment()
    getattr(segment, name)[0] = value
    with pytest.raises(InvalidSegment, match=limit) as caught:
        unpack(frames_of(segment))
    assert (caught.value.reason, caught.value.field) == (DropReason.INVALID_RANGE, name)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("dtype", ["float64", "int32", "<f4", "object", "", "x" * 10_000])
def test_another_dtype_is_refused(name: str, dtype: str) -> None:
    error = rejected(with_header(name, dtype=dtype))
    assert (error.reason, error.field) == (DropReason.INVALID_DTYPE, name)
    assert len(str(error)) < 500


ABSURD = [(0, 2**63), (2**64 - 1,), (-1,), (3, -4), (-3, -4), (0,), (), (2**32, 2**32), (1,) * 100, (0,) * 20_000]


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("shape", ABSURD, ids=[str(shape)[:30] for shape in ABSURD])
def test_another_shape_is_refused_in_a_few_words(name: str, shape: tuple[int, ...]) -> None:
    error = rejected(with_header(name, shape=shape))
    assert (error.reason, error.field) == (DropReason.INVALID_SHAPE, name)
    assert len(str(error)) < 500, "the acknowledgement that carries these words has a limit"


def test_a_segment_that_is_longer_than_the_spec_allows_is_refused() -> None:
    error = rejected(frames_of(valid_segment(SPEC.segment_length + 1)))
    assert (error.reason, error.field) == (DropReason.INVALID_SHAPE, "rewards")


@pytest.mark.parametrize("name", TENSORS)
def test_a_missing_tensor_is_refused(name: str) -> None:
    frames = frames_of(valid_segment())
    tensors = msgpack.unpackb(frames[0])["tensors"]
    at = TENSORS.index(name)
    error = rejected(edited([*frames[: at + 1], *frames[at + 2 :]], tensors=tensors[:at] + tensors[at + 1 :]))
    assert (error.reason, error.field, error.problem) == (DropReason.INVALID_FRAMES, name, "is missing")


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("change", [lambda frame: frame[:-1], lambda frame: frame + b"\0", lambda _: b""])
def test_a_frame_of_another_size_is_refused(name: str, change: object) -> None:
    frames = frames_of(valid_segment())
    at = TENSORS.index(name) + 1
    frames[at] = change(frames[at])  # type: ignore[operator]
    error = rejected(frames)
    assert (error.reason, error.field) == (DropReason.INVALID_FRAMES, name)


@pytest.mark.parametrize("change", [lambda f: f[:-1], lambda f: [*f, b""], lambda f: f[:1]])
def test_another_number_of_frames_is_refused(change: object) -> None:
    error = rejected(change(frames_of(valid_segment())))  # type: ignore[operator]
    assert (error.reason, error.field) == (DropReason.INVALID_FRAMES, "tensors")


def test_a_tensor_that_is_there_twice_is_refused() -> None:
    frames = frames_of(valid_segment())
    tensors = msgpack.unpackb(frames[0])["tensors"]
    error = rejected(edited([*frames, frames[3]], tensors=[*tensors, tensors[2]]))
    assert (error.reason, error.field, error.problem) == (
        DropReason.INVALID_FRAMES,
        "tensors",
        "one name stands there twice",
    )


@pytest.mark.parametrize(
    ("fields", "reason", "field"),
    [
        ({"terminated": True, "truncated": True}, DropReason.INVALID_RANGE, "truncated"),
        ({"episode_return": float("nan")}, DropReason.NON_FINITE, "episode_return"),
        ({"episode_return": float("inf")}, DropReason.NON_FINITE, "episode_return"),
        ({"episode_length": 0}, DropReason.INVALID_RANGE, "episode_length"),
        ({"episode_length": -5}, DropReason.INVALID_RANGE, "episode_length"),
        ({"episode_length": valid_segment().num_steps - 1}, DropReason.INVALID_RANGE, "episode_length"),
    ],
)
def test_an_ending_that_makes_no_sense_is_refused(fields: dict[str, object], reason: DropReason, field: str) -> None:
    error = rejected(edited(frames_of(valid_segment()), **fields))
    assert (error.reason, error.field) == (reason, field)


# -- forward compatibility --------------------------------------------------------------------------------------------


def test_unknown_tensors_are_ignored() -> None:
    frames = frames_of(valid_segment())
    unknown = {"name": "hidden_state", "dtype": "complex512", "shape": [2**63, -1]}
    tensors = [unknown, *msgpack.unpackb(frames[0])["tensors"]]
    assert unpack(edited([frames[0], b"\xff" * 7, *frames[1:]], tensors=tensors)).num_steps == 3


def test_unknown_header_fields_are_ignored() -> None:
    frames = frames_of(valid_segment())
    tensors = [{**tensor, "compression": {"level": [1, 2]}} for tensor in msgpack.unpackb(frames[0])["tensors"]]
    future = edited(frames, tensors=tensors, priority=0.5, tags=["a", {"b": None}], blob=b"\0\xff")
    assert unpack(future).num_steps == 3


def test_fields_with_defaults_may_be_left_out_and_whole_numbers_are_floats() -> None:
    frames = frames_of(valid_segment())
    header = msgpack.unpackb(frames[0])
    short = {"tensors": header["tensors"], "episode_return": 7, "seq": 3, "kind": "segment"}  # in another order, too
    message = decode([msgpack.packb(short), *frames[1:]], LIMITS)
    assert isinstance(message, SegmentMessage)
    assert (message.seq, message.terminated, message.episode_return) == (3, False, 7.0)


# -- headers and limits -----------------------------------------------------------------------------------------------


def violation(frames: list[bytes], limits: MessageLimits = LIMITS) -> ProtocolViolation:
    with pytest.raises(ProtocolViolation) as caught:
        decode(frames, limits)
    assert len(caught.value.message) < 1000
    return caught.value


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x90",
        b"\x80",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x81\xa4kind\x05",
        b"\x81\xa4kind\xa4\xff\xff\xff\xff",
        b"\x81\xa4kind\xa4ping\x00",  # a byte too many
        b"\x82\xa4kind\xa4ping",  # a field too few
        b"\x82\xa4kind\xa4ping\xa5nonce\xcb" + bytes(8),  # a float for an integer
        b"\x82\xa4kind\xa4ping\x01\x02",  # a key that is not a string
        b"\x82\xa4kind\xa4ping\xa4kind\xa4pong",
        b"\x81\xa4kind\xa5hello",
        b"\x83\xa4kind\xa7segment\xa3seq\x00\xa7tensors\xdd\xff\xff\xff\xff",  # four thousand million tensors
        b"\x82\xa4kind\xa4ping\xa1x\xc6\xff\xff\xff\xff",
        b"\x82\xa4kind\xa4ping\xa1x" + b"\x91" * 60_000 + b"\xc0",
        b"\x81\xa1a" * 20_000 + b"\xc0",
        msgpack.packb({"kind": "hello", "protocol": 1, "token": "\ud800", "actor_id": "a", "incarnation": 0},
                      unicode_errors="surrogatepass"),
    ],
)  # fmt: skip
def test_a_header_that_is_wrong_is_malformed(header: bytes) -> None:
    assert violation([header]).code == "malformed"


def test_an_unknown_kind_is_told_from_a_malformed_header() -> None:
    error = violation([msgpack.packb({"kind": "telepathy" * 5000, "strength": 3})])
    assert error.code == "unknown_kind"
    assert "telepathy" in error.message
    newer = {"kind": "telepathy", "seq": msgpack.Timestamp(1), "protocol": msgpack.ExtType(5, b"")}
    assert violation([msgpack.packb(newer)]).code == "unknown_kind"  # with our fields' names, of other types
    assert violation([b"\x82\xa4kind\xa9telepathy\xa3seq\xa2\xff\xff"]).code == "unknown_kind"


def test_no_frames_are_malformed() -> None:
    assert violation([]).code == "malformed"


def test_limits_hold_at_the_limit_and_not_beyond() -> None:
    limits = MessageLimits(max_header_bytes=100, max_message_bytes=200, max_frames=4)

    def header(size: int) -> bytes:
        return b"\x82\xa4kind\xa4ping\xa1x\xc4" + bytes([size - 15]) + bytes(size - 15)

    assert len(header(100)) == 100
    assert decode([header(100), bytes(100)], limits)
    assert decode([header(50), b"", b"", b""], limits)
    assert "header of 101 bytes" in violation([header(101)], limits).message
    assert "message of 201 bytes" in violation([header(100), bytes(50), bytes(51)], limits).message
    assert "5 frames" in violation([header(50), b"", b"", b"", b""], limits).message
    assert {violation([header(101)], limits).code, violation([b"\xc0"] * 5, limits).code} == {"too_large"}


# -- fuzz -------------------------------------------------------------------------------------------------------------


def test_nothing_but_typed_errors_comes_out_of_damaged_messages() -> None:
    welcome = Welcome(1, "run", SPEC, 0, 16, 1, 1.0, 6.0, 1 << 20)
    valid = [frames_of(valid_segment(n), n) for n in (1, 3, 8)] + [[encode(welcome)]]
    valid.append(frames_of(replace(valid_segment(), unrecorded=(EpisodeSummary(2.5, 3),))))
    outcomes = {"violation": 0, "invalid": 0, "valid": 0}
    reasons = set()
    for frames in damaged_messages(valid, 6000, seed=7):
        try:
            message = decode(frames, LIMITS)
            if isinstance(message, SegmentMessage):
                segment = unpack_segment(message, frames[1:], SPEC)
                assert np.isfinite(segment.observations).all()
                assert len(segment.observations) == segment.num_steps + 1
            outcomes["valid"] += 1
        except ProtocolViolation:
            outcomes["violation"] += 1
        except InvalidSegment as error:
            reasons.add(error.reason)
            outcomes["invalid"] += 1
    assert reasons <= set(DropReason)
    assert min(outcomes.values()) > 300, f"the noise should reach every branch: {outcomes}"
