"""A replica as Ray Serve's object: the shell around `EndpointReplica`.

The replica's process imports this module and no more of the deployment, so that a first request waits less.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any

import ray
from ray import serve
from ray.util.metrics import Counter, Gauge

from shoal.errors import ConfigError, ShoalError
from shoal.gc_freeze import freeze_loaded_objects
from shoal.plugins.find import find_extension
from shoal.serve.http import fast_path
from shoal.serve.messages.counts import Metric
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.on_ray.bind_address import announce_http_address, answer_clients, is_head, patch_bind_addresses
from shoal.serve.on_ray.controller_actor import RayControllerClient
from shoal.serve.protocol.prometheus import METRICS, list_metrics, series
from shoal.serve.protocol.request_lifecycle import Application, EndpointApp
from shoal.serve.spec.endpoint import PREDICTORS, EndpointSpec
from shoal.serve.spec.model_source import LiveModel
from shoal.serve.spec.reach import EVERY_NODE


class ReplicaWorker:
    """Serve's object: forwards to an EndpointReplica."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, spec: EndpointSpec, live: Mapping[str, LiveModel], controller: RayControllerClient
    ) -> None:
        with freeze_loaded_objects():
            from shoal.serve.replica.replica import EndpointReplica  # here: `deploy` needs no torch

        patch_bind_addresses()
        if spec.ingress == EVERY_NODE:
            from shoal.serve.on_ray.ingress_front import join_ingress  # here: other replicas start without it

            join_ingress(spec)
        if spec.memory is not None:
            require_reachable_peers(spec)
            announce_http_address(lambda address: setattr(self._replica, "address", address))
        name = serve.get_replica_context().replica_id.unique_id
        workers = None
        if spec.split is not None:
            workers = await asyncio.to_thread(find_extension(spec.split, PREDICTORS), spec)
        self._replica = EndpointReplica(name, spec, live, controller, workers)
        await self._replica.start()
        self._replica.watch_hangs(lambda: os._exit(1))  # Serve starts another one
        self._metrics: RayMetrics | None = None
        self._is_up = False
        if install_fast_path(spec, self._replica.app):
            answer_clients(spec.answer_s)

    def __serve_build_asgi_app__(self) -> EndpointApp:
        return self._replica.app

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What the policy needs of this replica; Serve calls it where the endpoint scales."""
        return self._replica.measure_load()

    async def stats(self) -> dict[str, Any]:
        return self._replica.stats()

    def check_health(self) -> None:
        """Check the replica and publish its counts to Ray's exporter; Serve calls it every two seconds.

        The first check is part of the start, for which requests may wait: it has nothing to publish.
        """
        self._replica.check_health()
        if self._is_up:
            if self._replica.start_error:  # Serve replaces it once it has failed some checks; until then it answers
                raise ShoalError(self._replica.start_error)
            self._metrics = self._metrics or RayMetrics()
            self._metrics.publish(self._replica.report())
        self._is_up = True

    async def __del__(self) -> None:
        await self._replica.close()


def require_reachable_peers(spec: EndpointSpec) -> None:
    """Raise ConfigError where replicas on other hosts cannot reach those of the head, which listen on loopback."""
    if spec.ingress != EVERY_NODE and not is_head(ray.util.get_node_ip_address()):
        problem = "with endpoint.memory, replicas on several hosts call each other"
        raise ConfigError("endpoint.ingress", spec.ingress, problem, "give ingress: every_node, or no memory")


def install_fast_path(spec: EndpointSpec, entrance: Application) -> bool:
    """Install the fast path in this process; returns whether uvicorn's version fits.

    Raises ConfigError for gRPC when uvicorn's version does not fit: gRPC has no other path.
    """
    is_installed = fast_path.install_application(entrance)
    if not is_installed and spec.grpc_port is not None:
        problem = "gRPC needs a class of uvicorn's that this version of it does not have"
        remedy = "leave grpc_port out, or install uvicorn 0.34 to 0.54"
        raise ConfigError("grpc_port", spec.grpc_port, problem, remedy)
    return is_installed


class RayMetrics:
    """The metrics of one replica."""

    def __init__(self) -> None:
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._add(METRICS)
        self._published: dict[tuple[str, tuple[str, ...]], float] = {}

    def _add(self, metrics: Mapping[str, Metric]) -> None:
        for name, metric in metrics.items():
            arguments = (metric.help, (*metric.labels, "replica"))
            if metric.kind == "counter" and name not in self._counters:
                self._counters[name] = Counter(name, *arguments)
            elif metric.kind == "gauge" and name not in self._gauges:
                self._gauges[name] = Gauge(name, *arguments)

    def publish(self, report: ReplicaReport) -> None:
        """Publish the counts since the last report, and the gauges."""
        metrics = list_metrics([report])
        self._add(metrics)
        for name, labels, value in series(report):
            if not isinstance(value, (int, float)):
                continue
            tags = {label: labels.get(label, "") for label in metrics[name].labels} | {"replica": report.replica}
            # Ray refuses others than ASCII.
            tags = {label: tag.encode("ascii", "backslashreplace").decode() for label, tag in tags.items()}
            if name in self._gauges:
                self._gauges[name].set(value, tags)
                continue
            key = name, tuple(tags.values())
            published = self._published.get(key, 0.0)
            if (
                more := value - published if value >= published else value
            ) > 0.0:  # below it: the model was deployed again
                self._counters[name].inc(more, tags)
                self._published[key] = value
