"""An endpoint on Ray Serve: `deploy`, which starts replicas (`replica_worker`) behind HAProxy.

Called by flows, and by `serve_app` for Serve's own files. Needs a cluster started with the variables of
`cluster.ingress.serve_environment`. The behaviour is in `replica` and `controller`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle

from shoal.cluster.capacity import get_head_address, gpu_share, gpus_by_possible_host, require_gpus
from shoal.cluster.growth import find_growth
from shoal.cluster.ingress.serve_environment import prepare_ingress
from shoal.cluster.ports import find_free_port
from shoal.errors import ClusterError, ConfigError, ConnectionLost, error_summary, summarize_error
from shoal.network_address import is_loopback
from shoal.serve.controller.config import build_controller_config
from shoal.serve.controller.state import Event
from shoal.serve.on_ray.bind_address import grpc_options, is_head
from shoal.serve.on_ray.controller_actor import RayControllerClient
from shoal.serve.on_ray.ingress_front import prepare_front
from shoal.serve.on_ray.options import deployment_options
from shoal.serve.on_ray.ownership import get_driver_id
from shoal.serve.on_ray.removal import remove_abandoned_endpoint
from shoal.serve.on_ray.replica_worker import ReplicaWorker
from shoal.serve.on_ray.shared_cluster import end_serve, join_serve, lock_serve
from shoal.serve.on_ray.wanted_replicas import count_wanted, describe_wanted, run_growing
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, LiveModel
from shoal.serve.spec.reach import EVERY_NODE

logger = logging.getLogger(__name__)
GRACE_S = 1.0  # beyond a time limit enforced by Serve


class DeployedEndpoint:
    """A deployed endpoint. `url` is the root of the protocol: `{url}/v2/models/{name}/infer`; `grpc` is host:port."""

    def __init__(
        self, spec: EndpointSpec, handle: DeploymentHandle, controller: RayControllerClient, is_growing: bool
    ) -> None:
        self.name, self.url, self.grpc = spec.name, spec.url, spec.grpc_address
        self._handle, self._controller, self._closed, self._is_growing = handle, controller, False, is_growing
        self._seen_event, self._spec, self._wanted = -1, spec, ""

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
        return self._call_controller("status")

    def take_events(self) -> list[Event]:
        """Take the events since the last call, for the run record; none while the controller is away."""
        try:
            events: list[Event] = self._controller.call_blocking("events", self._seen_event)
        except ConnectionLost:
            return []
        if events:
            self._seen_event = events[-1].number
        return events

    def controller_pid(self) -> int:
        """The controller's process id. Raises ClusterError."""
        return int(self._call_controller("pid"))

    def close(self) -> None:
        """Remove the endpoint once it has answered its requests, and Serve with the last one. Idempotent."""
        if not self._closed:
            self._closed = True
            with ExitStack() as closing:  # the rest runs after any failure or interrupt
                closing.callback(end_serve)
                closing.callback(self._controller.stop)
                serve.delete(self.name)

    def _call_controller(self, method: str) -> Any:
        try:
            return self._controller.call_blocking(method)
        except ConnectionLost as error:
            raise ClusterError(str(error)) from error


Record = Callable[..., None]


def deploy(
    spec: EndpointSpec, models: Sequence[EndpointModel], is_shared: bool = False, record: Record = lambda *_, **__: None
) -> DeployedEndpoint:
    """Serve models, and return when all of them are staged; a live one answers 503 until its run has published.

    Where an autoscaler may add nodes the first replica is enough; `record` then records the wait for it as an event.

    An endpoint has a cluster for itself, unless it `is_shared`: then it joins those of other drivers, below its own
    path. One whose deploying process has died is removed first. Raises ConfigError or RegistryError for models or a
    certificate that cannot be served, ClusterError without HAProxy, when the cluster already has an endpoint (of this
    name, if shared), or when the replicas do not start. A failed or interrupted call leaves nothing behind.
    """
    prepare_ingress_on_head()
    spec = resolve_gpus(spec)
    if spec.drain_warning:
        logger.warning("%s", spec.drain_warning)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # of this process: the status and the record have the rest
    if not is_shared:
        return _deploy_alone(spec, models, record)
    with lock_serve():
        joining = join_serve(spec)
        _reject_sleep_of_shared(joining or spec)
        return _deploy_alone(spec, models, record) if joining is None else _start_endpoint(joining, models, record)


def _deploy_alone(spec: EndpointSpec, models: Sequence[EndpointModel], record: Record) -> DeployedEndpoint:
    host = "127.0.0.1" if is_loopback(spec.host) else "0.0.0.0"
    spec = spec.model_copy(
        update={
            "port": spec.port or find_free_port(host),
            "grpc_port": find_free_port(host) if spec.grpc_port == 0 else spec.grpc_port,
        }
    )
    remove_abandoned_endpoint()  # raises before anything of an endpoint that runs is touched
    spec = prepare_front(spec, {"port": spec.port, "grpc_port": spec.grpc_port})
    return _start_endpoint(spec, models, record)


def _reject_sleep_of_shared(spec: EndpointSpec) -> None:
    """Raises ConfigError: a node that never had a replica of this endpoint does not know that it sleeps."""
    if spec.may_sleep and spec.ingress == EVERY_NODE:
        problem = "is not for endpoints that share an ingress on every node"
        raise ConfigError("endpoint.scale.min", 0, problem, "give scale.min=1, or endpoint.ingress=head")


def _start_endpoint(spec: EndpointSpec, models: Sequence[EndpointModel], record: Record) -> DeployedEndpoint:
    setting, live = build_controller_config(spec, models)
    # Its name says whose the endpoint is, so it stays while that sleeps.
    idle_s = math.inf if setting.may_sleep else setting.idle_s
    controller = RayControllerClient(replace(setting, driver=get_driver_id(), idle_s=idle_s))
    with ExitStack() as begun:  # it would outlive this process, also on a signal
        begun.callback(controller.stop)  # once no replica is left to start another
        begun.callback(end_serve)
        if spec.route_prefix:
            begun.callback(serve.delete, spec.name)
        controller.start()  # first: its name identifies the owner
        is_growing = bool(find_growth())
        handle = _start_serve(spec, live, controller, record if is_growing else None)
        begun.pop_all()
    return DeployedEndpoint(spec, handle, controller, is_growing)


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


def _start_serve(
    spec: EndpointSpec, live: Mapping[str, LiveModel], controller: RayControllerClient, record: Record | None
) -> DeploymentHandle:
    """record: records the wait for nodes; None where none may be added."""
    grpc = {"grpc_options": grpc_options(spec.grpc_port)} if spec.grpc_port is not None else {}
    try:
        if not spec.route_prefix:
            is_everywhere = spec.ingress == EVERY_NODE
            host = get_head_address() if is_everywhere else "127.0.0.1"
            location = "EveryNode" if is_everywhere else "HeadOnly"
            serve.start(proxy_location=location, http_options={"host": host, "port": spec.port}, **grpc)
        application = build_application(spec, live, controller)
        if record is not None:
            return run_growing(application, spec, record)
        return serve.run(application, name=spec.name, route_prefix=spec.route_prefix or "/")
    except (RuntimeError, TimeoutError) as error:  # it reports the failure; the deployment has the reason
        status = serve.status().applications.get(spec.name)
        reasons = " ".join(each.message for each in status.deployments.values()) if status else ""
        why = error_summary(reasons) or reasons or error
        raise ClusterError(f"the endpoint {spec.name!r} did not start: {why}") from error


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
