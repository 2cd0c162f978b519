"""A message of the actor protocol as one WebSocket message, and back. Pure.

A text message is the header as JSON, with its tensors as lists. A binary message is its frames, one after the other,
each after its size (4 bytes, little-endian); its header is msgpack or JSON: a map of msgpack never begins with `{`.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import chain
from typing import Any, TypeVar

import msgspec
import numpy as np

from shoal.errors import ProtocolViolation
from shoal.wire import ActionsMessage, Message, MessageLimits, decode, encode, to_message
from shoal.wire.experience_spec import DTYPES, TensorSpec

T = TypeVar("T")
MAX_TEXT_BYTES = 4 * 1024 * 1024  # of JSON: numbers that are read from it take up to 30 times the memory of its text
MAX_FRAMES = MessageLimits().max_frames
_SIZE = struct.Struct("<I")
_WORDS = {str: "text", bool: "true or false", float: "fractions", list: "a list"}
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError, OverflowError, TypeError)


class Dialect(Enum):
    """How a connection's newest message was written, and so its answers."""

    TEXT = "text"
    BINARY_JSON = "binary, its header JSON"
    BINARY = "binary"

    @classmethod
    def of(cls, is_text: bool, data: bytes) -> Dialect:
        """That of a message, also where the rest of it cannot be read."""
        return cls.TEXT if is_text else cls.BINARY_JSON if data[_SIZE.size :].startswith(b"{") else cls.BINARY


def read_message(header: bytes | dict[str, Any], frames: Sequence[bytes], limits: MessageLimits) -> Message:
    """The message with this header, of msgpack or read from JSON. Raises ProtocolViolation."""
    if isinstance(header, dict):
        if (message := to_message(header, frames, limits)) is not None:
            return message
        header = _attempt(lambda: msgspec.msgpack.encode(header), "the header cannot be read")
    return decode([header, *frames], limits)


def split_binary(data: bytes) -> tuple[bytes | dict[str, Any], list[bytes]]:
    """The header and the frames of a binary message. Raises ProtocolViolation."""
    frames: list[bytes] = []
    begin = 0
    while begin < len(data):
        end = begin + _SIZE.size
        size = _SIZE.unpack_from(data, begin)[0] if end <= len(data) else 0
        if end > len(data) or end + size > len(data):
            problem = f"frame {len(frames)} ends beyond the message: each frame follows its size, 4 bytes little-endian"
            raise ProtocolViolation("malformed", problem)
        if len(frames) == MAX_FRAMES:  # as many as there are sizes would take much memory
            raise ProtocolViolation("too_large", f"more than {MAX_FRAMES} frames")
        frames.append(data[end : end + size])
        begin = end + size
    if not frames:
        raise ProtocolViolation("malformed", "a message has at least one frame")
    header, *frames = frames
    return _read_json(header) if header[:1] == b"{" else header, frames


def join_binary(message: Message, frames: Sequence[bytes], dialect: Dialect) -> bytes:
    """A binary message, and the frames that follow its header."""
    header = msgspec.json.encode(message) if dialect is Dialect.BINARY_JSON else encode(message)
    parts = [part for frame in (header, *frames) for part in (_SIZE.pack(len(frame)), frame)]
    return b"".join(parts)


def split_text(data: bytes, dtypes: Mapping[str, str]) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the frames of a text message. dtypes: of the tensors that stand in a header by name, such as
    `observation`, in the order of their frames. Raises ProtocolViolation."""
    header = _read_json(data)
    try:
        return header, _take_frames(header, dtypes)
    except ProtocolViolation as violation:
        seq = header.get("seq")
        raise ProtocolViolation(violation.code, violation.message, seq if type(seq) is int else None) from None


def _take_frames(header: dict[str, Any], dtypes: Mapping[str, str]) -> list[bytes]:
    optional = ("rewards", "flags") if header.get("kind") == "acts" else ()  # zeros: empty frames
    frames = [
        _to_frame(name, header.pop(name, []), dtype)
        for name, dtype in dtypes.items()
        if name in header or name in optional
    ]
    tensors = header.get("tensors")
    if header.get("kind") == "segment" and isinstance(tensors, list):
        for tensor in tensors:
            if isinstance(tensor, dict):
                frames.append(_to_frame(str(tensor.get("name")), tensor.pop("data", []), str(tensor.get("dtype"))))
    return frames


def join_text(message: Message, frames: Sequence[bytes], action: TensorSpec) -> bytes:
    """A text message; a payload, which is bytes, as base64 in `data`. action: of the actions' frame"""
    if not frames:
        return msgspec.json.encode(message)
    header = msgspec.to_builtins(message)
    if isinstance(message, ActionsMessage):
        actions = np.frombuffer(frames[0], action.numpy_dtype())
        header["actions"] = actions.reshape(len(message.episodes), *action.shape).tolist()
    else:
        header["data"] = base64.b64encode(frames[0]).decode()
    return msgspec.json.encode(header)


def _read_json(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_TEXT_BYTES:
        problem = f"JSON of {len(data)} bytes, at most {MAX_TEXT_BYTES}: the frames of a binary message may be larger"
        raise ProtocolViolation("too_large", problem)
    header = _attempt(lambda: msgspec.json.decode(data), "the header is no JSON")
    if not isinstance(header, dict):
        raise ProtocolViolation("malformed", "the header is no JSON object")
    return header


def _to_frame(name: str, values: Any, dtype: str) -> bytes:
    """The bytes of a tensor, of numbers in nested lists or flat."""
    if dtype not in DTYPES:
        raise ProtocolViolation("malformed", f"{name[:40]}: no dtype {dtype[:40]!r}")
    return _attempt(lambda: _to_array(values, np.dtype(DTYPES[dtype])).tobytes(), f"{name[:40]}: no {dtype} numbers")


def _to_array(values: Any, dtype: np.dtype[Any]) -> np.ndarray:
    """Raises ValueError for what is no number of this dtype: NumPy would round it, or make texts of numbers, each as
    long as the longest."""
    flat = values if isinstance(values, list) else [values]
    while flat and type(flat[0]) is list:
        if set(map(type, flat)) != {list} or len(set(map(len, flat))) > 1:
            raise ValueError("lists of different lengths")
        flat = list(chain.from_iterable(flat))
    if wrong := set(map(type, flat)) - {"f": {int, float}, "b": {int, bool}}.get(dtype.kind, {int}):
        raise ValueError(f"{min(_WORDS.get(each, 'something else') for each in wrong)} among them")
    if dtype.kind == "f":
        with np.errstate(over="ignore"):  # infinity, which the gateway rejects by name
            return np.array(flat, np.float64).astype(dtype)
    low, high = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    if flat and not low <= min(flat) <= max(flat) <= high:
        raise ValueError(f"{min(flat)} to {max(flat)}, expected within {low} and {high}")
    return np.array(flat, dtype)


def _attempt(read: Callable[[], T], problem: str) -> T:
    try:
        return read()
    except _UNREADABLE as error:
        raise ProtocolViolation("malformed", f"{problem}: {error}") from None
