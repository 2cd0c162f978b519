"""What the page of a run shows, as data: a console answers with it, and a report has it inside."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from shoal.extend.cost import MEASURED, PREDICTED, build_cost_panel
from shoal.extend.runs import (
    FOLDED,
    HIDDEN,
    MEAN_RETURN,
    PANELS,
    RETURNS,
    VALIDATION,
    Count,
    EventRecord,
    Panel,
    Run,
    RunKind,
    RunPanels,
    encode_picture,
    format_metric,
    format_number,
    format_size,
    format_warning,
    list_counts,
    load,
    summarize_metrics,
)
from shoal.plugins.find import find_optional

MAX_EVENTS = 500
MAX_DRAWN = 8
PICTURES = "pictures"  # a folder of a run's folder
MAX_PICTURES, MAX_PICTURE_BYTES = 12, 4 << 20
_drawing = threading.Lock()


def describe_run(run: Run) -> dict[str, Any]:
    """Everything of the record except the histories; `fields`: the spec, by the paths of its fields."""
    panels, fields = find_panels(run.kind), read_fields(run)
    targets = _find_targets(fields)
    return {
        **run.to_dict(),
        **{name: getattr(panels, name) for name in ("titles", "hidden", "folded", "opens_on")},
        "kind": run.kind.value,
        "fields": fields,
        "read_at": time.time(),
        "commands": run.list_commands(),
        "targets": targets,
        "criteria": [*targets, *(run.best() or ())[:1], *panels.criteria],
    }


def _find_targets(fields: Mapping[str, Any]) -> dict[str, float]:
    """The metrics at whose values the run ends, and these values."""
    targets = {
        f"{RETURNS}{path.split('.')[1]}" if "." in path else MEAN_RETURN: value
        for path, value in fields.items()
        if path.endswith("target_return") and value is not None
    }
    if (target := fields.get("target_reward")) is not None:
        targets["sessions/reward"] = target
    if (metric := fields.get("stop.target.metric")) is not None:
        targets[f"{VALIDATION}{metric}"] = fields["stop.target.value"]
    return targets


def read_fields(run: Run) -> dict[str, Any]:
    """The spec that a run was created with: the value of each field by its path, as in `learner.batch_steps`."""
    try:
        loaded = yaml.safe_load(run.spec)
    except yaml.YAMLError:
        return {}
    return dict(_list_fields(loaded)) if isinstance(loaded, dict) else {}


def _list_fields(fields: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in fields.items():
        path = f"{prefix}{name}"
        found += _list_fields(value, f"{path}.") if isinstance(value, dict) and value else [(path, value)]
    return found


def describe_panels(run: Run) -> list[Panel]:
    """All panels of a run as it is now, without those that it lacks.

    What a library draws is drawn again only after a new event; one run at a time, for it takes a second of a processor.
    """
    panels, events = find_panels(run.kind), run.last_events()
    with _drawing:
        drawn = _draw(run.folder, run.incarnation, *(each.number for each in run.read_events(most=1)))
    found = sorted((run.folder / PICTURES).glob("*.png"))
    shown = [path for path in found if path.stat().st_size <= MAX_PICTURE_BYTES][:MAX_PICTURES]
    event = events.get("staleness", {})
    counts = sorted((int(age), float(count)) for age, count in event.get("counts", {}).items())
    note = "{updates:,} updates, {dropped:,} dropped, {lost:,} lost".format(**event) if event else ""
    bars = [Count(f"{age}", count, format_number(count)) for age, count in counts]
    rows = []
    for folder in sorted((run.folder / "checkpoints").glob("step-*"), reverse=True):
        with suppress(FileNotFoundError):
            size_bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            rows.append((f"{int(folder.name[5:]):,}", format_size(size_bytes)))
    others = [
        build_cost_panel({"predicted": events.get(PREDICTED, {}), "measured": events.get(MEASURED, {})}),
        Panel(title="checkpoints", note="on this host", header=("step", "size"), rows=rows),
        Panel(title="pictures", pictures=[(path.stem, encode_picture(path.read_bytes())) for path in shown]),
        Panel(
            title="staleness τ of the updates",
            note=note,
            about="By how many updates the weights were behind from which an update was computed.",
            counts=bars,
        ),
        Panel(
            title="all metrics",
            header=("name", "newest", "lowest", "highest"),
            rows=[
                (each.name, *("-" if value is None else format_metric(each.name, value) for value in each[3:]))
                for each in summarize_metrics(run)
            ],
        ),
        Panel(
            title="how to reproduce",
            note="tracked files had changes that no commit holds" if run.git_dirty else "",
            commands=[*([f"git checkout {run.git_revision}"] if run.git_revision else []), *run.list_commands()],
        ),
    ]
    return [
        _list_cards(run, panels.cards),
        *list_counts(run.latest(since_resumed=True)),
        *drawn,
        *(each for each in others if each.counts or each.rows or each.pictures or each.commands),
    ]


@lru_cache(MAX_DRAWN)
def _draw(folder: Path, *state: int) -> Sequence[Panel]:
    """What the library of its kind shows of the run with this folder, in this state."""
    run = load(folder.name)
    return list(find_panels(run.kind).panels(run))


def _list_cards(run: Run, cards: Mapping[str, str]) -> Panel:
    """The headline numbers of a run."""
    latest, best = run.latest(), run.best()
    rows = [(label, format_metric(name, latest[name])) for name, label in cards.items() if name in latest]
    if best is not None:
        name, value = best
        label = "mean return" if name == MEAN_RETURN else name.removeprefix(VALIDATION)
        registered = run.last_events().get("trained", {}).get("metrics", {}).get(label)
        shown, which = (latest[name], "newest") if registered is None else (registered, "registered")
        rows = [(f"best {label}", format_number(value)), (f"{which} {label}", format_number(shown)), *rows]
    return Panel(title="at a glance", rows=rows)


def describe_events(run: Run, after: float = -1) -> list[dict[str, Any]]:
    """The newest events, oldest first; `message`: in words, where they report a problem. Those after a number."""
    return [{**each._asdict(), "message": _find_message(each)} for each in run.read_events(after, MAX_EVENTS)]


def _find_message(event: EventRecord) -> str:
    try:
        return format_warning(event.kind, event.details)
    except (KeyError, TypeError, ValueError):  # an event of a user's own, of the same name
        return ""


COMMON = RunPanels(
    titles={
        MEAN_RETURN: "Mean return, last 100 episodes",
        "return/best_actions": "Mean return by best actions",
        "episode/return_std": "Spread of returns (standard deviation)",
        "episode/length": "Mean length of episodes (steps)",
        "episode/success_rate": "Share of episodes that reached their goal",
        "steps/per_s": "Environment steps a second",
        "learner/loss": "Learner loss",
        "learner/entropy": "Policy entropy",
        "learner/policy_lag": "Policy lag (versions behind the newest)",
        "learner/clip_fraction": "Share of clipped steps",
        "learner/rho_clip_fraction": "Share of clipped importance weights",
        "learner/explained_variance": "Variance of returns that the value explains",
        "learner/q_value": "Mean of the values Q",
        "learner/td_error": "Error of the values Q",
        "learner/temperature": "Temperature of the policy",
        "learner/demonstration_weight": "Weight of demonstrations in the loss",
        "learner/demonstration_share": "Share of demonstrations in a sample",
        "learner/cloning_loss": "Cross entropy of what was shown",
        "queue/depth": "Segments (pieces of episodes) that wait",
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
        "episode/success_rate": "success rate",
        "episode/length": "steps an episode",
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
    hidden=HIDDEN,
    criteria=(MEAN_RETURN, RETURNS, VALIDATION, "evaluation/", "episode/", "train/loss", "learner/loss", "loss"),
    folded=FOLDED,
)


def find_panels(kind: RunKind) -> RunPanels:
    """Those of every run, and those of the kind. Raises ValueError where the kind's cannot be imported."""
    own: RunPanels | None = find_optional(kind, PANELS)
    if own is None:
        return COMMON
    return replace(
        own,
        titles={**COMMON.titles, **own.titles},
        cards={**COMMON.cards, **own.cards},
        hidden=(*COMMON.hidden, *own.hidden),
        criteria=(*own.criteria, *COMMON.criteria),
        folded=(*own.folded, *COMMON.folded),
    )
