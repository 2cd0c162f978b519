"""A worker process: receives the reader once, then requests, and sends batches until the socket closes.

The pool starts it with `python -c`, so that the training script does not run again. It ends with the training process,
which has the other end of the socket.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from shoal.data.readers.map_reader import format_samples
from shoal.data.workers.shm_transfer import receive, send
from shoal.errors import ConfigError, DataError


class ModuleOrigin(NamedTuple):
    """Where to load a module that the worker could not import by its name: a file, or another name."""

    name: str
    file: str | None
    other_name: str | None


class WorkerFailure(NamedTuple):
    """Instead of a batch: the error and its place."""

    error: ConfigError
    trace: str


def main(descriptor: int) -> None:
    """Serve requests over the socket until it closes."""
    torch.set_num_threads(1)
    # Where cores are busy, a request wakes this process, which would at once take the core from the step that sent it,
    # for as long as a batch takes to make. In batch scheduling it has the same share of time, and waits for its turn.
    with suppress(OSError):  # a sandbox may forbid it
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    with socket.socket(fileno=descriptor) as connection:
        try:
            answer = _load_reader(connection)
            while True:
                request = receive(connection)
                _send_answer(connection, answer(request))
        except (EOFError, BrokenPipeError):
            return


def _load_reader(connection: socket.socket) -> Callable[[Any], Any]:
    """The reader, or its error if it cannot be loaded here."""
    origins: list[ModuleOrigin] = receive(connection)
    try:
        for origin in origins:
            _load_module(origin)
        reader = receive(connection, private=True)
    except EOFError:
        raise
    except Exception as error:  # noqa: BLE001 - a user's module: whatever it raises is the answer
        words = f"cannot be loaded in a worker: {type(error).__name__}: {error}"
        remedy = "import it in a fresh Python, or set loader.workers=0"
        refused = error if isinstance(error, ConfigError) else DataError("data", "dataset", words, remedy)
        failure = WorkerFailure(refused, traceback.format_exc())
        return lambda request: failure

    def answer(request: Any) -> Any:
        try:
            return reader.read(request)
        except ConfigError as error:  # readers raise nothing else
            return WorkerFailure(error, traceback.format_exc())

    return answer


def _send_answer(connection: socket.socket, answer: Any) -> None:
    try:
        send(connection, answer)
    except (EOFError, BrokenPipeError):
        raise
    except Exception as error:  # noqa: BLE001 - a batch that pickle or memory does not take: said in its place
        named = "" if getattr(answer, "indices", None) is None else f" of samples {format_samples(answer.indices)}"
        problem = f"a batch{named} cannot be handed over by a worker: {type(error).__name__}: {error}"
        refused = DataError("data", "dataset", problem, "make it of tensors, arrays and texts, or set loader.workers=0")
        send(connection, WorkerFailure(refused, traceback.format_exc()))


def _load_module(origin: ModuleOrigin) -> None:
    if origin.other_name is not None:
        sys.modules[origin.name] = importlib.import_module(origin.other_name)
        return
    assert origin.file is not None
    # not "__main__", so that a script's `if __name__ == "__main__":` part does not run here
    name = "__mp_main__" if origin.name == "__main__" else origin.name
    spec = importlib.util.spec_from_file_location(name, origin.file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = sys.modules[origin.name] = module
    spec.loader.exec_module(module)
