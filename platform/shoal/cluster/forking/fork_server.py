"""The process that Ray workers are forked from, torch imported: `python -m shoal.cluster.forking.fork_server SOCKET`.

A fresh worker spends seconds of a processor on imports, torch's above all, and Ray starts Python twice for it. This
process, a child of the embedded cluster's head, imports once what workers import, and forks itself for each: what a
worker imports is then there. `worker_launch` asks it, in the raylet's name. It never imports Ray, whose C++ part does
not survive a fork, nor shoal, which a job may bring along itself.

A forked worker finds what a fresh one would: its own environment, folder, streams, `sys.path` and `__main__`; random
numbers of its own; and, for what it imports, what its own `sys.path` leads to (see `imported`).
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.cluster.forking.fork_client import OOM_SCORE, STARTUP_VARIABLES, WorkerRequest
from shoal.cluster.forking.preloaded_modules import PreloadedModuleFinder

# What workers import sooner or later, and what may be forked: no threads but numpy's, whose library minds forks, and no
# connections. So neither pyarrow, which has a thread, nor pandas, which imports it. torch's compiler is what the first
# step of an optimiser imports.
LIBRARIES = (
    *("numpy", "requests", "jsonschema", "google.protobuf", "yaml", "msgpack", "click"),  # Ray's
    *("aiohttp", "fastapi", "uvicorn", "pydantic", "httpx2", "msgspec", "rich.console"),  # an endpoint's
    *("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "safetensors.torch"),
)
REQUEST_TIMEOUT_S = 10.0
BACKLOG = 128
CHUNK_BYTES = 64 * 1024
FileStamps = dict[str, tuple[int, int] | None]  # inode and time of change


def main() -> None:
    """Import, then fork for whoever asks at the socket that argument 1 names, until ended. Returns in no process."""
    before, environment = set(sys.modules), dict(os.environ)
    for name in LIBRARIES:
        importlib.import_module(name)
    imported = sys.modules.keys() - before
    _replace_environment(environment)  # torch's compiler has written to it, and will again in who uses it
    gc.collect()
    gc.freeze()  # else a worker's first search for garbage would copy the pages of all that it shares
    become_worker(_serve_forks(sys.argv[1], stat_module_files(filter(_is_outermost, imported))), imported)


def _serve_forks(address: str, read: FileStamps) -> WorkerRequest:
    """Returns in each process that is forked, with the worker that it is to become.

    read: the files of what was imported; when one is another by now, as after an upgrade, nothing is forked any more
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets workers that have ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(BACKLOG)
        while True:
            # Nothing is ever written to standard input: it closes when the head ends, however that does.
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                sys.exit()
            connection, _ = listener.accept()
            with connection:
                worker = _handle_request(connection, read)
                if worker is not None:
                    return worker


def _handle_request(connection: socket.socket, read: FileStamps) -> WorkerRequest | None:
    """Fork if that gives the worker that is asked for; what it is, in the new process, and None in this one.

    Raises OSError in the new process when who asked has given up waiting.
    """
    connection.settimeout(REQUEST_TIMEOUT_S)
    streams: list[int] = []
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        worker: WorkerRequest = json.loads(_receive(connection, int.from_bytes(head, "big")))
        is_worker = can_fork(worker) and stat_module_files(read) == read and os.fork() == 0
    except (OSError, EOFError):  # who asked has ended, or there may be no more processes
        is_worker = False
    for number, stream in enumerate(streams):
        if is_worker:
            os.dup2(stream, number)
        os.close(stream)
    if not is_worker:
        return None
    connection.sendall(b"+")  # from here on there is a worker
    return worker


def _receive(connection: socket.socket, size_bytes: int) -> bytes:
    text = bytearray()
    while len(text) < max(1, size_bytes):
        part = connection.recv(CHUNK_BYTES)
        if not part:
            raise EOFError
        text += part
    return bytes(text)


def _is_outermost(name: str) -> bool:
    """Of a package with a file, that stands for all of it: who upgrades one replaces every file."""
    around = sys.modules.get(name.rpartition(".")[0])
    return getattr(around, "__file__", None) is None


