"""Endpoints and clusters as they are now. Of an endpoint: rates, latencies, versions and their evidence; changes, the
audit log, what was printed. Of this host's clusters, those of `shoal up`, of $RAY_ADDRESS and of runs: nodes and jobs.

The endpoint's own interface is asked, with the access token, which no browser gets. Changes go there too: the audit log
has them with the caller `administrator (console)`. Clusters' dashboards are asked, over HTTP: the console joins no
cluster and imports no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from itertools import islice
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shoal.client.discovery import FoundEndpoint, list_endpoints
from shoal.errors import ClusterError, ConfigError, RunError, ShoalError
from shoal.extend.cli import EndpointLogs, describe_status, list_jobs_by_endpoint
from shoal.extend.cluster import ClusterHandle, connect, list_clusters, list_jobs, list_nodes, list_reservations
from shoal.extend.runs import mask_command_line
from shoal.extend.serve import EndpointStatus, read_audit_log
from shoal.home import home
from shoal.libs.console.answers import PROGRAM, answer_json, require_session, with_fields
from shoal.libs.console.serving.readings import SharedReading, wait_for_all
from shoal.runs import list_runs

CHANGES = ("promote", "rollback", "canary", "shadow")
MAX_AUDIT = 200
MAX_LINES = 1000
MAX_JOBS = 50
MAX_RUNS = 200  # among which the run of a job's process is found


class Endpoints:
    """The endpoints of this host, and the newest status of each."""

    def __init__(self) -> None:
        self._listed = SharedReading(list_endpoints)
        self._statuses: dict[str, SharedReading[EndpointStatus]] = {}

    def read_all(self) -> list[tuple[FoundEndpoint, SharedReading[EndpointStatus]]]:
        """All of them, each with its newest reading."""
        found = self._listed.get() or []
        if not found and self._listed.problem:
            raise RunError(self._listed.problem)
        pairs = [(each, self._statuses.setdefault(each.url, SharedReading(each.read_status))) for each in found]
        for _, reading in pairs:
            reading.begin()
        wait_for_all([reading for _, reading in pairs])
        return pairs

    def find(self, name: str) -> tuple[FoundEndpoint, SharedReading[EndpointStatus]]:
        """The endpoint of this name. Raises RunError."""
        pairs = self.read_all()
        for found, reading in pairs:
            if found.name == name:
                return found, reading
        known = ", ".join(found.name for found, _ in pairs) or "none is up"
        raise RunError(f"there is no endpoint {name!r} here now: {known}")


def list_all(request: Request) -> Response:
    """Every endpoint with its status."""
    return answer_json([_describe(*each) for each in request.app.state.endpoints.read_all()])


def describe_endpoint(request: Request) -> Response:
    """One endpoint with its status."""
    return answer_json(_describe(*request.app.state.endpoints.find(request.path_params["endpoint"])))


def _describe(found: FoundEndpoint, reading: SharedReading[EndpointStatus]) -> dict[str, Any]:
    status = reading.value
    return {
        "name": found.name,
        "url": found.url,
        "run": found.run_id,
        "status": status and msgspec.to_builtins(status),
        "problem": reading.problem,
        "read_at": reading.read_at,
    }


def change(request: Request, fields: Mapping[str, Any]) -> Response:
    """Promote, roll back, shadow or share a model's requests: the fields of the endpoint's own `rollout`."""
    action, model = fields.get("action"), request.path_params["model"]
    if action not in CHANGES:
        raise ConfigError("action", action, "is no change that the console makes", f"one of {', '.join(CHANGES)}")
    found, reading = request.app.state.endpoints.find(request.path_params["endpoint"])
    given = {name: fields[name] for name in ("version", "from_version", "percent", "reason") if name in fields}
    with found.connect() as client:
        now = client.rollout(action, model, program=PROGRAM, **given)
    reading.forget()
    return answer_json(msgspec.to_builtins(now))


def list_audit(request: Request) -> Response:
    """The newest entries of the audit log for this endpoint, newest first. The log is for its owner alone."""
    require_session(request)
    name = request.path_params["endpoint"]
    entries = (each for each in read_audit_log(home(), newest_first=True) if each.get("endpoint") == name)
    return answer_json(list(islice(entries, MAX_AUDIT)))


def list_log_lines(request: Request) -> Response:
    """The last lines that the endpoint's job, controller and replicas have printed, each with its process."""
    require_session(request)
    name, problem = request.path_params["endpoint"], "no cluster is up here that could have its logs"
    lines: list[tuple[str, str]] = []
    for cluster in list_clusters():
        job = list_jobs_by_endpoint(cluster).get(name)
        logs = EndpointLogs(cluster, name, job.submission_id if job else "")
        lines, problem = lines + logs.read_new_lines(is_over=True), ""
    if problem:
        raise ClusterError(problem)
    return answer_json(lines[-MAX_LINES:])


def read_clusters() -> dict[str, Any]:
    """What runs and waits on this host, and each cluster: one that does not answer has its `problem` there."""
    status = describe_status(None)
    return {
        **{name: status[name] for name in ("queue", "runs", "detached")},
        "clusters": [_describe_cluster(each) for each in list_clusters()],
    }


def _describe_cluster(cluster: ClusterHandle) -> dict[str, Any]:
    described = {"address": cluster.address, "dashboard_url": cluster.dashboard_url}
    try:
        with connect(cluster) as client:
            nodes, reservations = list_nodes(client), list_reservations(client)
        jobs = list_jobs(cluster, has_drivers=True)[:MAX_JOBS]
        recorded = list_runs(MAX_RUNS)
    except ShoalError as error:
        return {**described, "problem": str(error)}
    hosts = {node.address: node.host for node in nodes}
    writers = {(run.host, str(run.pid)): run for run in reversed(recorded)}
    runs = {job.submission_id: job.run for job in jobs}
    for job in jobs:
        writer = writers.get((hosts.get(job.driver.get("node_ip_address", ""), ""), job.driver.get("pid", "")))
        if writer is not None and writer.heartbeat_at >= job.started_at_s:  # else the number of its process came again
            runs[job.submission_id] = job.run or writer.id
    return {
        **described,
        "nodes": [asdict(each) for each in nodes],
        "reservations": [{**asdict(each), "run": each.run or runs.get(each.job, "")} for each in reservations],
        "jobs": [
            {
                "id": job.submission_id,
                "run": runs[job.submission_id],
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


ROUTES = [
    Route("/api/endpoints", list_all),
    Route("/api/endpoints/{endpoint}", describe_endpoint),
    Route("/api/endpoints/{endpoint}/audit", list_audit),
    Route("/api/endpoints/{endpoint}/logs", list_log_lines),
    Route("/api/endpoints/{endpoint}/models/{model}/rollout", with_fields(change), methods=["POST"]),
    Route("/api/cluster", describe_clusters),
]
