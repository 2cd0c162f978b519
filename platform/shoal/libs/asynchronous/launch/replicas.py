"""Runs of replicas: their workers and servers, and the controller in the process that starts them.

Owns the folder of the processes' sockets, and the controller. `fit_locally` and `flows.training` find `launch_replicas`
by the spec of a run. The Trainer of worker 0, the chief, sends what it reports here: this process writes the record.
"""

from __future__ import annotations

import secrets
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch

from shoal.atomic_file import make_folder
from shoal.errors import ConnectionLost, RankLost, ShoalError, TrainError, WorkerDeparted
from shoal.libs.asynchronous.config import ServersConfig
from shoal.libs.asynchronous.controller import Controller, ControllerSetting, make_controller
from shoal.libs.asynchronous.launch.process_group import (
    ForkedProcess,
    ProcessGroup,
    StartProcess,
    Target,
    end_with_parent,
)
from shoal.libs.asynchronous.parameter_server.server import ParameterServer
from shoal.libs.asynchronous.parameter_server.server_service import ServerService
from shoal.libs.asynchronous.parameter_server.update_log import remove_earlier
from shoal.network_address import find_local_address
from shoal.parallel import World
from shoal.random_state import seed_everything
from shoal.sync.rpc import CallId, CurveKeys, Handlers, Request, RpcClient, RpcService
from shoal.sync.synchronizer import Connection, Traffic
from shoal.train.loop.trainer import Trainer
from shoal.train.optim.optimizers import make_optimizer
from shoal.train.reporting.event_log import EventLog, NullLog
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import build_model, make_task

CALL_TIMEOUT_S = 120.0
WAIT_TIMEOUT_S = 900.0  # the same for a worker that may have to wait for others to join, or for the loss of a host
POLL_S = 0.05


@dataclass(frozen=True)
class Addresses:
    """The sockets of one run.

    servers: "": a free port of its host, which the server announces to the controller
    keys:    None on one host
    """

    controller: str
    journal: str
    servers: list[str]
    keys: CurveKeys | None = None

    @classmethod
    def within(cls, folder: str, num_servers: int) -> Addresses:
        """Files of `folder`."""
        names = ("controller", "journal", *(f"server-{index}" for index in range(num_servers)))
        controller, journal, *servers = [f"ipc://{folder}/{name}" for name in names]
        return cls(controller, journal, servers)

    @classmethod
    def at(cls, host: str, num_servers: int) -> Addresses:
        """Free ports of `host` for the processes that start the others."""
        return cls(f"tcp://{host}:0", f"tcp://{host}:0", num_servers * [""], CurveKeys.make())

    def choose_server_address(self, index: int) -> str:
        """Where server `index` binds, on the host on which this is called."""
        if self.keys is None:
            return self.servers[index]
        controller = urlsplit(self.controller).hostname
        assert controller is not None
        host = find_local_address(controller)
        if host is None:
            raise TrainError(f"server {index}: this host has no route to {controller}, where the run was started")
        return f"tcp://{host}:0"


class LogValues(Request[bool], frozen=True):
    """As in EventLog, of the chief; all of these answer whether the run is to stop."""

    step: int
    values: dict[str, float]


class LogEvent(Request[bool], frozen=True):
    kind: str
    details: dict[str, Any]


class LogHistogram(Request[bool], frozen=True):
    step: int
    name: str
    counts: list[float]
    edges: list[float]


class PollStop(Request[bool], frozen=True):
    pass


class ReportFailure(Request[None], frozen=True):
    """An error that would recur in a replacement ends the run, or its attempt if another may succeed."""

    error: str
    is_loss: bool


class ReportOutcome(Request[None], frozen=True):
    outcome: dict[str, Any]


class ReportTraffic(Request[None], frozen=True):
    traffic: Traffic


class ReportDeparture(Request[None], frozen=True):
    """The worker has left in order."""

    worker: int


@dataclass
class _Inbox:
    """What the processes of a run have reported."""

    error: type[TrainError] = TrainError
    problem: str = ""
    outcome: dict[str, Any] | None = None
    departed: set[int] = field(default_factory=set)  # workers that have left in order, and are not replaced yet
    traffic: list[Traffic] = field(default_factory=list)


def _list_targets(spec: TrainSpec, addresses: Addresses, run_id: str, folder: Path) -> dict[str, Target]:
    """What each process of a run does. Files of servers have the attempt in their names: those of an earlier one may be
    on any host, and it has ended with a checkpoint."""
    targets: dict[str, Target] = {}
    attempt = secrets.token_hex(4)
    for index in range(spec.applied_sync.num_servers):
        file = folder / f"server-{index}-{attempt}.safetensors"
        targets[f"server {index}"] = run_server, (spec, index, addresses, file)
    for index in range(spec.workers):
        targets[f"worker {index}"] = run_worker, (spec, index, addresses, run_id, folder)
    return targets


