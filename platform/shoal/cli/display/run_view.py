"""The live view of a run of any kind: its picture, its line, and following both until it ends.

Reads only the run record, so it shows the same for a run of this process, of another, or of a job submitted by Ray's
own tools. Called by `shoal run` and by `shoal runs --follow`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from typing import Any

import yaml
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live

import shoal.runs
from shoal.cli.display import population_display, rl_display, sweep_display, train_display
from shoal.errors import ConfigError
from shoal.runs import Run, RunKind, Status

REFRESH_S = 0.25
PLAIN_INTERVAL_S = 2.0
View = rl_display.RunView | population_display.PopulationView | sweep_display.SweepView | train_display.TrainView
_DISPLAYS: Mapping[type[View], Any] = {  # the modules that draw each
    rl_display.RunView: rl_display,
    population_display.PopulationView: population_display,
    sweep_display.SweepView: sweep_display,
    train_display.TrainView: train_display,
}


# The alternative for a kind of run that has no picture.
KINDS_WITHOUT_DISPLAY = {
    RunKind.SERVING: "look at it with shoal serve status",
    RunKind.PREDICTION: "its command says how far it is",
    RunKind.STREAM: "its command prints a line every two seconds",
    RunKind.OTHER: "`shoal runs ID` shows what it has recorded",
}


def make_view(record: Run, before: View | None, notes: Sequence[str] = ()) -> View | None:
    """The present view of the run; `before` supplies the history. None for a kind WITHOUT_PICTURE."""
    if record.kind in KINDS_WITHOUT_DISPLAY:
        return None
    if record.kind is RunKind.TRAINING:
        return train_display.make_view(record, before if isinstance(before, train_display.TrainView) else None, notes)
    if record.kind is RunKind.POPULATION:
        seen = before if isinstance(before, population_display.PopulationView) else None
        return population_display.make_view(record, seen, notes)
    if record.kind is RunKind.SWEEP:
        return sweep_display.make_view(record, notes)
    known = before if isinstance(before, rl_display.RunView) else None
    return rl_display.make_view(record, _infer_phase(record), _read_target_return(record.spec), known, notes)


def render(view: View, width: int) -> RenderableType:
    """For a terminal of this width."""
    return _Wrapped(_draw(view), width - len("^C"))  # which the terminal echoes


def _draw(view: View) -> RenderableType:
    drawn: RenderableType = _DISPLAYS[type(view)].render(view)
    return drawn


class _Wrapped(Constrain):
    """Limits the width, and wraps lines even if the console does not wrap its other output."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return super().__rich_console__(console, options.update(no_wrap=False, overflow="fold"))


def format_plain_line(view: View) -> str:
    """For a log file."""
    line: str = _DISPLAYS[type(view)].format_plain_line(view)
    return line


LOST_GRACE_S = 2.0  # after a suspend the heartbeat is briefly too old


class LineThrottle:
    """Returns the line of a view when its phase changes, and what else it tells, every PLAIN_INTERVAL_S at most."""

    def __init__(self) -> None:
        self._phase, self._printed_at_s, self._news = "", 0.0, ""

    def format_if_due(self, view: View) -> str | None:
        """None where the line would tell nothing but how much time has passed."""
        is_soon = time.monotonic() - self._printed_at_s < PLAIN_INTERVAL_S
        if view.phase == self._phase and (is_soon or not view.metrics):
            return None
        news = format_plain_line(replace(view, elapsed_s=0.0))
        if news == self._news:
            return None
        self._phase, self._printed_at_s, self._news = view.phase, time.monotonic(), news
        return format_plain_line(view)


def follow_run(record: Run, console: Console) -> Run:
    """Show a run until it is over, and return it. Raises ConfigError for a kind WITHOUT_PICTURE."""
    if record.kind in KINDS_WITHOUT_DISPLAY:
        raise ConfigError(
            "follow",
            record.id,
            f"is of the job {record.job!r}, which has no curves",
            KINDS_WITHOUT_DISPLAY[record.kind],
        )
    view, lines = None, LineThrottle()
    with ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        while record.status is Status.RUNNING:
            view = make_view(record, view)
            assert view is not None
            if live is not None:
                live.update(render(view, console.width), refresh=True)
            elif said := lines.format_if_due(view):
                console.print(said)
            time.sleep(REFRESH_S)
            record = shoal.runs.load(record.id)
            doubted_s = time.monotonic() + LOST_GRACE_S
            while record.status is Status.LOST and time.monotonic() < doubted_s:
                time.sleep(REFRESH_S)
                record = shoal.runs.load(record.id)
    return record


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
