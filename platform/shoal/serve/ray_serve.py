"""An endpoint on Ray Serve: the shell around `EndpointReplica`, and `deploy`, which puts replicas behind HAProxy.

Called by jobs, serve apps and the CLI. Needs a cluster that was started with the variables of
`cluster.serve_environment`; everything that is worth reading happens in `replica`.
"""

from __future__ import annotations

from typing import Any

from ray.serve.handle import DeploymentHandle

import ray
from ray import serve
from shoal.cluster.serve_environment import free_port
from shoal.errors import ClusterError, ConfigError
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

    def __init__(self, spec: EndpointSpec, port: int, handle: DeploymentHandle, owns_serve: bool) -> None:
        self.name, self.url = spec.name, f"http://{spec.host}:{port}"
        self._handle, self._owns_serve, self._closed = handle, owns_serve, False

    def stats(self, timeout_s: float = 5.0) -> list[dict[str, Any]]:
        """The counters of every replica. Raises ClusterError when they cannot be had in time."""
        try:
            return list(self._handle.broadcast("stats").results(timeout_s=timeout_s))
        except (TimeoutError, ray.exceptions.RayError) as error:
            raise ClusterError(f"the replicas of {self.name!r} did not answer: {error}") from error

    def close(self) -> None:
        """Remove the endpoint when it has answered what it has, and Serve too if `deploy` started it. Idempotent."""
        if not self._closed:
            self._closed = True
            serve.delete(self.name)
            if self._owns_serve:
                serve.shutdown()


def deploy(spec: EndpointSpec, factory: ModelFactory, signature: Signature, source: WeightSource) -> Endpoint:
    """Serve a model, and return when it is reachable: 503 until `source`, which must pickle, has weights.

    One endpoint per cluster, at the root. Raises ConfigError, or ClusterError when the replicas do not start.
    """
    running = serve.status()
    if running.applications:
        raise ConfigError("name", spec.name, f"this cluster serves {', '.join(running.applications)} already")
    owns_serve, port = not running.proxies, spec.port or free_port(spec.host)
    serve.start(proxy_location="HeadOnly", http_options={"host": spec.host, "port": port})
    deployment = serve.deployment(serve.ingress()(ReplicaWorker)).options(
        name="replica",
        num_replicas=spec.num_replicas,
        max_ongoing_requests=spec.max_ongoing_requests,
        ray_actor_options={"num_cpus": spec.num_cpus},
        graceful_shutdown_timeout_s=spec.drain_s,
        graceful_shutdown_wait_loop_s=0.1,
        health_check_period_s=2.0,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )
    try:
        handle = serve.run(deployment.bind(spec, factory, signature, source), name=spec.name, route_prefix="/")
    except RuntimeError as error:
        raise ClusterError(f"the endpoint {spec.name!r} did not start: {error}") from error
    return Endpoint(spec, port, handle, owns_serve)
