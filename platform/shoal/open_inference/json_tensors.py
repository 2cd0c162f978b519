"""Converts between arrays and JSON in the format of the Open Inference Protocol v2.

Called by the codec of requests and by the client, after the shape was checked against the signature. Pure functions of
bytes and arrays. Data may be flat (row-major) or nested; numbers are written as numbers, BYTES as strings of UTF-8.
FP16 and BF16 are numbers too, rounded to the nearest. Errors are InferenceErrors (422) with the tensor's name, the
expected and the actual data.
"""

from __future__ import annotations

import functools
import math
import re
import struct
import sys
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from shoal.errors import InferenceError
from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_bits, bf16_values
from shoal.open_inference.request_schema import format_tensor_type

MAX_DEPTH = 8
LARGE_BYTES = 1 << 16  # from this size on, values are counted before they are read

_OPENING = re.compile(rb"[\[ \t\r\n]*")
_ELEMENT: dict[str, type] = {
    datatype: {"b": bool, "u": int, "i": int, "f": float, "O": str}[dtype.kind]
    for datatype, dtype in NUMPY_DTYPES.items()
} | {"BF16": float}
_ROUNDED = ("FP16", "BF16", "FP32")  # JSON's numbers may overflow these
_PACKED = {"FP16": "e", "FP32": "f", "FP64": "d"}  # `struct` rounds as NumPy does, in a fraction of the time
_ORDER = "<" if sys.byteorder == "little" else ">"  # with an order, it raises OverflowError for what rounds to infinity


def from_json(
    name: str, datatype: str, shape: Sequence[int], data: msgspec.Raw, *, has_gaps: bool = False
) -> np.ndarray:
    """Decode an array from `data`; `has_gaps`: a flat one, null in which is NaN or b"". Raises InferenceError (422)."""
    size = math.prod(shape)
    try:
        # The least number of values; texts may contain commas and are not counted.
        is_large = datatype != "BYTES" and len(memoryview(data)) > LARGE_BYTES
        if is_large and bytes(data).count(b",") + 1 > size:
            raise ValueError("there are more values than the shape has")
        try:
            array = _to_flat_array(datatype, _FLAT_DECODERS[datatype](data))
        except msgspec.ValidationError:
            opening = _OPENING.match(memoryview(data))  # matches anything
            depth = min(opening.group().count(b"["), MAX_DEPTH) if opening else 0
            if depth <= 1 and not has_gaps:
                raise
            values = _decoder(datatype, depth, has_gaps)(data)
            if has_gaps:
                values = [("" if datatype == "BYTES" else math.nan) if each is None else each for each in values]
            array = _to_nested_array(datatype, values)
        if datatype == "BYTES" and array.size <= size:
            array = _encode_texts(array)
    except (msgspec.DecodeError, ValueError, OverflowError) as error:  # a UnicodeError is a ValueError
        problem = f"input {name!r}: expected {size} values of {format_tensor_type(datatype, shape)}: {error}"
        raise InferenceError(422, problem) from None
    if array.size != size or (array.ndim > 1 and list(array.shape) != list(shape)):
        problem = (
            f"input {name!r}: expected {size} values of {format_tensor_type(datatype, shape)}, got {list(array.shape)}"
        )
        raise InferenceError(422, problem)
    return array if array.ndim > 1 else array.reshape(shape)


def to_json(name: str, datatype: str, array: np.ndarray, role: str = "output") -> list[Any]:
    """The flat data of `array`. JSON has no NaN and infinity; the encoder writes null.

    Raises InferenceError (422) for BYTES that are not UTF-8.
    """
    if datatype == "BF16":
        array = bf16_values(array)
    values: list[Any] = array.ravel().tolist()
    if datatype != "BYTES":
        return values
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        remedy = "ask for it with binary_data, which holds any bytes" if role == "output" else "send it as binary data"
        raise InferenceError(422, f"{role} {name!r}: expected UTF-8, which JSON can hold: {error}. {remedy}") from None


def _to_flat_array(datatype: str, values: list[Any]) -> np.ndarray:
    code = _PACKED.get(datatype)
    if code is None:
        return _to_nested_array(datatype, values)
    array = np.empty(len(values), NUMPY_DTYPES[datatype])
    try:
        struct.pack_into(f"{_ORDER}{len(values)}{code}", array.data, 0, *values)
    except OverflowError:
        raise ValueError(f"a number is beyond {datatype}") from None
    return array


def _to_nested_array(datatype: str, values: list[Any]) -> np.ndarray:
    """An array of lists. JSON has no infinity, so an infinite float means a number beyond the datatype."""
    if datatype not in _ROUNDED:
        return np.array(values, dtype=NUMPY_DTYPES[datatype])
    with np.errstate(over="ignore"):
        if datatype == "BF16":
            array: np.ndarray = bf16_bits(np.array(values, dtype=np.float64))
            beyond = (array & np.uint16(0x7FFF)) == 0x7F80
        else:
            array = np.array(values, dtype=np.float64).astype(NUMPY_DTYPES[datatype])  # faster than at once
            beyond = np.isinf(array)
    if beyond.any():
        raise ValueError(f"a number is beyond {datatype}")
    return array


def _encode_texts(texts: np.ndarray) -> np.ndarray:
    """Encode each text as UTF-8. Raises ValueError for lists of unequal length, which NumPy leaves as lists."""
    encoded = np.empty(texts.size, dtype=object)
    for number, text in enumerate(texts.flat):
        if not isinstance(text, str):
            raise ValueError("lists of one depth have different lengths")
        encoded[number] = text.encode()
    return encoded.reshape(texts.shape)


@functools.cache
def _decoder(datatype: str, depth: int, has_gaps: bool = False) -> Any:
    nested: Any = _ELEMENT[datatype] | None if has_gaps else _ELEMENT[datatype]
    for _ in range(depth):
        nested = list[nested]
    return msgspec.json.Decoder(nested).decode


_FLAT_DECODERS = {datatype: _decoder(datatype, 1) for datatype in NUMPY_DTYPES}
