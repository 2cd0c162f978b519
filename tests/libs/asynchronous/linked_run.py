"""A run whose processes are in two network namespaces, as a program: tests cut and slow the link between them.

    python linked_run.py NAMESPACE_PID HOST FOLDER SPEC PROCESS...

Runs in one namespace, where it starts all processes but those that are named: these it starts in the namespace of
NAMESPACE_PID. Writes a line of JSON for each step and event.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shoal.libs.asynchronous.replicas import ForkedProcess, fit_replicas
from shoal.sync import rpc
from shoal.train.spec import TrainSpec

_CLONE_NEWNET = 0x40000000


def run_beyond(namespace: int | None, target: Callable[..., None], *arguments: Any) -> None:
    """The function in a process of that namespace. Connections break after half a second without a sign of life."""
    rpc.UNACKNOWLEDGED_MS = 500
    if namespace is not None:
        descriptor = os.open(f"/proc/{namespace}/ns/net", os.O_RDONLY)
        assert ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        os.close(descriptor)
    target(*arguments)


def write_line(found: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


class PrintedLog:
    """An event log: a line for each."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        write_line({"step": step})

    def record_event(self, kind: str, /, **details: object) -> None:
        write_line({"event": kind, **details})

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        """Not written."""

    def flush(self) -> None:
        """Each line is."""


def main(namespace: str, host: str, folder: str, spec: str, *beyond: str) -> None:
    def start(name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> ForkedProcess:
        where = int(namespace) if name in beyond else None
        return ForkedProcess(name, run_beyond, (where, target, *arguments))

    rpc.UNACKNOWLEDGED_MS = 500
    parsed = TrainSpec.parse(json.loads(spec))
    outcome = fit_replicas(parsed, "run", Path(folder), PrintedLog(), lambda: False, start, host=host)
    write_line({"weights": str(outcome.weights), "steps": outcome.steps})


if __name__ == "__main__":
    main(*sys.argv[1:])
