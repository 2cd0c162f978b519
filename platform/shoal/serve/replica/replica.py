"""A replica of an endpoint: its models, their batcher, the controller's plan, and the protocols on top.

Made and closed by the Ray shell or a test, on the event loop that serves. Plain Python: knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Protocol

import psutil
import torch

from shoal.device_memory import limit_device_memory
from shoal.errors import ShoalError
from shoal.plugins.find import find_extension
from shoal.serve.http.app import RestApp
from shoal.serve.messages.inference import TracerProtocol
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.model.device import device_lost
from shoal.serve.model.formats.template import Template, TemplateConfig
from shoal.serve.protocol.access import AccessControl
from shoal.serve.protocol.prometheus import render
from shoal.serve.protocol.request_lifecycle import EndpointApp
from shoal.serve.protocol.request_limits import RequestLimits
from shoal.serve.replica.model_manager import ModelManager
from shoal.serve.replica.peers import PeerTransport
from shoal.serve.replica.version_router import ModelBatcher
from shoal.serve.replica.watchers import ControllerClient, PlanFollower
from shoal.serve.scaling import LoadMeter, encode
from shoal.serve.spec.endpoint import TRACERS, EndpointSpec, TraceDestination
from shoal.serve.spec.model_source import LiveModel

logger = logging.getLogger(__name__)
# A thread that runs Python (a forward's own code, staging of weights) makes the event loop wait this long. The default
# of 5 ms is too long here; below 1 ms there is no further gain.
SWITCH_INTERVAL_S = 0.001
# New objects until Python's collector looks for cycles among them. With the default of 700 it took a twentieth of the
# processor time of requests in batches of 64.
COLLECTED_OBJECTS = 10_000
START_TIMEOUT_S = 600.0
FIRST_WEIGHTS_TIMEOUT_S = 60.0  # for the weights of a run whose store cannot be reached
START_POLL_S = 0.005
REPORT_REST_S = 0.02  # of models on demand, whose load changes several things at once
HEALTH_CHECK_S = 10.0  # within which a health check says that a forward hangs


class ModelWorkers(Protocol):
    """The started workers of a replica, between which its models are split. A library starts them: see `EndpointSpec`.

    batches_in_flight: how many batches they compute at once
    """

    @property
    def batches_in_flight(self) -> int: ...

    def open_template(self, config: TemplateConfig) -> Template:
        """Open a model on the workers. Raises ConfigError for what they do not share."""
        ...

    def check_health(self) -> None:
        """Raise ShoalError when the replica is to be replaced."""
        ...

    def close(self) -> None:
        """End the workers. Idempotent."""
        ...


class EndpointReplica:
    """`app` is the ASGI application, `manager` has its models. Await `start()` first.

    replica:    a name that no other replica has had
    live:       the models that follow the weights of a run, by name
    controller: the source of plans and the receiver of reports
    workers:    those that share its models, if there are several; closed with the replica
    peers:      reaches other replicas; None: over HTTP

    Set `address`, host:port, once its HTTP server listens. `start_error` is why it cannot serve: see `start`.
    """

    def __init__(
        self,
        replica: str,
        spec: EndpointSpec,
        live: Mapping[str, LiveModel],
        controller: ControllerClient,
        workers: ModelWorkers | None = None,
        peers: PeerTransport | None = None,
    ) -> None:
        """Run it on the event loop that will serve."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gc.set_threshold(COLLECTED_OBJECTS)
        limit_device_memory(spec.num_gpus or 0.0)
        torch.set_num_threads(spec.torch_threads)  # of this thread, for the forwards that the batcher runs here
        self._spec = spec
        self._workers = workers
        self._is_closed = threading.Event()
        self.address = self.start_error = ""
        self._access = AccessControl(
            spec.token.get_secret_value() if spec.token is not None else None,
            spec.keys,
            replicas=lambda: 1 + len(self._follower.peers),
        )
        limits = RequestLimits(max_body_bytes=spec.max_body_bytes)
        self._batcher: ModelBatcher = ModelBatcher(
            slots=1 if workers is None else workers.batches_in_flight,
            on_thread_start=lambda: torch.set_num_threads(spec.torch_threads),
        )
        self._tracer: TracerProtocol | None = None
        if spec.trace:
            make_tracer = find_extension(TraceDestination.parse(spec.trace).kind, TRACERS, {})
            self._tracer = make_tracer(spec.trace, spec.name, replica)
        share = None if workers is None else workers.open_template
        self.manager = ModelManager(replica, spec, live, self._batcher, controller, self._tracer, share, peers)
        self._rest = RestApp(
            self.manager,
            self._access,
            limits=limits,
            metrics=lambda caller: render([self.report(), *(each.decode() for each in self._follower.peers)], caller),
            tracer=self._tracer,
        )
        required = [] if spec.grpc_port is None else ["grpc"]
        more = self._tracer, required, spec.route_prefix, spec.allow_origins
        self.app = EndpointApp(self._rest, self.manager, self._access, limits, *more)
        self._load_meter = LoadMeter(time.thread_time)
        rest_s = REPORT_REST_S if spec.memory else 0.0
        self._follower = PlanFollower(replica, controller, self.manager.apply, self.report, rest_s)
        self.manager.call_when_changed(self._follower.notify_changed)
        self.manager.on_demand.list_peers = lambda: self._follower.peers

    async def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Stage the versions that must answer by the controller's plan. Raises ShoalError on failure or timeout.

        A live model answers 503 from then on if its run has published nothing, or its store stays away. Where requests
        wait for this replica alone, since the endpoint sleeps, it starts without a model that cannot be loaded, to tell
        them why, and is to be replaced.
        """
        loop = asyncio.get_running_loop()
        ends_s, without_s = loop.time() + timeout_s, loop.time() + FIRST_WEIGHTS_TIMEOUT_S
        manager = self.manager
        while not (manager.is_staged and (manager.is_complete or manager.has_polled or loop.time() > without_s)):
            if trouble := self.manager.find_startup_error():
                if not (self._spec.may_sleep and manager.has_served) or self._follower.peers:
                    raise ShoalError(trouble)
                logger.error("this replica ends: %s", trouble)
                self.start_error = trouble
                return
            self.check_health()
            if loop.time() > ends_s:
                raise ShoalError(f"the models were not staged after {timeout_s:g} s")
            await asyncio.sleep(START_POLL_S)
        if not manager.is_complete:
            cause = "a run has published nothing yet" if manager.has_polled else "the store of a run cannot be reached"
            logger.warning("503 until there are weights: %s", cause)

    def check_health(self) -> None:
        """Raise ShoalError when this replica must be replaced: a thread has died, the GPU fails, a forward hangs, a
        model leaks memory."""
        if not (self._batcher.is_alive and self._follower.is_alive):
            raise ShoalError("a thread of this replica has died")
        self.manager.check_health()
        if device_lost.is_set():
            raise ShoalError("the GPU fails since an error in a forward, which the log of this replica has")
        if self._workers is not None:
            self._workers.check_health()
        if (computing_s := self._batcher.computing_s) > self._spec.hang_s:
            raise ShoalError(f"a forward has taken {computing_s:.1f} s, and hang_s is {self._spec.hang_s:g}")
        most_gib = self._spec.max_memory_gib
        if most_gib is not None and (gib := psutil.Process().memory_info().rss / 2**30) > most_gib:
            raise ShoalError(f"the process has grown to {gib:.2f} GiB, and max_memory_gib is {most_gib:g}")

    def watch_hangs(self, on_hang: Callable[[], None]) -> None:
        """Call `on_hang`, in a thread, when a forward has hung and no health check could say so: on the event loop."""

        def watch() -> None:
            limit_s = self._spec.hang_s + HEALTH_CHECK_S
            while not self._is_closed.wait(min(1.0, limit_s)):
                if self._batcher.computing_s > limit_s:
                    logger.critical("a forward hangs on the event loop: this replica ends")
                    on_hang()
                    return

        threading.Thread(target=watch, name="shoal-hangs", daemon=True).start()

    def stats(self) -> dict[str, Any]:
        """The application's and the batcher's counters, and the replica's identity; `version` is that of the first
        model."""
        statuses = self._rest.get_status_counts()
        models = self.manager.list_loaded()
        return {
            "pid": os.getpid(),
            "version": models[0].version if models else 0,
            "requests": sum(statuses.values()),
            "statuses": {str(status): count for status, count in sorted(statuses.items())},
            "models": {
                each.name: {"version": each.version, "batcher": asdict(each.batcher_counts())} for each in models
            },
        }

    async def close(self) -> None:
        """Stop following and fail queued requests. Idempotent."""
        self._is_closed.set()
        await self._follower.close()
        self.manager.close()
        if self._workers is not None:
            await asyncio.to_thread(self._workers.close)
        self._batcher.close(timeout_s=2.0)
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

    def report(self) -> ReplicaReport:
        statuses = {str(status): count for status, count in sorted(self._rest.get_status_counts().items())}
        access = self._access
        return replace(
            self.manager.report(),
            callers=access.counts(),
            tokens=access.count_tokens(),
            refused=access.get_auth_failures(),
            statuses=statuses,
            address=self.address,
        )

    def measure_load(self) -> dict[str, float]:
        """What an autoscaling policy needs, as numbers by name. Call it on the event loop."""
        loaded = self.manager.list_loaded()
        models = {each.name: each.measure_load() for each in loaded}
        streams = {f"{each.name} streams": each.streams.measure_load() for each in loaded if each.streams is not None}
        models |= {name: each for name, each in streams.items() if each.latency}
        return encode(self._load_meter.measure(models, self.manager.on_demand.num_waiting))
