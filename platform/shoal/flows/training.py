"""A training run on a cluster: the workers of a `TrainingRun` as Ray's, started, followed and ended.

Called by `jobs/train.py` and the recipes, in a process connected to a Ray cluster. The Trainers do the work.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shoal.runs
from shoal.cluster.admission import CAPACITY_WAIT_S, RunAdmission
from shoal.cluster.job_main import CHECK, expected_run_id, job_main
from shoal.errors import ClusterError, ConfigError, NotReached, RankLost, RecordUnwritable, RunError, needs_extra
from shoal.runs import RunRecorder
from shoal.runs.formatting import format_metrics
from shoal.runs.record.event_log import EventLog, ForwardingLog, RecordLog
from shoal.runs.waits import WaitReporter, print_line
from shoal.train.launch.checked_run import check_once, find_check
from shoal.train.launch.finalize import describe_missed_target
from shoal.train.launch.overrides import list_task_arguments, spec_from_overrides
from shoal.train.launch.ray_capacity import (
    WorkerPlacement,
    count_free_workers,
    count_workers_that_fit,
    require_capacity,
    require_possible,
    resolve_device,
)
from shoal.train.launch.ray_task import check_on_worker, predict_on_worker
from shoal.train.launch.training_run import TrainingRun, find_launcher, shutdown_event
from shoal.train.launch.validate import ValidatedRun, validate_spec
from shoal.train.reporting.console import ConsoleLog
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import find_source_file

if TYPE_CHECKING:
    from shoal.train.launch.ray_train import RayTrainAttempt

JOB = "train"
POLL_S = 0.25
HEARTBEAT_S = 3.0  # the delay until it notices that another process has resumed the run
STOP_TIMEOUT_S = 12.0  # for the workers to save, before Ray kills the job
SHORTAGE_TIMEOUT_S = 600.0  # for a host to replace a lost one, or for other work to end


def train_main(
    spec: TrainSpec | Callable[[list[str]], TrainSpec] = spec_from_overrides,
    translate: Callable[[list[str]], list[str]] = list,
) -> None:
    """The main function of a recipe's file, and of jobs/train.py, which has no spec of its own.

    spec:      what the overrides change, or a function that makes it of them
    translate: makes overrides of the command line's words; may raise ShoalError
    """
    checks: list[ValidatedRun | None] = []

    def check_chosen(chosen: TrainSpec) -> None:
        if CHECK in sys.argv:
            check_once(chosen)
            return
        checks.append(find_check(chosen))
        if checks[0] is None:
            validate_spec(chosen)

    def run(chosen: TrainSpec, job: str) -> str:
        return run_training(chosen, job, checks.pop())

    if isinstance(spec, TrainSpec):
        spec = spec.model_copy(update={"task": _to_relative_path(spec.task or sys.argv[0])})
    job_main(spec, run, JOB, check_chosen, translate, list_arguments=list_task_arguments)


def _to_relative_path(task: str) -> str:
    """Make a file within this folder relative, and a recipe its name: on other hosts, copies have other paths."""
    file, here = Path(task), Path.cwd()
    if not file.is_relative_to(here) and find_source_file(file.stem) == file.resolve():
        return file.stem
    return str(file.relative_to(here)) if file.is_relative_to(here) else task


def run_training(spec: TrainSpec, job: str, checked: ValidatedRun | None = None) -> str:
    """Train to the end and return the run's id. Raises NotReached without the target, another ShoalError on failure.

    checked: the result of an earlier validation
    """
    run_id, result = _train_recorded(spec, job, checked or _check(spec), registers=True)
    if result.is_interrupted:
        raise KeyboardInterrupt
    if missed := describe_missed_target(spec, result):
        raise NotReached(missed)
    return run_id


def train_on_cluster(spec: TrainSpec, job: str, *, registers: bool = True) -> TrainResult:
    """Train in workers of the connected cluster. Raises a ShoalError as `run_training`."""
    return _train_recorded(spec, job, _check(spec), registers=registers)[1]


def _check(spec: TrainSpec) -> ValidatedRun:
    """Check in a worker, and load meanwhile what `RayBackend.attempt` needs."""
    validate_spec(spec)
    require_possible(resolve_device(spec))
    with WaitReporter("checking the run"):
        return check_on_worker(spec, print_line, partial(_load_launcher, spec))


def _load_launcher(spec: TrainSpec) -> None:
    if spec.has_replicas:
        find_launcher(spec)
        return
    with needs_extra("train"):
        import shoal.train.launch.ray_train  # noqa: F401


def _train_recorded(spec: TrainSpec, job: str, checked: ValidatedRun, *, registers: bool) -> tuple[str, TrainResult]:
    """The run's id and result; its report is written unless it was interrupted."""
    # A worker imports the file of a synchronizer from the folder of the run.
    file = Path(spec.sync.kind.partition(":")[0])
    if file.suffix == ".py" and file.resolve().parent != Path.cwd():
        problem = "is not in the folder from which the run is started, where workers look for it"
        raise ConfigError("sync.kind", spec.sync.kind, problem, f"start the run in {file.resolve().parent}")
    spec = checked.apply_to(spec)
    with shoal.runs.recording(
        spec.to_record(),
        job,
        begun="training",
        kind=shoal.runs.RunKind.TRAINING,
        resumed=spec.resume,
        run_id=expected_run_id(),
    ) as recorder:
        spec = resolve_device(spec)  # the record has the user's word: another cluster may have other devices
        num = spec.workers
        workers = f"{num} worker{'s' * (num > 1)}"
        print_line(f"run {recorder.id}: {spec.task} on {workers}")
        with RunAdmission(recorder.id, spec.priority) as admission, WaitReporter(f"waiting for {workers}") as reporter:

            def say(line: str) -> None:
                print_line(line)
                reporter.note_line()

            def begin() -> None:
                admission.mark_running()
                reporter.wait_for("training")

            log = ConsoleLog(RecordLog(recorder, begin), say)
            require_capacity(spec, log.record_event, admission)
            checked.log_data(log)
            run = TrainingRun(spec, checked, recorder.id, recorder.folder, log, recorder, registers)
            result = run.run(RayBackend(spec, recorder, log))
        if not result.is_interrupted:
            print_line(f"run {recorder.id}: {result.detail}; {format_metrics(result.metrics)}")
            if result.registration:
                print_line(result.registration)
    if not result.is_interrupted:
        with WaitReporter("writing the report"):
            shoal.runs.write_report_at_end(recorder.id)
    return recorder.id, result


