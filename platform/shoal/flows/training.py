"""A training run on a cluster: checked, started, watched, started again when a worker is lost, and registered.

    check ► record ► attempt (► attempt from the last checkpoint ...) ► register ► report

Called by `jobs/train.py` and the recipes, in a process that is connected to a Ray cluster. It owns the order of things
and the run record; the work is done by the Trainers.
"""

from __future__ import annotations

import math
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import shoal.runs
from shoal.cluster.job_main import expected_run_id, job_main
from shoal.cost import PREDICTED
from shoal.errors import ClusterError, RankLost, RecordUnwritable, RunError
from shoal.runs import RunRecorder
from shoal.runs.ray_event_channel import Message
from shoal.train.launch.finalize import end_run
from shoal.train.launch.overrides import spec_from_words
from shoal.train.launch.ray_capacity import Group, free_places, placed, require_room, workers_that_fit
from shoal.train.launch.shutdown_signal import interrupts
from shoal.train.launch.validate import Checked, check
from shoal.train.reporting.console import Told, in_words
from shoal.train.reporting.event_log import Recorded
from shoal.train.reporting.result import Outcome
from shoal.train.spec import TrainSpec

if TYPE_CHECKING:
    from shoal.train.launch.ray_train import Fit

JOB = "train"
POLL_S = 0.25
BEAT_S = 3.0  # how late it hears that another process has resumed the run
STOP_S = 12.0  # for the workers to save, before whoever asked for an end loses patience
ROOM_S = 10.0  # for a run that has just ended to give its place back
WAIT_S = 600.0  # for a host to take the place of one that is lost, or for what has taken the room to end
ATTEMPTS_WITHOUT_PROGRESS = 3


def train_main(spec: TrainSpec | None = None) -> None:
    """The main function of a recipe's file, and of jobs/train.py, which has no spec of its own."""
    found: list[Checked] = []  # kept: a look at a Task makes its data and its model

    def look(chosen: TrainSpec) -> None:
        found.append(check(chosen))

    def run(chosen: TrainSpec, job: str) -> str:
        return run_training(chosen, job, found.pop())

    if spec is None:
        job_main(spec_from_words, run, job=JOB, check=look)
        return
    job_main(spec.model_copy(update={"task": _as_others_find_it(spec.task or sys.argv[0])}), run, JOB, look)


def _as_others_find_it(task: str) -> str:
    """A file within this folder by its place there: on other hosts, the copy of the folder lies elsewhere."""
    file, here = Path(task), Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else task


def run_training(spec: TrainSpec, job: str, checked: Checked | None = None) -> str:
    """Train to the end and return the run's id. Raises a ShoalError when that is not possible.

    checked: what `check` has found, when it has looked already
    """
    outcome = train_on_cluster(spec, job, checked)
    if outcome.is_interrupted:
        raise KeyboardInterrupt
    return outcome.run_id


def train_on_cluster(spec: TrainSpec, job: str, checked: Checked | None = None, *, registers: bool = True) -> Outcome:
    """Train in workers of the cluster that this process is connected to. Raises a ShoalError as `run_training`."""
    checked = checked or check(spec)
    with shoal.runs.record_of(
        spec.to_yaml(), job, begun="training", resumed=spec.resume, run_id=expected_run_id()
    ) as recorder:
        outcome = _Flow(spec, checked, recorder, registers).run()
    if not outcome.is_interrupted:
        shoal.runs.report_at_end(recorder.id)
    return outcome


@dataclass(frozen=True, slots=True)
class _Lack:
    """What workers may wait for: the event that tells of it, and when; where there is no room, and until when."""

    event: str
    told_after_s: float
    where: str
    until: str


HOSTS = _Lack("hosts_missing", 0.0, "on the hosts that are left", "another has come")
PLACES = _Lack("room_taken", ROOM_S, "beside what runs", "that has ended")


