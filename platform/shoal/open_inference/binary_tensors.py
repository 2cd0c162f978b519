"""Converts between arrays and bytes in the format of the binary tensor extension and of gRPC's raw contents.

Called by the codec of requests, by the gRPC service and by the client. Pure functions of buffers and arrays. Large data
is not copied: a decoded array is a read-only view of the body, not always aligned; the bytes of a large array are a
view of it. Elements are little-endian, row-major, without padding; each of BYTES follows its length in four bytes.
Errors are InferenceErrors (422) with the tensor's name, the expected and the actual data.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from shoal.errors import InferenceError
from shoal.open_inference.datatypes import NUMPY_DTYPES
from shoal.open_inference.request_schema import format_tensor_type

MAX_COPIED_BYTES = 1 << 15  # up to this size a copy costs less than a view
_LENGTH = struct.Struct("<I")


def from_binary(
    name: str, datatype: str, shape: Sequence[int], data: memoryview | bytes, role: str = "input"
) -> np.ndarray:
    """Decode an array of `shape` from `data`. Raises InferenceError (422)."""
    size = math.prod(shape)
    if datatype == "BYTES":
        return _elements(name, size, memoryview(data), role).reshape(shape)
    dtype = NUMPY_DTYPES[datatype]
    if len(data) != size * dtype.itemsize:
        problem = f"{role} {name!r}: expected {size * dtype.itemsize} bytes of {format_tensor_type(datatype, shape)}"
        raise InferenceError(422, f"{problem}, got {len(data)}")
    array: np.ndarray = np.ndarray(shape, dtype, buffer=data)
    if datatype == "BOOL" and size and (largest := array.view(np.uint8).max()) > 1:
        raise InferenceError(422, f"{role} {name!r}: expected bytes of 0 and 1 for BOOL, got {largest}")
    return array


def to_binary(datatype: str, array: np.ndarray) -> memoryview | bytes:
    """Encode `array`: a view of it, unless it is BYTES, small, or not contiguous."""
    if datatype == "BYTES":
        elements, packed = array.ravel().tolist(), _LENGTH.pack
        return b"".join([part for element in elements for part in (packed(len(element)), element)])
    if array.dtype.byteorder == ">":
        array = array.astype(NUMPY_DTYPES[datatype])
    if array.nbytes <= MAX_COPIED_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _elements(name: str, size: int, data: memoryview, role: str) -> np.ndarray:
    """Decode the elements of BYTES. Each takes at least four bytes, so a false size is detected before any
    allocation."""
    expected = f"{role} {name!r}: expected {size} elements of BYTES"
    if size * _LENGTH.size > len(data):
        raise InferenceError(422, f"{expected}, each after its length in 4 bytes, got {len(data)} bytes")
    elements = np.empty(size, dtype=object)
    content, end = bytes(data), len(data)  # slicing bytes takes a third of the time of slicing views
    offset = 0
    width = _LENGTH.size
    length_at = _LENGTH.unpack_from
    for number in range(size):
        start = offset + width
        offset = start + length_at(content, offset)[0] if start <= end else start
        if offset > end:
            raise InferenceError(422, f"{expected}, got {end} bytes, which end within element {number}")
        elements[number] = content[start:offset]
    if offset != end:
        raise InferenceError(422, f"{expected} in {offset} bytes, got {end} bytes")
    return elements
