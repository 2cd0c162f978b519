"""An endpoint on Ray Serve: the shell around `EndpointReplica`, and `deploy`, which puts replicas behind HAProxy.

Called by jobs, serve apps and the CLI. Needs a cluster that was started with the variables of
`cluster.serve_environment`; everything that is worth reading happens in `replica`.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from shoal.cluster.serve_environment import free_port
from shoal.errors import ClusterError
from shoal.registry.manifest import ModelFactory, Signature
from shoal.serve.endpoint import EndpointSpec
from shoal.serve.open_inference import OpenInferenceApp
from shoal.serve.replica import EndpointReplica
from shoal.weights import WeightSource


class ReplicaWorker:
    """What Serve holds: forwards to an EndpointReplica."""

    def __init__(self, spec: EndpointSpec, factory: ModelFactory, signature: Signature, source: WeightSource) -> None:
        self._replica = EndpointReplica(spec, factory, signature, source)

    def __serve_build_asgi_app__(self) -> OpenInferenceApp:
        return self._replica.app

    async def stats(self) -> dict[str, Any]:
        return self._replica.stats()

    def check_health(self) -> None:
        self._replica.check_health()

    def __del__(self) -> None:
        self._replica.close()


class Endpoint:
    """A deployed endpoint. `url` is the root of the protocol: `{url}/v2/models/{name}/infer`."""

    def __init__(self, spec: EndpointSpec, port: int, handle: DeploymentHandle) -> None:
        self.name, self.url = spec.name, f"http://{spec.host}:{port}"
        self._handle, self._closed = handle, False

    def stats(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The counters of every replica. Raises ClusterError when they cannot be had in time."""
        try:
            return list(self._handle.broadcast("stats").results(timeout_s=timeout_s))
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise ClusterError(f"the replicas of {self.name!r} did not answer: {error}") from error

    def close(self) -> None:
        """Remove the endpoint when it has answered what it has, and Serve with it. Idempotent."""
        if not self._closed:
            self._closed = True
            serve.delete(self.name)
            serve.shutdown()


def deploy(spec: EndpointSpec, factory: ModelFactory, signature: Signature, source: WeightSource) -> Endpoint:
    """Serve a model, and return when it is reachable: 503 until `source`, which must pickle, has weights.

    A cluster has one endpoint. Raises ClusterError when it has one already, or when the replicas do not start; then
    nothing is left behind. `shutdown` removes an endpoint whose process has died.
    """
    running = serve.status()
    if running.applications or running.proxies:
        raise ClusterError(f"Serve runs on this cluster ({', '.join(running.applications)}): close that endpoint first")
    port = spec.port or free_port(spec.host)
    serve.start(proxy_location="HeadOnly", http_options={"host": spec.host, "port": port})
    deployment = serve.deployment(serve.ingress()(ReplicaWorker)).options(
        name="replica",
        num_replicas=spec.num_replicas,
        max_ongoing_requests=spec.max_ongoing_requests,
        ray_actor_options={"num_cpus": spec.num_cpus},
        graceful_shutdown_timeout_s=spec.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        max_constructor_retry_count=2,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    try:
        handle = serve.run(deployment.bind(spec, factory, signature, source), name=spec.name, route_prefix="/")
    except RuntimeError as error:  # it says that the application failed; the deployment's message says why
        status = serve.status().applications.get(spec.name)
        reasons = " ".join(each.message for each in status.deployments.values()) if status else ""
        serve.shutdown()
        raise ClusterError(f"the endpoint {spec.name!r} did not start: {reasons or error}") from error
    return Endpoint(spec, port, handle)


def shutdown() -> None:
    """Remove whatever endpoint the cluster has. Idempotent."""
    serve.shutdown()