def fit_replicas(
    spec: TrainSpec,
    run_id: str,
    folder: Path,
    journal: EventLog,
    should_stop: Callable[[], bool],
    start: StartProcess = ForkedProcess,
    tick: Callable[[], object] = lambda: None,
    host: str = "",
) -> TrainResult:
    """Train to the end; returns the chief's outcome.

    start: how a process begins
    tick:  called a few times a second; what it raises ends the run
    host:  the address of this host for the others on which processes may begin; "": all are on this one

    A worker or server that dies is replaced, while the others go on. Raises the error of a process that failed of
    itself, and RankLost when one has died MAX_DEATHS times that the run cannot do without, or with its state.
    """
    with ExitStack() as closing:
        sockets = closing.enter_context(tempfile.TemporaryDirectory(prefix="shoal-sync-"))
        sync, num_servers = spec.applied_sync, spec.applied_sync.num_servers
        addresses = Addresses.at(host, num_servers) if host else Addresses.within(sockets, num_servers)
        places = addresses.servers, spec.workers, spec.min_workers
        controller = make_controller(
            sync, ControllerSetting(addresses.controller, *places, CALL_TIMEOUT_S, addresses.keys)
        )
        closing.callback(controller.close)
        controller.start()
        inbox = _Inbox()
        log = _serve_journal(addresses, journal, inbox, should_stop)
        closing.callback(log.close)
        addresses = replace(addresses, controller=controller.service.address, journal=log.address)
        calls = RpcClient(addresses.controller, CALL_TIMEOUT_S, keys=addresses.keys)
        targets = _list_targets(spec, addresses, run_id, folder)
        group = ProcessGroup(targets, spec.min_workers, calls, journal, start, inbox.departed)
        closing.callback(group.close)
        group.start()
        while group.is_running(has_outcome=inbox.outcome is not None):
            time.sleep(POLL_S)
            if inbox.problem:
                raise inbox.error(inbox.problem)
            group.maintain(time.monotonic())
            tick()
        assert inbox.outcome is not None
        outcome = msgspec.convert(inbox.outcome, TrainResult, dec_hook=lambda kind, value: kind(value))
        events = controller.describe()
        for kind, details in events.items():
            journal.record_event(kind, **details)
        if "staleness" in events:
            _log_updates(controller, journal, outcome.steps)
        _record_traffic(inbox.traffic, journal)
        return outcome


def launch_replicas(
    spec: TrainSpec,
    run_id: str,
    folder: Path,
    log: EventLog,
    should_stop: Callable[[], bool],
    tick: Callable[[], object] = lambda: None,
    *,
    on_cluster: bool = False,
) -> TrainResult:
    """Train in processes of this host, or as workers of the connected cluster (see `LaunchReplicas`)."""
    if not on_cluster:
        return fit_replicas(spec, run_id, folder, log, should_stop)
    from shoal.libs.asynchronous.launch.ray_processes import RayProcesses

    processes = RayProcesses(spec)
    return fit_replicas(spec, run_id, folder, log, should_stop, processes.start, tick, processes.find_address())


def _log_updates(controller: Controller, journal: EventLog, step: int) -> None:
    journal.log(step, {"sync/bytes_pushed": float(controller.num_bytes)})
    if controller.staleness:
        highest = max(controller.staleness)
        number = np.array([controller.staleness[staleness] for staleness in range(highest + 1)])
        journal.log_histogram(step, "sync/staleness", number, np.arange(highest + 2) - 0.5)


def _record_traffic(traffic: list[Traffic], journal: EventLog) -> None:
    """The bytes that a worker exchanged in a step, on the average of those that have ended, beside the predicted."""
    num_steps = sum(each.num_steps for each in traffic)
    if num_steps:
        pushed, pulled = traffic[0].predicted
        journal.record_event(
            "communication",
            pushed_bytes_per_step=sum(each.pushed_bytes for each in traffic) / num_steps,
            pulled_bytes_per_step=sum(each.pulled_bytes for each in traffic) / num_steps,
            predicted_pushed_bytes_per_step=pushed,
            predicted_pulled_bytes_per_step=pulled,
        )


def _serve_journal(
    addresses: Addresses, journal: EventLog, inbox: _Inbox, should_stop: Callable[[], bool]
) -> RpcService:
    def log(caller: CallId, request: LogValues) -> bool:
        journal.log(request.step, request.values)
        return should_stop()

    def log_event(caller: CallId, request: LogEvent) -> bool:
        journal.record_event(request.kind, **request.details)
        return should_stop()

    def log_histogram(caller: CallId, request: LogHistogram) -> bool:
        journal.log_histogram(request.step, request.name, np.array(request.counts), np.array(request.edges))
        return should_stop()

    def fail(caller: CallId, request: ReportFailure) -> None:
        if not inbox.problem:
            inbox.error, inbox.problem = RankLost if request.is_loss else TrainError, request.error

    def finish(caller: CallId, request: ReportOutcome) -> None:
        inbox.outcome = request.outcome

    handlers: Handlers = {
        LogValues: log,
        LogEvent: log_event,
        LogHistogram: log_histogram,
        PollStop: lambda caller, request: should_stop(),
        ReportFailure: fail,
        ReportOutcome: finish,
        ReportTraffic: lambda caller, request: inbox.traffic.append(request.traffic),
        ReportDeparture: lambda caller, request: inbox.departed.add(request.worker),
    }
    service = RpcService(addresses.journal, handlers, addresses.keys)
    service.start()
    return service


