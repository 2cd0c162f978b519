"""The gateway and the learner as Ray workers, which each hold a plain object and forward to it.

Each worker starts its object when it is constructed, so Ray's own restart of a dead worker is the whole recovery: the
gateway restores its ledger and port, the learner its checkpoint. Called by flows.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shoal.errors import ClusterError, ConnectionLost, LedgerUnwritable
from shoal.gc_freeze import freeze_loaded_objects
from shoal.ray_call import AWAY, CALL_TIMEOUT_S, NAMESPACE, RETRY_S, call_or_none, call_until_answered
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch, ExperienceQueue
from shoal.rl.experience.segment_ledger import Ledger
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.zmq_listener import format_tcp_address, resolve_reachable_host
from shoal.rl.spec import RLSpec
from shoal.weights import PublishedVersion, WeightSnapshot
from shoal.weights.ray_weight_store import (
    RayWeightPublisher,
    RayWeightSource,
    get_stored_version,
    start_weight_store,
)
from shoal.wire import DropReason, ExperienceSpec

START_TIMEOUT_S = 300.0  # the learner may wait for a CPU of a busy cluster, and the gateway for the first weights
ACKNOWLEDGE_TIMEOUT_S = 60.0  # how long a learner retries its acknowledgement while the gateway restarts


@dataclass(frozen=True)
class RunSetting:
    """The settings that both workers need."""

    run_id: str
    folder: Path
    token: str
    target_return: float | None
    curve_keys: tuple[bytes, bytes] | None


@ray.remote(num_cpus=0, max_concurrency=16)
class GatewayWorker:
    """A Gateway in a process of its own. After a restart, segments queued before are dropped as GATEWAY_CRASH."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: RunSetting) -> None:
        self._ledger = Ledger(setting.folder / "ledger.sqlite")
        self._queue = ExperienceQueue(spec.gateway.queue_capacity, self._ledger)
        self._gateway = Gateway(
            spec.gateway,
            experience,
            self._queue,
            RayWeightSource(start_weight_store(setting.run_id)),
            setting.token,
            setting.run_id,
            setting.target_return,
            setting.curve_keys,
        )
        self._gateway.start(START_TIMEOUT_S)

    def address(self) -> str:
        """Its address for actors; for a wildcard host, the address of this node."""
        host = resolve_reachable_host(self._gateway.spec.host, ray.util.get_node_ip_address())
        return format_tcp_address(host, self._gateway.port)

    def take(self, consumer: str, request: BatchRequest) -> bytes | None:
        """A batch as bytes, which Ray passes on unchanged; it would pickle arrays one by one."""
        batch = self._queue.take(consumer, request)
        return None if batch is None else batch.to_bytes()

    def acknowledge(self, lease_id: int, fates: Sequence[DropReason | None]) -> bool:
        return self._queue.acknowledge(lease_id, fates)

    def stats(self) -> dict[str, Any]:
        if not self._gateway.is_alive:
            os._exit(1)  # Ray restarts this worker, which continues from the ledger
        return {**self._gateway.stats(), "address": self.address()}

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        return self._gateway.take_events()

    def close(self, finished: bool) -> dict[str, Any]:
        """The last stats, after the queue was dropped as SHUTDOWN."""
        self._gateway.close(finished)
        return self._gateway.stats()


class RayExperienceSource:
    """An ExperienceSource on a gateway's handle. While the gateway restarts, `take` is empty and `acknowledge`
    waits."""

    def __init__(self, gateway: ActorHandle) -> None:
        self._gateway = gateway

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        limit_s = request.timeout_s + CALL_TIMEOUT_S
        payload = call_or_none(self._gateway.take, consumer, request, timeout_s=limit_s, away=AWAY, pause_s=RETRY_S)
        return None if payload is None else ExperienceBatch.from_bytes(payload)

    def acknowledge(self, lease_id: int, fates: Sequence[DropReason | None]) -> bool:
        try:
            method = self._gateway.acknowledge
            return bool(call_until_answered(method, lease_id, fates, patience_s=ACKNOWLEDGE_TIMEOUT_S))
        except AWAY as error:
            raise ConnectionLost(f"the gateway has been away for {ACKNOWLEDGE_TIMEOUT_S} s") from error


