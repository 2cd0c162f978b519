"""A run while it goes on, of whichever kind it is: its picture, its line, and watching both until it ends.

Reads the run record and nothing else, so it shows the same for a run of this process, of another, or of a job that was
submitted by Ray's own means. Called by `shoal run` and by `shoal runs --follow`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import lru_cache

import yaml
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live

import shoal.runs
from shoal.cli.display import rl_display, train_display
from shoal.errors import ConfigError
from shoal.runs import Kind, Run, Status

REFRESH_S = 0.25
PLAIN_S = 2.0
View = rl_display.RunView | train_display.TrainView


# What to do instead about a run that has no picture.
WITHOUT_PICTURE = {
    Kind.SERVING: "look at it with shoal serve status",
    Kind.PREDICTION: "its command says how far it is",
    Kind.OTHER: "`shoal runs ID` shows what it has recorded",
}


def view_of(record: Run, before: View | None, notes: Sequence[str] = ()) -> View | None:
    """The run as it is now; `before` carries the history on. None of one WITHOUT_PICTURE."""
    if record.kind in WITHOUT_PICTURE:
        return None
    if record.kind is Kind.TRAINING:
        return train_display.view_of(record, before if isinstance(before, train_display.TrainView) else None, notes)
    known = before if isinstance(before, rl_display.RunView) else None
    return rl_display.view_of(record, _phase(record), _target_of(record.spec), known, notes)


def picture(view: View, width: int) -> RenderableType:
    """For a terminal, so many columns wide."""
    drawn = train_display.render(view) if isinstance(view, train_display.TrainView) else rl_display.render(view)
    return _Wrapped(drawn, width - len("^C"))  # which is echoed


class _Wrapped(Constrain):
    """So many columns, whose lines are wrapped also where what the console prints besides is not."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return super().__rich_console__(console, options.update(no_wrap=False, overflow="fold"))


def line(view: View) -> str:
    """For a log file."""
    return train_display.plain_line(view) if isinstance(view, train_display.TrainView) else rl_display.plain_line(view)


DOUBT_S = 2.0  # a machine that was asleep has no fresh heartbeat for a moment


class Lines:
    """Says the line of a view when its phase is another, and every `PLAIN_S`."""

    def __init__(self) -> None:
        self._phase, self._said_s = "", 0.0

    def due(self, view: View) -> str | None:
        if view.phase == self._phase and not (view.metrics and time.monotonic() - self._said_s >= PLAIN_S):
            return None
        self._phase, self._said_s = view.phase, time.monotonic()
        return line(view)


def follow(record: Run, console: Console) -> Run:
    """Show a run until it is over; the run as it is then. Raises ConfigError of one WITHOUT_PICTURE."""
    if record.kind in WITHOUT_PICTURE:
        raise ConfigError(
            "follow", record.id, f"is of the job {record.job!r}, which has no curves", WITHOUT_PICTURE[record.kind]
        )
    view, lines = None, Lines()
    with ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False, transient=True))
        while record.status is Status.RUNNING:
            view = view_of(record, view)
            assert view is not None
            if live is not None:
                live.update(picture(view, console.width), refresh=True)
            elif said := lines.due(view):
                console.print(said)
            time.sleep(REFRESH_S)
            record = shoal.runs.load(record.id)
            doubted_s = time.monotonic() + DOUBT_S
            while record.status is Status.LOST and time.monotonic() < doubted_s:
                time.sleep(REFRESH_S)
                record = shoal.runs.load(record.id)
    return record


def _phase(record: Run) -> str:
    seen = record.last_events(since_resumed=True)
    ready = {point.kind for point in record.endpoints() if point.state == "ready"}
    if "evaluated" in seen:
        return "writing the report"
    if "solved" in seen and _is_at_target(record):  # it may fail the trial, and learn on
        return "solved; playing through the endpoint"
    if "gateway_ready" in seen and record.latest(since_resumed=True):
        return "learning"
    if "gateway" in ready:
        return "waiting for actors"
    return "starting the endpoint" if "inference" not in ready else "starting the gateway"


@lru_cache(maxsize=1)  # asked four times a second
def _target_of(spec: str) -> float | None:
    """The mean return at which a run of the loop ends, by its recorded spec."""
    target: float | None = (yaml.safe_load(spec) or {}).get("target_return")
    return target


def _is_at_target(record: Run) -> bool:
    target, mean = _target_of(record.spec), record.latest(since_resumed=True).get("return/mean_100")
    return target is None or mean is None or mean >= target
