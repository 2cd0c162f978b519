"""`shoal up`, `shoal down` and `shoal status`: a cluster of this machine that stays until `shoal down`.

Parse, call, print: `shoal.cluster` starts and stops. `down` ends only what `up` has started.
"""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated, Any

import click
from rich.text import Text

from shoal.cli.support.options import FiniteRange, NotNegative, Positive, Seconds
from shoal.cli.support.verbs import verb
from shoal.client.discovery import INFERENCE_KIND, list_endpoints
from shoal.cluster.attach import find_cluster, find_running_cluster, load_saved_cluster, lock_cluster_state, state_path
from shoal.cluster.cluster_handle import ClusterHandle
from shoal.cluster.dashboard_api import get_resources
from shoal.cluster.embedded_cluster import start_cluster
from shoal.cluster.jobs import JobHandle, list_jobs
from shoal.cluster.processes import end_cluster
from shoal.cluster.run_queue import format_needs
from shoal.errors import ClusterError, ConnectionLost, RunError
from shoal.home import home
from shoal.rl.experience.quarantine import read_run_quarantine
from shoal.runs import Run, list_running
from shoal.runs.event_messages import describe_wait
from shoal.runs.formatting import format_age, format_duration, format_size
from shoal.runs.panels import list_counts
from shoal.runs.record.provenance import mask_command_line

NUM_JOBS_SHOWN = 10
_COLOURS = {"RUNNING": "blue", "SUCCEEDED": "green", "FAILED": "red"}


@verb(
    work="starting Ray",
    epilog="""\b
examples:
  shoal up
  shoal up --cpus 8
  eval "$(shoal up --shell)"
  shoal up && shoal run actor_learner --actors 4 && shoal down""",
)
def up(
    *,
    cpus: Annotated[Positive | None, "CPUs of the cluster.  [default: those of this machine]"] = None,
    gpus: Annotated[NotNegative | None, "GPUs of the cluster.  [default: those of this machine]"] = None,
    object_store_gib: Annotated[float | None, FiniteRange(min=0.1), "Shared memory for objects."] = None,
    shell: Annotated[bool, "Print what sets a shell's variables, also of a cluster that is up."] = False,
) -> str:
    """Start a Ray cluster for Shoal on this machine, in the background.

    It listens on this machine only, asks for a token, and stays until `shoal down`, even if the terminal is closed.
    `shoal` finds it. For `ray job submit` and other programs of Ray it prints the variables to set.
    """
    store_bytes = None if object_store_gib is None else int(object_store_gib * (1 << 30))
    with lock_cluster_state():
        running = find_running_cluster()
        if running is not None and shell:
            return _format_exports(running)
        if running is not None:
            remedy = "`shoal status` shows it, `shoal down` ends it"
            raise ClusterError(f"a cluster is running at {running.dashboard_url}: {remedy}")
        if (dead := load_saved_cluster()) is not None:
            _remove_cluster(dead)
        begun_s = time.monotonic()
        cluster = start_cluster(
            num_cpus=cpus, num_gpus=gpus, object_store_memory_bytes=store_bytes, detached=True, save_as=state_path()
        )
    seconds = time.monotonic() - begun_s
    click.echo(f"Ray {version('ray')} is up after {seconds:.1f} s, its dashboard at {cluster.dashboard_url}", err=shell)
    click.echo("`shoal run` uses it, `shoal status` shows it, `shoal down` ends it.", err=shell)
    if not shell:
        click.echo('For `ray job submit` and `ray status`, as eval "$(shoal up --shell)" sets them:')
    return _format_exports(cluster)


def _format_exports(cluster: ClusterHandle) -> str:
    """Lines for a shell: with these, the programs of Ray and of Shoal reach the cluster from any folder."""
    names = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH")
    variables = {"RAY_ADDRESS": cluster.address, "RAY_API_SERVER_ADDRESS": cluster.dashboard_url}
    variables |= {name: cluster.environment[name] for name in names if name in cluster.environment}
    if cluster.is_local:
        variables["SHOAL_HOME"] = str(home())
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


