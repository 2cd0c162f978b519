"""The metrics of a run as TensorBoard event files.

Owns one event file a recorder. Called by the recorder's thread, under its lock; never read back by Shoal.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np


class EventFile:
    """One append-only event file in `folder`, made at once.

    life: of the run; readers take the files in the order of their names, also of two within a second

    Written with TensorBoard's own record writer. The SummaryWriters of TensorBoard and tensorboardX start a thread or
    a multiprocessing queue for each run, and importing tensorboardX imports torch.
    """

    def __init__(self, folder: Path, life: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]
        from tensorboard.summary.writer.record_writer import RecordWriter  # type: ignore[import-untyped]

        folder.mkdir(parents=True, exist_ok=True)
        now = time.time()
        name = f"events.out.tfevents.{int(now):010d}.{life:06d}.{socket.gethostname()}.{secrets.token_hex(4)}"
        self._writer = RecordWriter((folder / name).open("wb"))
        self._writer.write(Event(wall_time=now, file_version="brain.Event:2").SerializeToString())

    def begin_again(self, step: int) -> None:
        """Have readers forget what earlier files of the folder say of this step and of later ones."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        again = SessionLog(status=SessionLog.START)
        self._writer.write(Event(wall_time=time.time(), step=step, session_log=again).SerializeToString())

    def add(self, step: int, at: float, values: Mapping[str, float]) -> None:
        """Append the values of one step, logged `at` seconds since the epoch; they need not be finite."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer.write(Event(wall_time=at, step=step, summary=Summary(value=scalars)).SerializeToString())

    def add_histogram(self, step: int, at: float, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Append a distribution: counts [bins] between edges [bins + 1]."""
        from tensorboard.compat.proto.event_pb2 import Event
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
        value = Summary.Value(tag=name, histo=histogram)
        self._writer.write(Event(wall_time=at, step=step, summary=Summary(value=[value])).SerializeToString())

    def flush(self) -> None:
        """Hand everything to the operating system."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._writer.close()
