"""The display of a running actor-learner run: one picture on a terminal, plain lines elsewhere.

Reads only the run record, so it shows the same for a run of this process, of another, or of yesterday. Called by
`run_view`. `LoopView` is the data, which draws itself.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import yaml
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.text import Text

from shoal.cli.support.console import render_cells, render_line, render_run_panel
from shoal.runs import Run
from shoal.runs.report.event_messages import format_warning
from shoal.wire import DropReason

MAX_HISTORY, MAX_BARS = 120, 40
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class LoopView:
    """One moment of a run.

    metrics: the newest values of this attempt of the run
    history: the newest mean returns, oldest first, all finite
    lowest:  the lowest mean return seen
    """

    run_id: str
    phase: str
    elapsed_s: float
    target_return: float | None
    metrics: dict[str, float] = field(default_factory=dict)
    history: tuple[float, ...] = ()
    lowest: float = math.inf
    endpoint: str = ""
    gateway: str = ""
    notes: tuple[str, ...] = ()

    def value(self, name: str) -> float:
        return self.metrics.get(name, math.nan)

    def get_group(self, prefix: str) -> dict[str, float]:
        """Metrics under `prefix/`, without it."""
        return {name[len(prefix) + 1 :]: v for name, v in self.metrics.items() if name.startswith(prefix + "/")}

    @property
    def drops(self) -> dict[str, float]:
        """Segments by the reason of their drop, without those that were queued when the run ended: that is no
        problem."""
        dropped = self.get_group("drops").items()
        return {reason: count for reason, count in dropped if count and reason != DropReason.SHUTDOWN}

    @property
    def rejections(self) -> dict[str, float]:
        """Segments and messages that were rejected, by actor and reason; most first."""
        return dict(sorted(self.get_group("rejected").items(), key=lambda each: -each[1]))

    def render(self) -> RenderableType:
        """The picture for a terminal."""
        parts: list[RenderableType] = [_render_return(self), _render_numbers(self)]
        lags = self.get_group("actor_lag")
        if lags:
            parts.append(_render_actors(self, lags))
        if won := self.get_group("win_rate"):
            rates = "  ".join(f"{name} {rate:.0%}" for name, rate in sort_opponents(won))
            parts.append(Text.assemble(("won       ", "dim"), rates))
        dropped = ", ".join(f"{reason} {count:,.0f}" for reason, count in sorted(self.drops.items())) or "none"
        parts.append(Text.assemble(("drops     ", "dim"), dropped))
        if self.rejections:
            rejected = "  ".join(f"{name} {count:,.0f}" for name, count in self.rejections.items())
            parts.append(Text.assemble(("rejected  ", "dim"), (rejected, "red")))
        if self.endpoint:
            parts.append(
                Text.assemble(("endpoint  ", "dim"), self.endpoint, ("   gateway  ", "dim"), self.gateway or "-")
            )
        return render_run_panel(self.run_id, self.phase, self.elapsed_s, parts, self.notes)

    def format_plain_line(self) -> str:
        """One line for a log file."""
        if math.isnan(self.value("steps/total")):
            return f"[{self.elapsed_s:5.1f} s] {self.phase}"
        returns = {"return": _format_number(self.value("return/mean_100"), ".1f")}
        returns = {
            f"return of {name}": _format_number(each, ".3g") for name, each in _get_policies(self).items()
        } or returns
        numbers = {
            **returns,
            "steps/s": _format_number(self.value("steps/per_s"), ",.0f"),
            "weights": _format_number(self.value("weights/version"), ".0f"),
            "max lag": _format_number(self.value("lag/max"), ".0f"),
            "queue": _format_number(self.value("queue/depth"), ".0f"),
            "drops": f"{sum(self.drops.values()):.0f}",
            **({"rejected": f"{sum(self.rejections.values()):.0f}"} if self.rejections else {}),
            "endpoint requests/s": _format_number(self.value("endpoint/requests_per_s"), ".0f"),
        }
        return f"[{self.elapsed_s:5.1f} s] {self.phase}: " + ", ".join(f"{k} {v}" for k, v in numbers.items())


def make_view(run: Run, before: LoopView | None, notes: Sequence[str]) -> LoopView:
    """The present state of the run; `before` supplies the history."""
    metrics = run.latest(since_resumed=True)
    history, lowest = (before.history, before.lowest) if before else ((), math.inf)
    mean = metrics.get("return/mean_100", math.nan)
    if math.isfinite(mean) and (not history or history[-1] != mean):
        history, lowest = (*history, mean)[-MAX_HISTORY:], min(lowest, mean)
    addresses = {endpoint.kind: endpoint.address for endpoint in run.endpoints() if endpoint.state == "ready"}
    return LoopView(
        run.id,
        _infer_phase(run),
        time.time() - run.last_started_at(),
        _read_target_return(run.spec),
        metrics,
        history,
        lowest,
        addresses.get("inference", ""),
        addresses.get("gateway", ""),
        (*notes, *filter(None, (format_warning(*event) for event in run.last_events(since_resumed=True).items()))),
    )


def _infer_phase(record: Run) -> str:
    seen = record.last_events(since_resumed=True)
    ready = {point.kind for point in record.endpoints() if point.state == "ready"}
    if "evaluated" in seen or "policies_evaluated" in seen:
        return "writing the report"
    if "solved" in seen:  # and it stays so, though the mean return may be below the target again
        has_failed = not seen["tried"]["passes"] if "tried" in seen else "trial_failed" in seen
        return f"solved; {'learning on until a trial passes' if has_failed else 'playing through the endpoint'}"
    if "gateway_ready" in seen and record.latest(since_resumed=True):
        return "learning"
    if "gateway" in ready:
        return "waiting for actors"
    return "starting the endpoint" if "inference" not in ready else "starting the gateway"


@lru_cache(maxsize=1)  # called four times a second
def _read_target_return(spec: str) -> float | None:
    """The mean return that ends a run of the loop, from its recorded spec."""
    target: float | None = (yaml.safe_load(spec) or {}).get("target_return")
    return target


def sort_opponents(rates: Mapping[str, float]) -> list[tuple[str, float]]:
    """Win rates as they are shown, of each policy together: registered opponents by their names, and then the run's
    versions in order."""

    def order(name: str) -> tuple[str, int, str]:
        policy, _, version = name.rpartition(" ")
        return policy, int(version) if version.isdigit() else -1, version

    labels = {name: re.sub(r"(?:^|(?<= ))(?=\d+$)", "v", name) for name in rates}
    return [(labels[name], rates[name]) for name in sorted(rates, key=order)]


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


def _get_policies(view: LoopView) -> dict[str, float]:
    """The mean returns of a run of several policies, by policy."""
    return {name: each for name, each in view.get_group("return").items() if name != "mean_100"}


def _render_return(view: LoopView) -> RenderableType:
    if policies := _get_policies(view):
        each_return = render_cells((name, _format_number(each, ".3g")) for name, each in policies.items())
        return render_line(Text("returns  ", "dim"), each_return)
    mean, target = view.value("return/mean_100"), view.target_return
    label = Text.assemble(("return    ", "dim"), (f"{_format_number(mean, '.1f'):>6}", "bold green"))
    cells: list[RenderableType] = [label]
    low = _lowest_return(view)
    if target is not None:
        cells += [
            ProgressBar(total=1.0, completed=_compute_progress(mean, low, target), width=24),
            Text(f"{target:g}", "dim"),
        ]
    cells.append(Sparkline(view.history, low, target))
    return render_line(*cells)


def _lowest_return(view: LoopView) -> float:
    """The start of the scale: 0 when the target is above it, or the lowest return seen if that is lower."""
    is_from_zero = view.target_return is None or view.target_return > 0
    lowest = min((view.lowest, *view.history, *((0.0,) if is_from_zero else ())))
    return lowest if math.isfinite(lowest) else 0.0


def _compute_progress(mean: float, low: float, target: float) -> float:
    """The progress from `low` to `target`, from 0 to 1."""
    if not math.isfinite(mean) or mean >= target:
        return 1.0 if mean >= target else 0.0
    return min(1.0, max(0.0, (mean - low) / (target - low))) if target > low else 0.0


def _render_numbers(view: LoopView) -> RenderableType:
    cells = (
        ("steps/s", "steps/per_s", ",.0f"),
        ("steps", "steps/total", ",.0f"),
        ("episodes", "episodes/total", ",.0f"),
        ("weights", "weights/version", ".0f"),
        ("queue", "queue/depth", ".0f"),
        ("endpoint req/s", "endpoint/requests_per_s", ".0f"),
    )
    return render_cells((name, _format_number(view.value(metric), form)) for name, metric, form in cells)


def _render_actors(view: LoopView, lags: dict[str, float]) -> RenderableType:
    text = Text.assemble(
        ("actors    ", "dim"), f"{_format_number(view.value('actors/connected'), '.0f')} connected, lag "
    )
    for index, (name, lag) in enumerate(sorted(lags.items())):
        style = "green" if lag <= 2 else "yellow" if lag <= 10 else "red"
        text.append("  " if index else "")
        text.append(f"{name} ", "dim")
        text.append(f"{lag:.0f}", style)
    return text


def _format_number(value: float, form: str) -> str:
    """Fit it into a cell: of very large numbers the first digits."""
    return format(value, form if abs(value) < 1e12 else ".3g") if math.isfinite(value) else "-"
