"""The report of a run: one self-contained HTML page and one picture, for people.

Called by the verb `shoal report` and at the end of runs. Reads the run and writes two files into its folder; never
changes the record. The page omits everything that the run lacks.
"""

from __future__ import annotations

import base64
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shoal.atomic_file import create_private, make_folder
from shoal.errors import RunError, needs_extra
from shoal.extend.runs import (
    MEAN_RETURN,
    PANELS,
    RETURNS,
    VALIDATION,
    ReportPanels,
    Run,
    RunKind,
    Status,
    format_duration,
    format_metric,
    format_number,
    format_timestamp,
    format_value,
    is_higher_better,
    load,
    to_png,
    to_svg,
)
from shoal.libs.report import plots
from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions

if TYPE_CHECKING:
    from jinja2 import Template
    from pandas import DataFrame

PICTURES, FILMS = "pictures", "films"  # folders of a run's folder; of films the first, the middle and the last
MAX_SMALL_PLOTS = 12
MAX_EVENTS, MAX_VALUES = 200, 32
MAX_PICTURES, MAX_PICTURE_BYTES = 12, 4 << 20
MAX_UNFOLDED_LENGTH = 32  # letters of a name that stays on one line of a table

TRAINING_LOSS, VALIDATION_LOSS = "train/loss", f"{VALIDATION}loss"
# Shown elsewhere, not among the small plots.
SHOWN_ELSEWHERE = ("steps/total", "weights/version", "drops/", "segments/", "train/step", "train/epoch", "time/")


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


def write_page(run: Run) -> Path:
    """Write `report.html` and, if there is anything to draw, `learning_curve.png`; returns the path of the page.

    Raises RunError when the run's folder is not writable.
    """
    try:
        make_folder(run.folder)
        page = _template().render(_build_page(run))
        path = create_private(run.folder / "report.html")
        path.write_text(page, encoding="utf-8")
        return path
    except OSError as error:
        reason = error.strerror or str(error)
        raise RunError(f"the report of run {run.id!r} cannot be written to {run.folder}: {reason}") from error


@cache
def _template() -> Template:
    with needs_extra("report"):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": format_number,
        "duration": format_duration,
        "moment": format_timestamp,
        "brief": partial(format_value, most=MAX_VALUES),
        "kept_whole": lambda name: "whole" if len(name) <= MAX_UNFOLDED_LENGTH else "",  # a cell's class
    }
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

    @property
    def is_training(self) -> bool:
        """Whether it reports in batches, as training runs do: its plots are over steps."""
        return TRAINING_LOSS in self.metrics

    def make_curve(self, name: str, x: str | None = None) -> plots.Curve:
        """A metric over another column, or over the step; without points where the run lacks it."""
        if name not in self.metrics:
            return plots.Curve.from_points([], [])
        rows = self.metrics[self.metrics[name].notna()]
        return plots.Curve.from_points((rows.index if x is None else rows[x]).to_numpy(), rows[name].to_numpy())


