"""Training without Ray: in this process, or in torchrun's ranks; with a run record as well.

Called by `python -m shoal.train`, by `shoal ablate`, and by tests. The record is written by rank 0.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import psutil
import torch

import shoal.runs
from shoal.cpu_count import count_usable_cores
from shoal.errors import ConfigError, ShoalError
from shoal.home import home
from shoal.parallel import World
from shoal.parallel.layers.precision import check_precision
from shoal.random_state import preserve_rng
from shoal.runs import Run, RunRecorder
from shoal.runs.formatting import format_metrics
from shoal.runs.output_files import DRIVER, append_output
from shoal.runs.record.event_log import EventLog, NullLog, RecordLog
from shoal.runs.waits import WaitReporter
from shoal.train.launch.training_run import TORCHRUN, TrainingRun, find_launcher, shutdown_event
from shoal.train.launch.validate import validate_run
from shoal.train.loop.components import set_threads
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.console import ConsoleLog
from shoal.train.reporting.result import TrainResult
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task, unload_if_changed

JOB = "train"
_CLOCK_TOLERANCE_S = 60.0  # the clock is set by no more than this while torchrun runs
_NUM_SEARCHED_RUNS = 50  # newest runs to search for the one that torchrun has interrupted


class LocalBackend:
    """This process as one rank of `world`; or processes that it starts, for replicas that do not wait for each other.

    torchrun starts lost ranks again, if anything does.
    """

    is_restartable = False
    step = -1

    def __init__(self, world: World, should_stop: Callable[[], bool]) -> None:
        self._world, self._should_stop = world, should_stop

    def attempt(self, run: TrainingRun) -> TrainResult:
        if run.spec.has_replicas:
            launch = find_launcher(run.spec)
            return launch(run.spec, run.run_id, run.folder, run.log, self._should_stop)
        task = make_task(run.spec.task, run.spec.args)
        trainer = Trainer(
            run.spec, task, self._world, run.folder, run_id=run.run_id, journal=run.log, should_stop=self._should_stop
        )
        return trainer.run()

    def predict_cost(self, spec: TrainSpec) -> dict[str, Any]:
        from shoal.train.launch.predicted_cost import predict_cost_details  # loads parts of torch

        return predict_cost_details(spec)


def fit_locally(
    spec: TrainSpec,
    job: str = JOB,
    *,
    registers: bool = True,
    predicts: bool = False,
    renews: bool = True,
    say: Callable[[str], None] | None = None,
) -> TrainResult:
    """Train in this process, one of torchrun's ranks or the only one, and return the outcome.

    Ctrl-C and SIGTERM save a checkpoint and end the run as stopped; the caller ends the program by the outcome's
    `signal`. Raises ShoalError, which the record has as well.

    registers: register the network at the end
    renews:    reload a changed file of the Task that this process has loaded before; False when several runs
               are compared
    predicts:  record the predicted cost, which takes a second or two at the end
    say:       receives lines about progress, problems and the end, which the run's folder has too
    """
    if spec.has_replicas and "WORLD_SIZE" in os.environ:
        raise ConfigError(*spec.applied_sync.chosen_by, "starts its workers itself", "leave out torchrun")
    workers = spec.workers if spec.has_replicas else int(os.environ.get("WORLD_SIZE", "1"))
    spec = spec.model_copy(update={"workers": workers})
    if renews:
        unload_if_changed(spec.task)
    with ExitStack() as closing:
        is_reported = say and os.environ.get("RANK", "0") == "0"
        reporter = closing.enter_context(WaitReporter("training" if is_reported else ""))
        checked = validate_run(spec)
        spec = checked.apply_to(spec)
        world = World.from_environment(spec.device, spec.parallel.backend)
        closing.callback(world.close)
        check_precision(spec.parallel.precision, world.device.type)
        closing.callback(torch.set_num_threads, torch.get_num_threads())
        set_threads(spec, count_usable_cores())
        closing.enter_context(preserve_rng(has_cuda=False))  # a notebook's own numbers do not repeat
        run_id, recorder = _open_record(spec, job, world, closing)
        stop = closing.enter_context(shutdown_event())
        journal: EventLog = RecordLog(recorder) if recorder else NullLog()

        def tell(line: str) -> None:
            with suppress(OSError):  # a full disk: the run goes on without
                append_output(home() / "runs" / run_id, DRIVER, f"{line}\n".encode())
            if say:
                say(line)
            reporter.note_line()

        if recorder:
            journal = ConsoleLog(journal, tell)
        about = (spec, checked, run_id, home() / "runs" / run_id, journal, recorder, registers, predicts)
        run = TrainingRun(*about, stop.is_set)
        checked.log_data(journal)
        outcome = run.run(LocalBackend(world, stop.is_set))
        if recorder:
            metrics = f"; {format_metrics(outcome.metrics)}" if outcome.metrics else ""
            tell(f"run {run_id}: {outcome.detail}, {outcome.seconds:.1f} s{metrics}\n{outcome.registration}".rstrip())
        world.barrier()
        return replace(outcome, signal=stop.number)


def _open_record(spec: TrainSpec, job: str, world: World, closing: ExitStack) -> tuple[str, RunRecorder | None]:
    """The run's id, and on the first rank its recorder. Raises ShoalError on all of them if it cannot be made."""
    recorder, problem = None, ""
    if world.is_first:
        try:
            recorder = closing.enter_context(_record_run(spec, job))
        except ShoalError as error:
            if world.size == 1:
                raise
            problem = str(error)
    run_id, problem = world.broadcast((recorder.id if recorder else "", problem))
    if problem:
        raise ShoalError(problem)
    return run_id, recorder


@contextmanager
def _record_run(spec: TrainSpec, job: str) -> Iterator[RunRecorder]:
    """The recorder of this run, new or resumed; this process closes it."""
    with shoal.runs.recording(
        spec.to_record(),
        job,
        begun="training",
        kind=shoal.runs.RunKind.TRAINING,
        resumed=spec.resume or _find_torchrun_run(),
    ) as recorder:
        if TORCHRUN in os.environ:
            recorder.record_event("launched", by=_describe_launcher(), at=_get_launch_time())
        yield recorder
    if recorder.folder.is_dir():
        shoal.runs.write_report_at_end(recorder.id)


def _describe_launcher() -> str:
    """An id of this torchrun, among those started at the same time."""
    return f"torchrun {os.environ[TORCHRUN]}, process {os.getppid()} on {socket.gethostname()}"


def _get_launch_time() -> float:
    """The start of torchrun: Unix time in seconds, by the clock as it is set now."""
    return psutil.Process(os.getppid()).create_time()


def _find_torchrun_run() -> str:
    """The run to resume after torchrun has restarted its ranks (--max-restarts); "" if it has not."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return ""
    runs = shoal.runs.list_runs(_NUM_SEARCHED_RUNS)
    return next((run.id for run in runs if not run.status.is_complete and _is_same_launch(run)), "")


def _is_same_launch(run: Run) -> bool:
    """Checked, since another torchrun in a container may have had the same host name and process id."""
    launched = run.last_events().get("launched", {})
    return (
        launched.get("by") == _describe_launcher()
        and abs(launched.get("at", 0.0) - _get_launch_time()) < _CLOCK_TOLERANCE_S
    )
