"""What the processes of a run print, in the run's folder: it outlives the cluster that ran them.

The driver of a job copies its own output and that of its workers on its host, as they grow; actors write there
themselves, and a training in its caller's process what it says of itself. `shoal logs` reads all of it.
"""

from __future__ import annotations

import codecs
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from shoal.atomic_file import create_private, make_folder
from shoal.store import Mirror

FOLDER, DRIVER = "logs", "driver"
COPY_S = 1.0
MAX_BYTES = 64 * 2**20  # of one process
_RAYS_MARKS = (b":job_id:", b":actor_name:", b":task_name:")  # lines of Ray's own in a worker's output

_log = logging.getLogger(__name__)


class OutputCopier:
    """Copies output into the folder of a run as long as it is open; waits until that folder is there.

    find_sources: the files by now, each with the name of its process; it is asked again and again
    """

    def __init__(self, folder: Path, find_sources: Callable[[], Mapping[Path, str]]) -> None:
        self._folder, self._find_sources = folder, find_sources
        self._offsets: dict[Path, int] = {}
        self._is_closed = False
        self._mirror = Mirror("output", self._copy, COPY_S)

    def close(self) -> None:
        """Copy the rest. Idempotent."""
        self._is_closed = True
        self._mirror.close()

    def _copy(self) -> bool:
        """False where the disk takes nothing: then the run goes on without."""
        if not self._folder.is_dir():
            return True
        try:
            for path, process in self._find_sources().items():
                self._copy_file(path, process)
        except OSError as error:
            _log.warning("the output of the run is no longer copied to %s: %s", self._folder, error)
            return False
        return True

    def _copy_file(self, path: Path, process: str) -> None:
        before = self._offsets.get(path, 0)
        if before >= MAX_BYTES or path.stat().st_size <= before:
            return
        with path.open("rb") as file:
            file.seek(before)
            new = file.read(MAX_BYTES - before)
        lines = new.splitlines(keepends=True)
        if not lines[-1].endswith(b"\n") and not self._is_closed:
            lines.pop()  # it is still being written
        self._offsets[path] = before + sum(map(len, lines))
        text = b"".join(line for line in lines if not line.startswith(_RAYS_MARKS))
        if self._offsets[path] >= MAX_BYTES:
            text += b"\n... the rest is left out\n"
        if text:
            append_output(self._folder, process, text)


def append_output(folder: Path, process: str, text: bytes) -> None:
    """Add what a process has printed to its file in the folder of a run."""
    target = folder / FOLDER / f"{process}.log"
    make_folder(target.parent)
    with create_private(target).open("ab") as copy:
        copy.write(text)


def list_outputs(folder: Path) -> dict[str, Path]:
    """The file of each process of a run, by the process's name, of the driver first."""
    paths = [*folder.glob(f"{FOLDER}/*.log"), *folder.glob("*.log")]
    return {path.stem: path for path in sorted(paths, key=lambda each: (each.stem != DRIVER, each.stem))}


def read_output(path: Path, begin: int | None, most: int) -> tuple[str, int, int]:
    """A part of a process's output, where it begins and where it ends, in bytes.

    begin: None: the last `most` bytes
    """
    with path.open("rb") as file:
        size = file.seek(0, 2)
        begin = max(0, size - most) if begin is None else min(max(0, begin), size)
        file.seek(begin)
        part = file.read(most)
    whole = part[: part.rfind(b"\n") + 1] or part
    return codecs.decode(whole, errors="replace"), begin, begin + len(whole)


class OutputReader:
    """Reads what is in a run's folder, from the beginning, and then what has come since."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets: dict[Path, int] = {}

    @property
    def processes(self) -> set[str]:
        """Those that have been read."""
        return {path.stem for path in self._offsets}

    def read_new_lines(self, *, is_over: bool) -> list[tuple[str, str]]:
        """The process and the line, of the driver first. is_over: an incomplete last line is one."""
        found = []
        for process, path in list_outputs(self._folder).items():
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                new = file.read()
            whole = new if is_over else new[: new.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            found += [(process, line) for line in codecs.decode(whole, errors="replace").splitlines()]
        return found