@dataclass(frozen=True, slots=True)
class _Shortage:
    """A lack of capacity that workers may wait for: its event, the delay before reporting it, and message parts."""

    event: str
    report_after_s: float
    where: str
    until: str


MISSING_HOSTS = _Shortage("hosts_missing", 0.0, "on the hosts that are left", "another has come")
OCCUPIED_CAPACITY = _Shortage("room_taken", CAPACITY_WAIT_S, "beside what runs", "that has ended")


class _StepLog(ForwardingLog):
    """step: the newest that was logged, -1 before."""

    step = -1

    def log(self, step: int, values: Mapping[str, float], at: float | None = None) -> None:
        self.step = max(self.step, step)
        super().log(step, values, at)


class RayBackend:
    """Workers on the connected cluster.

    should_stop: polled, in addition to the signals that end this process
    """

    is_restartable = True

    def __init__(
        self, spec: TrainSpec, recorder: RunRecorder, log: EventLog, should_stop: Callable[[], bool] = lambda: False
    ) -> None:
        self.spec = spec
        self.recorder = recorder
        self._log = _StepLog(log)
        self._should_stop = should_stop
        self._beat_at = time.monotonic()
        self._has_started = False  # whether the present attempt has reported anything
        self._shortage: _Shortage | None = None  # the present one
        self._shortage_since, self._is_shortage_reported = 0.0, False

    @property
    def step(self) -> int:
        return self._log.step

    def attempt(self, run: TrainingRun) -> TrainResult:
        """Also raises ClusterError when the cluster has no room, and KeyboardInterrupt."""
        if self.spec.has_replicas:
            return self._attempt_replicas()
        with needs_extra("train"):  # Ray Train takes a second to load, which `--check` must not wait for
            from shoal.train.launch.ray_train import RayTrainAttempt, WorkerSetup

        self._has_started, self._shortage = False, None
        group = WorkerPlacement()
        setting = WorkerSetup(self.spec, self.recorder.id, self.recorder.folder, Path.cwd())
        with shutdown_event() as asked, closing(RayTrainAttempt(setting)) as fit:
            deadline = math.inf
            while not self._poll_or_abort(fit, group):
                if (asked.is_set() or self._should_stop()) and deadline == math.inf:
                    print_line("stopping: saving a checkpoint ...")
                    fit.stop()
                    deadline = time.monotonic() + STOP_TIMEOUT_S
                if time.monotonic() > deadline:
                    raise KeyboardInterrupt
            try:
                return replace(fit.get_outcome(), signal=asked.number)
            except RankLost:
                if asked.is_set() or self._should_stop():
                    raise KeyboardInterrupt from None  # the user stopped it: no further attempt
                raise

    def predict_cost(self, spec: TrainSpec) -> dict[str, Any]:
        return predict_on_worker(spec)

    def _attempt_replicas(self) -> TrainResult:
        launch = find_launcher(self.spec)
        with shutdown_event() as asked:
            result = launch(
                self.spec,
                self.recorder.id,
                self.recorder.folder,
                self._log,
                lambda: asked.is_set() or self._should_stop(),
                self._send_heartbeat,
                on_cluster=True,
            )
            return replace(result, signal=asked.number)

    def _send_heartbeat(self) -> bool:
        """Whether one was due. Raises RunError when another process has resumed the run."""
        if time.monotonic() - self._beat_at < HEARTBEAT_S:
            return False
        self._beat_at = time.monotonic()
        with suppress(RecordUnwritable):
            self.recorder.heartbeat()
        return True

    def _poll_or_abort(self, fit: RayTrainAttempt, group: WorkerPlacement) -> bool:
        try:
            return self._poll(fit, group, POLL_S)
        except RunError as error:  # another process has resumed the run and owns its checkpoints
            fit.abort(str(error))
            deadline = time.monotonic() + STOP_TIMEOUT_S
            while not fit.poll(POLL_S)[1] and time.monotonic() < deadline:
                pass
            raise

    def _poll(self, fit: RayTrainAttempt, group: WorkerPlacement, timeout_s: float) -> bool:
        messages, is_over = fit.poll(timeout_s)
        self._has_started = self._has_started or bool(messages)
        for method, arguments, details in messages:
            getattr(self._log, method)(*arguments, **details)
        if self._send_heartbeat() and not self._has_started:
            self._check_capacity(group)
        return is_over

    def _check_capacity(self, group: WorkerPlacement) -> None:
        """Detect a group that does not fit on the cluster: Ray would wait without end, and report nothing."""
        fit = count_workers_that_fit(self.spec)
        if fit < self.spec.workers:
            self._report_shortage(MISSING_HOSTS, fit)
            return
        if self._shortage is MISSING_HOSTS:
            self._shortage = None
        state = group.get_state()
        if state == "PENDING":
            free = count_free_workers(self.spec)
            if self._shortage is OCCUPIED_CAPACITY or free < self.spec.workers:  # otherwise it is about to start
                self._report_shortage(OCCUPIED_CAPACITY, free)
        elif state == "CREATED":  # between groups that Ray Train recreates there is briefly none
            self._shortage = None

    def _report_shortage(self, lack: _Shortage, fit: int) -> None:
        """Report a shortage once, and raise when it lasts too long. fit: the number of workers that would fit."""
        now = time.monotonic()
        if self._shortage is not lack:
            self._shortage = lack
            self._shortage_since = now
            self._is_shortage_reported = False
        if now - self._shortage_since > SHORTAGE_TIMEOUT_S:
            fewer = (
                f", or with fewer workers: resume={self.recorder.id} workers={fit}"
                if 0 < fit < self.spec.workers
                else ""
            )
            missing = f"{self.spec.workers} workers have no room {lack.where}"
            raise ClusterError(f"{missing}: go on with resume={self.recorder.id} when {lack.until}{fewer}")
        if now - self._shortage_since >= lack.report_after_s and not self._is_shortage_reported:
            self._is_shortage_reported = True
            self._log.record_event(lack.event, workers=self.spec.workers, fit=fit, wait_s=SHORTAGE_TIMEOUT_S)
