"""The report of a run: one self-contained HTML page and one picture, for people.

Called by the CLI and at the end of jobs. Reads the run and writes two files into its folder; never changes the record.
The page omits everything that the run lacks.
"""

from __future__ import annotations

import base64
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.atomic_file import create_private, make_folder
from shoal.errors import RunError, needs_extra
from shoal.runs.formatting import format_duration, format_number, format_timestamp, format_value
from shoal.runs.report import plots
from shoal.runs.report.panels import ReportPanels, find_panels
from shoal.runs.run_reader import MEAN_RETURN, RETURNS, VALIDATION, Run, is_higher_better, load
from shoal.runs.run_status import Status

if TYPE_CHECKING:
    from jinja2 import Template
    from matplotlib.figure import Figure
    from pandas import DataFrame, Series

_log = logging.getLogger(__name__)
PICTURES = "pictures"  # a folder of a run's folder
MAX_SMALL_PLOTS = 12
MAX_EVENTS, MAX_VALUES = 200, 32
MAX_PICTURES, MAX_PICTURE_BYTES = 12, 4 << 20
MAX_UNFOLDED_LENGTH = 32  # letters of a name that stays on one line of a table

_SHORT_NAMES = {MEAN_RETURN: "mean return"}
_SHARES = ("wait/", "flops/")  # of the time, or of a peak: shown as percentages
TRAINING_LOSS, _HELD = "train/loss", f"{VALIDATION}loss"
# Shown elsewhere, not among the small plots.
_ELSEWHERE = ("steps/total", "weights/version", "drops/", "segments/", "train/step", "train/epoch", "time/")


@dataclass(frozen=True)
class Plot:
    """A small plot; `svg` is markup, `latest` the newest value."""

    name: str
    label: str
    svg: str
    latest: str


@dataclass(frozen=True)
class CountBar:
    """One of several counts; `percent` of the largest, for its bar."""

    name: str
    count: str
    percent: float


@dataclass(frozen=True)
class Accounting:
    """Where the received segments went, from one row of the record."""

    received: int
    consumed: int
    queued: int
    dropped: int

    @property
    def missing(self) -> int:
        """Received segments that were neither consumed nor queued nor dropped: 0 when the accounting holds."""
        return self.received - self.consumed - self.queued - self.dropped


def write_report_at_end(run_id: str) -> None:
    """Write the report of an ended run. A failure is logged and ends nothing else."""
    try:
        write_report(load(run_id))
    except Exception as error:  # noqa: BLE001 - whatever drawing raises: the run has ended as its record says
        problem = f"the report of run {run_id} could not be written: {type(error).__name__}: {error}"
        _log.warning("%s. Try again with `shoal report %s`", problem, run_id)


def write_report(run: Run) -> Path:
    """Write `report.html` and, if there is anything to draw, `learning_curve.png`; returns the path of the page.

    Raises RunError when the run's folder is not writable.
    """
    try:
        return _render_report(run)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"the report of run {run.id!r} cannot be written to {run.folder}: {reason}") from error


def _render_report(run: Run) -> Path:
    folder = run.folder
    make_folder(folder)
    page = _template().render(_build_page(run))
    path = create_private(folder / "report.html")
    path.write_text(page, encoding="utf-8")
    return path


