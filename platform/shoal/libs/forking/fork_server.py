"""The process that Ray workers are forked from, torch imported: `python -m shoal.libs.forking.fork_server SOCKET`.

A fresh worker spends seconds of CPU time on imports, mainly torch's, and Ray starts Python twice for it. This process,
a child of the embedded cluster's head, imports the workers' modules once and forks itself for each worker.
`fork_client` requests the forks for the raylet. It never imports Ray, whose C++ part does not survive a fork, nor
shoal, since a job may bring its own.

A forked worker behaves like a fresh one: its own environment, folder, streams, `sys.path`, `__main__` and random
seeds. Its imports follow its own `sys.path` (see `PreloadedModuleFinder`).
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
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from shoal.libs.forking.fork_client import OOM_SCORE, STARTUP_VARIABLES, WorkerRequest

# Modules that workers import sooner or later and that survive a fork: no threads except numpy's, whose library handles
# forks, and no connections. So neither pyarrow, which has a thread, nor pandas, which imports it. An optimiser's first
# step imports torch's compiler.
LIBRARIES = (
    *("numpy", "requests", "jsonschema", "google.protobuf", "yaml", "msgpack", "click"),  # Ray's
    *("aiohttp", "fastapi", "uvicorn", "pydantic", "httpx2", "msgspec", "rich.console"),  # an endpoint's
    *("torch", "torch._dynamo", "torch.distributed", "torch.nn.parallel", "safetensors.torch"),
)
REQUEST_TIMEOUT_S = 10.0
BACKLOG = 128
CHUNK_BYTES = 64 * 1024
FileStamps = dict[str, tuple[int, int] | None]  # inode and modification time


def main() -> None:
    """Import, then serve fork requests at the socket of argument 1 until ended. Returns in no process."""
    before, environment = set(sys.modules), dict(os.environ)
    for name in LIBRARIES:
        importlib.import_module(name)
    imported = sys.modules.keys() - before
    _replace_environment(environment)  # torch's compiler has written to it, and will again in the workers that use it
    gc.collect()
    gc.freeze()  # otherwise a worker's first collection would copy all shared pages
    # A package's file stands for all of it: an upgrade replaces every file of a package.
    outer = {name: sys.modules.get(name.rpartition(".")[0]) for name in imported}
    packages = [name for name, package in outer.items() if getattr(package, "__file__", None) is None]
    become_worker(_serve_forks(sys.argv[1], stat_module_files(packages)), imported)


def _serve_forks(address: str, read: FileStamps) -> WorkerRequest:
    """Returns in each forked process, with the worker that it must become.

    read: the files of the imported modules; once one of them changes, as after an upgrade, nothing is forked any more
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps ended workers
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(BACKLOG)
        while True:
            # Standard input is never written to: it closes when the head ends.
            if sys.stdin in select.select([listener, sys.stdin], [], [])[0]:
                sys.exit()
            connection, _ = listener.accept()
            with connection:
                worker = _handle_request(connection, read)
                if worker is not None:
                    return worker


def _handle_request(connection: socket.socket, read: FileStamps) -> WorkerRequest | None:
    """Fork if a fork can become the requested worker: returns the worker in the new process, and None in this one.

    Raises OSError in the new process when the client has given up waiting.
    """
    connection.settimeout(REQUEST_TIMEOUT_S)
    streams: list[int] = []
    try:
        head, streams, _, _ = socket.recv_fds(connection, 8, 3)
        size_bytes = int.from_bytes(head, "big")
        text = bytearray()
        while len(text) < max(1, size_bytes):
            part = connection.recv(CHUNK_BYTES)
            if not part:
                raise EOFError
            text += part
        worker: WorkerRequest = json.loads(bytes(text))
        is_worker = can_fork(worker) and stat_module_files(read) == read and os.fork() == 0
    except (OSError, EOFError):  # the client has ended, or no more processes are allowed
        is_worker = False
    for number, stream in enumerate(streams):
        if is_worker:
            os.dup2(stream, number)
        os.close(stream)
    if not is_worker:
        return None
    connection.sendall(b"+")  # from here on the worker exists
    return worker


def stat_module_files(names: Iterable[str]) -> FileStamps:
    """The present state of the files from which these modules were read, by module name."""
    result: FileStamps = {}
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        try:
            seen = os.stat(file) if file else None
        except OSError:  # inside an archive, or deleted
            seen = None
        result[name] = (seen.st_ino, seen.st_mtime_ns) if seen is not None else None
    return result


def can_fork(worker: WorkerRequest) -> bool:
    """Whether a fork of this process equals a fresh worker: it has read and imported the same files and settings."""
    names = {name for name in (*os.environ, *worker["environment"]) if name.startswith(STARTUP_VARIABLES)}
    names -= {"PYTHONPATH"}
    if any(os.environ.get(name) != worker["environment"].get(name) for name in names):
        return False
    ours = resolve_python_path(os.environ, os.getcwd())
    theirs = resolve_python_path(worker["environment"], worker["folder"])
    if not set(ours) <= set(theirs):
        return False
    added = [folder for folder in theirs if folder not in ours]
    importlib.invalidate_caches()  # here and in the fork: a folder that was missing for an earlier worker may exist now
    imported = {name.partition(".")[0] for name in sys.modules} - {"shoal", "__main__"}
    specs = (PathFinder.find_spec(name, added) for name in (*imported, "sitecustomize", "usercustomize"))
    return not added or all(spec is None or spec.loader is None for spec in specs)  # without a loader it is a folder


