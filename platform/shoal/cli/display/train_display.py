"""The display of a running training run: progress, speed, waiting times, metrics.

Reads only the run record. Called by `run_view`. `TrainView` is the data; `render` and `format_plain_line` are pure
functions of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from shoal.cli.display.rl_display import MAX_HISTORY, Sparkline
from shoal.cli.display.step_view import StepView
from shoal.cli.support.console import render_cells, render_line, render_run_panel
from shoal.runs import Run
from shoal.runs.formatting import format_duration, format_number
from shoal.runs.report.event_messages import format_warning

TRAINING = "training"
RATES = (
    ("samples/s", "samples/per_s", ",.0f", 1.0),
    ("data wait", "wait/data", ".0f", 100.0),
    ("communication", "wait/communication", ".0f", 100.0),
    ("MFU", "flops/utilisation", ".1f", 100.0),  # the used share of the devices' peak FLOP/s
)


@dataclass(frozen=True)
class TrainView(StepView):
    """One moment of a training run.

    setting: the details of its event `training`: plan, workers, device, total_steps, ...
    history: the newest losses, oldest first, all finite
    """

    history: tuple[float, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def remaining_s(self) -> float:
        """Seconds to the last step at the present speed; NaN when unknown, and after the last step."""
        total = self.setting.get("total_steps")
        if self.phase != TRAINING:
            return math.nan
        return max(0.0, total - self.value("train/step")) * self.value("step/seconds") if total else math.nan

    @property
    def evaluation_metrics(self) -> dict[str, float]:
        """The results of the last evaluation."""
        start = "validation/"
        return {name.removeprefix(start): v for name, v in self.metrics.items() if name.startswith(start)}

    def render(self) -> RenderableType:
        """The picture for a terminal."""
        parts: list[RenderableType] = [_render_progress(self), _render_loss(self), render_cells(_format_rates(self))]
        if self.evaluation_metrics:
            text = Text.assemble(("evaluated ", "dim"))
            for name, value in self.evaluation_metrics.items():
                text.append(f"{name} ", "dim")
                text.append(f"{format_number(value)}  ", "bold green")
            parts.append(text)
        if self.setting:
            setting = self.setting
            words = f"{setting['plan']} on {setting['device']}, {setting['parameters']:,} parameters"
            parts.append(Text.assemble(("plan      ", "dim"), words))
        return render_run_panel(self.run_id, self.phase, self.elapsed_s, parts, self.notes)

    def format_plain_line(self) -> str:
        """One line for a log file."""
        at = f"[{self.elapsed_s:5.1f} s] {self.phase}"
        if not math.isfinite(self.value("train/step")):
            return at
        parts = [f"step {self.value('train/step'):,.0f}", f"loss {format_number(self.value('train/loss'))}"]
        parts += [f"{name} {value}" for name, value in _format_rates(self)]
        parts += [f"validation {name} {format_number(value)}" for name, value in self.evaluation_metrics.items()]
        if math.isfinite(self.remaining_s):
            parts.append(f"{format_duration(self.remaining_s)} to go")
        return f"{at}: {', '.join(parts)}"


def make_view(run: Run, before: TrainView | None, notes: Sequence[str]) -> TrainView:
    """The present view of the run; `before` supplies the history."""
    metrics, seen = run.latest(since_resumed=True), run.last_events(since_resumed=True)
    history = before.history if before is not None else ()
    loss = metrics.get("train/loss", math.nan)
    if math.isfinite(loss) and (not history or history[-1] != loss):
        history = (*history, loss)[-MAX_HISTORY:]
    elapsed_s = time.time() - run.last_started_at()
    told = (*notes, *filter(None, (format_warning(*event) for event in seen.items())))
    return TrainView(run.id, _infer_phase(seen), elapsed_s, metrics, seen.get("training", {}), history, told)


def _infer_phase(seen: dict[str, dict[str, Any]]) -> str:
    for kind, phase in (("trained", "writing the report"), ("stopped", "registering"), ("training", TRAINING)):
        if kind in seen:
            return phase
    return "starting workers"


def _render_progress(view: TrainView) -> RenderableType:
    step, epoch = view.value("train/step"), view.value("train/epoch")
    label = Text.assemble(("step      ", "dim"), (f"{_format_or_dash(step, ',.0f'):>6}", "bold"))
    cells: list[RenderableType] = [label]
    if math.isfinite(view.progress):
        cells.append(ProgressBar(total=1.0, completed=view.progress, width=24))
        cells.append(Text(f"of {view.setting['total_steps']:,}", "dim"))
    cells.append(Text(f"epoch {_format_or_dash(epoch, '.2f')}", "dim"))
    if math.isfinite(view.remaining_s):
        cells.append(Text(f"{format_duration(view.remaining_s)} to go", "dim"))
    return render_line(*cells)


def _render_loss(view: TrainView) -> RenderableType:
    loss = format_number(view.value("train/loss")) if "train/loss" in view.metrics else "-"
    label = Text.assemble(("loss      ", "dim"), (f"{loss:>6}", "bold"))
    return render_line(label, Sparkline(view.history, min(view.history, default=0.0)))


def _format_rates(view: TrainView) -> list[tuple[str, str]]:
    """The known rates."""
    words = []
    for name, metric, form, factor in RATES:
        value = view.value(metric) * factor
        if math.isfinite(value):
            words.append((name, format(value, form) + ("%" if factor == 100.0 else "")))
    return words


def _format_or_dash(value: float, form: str) -> str:
    return format(value, form) if math.isfinite(value) else "-"
