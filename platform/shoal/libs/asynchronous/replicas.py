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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import numpy as np
import torch

from shoal.atomic_file import make_folder
from shoal.errors import ConnectionLost, RankLost, ShoalError, TrainError, WorkerDeparted
from shoal.extend.parallel import World
from shoal.extend.sync import (
    CallId,
    Connection,
    CurveKeys,
    Request,
    RpcClient,
    RpcService,
    Traffic,
    answers,
    list_handlers,
)
from shoal.extend.train import (
    EventLog,
    LogMethod,
    NullLog,
    Trainer,
    TrainResult,
    TrainSpec,
    build_model,
    make_optimizer,
    make_task,
)
from shoal.libs.asynchronous.config import ServersConfig
from shoal.libs.asynchronous.controller import ControllerSetting, make_controller
from shoal.libs.asynchronous.parameter_server.server import ParameterServer
from shoal.libs.asynchronous.parameter_server.server_service import ServerService
from shoal.libs.asynchronous.process_group import ForkedProcess, ProcessGroup, StartProcess, Target, end_with_parent
from shoal.network_address import find_local_address
from shoal.random_state import seed_everything

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


class LogCall(Request[bool], frozen=True):
    """The chief's call of a method of its EventLog. Answers whether the run is to stop."""

    method: LogMethod
    arguments: list[Any]
    details: dict[str, Any]


class PollStop(Request[bool], frozen=True):
    """Asked by every worker, as it trains."""


class ReportFatalError(Request[None], frozen=True):
    """An error that would recur in a replacement ends the run, or its attempt if another may succeed."""

    error: str
    is_loss: bool


class ReportEnd(Request[None], frozen=True):
    """A worker has trained to the end of the run. outcome: the chief's"""

    traffic: Traffic | None
    outcome: dict[str, Any] | None


class ReportDeparture(Request[None], frozen=True):
    """The worker has left in order."""

    worker: int


class _Inbox:
    """What the processes of a run have reported. The chief's reports are passed on to `journal`.

    departed: workers that have left in order, and are not replaced yet
    """

    def __init__(self, journal: EventLog, should_stop: Callable[[], bool]) -> None:
        self._journal, self._should_stop = journal, should_stop
        self.error: TrainError | None = None
        self.outcome: dict[str, Any] | None = None
        self.departed: set[int] = set()
        self.traffic: list[Traffic] = []

    @answers(LogCall)
    def log(self, caller: CallId, request: LogCall) -> bool:
        arguments = [np.array(each) if isinstance(each, list) else each for each in request.arguments]
        getattr(self._journal, request.method)(*arguments, **request.details)
        return self._should_stop()

    @answers(PollStop)
    def poll_stop(self, caller: CallId, request: PollStop) -> bool:
        return self._should_stop()

    @answers(ReportFatalError)
    def fail(self, caller: CallId, request: ReportFatalError) -> None:
        self.error = self.error or (RankLost if request.is_loss else TrainError)(request.error)

    @answers(ReportEnd)
    def end(self, caller: CallId, request: ReportEnd) -> None:
        if request.traffic is not None:
            self.traffic.append(request.traffic)
        self.outcome = request.outcome or self.outcome

    @answers(ReportDeparture)
    def depart(self, caller: CallId, request: ReportDeparture) -> None:
        self.departed.add(request.worker)


