"""The gateway and the learner as Ray workers, which each hold a plain object and forward to it.

Each worker starts its object when it is constructed, so Ray's own restart of a dead worker is the whole recovery: the
gateway restores its ledger and port, the learner its checkpoint. Called by flows.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from shoal.atomic_file import make_folder
from shoal.cluster.capacity import count_gpu_slots, get_head_address, get_node_address, gpus_by_host, make_host_options
from shoal.device_memory import limit_device_memory
from shoal.errors import ClusterError, ConfigError, ConnectionLost, LedgerUnwritable
from shoal.gc_freeze import freeze_loaded_objects
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.ray_call import AWAY, CALL_TIMEOUT_S, NAMESPACE, RETRY_S, call_or_none, call_until_answered
from shoal.rl.experience.demonstrations import DemonstrationSite
from shoal.rl.experience.group_commit import GroupCommit
from shoal.rl.experience.queue import BatchRequest, ExperienceQueue
from shoal.rl.experience.segment_ledger import LEDGER_NAME, Ledger
from shoal.rl.experience.segment_log import open_log
from shoal.rl.first_game import name_first_game
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.gateway.opponent_pool import OpponentPool
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.gateway.user_episodes import EpisodeRejection
from shoal.rl.gateway.zmq_listener import format_address, require_reachable_gateway, resolve_reachable_host
from shoal.rl.ray_gateway_handle import ACKNOWLEDGE_TIMEOUT_S, RayEpisodeService, RayExperienceSource
from shoal.rl.spec import RLSpec
from shoal.weights import PublishedVersion, WeightSnapshot
from shoal.weights.ray_weight_store import RayWeightPublisher, RayWeightSource, get_stored_version, start_weight_store
from shoal.wire import DropReason, ExperienceSpec
from shoal.wire.messages import GameSettings

if TYPE_CHECKING:
    from shoal.channel.connection import ChannelAddress
    from shoal.rl.learner_group import HubLink

START_TIMEOUT_S = 300.0  # the learner may wait for a CPU of a busy cluster, and the gateway for the first weights
USER_TIMEOUT_S = 10.0  # for the answer to a user of the endpoint


@dataclass(frozen=True)
class RunSetting:
    """The settings that both workers need. `has_learnt`: the run is resumed, and has published weights before.
    `policy`: its name, in addresses. `settings`: of the game, at first"""

    run_id: str
    folder: Path
    token: str
    target_return: float | None
    curve_keys: tuple[bytes, bytes] | None
    has_learnt: bool = False
    policy: str = ""
    demonstrations: DemonstrationSite | None = None
    settings: GameSettings = field(default_factory=dict)

    @property
    def folder_name(self) -> str:
        """The folder below that of all runs: the run's, or a policy's there."""
        is_run = self.folder.name == self.run_id
        return self.run_id if is_run else f"{self.folder.parent.name}/{self.folder.name}"


@ray.remote(num_cpus=0, max_concurrency=16)
class GatewayWorker:
    """A Gateway in a process of its own. After a restart, segments queued before are dropped as GATEWAY_CRASH; with
    `gateway.durable: store` they are queued again."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: RunSetting) -> None:
        make_folder(setting.folder)  # absent on a host that shares no files with the driver's
        self._pool = OpponentPool.of_run(spec.self_play, setting.folder)
        self._ledger = Ledger(setting.folder / LEDGER_NAME)
        self._queue = ExperienceQueue(spec.queue_capacity, self._ledger)
        has_log = spec.gateway.durable == "store"
        commit = GroupCommit(open_log(setting.folder_name, experience), self._queue) if has_log else None
        gateway = GatewaySetting(
            spec.applied_gateway,
            experience,
            setting.token,
            setting.run_id,
            setting.target_return,
            setting.curve_keys,
            is_synchronous=spec.algorithm.pauses_actors,
            steps_ahead=spec.steps_ahead,
            learns_from_users=spec.learn_from_endpoint,
            policy=setting.policy,
            demonstrations=setting.demonstrations,
            settings=setting.settings,
        )
        weights = RayWeightSource(start_weight_store(setting.run_id))
        self._gateway = Gateway(gateway, self._queue, weights, self._pool, commit)
        self._gateway.start(START_TIMEOUT_S, partial(_release_ports, setting.run_id))

    def address(self) -> str:
        """Its address for actors: `gateway.advertise`, or where it listens."""
        host, port = self._gateway.spec.advertised
        return format_address("tcp", host, port or self._gateway.port) if host else self.bound_address()

    def bound_address(self) -> str:
        """Where it listens; for a wildcard host, at the address of this node."""
        return format_address("tcp", self._resolve_host(), self._gateway.port)

    def websocket_address(self, is_bound: bool = False) -> str:
        """For games; empty without `gateway.websocket`. is_bound: where it listens, and not the advertised host"""
        advertised = "" if is_bound else self._gateway.spec.advertised[0]
        return format_websocket_address(self._gateway.listener, advertised or self._resolve_host())

    def relay_websockets(self, addresses: Mapping[str, str]) -> None:
        if self._gateway.listener is not None:
            self._gateway.listener.relay(addresses)

    def _resolve_host(self) -> str:
        return resolve_reachable_host(self._gateway.spec.host, ray.util.get_node_ip_address())

    def take(self, consumer: str, request: BatchRequest) -> bytes | None:
        """A batch as bytes, which Ray passes on unchanged; it would pickle arrays one by one."""
        batch = self._queue.take(consumer, request)
        return None if batch is None else batch.to_bytes()

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float]) -> bool:
        return self._queue.acknowledge(lease_id, outcomes, evidence)

    def take_episode(self, request: EpisodeRequest) -> EpisodeAnswer | EpisodeRejection:
        """Answer a user of the endpoint."""
        try:
            return self._gateway.answer_user(request, USER_TIMEOUT_S)
        except TimeoutError:
            return EpisodeRejection(504, f"no action within {USER_TIMEOUT_S:g} s: the learner is busy or restarting")

    def stats(self) -> dict[str, Any]:
        if not self._gateway.is_alive:
            os._exit(1)  # Ray restarts this worker, which continues from the ledger
        addresses = {"address": self.address(), "websocket_address": self.websocket_address()}
        return {**self._gateway.stats(), **addresses}

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        return self._gateway.take_events()

    def set_settings(self, values: GameSettings) -> None:
        self._gateway.set_settings(values)

    def load_pool(self) -> list[WeightSnapshot]:
        """Past versions of the run, in the pool of opponents."""
        return [] if self._pool is None else self._pool.load_own()

    def close(self, finished: bool) -> dict[str, Any]:
        """The last stats, after the queue was dropped as SHUTDOWN."""
        self._gateway.close(finished)
        return self._gateway.stats()