class _ForwardedLog:
    """The chief's event log: written by the process that started it."""

    def __init__(self, caller: RpcClient) -> None:
        self._caller = caller

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._caller.call(LogValues(step, dict(values)))

    def record_event(self, kind: str, /, **details: object) -> None:
        self._caller.call(LogEvent(kind, details))

    def log_histogram(self, step: int, name: str, counts: np.ndarray, edges: np.ndarray) -> None:
        self._caller.call(LogHistogram(step, name, counts.tolist(), edges.tolist()))

    def flush(self) -> None:
        """Each call waits for its answer."""


def _report_failure(name: str, addresses: Addresses, error: BaseException) -> None:
    """End the run with an error that would recur in a replacement: one of the Task's own comes with its traceback."""
    words = str(error)
    if not isinstance(error, ShoalError):
        words = "".join([f"{type(error).__name__}: {words}\n", *traceback.format_exception(error)])
    calls = RpcClient(addresses.journal, CALL_TIMEOUT_S, keys=addresses.keys)
    calls.call(ReportFailure(f"{name}: {words}", isinstance(error, RankLost)))
    calls.close()


def run_server(spec: TrainSpec, index: int, addresses: Addresses, file: Path) -> None:
    """The process of server `index`: until it is ended."""
    end_with_parent()
    torch.set_num_threads(1)
    report = partial(_report_failure, f"server {index}", addresses)
    try:
        _start_server(spec, index, addresses, file, report)
    except ConnectionLost:
        raise  # another may reach the controller
    except Exception as error:  # noqa: BLE001 - the run ends with it
        report(error)
        return
    threading.Event().wait()


def _start_server(
    spec: TrainSpec, index: int, addresses: Addresses, file: Path, report: Callable[[BaseException], None]
) -> None:
    task = make_task(spec.task, spec.args)
    seed_everything(spec.seed)
    model = build_model(task, spec.task)
    optimizer = make_optimizer(task, spec.optimizer, model.parameters(), model)
    assert isinstance(spec.sync, ServersConfig)
    server = ParameterServer(index, spec.sync.make_server_optimizer(optimizer), spec.sync, spec.workers)
    make_folder(file.parent)  # absent on a host that shares no files with the driver's
    remove_earlier(file)
    where = addresses.choose_server_address(index), index, server, addresses.controller, CALL_TIMEOUT_S, file
    ServerService(*where, keys=addresses.keys, report=report).start()


def run_worker(spec: TrainSpec, index: int, addresses: Addresses, run_id: str, folder: Path) -> None:
    """The process of worker `index`: a Trainer, to its end."""
    end_with_parent()
    torch.set_num_threads(spec.threads or 1)
    calls = RpcClient(addresses.journal, CALL_TIMEOUT_S, keys=addresses.keys)
    notice = threading.Event()
    if threading.current_thread() is threading.main_thread():
        # With servers, the chief stays until it is killed: it has the run to save when all processes are told to end.
        is_leaving = spec.applied_sync.chief_may_leave or index != 0
        signal.signal(signal.SIGTERM, (lambda number, frame: notice.set()) if is_leaving else signal.SIG_IGN)
    timeout_s = CALL_TIMEOUT_S if spec.min_workers is None and addresses.keys is None else WAIT_TIMEOUT_S
    place = index, spec.workers, addresses.controller, addresses.servers
    try:
        trainer = Trainer(
            spec,
            make_task(spec.task, spec.args),
            World.single(spec.device),
            folder,
            run_id=run_id,
            journal=_ForwardedLog(calls) if index == 0 else NullLog(),
            should_stop=lambda: calls.call(PollStop()),
            connection=Connection(*place, timeout_s, addresses.keys, notice.is_set),
        )
        outcome = trainer.run()
    except WorkerDeparted as departure:
        if not departure.is_over:
            calls.call(ReportDeparture(index))
        return
    except ConnectionLost:
        raise  # another may reach the others
    except Exception as error:  # noqa: BLE001 - the run ends with it
        _report_failure(f"worker {index}", addresses, error)
        return
    if (traffic := trainer.sync.measure_traffic()) is not None:
        calls.call(ReportTraffic(traffic))
    if index == 0:
        calls.call(ReportOutcome(msgspec.to_builtins(outcome, enc_hook=str)))
