"""The table of a sweep: its trials with their parameters and newest evaluations, the best first.

Reads only the run record. Called by `run_view` and by `shoal runs`. `SweepView` is the data; `render` and
`format_plain_line` are pure functions of it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from shoal.cli.support.console import make_number_column, make_table, render_cells, render_run_panel
from shoal.runs import Run
from shoal.runs.formatting import format_number
from shoal.runs.sweep_trials import SWEEPING, Sweep, SweepTrial, TrialState, load_sweep

MAX_ROWS = 16  # of a live table
MAX_FAILURE_LENGTH = 48  # letters; the run of the trial has all of it
_STYLES = {
    TrialState.RUNNING: "cyan",
    TrialState.FINISHED: "green",
    TrialState.STOPPED: "dim",
    TrialState.FAILED: "red",
    TrialState.INTERRUPTED: "yellow",
}


@dataclass(frozen=True)
class SweepView:
    """One moment of a sweep; `sweep` is None before its first event."""

    run_id: str
    elapsed_s: float
    sweep: Sweep | None
    notes: tuple[str, ...] = ()

    @property
    def phase(self) -> str:
        if self.sweep is None:
            return "starting"
        num_ended = sum(each.state is not TrialState.RUNNING for each in self.sweep.trials)
        return "registering the best" if num_ended == self.sweep.num_trials else "sweeping"

    @property
    def metrics(self) -> dict[str, float]:
        """The best value of the metric so far; {} before the first."""
        ranked = self.sweep.rank() if self.sweep is not None else []
        return {self.sweep.metric: ranked[0].get_score(self.sweep.metric)} if self.sweep is not None and ranked else {}

    def render(self) -> RenderableType:
        """The picture for a terminal."""
        parts: list[RenderableType] = []
        if self.sweep is not None:
            parts = [render_cells(_count_states(self.sweep)), render_trials(self.sweep, MAX_ROWS)]
        return render_run_panel(self.run_id, self.phase, self.elapsed_s, parts, self.notes)

    def format_plain_line(self) -> str:
        """One line for a log file."""
        at = f"[{self.elapsed_s:5.1f} s] {self.phase}"
        if self.sweep is None:
            return at
        parts = [f"{name} {count}" for name, count in _count_states(self.sweep)]
        parts += [f"best {name} {format_number(value)}" for name, value in self.metrics.items()]
        return f"{at}: {', '.join(parts)}" if parts else at


def make_view(run: Run, before: SweepView | None, notes: Sequence[str]) -> SweepView:
    """The present view of the run."""
    sweep = load_sweep(run) if run.list_events(SWEEPING) else None
    return SweepView(run.id, time.time() - run.last_started_at(), sweep, tuple(notes))


def render_trials(sweep: Sweep, max_rows: int | None = None) -> Table:
    """Trials with a score, best first, then those without one."""
    ranked = sweep.rank()
    others = [each for each in sweep.trials if each not in ranked]
    paths = list(dict.fromkeys(path for each in sweep.trials for path in each.parameters))
    headings = [path.rpartition(".")[2] for path in paths]
    table = make_table(
        make_number_column("trial"),
        make_number_column(sweep.metric),
        make_number_column("step"),
        *(Column(heading, overflow="fold") for heading in headings),
        Column("state", no_wrap=True),
    )
    for index, trial in enumerate([*ranked, *others][:max_rows]):
        table.add_row(*_format_trial(trial, sweep, paths, is_best=index == 0 and bool(ranked)))
    return table


def _format_trial(trial: SweepTrial, sweep: Sweep, paths: Sequence[str], *, is_best: bool) -> list[RenderableType]:
    score = format_number(trial.get_score(sweep.metric)) if sweep.metric in trial.values else "-"
    state = trial.state.value + (f", copied trial {trial.sources[-1][0]}" if trial.sources else "")
    last = trial.failure.splitlines()[-1] if trial.failure else ""
    reason = f": {last[:MAX_FAILURE_LENGTH]}{'…' * (len(last) > MAX_FAILURE_LENGTH)}" if last else ""
    return [
        str(trial.number),
        Text(score, style="bold green" if is_best else ""),
        f"{trial.step:,}",
        *(format_parameter(trial.parameters.get(path)) for path in paths),
        Text(state + reason, style=_STYLES[trial.state]),
    ]


def format_parameter(value: object) -> str:
    """A value of a hyper-parameter, with the digits that tell trials apart."""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _count_states(sweep: Sweep) -> list[tuple[str, str]]:
    counts = Counter(each.state for each in sweep.trials)
    waiting = sweep.num_trials - len(sweep.trials)
    cells = [(state.value, str(counts[state])) for state in TrialState if counts[state]]
    return [*cells, ("waiting", str(waiting))] if waiting else cells
