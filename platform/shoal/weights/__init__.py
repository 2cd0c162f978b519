"""Weights that flow: a `WeightStore` that keeps only the latest version, and the `WeightSource` that consumers read."""

from shoal.weights.store import (
    PublishedVersion,
    WeightFile,
    WeightPart,
    WeightSnapshot,
    WeightSource,
    WeightStore,
    decode_tensors,
    encode_tensors,
)

__all__ = [
    "PublishedVersion",
    "WeightFile",
    "WeightPart",
    "WeightSnapshot",
    "WeightSource",
    "WeightStore",
    "decode_tensors",
    "encode_tensors",
]
