"""ModelInferRequest messages, written by hand: four fields, and no gRPC library in the driver's way."""

from __future__ import annotations

import numpy as np

from benchmarks.serving.workloads import WORKLOADS, examples

INFER_PATH = "/inference.GRPCInferenceService/ModelInfer"
MODEL_NAME, INPUTS, RAW_CONTENTS = 1, 5, 7  # fields of ModelInferRequest
NAME, DATATYPE, SHAPE = 1, 2, 3  # fields of its InferInputTensor


def messages(workload: str, model: str, num: int = 32) -> list[bytes]:
    """So many different requests."""
    return [message(model, WORKLOADS[workload].datatype, x) for x in examples(workload, num)]


def message(model: str, datatype: str, x: np.ndarray) -> bytes:
    """One request, with raw contents."""
    shape = b"".join(_varint(size) for size in x.shape)
    tensor = _field(NAME, b"x") + _field(DATATYPE, datatype.encode()) + _field(SHAPE, shape)
    return _field(MODEL_NAME, model.encode()) + _field(INPUTS, tensor) + _field(RAW_CONTENTS, x.tobytes())


def _field(number: int, content: bytes) -> bytes:
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])
