"""The trials of a sweep, as its run record has them: parameters, state, newest evaluation.

Owns the names by which a sweep records its trials. The flow writes through `TrialLog`; the display, the report and a
resumed sweep read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import yaml

from shoal.config import format_override
from shoal.errors import RunError
from shoal.extend.runs import (
    TRIAL_STARTED,
    Cell,
    Panel,
    Run,
    RunRecorder,
    Status,
    format_masked_command,
    format_number,
    format_value,
)
from shoal.libs.sweep.loop_spec import LoopTrialSpec
from shoal.search.space import flatten

SWEEPING = "sweeping"
_COPIED, _ENDED = "trial_copied", "trial_ended"
_STEP, _PROGRESS = "step", "progress"
_OF_TRIAL = ("stop.steps", "stop.wall_s", "reports")  # and no words of the job of the loop
_OF_JOB = {"model_name": "endpoint.name"}
History = list[tuple[float, float]]  # of the evaluations of a trial: the finished share of its steps, and the score


class TrialState(StrEnum):
    """INTERRUPTED: the sweep has ended before the trial; STOPPED: the scheduler has ended it."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


TONES = {
    TrialState.RUNNING: "busy",
    TrialState.FINISHED: "good",
    TrialState.STOPPED: "muted",
    TrialState.FAILED: "bad",
    TrialState.INTERRUPTED: "warn",
}
MAX_FAILURE_LENGTH = 48  # letters; the run of the trial has all of it


@dataclass(frozen=True)
class SweepTrial:
    """One trial.

    number:  from 0, in the order in which the trials began
    run_id:  of its own run record
    values:  of the newest evaluation, or at the end of the network that its run retained
    failure: why it could not go on
    sources: the trials whose network it has copied, with the step, oldest first
    """

    number: int
    run_id: str
    parameters: dict[str, Any]
    state: TrialState = TrialState.RUNNING
    step: int = 0
    values: dict[str, float] = field(default_factory=dict)
    failure: str = ""
    sources: tuple[tuple[int, int], ...] = ()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to do."""
        return self.state in (TrialState.FINISHED, TrialState.STOPPED, TrialState.FAILED)

    def get_score(self, metric: str) -> float:
        """The value of a metric; NaN before the first evaluation."""
        return self.values.get(metric, math.nan)


@dataclass(frozen=True)
class Sweep:
    """What a sweep does, and its trials.

    num_trials: that it will have
    metric:     that it optimises, better when higher or when lower
    """

    num_trials: int
    metric: str
    is_higher: bool
    search: str
    scheduler: str
    trials: tuple[SweepTrial, ...]

    def rank(self) -> list[SweepTrial]:
        """Trials with a finite score, best first."""
        scored = [each for each in self.trials if math.isfinite(each.get_score(self.metric))]
        return sorted(scored, key=lambda each: each.get_score(self.metric), reverse=self.is_higher)

    def find_best(self) -> SweepTrial | None:
        """The best of the trials that have finished: only these have a network. None before the first."""
        return next((each for each in self.rank() if each.state is TrialState.FINISHED), None)


class TrialLog:
    """Records the trials of one sweep."""

    def __init__(self, recorder: RunRecorder) -> None:
        self._recorder = recorder

    def __getstate__(self) -> dict[str, Any]:
        """Nothing: Ray Tune writes copies of its arguments to files, which no sweep reads."""
        return {}

    def begin(self, **setting: object) -> None:
        """Record the setting of the sweep: the fields of `Sweep` but for its trials."""
        self._recorder.record_event(SWEEPING, **setting)

    def record_event(self, kind: str, /, **details: object) -> None:
        """Record an event of the sweep as a whole."""
        self._recorder.record_event(kind, **details)

    def start(self, number: int, run_id: str, parameters: Mapping[str, object]) -> None:
        """Record that a trial starts, or goes on after an interruption."""
        self._recorder.record_event(TRIAL_STARTED, trial=number, run_id=run_id, parameters=dict(parameters))

    def copy(self, number: int, source: int, step: int, parameters: Mapping[str, object]) -> None:
        """Record that a trial goes on with the network of another, of that step, and with other parameters."""
        self._recorder.record_event(_COPIED, trial=number, source=source, step=step, parameters=dict(parameters))

    def report(self, number: int, step: int, progress: float, values: Mapping[str, float]) -> None:
        """Record an evaluation. progress: the finished share of the trial's steps."""
        named = {**values, _STEP: float(step), _PROGRESS: progress}
        self._recorder.log(step, {f"{_prefix(number)}{name}": value for name, value in named.items()})

    def end(self, number: int, state: TrialState, step: int, values: Mapping[str, float], failure: str = "") -> None:
        """Record the end of a trial."""
        self._recorder.record_event(
            _ENDED, trial=number, state=state.value, step=step, values=dict(values), failure=failure
        )


