"""What the report shows of one kind of run: metrics of every kind are named here, a library adds those of its runs.

A library names its `ReportPanels` by the kind of run in its extensions, in the group GROUP.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import yaml

from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions
from shoal.runs.run_kind import RunKind
from shoal.runs.run_reader import MEAN_RETURN, Run

GROUP = "shoal.report_panels"
MAX_ROWS = 100


@dataclass(frozen=True)
class Section:
    """A heading with figures, as SVG, and a table. Cells of numbers are right-aligned."""

    title: str
    note: str
    figures: Sequence[str] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class ReportPanels:
    """What a kind of run adds to the report.

    titles:   metric -> the title of its small plot, in display order
    cards:    metric -> the label of its headline number, in display order
    hidden:   prefixes of metrics that are neither drawn alone nor listed: the sections show them
    sections: makes the sections of a run as it stands
    """

    titles: Mapping[str, str] = field(default_factory=dict)
    cards: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    sections: Callable[[Run], Sequence[Section]] = lambda run: ()


COMMON = ReportPanels(
    titles={
        MEAN_RETURN: "Mean return, last 100 episodes",
        "steps/per_s": "Environment steps a second",
        "learner/loss": "Learner loss",
        "learner/entropy": "Policy entropy",
        "learner/policy_lag": "Policy lag (versions)",
        "learner/clip_fraction": "Share of clipped steps",
        "learner/explained_variance": "Variance of returns that the value explains",
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
    reference = collect_extensions(GROUP).get(kind)
    if reference is None:
        return COMMON
    own: ReportPanels = load_reference(reference)
    return ReportPanels({**COMMON.titles, **own.titles}, {**COMMON.cards, **own.cards}, own.hidden, own.sections)


def build_ranked_table(title: str, note: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> Section:
    """A section of rows that are sorted, best first: the first MAX_ROWS of them. note: where all are shown."""
    shown = f"the first {MAX_ROWS} of {len(rows):,}" if len(rows) > MAX_ROWS else note
    return Section(title, shown, header=header, rows=rows[:MAX_ROWS])


def find_logarithmic(spec: str) -> set[str] | None:
    """The hyper-parameters that a recorded spec (YAML) searches over their logarithm; None if it has no space."""
    fields = yaml.safe_load(spec)
    space = fields.get("space") if isinstance(fields, dict) else None
    return {path for path, word in space.items() if str(word).startswith("log")} if space else None
