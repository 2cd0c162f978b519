"""The log of batches: which messages were learnt together, in which order, written before they are learnt.

    FOLDER/batches-000000000001.log    records of batches 1, 2, ...; the next file begins at the next commit

A record is its length, its CRC-32 and (number, messages) in MessagePack. Only the last one of a file may be torn: a
resumed stream begins another file, or the same where it has no other record. After a power cut, also an earlier file
may lack its end. Called by `StreamLoop` and by the replay of a run. Knows nothing of learning.
"""

from __future__ import annotations

import logging
import os
import struct
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import msgspec

from shoal.atomic_file import create_private, make_folder, sync_folder
from shoal.errors import CheckpointError
from shoal.libs.stream.messages import Message

_HEADER = struct.Struct("<II")
_log = logging.getLogger(__name__)


class LoggedBatch(msgspec.Struct, frozen=True, array_like=True):
    """Batch `number`, from 1."""

    number: int
    messages: list[Message]


_DECODER = msgspec.msgpack.Decoder(LoggedBatch)


class BatchLog:
    """Appends batches to the files of one folder; at most one process at a time.

    `append` hands the record to the operating system, so that a killed process loses none. `sync` makes it durable
    against a power cut as well. A record that was cut off by a kill was never learnt: readers pass over it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder)
        self._file: BinaryIO | None = None

    def recover(self, after: int, synced: int = 0) -> list[LoggedBatch]:
        """The batches above number `after`, in order. Raises CheckpointError when one up to `synced` is missing or
        damaged.

        After that, a power cut may have taken the end of a file and left the next one. What it has left is deleted: its
        messages were not acknowledged, and are batched again.
        """
        files = _list_files(self._folder)
        for path in list(files.values())[-2:]:  # a killed process may not have synced them
            with path.open("rb") as file:
                os.fsync(file.fileno())
        result: list[LoggedBatch] = []
        gap: CheckpointError | None = None
        try:
            for batch in read_batches(self._folder, after):
                result.append(batch)
        except CheckpointError as error:
            gap = error
        newest = after + len(result)
        if newest < synced:
            problem = f"{self._folder} has no batch {newest + 1}, and those up to {synced} were acknowledged"
            raise CheckpointError(f"{problem}: put a copy of the log in its place") from gap
        if gap is not None:
            _log.warning("%s: what follows was not acknowledged, and is left out", gap)
            for first, path in files.items():
                if first > newest:
                    path.unlink()
            sync_folder(self._folder)
        return result

    def append(self, batch: LoggedBatch) -> None:
        """Write the batch; returns when a kill of this process can no longer lose it. Raises OSError."""
        if self._file is None:
            # One of this name has a torn record alone.
            self._file = create_private(self._folder / f"batches-{batch.number:012d}.log").open("wb")
        payload = msgspec.msgpack.encode(batch)
        self._file.write(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
        self._file.flush()

    def rotate(self) -> int | None:
        """End the file: the next batch begins another. Returns a descriptor for `sync`, which closes it."""
        if self._file is None:
            return None
        descriptor = os.dup(self._file.fileno())
        self.close()
        return descriptor

    def sync(self, descriptor: int | None) -> None:
        """Wait until the rotated file is on the disk; from any thread."""
        if descriptor is None:
            return
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        sync_folder(self._folder)

    def remove_before(self, number: int) -> None:
        """Delete the files that have only batches up to `number`: checkpoints contain them."""
        for (_, path), (following, _) in pairwise(_list_files(self._folder).items()):
            if following <= number + 1:
                path.unlink()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_batches(folder: Path, after: int = 0) -> Iterator[LoggedBatch]:
    """The batches of a folder above number `after`, in order; what was cut off at the end of a file is passed over.

    Raises CheckpointError when one is missing or damaged before the end.
    """
    files = _list_files(folder)
    expected = begin = max((first for first in files if first <= after + 1), default=after + 1)
    for first, path in files.items():
        if first < begin:
            continue
        if first != expected:
            raise CheckpointError(f"{path}: batch {first} follows, where {expected} was expected")
        for payload in _read_payloads(path.read_bytes()):
            expected += 1
            if expected > after + 1:
                yield _DECODER.decode(payload)


def _list_files(folder: Path) -> dict[int, Path]:
    """By the number of the first batch, in order."""
    return {int(path.stem[-12:]): path for path in sorted(folder.glob(f"batches-{'[0-9]' * 12}.log"))}


def _read_payloads(content: bytes) -> Iterator[bytes]:
    """Those of the records, up to the first that is incomplete or damaged."""
    position = _HEADER.size
    while position <= len(content):
        size, checksum = _HEADER.unpack_from(content, position - _HEADER.size)
        payload = content[position : position + size]
        if not payload or len(payload) < size or zlib.crc32(payload) != checksum:
            return  # no payload: a power cut leaves zeros
        yield payload
        position += size + _HEADER.size