def load_sweep(run: Run) -> Sweep:
    """The present state of a sweep, from its record. Raises RunError for a run that is no sweep."""
    events = run.list_events(SWEEPING, TRIAL_STARTED, _COPIED, _ENDED)
    settings = [details for kind, details in events if kind == SWEEPING]
    if not settings:
        raise RunError(f"run {run.id} has recorded no trial")
    trials: dict[int, SweepTrial] = {}
    for kind, details in events:
        if kind != SWEEPING:
            trials[details["trial"]] = _apply_event(trials.get(details["trial"]), kind, details)
    latest = run.latest()
    is_running = run.status is Status.RUNNING
    found = [_complete(each, latest, is_running) for _, each in sorted(trials.items())]
    return Sweep(**settings[-1], trials=tuple(found))


def build_trial_table(sweep: Sweep, *, has_runs: bool = False) -> Panel:
    """Trials with a score, best first, then those without one: with their parameters, and what became of them.

    has_runs: with the ids of their runs
    """
    ranked = sweep.rank()
    paths = list(dict.fromkeys(path for each in sweep.trials for path in each.parameters))
    header = ["trial", sweep.metric, "step", *(path.rpartition(".")[2] for path in paths), "state", *["run"] * has_runs]
    rows: list[list[Cell]] = []
    for trial in [*ranked, *(each for each in sweep.trials if each not in ranked)]:
        score = format_number(trial.get_score(sweep.metric)) if sweep.metric in trial.values else "-"
        last = trial.failure.splitlines()[-1] if trial.failure else ""
        reason = f": {last[:MAX_FAILURE_LENGTH]}{'…' * (len(last) > MAX_FAILURE_LENGTH)}" if last else ""
        copied = f", copied trial {trial.sources[-1][0]}" if trial.sources else ""
        is_best = bool(ranked) and trial is ranked[0]
        values = (format_value(trial.parameters.get(path, "")) for path in paths)
        state = (f"{trial.state.value}{copied}{reason}", TONES[trial.state])
        row: list[Cell] = [str(trial.number), (score, "best") if is_best else score, f"{trial.step:,}", *values, state]
        rows.append([*row, *[(trial.run_id, "run")] * has_runs])
    return Panel(title="all trials", note="best first", header=header, rows=rows)


def list_best_commands(run: Run, best: SweepTrial) -> list[str]:
    """The commands that use the best trial: serve its network, if it has been registered, and train with its settings
    again."""
    models = [f"shoal serve deploy {each.name}@{each.version}" for each in run.models().itertuples()]
    fields = yaml.safe_load(run.spec) or {}
    loop = fields.get("loop")
    words = dict(flatten(loop or fields.get("train") or {})) | best.parameters
    command = ["shoal", "run", words.pop("recipe", "train")]
    if loop:  # a run of the job, which a trial is not
        command += ["--actors", str(words.pop("actors", LoopTrialSpec().actors))]
        words = {_OF_JOB.get(path, path): value for path, value in words.items() if path not in _OF_TRIAL}
    named = [
        format_override(path, value) if isinstance(value, str) else f"{path}={json.dumps(value)}"
        for path, value in words.items()
    ]
    return [*models, format_masked_command([*command, *named])]


def load_history(run: Run, number: int, metric: str) -> History:
    """The evaluations of a trial, in order."""
    names = [f"{_prefix(number)}{name}" for name in (_PROGRESS, metric)]
    table = run.metrics()
    if not set(names) <= set(table.columns):
        return []
    rows = table[names].dropna()
    return list(rows.itertuples(index=False, name=None))


def _apply_event(trial: SweepTrial | None, kind: str, details: dict[str, Any]) -> SweepTrial:
    if trial is None:
        return SweepTrial(details["trial"], details["run_id"], details["parameters"])
    if kind == TRIAL_STARTED:
        return replace(trial, state=TrialState.RUNNING, failure="", parameters=details["parameters"])
    if kind == _COPIED:
        sources = (*trial.sources, (details["source"], details["step"]))
        return replace(trial, parameters=details["parameters"], sources=sources)
    state, values = TrialState(details["state"]), details["values"]
    return replace(trial, state=state, step=details["step"], values=values, failure=details["failure"])


def _complete(trial: SweepTrial, latest: Mapping[str, float], is_running: bool) -> SweepTrial:
    """Add the newest evaluation to a trial that has not ended."""
    if trial.state is not TrialState.RUNNING:
        return trial
    start = _prefix(trial.number)
    values = {name.removeprefix(start): value for name, value in latest.items() if name.startswith(start)}
    step = int(values.pop(_STEP, 0))
    values.pop(_PROGRESS, None)
    state = TrialState.RUNNING if is_running else TrialState.INTERRUPTED
    return replace(trial, state=state, step=step, values=values)


def _prefix(number: int) -> str:
    return f"trial-{number:03d}/"
