"""The clusters of this host: that of `shoal up` or of $RAY_ADDRESS, and those that runs have started for themselves.

Their dashboards are asked, over HTTP: the console joins no cluster and imports no Ray.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.errors import ShoalError
from shoal.extend.cli import describe_status
from shoal.extend.cluster import ClusterHandle, connect, list_clusters, list_jobs, list_nodes, list_reservations
from shoal.extend.runs import mask_command_line
from shoal.libs.console.answers import answer_json
from shoal.libs.console.serving.readings import SharedReading

MAX_JOBS = 50


def read_clusters() -> dict[str, Any]:
    """What runs and waits on this host, and each cluster: one that does not answer has its `problem` there."""
    status = describe_status(None)
    return {
        **{name: status[name] for name in ("queue", "runs", "detached")},
        "clusters": [_describe(each) for each in list_clusters()],
    }


def _describe(cluster: ClusterHandle) -> dict[str, Any]:
    described = {"address": cluster.address, "dashboard_url": cluster.dashboard_url}
    try:
        with connect(cluster) as client:
            nodes, reservations = list_nodes(client), list_reservations(client)
        jobs = list_jobs(cluster)[:MAX_JOBS]
    except ShoalError as error:
        return {**described, "problem": str(error)}
    return {
        **described,
        "nodes": [asdict(each) for each in nodes],
        "reservations": [asdict(each) for each in reservations],
        "jobs": [
            {
                "id": job.submission_id,
                "status": job.status.value,
                "started_at": job.started_at_s,
                "command": mask_command_line(job.entrypoint),
            }
            for job in jobs
        ],
    }


def describe_clusters(request: Request) -> Response:
    """The newest reading of all of them."""
    reading: SharedReading[dict[str, Any]] = request.app.state.clusters
    found = reading.get()
    return answer_json({**(found or {}), "problem": reading.problem, "read_at": reading.read_at})


ROUTES = [Route("/api/cluster", describe_clusters)]