def stat_module_files(names: Iterable[str]) -> FileStamps:
    """By the names of modules, the files that they were read from, as they lie on the disk now."""
    found: FileStamps = {}
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        try:
            seen = os.stat(file) if file else None
        except OSError:  # it lies in an archive, or is gone
            seen = None
        found[name] = (seen.st_ino, seen.st_mtime_ns) if seen is not None else None
    return found


def can_fork(worker: WorkerRequest) -> bool:
    """Whether a fork of this process is what a fresh one would be: what it has read and imported is what that would."""
    names = {name for name in (*os.environ, *worker["environment"]) if name.startswith(STARTUP_VARIABLES)}
    names -= {"PYTHONPATH"}
    if any(os.environ.get(name) != worker["environment"].get(name) for name in names):
        return False
    ours, theirs = (
        resolve_python_path(os.environ, os.getcwd()),
        resolve_python_path(worker["environment"], worker["folder"]),
    )
    if not set(ours) <= set(theirs):
        return False
    added = [folder for folder in theirs if folder not in ours]
    importlib.invalidate_caches()  # here and in the fork: a folder that was not there for an earlier worker may be now
    return not any(
        _is_importable(name, added) for name in (*_list_imported_packages(), "sitecustomize", "usercustomize")
    )


def _is_importable(name: str, folders: list[str]) -> bool:
    spec = PathFinder.find_spec(name, folders) if folders else None
    return spec is not None and spec.loader is not None  # a folder of that name is none


def _list_imported_packages() -> set[str]:
    """What has been imported; shoal is, for a worker, not imported."""
    return {name.partition(".")[0] for name in sys.modules} - {"shoal", "__main__"}


def resolve_python_path(environment: Mapping[str, str], folder: str) -> list[str]:
    """The folders of PYTHONPATH, as `sys.path` has them of who starts in `folder`; an empty one is that."""
    value = environment.get("PYTHONPATH", "")
    entries = value.split(os.pathsep) if value else []
    return list(dict.fromkeys(os.path.normpath(os.path.join(folder, entry)) for entry in entries))


def become_worker(worker: WorkerRequest, imported: Iterable[str]) -> None:
    """Make this process the worker, which does not see yet what was imported for it, and run it."""
    script = worker["command"][0]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, worker["blocked_signals"])
    soft, hard = worker["open_files"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.setpriority(os.PRIO_PROCESS, 0, worker["niceness"])
    Path(OOM_SCORE).write_text(worker["oom_score"])
    os.setpgid(0, 0)  # the raylet ends the group of a worker that has ended
    ours, theirs = (
        resolve_python_path(os.environ, os.getcwd()),
        resolve_python_path(worker["environment"], worker["folder"]),
    )
    os.chdir(worker["folder"])
    sys.path[:] = [
        str(Path(script).parent),
        *theirs,
        *(p for p in sys.path if p not in ours),
    ]
    _replace_environment(worker["environment"])
    sys.argv[:] = worker["command"]
    tempfile.tempdir = None  # somebody has asked for it, and so fixed it
    for name in [name for name in sys.modules if name.partition(".")[0] == "shoal"]:
        del sys.modules[name]
    PreloadedModuleFinder(imported, INITIALIZERS)
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(module))


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Change what differs: to set all anew would move what the process's title is written over."""
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _initialize_torch(torch: Any) -> None:
    """What torch does as it is loaded: draw a seed, and read how many processors Ray says that the worker has."""
    torch.default_generator.seed()
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number.isdecimal():
        torch.set_num_threads(min(int(number), torch.get_num_threads()))  # never more than there are


def _initialize_multiprocessing(multiprocessing: Any) -> None:
    multiprocessing.current_process().authkey = os.urandom(32)


# What these do as they are loaded. Python's own generator of random numbers takes another seed by itself.
INITIALIZERS: dict[str, Callable[[Any], None]] = {
    "numpy": lambda numpy: numpy.random.seed(),
    "sympy": lambda sympy: sympy.core.random.rng.seed(),
    "multiprocessing": _initialize_multiprocessing,
    "torch": _initialize_torch,
}


if __name__ == "__main__":
    main()
