"""The display of a running population: its progress, and a table of its members with score, values and lineage.

Reads only the run record. Called by `run_view`. `PopulationView` is the data; `render` and `format_plain_line` are pure
functions of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Column
from rich.text import Text

from shoal.cli.display.rl_display import MAX_HISTORY, Sparkline
from shoal.cli.display.step_view import StepView
from shoal.cli.support.console import make_number_column, make_table, render_line, render_run_panel
from shoal.runs import Run
from shoal.runs.formatting import format_duration, format_number
from shoal.runs.report.event_messages import format_warning

MAX_ROWS = 15  # members in the table: the best ones
EVOLVING = "evolving"


@dataclass(frozen=True)
class PopulationView(StepView):
    """One moment of a population run.

    setting: the details of its event `population`: members, rounds, metric, ...
    engine:  those of `engine`: name, chunk
    last:    the details of its newest event `round`: round, scores, hyper_parameters, ancestors, ...
    history: the best score of each round, oldest first, all finite
    """

    last: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    history: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def remaining_s(self) -> float:
        """Seconds to the last step at the present speed; NaN when unknown."""
        speed = self.value("population/member_steps_per_s")
        if self.phase != EVOLVING or not self.setting or not speed > 0:
            return math.nan
        num_members: int = self.setting["members"]
        missing: float = self.setting["total_steps"] - self.value("train/step")
        return missing * num_members / speed

    def rank_members(self) -> list[int]:
        """The members of the last round, best first; those without a finite score last."""
        sign = -1.0 if self.setting.get("is_higher_better", True) else 1.0
        scores = self.last.get("scores", [])
        return sorted(range(len(scores)), key=lambda member: _sort_key(scores[member], sign))

    def render(self) -> RenderableType:
        """The picture for a terminal."""
        parts: list[RenderableType] = [_render_progress(self), _render_best(self)]
        if self.setting:
            setting, engine = self.setting, self.engine
            members = f"{setting['members']} of {setting['parameters']:,} parameters"
            by = f"{engine['name']}, up to {engine['chunk']} at once, " if engine else ""
            parts.append(Text.assemble(("members   ", "dim"), f"{members}: {by}on {setting['device']}"))
        if self.last:
            parts.append(_render_members(self))
        return render_run_panel(self.run_id, self.phase, self.elapsed_s, parts, self.notes)

    def format_plain_line(self) -> str:
        """One line for a log file."""
        at = f"[{self.elapsed_s:5.1f} s] {self.phase}"
        if not math.isfinite(self.value("train/step")):
            return at
        parts = [f"step {self.value('train/step'):,.0f}"]
        if self.last:
            name, best = self.setting["metric"], self.rank_members()[0]
            score = format_score(self.last["scores"][best])
            parts += [
                f"round {self.last['round']} of {self.setting['rounds']}",
                f"best {name} {score} of member {best}",
            ]
            parts += [f"{_shorten(path)} {format_score(values[best])}" for path, values in _get_values(self).items()]
        if math.isfinite(speed := self.value("population/member_steps_per_s")):
            parts.append(f"{speed:,.0f} member-steps/s")
        if math.isfinite(self.remaining_s):
            parts.append(f"{format_duration(self.remaining_s)} to go")
        return f"{at}: {', '.join(parts)}"


def _sort_key(score: float | None, sign: float) -> float:
    return sign * score if score is not None and math.isfinite(score) else math.inf


def make_view(run: Run, before: PopulationView | None, notes: Sequence[str]) -> PopulationView:
    """The present view of the run; `before` supplies the history."""
    metrics, seen = run.latest(since_resumed=True), run.last_events(since_resumed=True)
    setting, last = seen.get("population", {}), seen.get("round", {})
    history = before.history if before is not None else ()
    best = metrics.get(f"validation/{setting.get('metric')}", math.nan)
    is_new = before is None or before.last.get("round") != last.get("round")
    if last and is_new and math.isfinite(best):
        history = (*history, best)[-MAX_HISTORY:]
    shown = (*notes, *filter(None, (format_warning(*event) for event in seen.items())))
    elapsed_s = time.time() - run.last_started_at()
    engine = seen.get("engine", {})
    return PopulationView(run.id, _infer_phase(seen), elapsed_s, metrics, setting, last, engine, history, shown)


def _infer_phase(seen: Mapping[str, Mapping[str, Any]]) -> str:
    for kind, phase in (("trained", "writing the report"), ("evolved", "registering"), ("engine", EVOLVING)):
        if kind in seen:
            return phase
    return "choosing an engine"


def _render_progress(view: PopulationView) -> RenderableType:
    round_number = view.last.get("round", 0)
    cells: list[RenderableType] = [Text.assemble(("round     ", "dim"), (f"{round_number:>6}", "bold"))]
    if math.isfinite(view.progress):
        cells += [
            ProgressBar(total=1.0, completed=view.progress, width=16),
            Text(f"of {view.setting['rounds']}", "dim"),
        ]
    if math.isfinite(speed := view.value("population/member_steps_per_s")):
        cells.append(Text(f"{speed:,.0f} member-steps/s", "dim"))
    if math.isfinite(view.remaining_s):
        cells.append(Text(f"{format_duration(view.remaining_s)} to go", "dim"))
    return render_line(*cells)


def _render_best(view: PopulationView) -> RenderableType:
    score = format_score(view.history[-1]) if view.history else "-"
    label = Text.assemble(("best      ", "dim"), (f"{score:>6}", "bold green"))
    return render_line(label, Sparkline(view.history, min(view.history, default=0.0)))


def _render_members(view: PopulationView) -> RenderableType:
    """A row for each of the best members."""
    values = _get_values(view)
    columns = [make_number_column(_shorten(path)) for path in values]
    metric = make_number_column(view.setting["metric"])
    table = make_table(make_number_column("member"), metric, *columns, Column("copied", overflow="fold"))
    ranked = view.rank_members()
    for member in ranked[:MAX_ROWS]:
        cells = [format_score(each[member]) for each in values.values()]
        score = Text(format_score(view.last["scores"][member]), "bold" if member == ranked[0] else "")
        table.add_row(str(member), score, *cells, _format_lineage(view.last["ancestors"][member]))
    if len(ranked) > MAX_ROWS:
        table.add_row("", f"and {len(ranked) - MAX_ROWS} more")
    return table


def _get_values(view: PopulationView) -> dict[str, list[float]]:
    values: dict[str, list[float]] = view.last["hyper_parameters"]
    return values


def _shorten(path: str) -> str:
    return path.rpartition(".")[2].replace("_", " ")


def _format_lineage(ancestors: Sequence[Sequence[int]]) -> Text:
    """`11 in round 3, 5 in round 6`: whom it copied, the last ones when there are many."""
    shown = [
        f"{source if source >= 0 else 'new weights'} in round {round_number}" for round_number, source in ancestors[-2:]
    ]
    return Text(", ".join(shown) if shown else "first generation", "dim")


def format_score(value: float | None) -> str:
    """A score or a hyper-parameter; `-` for a member without one."""
    return "-" if value is None or not isinstance(value, int | float) else format_number(value)