@ray.remote(max_concurrency=4)
class LearnerWorker:
    """A Learner in a process of its own; it starts at once, from its newest checkpoint if there is one."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: RunSetting) -> None:
        with freeze_loaded_objects():  # imported here: the driver would spend a second loading torch for nothing
            import torch._dynamo  # noqa: F401 - as every optimiser does

            from shoal.checkpoint.stored import open_run_store
            from shoal.rl.learner import Learner
            from shoal.rl.learner_group import LearnerHub
        limit_device_memory(spec.learner.num_gpus)
        store = start_weight_store(setting.run_id)
        self._publisher = RayWeightPublisher(store)
        source = RayExperienceSource(ray.get_actor(_gateway_name(setting.run_id), NAMESPACE))
        self._hub = LearnerHub(ray.util.get_node_ip_address()) if spec.learner.replicas > 1 else None
        version, site = get_stored_version(store), setting.demonstrations
        self._learner = Learner(
            spec,
            experience,
            source,
            self._publisher,
            setting.folder / "checkpoints",
            version,
            self._hub,
            store=open_run_store(setting.folder_name),
            demonstrations=site.open_shown() if site else None,
            must_restore=setting.has_learnt or bool(version),
        )
        self._failure, self._finished = "", False
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)
        self._thread.start()

    def stats(self) -> dict[str, Any]:
        ended = "" if self._thread.is_alive() or self._finished else "its thread has ended"
        return {**self._learner.stats(), "failure": self._failure or ended}

    def hub_address(self) -> ChannelAddress:
        """Where the other learners of the run join."""
        assert self._hub is not None
        return self._hub.address

    def take_published(self) -> list[PublishedVersion]:
        return self._learner.take_published()

    def pause(self) -> WeightSnapshot:
        return self._learner.pause()

    def republish(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        return self._learner.republish(snapshot)

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


@ray.remote(max_concurrency=2)
class LearnerReplicaWorker:
    """A LearnerReplica in a process of its own; it joins the learner of the run at once, and each later incarnation."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: RunSetting) -> None:
        with freeze_loaded_objects():
            import torch._dynamo  # noqa: F401 - as every optimiser does

            from shoal.rl.learner_replica import LearnerReplica

        limit_device_memory(spec.learner.num_gpus)
        self._setting = setting
        self._replica = LearnerReplica(spec, experience)
        threading.Thread(target=self._run, name="learner-replica", daemon=True).start()

    def pid(self) -> int:
        return os.getpid()

    def _run(self) -> None:
        try:
            self._replica.run(self._connect)
        except BaseException:  # noqa: BLE001 - reported, and the process ends with it
            traceback.print_exc()
            os._exit(1)  # Ray restarts this worker, which takes the learner's state

    def _connect(self) -> HubLink:
        from shoal.rl.learner_group import HubLink

        learner = ray.get_actor(_learner_name(self._setting.run_id), NAMESPACE)
        address = call_until_answered(learner.hub_address, patience_s=START_TIMEOUT_S)
        try:
            return HubLink(address)
        except ConnectionLost:
            time.sleep(RETRY_S)  # the learner is on its way back, or the run ends
            raise


