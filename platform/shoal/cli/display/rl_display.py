"""The display of a running actor-learner run. Called by `run_view`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import yaml
from rich.console import RenderableType
from rich.progress_bar import ProgressBar
from rich.text import Text

from shoal.cli.display.panels import (
    RunView,
    Sparkline,
    extend_history,
    format_or_dash,
    render_cells,
    render_counts,
    render_fact,
    render_headline,
    render_line,
)
from shoal.runs import Run
from shoal.runs.formatting import format_metric
from shoal.runs.panels import Panel, list_counts
from shoal.runs.run_kind import RunKind

RETURN, BEST_RETURN = "return/mean_100", "return/best_actions"
NUMBERS = (
    ("steps/s", "steps/per_s"),
    ("steps", "steps/total"),
    ("episodes", "episodes/total"),
    ("weights", "weights/version"),
    ("queue", "queue/depth"),
    ("endpoint req/s", "endpoint/requests_per_s"),
)
# Of the learner, with where they are bad (docs/algorithms.md says what helps).
INDICATORS: tuple[tuple[str, str, Callable[[float], bool]], ...] = (
    ("policy lag", "learner/policy_lag", lambda value: value > 20),
    ("entropy", "learner/entropy", lambda value: 0 <= value < 0.01),  # of a Box it may be negative
    ("clipped", "learner/clip_fraction", lambda value: value > 0.5),
    ("KL", "learner/kl", lambda value: value > 0.1),
    ("explained variance", "learner/explained_variance", lambda value: value < 0),
    *((name, f"learner/{metric}", lambda value: False) for name, metric in (
        ("shown", "demonstration_weight"), ("shown", "demonstration_share"), ("cloning", "cloning_loss"),
        ("Q", "q_value"), ("TD error", "td_error"), ("epsilon", "epsilon"), ("temperature", "temperature"))),
)  # fmt: skip
SHOWN = ("actors", "won", "drops", "rejected")  # of the counts
PLAIN_NUMBERS = (*NUMBERS[:1], NUMBERS[3], ("max lag", "lag/max"), NUMBERS[4])


@dataclass(frozen=True, kw_only=True)
class LoopView(RunView):
    """One moment of a run.

    history: the newest mean returns
    lowest:  the lowest mean return seen
    spaces:  of a run without an environment, and who has brought them
    """

    target_return: float | None = None
    lowest: float = math.inf
    endpoint: str = ""
    gateway: str = ""
    websocket: str = ""
    spaces: str = ""

    @property
    def counts(self) -> dict[str, Panel]:
        """Its counts, by what is counted, as `shoal status`, the console and the report have them."""
        return {panel.title: panel for panel in list_counts(self.metrics)}

    def _sum(self, name: str) -> float:
        return sum(each.value for each in self.counts[name].counts) if name in self.counts else 0.0

    @property
    def policies(self) -> dict[str, float]:
        """The mean returns of a run of several policies, by policy."""
        returns = self.get_group("return")
        return {} if "mean_100" in returns else returns

    def list_panels(self) -> Iterator[RenderableType]:
        yield _render_return(self)
        if math.isfinite(best := self.value(BEST_RETURN)):
            yield render_fact("by best actions ", format_or_dash(best))
        if self.spaces:
            yield render_fact("spaces", self.spaces)
        if episodes := _describe_episodes(self):
            yield render_fact("episodes", ", ".join(episodes))
        yield render_cells((name, format_or_dash(self.value(metric))) for name, metric in NUMBERS)
        parts: list[str | tuple[str, str]] = []
        for name, metric, is_bad in INDICATORS:
            if math.isfinite(value := self.value(metric)):
                style = "bold yellow" if is_bad(value) else "bold"
                parts += [("  " * bool(parts) + f"{name} ", "dim"), (format_metric(metric, value), style)]
        if parts:
            yield render_fact("learner", *parts)
        if shown := self.get_group("demonstrations"):
            yield render_fact("shown", f"{shown['episodes']:,.0f} episodes, {shown['steps']:,.0f} steps")
        none = Panel(title="drops", note="none")
        yield from (render_counts(each) for name, each in ({"drops": none} | self.counts).items() if name in SHOWN)
        if self.endpoint:
            yield render_fact("endpoint", self.endpoint, ("   gateway  ", "dim"), self.gateway or "-")
        if self.websocket:
            yield render_fact("games", self.websocket)

    def list_facts(self) -> list[str]:
        if math.isnan(self.value("steps/total")):
            return []
        best = self.value(BEST_RETURN)
        returns = [f"return of {name} {format_or_dash(each)}" for name, each in self.policies.items()]
        return [
            *(returns or [f"return {format_or_dash(self.value(RETURN))}"]),
            *([f"by best actions {format_or_dash(best)}"] if math.isfinite(best) else []),
            *_describe_episodes(self)[1:],
            *(f"{name} {format_or_dash(self.value(metric))}" for name, metric in PLAIN_NUMBERS),
            f"drops {self._sum('drops'):.0f}",
            *([f"rejected {rejected:.0f}"] if (rejected := self._sum("rejected")) else []),
            f"endpoint requests/s {format_or_dash(self.value('endpoint/requests_per_s'))}",
        ]


def make_view(run: Run, before: LoopView | None, notes: Sequence[str]) -> LoopView:
    """The present state of the run; `before` supplies the history."""
    seen = run.last_events(since_resumed=True)
    addresses = {endpoint.kind: endpoint.address for endpoint in run.endpoints() if endpoint.state == "ready"}
    view = LoopView.read(
        run,
        seen,
        notes,
        phase=_infer_phase(run, seen, addresses),
        target_return=_read_spec(run.spec).get("target_return"),
        spaces=describe_spaces(run),
        endpoint=addresses.get("inference", ""),
        gateway=addresses.get("gateway", ""),
        websocket=addresses.get("websocket", ""),
    )
    history = extend_history(before, view.value(RETURN))
    return replace(view, history=history, lowest=min((before.lowest if before else math.inf, *history[-1:])))


def _infer_phase(run: Run, seen: Mapping[str, Mapping[str, Any]], addresses: Mapping[str, str]) -> str:
    if "evaluated" in seen or "policies_evaluated" in seen:
        return "writing the report"
    if "solved" in seen:  # and it stays so, though the mean return may be below the target again
        if describe_spaces(run):
            return "solved; registering the policy"  # there is nothing to play
        has_failed = not seen["tried"]["passes"] if "tried" in seen else "trial_failed" in seen
        return f"solved; {'learning on until a trial passes' if has_failed else 'playing through the endpoint'}"
    if "gateway_ready" in seen and run.latest(since_resumed=True):
        return "learning"
    if "gateway" in addresses:
        return "waiting for actors"
    if "spaces_asked" in seen and "spaces_taken" not in seen:
        return f"waiting for a game that brings its spaces, at {' or '.join(seen['spaces_asked']['addresses'])}"
    return "starting the endpoint" if "inference" not in addresses else "starting the gateway"


@lru_cache(maxsize=1)  # called four times a second
def _read_spec(spec: str) -> dict[str, Any]:
    """A recorded spec."""
    return yaml.safe_load(spec) or {}


def describe_spaces(run: Run) -> str:
    """The spaces of a run without an environment, and the game that has brought them, if one has; otherwise ""."""
    env = str(_read_spec(run.spec).get("env", "")) if run.kind is RunKind.LOOP else ""
    if not env.startswith("{"):
        return ""
    taken = run.last_events().get("spaces_taken")
    return f"{env}, brought by {taken['actor_id']}" if taken else env


def _render_return(view: LoopView) -> RenderableType:
    if view.policies:
        each_return = render_cells((name, format_or_dash(each)) for name, each in view.policies.items())
        return render_line(Text("returns  ", "dim"), each_return)
    mean = view.value(RETURN)
    target = view.target_return
    # The start of the scale: 0 when the target is above it, or the lowest return seen if that is
    # lower.
    is_from_zero = view.target_return is None or view.target_return > 0
    lowest = min((view.lowest, *view.history, *((0.0,) if is_from_zero else ())))
    low = lowest if math.isfinite(lowest) else 0.0
    cells: list[RenderableType] = []
    if target is not None:
        full = 1.0 if mean >= target else 0.0  # NaN before the first episode
        if mean < target and target > low:
            full = min(1.0, max(0.0, (mean - low) / (target - low)))
        cells = [ProgressBar(total=1.0, completed=full, width=24), Text(f"{target:g}", "dim")]
    curve = Sparkline(view.history, low, target)
    return render_headline("return", format_or_dash(mean), "bold green", *cells, curve)


def _describe_episodes(view: LoopView) -> list[str]:
    """The spread of the last episodes' returns, their lengths, and how many of them reached their goal; of one
    policy."""
    names = ("return_std", "return_min", "return_max", "length", "length_std")
    std, low, high, length, length_std = (format_or_dash(view.value(f"episode/{name}")) for name in names)
    if length == "-":
        return []
    success = view.value("episode/success_rate")
    return [
        f"return ± {std} ({low} to {high})",
        f"length {length} ± {length_std}",
        *([f"success {format_metric('success_rate', success)}"] if math.isfinite(success) else []),
    ]
