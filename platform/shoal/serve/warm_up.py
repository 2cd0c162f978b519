"""What a version is asked before anybody else may: examples made up from the signature, at the sizes that will come.

Called by the predictor. A first forward chooses kernels, allocates, compiles: no request should wait for that.
"""

from __future__ import annotations

import numpy as np

from shoal.open_inference.datatypes import NUMPY, bf16_bits
from shoal.registry.manifest import Signature

VARIABLE_SIZE = 16  # of a dimension that the signature leaves open


def batch_sizes(max_batch_size: int) -> list[int]:
    """Every power of two below the largest batch, and that itself."""
    sizes = [1 << power for power in range(max_batch_size.bit_length()) if 1 << power < max_batch_size]
    return [*sizes, max_batch_size]


def is_guessed(signature: Signature, preprocess: str) -> bool:
    """Whether an example may be something that no caller would send, so that its failure says nothing."""
    open_shapes = any(-1 in spec.shape[1:] for spec in signature.inputs)
    return bool(preprocess) or open_shapes or any(spec.datatype == "BYTES" for spec in signature.inputs)


def example(signature: Signature, num_rows: int) -> dict[str, np.ndarray]:
    """Integers are zero, the one index that every table has; floats run from 0.1 to 0.9 within a row, so that
    dividing by a norm, a sum or a deviation is possible."""
    arrays = {}
    for spec in signature.inputs:
        shape = (num_rows, *(VARIABLE_SIZE if size == -1 else size for size in spec.shape[1:]))
        dtype = NUMPY[spec.datatype]
        if spec.datatype == "BYTES":
            array = np.full(shape, b"", object)
        elif spec.datatype == "BF16" or dtype.kind == "f":
            row = np.linspace(0.1, 0.9, int(np.prod(shape[1:])), dtype=np.float32).reshape(shape[1:])
            array = np.broadcast_to(bf16_bits(row) if spec.datatype == "BF16" else row.astype(dtype), shape).copy()
        else:
            array = np.zeros(shape, dtype)
        arrays[spec.name] = array
    return arrays