@verb(
    work="ending the jobs and Ray",
    epilog="""\b
examples:
  shoal down
  shoal down --now""",
)
def down(
    *,
    now: Annotated[bool, "Do not give running jobs time to save."] = False,
    timeout_s: Annotated[Seconds, "How long running jobs may take to stop."] = 30.0,
) -> Iterator[str]:
    """Stop the cluster that `shoal up` started: its jobs first, then every process of it.

    Does nothing without one. Other clusters (embedded, remote, or of another host) are unaffected.
    """
    with lock_cluster_state():
        cluster = load_saved_cluster()
        if cluster is None:
            yield "No cluster is up."
            return
        was_alive = cluster.is_head_alive()
        if was_alive and not now:
            deadline_s = time.monotonic() + timeout_s
            # If the cluster does not answer, or a job does not stop, its processes are killed below.
            with contextlib.suppress(ConnectionLost, ClusterError):
                jobs = [
                    JobHandle(cluster, info.submission_id) for info in list_jobs(cluster) if not info.status.is_over
                ]
                for job in jobs:  # all of them first: each has the full time to save
                    yield f"stopping job {job.submission_id} ..."
                    with contextlib.suppress(RunError, ClusterError):  # it has ended, and is no longer listed
                        job.request_stop()
                for job in jobs:
                    with contextlib.suppress(RunError, ClusterError):
                        for _ in job.follow(max(0.1, deadline_s - time.monotonic())):
                            pass
        _remove_cluster(cluster)
    yield "The cluster is down." if was_alive else "The cluster had died; what was left of it is removed."


def _remove_cluster(cluster: ClusterHandle) -> None:
    assert cluster.cluster_id is not None
    assert cluster.temp_dir is not None
    end_cluster(cluster.cluster_id, cluster.temp_dir)
    state_path().unlink(missing_ok=True)


def describe_status(cluster: ClusterHandle | None) -> dict[str, Any]:
    """The document of `shoal status --json`. Raises ConnectionLost, ClusterError."""
    described: dict[str, object] | None = None
    jobs, running = list_jobs(cluster) if cluster is not None else [], list_running()
    if cluster is not None:
        described = {
            "address": cluster.address,
            "dashboard_url": cluster.dashboard_url,
            "is_local": cluster.is_local,
            "temp_dir": str(cluster.temp_dir) if cluster.temp_dir is not None else None,
            **asdict(get_resources(cluster)),
            "environment": {name: value for name, value in cluster.environment.items() if name != "RAY_AUTH_TOKEN"},
        }
    return {
        "cluster": described,
        "jobs": [asdict(info) | {"entrypoint": mask_command_line(info.entrypoint)} for info in jobs],
        "detached": [{"name": each.name, "url": each.url} for each in list_endpoints() if each.is_detached],
        "queue": [{"run": run.id, **entry} for run, entry in _list_queue(running)],
        "runs": [
            {
                "id": run.id,
                "job": run.job,
                "name": run.name,
                "waiting": describe_wait(run.last_events(since_resumed=True)),
                "endpoints": [asdict(endpoint) for endpoint in run.endpoints()],
                "quarantined": read_run_quarantine(run.folder),
                **_read_counts(run),
            }
            for run in running
        ],
    }


def _read_counts(run: Run) -> dict[str, Any]:
    """Of a run of the loop: connected actors, environment steps, drops by reason, and rejections by actor and reason.

    {} before any actor has sent experience.
    """
    metrics = run.latest(since_resumed=True)
    if "actors/connected" not in metrics:
        return {}
    counts = {panel.title: {each.name: int(each.value) for each in panel.counts} for panel in list_counts(metrics)}
    actors, steps = int(metrics["actors/connected"]), int(metrics["steps/total"])
    return {"actors": actors, "steps": steps, **{name: counts.get(name, {}) for name in ("drops", "rejected")}}


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def _list_queue(running: list[Run]) -> list[tuple[Run, dict[str, Any]]]:
    """The runs that wait for capacity and their entries, in their order."""
    entries = [(run, entry) for run in running if (entry := run.read_queue_entry()) is not None]
    return sorted(entries, key=lambda each: (each[1]["position"], each[1]["since_s"]))


