"""The list of runs: all of this host's record and of the store, a row each; and their notes."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.extend.runs import Status, list_metric_names, list_with_best, read_newest, remove_runs
from shoal.libs.console.answers import answer_json, audit, load_exactly, read_body, read_number
from shoal.libs.console.notes import RunNote, change_note, read_notes, remove_notes

MAX_RUNS = 10_000
_FIELDS = (
    *("id", "job", "title", "created_at", "finished_at"),
    *("host", "owner", "copied_from", "error", "git_revision"),
)


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


async def change(request: Request) -> Response:
    """Change the note, the tags, or whether it is archived."""
    changes = await read_body(request)
    return answer_json(await asyncio.to_thread(_change, request.path_params["run"], changes))


def _change(run_id: str, changes: dict[str, Any]) -> dict[str, Any]:
    return asdict(change_note(load_exactly(run_id).id, changes))


def remove(request: Request) -> Response:
    """Remove a run as `shoal runs rm` does: its record, its files, in the store too."""
    with audit(request, "remove", run=request.path_params["run"]):
        run = load_exactly(request.path_params["run"])
        remove_runs([run])
    remove_notes([run.id])
    return answer_json({"removed": run.id})


ROUTES = [
    Route("/api/runs", list_rows),
    Route("/api/metrics", list_metrics),
    Route("/api/runs/{run}", change, methods=["PATCH"]),
    Route("/api/runs/{run}", remove, methods=["DELETE"]),
]
