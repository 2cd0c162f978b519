"""Asynchronous training on one machine without Ray: servers and workers are processes of this one.

Owns the processes, their sockets' folder and the controller, which runs here. Called by `fit_locally`. The Trainer of
worker 0, the chief, sends what it reports to this process, which writes the record.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from shoal.errors import RankLost, ShoalError, TrainError
from shoal.parallel import World
from shoal.random_state import seed_everything
from shoal.sync.parameter_server.clock import Clock
from shoal.sync.parameter_server.controller import Controller
from shoal.sync.parameter_server.rpc import Caller, Service
from shoal.sync.parameter_server.server import ParameterServer
from shoal.sync.parameter_server.server_service import ServerService
from shoal.sync.parameter_server.worker import ParameterServerSync
from shoal.train.loop.trainer import Trainer
from shoal.train.optim.optimizers import make_optimizer
from shoal.train.reporting.event_log import EventLog, NullLog
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import build_model, make_task

CALL_TIMEOUT_S = 120.0
POLL_S = 0.05
END_TIMEOUT_S = 10.0


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


def fit_replicas(
    spec: TrainSpec, run_id: str, folder: Path, journal: EventLog, should_stop: Callable[[], bool]
) -> TrainResult:
    """Train to the end; returns the chief's outcome. Raises the first error of a process, RankLost if one died."""
    with ExitStack() as closing:
        sockets = closing.enter_context(tempfile.TemporaryDirectory(prefix="shoal-sync-"))
        addresses = Addresses.within(sockets, spec.sync.servers)
        found: dict[str, Any] = {}
        log = _serve_journal(addresses.journal, journal, found, should_stop)
        closing.callback(log.close)
        context = multiprocessing.get_context("spawn")
        processes: dict[str, BaseProcess] = {}
        closing.callback(_end, processes)
        for index in range(spec.sync.servers):
            processes[f"server {index}"] = context.Process(target=_run_server, args=(spec, index, addresses, folder))
        for index in range(spec.workers):
            arguments = (spec, index, addresses, run_id, folder)
            processes[f"worker {index}"] = context.Process(target=_run_worker, args=arguments)
        for process in processes.values():
            process.start()
        clock = Clock(spec.workers, spec.sync.staleness, spec.sync.backups)
        controller = Controller(addresses.controller, addresses.servers, clock, CALL_TIMEOUT_S)
        closing.callback(controller.close)
        controller.start()
        _wait(processes, found)
        counts = {str(staleness): count for staleness, count in sorted(controller.staleness.items())}
        journal.record_event("staleness", updates=clock.sequence, counts=counts, dropped=clock.num_dropped)
        return msgspec.convert(found["outcome"], TrainResult, dec_hook=lambda kind, value: kind(value))


def _wait(processes: Mapping[str, BaseProcess], found: Mapping[str, Any]) -> None:
    """Until every worker has ended. Raises the error of the first that failed."""
    workers = {name: process for name, process in processes.items() if name.startswith("worker")}
    while any(process.is_alive() for process in workers.values()):
        time.sleep(POLL_S)
        if "error" in found:
            raise TrainError(found["error"])
        for name, process in processes.items():
            if process.exitcode:
                raise RankLost(f"{name} ended with status {process.exitcode}")
    if "error" in found:
        raise TrainError(found["error"])


def _end(processes: Mapping[str, BaseProcess]) -> None:
    for process in processes.values():
        if process.ident is not None:
            process.terminate()
            process.join(END_TIMEOUT_S)


def _serve_journal(address: str, journal: EventLog, found: dict[str, Any], should_stop: Callable[[], bool]) -> Service:
    def log(caller: bytes, step: int, values: dict[str, float]) -> bool:
        journal.log(step, values)
        return should_stop()

    def record_event(caller: bytes, kind: str, details: dict[str, Any]) -> bool:
        journal.record_event(kind, **details)
        return should_stop()

    def log_histogram(caller: bytes, step: int, name: str, counts: list[float], edges: list[float]) -> bool:
        journal.log_histogram(step, name, np.array(counts), np.array(edges))
        return should_stop()

    def finish(caller: bytes, name: str, value: Any) -> None:
        found.setdefault(name, value)

    methods = {"log": log, "record_event": record_event, "log_histogram": log_histogram, "finish": finish}
    service = Service(address, {**methods, "poll": lambda caller: should_stop()})
    service.start()
    return service


class _ForwardedLog:
    """The chief's event log: written by the process that started it."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._caller.call("log", step, dict(values))

    def record_event(self, kind: str, /, **details: object) -> None:
        self._caller.call("record_event", kind, details)

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._caller.call("log_histogram", step, name, counts.tolist(), edges.tolist())

    def flush(self) -> None:
        """Each call waits for its answer."""


def _run_server(spec: TrainSpec, index: int, addresses: Addresses, folder: Path) -> None:
    torch.set_num_threads(1)
    task = make_task(spec.task, spec.args)
    seed_everything(spec.seed)
    optimizer = make_optimizer(task, spec.optimizer, build_model(task, spec.task).parameters())
    server = ParameterServer(index, optimizer, spec.sync, spec.workers)
    file = folder / f"server-{index}.pt"
    ServerService(addresses.servers[index], index, server, addresses.controller, CALL_TIMEOUT_S, file).start()
    while True:  # until the parent ends it
        time.sleep(3600.0)


def _run_worker(spec: TrainSpec, index: int, addresses: Addresses, run_id: str, folder: Path) -> None:
    torch.set_num_threads(spec.threads or 1)
    calls = Caller(addresses.journal, CALL_TIMEOUT_S)
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
            make_synchronizer=lambda parts: ParameterServerSync(
                parts.optimizer, index, addresses.controller, addresses.servers, CALL_TIMEOUT_S
            ),
        )
        outcome = trainer.run()
    except ShoalError as error:
        calls.call("finish", "error", f"worker {index}: {error}")
        raise SystemExit(1) from error
    if index == 0:
        calls.call("finish", "outcome", msgspec.to_builtins(outcome, enc_hook=str))
