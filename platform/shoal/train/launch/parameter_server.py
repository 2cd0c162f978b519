"""Asynchronous training: servers and workers on one machine, and the controller in the process that starts them.

Owns the processes, the folder of their sockets and the controller. Called by `fit_locally`, and with Ray workers by
`flows.training`. The Trainer of worker 0, the chief, sends what it reports to this process, which writes the record.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import msgspec
import numpy as np
import torch
from torch.optim import Optimizer

from shoal.errors import RankLost, ShoalError, TrainError
from shoal.parallel import World
from shoal.random_state import seed_everything
from shoal.sync.parameter_server.clock import Clock
from shoal.sync.parameter_server.controller import Controller
from shoal.sync.parameter_server.local_steps import LocalStepsSync, make_outer_optimizer
from shoal.sync.parameter_server.rpc import CallId, Method, RpcClient, RpcService
from shoal.sync.parameter_server.server import ParameterServer
from shoal.sync.parameter_server.server_service import ServerService
from shoal.sync.parameter_server.worker import ParameterServerSync
from shoal.sync.synchronizer import Synchronizer
from shoal.train.loop.trainer import Trainer
from shoal.train.optim.optimizers import make_optimizer
from shoal.train.reporting.event_log import EventLog, NullLog
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import build_model, make_task

CALL_TIMEOUT_S = 120.0
POLL_S = 0.05
END_TIMEOUT_S = 10.0
MAX_DEATHS = 3  # of one place


@dataclass(frozen=True)
class Addresses:
    """The sockets of one run."""

    controller: str
    journal: str
    servers: list[str]

    @classmethod
    def within(cls, folder: str, num_servers: int) -> Addresses:
        names = ("controller", "journal", *(f"server-{index}" for index in range(num_servers)))
        controller, journal, *servers = [f"ipc://{folder}/{name}" for name in names]
        return cls(controller, journal, servers)


def _state_files(spec: TrainSpec, folder: Path) -> list[Path]:
    return [folder / f"server-{index}.safetensors" for index in range(spec.sync.servers)]


@dataclass
class _Inbox:
    """What the processes of a run have said."""

    error: str = ""
    outcome: dict[str, Any] | None = None


class ProcessHandle(Protocol):
    """A server's or a worker's process."""

    def poll(self) -> str | None:
        """None while it runs; "" once it has ended; else what it died of."""
        ...

    def end(self) -> None:
        """End it, if it runs. Idempotent."""
        ...


StartProcess = Callable[[str, Callable[..., None], tuple[Any, ...]], ProcessHandle]  # its name, function and arguments


class ForkedProcess:
    """A process on this machine, forked from a server that has loaded torch once for all."""

    def __init__(self, name: str, target: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo"])
        self._process = context.Process(target=target, args=arguments, name=name)
        self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> str | None:
        code = self._process.exitcode
        return None if code is None else f"status {code}" if code else ""

    def end(self) -> None:
        self._process.terminate()
        self._process.join(END_TIMEOUT_S)


class _ProcessGroup:
    """The processes of servers and workers."""

    def __init__(
        self, spec: TrainSpec, addresses: Addresses, run_id: str, folder: Path, journal: EventLog, start: StartProcess
    ) -> None:
        self._journal, self._start_process = journal, start
        self._controller = RpcClient(addresses.controller, CALL_TIMEOUT_S)
        self._targets: dict[str, tuple[Callable[..., None], tuple[Any, ...]]] = {}
        for index, file in enumerate(_state_files(spec, folder)):
            self._targets[f"server {index}"] = run_server, (spec, index, addresses, file)
        for index in range(spec.workers):
            self._targets[f"worker {index}"] = run_worker, (spec, index, addresses, run_id, folder)
        self._processes: dict[str, ProcessHandle] = {}
        self._num_deaths: Counter[str] = Counter()

    def start(self) -> None:
        for name, (target, arguments) in self._targets.items():
            self._processes[name] = self._start_process(name, target, arguments)

    def is_running(self) -> bool:
        """Whether any worker runs."""
        return any(process.poll() is None for name, process in self._processes.items() if name.startswith("worker"))

    def replace_dead(self) -> None:
        """Start another process for each that has died. Raises RankLost."""
        for name, process in list(self._processes.items()):
            cause = process.poll()
            if not cause:
                continue
            self._num_deaths[name] += 1
            kind, index = name.split()
            self._journal.record_event(f"{kind}_lost", index=int(index), cause=cause)
            if self._num_deaths[name] >= MAX_DEATHS:
                raise RankLost(f"{name} died {MAX_DEATHS} times: {cause}")
            if kind == "worker":
                self._controller.call("leave", int(index))
            self._processes[name] = self._start_process(name, *self._targets[name])

    def close(self) -> None:
        """End all processes."""
        for process in self._processes.values():
            process.end()
        self._controller.close()


def fit_replicas(
    spec: TrainSpec,
    run_id: str,
    folder: Path,
    journal: EventLog,
    should_stop: Callable[[], bool],
    start: StartProcess = ForkedProcess,
    tick: Callable[[], object] = lambda: None,
) -> TrainResult:
    """Train to the end; returns the chief's outcome.

    start: how a process begins
    tick:  called a few times a second; what it raises ends the run

    A worker or server that dies is replaced, while the others go on. Raises the error of a process that failed of
    itself, and RankLost when one has died MAX_DEATHS times.
    """
    with ExitStack() as closing:
        sockets = closing.enter_context(tempfile.TemporaryDirectory(prefix="shoal-sync-"))
        addresses = Addresses.within(sockets, spec.sync.servers)
        for file in _state_files(spec, folder):
            file.unlink(missing_ok=True)  # of an earlier attempt, which ended with a checkpoint
        clock = Clock(spec.workers, spec.sync.staleness, spec.sync.backups)
        controller = Controller(addresses.controller, addresses.servers, clock, CALL_TIMEOUT_S)
        closing.callback(controller.close)
        controller.start()
        inbox = _Inbox()
        log = _serve_journal(addresses.journal, journal, inbox, should_stop)
        closing.callback(log.close)
        group = _ProcessGroup(spec, addresses, run_id, folder, journal, start)
        closing.callback(group.close)
        group.start()
        while group.is_running():
            time.sleep(POLL_S)
            if inbox.error:
                raise TrainError(inbox.error)
            group.replace_dead()
            tick()
        counts = {str(staleness): count for staleness, count in sorted(controller.staleness.items())}
        lost = sum(controller.num_lost)
        journal.record_event("staleness", updates=clock.sequence, counts=counts, dropped=clock.num_dropped, lost=lost)
        assert inbox.outcome is not None
        return msgspec.convert(inbox.outcome, TrainResult, dec_hook=lambda kind, value: kind(value))


def _serve_journal(address: str, journal: EventLog, inbox: _Inbox, should_stop: Callable[[], bool]) -> RpcService:
    def log(caller: CallId, step: int, values: dict[str, float]) -> bool:
        journal.log(step, values)
        return should_stop()

    def record_event(caller: CallId, kind: str, details: dict[str, Any]) -> bool:
        journal.record_event(kind, **details)
        return should_stop()

    def log_histogram(caller: CallId, step: int, name: str, counts: list[float], edges: list[float]) -> bool:
        journal.log_histogram(step, name, np.array(counts), np.array(edges))
        return should_stop()

    def fail(caller: CallId, error: str) -> None:
        inbox.error = inbox.error or error

    def finish(caller: CallId, outcome: dict[str, Any]) -> None:
        inbox.outcome = outcome

    def poll(caller: CallId) -> bool:
        return should_stop()

    methods: dict[str, Method] = {"log": log, "record_event": record_event, "log_histogram": log_histogram}
    service = RpcService(address, {**methods, "fail": fail, "finish": finish, "poll": poll})
    service.start()
    return service


class _ForwardedLog:
    """The chief's event log: written by the process that started it."""

    def __init__(self, caller: RpcClient) -> None:
        self._caller = caller

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._caller.call("log", step, dict(values))

    def record_event(self, kind: str, /, **details: object) -> None:
        self._caller.call("record_event", kind, details)

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._caller.call("log_histogram", step, name, counts.tolist(), edges.tolist())

    def flush(self) -> None:
        """Each call waits for its answer."""