def _build_page(run: Run) -> dict[str, object]:
    """Everything that the template uses."""
    num_versions = run.num_versions()
    versions = run.versions(every=-(-num_versions // plots.MAX_POINTS) or 1)
    panels, best, latest, metrics = find_panels(run.kind), run.best(), run.latest(), _sort_by_time(run.metrics())
    read = _ReportData(run, panels, best, latest, metrics, num_versions, versions, run.events())
    staleness = run.last_events().get("staleness", {})
    updates = {int(each): float(count) for each, count in staleness.get("counts", {}).items()}
    drops = {name.removeprefix("drops/"): count for name, count in latest.items() if name.startswith("drops/")}
    small = [
        [path for path in sorted((run.folder / name).glob(f"*.{kind}")) if path.stat().st_size <= MAX_PICTURE_BYTES]
        for name, kind in ((PICTURES, "png"), (FILMS, "webp"))
    ]
    films = [small[1][index] for index in sorted({0, len(small[1]) // 2, len(small[1]) - 1})] if small[1] else []
    return {
        "run": run,
        "status": run.status.value,
        "is_running": run.status is Status.RUNNING,
        "now": time.time(),
        "cards": _build_cards(read),
        "curve_name": best[0] if best else "",
        "curve": _render_learning_curve(read),
        "small_plots": _render_small_plots(read),
        "drawn_over": "steps" if read.is_training else "wall seconds",
        "drops": _build_bars(sorted(drops.items(), key=lambda drop: (-drop[1], drop[0]))),
        "pictures": [
            (each.stem, each.suffix[1:], base64.b64encode(each.read_bytes()).decode())
            for each in (*films, *small[0][:MAX_PICTURES])
        ],
        "sections": panels.sections(run),
        "updates": staleness,
        "staleness": _build_bars([(str(each), updates.get(each, 0.0)) for each in range(max(updates, default=-1) + 1)]),
        "accounting": compute_accounting(metrics),
        "num_versions": num_versions,
        **_render_versions(num_versions, versions),
        "table": _build_metric_rows(read),
        "models": run.models().to_dict("records"),
        "endpoints": run.endpoints(),
        "events": read.events.tail(MAX_EVENTS).to_dict("records"),
        "num_events": len(read.events),
    }


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
        label = "mean return" if name == MEAN_RETURN else name.removeprefix(VALIDATION)
        cards.append((format_number(value), f"best {label}"))
        registered = read.run.last_events().get("trained", {}).get("metrics", {}).get(label)
        shown, which = (read.latest[name], "newest") if registered is None else (registered, "registered")
        cards.append((format_number(shown), f"{which} {label}"))
    named = read.panels.cards.items()
    cards += [(format_metric(name, read.latest[name]), label) for name, label in named if name in read.latest]
    if read.num_versions and "weights/version" not in read.latest:
        cards.append((format_number(read.num_versions), "weight versions"))
    return cards


def _render_learning_curve(read: _ReportData) -> list[str]:
    """The markup of each panel of the learning curve, which also go into one picture; empty if nothing is drawn."""
    if read.best is None:
        return []
    panels = [panel for panel in _choose_panels(read, read.best[0]) if any(len(curve.x) for _, curve in panel.curves)]
    if not panels:
        return []
    together = plots.draw_curves(f"{read.run.title} · {read.run.id}", panels)
    create_private(read.run.folder / "learning_curve.png").write_bytes(to_png(together))
    return [to_svg(plots.draw_curves("", [panel])) for panel in panels]


def _choose_panels(read: _ReportData, metric: str) -> list[plots.Panel]:
    """Choose the losses and the metric of training, each mean return of several policies, or the metric alone."""
    if read.is_training:
        losses = [("training", read.make_curve(TRAINING_LOSS)), ("validation", read.make_curve(VALIDATION_LOSS))]
        panels = [plots.Panel("loss", "step", [(name, curve) for name, curve in losses if len(curve.x)])]
        if metric not in (TRAINING_LOSS, VALIDATION_LOSS):
            panels.append(plots.Panel(metric, "step", [(metric, read.make_curve(metric))]))
        return panels
    titles = read.panels.titles
    policies = [name for name in map(str, read.metrics) if name.startswith(RETURNS)]
    if policies and MEAN_RETURN not in policies:
        headings = [f"{titles[MEAN_RETURN]}: {name.removeprefix(RETURNS)}" for name in policies]
        curves = [[(name, read.make_curve(name))] for name in policies]
        return [
            plots.Panel(*each) for each in zip(headings, ["environment steps"] * len(policies), curves, strict=True)
        ]
    heading, more_is_better = titles.get(metric, metric), is_higher_better(metric)
    resumed = read.events.loc[read.events["kind"] == "resumed", "time"].tolist()
    rows = read.metrics[read.metrics[metric].notna()]
    has_steps = "steps/total" in rows and bool(rows["steps/total"].notna().any())
    label, x = ("environment steps", "steps/total") if has_steps else ("step", None)
    return [
        plots.Panel(heading, label, [(metric, read.make_curve(metric, x))], more_is_better),
        plots.Panel(heading, "wall time (s)", [(metric, read.make_curve(metric, "time"))], more_is_better, resumed),
    ]


def _render_small_plots(read: _ReportData) -> list[Plot]:
    """The known metrics in their order, then the rest by name."""
    hidden = {"time", read.best[0] if read.best else ""}
    hidden |= {TRAINING_LOSS, VALIDATION_LOSS} if read.is_training else set()
    prefixes, titles = (*SHOWN_ELSEWHERE, *read.panels.hidden), read.panels.titles
    names = [name for name in read.metrics.columns if name not in hidden and not name.startswith(prefixes)]
    order = {name: index for index, name in enumerate(titles)}
    names.sort(key=lambda name: (order.get(name, len(order)), name))
    x = read.metrics.index.to_series() if read.is_training else read.metrics["time"]
    begin, end = (float(x.min()), float(x.max())) if names else (0.0, 0.0)
    drawn: list[Plot] = []
    for name in names:
        curve = read.make_curve(name, None if read.is_training else "time")
        if len(curve.x) and len(drawn) < MAX_SMALL_PLOTS:
            svg = to_svg(plots.draw_small_plot(curve, begin, max(end, begin + 1)))
            drawn.append(Plot(name, titles.get(name, ""), svg, format_metric(name, _find_newest(read, name))))
    return drawn


def _find_newest(read: _ReportData, name: str) -> float:
    """The newest value of a metric, which may be non-finite, and so is not drawn."""
    return read.latest[name] if name in read.latest else float(read.metrics[name].dropna().iloc[-1])


def _build_bars(counts: Sequence[tuple[str, float]]) -> list[CountBar]:
    finite = [(name, count) for name, count in counts if math.isfinite(count)]
    most = max((count for _, count in finite), default=0.0) or 1.0
    return [CountBar(name, format_number(count), 100 * count / most) for name, count in finite]


def _render_versions(num_versions: int, versions: DataFrame) -> dict[str, object]:
    """A plot of the versions over time, and how many there were a second between the first and the last."""
    if len(versions) < 2:
        return {"versions": "", "versions_per_s": None}
    curve = plots.Curve.from_points(versions["time"].to_numpy(), versions["version"].to_numpy())
    span_s = float(versions["time"].max() - versions["time"].min())
    rate = (num_versions - 1) / span_s if span_s > 0 else None
    return {"versions": to_svg(plots.draw_wide_plot(curve)), "versions_per_s": rate}


def _build_metric_rows(read: _ReportData) -> list[tuple[str, str, str, str]]:
    """(name, newest, lowest, highest) of every metric; without extremes for one that was never a number."""
    rows = []
    for name in read.metrics.columns:
        if name == "time" or name.startswith(read.panels.hidden):
            continue
        column = read.metrics[name].dropna()
        extremes = tuple(format_metric(name, each) for each in (column.min(), column.max())) if len(column) else "--"
        rows.append((name, format_metric(name, _find_newest(read, name)), *extremes))
    return rows


COMMON = ReportPanels(
    titles={
        MEAN_RETURN: "Mean return, last 100 episodes",
        "return/best_actions": "Mean return by best actions",
        "episode/return_std": "Spread of returns (standard deviation)",
        "episode/length": "Mean length of episodes (steps)",
        "episode/success_rate": "Share of episodes that reached their goal",
        "steps/per_s": "Environment steps a second",
        "learner/loss": "Learner loss",
        "learner/entropy": "Policy entropy",
        "learner/policy_lag": "Policy lag (versions)",
        "learner/clip_fraction": "Share of clipped steps",
        "learner/rho_clip_fraction": "Share of clipped importance weights",
        "learner/explained_variance": "Variance of returns that the value explains",
        "learner/q_value": "Mean of the values Q",
        "learner/td_error": "Error of the values Q",
        "learner/temperature": "Temperature of the policy",
        "learner/demonstration_weight": "Weight of demonstrations in the loss",
        "learner/demonstration_share": "Share of demonstrations in a sample",
        "learner/cloning_loss": "Cross entropy of what was shown",
        "queue/depth": "Queue depth (segments)",
        "endpoint/requests_per_s": "Endpoint requests a second",
        "train/loss": "Training loss",
        "train/learning_rate": "Learning rate",
        "samples/per_s": "Samples a second",
        "wait/data": "Share of time waiting for data",
        "wait/communication": "Share of time communicating",
        "flops/utilisation": "Share of the device's peak FLOP/s",
        "step/seconds": "Seconds a step",
        "steps/total": "Environment steps",
        "weights/version": "Weight version",
    },
    cards={
        "episode/success_rate": "success rate",
        "episode/length": "steps an episode",
        "steps/total": "environment steps",
        "steps/per_s": "steps a second",
        "weights/version": "weight version",
        "learner/policy_lag": "policy lag",
        "endpoint/requests_per_s": "requests a second",
        "train/step": "training steps",
        "train/epoch": "epochs",
        "samples/per_s": "samples a second",
        "wait/data": "waiting for data",
        "wait/communication": "waiting for peers",
    },
)


def find_panels(kind: RunKind) -> ReportPanels:
    """Those of every run, and those of the kind. Raises ValueError where the kind's cannot be imported."""
    reference = collect_extensions(PANELS).get(kind)
    if reference is None:
        return COMMON
    own: ReportPanels = load_reference(reference)
    return ReportPanels({**COMMON.titles, **own.titles}, {**COMMON.cards, **own.cards}, own.hidden, own.sections)


@click.command()
@click.argument("run", default="latest")
@click.option("--open-path", is_flag=True, help="Print the path of the page and nothing else, to hand to a browser.")
def report(run: str, open_path: bool) -> None:
    """Write the one-page HTML report of a RUN (the newest when left out), with its learning curve as a picture.

    \b
    Examples:
      shoal report
      shoal report 20261120-064501-3f2a
      xdg-open "$(shoal report latest --open-path)"
    """
    record = load(run)
    path = write_page(record)
    if open_path:
        click.echo(path)
        return
    click.echo(f"The report of {record.id} ({record.status.value}): {path}")
    picture = path.with_name("learning_curve.png")
    if picture.exists():
        click.echo(f"Its learning curve: {picture}")
