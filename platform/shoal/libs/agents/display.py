"""The display of a run of agents: its progress and reward, its sessions and answers, and what is bad about them.

Called by `run_view`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rich.console import RenderableType

from shoal.extend.cli import RunView, extend_history, render_counts, render_fact
from shoal.extend.runs import Run, format_metric, list_counts
from shoal.libs.agents.metrics import find_bad
from shoal.libs.agents.spec import AgentsSpec

REWARD = "sessions/reward"
LEARNING = "learning"
INDICATORS = {  # what is shown in a line: metrics by their names there
    "sessions": {name: f"sessions/{name}" for name in ("open", "waiting", "ended", "failed", "expired")},
    "answers": {
        "length": "sessions/length",
        "cut": "sessions/cut_fraction",
        "branches": "sessions/branches",
        "overridden": "sessions/sampling_overridden",
        "without signal": "sessions/no_signal_fraction",
    },
    "learner": {
        "entropy": "agents/entropy",
        "KL": "agents/kl",
        "clipped": "agents/clip_share",
        "token lag": "agents/token_lag_mean",
        "largest lag": "agents/token_lag_max",
        "log p differs": "agents/logprob_diff_max",
    },
    "speed": {"tokens/s sampled": "tokens/sampled_per_s", "learnt": "tokens/learned_per_s"},
}


@dataclass(frozen=True, kw_only=True)
class AgentsView(RunView):
    """One moment of a run of agents.

    history: the newest mean rewards
    bad:     metrics that are above their bounds; the notes say what helps
    """

    working_phase = LEARNING

    bad: frozenset[str] = frozenset()

    @property
    def step_s(self) -> float:
        speed = self.value("train/step_per_s")
        return 1 / speed if speed > 0 else math.nan

    def format(self, metric: str) -> str:
        return format_metric(metric, self.metrics[metric]) if metric in self.metrics else "-"

    def list_panels(self) -> Iterator[RenderableType]:
        yield self.render_progress("step", self.format("train/step"), f"{self.setting['total_steps']}", (), 24)
        yield self.render_history("reward", self.format(REWARD), "bold green")
        for heading, indicators in INDICATORS.items():
            parts: list[tuple[str, str]] = []
            for name, metric in indicators.items():
                if metric in self.metrics:
                    style = "bold yellow" if metric in self.bad else "bold"
                    parts += [(f"{name} ", "dim"), (f"{self.format(metric)}  ", style)]
            yield render_fact(heading, *parts)
        yield from (render_counts(each) for each in list_counts(self.metrics) if each.title == "drops")

    def list_facts(self) -> list[str]:
        lines: list[dict[str, str]] = [{"step": "train/step", "reward": REWARD}, *INDICATORS.values()]
        known = [(name, metric) for line in lines for name, metric in line.items() if metric in self.metrics]
        return [*(f"{name} {self.format(metric)}" for name, metric in known), *self.time_to_go]


def make_view(run: Run, before: AgentsView | None, notes: Sequence[str]) -> AgentsView:
    """The present view of the run; `before` supplies the history."""
    seen, spec = run.last_events(since_resumed=True), _read_spec(run.spec)
    view = AgentsView.read(run, seen, notes, phase=LEARNING, setting={"total_steps": spec.max_steps})
    if not view.metrics.get("sessions/opened"):
        view = replace(view, phase="waiting for sessions" if "gateway_ready" in seen else "starting the gateway")
    bad = find_bad(spec, view.metrics)
    return replace(
        view,
        bad=frozenset(bad),
        notes=(*view.notes, *bad.values()),
        history=extend_history(before, view.value(REWARD)),
    )


_read_spec = lru_cache(maxsize=1)(AgentsSpec.from_record)  # called four times a second
