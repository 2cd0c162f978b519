"""Large weights for other processes of this machine: one copy in memory that all of them map.

A gateway puts each version into an anonymous, sealed file (memfd_create, Linux), and tells actors of its machine where
it is. They open it through /proc and map it: nothing is sent, copied or hashed again, and sixty actors hold one copy.
The memory is freed when the last process that has mapped it lets go of it, however each ends. Knows no transport.
"""

from __future__ import annotations

import mmap
import os
import stat
import sys
from collections import deque
from typing import NamedTuple

import numpy as np

from shoal.errors import WeightsError
from shoal.weights.store import DTYPES, WeightSnapshot, decode_header

LEAST_BYTES = 2**18  # below that, sending is as fast
KEPT = 4  # versions that can be opened: an actor may be about to
IS_AVAILABLE = sys.platform == "linux" and hasattr(os, "memfd_create")


class PayloadAddress(NamedTuple):
    """Where a payload is: a file descriptor of a process, and the inode by which the right file is known."""

    pid: int
    fd: int
    inode: int
    size: int


class SharedPayloads:
    """The newest payloads of one process, for others to open. Not for use by several threads."""

    def __init__(self) -> None:
        self._retained: deque[tuple[int, PayloadAddress]] = deque()  # with the version

    def put(self, snapshot: WeightSnapshot) -> PayloadAddress | None:
        """Where this version is; None where it is too small, or memory cannot be shared here."""
        if self._retained and self._retained[-1][0] == snapshot.version:
            return self._retained[-1][1]
        if not IS_AVAILABLE or len(snapshot.payload) < LEAST_BYTES:
            return None
        import fcntl  # which Windows has not

        try:
            fd = os.memfd_create(f"weights-{snapshot.version}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError:  # as in a sandbox
            return None
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(snapshot.payload)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)
        except OSError:  # there is no memory for a second copy
            os.close(fd)
            return None
        address = PayloadAddress(os.getpid(), fd, os.fstat(fd).st_ino, len(snapshot.payload))
        self._retained.append((snapshot.version, address))
        while len(self._retained) > KEPT:
            os.close(self._retained.popleft()[1].fd)
        return address

    def close(self) -> None:
        """Nothing can be opened any more; what is mapped stays. Idempotent."""
        while self._retained:
            os.close(self._retained.pop()[1].fd)


def map_payload(address: PayloadAddress) -> mmap.mmap | None:
    """The payload of another process, read-only; None where it cannot be opened, or is gone."""
    try:
        # Another file may have the number by now, even a pipe: opening it must not wait.
        fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        result = os.fstat(fd)
        if not stat.S_ISREG(result.st_mode) or (result.st_ino, result.st_size) != (address.inode, address.size):
            return None
        return mmap.mmap(fd, address.size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
    except OSError:
        return None
    finally:
        os.close(fd)


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
