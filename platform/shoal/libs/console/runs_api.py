"""The list of runs, of this host's record and of the store, and one run.

A row and the notes of each; its panels, its curves, its events, what its processes printed, and who is in quarantine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.extend.rl import read_run_quarantine, release_in_run
from shoal.extend.runs import (
    Status,
    list_metric_names,
    list_outputs,
    list_with_best,
    load,
    read_newest,
    read_output,
    remove_runs,
    thin,
)
from shoal.libs.console import run_data
from shoal.libs.console.answers import answer_json, audit, load_exactly, read_number, with_fields
from shoal.libs.console.curves import CurveCache
from shoal.libs.console.notes import RunNote, change_note, read_notes, remove_notes

MAX_RUNS = 10_000
MAX_POINTS = 4000
MAX_OUTPUT_BYTES = 1 << 17
_CURVES = CurveCache()
_FIELDS = ("id", "name", "job", "created_at", "finished_at", "host", "owner", "copied_from", "error", "git_revision")


def list_rows(request: Request) -> Response:
    """Every run, newest first, with the newest values of the `metrics`."""
    limit = max(0, min(MAX_RUNS, int(read_number(request, "limit", MAX_RUNS))))
    listed, notes = list_with_best(limit), read_notes()
    pinned = read_newest([run for run, _ in listed], request.query_params.getlist("metrics"))
    rows = [
        {
            **{name: getattr(run, name) for name in _FIELDS},
            **asdict(notes.get(run.id, RunNote())),
            "status": run.status.value,
            "duration_s": None if run.status is Status.RUNNING else run.duration_s,  # rows without news are equal
            "kind": run.kind.value,
            "best": best,
            "values": pinned.get(run.id, {}),
        }
        for run, best in listed
    ]
    return answer_json(rows)


def list_metrics(request: Request) -> Response:
    """The names of all metrics, those of the most runs first."""
    return answer_json(list_metric_names())


def change(request: Request, changes: Mapping[str, Any]) -> Response:
    """Change the note, the tags, or whether it is archived."""
    return answer_json(change_note(load_exactly(request.path_params["run"]).id, changes))


def remove(request: Request) -> Response:
    """Remove a run as `shoal runs rm` does: its record, its files, in the store too."""
    with audit(request, "remove", run=request.path_params["run"]):
        run = load_exactly(request.path_params["run"])
        remove_runs([run])
    remove_notes([run.id])
    return answer_json({"removed": run.id})


def describe_run(request: Request) -> Response:
    """What a page shows of the run at once, and what people wrote about it."""
    run = load(request.path_params["run"])
    return answer_json({**run_data.describe_run(run), "note": read_notes().get(run.id, RunNote())})


def describe_panels(request: Request) -> Response:
    """All panels, and who is in quarantine."""
    run = load(request.path_params["run"])
    shortage = run.last_events(since_resumed=True).get("credit_exhausted", {}).get("actors", [])
    quarantined = read_run_quarantine(run.folder)
    panels = run_data.describe_panels(run)
    return answer_json({"panels": panels, "quarantined": quarantined, "without_credit": shortage})


def release(request: Request, fields: Mapping[str, Any]) -> Response:
    """Release an `actor` from quarantine, as `shoal release` does."""
    run_id, actor = request.path_params["run"], str(fields.get("actor", ""))
    with audit(request, "release", run=run_id, actor=actor):
        release_in_run(load_exactly(run_id).folder, actor)
    return answer_json({"released": actor})


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
    """The newest events; those after a number."""
    return answer_json(run_data.describe_events(load(request.path_params["run"]), read_number(request, "after", -1)))


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
    Route("/api/runs", list_rows),
    Route("/api/metrics", list_metrics),
    Route("/api/runs/{run}", with_fields(change), methods=["PATCH"]),
    Route("/api/runs/{run}", remove, methods=["DELETE"]),
    Route("/api/runs/{run}", describe_run),
    Route("/api/runs/{run}/panels", describe_panels),
    Route("/api/runs/{run}/release", with_fields(release), methods=["POST"]),
    Route("/api/runs/{run}/curves", read_curves),
    Route("/api/runs/{run}/events", list_events),
    Route("/api/runs/{run}/log", read_log),
]
