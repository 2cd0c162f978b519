"""The display of a running training run: progress, speed, waiting times, metrics. Called by `run_view`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rich.console import RenderableType

from shoal.cli.display.panels import RunView, extend_history, find_phase, format_or_dash, render_cells, render_fact
from shoal.runs import Run
from shoal.runs.formatting import format_metric, format_number

TRAINING = "training"
PHASES = {"trained": "writing the report", "stopped": "registering", "training": TRAINING}  # by the newest event
RATES = (
    ("samples/s", "samples/per_s"),
    ("data wait", "wait/data"),
    ("communication", "wait/communication"),
    ("MFU", "flops/utilisation"),  # the used share of the devices' peak FLOP/s
)


@dataclass(frozen=True, kw_only=True)
class TrainView(RunView):
    """One moment of a training run.

    setting: the details of its event `training`: plan, workers, device, total_steps, ...
    history: the newest losses
    """

    working_phase = TRAINING

    @property
    def rates(self) -> list[tuple[str, str]]:
        """The known ones, by name."""
        return [
            (name, format_metric(metric, self.value(metric)))
            for name, metric in RATES
            if math.isfinite(self.value(metric))
        ]

    def list_panels(self) -> Iterator[RenderableType]:
        step, epoch = (format_or_dash(self.value(f"train/{each}")) for each in ("step", "epoch"))
        yield self.render_progress("step", step, f"{self.setting.get('total_steps') or 0:,}", [f"epoch {epoch}"], 24)
        loss = format_number(self.value("train/loss")) if "train/loss" in self.metrics else "-"
        yield self.render_history("loss", loss, "bold")
        yield render_cells(self.rates)
        if evaluated := self.get_group("validation"):
            words = [((f"{name} ", "dim"), (f"{format_number(v)}  ", "bold green")) for name, v in evaluated.items()]
            yield render_fact("evaluated", *(word for pair in words for word in pair))
        if setting := self.setting:
            yield render_fact("plan", f"{setting['plan']} on {setting['device']}, {setting['parameters']:,} parameters")

    def list_facts(self) -> list[str]:
        if not math.isfinite(self.value("train/step")):
            return []
        return [
            f"step {self.value('train/step'):,.0f}",
            f"loss {format_number(self.value('train/loss'))}",
            *(f"{name} {value}" for name, value in self.rates),
            *(f"validation {name} {format_number(value)}" for name, value in self.get_group("validation").items()),
            *self.time_to_go,
        ]


def make_view(run: Run, before: TrainView | None, notes: Sequence[str]) -> TrainView:
    """The present view of the run; `before` supplies the history."""
    seen = run.last_events(since_resumed=True)
    phase, setting = find_phase(seen, PHASES, "starting workers"), seen.get("training", {})
    view = TrainView.read(run, seen, notes, phase=phase, setting=setting)
    return replace(view, history=extend_history(before, view.value("train/loss")))