def resolve_python_path(environment: Mapping[str, str], folder: str) -> list[str]:
    """The folders of PYTHONPATH as in `sys.path` of a process started in `folder`; an empty entry means `folder`."""
    value = environment.get("PYTHONPATH", "")
    entries = value.split(os.pathsep) if value else []
    return list(dict.fromkeys(os.path.normpath(os.path.join(folder, entry)) for entry in entries))


def become_worker(worker: WorkerRequest, imported: Iterable[str]) -> None:
    """Become the worker and run it. Preloaded modules stay hidden until it imports them."""
    script = worker["command"][0]
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, worker["blocked_signals"])
    soft, hard = worker["open_files"]
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    os.setpriority(os.PRIO_PROCESS, 0, worker["niceness"])
    Path(OOM_SCORE).write_text(worker["oom_score"])
    os.setpgid(0, 0)  # the raylet kills the process group of an ended worker
    ours = resolve_python_path(os.environ, os.getcwd())
    theirs = resolve_python_path(worker["environment"], worker["folder"])
    os.chdir(worker["folder"])
    sys.path[:] = [str(Path(script).parent), *theirs, *(each for each in sys.path if each not in ours)]
    _replace_environment(worker["environment"])
    sys.argv[:] = worker["command"]
    tempfile.tempdir = None  # an earlier call may have fixed it
    for name in [name for name in sys.modules if name.partition(".")[0] == "shoal"]:
        del sys.modules[name]
    # What imports such a module (asyncio: `_asyncio`) is not executed again, and pickle looks for its classes there.
    compiled = {name for name in sys.stdlib_module_names if name.startswith("_")}
    PreloadedModuleFinder([name for name in imported if name not in compiled], INITIALIZERS)
    module = ModuleType("__main__")
    module.__file__ = script
    sys.modules["__main__"] = module
    exec(compile(Path(script).read_bytes(), script, "exec"), vars(module))


def _replace_environment(environment: Mapping[str, str]) -> None:
    """Change only the differences: setting everything again would move the memory that the process title overwrites."""
    for name in [name for name in os.environ if name not in environment]:
        del os.environ[name]
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _initialize_torch(torch: Any) -> None:
    """Repeat torch's work at import: draw a seed, and read the worker's number of processors from Ray's variable."""
    torch.default_generator.seed()
    number = os.environ.get("OMP_NUM_THREADS", "")
    if number.isdecimal():
        torch.set_num_threads(min(int(number), torch.get_num_threads()))  # never more than the machine has


# The work of these modules at import. Python's own random generator reseeds itself.
INITIALIZERS: dict[str, Callable[[Any], None]] = {
    "numpy": lambda numpy: numpy.random.seed(),
    "sympy": lambda sympy: sympy.core.random.rng.seed(),
    "multiprocessing": lambda processes: setattr(processes.current_process(), "authkey", os.urandom(32)),
    "torch": _initialize_torch,
}


class PreloadedModuleFinder(MetaPathFinder, Loader):
    """Modules in memory, hidden until they are imported.

    A package's modules reappear at its first import if the import would find the same files now; otherwise the
    package is imported again. `begin` repeats a package's work at import (read its environment, draw a seed).
    """

    def __init__(self, names: Iterable[str], begin: Mapping[str, Callable[[ModuleType], None]]) -> None:
        """Hide these modules. `begin` maps a package's name to a function of its module."""
        self._packages: dict[str, dict[str, ModuleType]] = defaultdict(dict)
        self._found: dict[str, dict[str, ModuleType]] = {}
        self._initializers = begin
        for name in names:
            self._packages[name.partition(".")[0]][name] = sys.modules.pop(name)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        modules = self._packages.pop(name, None)  # a package is imported before its submodules
        if modules is None or not _is_same_module(modules[name].__spec__, find_spec(name)):
            return None
        self._found[name] = modules
        return ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = self._found[spec.name][spec.name]
        spec.loader_state = module.__spec__  # importlib replaces it by `spec`
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        name, module.__spec__ = module.__name__, module.__spec__.loader_state
        sys.modules.update(self._found.pop(name))
        if name in self._initializers:
            self._initializers[name](module)


def _is_same_module(ours: ModuleSpec | None, found: ModuleSpec | None) -> bool:
    """Whether both mean the same files. A namespace package may have gained folders."""
    if ours is None or found is None or ours.origin != found.origin:
        return False
    return set(ours.submodule_search_locations or ()) <= set(found.submodule_search_locations or ())


if __name__ == "__main__":
    main()
