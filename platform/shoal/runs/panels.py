"""What is looked at of a run: its panels, which the terminal, the console and the report draw.

`list_counts` makes those that any run may have from its newest metrics. A library names the RunPanels of its kind of
run in its extensions, in the group PANELS. They are drawn by `shoal.cli.display.panels` on a terminal, by
`shoal.runs.figures` in a PNG, and by the console's JavaScript on a page.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import yaml

from shoal.runs.formatting import format_number, sort_opponents
from shoal.runs.run_reader import Run

PANELS = "shoal.panels"
HIDDEN = ("actor_lag/", "rejected/", "win_rate/", "queue/capacity")  # metrics that `list_counts` shows: no curves
FOLDED = (  # rates, waits and counts, which pages fold
    *("actors/", "drops/", "endpoint/", "episodes/", "flops/", "lag/", "memory/", "queue/", "samples/"),
    *("segments/", "step/", "steps/", "wait/", "weights/", "train/step", "train/epoch", "train/learning_rate"),
    *("learner/updates", "learner/update_ms", "learner/batch_steps", "learner/replay_steps"),
)

Cell = str | tuple[str, str]
"""A text, or a text and its tone: good, warn, bad, busy, muted; or the id of a run and "run", which a page links."""


class Count(NamedTuple):
    """One of several that are drawn as bars. text: the value in words"""

    name: str
    value: float
    text: str
    tone: str = ""


class Line(NamedTuple):
    """A curve. ys: None where there is a gap. tone: "muted" for one of many, "busy" for the one that is meant"""

    label: str
    xs: Sequence[float]
    ys: Sequence[float | None]
    tone: str = ""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """A heading with what there is of lines, counts, a table, pictures and commands.

    about:           what it is, for a reader who does not know its words: pages show it, a terminal has no room
    x, scale, marks: of the lines: the axis, which axes are logarithmic ("", "x", "y" or "xy"), and moments on x
    pictures:        a caption, and the picture as a data URL
    """

    title: str
    note: str = ""
    about: str = ""
    lines: Sequence[Line] = ()
    x: str = "step"
    scale: str = ""
    marks: Sequence[tuple[float, str]] = ()
    counts: Sequence[Count] = ()
    header: Sequence[str] = ()
    rows: Sequence[Sequence[Cell]] = ()
    pictures: Sequence[tuple[str, str]] = ()
    commands: Sequence[str] = ()


@dataclass(frozen=True)
class RunPanels:
    """What a kind of run shows.

    titles: metric -> the title of its curve
    cards:  metric -> the label of its headline number, in display order
    hidden: prefixes of metrics that are not drawn alone: panels show them
    criteria: prefixes of the metrics that a run is judged by, the first one first: their curves begin its page
    folded: prefixes of rates, waits and counts: their curves are below the others, folded
    opens_on: the part of its page that is shown first: curves or panels
    panels: makes the panels of a run as it stands; called again after a new event
    """

    titles: Mapping[str, str] = field(default_factory=dict)
    cards: Mapping[str, str] = field(default_factory=dict)
    hidden: tuple[str, ...] = ()
    criteria: tuple[str, ...] = ()
    folded: tuple[str, ...] = ()
    opens_on: Literal["curves", "panels"] = "curves"
    panels: Callable[[Run], Sequence[Panel]] = lambda run: ()


def list_counts(metrics: Mapping[str, float]) -> list[Panel]:
    """The counts among the newest metrics of a run, the same for all who show them; without those that it lacks."""
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for name, value in metrics.items():
        group, _, rest = name.partition("/")
        groups[group][rest] = value
    queue, waits = groups["queue"], groups["wait"]
    parts = {name: groups["segments"].get(name, 0.0) for name in ("received", "consumed", "queued", "dropped")}
    missing, differ = 2 * parts["received"] - sum(parts.values()), "consumed + queued + dropped"
    of = f" of {format_number(queue['capacity'])}" if "capacity" in queue else ""
    shares = {"computing": 1.0 - sum(waits.values()), **{f"waits for {name}": share for name, share in waits.items()}}
    panels = [
        Panel(
            title="actors",
            note=f"{format_number(metrics.get('actors/connected', 0.0))} connected, lag",
            about="How many versions behind the newest one the policy is by which each actor acts.",
            counts=[
                Count(name, lag, format_number(lag), "good" if lag <= 2 else "warn" if lag <= 10 else "bad")
                for name, lag in sorted(groups["actor_lag"].items())
            ],
        ),
        Panel(title="won", counts=[Count(*each, f"{each[1]:.0%}") for each in sort_opponents(groups["win_rate"])]),
        Panel(
            title="queue",
            about="Pieces of episodes (segments) that wait to be learnt from. Credit: how many more actors may send.",
            counts=[
                Count(label, queue[name], f"{format_number(queue[name])}{of}")
                for label, name in (("segments", "depth"), ("credit given", "credit"))
                if name in queue
            ],
        ),
        Panel(
            title="segments",
            about="What became of the pieces of episodes that the actors have sent.",
            note=f"✗ received and {differ} differ by {missing:,.0f}" if missing else f"✓ received = {differ}",
            counts=[Count(name, count, format_number(count)) for name, count in parts.items() if groups["segments"]],
        ),
        Panel(
            title="drops",
            about="Segments, or sessions of agents, that nothing is learnt from, by the reason.",
            counts=_count(groups["drops"]),
        ),
        Panel(
            title="rejected",
            about="What the gateway, to which the actors connect, has refused: by actor and reason.",
            counts=_count(groups["rejected"], "bad"),
        ),
        Panel(
            title="a step",
            about="What the time of a step of training goes into.",
            counts=[Count(name, share, f"{share:.1%}") for name, share in shares.items() if waits],
        ),
    ]
    return [panel for panel in panels if panel.counts]


def _count(counts: Mapping[str, float], tone: str = "") -> list[Count]:
    """Those that are not 0, most first."""
    ranked = sorted(counts.items(), key=lambda each: (-each[1], each[0]))
    return [Count(name, count, format_number(count), tone) for name, count in ranked if count]


def encode_picture(data: bytes, kind: str = "png") -> str:
    """A picture as a data URL."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def find_logarithmic(spec: str) -> set[str] | None:
    """The hyper-parameters that a recorded spec (YAML) searches over their logarithm; None if it has no space."""
    fields = yaml.safe_load(spec)
    space = fields.get("space") if isinstance(fields, dict) else None
    return {path for path, word in space.items() if str(word).startswith("log")} if space else None
