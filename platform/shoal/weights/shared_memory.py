"""Large weights for other processes of this machine: one copy in memory that all of them map.

A gateway puts each version there, and tells actors of its machine where it is: nothing is sent, copied or hashed again,
and sixty actors hold one copy. Knows no transport.
"""

from __future__ import annotations

import mmap
import os
from collections import deque

import numpy as np

from shoal.channel.memory import IS_AVAILABLE, MemoryAddress, share_content
from shoal.errors import WeightsError
from shoal.weights.store import DTYPES, WeightSnapshot, decode_header

LEAST_BYTES = 2**18  # below that, sending is as fast
KEPT = 4  # versions that can be opened: an actor may be about to


class SharedPayloads:
    """The newest payloads of one process, for others to open. Not for use by several threads."""

    def __init__(self) -> None:
        self._retained: deque[tuple[int, MemoryAddress]] = deque()  # with the version

    def put(self, snapshot: WeightSnapshot) -> MemoryAddress | None:
        """Where this version is; None where it is too small, or memory cannot be shared here."""
        if self._retained and self._retained[-1][0] == snapshot.version:
            return self._retained[-1][1]
        if not IS_AVAILABLE or len(snapshot.payload) < LEAST_BYTES:
            return None
        try:
            address = share_content(f"weights-{snapshot.version}", snapshot.payload)
        except OSError:  # as in a sandbox, or without memory for a second copy
            return None
        self._retained.append((snapshot.version, address))
        while len(self._retained) > KEPT:
            os.close(self._retained.popleft()[1].fd)
        return address

    def close(self) -> None:
        """Nothing can be opened any more; what is mapped stays. Idempotent."""
        while self._retained:
            os.close(self._retained.pop()[1].fd)


def view_tensors(payload: mmap.mmap | bytes) -> dict[str, np.ndarray]:
    """Named arrays of safetensors that lie in `payload`, without a copy; they are read-only.

    The format: https://huggingface.co/docs/safetensors. Raises WeightsError when it is damaged, or NumPy has no such
    datatype.
    """
    try:
        described, start = decode_header(payload)
        result = {}
        for name, each in described.items():
            begin, end = each["data_offsets"]
            dtype = np.dtype(DTYPES[each["dtype"]])
            rows: np.ndarray = np.frombuffer(payload, dtype, (end - begin) // dtype.itemsize, start + begin)
            result[name] = rows.reshape(each["shape"])
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise WeightsError(f"the payload is not safetensors, or not for NumPy: {error!r}") from None
    return result
