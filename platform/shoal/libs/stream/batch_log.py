"""The log of batches: which messages were learnt together, in which order, written before they are learnt.

    FOLDER/batches-000000000001.log    records of batches 1, 2, ...; the next file begins at the next commit

A record is its length, its CRC-32 and (number, messages) in MessagePack. Called by `StreamLoop` and by whoever replays
a run. Knows nothing of learning.
"""

from __future__ import annotations

import os
import re
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
_NAME = re.compile(r"batches-(\d{12})\.log")


class LoggedBatch(msgspec.Struct, frozen=True, array_like=True):
    """Batch `number`, from 1."""

    number: int
    messages: list[Message]


_DECODER = msgspec.msgpack.Decoder(LoggedBatch)


class BatchLog:
    """Appends batches to the files of one folder; at most one process at a time.

    `append` hands the record to the operating system, so that a killed process loses none. `sync` makes it durable
    against a power cut as well. A record that was cut off by a kill was never learnt: `recover` removes it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        make_folder(folder)
        self._file: BinaryIO | None = None

    def recover(self, after: int) -> list[LoggedBatch]:
        """The batches above number `after`, in order; removes what was cut off at the end.

        Raises CheckpointError when one is missing or damaged before the end.
        """
        if files := _list_files(self._folder):
            content = files[-1].read_bytes()
            size = max(_find_record_ends(content), default=0)
            if size == 0:
                files[-1].unlink()
            elif size < len(content):
                os.truncate(files[-1], size)
        for path in _list_files(self._folder)[-2:]:  # a killed process may not have synced them
            with path.open("rb") as file:
                os.fsync(file.fileno())
        return list(read_batches(self._folder, after))

    def append(self, batch: LoggedBatch) -> None:
        """Write the batch; returns when a kill of this process can no longer lose it. Raises OSError."""
        if self._file is None:
            self._file = create_private(self._folder / f"batches-{batch.number:012d}.log").open("ab", buffering=0)
        payload = msgspec.msgpack.encode(batch)
        self._file.write(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)

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
        files = _list_files(self._folder)
        for path, following in pairwise(files):
            if _first_number(following) <= number + 1:
                path.unlink()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_batches(folder: Path, after: int = 0) -> Iterator[LoggedBatch]:
    """The batches of a folder above number `after`, in order; what was cut off at the very end is passed over.

    Raises CheckpointError when one is missing or damaged before the end.
    """
    files = _list_files(folder)
    expected = after + 1
    is_first = True
    for index, path in enumerate(files):
        if index + 1 < len(files) and _first_number(files[index + 1]) <= after + 1:
            continue
        content, start = path.read_bytes(), 0
        for end in _find_record_ends(content):
            batch, start = _DECODER.decode(content[start + _HEADER.size : end]), end
            if batch.number != expected and not (is_first and batch.number <= expected):
                raise CheckpointError(f"{path}: batch {batch.number} follows, where {expected} was expected")
            is_first, expected = False, batch.number + 1
            if batch.number > after:
                yield batch
    if files and expected < _first_number(files[-1]):
        raise CheckpointError(f"{folder}: the log ends at batch {expected - 1}, before {files[-1].name}")


def _list_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if _NAME.fullmatch(path.name))


def _first_number(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _find_record_ends(content: bytes) -> Iterator[int]:
    """Where each record ends, up to the first that is incomplete or damaged."""
    position = 0
    while position + _HEADER.size <= len(content):
        size, checksum = _HEADER.unpack_from(content, position)
        end: int = position + _HEADER.size + size
        payload = content[position + _HEADER.size : end]
        if len(payload) < size or zlib.crc32(payload) != checksum:
            return
        yield end
        position = end
