"""One trial of a sweep: a run in a thread of this process, whose evaluations come one by one.

Called by the worker of a trial (`ray_trial`). The trial has a run record of its own, by whose id it is found again: a
trial that was interrupted goes on from its checkpoint, and one that has finished does not run again. `TrialRun` is a
training run, `loop_trial` has those of the loop. Imports no Ray.
"""

from __future__ import annotations

import math
import shutil
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import shoal.runs
from shoal.checkpoint.directory import checkpoint_path, list_newest_first
from shoal.checkpoint.stored import StoredCheckpoints, open_run_store
from shoal.errors import CheckpointError, ConfigError, RunError, ShoalError
from shoal.extend.parallel import World
from shoal.extend.runs import RunKind, RunRecorder, Status
from shoal.extend.train import (
    Backend,
    EventLog,
    ForwardingLog,
    LocalBackend,
    RecordLog,
    TrainingRun,
    TrainResult,
    TrainSpec,
    ValidatedRun,
    set_threads,
)
from shoal.home import home
from shoal.libs.sweep.spec import CheckedSweep, SweepSpec
from shoal.weights.tensor_files import list_with_index

JOB = "sweep"
CHECKPOINT_TIMEOUT_S = 120.0
STOP_POLL_S = 0.5
LOST_TIMEOUT_S = 120.0  # more than a run takes to be lost by the store's clock
_POLL_S = 0.02
_VALIDATION = "validation/"
_ORIGIN = "origin"  # the file that names the run of a copied checkpoint

MakeBackend = Callable[[TrainSpec, RunRecorder, EventLog, Callable[[], bool]], Backend]


@dataclass(frozen=True)
class TrialSetting:
    """What all trials of a sweep have in common."""

    sweep_id: str
    spec: SweepSpec
    checked: CheckedSweep
    home: Path
    working_folder: Path

    @property
    def stop_file(self) -> Path:
        """Exists while the trials are to save and end, where hosts share the folder of runs."""
        return self.home / "runs" / self.sweep_id / "stop"


@dataclass(frozen=True)
class PlannedTrial:
    """A trial to run: new, or one that goes on. parameters: {} if the search is to choose them."""

    number: int
    parameters: dict[str, Any]

    def to_config(self) -> dict[str, Any]:
        return {"number": self.number, "parameters": self.parameters}


def is_remote(setting: TrialSetting) -> bool:
    """Whether this host does not see the sweep's files, so that the trial's record and network pass through the store.

    Raises ConfigError where they cannot: without a store, and for trials of the loop or those that are copied.
    """
    folder = setting.stop_file.parent
    if folder.is_dir():
        return False
    problem, place = "", f"{folder} on {socket.gethostname()}: it is another folder than the driver's"
    if open_run_store(setting.sweep_id) is None:
        problem = f"has no {place}"
    elif setting.spec.loop is not None or setting.spec.search == "pbt":
        problem = f"has no {place}, by which trials of the loop, and copies of trials, pass"
    if problem:
        remedy = "set SHOAL_STORE to a bucket for trainings, or let all hosts mount one folder as SHOAL_HOME"
        raise ConfigError("SHOAL_HOME", str(setting.home), problem, remedy)
    return True


def make_run_id(sweep_id: str, number: int) -> str:
    """The id of a trial's own run record."""
    return f"{sweep_id}-t{number:03d}"


@dataclass(frozen=True)
class TrialReport:
    """An evaluation of a trial, or its end.

    progress: the share of the trial's steps that are done; NaN where their number is not known
    metrics:  of the evaluation; at the end of the network that the run retained
    is_over:  nothing more comes
    failure:  why the trial could not go on; "" otherwise
    """

    step: int
    progress: float
    metrics: dict[str, float] = field(default_factory=dict)
    is_over: bool = False
    failure: str = ""


class _ReportingLog(ForwardingLog):
    """Writes to the trial's record, and reports its evaluations."""

    def __init__(self, log: EventLog, report: Callable[[TrialReport], None]) -> None:
        super().__init__(log)
        self._report = report
        self._total_steps: int | None = None  # unknown before the event `training`
        self._is_replay = False  # a run that goes on first logs again what its checkpoint has

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        super().log(step, values, at)
        metrics = {name.removeprefix(_VALIDATION): v for name, v in values.items() if name.startswith(_VALIDATION)}
        if metrics and not self._is_replay:
            progress = step / self._total_steps if self._total_steps else math.nan
            self._report(TrialReport(step, progress, metrics))

    def record_event(self, kind: str, /, **details: object) -> None:
        self._is_replay = (self._is_replay or kind == "restored") and kind != "training"
        if kind == "training":
            total = details["total_steps"]
            self._total_steps = total if isinstance(total, int) else None
        super().record_event(kind, **details)


