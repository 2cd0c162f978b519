"""The metrics of a run as TensorBoard event files.

Owns one event file per recorder. Called by the recorder's thread, under its lock; never read back by Shoal.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from shoal.atomic_file import create_private, make_folder
from shoal.errors import needs_extra
from shoal.extend.runs import LogEntry, MetricMirror


class EventFile:
    """One append-only event file in `folder`, created at once.

    attempt: the run's incarnation; readers sort the files by name, also two of the same second

    Written with TensorBoard's own record writer. The SummaryWriters of TensorBoard and tensorboardX start a thread or
    a multiprocessing queue for each run, and importing tensorboardX imports torch.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        with needs_extra("report"):
            from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
            from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        make_folder(folder)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{attempt:06d}.{socket.gethostname()}.{secrets.token_hex(4)}"
        self._writer, self._make_event = RecordWriter(create_private(folder / name).open("wb")), Event
        self._write(wall_time=now, file_version="brain.Event:2")

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._make_event(**fields).SerializeToString())

    def write_restart(self, step: int) -> None:
        """Make readers drop this step and later ones of earlier files in the folder."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(wall_time=time.time(), step=step, session_log=SessionLog(status=SessionLog.START))

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Append the values of one step, logged `at` seconds since the epoch; they need not be finite."""
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(wall_time=at, step=step, summary=Summary(value=scalars))

    def add_histogram(self, step: int, at: float, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Append a distribution: counts [bins] between edges [bins + 1]."""
        from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary

        centres = (edges[:-1] + edges[1:]) / 2
        histogram = HistogramProto(
            min=float(edges[0]),
            max=float(edges[-1]),
            num=float(counts.sum()),
            sum=float((counts * centres).sum()),
            sum_squares=float((counts * centres**2).sum()),
            bucket_limit=edges[1:].astype(float).tolist(),
            bucket=counts.astype(float).tolist(),
        )
        self._write(wall_time=at, step=step, summary=Summary(value=[Summary.Value(tag=name, histo=histogram)]))

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._writer.close()


_log = logging.getLogger(__name__)


class TensorBoardMirror(MetricMirror):
    """The files of one incarnation of a run. Every method may be called from any thread; disk errors are logged.

    | capacity                    | what blocks               | who unblocks | close()                       |
    |-----------------------------|---------------------------|--------------|-------------------------------|
    | what is taken between writes | `write`, `add_histogram` | the disk     | writes the rest, closes files |
    """

    def __init__(self, run_id: str, folder: Path, incarnation: int) -> None:
        self._run_id = run_id
        self._folder = folder / "tensorboard"
        self._incarnation = incarnation
        self._file: EventFile | None = None
        self._closed = False
        self._queued: list[LogEntry] = []
        self._forgotten_after: int | None = None  # drop later steps that were written before
        self._queue_lock = threading.Lock()  # guards _queued and _forgotten_after; held for moments
        self._write_lock = threading.Lock()  # guards _file and _closed

    @property
    def has_file(self) -> bool:
        """Whether a file exists, and so begins with a known step."""
        return self._file is not None

    def enqueue(self, logged: list[LogEntry]) -> None:
        """Queue committed entries for writing."""
        with self._queue_lock:
            self._queued += logged

    def forget_after(self, step: int) -> None:
        """Drop queued entries of later, abandoned steps, and make readers drop the written ones."""
        with self._queue_lock:
            self._queued = [entry for entry in self._queued if entry[0] <= step]
            self._forgotten_after = step if self._forgotten_after is None else min(step, self._forgotten_after)

    def write(self) -> None:
        """Write the queued entries."""
        with self._write_lock:
            with self._queue_lock:
                if not self._queued and (self._file is None or self._forgotten_after is None):
                    return
                logged, self._queued = self._queued, []
                forgotten_after, self._forgotten_after = self._forgotten_after, None
            with self._log_errors():
                file = self._open_file(min((step for step, _, _ in logged), default=0), forgotten_after)
                for step, at, values in logged:
                    file.add(step, at, values)
                file.flush()

    def add_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """A distribution: counts [bins] between edges [bins + 1]."""
        with self._write_lock:
            if self._closed:  # the run ended in the meantime
                return
            with self._queue_lock:
                forgotten_after, self._forgotten_after = self._forgotten_after, None
            with self._log_errors():
                self._open_file(step, forgotten_after).add_histogram(step, time.time(), name, counts, edges)

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.write()
        with self._write_lock, self._log_errors():
            self._closed = True
            if self._file is not None:
                self._file.close()

    def _open_file(self, step: int, forgotten_after: int | None) -> EventFile:
        """Open the file of this incarnation at `step`; a resumed run repeats some steps of the one before.

        forgotten_after: the last valid step of earlier files, when later ones were abandoned

        Raises OSError. Called under `_write_lock`.
        """
        again = [] if forgotten_after is None else [forgotten_after + 1]
        if self._file is None:
            self._file = EventFile(self._folder, self._incarnation)
            if self._incarnation > 1:
                again.append(step)
        if again:
            self._file.write_restart(min(again))
        return self._file

    @contextmanager
    def _log_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            _log.warning("run %s: TensorBoard files cannot be written: %s", self._run_id, error)