@cache
def _template() -> Template:
    with needs_extra("report"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {
        "number": format_number,
        "duration": format_duration,
        "moment": format_timestamp,
        "kept_whole": _choose_cell_class,
    }
    environment.filters["brief"] = partial(format_value, most=MAX_VALUES)
    return environment.get_template("report.html")


@dataclass(frozen=True)
class _ReportData:
    """The record, read once. Values read last have every name that was read first, also while the run goes on."""

    run: Run
    panels: ReportPanels
    best: tuple[str, float] | None
    latest: dict[str, float]
    metrics: DataFrame  # oldest first: a resumed run may log lower steps than before
    num_versions: int
    versions: DataFrame  # a sample when there are many
    events: DataFrame

    @classmethod
    def from_run(cls, run: Run) -> _ReportData:
        num_versions = run.num_versions()
        versions = run.versions(every=-(-num_versions // plots.MAX_POINTS) or 1)
        return cls(
            run,
            find_panels(run.kind),
            run.best(),
            run.latest(),
            _sort_by_time(run.metrics()),
            num_versions,
            versions,
            run.events(),
        )


def _build_page(run: Run) -> dict[str, object]:
    """Everything that the template uses."""
    read = _ReportData.from_run(run)
    return {
        "run": run,
        "status": run.status.value,
        "is_running": run.status is Status.RUNNING,
        "now": time.time(),
        "cards": _build_cards(read),
        "curve_name": read.best[0] if read.best else "",
        "curve": _render_learning_curve(read),
        "small_plots": _render_small_plots(read),
        "drawn_over": "steps" if TRAINING_LOSS in read.metrics else "wall seconds",
        "drops": _build_drop_bars(read.latest),
        "pictures": _read_pictures(run.folder / PICTURES),
        "sections": read.panels.sections(run),
        "updates": read.run.last_events().get("staleness", {}),
        "staleness": _build_staleness_bars(read.run.last_events().get("staleness", {})),
        "accounting": compute_accounting(read.metrics),
        "num_versions": read.num_versions,
        "versions": _render_versions_plot(read.versions),
        "versions_per_s": _compute_version_rate(read.num_versions, read.versions),
        "table": _build_metric_rows(read),
        "models": run.models().to_dict("records"),
        "endpoints": run.endpoints(),
        "events": read.events.tail(MAX_EVENTS).to_dict("records"),
        "num_events": len(read.events),
    }


def _read_pictures(folder: Path) -> list[tuple[str, str]]:
    """(name, base64) of the first PNG files of the folder, by name, without those that would make the page heavy."""
    paths = [path for path in sorted(folder.glob("*.png")) if path.stat().st_size <= MAX_PICTURE_BYTES]
    return [(path.stem, base64.b64encode(path.read_bytes()).decode()) for path in paths[:MAX_PICTURES]]


def _choose_cell_class(name: str) -> str:
    """The CSS class of a name's cell: long names are folded."""
    return "whole" if len(name) <= MAX_UNFOLDED_LENGTH else ""


def compute_accounting(metrics: DataFrame) -> Accounting | None:
    """The newest row, by time, with all four counts of segments; None if there is none."""
    columns = [f"segments/{part}" for part in ("received", "consumed", "queued", "dropped")]
    if not set(columns) <= set(metrics.columns):
        return None
    complete = _sort_by_time(metrics)[columns].dropna()
    return Accounting(*(int(value) for value in complete.iloc[-1])) if len(complete) else None


def _sort_by_time(metrics: DataFrame) -> DataFrame:
    """Rows in logged order: in a resumed run the newest need not have the highest step."""
    return metrics.sort_values("time", kind="stable")


def _build_cards(read: _ReportData) -> list[tuple[str, str]]:
    """(value, label) of the headline numbers."""
    cards = [(format_duration(read.run.duration_s), "wall time")]
    if read.best is not None:
        name, value = read.best
        called = _SHORT_NAMES.get(name, name.removeprefix(VALIDATION))
        cards.append((format_number(value), f"best {called}"))
        cards.append((format_number(read.latest[name]), f"newest {called}"))
    cards += [
        (_format_metric(name, read.latest[name]), label)
        for name, label in read.panels.cards.items()
        if name in read.latest
    ]
    if read.num_versions and "weights/version" not in read.latest:
        cards.append((format_number(read.num_versions), "weight versions"))
    return cards


def _format_metric(name: str, value: float) -> str:
    return f"{100 * value:.3g}%" if name.startswith(_SHARES) and math.isfinite(value) else format_number(value)


def _render_learning_curve(read: _ReportData) -> list[str]:
    """The markup of each panel of the learning curve, which also go into one picture; empty if nothing is drawn."""
    if read.best is None:
        return []
    policies = [name for name in map(str, read.metrics) if name.startswith(RETURNS) and name != MEAN_RETURN]
    drawn = (
        _draw_training_curves(read, read.best[0])
        if TRAINING_LOSS in read.metrics
        else _draw_returns(read, policies)
        if policies
        else _draw_headline_curves(read, read.best[0])
    )
    if not drawn:
        return []
    *each, whole = drawn
    create_private(read.run.folder / "learning_curve.png").write_bytes(plots.to_png(whole))
    return [plots.to_svg(figure) for figure in each]


def _draw_headline_curves(read: _ReportData, name: str) -> list[Figure]:
    """The headline metric over each way of counting progress: one figure each, then all in one."""
    rows = read.metrics[read.metrics[name].notna()]
    has_steps = "steps/total" in rows and rows["steps/total"].notna().any()
    steps = ("environment steps", rows["steps/total"]) if has_steps else ("step", rows.index)
    progress = (steps, ("wall time (s)", rows["time"]))
    panels = [(label, plots.Curve.from_points(x.to_numpy(), rows[name].to_numpy())) for label, x in progress]
    panels = [(label, curve) for label, curve in panels if len(curve.x)]
    if not panels:
        return []
    resumed = read.events.loc[read.events["kind"] == "resumed", "time"].tolist()
    draw = partial(
        plots.draw_learning_curve, metric=read.panels.titles.get(name, name), more_is_better=is_higher_better(name)
    )
    alone = [draw("", panels=[panel], marks_s=resumed if panel is panels[-1] else []) for panel in panels]
    return [*alone, draw(_title(read.run), panels=panels, marks_s=resumed)]


def _draw_returns(read: _ReportData, names: Sequence[str]) -> list[Figure]:
    """The mean return of each policy of a run over environment steps."""
    headings = [f"{read.panels.titles[MEAN_RETURN]}: {name.removeprefix(RETURNS)}" for name in names]
    panels = [
        plots.Panel(heading, "environment steps", [(name, _make_step_curve(read, name))])
        for heading, name in zip(headings, names, strict=True)
    ]
    return _draw_panels(read.run, panels)


def _draw_training_curves(read: _ReportData, metric: str) -> list[Figure]:
    """The training and validation loss, and the headline metric."""
    losses = [
        (word, _make_step_curve(read, name)) for word, name in (("training", TRAINING_LOSS), ("validation", _HELD))
    ]
    panels = [plots.Panel("loss", "step", [(word, curve) for word, curve in losses if len(curve.x)])]
    if metric not in (TRAINING_LOSS, _HELD):
        panels.append(plots.Panel(metric, "step", [(metric, _make_step_curve(read, metric))]))
    return _draw_panels(read.run, panels)


def _draw_panels(run: Run, panels: Sequence[plots.Panel]) -> list[Figure]:
    """One figure for each panel that has a point, then all in one."""
    drawn = [panel for panel in panels if any(len(curve.x) for _, curve in panel.curves)]
    together = [plots.draw_training_curves(_title(run), drawn)] if drawn else []
    return [*(plots.draw_training_curves("", [panel]) for panel in drawn), *together]


def _title(run: Run) -> str:
    return f"{run.title} · {run.id}"


def _make_step_curve(read: _ReportData, name: str) -> plots.Curve:
    column = read.metrics[name].dropna() if name in read.metrics else read.metrics["time"][:0]
    return plots.Curve.from_points(column.index.to_numpy(), column.to_numpy())


def _render_small_plots(read: _ReportData) -> list[Plot]:
    """The known metrics in their order, then the rest by name."""
    hidden = {"time", read.best[0] if read.best else ""}
    hidden |= {TRAINING_LOSS, _HELD} if TRAINING_LOSS in read.metrics else set()
    names = [
        name
        for name in read.metrics.columns
        if name not in hidden and not name.startswith((*_ELSEWHERE, *read.panels.hidden))
    ]
    order = list(read.panels.titles)
    names.sort(key=lambda name: (order.index(name) if name in order else len(order), name))
    places = _get_x_values(read)
    begin, end = (float(places.min()), float(places.max())) if names else (0.0, 0.0)
    made: list[Plot] = []
    for name in names:
        column = read.metrics[name].dropna()
        curve = plots.Curve.from_points(places.loc[column.index].to_numpy(), column.to_numpy())
        if len(curve.x) and len(made) < MAX_SMALL_PLOTS:
            picture = plots.to_svg(plots.draw_small_plot(curve, begin, max(end, begin + 1)))
            newest = read.latest.get(name, float(column.iloc[-1]))  # may be non-finite, and so not drawn
            made.append(Plot(name, read.panels.titles.get(name, ""), picture, _format_metric(name, newest)))
    return made


def _get_x_values(read: _ReportData) -> Series[Any]:
    """The x axis of the small plots: seconds, or for training runs, which report in batches, the steps."""
    return read.metrics.index.to_series() if TRAINING_LOSS in read.metrics else read.metrics["time"]


def _build_drop_bars(latest: Mapping[str, float]) -> list[CountBar]:
    counts = {name.removeprefix("drops/"): value for name, value in latest.items() if name.startswith("drops/")}
    finite = {reason: count for reason, count in counts.items() if math.isfinite(count)}
    return _build_bars(sorted(finite.items(), key=lambda item: (-item[1], item[0])))


def _build_staleness_bars(event: Mapping[str, Any]) -> list[CountBar]:
    """How often each τ was seen, of an asynchronous training run."""
    counts = {int(staleness): float(count) for staleness, count in event.get("counts", {}).items()}
    return _build_bars(
        [(str(staleness), counts.get(staleness, 0.0)) for staleness in range(max(counts, default=-1) + 1)]
    )


def _build_bars(counts: Sequence[tuple[str, float]]) -> list[CountBar]:
    most = max((count for _, count in counts), default=0.0) or 1.0
    return [CountBar(name, format_number(count), 100 * count / most) for name, count in counts]


def _render_versions_plot(versions: DataFrame) -> str:
    if len(versions) < 2:
        return ""
    return plots.to_svg(
        plots.draw_wide_plot(plots.Curve.from_points(versions["time"].to_numpy(), versions["version"].to_numpy()))
    )


def _compute_version_rate(num_versions: int, versions: DataFrame) -> float | None:
    """Versions a second between the first and the last."""
    if len(versions) < 2:
        return None
    span_s = float(versions["time"].max() - versions["time"].min())
    return (num_versions - 1) / span_s if span_s > 0 else None


def _build_metric_rows(read: _ReportData) -> Sequence[tuple[str, str, str, str]]:
    """(name, newest, lowest, highest) of every metric; without extremes for one that was never a number."""
    columns = {
        name: read.metrics[name].dropna()
        for name in read.metrics.columns
        if name != "time" and not name.startswith(read.panels.hidden)
    }
    rows = []
    for name, column in columns.items():
        newest = read.latest[name] if name in read.latest else float(column.iloc[-1])
        extremes = (format_number(column.min()), format_number(column.max())) if len(column) else ("-", "-")
        rows.append((name, format_number(newest), *extremes))
    return rows
