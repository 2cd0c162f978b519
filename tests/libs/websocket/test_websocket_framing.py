"""Messages as text and binary, and back: what was sent is what comes, and what is no message is named."""

import base64
import json
import struct
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.errors import ProtocolViolation
from shoal.libs.websocket.framing import (
    MAX_TEXT_BYTES,
    Dialect,
    join_binary,
    join_text,
    read_message,
    split_binary,
    split_text,
)
from shoal.wire import Hello, MessageLimits, WeightsMessage
from shoal.wire.experience_spec import DTYPES, TensorSpec

NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
HEADERS = st.dictionaries(
    st.text(max_size=5), NUMBERS | st.lists(st.none() | st.text(max_size=5), max_size=3), max_size=4
)
OBSERVATION = {"observation": "float32", "mask": "bool"}
ACTION = TensorSpec("int64")


def to_bytes(*frames: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(frame)) + frame for frame in frames)


def read_problem(data: bytes | dict[str, Any], dtypes: dict[str, str] = OBSERVATION) -> str:
    """What is said of a message that is none: of text as a dict, or else binary."""
    with pytest.raises(ProtocolViolation) as raised:
        split_binary(data) if isinstance(data, bytes) else split_text(json.dumps(data).encode(), dtypes)
    assert raised.value.code == "malformed"
    return raised.value.message


@settings(deadline=None, max_examples=40)
@given(offers=HEADERS, frames=st.lists(st.binary(min_size=1, max_size=40), max_size=5), is_json=st.booleans())
def test_message_and_frames_come_back_from_binary(offers: dict[str, Any], frames: list[bytes], is_json: bool) -> None:
    dialect = Dialect.BINARY_JSON if is_json else Dialect.BINARY
    sent = Hello(1, "token", "game", 1, offers=offers)
    data = join_binary(sent, frames, dialect)
    header, came = split_binary(data)
    assert (Dialect.of(False, data), came) == (dialect, frames)
    assert read_message(header, came, MessageLimits()) == sent


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=60))
def test_any_bytes_are_a_message_or_named(data: bytes) -> None:
    with suppress(ProtocolViolation):
        assert split_binary(data)
    with suppress(ProtocolViolation):
        assert split_text(data, OBSERVATION)


def test_a_frame_beyond_the_message_is_named() -> None:
    assert "at least one frame" in read_problem(b"")
    assert "frame 0 ends beyond the message" in read_problem(b"\x01\x00")
    assert "frame 1 ends beyond the message" in read_problem(to_bytes(b"{}") + b"\xff\xff\xff\xff1234")
    assert "the header is no JSON" in read_problem(to_bytes(b"{x"))
    with pytest.raises(ProtocolViolation, match="more than 32 frames"):
        split_binary(to_bytes(b"{}", *[b"", b"x"] * 1000))  # 4 bytes each, and a list's entry


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_list_becomes_the_tensor_of_its_dtype(dtype: str) -> None:
    values = [True, False] if dtype == "bool" else [1, 2] if dtype[0] in "iu" else [0.5, -2]
    for shaped in (values, [[each] for each in values]):
        header, frames = split_text(json.dumps({"observation": shaped}).encode(), {"observation": dtype})
        assert (header, frames) == ({}, [np.array(values, DTYPES[dtype]).tobytes()])


@pytest.mark.parametrize(
    ("values", "dtype", "problem"),
    [
        (["1"], "float32", "text among them"),
        ([None], "float32", "something else"),
        ([True], "float32", "true or false"),
        ([[1], [1, 2]], "float32", "lists of different lengths"),
        ([[1], 2], "float32", "lists of different lengths"),
        ([1, [2]], "float32", "a list among them"),
        (["x" * 10**5, *[1] * 10**5], "float32", "text among them"),  # of which NumPy would make 40 GB
        ({"0": 1}, "float32", "something else"),
        ([1.5], "int64", "fractions"),
        ([256], "uint8", "expected within 0 and 255"),
        ([2**64], "int64", "expected within"),
        ([2], "bool", "expected within 0 and 1"),
    ],
)
def test_what_are_no_numbers_of_the_dtype_is_named(values: Any, dtype: str, problem: str) -> None:
    message = read_problem({"kind": "act", "observation": values}, {"observation": dtype})
    assert message.startswith(f"observation: no {dtype} numbers: ")
    assert problem in message


def test_a_number_too_large_for_its_float_is_infinite_and_warns_of_nothing() -> None:
    _, (frame,) = split_text(b'{"observation": [1e300, -1e39]}', {"observation": "float32"})
    assert np.isinf(np.frombuffer(frame, np.float32)).all()


def test_a_payload_is_base64_in_text() -> None:
    message = json.loads(join_text(WeightsMessage(3, "sha"), [b"\x00\xff"], ACTION))
    assert message == {"kind": "weights", "version": 3, "sha256": "sha", "data": base64.b64encode(b"\x00\xff").decode()}


def test_text_that_is_no_object_and_too_long_text_are_named() -> None:
    for data in (b"[]", b"1", b"\xff", b"[" * 5000, b"", b'{"a":1e400}', b'{"kind":"\\ud800"}'):
        with pytest.raises(ProtocolViolation, match="the header is no JSON"):
            split_text(data, OBSERVATION)
    with pytest.raises(ProtocolViolation, match="the header cannot be read"):
        read_message({"kind": "act", "episode": 2**100, "step": 0}, [], MessageLimits())
    too_long = b"{" + b" " * MAX_TEXT_BYTES
    for read in (lambda: split_text(too_long, OBSERVATION), lambda: split_binary(to_bytes(too_long))):
        with pytest.raises(ProtocolViolation, match="frames of a binary message may be larger") as raised:
            read()
        assert raised.value.code == "too_large"
