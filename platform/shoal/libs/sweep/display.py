"""The table of a sweep: its trials with their parameters and newest evaluations, the best first.

Called by `run_view`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text

from shoal.extend.cli import RunView, render_cells, render_table
from shoal.extend.runs import WAITING, Run, format_number
from shoal.libs.sweep.trials import SWEEPING, Sweep, TrialState, build_trial_table, list_best_commands, load_sweep

MAX_ROWS = 16  # of a live table


@dataclass(frozen=True, kw_only=True)
class SweepView(RunView):
    """One moment of a sweep; `sweep` is None before its first event. metrics: the best value so far."""

    sweep: Sweep | None

    def list_panels(self) -> Iterator[RenderableType]:
        if self.sweep is not None:
            yield render_cells(_count_states(self.sweep))
            yield render_table(build_trial_table(self.sweep), MAX_ROWS)

    def list_facts(self) -> list[str]:
        counts = _count_states(self.sweep) if self.sweep is not None else []
        best = [f"best {name} {format_number(value)}" for name, value in self.metrics.items()]
        return [*(f"{name} {count}" for name, count in counts), *best]


def make_view(run: Run, before: SweepView | None, notes: Sequence[str]) -> SweepView:
    """The present view of the run."""
    if not run.list_events(SWEEPING):
        return SweepView.read(run, {}, notes, phase="starting", sweep=None, metrics={})
    sweep = load_sweep(run)
    num_ended = sum(each.state is not TrialState.RUNNING for each in sweep.trials)
    phase = "registering the best" if num_ended == sweep.num_trials else "sweeping"
    ranked = sweep.rank()
    best = {sweep.metric: ranked[0].get_score(sweep.metric)} if ranked else {}
    entry = run.read_queue_entry()
    seen = {} if entry is None else {WAITING: entry}
    return SweepView.read(run, seen, notes, phase=WAITING if seen else phase, sweep=sweep, metrics=best)


def render_record(run: Run) -> tuple[str, RenderableType] | None:
    """The trials as they stand, and how the best is used; None before the first."""
    if not run.list_events(SWEEPING):
        return None
    sweep = load_sweep(run)
    best = sweep.find_best()
    commands = [] if best is None else [Text(f"trial {best.number} is the best; to use it:", "dim")]
    commands += [] if best is None else [Text(f"  {each}") for each in list_best_commands(run, best)]
    return "Trials", Group(render_table(build_trial_table(sweep)), *commands)


def _count_states(sweep: Sweep) -> list[tuple[str, str]]:
    counts = Counter(each.state for each in sweep.trials)
    waiting = sweep.num_trials - len(sweep.trials)
    cells = [(state.value, str(counts[state])) for state in TrialState if counts[state]]
    return [*cells, ("waiting", str(waiting))] if waiting else cells