def _show_status(cluster: ClusterHandle | None) -> Iterator[str | Text]:
    running = list_running()
    if cluster is None:
        yield "cluster  none is up: `shoal up` starts one, and `shoal run` one of its own when it needs it"
    else:
        yield from _show_cluster(cluster)
    yield from _show_queue(running)
    yield Text("\nruns", style="bold") if running else Text("runs     none is on: `shoal runs` lists them all")
    for each in list_endpoints():
        if each.is_detached:
            yield f"  without a run: {INFERENCE_KIND} {each.name}  {each.url}  detached"
    for run in running:
        yield f"  {run.id}  {run.name}, on for {format_duration(run.duration_s)}"
        is_queued = run.read_queue_entry() is not None
        if waiting := describe_wait(run.last_events(since_resumed=True)):
            yield "    waiting in the queue" if is_queued else f"    {waiting}"
        for endpoint in run.endpoints():
            yield f"    {endpoint.kind} {endpoint.name}  {endpoint.address}  {endpoint.state}"
        if counts := _read_counts(run):
            drops = _format_counts(counts["drops"]) or "none"
            yield f"    {counts['actors']:,} actors, {counts['steps']:,} steps, drops: {drops}"
            if rejected := _format_counts(counts["rejected"]):
                yield f"    rejected: {rejected}"
        for actor_id, reason in read_run_quarantine(run.folder).items():
            yield f"    in quarantine: {actor_id}, it {reason}"
            yield f"      when it is mended: shoal release {run.id} {shlex.quote(actor_id)}"


def _show_cluster(cluster: ClusterHandle) -> Iterator[str | Text]:
    offer, jobs = get_resources(cluster), list_jobs(cluster)
    gpus = f", {offer.num_gpus:g} GPUs" if offer.num_gpus else ""
    nodes = f"{offer.num_nodes} nodes, " if offer.num_nodes > 1 else ""
    since, memory = format_duration(time.time() - offer.started_at_s), format_size(offer.memory_bytes)
    yield f"cluster  up for {since}, dashboard {cluster.dashboard_url}"
    objects = f"{format_size(offer.object_store_bytes)} object store"
    yield f"         {nodes}{offer.num_cpus:g} CPUs{gpus}, {memory} memory, {objects}"
    setting = " ".join(line.removeprefix("export ") for line in _format_exports(cluster).splitlines())
    yield Text(f"attach   {setting} ray job submit -- python ...", style="dim")
    if jobs:
        yield Text("\njobs", style="bold")
    for info in jobs[:NUM_JOBS_SHOWN]:
        word = "MISSED" if info.has_missed_target else info.status.value
        state = Text(word.ljust(9), style=_COLOURS.get(word, "default"))
        since = f"{format_age(time.time() - info.started_at_s)} ago"
        command = mask_command_line(info.entrypoint)
        yield Text(f"  {info.submission_id}  ") + state + Text(f"  {since:>10}  {command}")
    if len(jobs) > NUM_JOBS_SHOWN:
        yield Text(f"  and {len(jobs) - NUM_JOBS_SHOWN} older ones", style="dim")


def _show_queue(running: list[Run]) -> Iterator[str | Text]:
    if queue := _list_queue(running):
        yield Text("\nqueue", style="bold")
    for run, entry in queue:
        since = format_age(time.time() - entry["since_s"])
        facts = (entry["owner"], f"priority {entry['priority']}", format_needs(entry["needs"]), f"for {since}")
        yield f"  {entry['position']}  {run.id}  {'  '.join(facts)}"
        yield f"     {entry['reason']}"


@verb(
    show=_show_status,
    to_json=describe_status,
    epilog="""\b
examples:
  shoal status
  shoal status --address http://head.example:8265""",
)
def status(
    *,
    address: Annotated[
        str | None, "The cluster to ask.  [default: $RAY_ADDRESS, else the one that `shoal up` started]"
    ] = None,
) -> ClusterHandle | None:
    """Show what is running: the cluster, its jobs, and the gateways and endpoints of running runs.

    docs/glossary.md says what the words mean.
    """
    return find_cluster(address)
