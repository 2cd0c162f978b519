"""What a run of one kind has besides curves: actors and queue, the cost of a training step, the report of a library."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections import OrderedDict
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.extend.cost import MEASURED, PREDICTED, QUANTITIES
from shoal.extend.rl import read_run_quarantine, release_in_run
from shoal.extend.runs import PANELS, ReportPanels, Run, Section, load
from shoal.libs.console.answers import answer_json, audit, load_exactly, read_body
from shoal.plugins.find import load_reference
from shoal.plugins.library import collect_extensions

GROUPS = ("actor_lag", "drops", "rejected", "queue", "segments", "win_rate")
NUM_VERSIONS = 100
MAX_SECTIONS = 8
_sections: OrderedDict[tuple[str | int, ...], list[dict[str, Any]]] = OrderedDict()
_drawing = threading.Lock()


def describe_loop(request: Request) -> Response:
    """The newest lags, drops, rejections and counts of the queue; who is in quarantine; the weight versions."""
    run = load(request.path_params["run"])
    latest, every = run.latest(since_resumed=True), max(1, run.num_versions() // NUM_VERSIONS)
    groups: dict[str, dict[str, float]] = {name: {} for name in GROUPS}
    for name, value in latest.items():
        group, _, rest = name.partition("/")
        if group in groups:
            groups[group][rest] = value
    return answer_json(
        {
            **groups,
            "connected": latest.get("actors/connected"),
            "shortage": run.last_events(since_resumed=True).get("credit_exhausted"),
            "quarantined": read_run_quarantine(run.folder),
            "versions": run.list_versions(every),
        }
    )


async def release(request: Request) -> Response:
    """Release an `actor` from quarantine, as `shoal release` does."""
    actor = str((await read_body(request)).get("actor", ""))
    await asyncio.to_thread(_release, request, request.path_params["run"], actor)
    return answer_json({"released": actor})


def _release(request: Request, run_id: str, actor: str) -> None:
    with audit(request, "release", run=run_id, actor=actor):
        release_in_run(load_exactly(run_id).folder, actor)


def describe_training(request: Request) -> Response:
    """The measured and the predicted cost of a step, the share of it that each part takes, and the checkpoints."""
    run = load(request.path_params["run"])
    last, latest = run.last_events(), run.latest()
    measured, predicted = last.get(MEASURED, {}), last.get(PREDICTED, {})
    rows = [
        {
            "name": each.name,
            "meaning": each.meaning,
            "unit": each.unit,
            "measured": measured.get(each.name),
            "predicted": predicted.get(each.name),
        }
        for each in QUANTITIES
    ]
    shares = {name.removeprefix("wait/"): value for name, value in latest.items() if name.startswith("wait/")}
    return answer_json(
        {
            "costs": [row for row in rows if row["measured"] is not None or row["predicted"] is not None],
            "step_s": latest.get("step/seconds"),
            "shares": shares,
            "began": last.get("training"),
            "checkpoints": _list_checkpoints(run),
        }
    )


def _list_checkpoints(run: Run) -> list[dict[str, Any]]:
    """Of this host, newest first. One that is being removed is left out."""
    from shoal.checkpoint.directory import parse_step  # loads torch

    found = []
    for folder in (run.folder / "checkpoints").glob("step-*"):
        with suppress(FileNotFoundError):
            size = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
            found.append({"step": parse_step(folder.name), "time": folder.stat().st_mtime, "size_bytes": size})
    return sorted(found, key=lambda each: -int(each["step"]))


def describe_sections(request: Request) -> Response:
    """What a library adds to the report of its kind of runs: figures (SVG, as base64), tables, commands.

    Drawn again only after a new event; one at a time, for it takes a second of a processor.
    """
    run = load(request.path_params["run"])
    reference = collect_extensions(PANELS).get(run.kind)
    if reference is None:
        return answer_json([])
    key = (run.id, run.incarnation, *(each.number for each in run.read_events(most=1)))
    with _drawing:
        if key not in _sections:
            panels: ReportPanels = load_reference(reference)
            _sections[key] = [_describe_section(each) for each in panels.sections(run)]
            while len(_sections) > MAX_SECTIONS:
                _sections.popitem(last=False)
        return answer_json(_sections[key])


def _describe_section(section: Section) -> dict[str, Any]:
    figures = [base64.b64encode(each.encode()).decode() for each in section.figures]
    named = {name: getattr(section, name) for name in ("title", "note", "header", "rows", "commands")}
    return {**named, "figures": figures}


ROUTES = [
    Route("/api/runs/{run}/loop", describe_loop),
    Route("/api/runs/{run}/release", release, methods=["POST"]),
    Route("/api/runs/{run}/training", describe_training),
    Route("/api/runs/{run}/sections", describe_sections),
]
