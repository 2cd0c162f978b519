"""The start of an endpoint's replicas, some of which may have no place yet.

Serve's own `run` waits for all replicas and without limit. Where an autoscaler may add nodes the first one is enough:
it answers while the others wait for nodes. Called by `deployment`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from shoal.cluster.capacity import NODES_WAIT_S, WaitLog, describe_wait
from shoal.cluster.growth import count_waiting, count_waiting_groups
from shoal.errors import ClusterError
from shoal.serve.on_ray.options import deployment_options, worker_bundles
from shoal.serve.spec.endpoint import EndpointSpec

POLL_S = 0.25


def submit_application(application: serve.Application, spec: EndpointSpec) -> DeploymentHandle:
    """Give the application to Serve, which starts its replicas."""
    target = serve.RunTarget(application, spec.name, spec.route_prefix or "/")
    return serve.run_many([target], wait_for_applications_running=False)[0]


def wait_until_up(spec: EndpointSpec, record: Callable[..., None] | None) -> None:
    """Return when every replica answers; where nodes may be added, every one that has a place, and at least one.

    Raises RuntimeError as `serve.run`, ClusterError when the first replica has no place within the spec's `wait`.

    record: records an event; None where no nodes may be added
    """
    wait_s = NODES_WAIT_S if spec.wait is None else spec.wait
    log, deadline = WaitLog(record or (lambda *_, **__: None), wait_s), time.monotonic() + wait_s
    while True:
        app = serve.status().applications.get(spec.name)
        if app is None or app.status == ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError("it was removed meanwhile" if app is None else app.message)
        replicas: Counter[str] = Counter()
        for deployment in app.deployments.values():
            replicas.update(deployment.replica_states)
        waiting = replicas["STARTING"] + replicas["PENDING_ALLOCATION"]
        num_wanted = min(count_wanted(spec) or 0, waiting) if record else 0  # others may wait for the same, too
        is_first_up = record is not None and replicas["RUNNING"] > 0 and replicas["STARTING"] <= num_wanted
        if app.status == ApplicationStatus.RUNNING or is_first_up:
            log.report("")
            return
        log.report(describe_wanted(num_wanted))
        if num_wanted and time.monotonic() > deadline and not replicas["RUNNING"]:
            problem = f"{spec.name!r} has no place, no nodes came within {wait_s:g} s"
            raise ClusterError(f"{problem}: give it more with endpoint.wait=1h")
        time.sleep(POLL_S)


def count_wanted(spec: EndpointSpec) -> int | None:
    """How many replicas have no place; None while that is not known."""
    if spec.num_workers > 1:
        return count_waiting_groups(worker_bundles(spec))
    options = deployment_options(spec)["ray_actor_options"]
    return count_waiting({"CPU": options["num_cpus"], "GPU": options.get("num_gpus", 0.0)})


def describe_wanted(num_wanted: int) -> str:
    """The number and why; "" for none."""
    return f"{num_wanted} more replica{'s' * (num_wanted > 1)} wanted, {describe_wait()}" if num_wanted else ""