def run_server(spec: TrainSpec, index: int, addresses: Addresses, file: Path) -> None:
    """The process of server `index`: until it is ended."""
    _end_with_parent()
    torch.set_num_threads(1)
    task = make_task(spec.task, spec.args)
    seed_everything(spec.seed)
    model = build_model(task, spec.task)
    optimizer = make_optimizer(task, spec.optimizer, model.parameters(), model)
    if spec.sync.has_local_steps:
        optimizer = make_outer_optimizer(optimizer, spec.sync)
    server = ParameterServer(index, optimizer, spec.sync, spec.workers)
    ServerService(addresses.servers[index], index, server, addresses.controller, CALL_TIMEOUT_S, file).start()
    threading.Event().wait()


def _end_with_parent() -> None:
    """End this process when the one that started it is gone, however that ended. Ray does so for its own workers."""
    parent = multiprocessing.parent_process()
    if parent is not None:

        def watch() -> None:
            parent.join()
            os._exit(1)

        threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _make_synchronizer(spec: TrainSpec, optimizer: Optimizer, index: int, addresses: Addresses) -> Synchronizer:
    where = index, addresses.controller, addresses.servers, CALL_TIMEOUT_S
    if spec.sync.has_local_steps:
        return LocalStepsSync(optimizer, spec.sync, *where)
    return ParameterServerSync(optimizer, *where)


def run_worker(spec: TrainSpec, index: int, addresses: Addresses, run_id: str, folder: Path) -> None:
    """The process of worker `index`: a Trainer, to its end."""
    _end_with_parent()
    torch.set_num_threads(spec.threads or 1)
    calls = RpcClient(addresses.journal, CALL_TIMEOUT_S)
    try:
        trainer = Trainer(
            spec,
            make_task(spec.task, spec.args),
            World.single(spec.device),
            folder,
            run_id=run_id,
            journal=_ForwardedLog(calls) if index == 0 else NullLog(),
            should_stop=lambda: bool(calls.call("poll")),
            replica=(index, spec.workers),
            make_synchronizer=lambda parts: _make_synchronizer(spec, parts.optimizer, index, addresses),
        )
        outcome = trainer.run()
    except ShoalError as error:
        calls.call("fail", f"worker {index}: {error}")
        return
    if index == 0:
        calls.call("finish", msgspec.to_builtins(outcome, enc_hook=str))
