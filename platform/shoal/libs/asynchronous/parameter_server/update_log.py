"""The gradients that a server has taken and not yet saved as weights: on disk, before a worker goes on.

With `sync.durable` a gradient is appended here before it is acknowledged, and the controller keeps the order of the
updates. So a server that died comes back with its newest state, and applies from here what came after it. A segment is
a file; each state that is written begins another, and removes those of which it has every update.

    one record   [worker, incarnation, clock, size in bytes: int64 each][the gradient as it was sent]

A record is on the disk (fdatasync) when `append` returns. One that a death has cut short was never acknowledged, so no
update names it. Called by `server_service`; for one thread.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

_HEADER = struct.Struct("<4q")


class GradientKey(NamedTuple):
    """A gradient of a run."""

    worker: int
    incarnation: int
    clock: int


class _Position(NamedTuple):
    segment: int
    offset: int
    size: int


class UpdateLog:
    """The segments `STEM.NUMBER.log` beside `file`, the server's state."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._positions: dict[GradientKey, _Position] = {}
        self._newest: dict[int, GradientKey] = {}  # by worker
        self._applied: dict[GradientKey, int] = {}  # the version with it
        paths = file.parent.glob(f"{file.stem}.*.log")
        numbers = sorted(int(path.suffixes[-2][1:]) for path in paths if path.suffixes[-2][1:].isdigit())
        for number in numbers:
            self._index(number)
        self._segments = numbers
        self._descriptor = -1
        self.begin_segment()

    def append(self, key: GradientKey, gradient: bytes | memoryview) -> None:
        """Write a gradient to the disk. Raises OSError."""
        head = _HEADER.pack(*key, len(gradient))
        offset = os.lseek(self._descriptor, 0, os.SEEK_END)
        for part in (head, gradient):
            rest = memoryview(part)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]
        os.fdatasync(self._descriptor)
        self._positions[key] = _Position(self._segments[-1], offset + _HEADER.size, len(gradient))
        self._newest[key.worker] = key

    def read(self, key: GradientKey) -> bytes:
        """The gradient of this key. Raises KeyError without one."""
        position = self._positions[key]
        with self._path(position.segment).open("rb") as file:
            file.seek(position.offset)
            return file.read(position.size)

    def note_applied(self, key: GradientKey, version: int) -> None:
        """The weights of `version` are the first with this gradient."""
        self._applied[key] = version

    def begin_segment(self) -> None:
        """Append to another file from now on."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._segments.append(self._segments[-1] + 1 if self._segments else 0)
        self._descriptor = os.open(self._path(self._segments[-1]), os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def remove_until(self, version: int) -> None:
        """The state of `version` is on the disk: remove the segments that no later update needs."""
        needed = {
            position.segment
            for key, position in self._positions.items()
            # A worker's newest gradient may still become an update.
            if (self._applied[key] > version if key in self._applied else key == self._newest[key.worker])
        }
        gone = {number for number in self._segments[:-1] if number not in needed}
        for number in gone:
            self._path(number).unlink(missing_ok=True)
        self._segments = [number for number in self._segments if number not in gone]
        self._positions = {key: each for key, each in self._positions.items() if each.segment not in gone}
        self._applied = {key: version for key, version in self._applied.items() if key in self._positions}

    def _index(self, number: int) -> None:
        path = self._path(number)
        size = path.stat().st_size
        with path.open("rb") as file:
            offset = 0
            while offset + _HEADER.size <= size:
                worker, incarnation, clock, length = _HEADER.unpack(file.read(_HEADER.size))
                if offset + _HEADER.size + length > size:
                    break  # cut short by a death: never acknowledged
                key = GradientKey(worker, incarnation, clock)
                self._positions[key] = _Position(number, offset + _HEADER.size, length)
                self._newest[worker] = key
                offset += _HEADER.size + length
                file.seek(offset)

    def _path(self, number: int) -> Path:
        return self._file.with_suffix(f".{number}.log")

    def close(self) -> None:
        """Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def remove_earlier(file: Path) -> None:
    """Remove what earlier attempts of a run have left on this host: `file` is `server-INDEX-ATTEMPT.safetensors`."""
    server = file.name.rpartition("-")[0]
    for path in file.parent.glob(f"{server}[-.]*"):
        if not path.name.startswith(f"{file.stem}."):
            path.unlink(missing_ok=True)