class _ForwardedLog(EventLog):
    """The chief's event log: written by the process that started it, before a call returns."""

    def __init__(self, caller: RpcClient) -> None:
        self._caller = caller

    def send(self, method: LogMethod, /, *arguments: Any, **details: Any) -> None:
        plain = [each.tolist() if isinstance(each, np.ndarray) else each for each in arguments]
        self._caller.call(LogCall(method, plain, details))


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
        sync = spec.applied_sync
        addresses = Addresses.at(host, sync.num_servers) if host else Addresses.within(sockets, sync.num_servers)
        setting = ControllerSetting(
            addresses.controller, addresses.servers, spec.workers, spec.min_workers, CALL_TIMEOUT_S, addresses.keys
        )
        controller = make_controller(sync, setting)
        closing.callback(controller.close)
        controller.start()
        inbox = _Inbox(journal, should_stop)
        service = RpcService(addresses.journal, list_handlers(inbox), addresses.keys)
        service.start()
        closing.callback(service.close)
        addresses = replace(addresses, controller=controller.service.address, journal=service.address)
        calls = RpcClient(addresses.controller, CALL_TIMEOUT_S, keys=addresses.keys)
        targets = _list_targets(spec, addresses, run_id, folder)
        group = ProcessGroup(targets, spec.min_workers, calls, journal, start, inbox.departed)
        closing.callback(group.close)
        group.start()
        while group.is_running(has_outcome=inbox.outcome is not None):
            time.sleep(POLL_S)
            if inbox.error is not None:
                raise inbox.error
            group.maintain(time.monotonic())
            tick()
        assert inbox.outcome is not None
        outcome = msgspec.convert(inbox.outcome, TrainResult, dec_hook=lambda kind, value: kind(value))
        for kind, details in controller.describe().items():
            journal.record_event(kind, **details)
            if kind == "staleness":
                journal.log(outcome.steps, {"sync/bytes_pushed": float(details["bytes_pushed"])})
                counts = {int(staleness): count for staleness, count in details["counts"].items()}
                if counts:
                    highest = max(counts)
                    numbers = np.array([counts.get(staleness, 0) for staleness in range(highest + 1)])
                    journal.log_histogram(outcome.steps, "sync/staleness", numbers, np.arange(highest + 2) - 0.5)
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
    from shoal.libs.asynchronous.ray_processes import RayProcesses

    processes = RayProcesses(spec)
    return fit_replicas(spec, run_id, folder, log, should_stop, processes.start, tick, processes.find_address())


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


def _report_failure(name: str, addresses: Addresses, error: BaseException) -> None:
    """End the run with an error that would recur in a replacement: one of the Task's own comes with its traceback."""
    words = str(error)
    if not isinstance(error, ShoalError):
        words = "".join([f"{type(error).__name__}: {words}\n", *traceback.format_exception(error)])
    calls = RpcClient(addresses.journal, CALL_TIMEOUT_S, keys=addresses.keys)
    calls.call(ReportFatalError(f"{name}: {words}", isinstance(error, RankLost)))
    calls.close()


def run_server(spec: TrainSpec, index: int, addresses: Addresses, file: Path) -> None:
    """The process of server `index`: until it is ended."""
    end_with_parent()
    torch.set_num_threads(1)
    report = partial(_report_failure, f"server {index}", addresses)
    try:
        task = make_task(spec.task, spec.args)
        seed_everything(spec.seed)
        model = build_model(task, spec.task)
        optimizer = make_optimizer(task, spec.optimizer, model.parameters(), model)
        assert isinstance(spec.sync, ServersConfig)
        server = ParameterServer(index, spec.sync.make_server_optimizer(optimizer), spec.sync, spec.workers)
        make_folder(file.parent)  # absent on a host that shares no files with the driver's
        for earlier in file.parent.glob(f"server-{index}-*"):  # what other attempts of the run have left on this host
            if earlier.stem != file.stem:
                earlier.unlink(missing_ok=True)
        address = addresses.choose_server_address(index)
        service = ServerService(
            address, server, addresses.controller, CALL_TIMEOUT_S, file, keys=addresses.keys, report=report
        )
        service.start()
    except ConnectionLost:
        raise  # another may reach the controller
    except Exception as error:  # noqa: BLE001 - the run ends with it
        report(error)
        return
    threading.Event().wait()


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
    connection = Connection(
        index, spec.workers, addresses.controller, addresses.servers, timeout_s, addresses.keys, notice.is_set
    )
    try:
        trainer = Trainer(
            spec,
            make_task(spec.task, spec.args),
            World.single(spec.device),
            folder,
            run_id=run_id,
            journal=_ForwardedLog(calls) if index == 0 else NullLog(),
            should_stop=lambda: calls.call(PollStop()),
            connection=connection,
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
    reported = msgspec.to_builtins(outcome, enc_hook=str) if index == 0 else None
    calls.call(ReportEnd(trainer.sync.measure_traffic(), reported))
