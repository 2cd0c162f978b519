"""An endpoint on Ray Serve: `deploy`, which starts replicas (`replica_worker`) behind HAProxy, and waits for them.

Serve's own `run` waits for all replicas and without limit. Where an autoscaler may add nodes the first one is enough:
it answers while the others wait for nodes.

Called by flows, and by `serve_app` for Serve's own files. Needs a cluster started with the variables of
`cluster.ingress.serve_environment`. The behaviour is in `replica` and `controller`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus

from shoal.cluster.admission import get_driver_id
from shoal.cluster.capacity import (
    NODES_WAIT_S,
    WaitLog,
    describe_wait,
    get_head_address,
    gpu_share,
    gpus_by_possible_host,
    require_gpus,
)
from shoal.cluster.growth import count_waiting, count_waiting_groups, find_growth
from shoal.cluster.ingress.serve_environment import prepare_ingress
from shoal.errors import ClusterError, ConfigError, ConnectionLost, error_summary, summarize_error
from shoal.serve.controller.config import build_controller_config
from shoal.serve.controller.state import Event
from shoal.serve.on_ray.bind_address import grpc_options, is_head
from shoal.serve.on_ray.controller_actor import RayControllerClient
from shoal.serve.on_ray.ingress_front import list_sleeping, wait_until_routed
from shoal.serve.on_ray.options import deployment_options, worker_bundles
from shoal.serve.on_ray.replica_worker import ReplicaWorker
from shoal.serve.on_ray.shared_cluster import end_application, join_serve, lock_serve
from shoal.serve.spec.endpoint import DETACHED, EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, LiveModel
from shoal.serve.spec.reach import EVERY_NODE

logger = logging.getLogger(__name__)
GRACE_S = 1.0  # beyond a time limit enforced by Serve
POLL_S = 0.25


class DeployedEndpoint:
    """A deployed endpoint. `url` is the root of the protocol: `{url}/v2/models/{name}/infer`; `grpc` is host:port.

    is_detached: the process that has deployed it may end, and leave it open
    """

    def __init__(
        self, spec: EndpointSpec, handle: DeploymentHandle, controller: RayControllerClient, is_growing: bool
    ) -> None:
        self.name = spec.name
        self.url = spec.url
        self.grpc = spec.grpc_address
        self.is_detached = spec.lifetime == DETACHED
        self._handle = handle
        self._controller = controller
        self._closed = False
        self._is_growing = is_growing
        self._seen_event = -1
        self._spec = spec
        self._wanted = ""

    def describe_wanted(self) -> str:
        """How many replicas wait for nodes that an autoscaler may add, and why; "" for none. The endpoint's status has
        it, too."""
        num_wanted = count_wanted(self._spec) if self._is_growing else 0
        wanted = self._wanted if num_wanted is None else describe_wanted(num_wanted)
        if wanted != self._wanted:
            with suppress(ConnectionLost):  # the next call repeats it
                self._controller.call_blocking("set_wanted", wanted)
                self._wanted = wanted
        return wanted

    def stats(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The counters of every replica. Raises ClusterError when they do not arrive in time."""
        answer: Future[list[dict[str, Any]]] = Future()

        def ask() -> None:
            try:
                answer.set_result(list(self._handle.broadcast("stats").results(timeout_s=timeout_s)))
            except Exception as error:  # noqa: BLE001 - raised where it is awaited
                answer.set_exception(error)

        # Serve's own time limit does not hold for a replica that dies during the call.
        threading.Thread(target=ask, daemon=True).start()
        try:
            return answer.result(timeout_s + GRACE_S)
        except (TimeoutError, ray.exceptions.RayError, RayServeException) as error:
            if isinstance(error, DeploymentUnavailableError) and self._spec.may_sleep:
                return []
            reason = summarize_error(error, max_chars=None)  # then come pages of advice
            raise ClusterError(f"the replicas of {self.name!r} did not answer: {reason}") from error

    def status(self) -> dict[str, Any]:
        """The endpoint's `EndpointStatus`. Raises ClusterError."""
        try:
            status: dict[str, Any] = self._controller.call_blocking("status")
        except ConnectionLost as error:
            raise ClusterError(str(error)) from error
        return status

    def take_events(self) -> list[Event]:
        """Take the events since the last call, for the run record; none while the controller is away."""
        try:
            events: list[Event] = self._controller.call_blocking("events", self._seen_event)
        except ConnectionLost:
            return []
        if events:
            self._seen_event = events[-1].number
        return events

    def close(self) -> None:
        """Remove the endpoint once it has answered its requests, and Serve with the last one. Idempotent."""
        if not self._closed:
            self._closed = True
            with ExitStack() as closing:  # the rest runs after any failure or interrupt
                closing.callback(self._controller.stop)
                end_application(self.name)


Record = Callable[..., None]


