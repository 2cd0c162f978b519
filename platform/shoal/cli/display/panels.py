"""One moment of a run, and the panels that it is drawn from: a picture on a terminal, one plain line elsewhere.

`RunView` has what every kind of run shows: frame, notes, phase, progress. A display of a kind derives from it, lists
its panels and its facts, and reads both from the run record alone. Called by the displays.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Column, Table
from rich.text import Text

from shoal.cli.support.console import make_number_column, make_table
from shoal.runs import Run
from shoal.runs.event_messages import format_warning
from shoal.runs.formatting import format_duration, format_number
from shoal.runs.panels import Panel as Drawn

MAX_HISTORY, MAX_BARS = 120, 40
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, kw_only=True)
class RunView:
    """One moment of a run.

    metrics: the newest values of this attempt of the run
    setting: the details of the event that began it, with total_steps where its end is known
    history: the newest values of what the run is judged by, oldest first, all finite
    notes:   what a user must know
    """

    working_phase: ClassVar[str] = ""  # in which steps are made

    run_id: str
    phase: str
    elapsed_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    setting: Mapping[str, Any] = field(default_factory=dict)
    history: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @classmethod
    def read(cls, run: Run, seen: Mapping[str, Mapping[str, Any]], notes: Sequence[str], **fields: Any) -> Self:
        """The present moment, with the warnings of the events that were seen."""
        if "metrics" not in fields:
            fields["metrics"] = run.latest(since_resumed=True)
        warnings = tuple(filter(None, (format_warning(*event) for event in seen.items())))
        elapsed_s = time.time() - run.last_started_at()
        return cls(run_id=run.id, elapsed_s=elapsed_s, notes=(*notes, *warnings), **fields)

    def list_panels(self) -> Iterable[RenderableType]:
        """The lines and tables of the picture, from top to bottom."""
        raise NotImplementedError

    def list_facts(self) -> list[str]:
        """The parts of the plain line after the phase."""
        raise NotImplementedError

    def render(self) -> Panel:
        """The picture for a terminal."""
        title = f"[bold]{self.run_id}[/]  {self.phase}  [dim]{self.elapsed_s:.0f} s[/]"
        lines = Group(*self.list_panels(), *(Text(note, style="yellow") for note in self.notes))
        return Panel(lines, title=title, title_align="left", border_style="cyan", padding=(0, 1))

    def format_plain_line(self) -> str:
        """One line for a log file."""
        facts = ", ".join(self.list_facts())
        return f"[{self.elapsed_s:5.1f} s] {self.phase}" + (f": {facts}" if facts else "")

    def value(self, name: str) -> float:
        """The newest value of a metric; NaN when there is none."""
        return self.metrics.get(name, math.nan)

    def get_group(self, prefix: str) -> dict[str, float]:
        """Metrics under `prefix/`, without it."""
        return {name[len(prefix) + 1 :]: v for name, v in self.metrics.items() if name.startswith(prefix + "/")}

    @property
    def progress(self) -> float:
        """The finished share of the run, from 0 to 1; NaN when its end is unknown."""
        total, step = self.setting.get("total_steps"), self.value("train/step")
        return min(step / total, 1.0) if total else math.nan  # in this order: NaN before the first report

    @property
    def step_s(self) -> float:
        """Seconds of a step; NaN when unknown."""
        return self.value("step/seconds")

    @property
    def remaining_s(self) -> float:
        """Seconds to the last step at the present speed; NaN when unknown, and after the last step."""
        total = self.setting.get("total_steps")
        if self.phase != self.working_phase or not total:
            return math.nan
        return max(0.0, float(total) - self.value("train/step")) * self.step_s

    @property
    def time_to_go(self) -> list[str]:
        """`3 min 20 s to go`, where it is known."""
        return [f"{format_duration(self.remaining_s)} to go"] if math.isfinite(self.remaining_s) else []

    def render_progress(self, label: str, at: str, end: str, about: Iterable[str], width: int) -> Table:
        """The position of a run with a known end, as a number and as a bar, and how long it takes."""
        cells: list[RenderableType] = []
        if math.isfinite(self.progress):
            cells = [ProgressBar(total=1.0, completed=self.progress, width=width), Text(f"of {end}", "dim")]
        return render_headline(label, at, "bold", *cells, *(Text(each, "dim") for each in (*about, *self.time_to_go)))

    def render_history(self, label: str, newest: str, style: str) -> Table:
        """The newest value of what the run is judged by, and its curve."""
        return render_headline(label, newest, style, Sparkline(self.history, min(self.history, default=0.0)))


def extend_history(before: RunView | None, value: float, *, has_repeats: bool = False) -> tuple[float, ...]:
    """The history of the last view, and the value where it is finite, and another than the last one."""
    history = before.history if before is not None else ()
    is_new = math.isfinite(value) and (has_repeats or history[-1:] != (value,))
    return (*history, value)[-MAX_HISTORY:] if is_new else history


def find_phase(seen: Iterable[str], phases: Mapping[str, str], otherwise: str) -> str:
    """The phase of the first kind of event in `phases` that was seen."""
    kinds = set(seen)
    return next((phase for kind, phase in phases.items() if kind in kinds), otherwise)


def render_fact(label: str, *parts: str | tuple[str, str]) -> Text:
    """A line of text after its label."""
    return Text.assemble((f"{label:<10}", "dim"), *parts)


def render_headline(label: str, value: str, style: str, *cells: RenderableType) -> Table:
    """A line with a number after its label, and further cells."""
    return render_line(render_fact(label, (f"{value:>6}", style)), *cells)


def render_line(*cells: RenderableType) -> Table:
    """One line: its first cell, a number, is not cut."""
    line = Table.grid(Column(no_wrap=True), padding=(0, 1))
    line.add_row(*cells)
    return line


def render_cells(cells: Iterable[tuple[str, str]]) -> Columns:
    """Names and values side by side, in several rows where the terminal is narrow."""
    texts = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in cells]
    return Columns(texts, padding=(0, 3, 0, 0))


TONES = {"good": "green", "warn": "yellow", "bad": "red", "busy": "cyan", "muted": "dim", "best": "bold green"}
_NUMBER = re.compile(r"-?[\d.,]+(e[-+]?\d+)?%?|-|∞|not a number|")


def render_counts(panel: Drawn) -> Text:
    """The counts of a panel in a line: names and values."""
    words = [((f"{each.name} ", "dim"), (f"{each.text}  ", TONES.get(each.tone, "bold"))) for each in panel.counts]
    note = f"{panel.note} " if panel.note else ""
    return render_fact(panel.title, note, *(word for pair in words for word in pair))


def render_table(panel: Drawn, max_rows: int | None = None) -> Table:
    """The table of a panel. Numbers stand below each other."""
    columns = []
    for index, heading in enumerate(panel.header):
        cells = [each[index] for each in panel.rows if index < len(each)]
        is_number = all(_NUMBER.fullmatch(each if isinstance(each, str) else each[0]) for each in cells)
        columns.append(make_number_column(heading) if is_number else Column(heading, overflow="fold"))
    rows = [
        [each if isinstance(each, str) else Text(each[0], TONES.get(each[1], "")) for each in row]
        for row in panel.rows[:max_rows]
    ]
    if (num_hidden := len(panel.rows) - len(rows)) > 0:
        rows.append(["", Text(f"and {num_hidden:,} more", "dim")])
    return make_table(*columns, rows=rows)


def format_or_dash(value: float) -> str:
    """A number, or a dash for an unknown one."""
    return format_number(value) if math.isfinite(value) else "-"


def format_sparkline(values: Sequence[float], width: int, low: float | None = None, high: float | None = None) -> str:
    """Finite `values`, oldest first, as bars between `low` and `high`.

    When None, `low` is the lowest value, or 0 when there is none below; `high` is the highest value.
    """
    if not values:
        return ""
    step = max(1, math.ceil(len(values) / width))
    shown = [max(values[start : start + step]) for start in range(0, len(values), step)]
    low = min(0.0, *values) if low is None else low
    top = max(high if high is not None else max(shown), low + 1e-9)
    return "".join(_BARS[round(min(1.0, max(0.0, (v - low) / (top - low))) * (len(_BARS) - 1))] for v in shown)


@dataclass(frozen=True)
class Sparkline:
    """A sparkline of all values, as wide as possible; the fields are the arguments of `format_sparkline`."""

    values: tuple[float, ...]
    low: float | None = None
    high: float | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(format_sparkline(self.values, min(MAX_BARS, options.max_width), self.low, self.high), "green")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(1, min(MAX_BARS, options.max_width))
