"""One run: what it is, its curves, its events and what its processes printed."""

from __future__ import annotations

import math
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.extend.runs import load
from shoal.libs.console.answers import answer_json
from shoal.libs.console.curves import CurveCache

MAX_EVENTS = 500
MAX_POINTS = 4000
_CURVES = CurveCache()


def describe_run(request: Request) -> Response:
    """Everything of the record except the histories."""
    run = load(request.path_params["run"])
    return answer_json({**run.to_dict(), "kind": run.kind.value, "incarnation": run.incarnation})


def read_curves(request: Request) -> Response:
    """Curves of the `names` (all when left out), thinned to `points` between the steps `first` and `last`.

    `quick=1`: of a sample of the steps where the run was not read yet; then `sampled` is true.
    """
    run, asked = load(request.path_params["run"]), request.query_params
    num_points = min(MAX_POINTS, int(asked.get("points") or 1000))
    first, last = float(asked.get("first") or -math.inf), float(asked.get("last") or math.inf)
    sample = _CURVES.sample(run) if asked.get("quick") else None
    curves = _CURVES.read(run) if sample is None else sample
    names = asked.getlist("names") or list(curves)
    thinned = {name: curves[name].thin(num_points, first, last) for name in names if name in curves}
    return answer_json({"created_at": run.created_at, "sampled": sample is not None, "curves": thinned})


def list_events(request: Request) -> Response:
    """The newest events, oldest first."""
    run = load(request.path_params["run"])
    rows = run.query(
        "SELECT number, time, kind, details FROM events WHERE run = :run ORDER BY number DESC LIMIT :most",
        most=MAX_EVENTS,
    )
    return answer_json([_describe_event(tuple(row)) for row in reversed(rows)])


def _describe_event(row: tuple[int, float, str, str]) -> dict[str, Any]:
    number, time, kind, details = row
    return {"number": number, "time": time, "kind": kind, "details": details}


ROUTES = [
    Route("/api/runs/{run}", describe_run),
    Route("/api/runs/{run}/curves", read_curves),
    Route("/api/runs/{run}/events", list_events),
]
