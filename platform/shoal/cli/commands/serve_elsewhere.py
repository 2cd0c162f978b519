"""`shoal serve deploy` and `delete` on a cluster elsewhere, of which nothing is seen here but what its jobs say.

Registry, run record and token are those of the cluster; the current folder is uploaded, so that hooks are found. Called
by `serve_jobs`, whose verbs they are.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

import click

from shoal.cli.support.job_output import end_as_by_ctrl_c, ended_when_given_up, failure, new_run_id
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.jobs import Job, list_jobs, submit
from shoal.config import last_value, word_of
from shoal.errors import ClusterError, ConfigError, RunError
from shoal.flows.serving_spec import NAMED_BY_MODEL, ServingSpec
from shoal.registry import split_ref
from shoal.runs.record.provenance import apart, as_typed, command_variable

POLL_S = 0.5
_READY = re.compile(r"^serving \S+ \(now \S+\) at (http://[^/\s]+)", re.MULTILINE)
_GRPC = re.compile(r"^serving gRPC at (\S+)", re.MULTILINE)


def deploy_elsewhere(
    cluster: ClusterHandle, module: str, spec: ServingSpec, fields: Sequence[str], timeout_s: float
) -> None:
    """Returns when the models answer there. Raises ClusterError, ConfigError, ConnectionLost, RunError."""
    if not spec.models:
        raise ConfigError("models", [], "there is nothing to serve", "name a model of the cluster's registry")
    if there := _endpoints(cluster, module):
        remedy = f"`shoal serve delete --address {cluster.dashboard_url}` ends it"
        raise ClusterError(f"this cluster has an endpoint, {', '.join(there)}, and cannot have two: {remedy}")
    own = spec.endpoint.name
    name = split_ref(spec.models[0])[0] if own == NAMED_BY_MODEL else own
    shown, secrets = apart([*map(_within, fields), word_of("endpoint.name", name)])
    run_id = new_run_id()
    env = {"SHOAL_RUN_ID": run_id, **command_variable(as_typed(["shoal", *sys.argv[1:]])), **secrets}
    job = Job(cluster, run_id)
    end_as_by_ctrl_c()
    with ended_when_given_up(job.end):
        submit(cluster, ["python", "-m", module, *shown], env=env, working_dir=Path.cwd(), submission_id=run_id)
        url, grpc = _wait_until_ready(job, timeout_s)
    ports = [f"-L {urlsplit(each).port}:127.0.0.1:{urlsplit(each).port}" for each in (url, grpc) if each]
    click.echo(f"endpoint {name} is ready at {url}, on the loopback of the head of {cluster.dashboard_url}")
    click.echo("what next:")
    click.echo(f"  ssh -N {' '.join(ports)} HEAD &")
    click.echo(f"  shoal predict {name} --endpoint {url} --key TOKEN ...   ($SHOAL_HOME/token of the head)")
    click.echo(f"  shoal serve delete {name} --address {cluster.dashboard_url}")


def delete_elsewhere(cluster: ClusterHandle, module: str, endpoint: str | None, timeout_s: float) -> None:
    """Ends the endpoint that `deploy` started there. Raises RunError naming what there is."""
    there = _endpoints(cluster, module)
    if endpoint is None and len(there) == 1:
        endpoint = next(iter(there))
    if endpoint not in there:
        known = f"there is {', '.join(there)}" if there else "`shoal serve deploy` has none there"
        raise RunError(f"there is no endpoint {endpoint or ''} on {cluster.dashboard_url}: {known}")
    Job(cluster, there[endpoint]).stop(timeout_s)
    click.echo(f"endpoint {endpoint} is gone")


def _within(field: str) -> str:
    """A file is where the current folder is uploaded to. Raises ConfigError for one outside."""
    if not (value := last_value([field], "file")):
        return field
    file, here = Path(value).resolve(), Path.cwd().resolve()
    if not file.is_relative_to(here):
        raise ConfigError("file", value, f"lies outside {here}", "deploy from the folder that holds the file")
    return word_of("file", str(file.relative_to(here)))


def _endpoints(cluster: ClusterHandle, module: str) -> dict[str, str]:
    """Name -> job, of the endpoints that are kept up by jobs of ours."""
    found = {}
    for info in list_jobs(cluster):
        try:
            words = shlex.split(info.entrypoint)
        except ValueError:
            continue  # somebody else's, for whom a shell reads it
        if not info.status.is_over and module in words:
            first = (last_value(words, "models") or info.submission_id).partition(",")[0]
            found[last_value(words, "endpoint.name") or split_ref(first)[0]] = info.submission_id
    return found


def _wait_until_ready(job: Job, timeout_s: float) -> tuple[str, str]:
    """Where it listens: HTTP, and `//host:port` of gRPC or "". Raises RunError with the job's own words when it has
    failed, ClusterError when it takes too long."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        words = job.logs_or_none() or ""
        if ready := _READY.search(words):
            grpc = _GRPC.search(words)
            return ready[1], f"//{grpc[1]}" if grpc else ""
        if (outcome := job.outcome()) is not None:
            raise RunError(failure(job, "the job of the endpoint", outcome))
        if time.monotonic() > deadline_s:
            raise ClusterError(f"the endpoint was not ready within {timeout_s:g} s: give it more with --timeout-s")
        time.sleep(POLL_S)
