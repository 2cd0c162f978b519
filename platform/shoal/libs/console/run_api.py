"""One run: what it is, its curves, its events, and what its processes printed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.extend.runs import PANELS, EventRecord, Run, format_warning, list_outputs, load, read_output, thin
from shoal.libs.console.answers import answer_json, read_number
from shoal.libs.console.curves import CurveCache
from shoal.libs.console.notes import RunNote, read_notes
from shoal.plugins.library import collect_extensions

MAX_EVENTS = 500
MAX_POINTS = 4000
MAX_OUTPUT_BYTES = 1 << 17
_CURVES = CurveCache()


def describe_run(request: Request) -> Response:
    """Everything of the record except the histories; `fields`: the spec, by the paths of its fields."""
    run = load(request.path_params["run"])
    named = {
        "kind": run.kind.value,
        "incarnation": run.incarnation,
        "fields": read_fields(run),
        "note": read_notes().get(run.id, RunNote()),
        "has_sections": run.kind in collect_extensions(PANELS),
    }
    return answer_json({**run.to_dict(), **named})


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


def read_curves(request: Request) -> Response:
    """Curves of the `names` (all when left out), thinned to `points` between the steps `first` and `last`.

    `quick=1`: of a sample of the steps where the run was not read yet; then `sampled` is true.
    """
    run, asked = load(request.path_params["run"]), request.query_params
    num_points = int(min(MAX_POINTS, max(2.0, read_number(request, "points", 1000))))
    first, last = read_number(request, "first", -math.inf), read_number(request, "last", math.inf)
    sample = _CURVES.sample(run) if asked.get("quick") else None
    curves = _CURVES.read(run) if sample is None else sample
    names = asked.getlist("names") or list(curves)
    thinned = {name: thin(curves[name], num_points, first, last) for name in names if name in curves}
    return answer_json({"incarnation": run.incarnation, "sampled": sample is not None, "curves": thinned})


def list_events(request: Request) -> Response:
    """The newest events, oldest first; `message`: in words, where they report a problem. Those after a number."""
    run, after = load(request.path_params["run"]), read_number(request, "after", -1)
    return answer_json(
        [{**each._asdict(), "message": _find_message(each)} for each in run.read_events(after, MAX_EVENTS)]
    )


def _find_message(event: EventRecord) -> str:
    try:
        return format_warning(event.kind, event.details)
    except (KeyError, TypeError, ValueError):  # an event of a user's own, of the same name
        return ""


def read_log(request: Request) -> Response:
    """What a `process` printed after byte `after`, by default the end of it; and the names of all processes."""
    run, asked = load(request.path_params["run"]), request.query_params
    outputs = list_outputs(run.folder)
    process = asked.get("process") or next(iter(outputs), "")
    after = int(read_number(request, "after", -1))
    path = outputs.get(process)
    text, begin, end = ("", 0, 0) if path is None else read_output(path, None if after < 0 else after, MAX_OUTPUT_BYTES)
    return answer_json({"processes": list(outputs), "process": process, "text": text, "begin": begin, "end": end})


ROUTES = [
    Route("/api/runs/{run}", describe_run),
    Route("/api/runs/{run}/curves", read_curves),
    Route("/api/runs/{run}/events", list_events),
    Route("/api/runs/{run}/log", read_log),
]
