"""The datatypes of the Open Inference Protocol v2, and their NumPy arrays inside the platform.

Called by all code that reads or writes tensors: JSON, binary, gRPC, the client. Pure; knows no message.

NumPy has no BF16: such a tensor is an array of `uint16` with the same bits, which torch views as bfloat16 without a
copy. Only JSON, and code that computes with it in NumPy, converts it to float32. BYTES are object arrays of `bytes`,
one of any length for each element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NUMPY_DTYPES: dict[str, np.dtype[np.generic]] = {
    "BOOL": np.dtype(np.bool_),
    "UINT8": np.dtype(np.uint8),
    "UINT16": np.dtype("<u2"),
    "UINT32": np.dtype("<u4"),
    "UINT64": np.dtype("<u8"),
    "INT8": np.dtype(np.int8),
    "INT16": np.dtype("<i2"),
    "INT32": np.dtype("<i4"),
    "INT64": np.dtype("<i8"),
    "FP16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "FP32": np.dtype("<f4"),
    "FP64": np.dtype("<f8"),
    "BYTES": np.dtype(object),
}
DATATYPES = tuple(NUMPY_DTYPES)
# Of numbers, each by its type in NumPy; torch and ONNX have most of these names, too.
BY_NUMPY_NAME = {dtype.name: name for name, dtype in NUMPY_DTYPES.items() if name not in ("BF16", "BYTES")}


def to_floats(values: NDArray[Any], datatype: str) -> NDArray[Any]:
    """Round numbers to the nearest FP16, BF16 (its bits), FP32 or FP64. Infinity and NaN remain.

    Raises OverflowError for a number that rounds to infinity.
    """
    if datatype == "BF16":
        rounded = bf16_bits(values if values.dtype == np.float32 else values.astype(np.float64, copy=False))
        floats = bf16_values(rounded)
    else:
        with np.errstate(over="ignore"):
            rounded = floats = values.astype(NUMPY_DTYPES[datatype], copy=False)
    if rounded.dtype != values.dtype:
        infinite = np.isinf(floats)
        if infinite.any() and np.isfinite(values[infinite]).any():
            raise OverflowError(f"it has numbers that {datatype} cannot hold")
    return rounded


def bf16_bits(values: NDArray[np.float32] | NDArray[np.float64]) -> NDArray[np.uint16]:
    """Round each value to the nearest BF16 (ties to even), as bits. NaN stays NaN."""
    floats = values if values.dtype == np.float32 else _round_to_odd(values.astype(np.float64, copy=False))
    bits = np.ascontiguousarray(floats, dtype=np.float32).view(np.uint32)
    rounded = (bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)
    quiet = (bits >> np.uint32(16)) | np.uint32(0x40)
    return np.where((bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000), quiet, rounded).astype(np.uint16)


def _round_to_odd(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Round each value to float32 towards 0, with the last bit set if inexact, so that no value becomes the middle
    between two BF16 and rounds wrongly afterwards."""
    with np.errstate(over="ignore"):
        floats = np.atleast_1d(values).astype(np.float32)
    is_beyond = np.abs(floats) > np.abs(values)
    floats[is_beyond] = np.nextafter(floats[is_beyond], np.float32(0))
    floats.view(np.uint32)[...] |= (floats != values) & ~np.isnan(values)
    return floats.reshape(np.shape(values))


def bf16_values(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert each BF16 exactly to float32."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
