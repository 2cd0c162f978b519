"""Training without Ray: in this process, or in the ranks that torchrun has started; with a run record all the same.

Called by `python -m shoal.train`, by `shoal ablate`, and by tests. The record is written by rank 0.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psutil

import shoal.runs
from shoal.cost import PREDICTED
from shoal.cpu_count import usable_cores
from shoal.errors import ShoalError
from shoal.home import home
from shoal.parallel import World
from shoal.runs import Run, RunRecorder, Status
from shoal.train.launch.finalize import end_run
from shoal.train.launch.predicted_cost import predicted_cost
from shoal.train.launch.shutdown_signal import TORCHRUN, interrupts
from shoal.train.launch.validate import check
from shoal.train.loop.components import set_threads
from shoal.train.loop.trainer import Trainer
from shoal.train.reporting.console import Told
from shoal.train.reporting.event_log import Journal, Recorded, Silent
from shoal.train.reporting.result import Outcome
from shoal.train.spec import TrainSpec
from shoal.train.task import make_task, renew

JOB = "train"
_CLOCK_IS_SET_S = 60.0  # by no more than this while torchrun runs
_NUM_LOOKED_AT = 50  # newest runs, when the one that torchrun has interrupted is looked for


def train_here(
    spec: TrainSpec,
    job: str = JOB,
    *,
    registers: bool = True,
    predicts: bool = False,
    renews: bool = True,
    say: Callable[[str], None] | None = None,
) -> Outcome:
    """Train in this process, one of torchrun's ranks or the only one, and return how it ended.

    Ctrl-C saves a checkpoint and ends the run as stopped. Raises ShoalError; the record then says why.

    registers: put the network into the registry at the end
    renews:    train what the Task's file says now, also where this process has loaded it before; False for one of
               several runs that are to be compared
    predicts:  record what the run is predicted to cost, which takes a second or two at its beginning
    say:       takes a line for a person now and then: how far it is, and what went wrong
    """
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    is_told = predicts and os.environ.get("RANK", "0") == "0"
    spec = spec.model_copy(update={"workers": workers})
    if renews:
        renew(spec.task)
    checked = check(spec)
    cost = predicted_cost(spec) if is_told else {}
    with ExitStack() as closing:
        world = World.from_environment(spec.device, spec.parallel.backend)
        closing.callback(world.close)
        set_threads(spec, usable_cores())
        run_id, recorder = _begun(spec, job, world, closing)
        folder = home() / "runs" / run_id
        stop = closing.enter_context(interrupts())
        journal: Journal = Recorded(recorder) if recorder else Silent()
        if recorder and say:
            journal = Told(journal, say)
        if cost:
            journal.event(PREDICTED, **cost)
        trainer = Trainer(
            spec,
            make_task(spec.task, spec.args),
            world,
            folder,
            run_id=run_id,
            journal=journal,
            should_stop=stop.is_set,
        )
        outcome = trainer.run()
        if recorder is not None:
            end_run(spec, outcome, checked, recorder, registers=registers)
        world.barrier()
        return outcome


def _begun(spec: TrainSpec, job: str, world: World, closing: ExitStack) -> tuple[str, RunRecorder | None]:
    """The run's id, and on the first rank its record. Raises ShoalError on all of them when there can be none."""
    recorder, problem = None, ""
    if world.is_first:
        try:
            recorder = closing.enter_context(_record(spec, job))
        except ShoalError as error:
            if world.size == 1:
                raise
            problem = str(error)
    run_id, problem = world.broadcast((recorder.id if recorder else "", problem))
    if problem:
        raise ShoalError(problem)
    return run_id, recorder


@contextmanager
def _record(spec: TrainSpec, job: str) -> Iterator[RunRecorder]:
    """The record of this run, or of the one that is resumed; written to the end by this process."""
    with shoal.runs.record_of(
        spec.to_yaml(), job, begun="training", resumed=spec.resume or _run_of_torchrun()
    ) as recorder:
        if TORCHRUN in os.environ:
            recorder.event("launched", by=_launcher(), at=_launched_at())
        yield recorder
    if recorder.folder.is_dir():
        shoal.runs.report_at_end(recorder.id)


def _launcher() -> str:
    """Which torchrun this is, among those that began at the same time."""
    return f"torchrun {os.environ[TORCHRUN]}, process {os.getppid()} on {socket.gethostname()}"


def _launched_at() -> float:
    """When torchrun began: Unix time in seconds, by the clock as it is set now."""
    return psutil.Process(os.getppid()).create_time()


def _run_of_torchrun() -> str:
    """The run to go on with when torchrun has started its ranks again (--max-restarts); empty when it has not."""
    if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0":
        return ""
    runs = shoal.runs.list_runs(_NUM_LOOKED_AT)
    return next((run.id for run in runs if run.status is not Status.FINISHED and _is_ours(run)), "")


def _is_ours(run: Run) -> bool:
    """In containers another torchrun may have had the same host name and process id."""
    launched = run.last_events().get("launched", {})
    return launched.get("by") == _launcher() and abs(launched.get("at", 0.0) - _launched_at()) < _CLOCK_IS_SET_S