@ray.remote(max_concurrency=4)
class LearnerWorker:
    """A Learner in a process of its own; it starts at once, from its newest checkpoint if there is one."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: RunSetting) -> None:
        with freeze_loaded_objects():  # imported here: the driver would spend a second loading torch for nothing
            import torch._dynamo  # noqa: F401 - as every optimiser does

            from shoal.rl.learner import Learner

        store = start_weight_store(setting.run_id)
        self._publisher = RayWeightPublisher(store)
        source = RayExperienceSource(ray.get_actor(_gateway_name(setting.run_id), NAMESPACE))
        folder = setting.folder / "checkpoints"
        self._learner = Learner(spec, experience, source, self._publisher, folder, get_stored_version(store))
        self._failure, self._finished = "", False
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, Any]:
        ended = "" if self._thread.is_alive() or self._finished else "its thread has ended"
        return {**self._learner.stats(), "failure": self._failure or ended}

    def take_published(self) -> list[PublishedVersion]:
        return self._learner.take_published()

    def pause(self) -> WeightSnapshot:
        return self._learner.pause()

    def resume(self) -> None:
        self._learner.resume()

    def finish(self, timeout_s: float) -> None:
        """Stop learning, publish and save. Raises TimeoutError when an update does not end."""
        self._finished = True
        self._learner.stop()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"the learner did not stop within {timeout_s} s")
        self._publisher.close()

    def _run(self) -> None:
        try:
            self._learner.run_as_thread()
        except BaseException as error:
            self._failure = f"{type(error).__name__}: {error}"
            raise


class ActorLearnerWorkers:
    """The store, the gateway and the learner of one run: started, called and closed together."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: RunSetting) -> None:
        self._store = start_weight_store(setting.run_id)
        # Workers find each other by name: a handle among a constructor's arguments would prevent its restart.
        options = {"namespace": NAMESPACE, "max_restarts": spec.learner.max_restarts}
        # The gateway stays on this node: its address must not change, and its ledger is a file of the run's folder.
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        self._gateway: Any = GatewayWorker.options(  # type: ignore[attr-defined]
            name=_gateway_name(setting.run_id), scheduling_strategy=here, **options
        ).remote(spec, experience, setting)
        self._learner: Any = LearnerWorker.options(  # type: ignore[attr-defined]
            name=f"learner-{setting.run_id}", num_cpus=spec.learner.num_cpus, **options
        ).remote(spec, experience, setting)

    def make_weight_source(self) -> RayWeightSource:
        return RayWeightSource(self._store)

    def wait_for_gateway(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """Wait for the learner's first weights, and for the gateway. Raises ClusterError when either does not start."""
        deadline = time.monotonic() + timeout_s
        self._wait_for_start("learner", self._learner.stats, deadline)
        return str(self._wait_for_start("gateway", self._gateway.address, deadline))

    def _wait_for_start(self, name: str, method: Any, deadline: float) -> Any:
        try:
            return ray.get(method.remote(), timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            raise ClusterError(f"the {name} did not start in time: is the cluster busy? {error}") from error
        except (*AWAY, ray.exceptions.RayTaskError) as error:
            reason = str(error).strip().splitlines()[-1]
            raise ClusterError(f"the {name} did not start: {reason}") from error

    def stats(self) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """(gateway's, learner's); None for one that is restarting. Raises ClusterError when one is gone for good."""
        return self._call_or_none(self._gateway, "stats"), self._call_or_none(self._learner, "stats")

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        return self._call_or_none(self._gateway, "take_events") or []

    def take_published(self) -> list[PublishedVersion]:
        return self._call_or_none(self._learner, "take_published") or []

    def pause_learner(self) -> WeightSnapshot:
        """Pause learning; the weights stay unchanged until `resume_learner`. Raises ClusterError."""
        return self._call_until_answered(self._learner.pause)

    def resume_learner(self) -> None:
        self._call_until_answered(self._learner.resume)

    def finish_learner(self, timeout_s: float = 60.0) -> bool:
        """Stop learning, publish and save; False when the learner is restarting or does not end in time."""
        try:
            ray.get(self._learner.finish.remote(timeout_s), timeout=timeout_s + RETRY_S)
        except (*AWAY, ray.exceptions.RayTaskError):
            return False
        return True

    def close_gateway(self, finished: bool, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any] | None:
        """Dismiss the actors; the last stats, or None when the gateway is dead, does not answer in time or cannot write
        its ledger."""
        return call_or_none(self._gateway.close, finished, timeout_s=timeout_s, away=(*AWAY, LedgerUnwritable))

    def close(self) -> None:
        """End the workers, without restarts. Idempotent."""
        for worker in (self._learner, self._gateway, self._store):
            ray.kill(worker, no_restart=True)

    def _call_until_answered(self, method: Any) -> Any:
        """Ask until there is an answer: a worker may be on its way back. Raises ClusterError."""
        try:
            return call_until_answered(method, patience_s=ACKNOWLEDGE_TIMEOUT_S + CALL_TIMEOUT_S, timeout_s=None)
        except AWAY as error:
            raise ClusterError(f"a worker did not answer: {error}") from error

    def _call_or_none(self, worker: Any, method: str) -> Any:
        try:
            return call_or_none(getattr(worker, method))
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"a worker is gone for good: {error}") from error


def _gateway_name(run_id: str) -> str:
    return f"gateway-{run_id}"
