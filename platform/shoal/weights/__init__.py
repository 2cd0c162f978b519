"""Weights that flow: a `WeightStore` that keeps only the latest version, and the `WeightSource` that consumers read."""

from shoal.weights.store import (
    PublishedVersion,
    Skipped,
    WeightFile,
    WeightPart,
    WeightSnapshot,
    WeightSource,
    WeightStore,
    decode_tensors,
    encode_tensors,
    measure_lag,
)

__all__ = [
    "PublishedVersion",
    "Skipped",
    "WeightFile",
    "WeightPart",
    "WeightSnapshot",
    "WeightSource",
    "WeightStore",
    "decode_tensors",
    "encode_tensors",
    "measure_lag",
]