class Trial(ABC):
    """A run in a thread. `next_report` starts it; `stop` saves it and ends it.

    should_stop: polled; once true, the run is saved and ends
    """

    def __init__(self, run_id: str, should_stop: Callable[[], bool]) -> None:
        self.run_id, self.folder = run_id, home() / "runs" / run_id
        self._reports: SimpleQueue[TrialReport] = SimpleQueue()
        self._requested = threading.Semaphore(0)  # reports that the caller waits for or has received
        self._stopping, self._should_stop = threading.Event(), should_stop
        self._thread = threading.Thread(target=self._run, name=f"trial-{run_id}", daemon=True)
        self._last = TrialReport(0, 0.0)

    def next_report(self) -> TrialReport:
        """Wait for the next evaluation or the end, and return it.

        Between two calls a training goes on until it has the next report, no further.
        """
        self._requested.release()
        if self._thread.ident is None:
            self._thread.start()
        self._last = self._reports.get()
        return self._last

    def stop(self) -> None:
        """End the run, with a checkpoint, and return when it has ended. Idempotent."""
        self._stopping.set()
        self._requested.release()
        if self._thread.ident is not None:
            self._thread.join()

    # -- in the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._report(self._load_end() or self._run_recorded())
        except ShoalError as error:
            self._report(self._fail(f"{type(error).__name__}: {error}"))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the top of a thread: a Task may raise anything
            self._report(self._fail("".join(traceback.format_exception(error)).rstrip()))

    def _report(self, report: TrialReport) -> None:
        while not (self._is_stopping() or self._requested.acquire(timeout=STOP_POLL_S)):
            pass
        self._reports.put(report)

    def _is_stopping(self) -> bool:
        return self._stopping.is_set() or self._should_stop()

    def _fail(self, why: str) -> TrialReport:
        return TrialReport(self._last.step, self._last.progress, is_over=True, failure=why)

    @abstractmethod
    def _load_end(self) -> TrialReport | None:
        """The end of a trial that an earlier attempt of the sweep has finished."""

    @abstractmethod
    def _run_recorded(self) -> TrialReport:
        """Run to the end, with `_report` of each evaluation, and return the last one. Ends early if `_is_stopping`."""


class TrialRun(Trial):
    """The training run of one trial.

    checked:      the facts of a trial of this sweep
    make_backend: where its workers are; None: this process
    threads:      of torch, unless the spec says it
    is_remote:    see `is_remote`
    """

    def __init__(
        self,
        run_id: str,
        spec: TrainSpec,
        checked: ValidatedRun,
        *,
        make_backend: MakeBackend | None = None,
        threads: int = 1,
        should_stop: Callable[[], bool] = lambda: False,
        is_remote: bool = False,
    ) -> None:
        super().__init__(run_id, should_stop)
        self._is_remote = is_remote
        self._spec = spec
        self._checked = checked
        self._threads = threads
        self._make_backend = make_backend or (
            lambda spec, recorder, log, should_stop: LocalBackend(World.single(spec.device), should_stop)
        )
        self._copied_from = ""

    def copy_checkpoint(self, target: Path) -> None:
        """Copy the checkpoint of the last reported evaluation, or a newer one, into `target` as soon as it is written.

        Raises CheckpointError when there is none in time.
        """
        deadline = time.monotonic() + CHECKPOINT_TIMEOUT_S
        while time.monotonic() < deadline:
            is_over = not self._thread.is_alive()
            reported = checkpoint_path(self.folder / "checkpoints", self._last.step)
            newer = [path for path in list_newest_first(reported.parent) if path >= reported]
            if newer:
                shutil.copytree(newer[-1], target / newer[-1].name)
                (target / _ORIGIN).write_text(self.run_id)
                return
            if is_over:
                break
            time.sleep(_POLL_S)
        raise CheckpointError(f"trial {self.run_id} has no checkpoint of step {self._last.step}")

    def start_from(self, source: Path) -> None:
        """Before the start: begin with the checkpoint that `copy_checkpoint` of another trial has written.

        A trial's own one changes nothing: its run has it, or a newer one.
        """
        origin = (source / _ORIGIN).read_text()
        if origin != self.run_id:
            own = self.folder / "checkpoints"
            shutil.rmtree(own, ignore_errors=True)
            if store := open_run_store(self.run_id):
                StoredCheckpoints(store).clear()
            shutil.copytree(source, own, ignore=shutil.ignore_patterns(_ORIGIN))
            self._copied_from = origin

    def _load_end(self) -> TrialReport | None:
        record = find_trial(self.run_id)
        if record is None or not record.status.is_complete or self._copied_from:
            return None
        ended = record.last_events()["trained"]
        return TrialReport(ended["steps"], 1.0, ended["metrics"], is_over=True)

    def _run_recorded(self) -> TrialReport:
        # The record of an earlier attempt, once its end is known: another host's heartbeat must first be missed.
        until_s = time.monotonic() + LOST_TIMEOUT_S
        while (record := find_trial(self.run_id)) is not None and record.status is Status.RUNNING:
            if time.monotonic() > until_s or self._is_stopping():
                break
            time.sleep(STOP_POLL_S)
        spec = self._spec
        if record is not None:
            spec = spec.model_copy(update={"resume": self.run_id})
        with shoal.runs.recording(
            spec.to_record(), JOB, begun="training", kind=RunKind.TRAINING, resumed=spec.resume, run_id=self.run_id
        ) as recorder:
            if self._copied_from:
                recorder.record_event("copied", source=self._copied_from)
            log = _ReportingLog(RecordLog(recorder), self._report)
            set_threads(spec.model_copy(update={"workers": 1}), self._threads)
            run = TrainingRun(
                spec, self._checked, recorder.id, recorder.folder, log, recorder, registers=False, predicts=False
            )
            result = run.run(self._make_backend(spec, recorder, log, self._is_stopping))
            if self._is_remote and result.weights is not None and (store := open_run_store(self.run_id)):
                for file in list_with_index(result.weights):
                    store.write(file.name, file)
        return TrialReport(result.steps, 1.0, result.metrics, is_over=True)


def find_trial(run_id: str) -> shoal.runs.Run | None:
    """The record of a trial's run; None before its first start."""
    try:
        return shoal.runs.load(run_id)
    except RunError:
        return None


def load_result(run_id: str) -> TrainResult:
    """The result of a finished trial, from its record."""
    record = shoal.runs.load(run_id)
    ended: dict[str, Any] = record.last_events()["trained"]
    weights = record.folder / (ended.get("weights") or "model.safetensors")  # earlier releases did not say
    return TrainResult(
        run_id,
        ended["reason"],
        ended["detail"],
        ended["steps"],
        ended["kept"],
        ended["seconds"],
        ended["metrics"],
        weights,
    )
