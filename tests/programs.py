"""Programs of several ranks: one function, run by N local processes that form a gloo group on loopback.

The processes are forked from a server that has imported torch once, so that a group starts in a fraction of a second.
"""

import gc
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from session_end import at_session_end

# What the server imports, once; none of these starts a thread or opens a socket.
PRELOADED = [
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint",
    "torch.distributed.tensor.parallel",
    "torch._dynamo.convert_frame",  # optimisers import it at their first step
    "torch.onnx.ops",
    "shoal.parallel.comm.world",
    "programs",
]
# Of the Hub: a file of tests adds them to what the server imports, since each rank would take seconds for it.
TRANSFORMERS = ["transformers.modeling_utils", "transformers.models.auto.modeling_auto"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
GRACE_S = 3.0  # after the first rank has failed, for the others to say what became of them


class RanksFailed(AssertionError):
    """Ranks raised, died or did not end in time. `causes` has a traceback, or what else happened, by rank."""

    def __init__(self, causes: dict[int, str]) -> None:
        self.causes = causes
        super().__init__("\n".join(f"rank {rank}: {cause}" for rank, cause in sorted(causes.items())))


def run_ranks(program: Callable[..., Any], size: int, *args: Any, timeout_s: float = 600.0) -> list[Any]:
    """What `program(world, *args)` returns on each of `size` ranks, in order.

    program: a function of a module's top level; `args` and what it returns are pickled

    Raises RanksFailed, with every rank's traceback.
    """
    context = multiprocessing.get_context("forkserver")
    start_server()
    with tempfile.TemporaryDirectory() as folder:
        processes, pipes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, rank, size, os.path.join(folder, "store"), dict(os.environ), program, args)
            process = context.Process(target=_rank, args=arguments, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        try:
            return _collect(processes, pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


@cache
def start_server() -> None:
    """The server's environment is that of its start: threads are counted when torch is imported.

    Its folder is ours to remove: multiprocessing would leave it to `atexit`.
    """
    folder = at_session_end.enter_context(tempfile.TemporaryDirectory(prefix="pymp-"))
    multiprocessing.process.current_process()._config["tempdir"] = folder  # type: ignore[attr-defined]
    at_session_end.callback(_end_server)
    multiprocessing.forkserver.set_forkserver_preload(PRELOADED)
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ.update(ENVIRONMENT)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _end_server() -> None:
    """At once: it may be importing still, and who waited for that might be killed, and leave the folder behind."""
    server = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)
    server._stop()


def _collect(processes: list[BaseProcess], pipes: list[Connection], timeout_s: float) -> list[Any]:
    deadline_s = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    causes: dict[int, str] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline_s - time.monotonic()))
        if not ready:
            late = f"did not end within {timeout_s:g} s, or after another rank had failed"
            raise RanksFailed({**causes, **dict.fromkeys(waiting.values(), late)})
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                done, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                done, value = False, f"died with exit code {processes[rank].exitcode}"
            (results if done else causes)[rank] = value
        if causes:
            deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
    if causes:
        raise RanksFailed(causes)
    return [results[rank] for rank in range(len(pipes))]


def _rank(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    environment: dict[str, str],
    program: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """One rank's life: join the group, run the program, say how it ended."""
    gc.freeze()  # what the server has loaded: each collection would look through it, and so copy it
    import torch
    import torch.distributed as dist

    from shoal.parallel.comm.world import World

    os.environ.update(environment | ENVIRONMENT)
    torch.set_num_threads(1)
    try:
        world: World = World.single("cpu")
        if size > 1:
            dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=300), size, rank)
            world = World.from_process_group("cpu", rank)
            world.barrier()  # nobody leaves before all are connected
        answer = pickle.dumps((True, program(world, *args)))
    except Exception:  # noqa: BLE001 - the top of a process, which passes it on
        answer = pickle.dumps((False, traceback.format_exc()))
    with suppress(BrokenPipeError):
        pipe.send_bytes(answer)
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