class ActorLearnerWorkers:
    """The store, the gateway and the learners of one run: started, called and closed together."""

    def __init__(self, spec: RLSpec, experience: ExperienceSpec, setting: RunSetting) -> None:
        self._run_id = setting.run_id
        # The gateway stays on its host while that is up: its address should not change, and its ledger is a file there.
        placement = make_host_options()
        require_reachable_gateway(spec, get_node_address(placement["scheduling_strategy"].node_id), get_head_address())
        num_gpus = spec.learner.num_gpus if uses_gpu(spec) else 0
        if num_gpus and count_gpu_slots(num_gpus, gpus_by_host()) < spec.learner.replicas:
            problem = f"the cluster has no {num_gpus:g} GPUs for each of {spec.learner.replicas} learners"
            raise ConfigError("learner.device", "cuda", problem, "use learner.device=cpu, or a cluster with GPUs")
        self._store = start_weight_store(setting.run_id, placement)
        # Workers find each other by name: a handle among a constructor's arguments would prevent its restart.
        options = {"namespace": NAMESPACE, "max_restarts": spec.learner.max_restarts}
        self._gateway: Any = GatewayWorker.options(  # type: ignore[attr-defined]
            name=_gateway_name(setting.run_id), **placement, **options
        ).remote(spec, experience, setting)
        options |= {"num_cpus": spec.learner.num_cpus, "num_gpus": num_gpus}
        self._learner: Any = LearnerWorker.options(  # type: ignore[attr-defined]
            name=_learner_name(setting.run_id), **options
        ).remote(spec, experience, setting)
        self._replicas: list[Any] = [
            LearnerReplicaWorker.options(  # type: ignore[attr-defined]
                name=f"{_learner_name(setting.run_id)}-{number}", **options
            ).remote(spec, experience, setting)
            for number in range(1, spec.learner.replicas)
        ]

    def make_episode_service(self) -> RayEpisodeService:
        return RayEpisodeService(_gateway_name(self._run_id))

    def make_weight_source(self, follows_hold: bool = False) -> RayWeightSource:
        return RayWeightSource(self._store, follows_hold)

    def hold(self, snapshot: WeightSnapshot | None) -> None:
        """Let the endpoint have this version, or with None the newest again. Raises ClusterError."""
        self._call_until_answered(self._store.hold, snapshot)

    def wait_for_gateway(self) -> str:
        """Wait for the learner's first weights, and for the gateway. Raises ClusterError when either does not start."""
        deadline = time.monotonic() + START_TIMEOUT_S
        self._wait_for_start("learner", self._learner.stats, deadline)
        return str(self._wait_for_start("gateway", self._gateway.address, deadline))

    def get_bound_address(self) -> str:
        """Where the gateway listens, for actors of its own host. Raises ClusterError."""
        return str(self._call_until_answered(self._gateway.bound_address))

    def get_websocket_address(self, is_bound: bool = False) -> str:
        """As of a GatewayWorker. Raises ClusterError."""
        return str(self._call_until_answered(self._gateway.websocket_address, is_bound))

    def relay_websockets(self, addresses: Mapping[str, str]) -> None:
        """Let this gateway pass games on to those of other policies. Raises ClusterError."""
        self._call_until_answered(self._gateway.relay_websockets, addresses)

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

    def set_settings(self, values: GameSettings) -> None:
        """Tell the games these settings; the gateway's next counts say whether it has done so."""
        self._gateway.set_settings.remote(values)

    def load_pool(self) -> list[WeightSnapshot]:
        """Past versions of the run, in the pool of opponents. Raises ClusterError."""
        pool: list[WeightSnapshot] = self._call_until_answered(self._gateway.load_pool)
        return pool

    def pause_learner(self) -> WeightSnapshot:
        """Pause learning; the weights stay unchanged until `resume_learner`. Raises ClusterError."""
        return self._call_until_answered(self._learner.pause)

    def republish(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        """Publish earlier weights as the newest version, while the learner pauses. Raises ClusterError."""
        return self._call_until_answered(self._learner.republish, snapshot)

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
        for worker in (*self._replicas, self._learner, self._gateway, self._store):
            ray.kill(worker, no_restart=True)

    def _call_until_answered(self, method: Any, *arguments: object) -> Any:
        """Ask until there is an answer: a worker may be on its way back. Raises ClusterError."""
        try:
            return call_until_answered(
                method, *arguments, patience_s=ACKNOWLEDGE_TIMEOUT_S + CALL_TIMEOUT_S, timeout_s=None
            )
        except AWAY as error:
            raise ClusterError(f"a worker did not answer: {error}") from error

    def _call_or_none(self, worker: Any, method: str) -> Any:
        try:
            return call_or_none(getattr(worker, method))
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"a worker is gone for good: {error}") from error


def uses_gpu(spec: RLSpec) -> bool:
    """Whether the learners compute on GPUs: on `auto`, if the cluster has one for each."""
    if spec.learner.device != "auto":
        return spec.learner.device == "cuda"
    return count_gpu_slots(spec.learner.num_gpus, gpus_by_host()) >= spec.learner.replicas


def _release_ports(run_id: str) -> None:
    """Close the first game's listener of a run that has asked for its spaces, if it is there still."""
    with suppress(ValueError, ray.exceptions.RayError):
        first_game: Any = ray.get_actor(name_first_game(run_id), NAMESPACE)
        ray.get(first_game.close.remote(), timeout=CALL_TIMEOUT_S)


def _gateway_name(run_id: str) -> str:
    return f"gateway-{run_id}"


def _learner_name(run_id: str) -> str:
    return f"learner-{run_id}"
