"""The list of runs: all of this host's record and of the store, each as one row of the page's table."""

from __future__ import annotations

from typing import Any

import yaml
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.extend.runs import Run, list_with_best
from shoal.libs.console.answers import answer_json

MAX_RUNS = 10_000


def list_rows(request: Request) -> Response:
    """Every run, newest first."""
    limit = min(MAX_RUNS, int(request.query_params.get("limit") or MAX_RUNS))
    return answer_json([_describe(run, best) for run, best in list_with_best(limit)])


def _describe(run: Run, best: tuple[str, float] | None) -> dict[str, Any]:
    return {
        **{name: getattr(run, name) for name in ("id", "job", "title", "created_at", "finished_at", "duration_s")},
        **{name: getattr(run, name) for name in ("host", "copied_from", "error", "git_revision")},
        "status": run.status.value,
        "kind": run.kind.value,
        "best": best,
    }


def read_spec(run: Run) -> dict[str, Any]:
    """The fields of the spec that a run was created with."""
    loaded = yaml.safe_load(run.spec)
    return loaded if isinstance(loaded, dict) else {}


ROUTES = [Route("/api/runs", list_rows)]
