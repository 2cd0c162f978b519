"""The display of a running population: its progress, and a table of its members with score, values and lineage.

Called by `run_view`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import RenderableType

from shoal.extend.cli import RunView, extend_history, find_phase, render_fact, render_table
from shoal.extend.runs import Run, format_number
from shoal.libs.population.lineage import rank_members
from shoal.libs.population.report import build_member_table

MAX_ROWS = 15  # members in the table: the best ones
EVOLVING = "evolving"
PHASES = {"trained": "writing the report", "evolved": "registering", "engine": EVOLVING}


@dataclass(frozen=True, kw_only=True)
class PopulationView(RunView):
    """One moment of a population run.

    setting: the details of its event `population`: members, rounds, metric, ...
    engine:  those of `engine`: name, chunk
    last:    the details of its newest event `round`: round, scores, hyper_parameters, ancestors, ...
    history: the best score of each round
    """

    working_phase = EVOLVING

    last: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speed(self) -> list[str]:
        """Steps of all members in a second, where they are known."""
        speed = self.value("population/member_steps_per_s")
        return [f"{speed:,.0f} member-steps/s"] if math.isfinite(speed) else []

    @property
    def step_s(self) -> float:
        speed = self.value("population/member_steps_per_s")
        return float(self.setting["members"]) / speed if speed > 0 else math.nan

    @property
    def hyper_parameters(self) -> dict[str, list[float]]:
        """Values of all members by path, in the last round."""
        return dict(self.last["hyper_parameters"])

    def rank_members(self) -> list[int]:
        """The members of the last round, best first; those without a finite score last."""
        return rank_members(self.last.get("scores", []), self.setting.get("is_higher_better", True))

    def list_panels(self) -> Iterator[RenderableType]:
        at, end = str(self.last.get("round", 0)), str(self.setting.get("rounds"))
        yield self.render_progress("round", at, end, self.speed, width=16)
        yield self.render_history("best", format_score(self.history[-1]) if self.history else "-", "bold green")
        if setting := self.setting:
            members = f"{setting['members']} of {setting['parameters']:,} parameters"
            by = f"{self.engine['name']}, up to {self.engine['chunk']} at once, " if self.engine else ""
            yield render_fact("members", f"{members}: {by}on {setting['device']}")
        if self.last:
            is_higher_better = self.setting.get("is_higher_better", True)
            yield render_table(build_member_table(self.last, self.setting["metric"], is_higher_better), MAX_ROWS)

    def list_facts(self) -> list[str]:
        if not math.isfinite(self.value("train/step")):
            return []
        facts = [f"step {self.value('train/step'):,.0f}"]
        if self.last:
            name, best = self.setting["metric"], self.rank_members()[0]
            facts.append(f"round {self.last['round']} of {self.setting['rounds']}")
            facts.append(f"best {name} {format_score(self.last['scores'][best])} of member {best}")
            values = self.hyper_parameters.items()
            facts += [f"{_shorten(path)} {format_score(each[best])}" for path, each in values]
        return [*facts, *self.speed, *self.time_to_go]


def make_view(run: Run, before: PopulationView | None, notes: Sequence[str]) -> PopulationView:
    """The present view of the run; `before` supplies the history."""
    seen = run.last_events(since_resumed=True)
    setting, last = seen.get("population", {}), seen.get("round", {})
    view = PopulationView.read(
        run,
        seen,
        notes,
        phase=find_phase(seen, PHASES, "choosing an engine"),
        setting=setting,
        last=last,
        engine=seen.get("engine", {}),
    )
    is_new = before is None or before.last.get("round") != last.get("round")
    best = view.value(f"validation/{setting.get('metric')}") if last and is_new else math.nan
    return replace(view, history=extend_history(before, best, has_repeats=True))


def _shorten(path: str) -> str:
    return path.rpartition(".")[2].replace("_", " ")


def format_score(value: float | None) -> str:
    """A score or a hyper-parameter; `-` for a member without one."""
    return "-" if value is None else format_number(value)