class _Flow:
    """One run, over all attempts that it takes."""

    def __init__(self, spec: TrainSpec, checked: Checked, recorder: RunRecorder, registers: bool) -> None:
        self.spec, self.checked, self.recorder, self._registers = placed(spec), checked, recorder, registers
        self._step = -1  # the newest that was heard of
        self._beat_at = time.monotonic()
        self._has_begun = False  # the attempt of now: something was heard of it
        self._lack: _Lack | None = None  # what it waits for
        self._lack_since, self._lack_is_told = 0.0, False
        self._told = Told(Recorded(recorder), _say)

    def run(self) -> Outcome:
        """Attempt until the run ends, or until workers were lost several times without a step between."""
        num = self.spec.workers
        print(f"run {self.recorder.id}: {self.spec.task} on {num} worker{'s' * (num > 1)}", flush=True)
        require_room(self.spec, ROOM_S)
        lost_in_a_row = 0
        while True:
            before = self._step
            try:
                outcome = self._attempt()
                break
            except RankLost as error:
                lost_in_a_row = 1 if self._step > before else lost_in_a_row + 1
                self._told.event("workers_lost", step=self._step, error=str(error))
                if lost_in_a_row >= ATTEMPTS_WITHOUT_PROGRESS:
                    raise
        if not outcome.is_interrupted:  # told now, when the cores are free: it follows from the spec alone
            from shoal.train.launch.predicted_cost import predicted_cost

            self._told.event(PREDICTED, **predicted_cost(self.spec))
        end_run(self.spec, outcome, self.checked, self.recorder, registers=self._registers)
        if not outcome.is_interrupted:
            print(f"run {self.recorder.id}: {outcome.detail}; {in_words(outcome.metrics)}", flush=True)
        return outcome

    def _attempt(self) -> Outcome:
        from shoal.train.launch.ray_train import Fit, Setting  # Ray Train takes a second to load: not for `--check`

        self._has_begun, self._lack = False, None
        group = Group()
        setting = Setting(self.spec, self.recorder.id, self.recorder.folder, Path.cwd())
        with interrupts() as asked, closing(Fit(setting)) as fit:
            deadline = math.inf
            while not self._listen_or_refuse(fit, group):
                if asked.is_set() and deadline == math.inf:
                    print("stopping: saving a checkpoint ...", flush=True)
                    fit.stop()
                    deadline = time.monotonic() + STOP_S
                if time.monotonic() > deadline:
                    raise KeyboardInterrupt
            try:
                return fit.outcome()
            except RankLost:
                if asked.is_set():
                    raise KeyboardInterrupt from None  # nobody wants another attempt
                raise

    def _listen_or_refuse(self, fit: Fit, group: Group) -> bool:
        try:
            return self._listen(fit, group, POLL_S)
        except RunError as error:  # another process has resumed the run: its checkpoints are not the workers' any more
            fit.refuse(str(error))
            deadline = time.monotonic() + STOP_S
            while not fit.poll(POLL_S)[1] and time.monotonic() < deadline:
                pass
            raise

    def _listen(self, fit: Fit, group: Group, timeout_s: float) -> bool:
        messages, is_over = fit.poll(timeout_s)
        self._has_begun = self._has_begun or bool(messages)
        for message in messages:
            self._record_message(message)
        if time.monotonic() - self._beat_at >= BEAT_S:
            self._beat_at = time.monotonic()
            with suppress(RecordUnwritable):
                self.recorder.heartbeat()
            if not self._has_begun:
                self._look_for_room(group)
        return is_over

    def _look_for_room(self, group: Group) -> None:
        """A group that has no place on the cluster, Ray would let wait for ever, without a word."""
        fit = workers_that_fit(self.spec)
        if fit < self.spec.workers:
            self._wait_for(HOSTS, fit)
            return
        if self._lack is HOSTS:
            self._lack = None
        state = group.state()
        if state == "PENDING":
            free = free_places(self.spec)
            if self._lack is PLACES or free < self.spec.workers:  # else it is about to have them
                self._wait_for(PLACES, free)
        elif state == "CREATED":  # of groups that Ray Train makes anew there is none for a moment
            self._lack = None

    def _wait_for(self, lack: _Lack, fit: int) -> None:
        """It is told once, and given up when it has lasted too long. fit: of the workers, so many would have room."""
        now = time.monotonic()
        if self._lack is not lack:
            self._lack, self._lack_since, self._lack_is_told = lack, now, False
        if now - self._lack_since > WAIT_S:
            fewer = (
                f", or with fewer workers: resume={self.recorder.id} workers={fit}"
                if 0 < fit < self.spec.workers
                else ""
            )
            missing = f"{self.spec.workers} workers have no room {lack.where}"
            raise ClusterError(f"{missing}: go on with resume={self.recorder.id} when {lack.until}{fewer}")
        if now - self._lack_since >= lack.told_after_s and not self._lack_is_told:
            self._lack_is_told = True
            self._told.event(lack.event, workers=self.spec.workers, fit=fit, wait_s=WAIT_S)

    def _record_message(self, message: Message) -> None:
        kind, content = message
        if kind == "log":
            step, values = content
            self._step = max(self._step, step)
            self._told.log(step, values)
        elif kind == "event":
            name, details = content
            self._told.event(name, **details)
        else:
            self._told.histogram(*content)


def _say(words: str) -> None:
    print(words, flush=True)