def deploy(
    spec: EndpointSpec, models: Sequence[EndpointModel], record: Record = lambda *_, **__: None
) -> DeployedEndpoint:
    """Serve models, and return when all of them are staged; a live one answers 503 until its run has published.

    Where an autoscaler may add nodes the first replica is enough; `record` then records the wait for it as an event.

    The cluster's first endpoint has the root of its address, and each later one is below its own name. Those whose
    deploying process has died are removed first. Raises ConfigError or RegistryError for models, a certificate, a name
    or an address that cannot be served, ClusterError without HAProxy, where Serve runs for anything else, or when the
    replicas do not start. A failed or interrupted call leaves nothing behind.
    """
    prepare_ingress_on_head()
    spec = resolve_gpus(spec)
    if spec.drain_warning:
        logger.warning("%s", spec.drain_warning)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # of this process: the status and the record have the rest
    with ExitStack() as begun:  # it would outlive this process, also on a signal
        with lock_serve():
            spec, is_first = join_serve(spec)
            if spec.ingress == EVERY_NODE and not is_first:
                reject_sleep_of_shared(spec, list_sleeping())
            config, live = build_controller_config(spec, models)
            # Its name says whose the endpoint is, so it stays while that sleeps.
            idle_s = math.inf if spec.may_sleep else config.idle_s
            if live and spec.lifetime == DETACHED:
                problem = "is not for an endpoint that follows the weights of a run, which ends"
                raise ConfigError("endpoint.lifetime", DETACHED, problem, "leave it out")
            driver = DETACHED if spec.lifetime == DETACHED else get_driver_id()
            controller = RayControllerClient(replace(config, driver=driver, idle_s=idle_s))
            begun.callback(controller.stop)  # once no replica is left to start another
            begun.callback(end_application, spec.name)
            controller.start()  # first: its name identifies the owner
            is_growing = bool(find_growth())
            with _explain_failure(spec):
                if is_first:
                    grpc = {} if spec.grpc_port is None else {"grpc_options": grpc_options(spec.grpc_port)}
                    host, nodes = ("127.0.0.1", "HeadOnly") if spec.ingress != EVERY_NODE else (
                        get_head_address(), "EveryNode"
                    )  # fmt: skip
                    serve.start(proxy_location=nodes, http_options={"host": host, "port": spec.port}, **grpc)
                handle = submit_application(build_application(spec, live, controller), spec)
        with _explain_failure(spec):
            wait_until_up(spec, record if is_growing else None)
        wait_until_routed(spec)
        begun.pop_all()
    return DeployedEndpoint(spec, handle, controller, is_growing)


def reject_sleep_of_shared(spec: EndpointSpec, sleeping: Sequence[str]) -> None:
    """Raise ConfigError: a node that never had a replica of an endpoint does not know that it sleeps.

    sleeping: the other endpoints that may sleep
    """
    if spec.may_sleep:
        problem = "is not for endpoints that share an ingress on every node"
        raise ConfigError("endpoint.scale.min", 0, problem, "give scale.min=1, or endpoint.ingress=head")
    if sleeping:
        problem = f"is shared with {', '.join(sleeping)}, which may sleep, and would not be woken on each node"
        raise ConfigError("endpoint.ingress", EVERY_NODE, problem, "give that one scale.min=1, or use another cluster")


@contextmanager
def _explain_failure(spec: EndpointSpec) -> Iterator[None]:
    """Raise Serve's failure as ClusterError: it reports the failure, and the deployment has the reason."""
    try:
        yield
    except (RuntimeError, TimeoutError) as error:
        status = serve.status().applications.get(spec.name)
        reasons = " ".join(each.message for each in status.deployments.values()) if status else ""
        why = error_summary(reasons) or reasons or error
        raise ClusterError(f"the endpoint {spec.name!r} did not start: {why}") from error


def prepare_ingress_on_head() -> None:
    """Prepare HAProxy if this process is on its host; any other host was prepared at its setup.

    Raises ClusterError when HAProxy is not installed.
    """
    if is_head(ray.util.get_node_ip_address()):
        prepare_ingress(os.environ)


def resolve_gpus(spec: EndpointSpec) -> EndpointSpec:
    """The spec with the GPUs that each replica reserves. Raises ConfigError when the cluster has too few.

    A model with `device: auto` uses the CPU where that is faster, so by default it reserves no GPU.
    """
    num_gpus = spec.num_gpus
    if num_gpus is None:
        num_gpus = gpu_share(spec.most_replicas, gpus_by_possible_host()) if spec.needs_cuda else 0.0
    if num_gpus:
        fields = "endpoint.num_gpus or endpoint.num_replicas"
        bundle = {"CPU": spec.num_cpus, "GPU": num_gpus}
        require_gpus(num_gpus, max(1, spec.least_replicas), fields, bundle)
    return spec.model_copy(update={"num_gpus": num_gpus})


def build_application(
    spec: EndpointSpec, live: Mapping[str, LiveModel], controller: RayControllerClient
) -> serve.Application:
    """Build Serve's application. Raises ConfigError when the cluster has too few GPUs."""
    spec = resolve_gpus(spec)
    with warnings.catch_warnings():
        # Nothing reads the environment variable that should replace this field (Ray 2.60).
        warnings.filterwarnings("ignore", "The `metrics_interval_s` field", DeprecationWarning)
        deployment = serve.deployment(serve.ingress()(ReplicaWorker)).options(**deployment_options(spec))
    return deployment.bind(spec, live, controller)


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
        refusal = error_summary(" ".join(each.message for each in app.deployments.values()))
        if refusal and app.status != ApplicationStatus.RUNNING:  # Serve would start another, which refuses it, too
            raise RuntimeError(refusal)
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
