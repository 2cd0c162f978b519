"""The live view of a run of any kind: its picture, its line, and following both until it ends.

Reads only the run record, so it shows the same for a run of this process, of another, or of a job submitted by Ray's
own tools. Called by `shoal run` and by `shoal runs --follow`.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import ModuleType

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.constrain import Constrain
from rich.live import Live

import shoal.runs
from shoal.cli.display.panels import RunView
from shoal.errors import ConfigError
from shoal.plugins.library import find_libraries
from shoal.runs import Run, RunKind, Status
from shoal.runs.waits import INTERVAL_S

REFRESH_S = 0.25
PLAIN_INTERVAL_S = 2.0


# The module of each kind; libraries bring others. It has `make_view(run, before, notes)`, where `before` supplies the
# history, and may have `render_record(run)`: a heading and what `shoal runs RUN` shows in place of the metrics.
DISPLAYS: dict[str, str] = {
    RunKind.LOOP: "shoal.cli.display.rl_display",
    RunKind.TRAINING: "shoal.cli.display.train_display",
}
# The alternative for a kind of run that has no picture; OTHER's for all that are not here.
KINDS_WITHOUT_DISPLAY = {
    RunKind.SERVING: "look at it with shoal serve status",
    RunKind.PREDICTION: "its command says how far it is",
    RunKind.STREAM: "its command prints a line every two seconds",
    RunKind.OTHER: "`shoal runs ID` shows what it has recorded",
}


def _find_display(kind: RunKind) -> ModuleType | None:
    displays = {kind: module for library in find_libraries() for kind, module in library.displays.items()} | DISPLAYS
    return importlib.import_module(displays[kind]) if kind in displays else None


def make_view(record: Run, before: RunView | None, notes: Sequence[str] = ()) -> RunView | None:
    """The present view of the run; `before` is the last one. None for a kind without a display."""
    display = _find_display(record.kind)
    view: RunView | None = None if display is None else display.make_view(record, before, notes)
    return view


def render_record(record: Run) -> tuple[str, RenderableType] | None:
    """A heading and what the run's kind shows in place of its newest metrics; None where it shows these."""
    display = _find_display(record.kind)
    rendered: tuple[str, RenderableType] | None = getattr(display, "render_record", lambda record: None)(record)
    return rendered


def render(view: RunView, width: int) -> RenderableType:
    """Draw the view for a terminal of this width."""
    return _Wrapped(view.render(), width - len("^C"))  # which the terminal echoes


class _Wrapped(Constrain):
    """Limits the width, and wraps lines even if the console does not wrap its other output."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        return super().__rich_console__(console, options.update(no_wrap=False, overflow="fold"))


LOST_GRACE_S = 2.0  # after a suspend the heartbeat is briefly too old


class LineThrottle:
    """Returns the line of a view when its phase changes, and what else it tells, every PLAIN_INTERVAL_S at most; any,
    every INTERVAL_S."""

    def __init__(self) -> None:
        self._phase = ""
        self._printed_at_s = 0.0
        self._news = ""

    def format_if_due(self, view: RunView) -> str | None:
        """None where the line would tell nothing but that a moment has passed."""
        silent_s = time.monotonic() - self._printed_at_s
        news = replace(view, elapsed_s=0.0).format_plain_line()
        is_soon = silent_s < PLAIN_INTERVAL_S
        is_known = news == self._news or (view.phase == self._phase and is_soon)
        if is_known and silent_s < INTERVAL_S:
            return None
        self._phase = view.phase
        self._printed_at_s = time.monotonic()
        self._news = news
        return view.format_plain_line()


def follow_run(record: Run, console: Console) -> Run:
    """Show a run until it is over, and return it. Raises ConfigError for a kind without a display."""
    if _find_display(record.kind) is None:
        remedy = KINDS_WITHOUT_DISPLAY.get(record.kind, KINDS_WITHOUT_DISPLAY[RunKind.OTHER])
        raise ConfigError("follow", record.id, f"is of the job {record.job!r}, which has no curves", remedy)
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
            elif line := lines.format_if_due(view):
                console.print(line)
            time.sleep(REFRESH_S)
            record = shoal.runs.load(record.id)
            doubted_s = time.monotonic() + LOST_GRACE_S
            while record.status is Status.LOST and time.monotonic() < doubted_s:
                time.sleep(REFRESH_S)
                record = shoal.runs.load(record.id)
    return record
