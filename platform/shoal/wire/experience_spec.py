"""The format of a run's experience: dtype, shape and range of observations and actions, and the policy.

The learner's side defines it; the gateway sends it in `welcome` and validates every segment against it. Plain msgspec
structs: they travel as msgpack maps, so any language can read them.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

# Names on the wire -> NumPy's little-endian type strings. Other dtypes are not supported.
DTYPES = {
    "float32": "<f4",
    "float64": "<f8",
    "float16": "<f2",
    "int8": "|i1",
    "int16": "<i2",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
    "uint16": "<u2",
    "uint32": "<u4",
    "uint64": "<u8",
    "bool": "|b1",
}


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor of a step: `shape` without the time axis; `low` and `high` are inclusive, None means unbounded."""

    dtype: str
    shape: tuple[int, ...] = ()
    low: float | None = None
    high: float | None = None

    def numpy_dtype(self) -> np.dtype[Any]:
        return np.dtype(DTYPES[self.dtype])


class PolicySpec(msgspec.Struct, frozen=True):
    """How an actor turns an observation into an action with the weights it pulled.

    kind:       "mlp_categorical": the layers' outputs are logits of a categorical distribution over [0, n)
    activation: "tanh" or "relu", applied after every layer but the last
    layers:     (weight, bias) names in the safetensors payload, in order; y = activation(W x + b), W is [out, in]
    """

    kind: str
    activation: str
    layers: tuple[tuple[str, str], ...]


class ExperienceSpec(msgspec.Struct, frozen=True):
    """The format of a run's segments. `segment_length` is the most steps in one segment."""

    observation: TensorSpec
    action: TensorSpec
    segment_length: int
    policy: PolicySpec
