"""Warms a version up before it serves, with examples generated from the signature, at the expected sizes.

Called by the predictor. A first forward chooses kernels, allocates and compiles: no request should wait for it, and no
estimate should rest on it. So the latency model gets later forwards only, and the shortest of those.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_bits
from shoal.open_inference.messages import TensorDescription
from shoal.registry.manifest import Signature

DEFAULT_VARIABLE_SIZE = 16  # the size of an open dimension
NUM_TIMED = 2
MAX_MEASURE_S = 1.0  # adds this, and one forward, to a replica's start


def batch_sizes(max_batch_size: int) -> list[int]:
    """Every power of two below the largest batch, and the largest batch."""
    sizes = [1 << power for power in range(max_batch_size.bit_length()) if 1 << power < max_batch_size]
    return [*sizes, max_batch_size]


def time_warm_forwards(
    forward: Callable[[int], object], sizes: Sequence[int], clock: Callable[[], float] = time.perf_counter
) -> list[tuple[int, float]]:
    """(rows, seconds) of warm forwards: for each size the shortest of `NUM_TIMED`, within `MAX_MEASURE_S`.

    A longer time may be the machine's other load, and a time that is too long refuses requests.
    """
    times: list[tuple[int, float]] = []
    ends_s = clock() + MAX_MEASURE_S
    for size in sizes:
        taken_s: list[float] = []
        while len(taken_s) < NUM_TIMED and (started_s := clock()) < ends_s:
            forward(size)
            taken_s.append(clock() - started_s)
        if taken_s:
            times.append((size, min(taken_s)))
    return times


def has_one_shape(signature: Signature) -> bool:
    """Whether all rows are as large as an example, so that real ones take as long."""
    return all(-1 not in spec.shape[1:] and (spec.datatype != "BYTES" or spec.kind) for spec in signature.inputs)


def make_example(
    inputs: Sequence[TensorDescription], num_rows: int, variable_size: int = DEFAULT_VARIABLE_SIZE
) -> dict[str, np.ndarray]:
    """Make an example. Integers and booleans are one: zero is padding to many models, or a mask that hides everything,
    with a mean of NaN. Floats run from 0.1 to 0.9 within a row, so that norms, sums and deviations are not zero.
    Columns of a table are gaps, the one value that every encoder takes.
    """
    arrays = {}
    for spec in inputs:
        shape = (num_rows, *(variable_size if size == -1 else size for size in spec.shape[1:]))
        dtype = NUMPY_DTYPES[spec.datatype]
        if spec.datatype == "BYTES":
            array = np.full(shape, b"", object)
        elif spec.kind:
            array = np.full(shape, np.nan)
        elif spec.datatype == "BF16" or dtype.kind == "f":
            row = np.linspace(0.1, 0.9, int(np.prod(shape[1:])), dtype=np.float32).reshape(shape[1:])
            array = np.broadcast_to(bf16_bits(row) if spec.datatype == "BF16" else row.astype(dtype), shape).copy()
        else:
            array = np.ones(shape, dtype)
        arrays[spec.name] = array
    return arrays
