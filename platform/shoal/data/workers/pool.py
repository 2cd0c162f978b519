"""The worker processes of a loader: requests go out in turn, batches come back in the same order.

| queue | capacity | what blocks | who unblocks | close() |
|---|---|---|---|---|
| of one worker | `prefetch` requests and batches | `next`, until the oldest batch is there | the worker | ends it |

Called by the loader. Starts processes without forking, which is safe with threads and process groups.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib.machinery import PathFinder
from typing import Any, NamedTuple

from shoal.data.loader_spec import LoaderSpec
from shoal.data.readers.map_reader import EpochEnd, ReadBatch, Reader, format_samples
from shoal.data.sampling.sampler import Request
from shoal.data.workers.shm_transfer import receive, send, send_file, write_file
from shoal.data.workers.worker_main import ModuleOrigin, WorkerFailure
from shoal.errors import Closed, ConfigError, DataError

_IN_WORKER = "SHOAL_DATA_WORKER"
# Ctrl-C, and signals that torchrun, Slurm and systemd send to every process, are for the training process alone, which
# needs batches until it has saved. The imports below take a second.
_BOOT = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shoal.data.workers.worker_main import main; main(int(sys.argv[2]))"
)
_GRACE_S = 0.5
_EXIT_TIMEOUT_S = 10.0  # for the exit of a worker that has closed its socket: its status explains why
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", _IN_WORKER), "1")


class WorkerTraceback(Exception):
    """The cause of an error in a worker: its traceback there."""


class _Worker(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: socket.socket


class WorkerPool:
    """`spec.workers` processes that read for one loader. They start with the first plan."""

    def __init__(self, reader: Reader, spec: LoaderSpec) -> None:
        self._spec = spec
        try:
            self._descriptor, modules = write_file(reader)
        except Exception as error:  # a user's object may raise anything
            problem = f"the dataset cannot be handed to worker processes: {type(error).__name__}: {error}"
            remedy = (
                "define it and its collate function at the top of a file, open files lazily, or set loader.workers=0"
            )
            raise ConfigError("loader.workers", spec.workers, problem, remedy) from error
        self._end_descriptor = weakref.finalize(self, os.close, self._descriptor)
        self._origins = _find_origins(modules)
        self._workers: list[_Worker] = []
        self._end_workers: weakref.finalize[..., WorkerPool] | None = None
        self._plan: Iterator[Request] = iter(())
        self._pending: deque[tuple[int, Request]] = deque()
        self._next_worker = 0
        self._is_in_sync = True  # whether the awaited batch is the next to come: not after an interruption

    def restart(self, plan: Iterator[Request], first_worker: int = 0) -> None:
        """Follow this plan from now on; its first request goes to `first_worker`, modulo their number."""
        if not self._end_descriptor.alive:
            raise Closed("the loader is closed")
        if not self._is_in_sync:
            self._stop()
        self._is_in_sync = False  # until all requested batches have come
        try:
            while self._pending:
                self._receive()
        except (DataError, EOFError):
            self._stop()
        self._is_in_sync = True
        if not self._workers:
            self._start()
        self._plan, self._next_worker = plan, first_worker

    def next(self) -> ReadBatch | EpochEnd:
        """The batch of the oldest request. Raises DataError if there is none, or its worker has died."""
        self._is_in_sync = False  # until the batch has come
        self._send_requests()
        number, request = self._pending[0]
        try:
            made: ReadBatch | EpochEnd | WorkerFailure = self._receive()
        except EOFError:
            raise self._make_death_error(number, request) from None
        if isinstance(made, WorkerFailure):
            self._is_in_sync = True
            raise made.error from WorkerTraceback(f"\n{made.trace}")
        self._send_requests()
        self._is_in_sync = True
        return made

    def close(self) -> None:
        """End the processes. Idempotent."""
        self._stop()
        self._end_descriptor()

    def pids(self) -> list[int]:
        """The running processes."""
        return [worker.process.pid for worker in self._workers]

    def _send_requests(self) -> None:
        """Send every worker as many requests as it may have."""
        while len(self._pending) < self._spec.workers * self._spec.prefetch:
            number, request = self._next_worker % self._spec.workers, next(self._plan)
            self._pending.append((number, request))
            self._next_worker += 1
            with suppress(ConnectionError):  # it died: reported when its batch is due
                send(self._workers[number].connection, request)

    def _receive(self) -> Any:
        number, request = self._pending.popleft()
        try:
            return receive(self._workers[number].connection)
        except TimeoutError:
            problem = f"worker {number} has made no batch for {self._spec.timeout_s:g} s{_format_samples_of(request)}"
            self._stop()
            raise DataError("data", "dataset", problem, "raise loader.timeout_s if that is how long it takes") from None

    def _make_death_error(self, number: int, request: Request) -> DataError:
        process = self._workers[number].process
        with suppress(subprocess.TimeoutExpired):
            process.wait(_EXIT_TIMEOUT_S)
        code, which = process.returncode, f"its worker process {number} (pid {process.pid})"
        self._stop()
        if code is None:
            problem = f"{which} has closed its socket{_format_samples_of(request)}"
            return DataError("data", "dataset", problem, "let the dataset close no files but its own")
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        problem = f"{which} {how} while it made a batch{_format_samples_of(request)}"
        remedy = "its own words are above"
        if code == -signal.SIGKILL:
            remedy = "if memory ran out, lower loader.workers or loader.prefetch"
        return DataError("data", "dataset", problem, remedy)

    def _start(self) -> None:
        if _IN_WORKER in os.environ:
            remedy = 'put what starts the training under `if __name__ == "__main__":`'
            raise ConfigError("loader.workers", self._spec.workers, "asked for within a worker", remedy)
        self._end_workers = weakref.finalize(self, _stop_workers, self._workers)
        for _ in range(self._spec.workers):
            ours, theirs = socket.socketpair()
            arguments = [json.dumps(sys.path), str(theirs.fileno())]
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, "-c", _BOOT, *arguments],
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **_ONE_THREAD},
                )
            ours.settimeout(self._spec.timeout_s)
            self._workers.append(_Worker(process, ours))
            send(ours, self._origins)
            send_file(ours, self._descriptor)

    def _stop(self) -> None:
        self._pending.clear()
        if self._end_workers is not None:
            self._end_workers()
        self._workers = []


def _stop_workers(workers: list[_Worker]) -> None:
    """Close the sockets, which ends the workers; one that does not end soon is killed."""
    deadline_s = time.monotonic() + _GRACE_S
    for worker in workers:
        worker.connection.close()
    for worker in workers:
        try:
            worker.process.wait(max(deadline_s - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            worker.process.kill()
            worker.process.wait()


def _find_origins(modules: set[str]) -> list[ModuleOrigin]:
    """The modules that a fresh process could not import by name."""
    origins = []
    for name in sorted(modules):
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        spec = getattr(module, "__spec__", None)
        if name == "__main__" and spec is not None:
            origins.append(ModuleOrigin(name, None, spec.name))
        elif name == "__main__" and file is None:
            problem = "the dataset is defined in an interactive session, which worker processes cannot see"
            raise ConfigError("loader.workers", name, problem, "put it into a file, or set loader.workers=0")
        elif file is not None and "." not in name:
            by_name = PathFinder.find_spec(name)
            if name == "__main__" or by_name is None or by_name.origin != file:
                origins.append(ModuleOrigin(name, os.path.abspath(file), None))
    return origins


def _format_samples_of(request: Request) -> str:
    return "" if request.indices is None else f" of samples {format_samples(request.indices)}"
