"""The gateway and the learner as Ray workers, which each hold a plain object and forward to it; and what listens on the
gateway's host until a game has brought the spaces.

Each worker starts its object when it is constructed, so Ray's own restart of a dead worker is the whole recovery: the
gateway restores its ledger and port, the learner its checkpoint. Called by flows. Others ask the gateway's worker by
handles: the learner for experience, the endpoint's replicas for users' actions.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray.actor import ActorHandle

from shoal.actor.environment import ASK
from shoal.cluster.capacity import count_gpu_slots, get_head_address, get_node_address, gpus_by_host, make_host_options
from shoal.device_memory import limit_device_memory
from shoal.errors import (
    ClusterError,
    ConfigError,
    ConnectionLost,
    InferenceError,
    LedgerUnwritable,
    RecordUnwritable,
    error_summary,
    summarize_error,
)
from shoal.gc_freeze import freeze_loaded_objects
from shoal.home import home
from shoal.open_inference.episodes import EpisodeAnswer, EpisodeRequest
from shoal.ray_call import AWAY, CALL_TIMEOUT_S, NAMESPACE, RETRY_S, call_or_none, call_until_answered
from shoal.rl.experience.queue import BatchRequest, ExperienceBatch
from shoal.rl.first_game import WAITING_PRINT_S, FirstGame, describe_waiting
from shoal.rl.gateway.gateway import Gateway
from shoal.rl.gateway.listener import format_websocket_address
from shoal.rl.gateway.shards import ShardedExperience, join_shards, merge_stats, split_setting
from shoal.rl.gateway.state import GatewaySetting
from shoal.rl.gateway.user_episodes import EpisodeRejection
from shoal.rl.gateway.zmq_listener import (
    format_address,
    load_curve_keys,
    require_reachable_gateway,
    resolve_reachable_host,
)
from shoal.rl.restart_limit import RestartLimit
from shoal.rl.spec import RLSpec
from shoal.runs import RunRecorder
from shoal.runs.waits import print_line
from shoal.weights import PublishedVersion, WeightSnapshot
from shoal.weights.ray_weight_store import RayWeightPublisher, RayWeightSource, get_stored_version, start_weight_store
from shoal.wire import DropReason
from shoal.wire.messages import GameSettings

if TYPE_CHECKING:
    from shoal.channel.connection import ChannelAddress
    from shoal.rl.learner_group import HubLink

ACKNOWLEDGE_TIMEOUT_S = 60.0  # how long a learner retries its acknowledgement while the gateway restarts


class RayExperienceSource:
    """An ExperienceSource on a gateway's handle. While the gateway restarts, `take` is empty and `acknowledge`
    waits."""

    def __init__(self, gateway: ActorHandle) -> None:
        self._gateway = gateway

    def take(self, consumer: str, request: BatchRequest) -> ExperienceBatch | None:
        limit_s = request.timeout_s + CALL_TIMEOUT_S
        payload = call_or_none(self._gateway.take, consumer, request, timeout_s=limit_s, away=AWAY, pause_s=RETRY_S)
        return None if payload is None else ExperienceBatch.from_bytes(payload)

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float] = ()) -> bool:
        try:
            method = self._gateway.acknowledge
            return bool(call_until_answered(method, lease_id, outcomes, evidence, patience_s=ACKNOWLEDGE_TIMEOUT_S))
        except AWAY as error:
            raise ConnectionLost(f"the gateway has been away for {ACKNOWLEDGE_TIMEOUT_S} s") from error


class RayEpisodeService:
    """An EpisodeService on the gateway of a run, for the replicas of its endpoint. name: of the gateway's worker"""

    def __init__(self, name: str) -> None:
        self._name = name
        self._gateway: ActorHandle | None = None

    async def take(self, request: EpisodeRequest) -> EpisodeAnswer:
        try:
            if self._gateway is None:
                self._gateway = ray.get_actor(self._name, NAMESPACE)
            answer = await self._gateway.take_episode.remote(request)
        except (*AWAY, ValueError) as error:  # no actor has the name yet
            reason = f"the run's gateway is away: {summarize_error(error)}"
            raise InferenceError(503, reason, retry_after_s=1.0) from error
        if isinstance(answer, EpisodeRejection):
            raise InferenceError(answer.status, answer.message)
        return cast("EpisodeAnswer", answer)


SpecT = TypeVar("SpecT", bound=RLSpec)
START_TIMEOUT_S = 300.0  # the learner may wait for a CPU of a busy cluster, and the gateway for the first weights
AWAY_TIMEOUT_S = 1800.0  # for a worker whose node is lost: an autoscaler's machine takes minutes
FIRST_GAME_TIMEOUT_S = 60.0  # for the start of what waits for one
USER_TIMEOUT_S = 10.0  # for the answer to a user of the endpoint


@ray.remote(num_cpus=0, max_concurrency=16)
class GatewayWorker:
    """A Gateway in a process of its own. After a restart, segments queued before are dropped as GATEWAY_CRASH; with
    `gateway.durable: store` they are queued again."""

    def __init__(self, spec: RLSpec, setting: GatewaySetting) -> None:
        self._gateway = Gateway.of_run(spec, setting, RayWeightSource(start_weight_store(setting.run_id)))
        self._gateway.start(START_TIMEOUT_S, partial(_release_ports, setting.run_id))

    def addresses(self) -> dict[str, str]:
        """Where actors and games connect, as `gateway.advertise` says, and where it listens: for a wildcard host, at
        the address of this node. Those of games are empty without `gateway.websocket`."""
        gateway = self._gateway
        bound = resolve_reachable_host(gateway.spec.host, ray.util.get_node_ip_address())
        host, port = gateway.spec.advertised
        return {
            "address": format_address("tcp", host or bound, port or gateway.port),
            "bound": format_address("tcp", bound, gateway.port),
            "websocket_address": format_websocket_address(gateway.listener, host or bound),
            "bound_websocket": format_websocket_address(gateway.listener, bound),
        }

    def relay_websockets(self, addresses: Mapping[str, str]) -> None:
        if self._gateway.listener is not None:
            self._gateway.listener.relay(addresses)

    def take(self, consumer: str, request: BatchRequest) -> bytes | None:
        """A batch as bytes, which Ray passes on unchanged; it would pickle arrays one by one."""
        batch = self._gateway.queue.take(consumer, request)
        return None if batch is None else batch.to_bytes()

    def acknowledge(self, lease_id: int, outcomes: Sequence[DropReason | None], evidence: Sequence[float]) -> bool:
        return self._gateway.queue.acknowledge(lease_id, outcomes, evidence)

    def take_episode(self, request: EpisodeRequest) -> EpisodeAnswer | EpisodeRejection:
        """Answer a user of the endpoint."""
        try:
            return self._gateway.answer_user(request, USER_TIMEOUT_S)
        except TimeoutError:
            return EpisodeRejection(504, f"no action within {USER_TIMEOUT_S:g} s: the learner is busy or restarting")

    def stats(self) -> dict[str, Any]:
        if not self._gateway.is_alive:
            os._exit(1)  # Ray restarts this worker, which continues from the ledger
        return {**self._gateway.stats(), **self.addresses()}

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        return self._gateway.take_events()

    def set_settings(self, values: GameSettings) -> None:
        self._gateway.set_settings(values)

    def connect_front(self, url: str) -> None:
        self._gateway.connect_front(url)

    def load_pool(self) -> list[WeightSnapshot]:
        """Past versions of the run, in the pool of opponents."""
        return [] if (pool := self._gateway.opponents) is None else pool.load_own()

    def close(self) -> dict[str, Any]:
        """The last stats, after the queue was dropped as SHUTDOWN: the run is over."""
        self._gateway.close(finished=True)
        return self._gateway.stats()


@ray.remote(max_concurrency=4)
class LearnerWorker:
    """A Learner in a process of its own; it starts at once, from its newest checkpoint if there is one."""

    def __init__(self, spec: RLSpec, setting: GatewaySetting, has_learnt: bool) -> None:
        with freeze_loaded_objects():  # imported here: the driver would spend a second loading torch for nothing
            import torch._dynamo  # noqa: F401 - as every optimiser does

            from shoal.rl.learner import Learner
            from shoal.rl.learner_group import LearnerHub
        limit_device_memory(spec.learner.num_gpus)
        store = start_weight_store(setting.run_id)
        self._publisher = RayWeightPublisher(store)
        names = [_gateway_name(setting.run_id, number) for number in range(setting.spec.shards)]
        sources = [RayExperienceSource(ray.get_actor(name, NAMESPACE)) for name in names]
        self._shards = ShardedExperience(sources) if len(sources) > 1 else None
        source = self._shards or sources[0]
        self._hub = LearnerHub(ray.util.get_node_ip_address()) if spec.learner.replicas > 1 else None
        version = get_stored_version(store)
        self._learner = Learner.of_run(spec, setting.site, source, self._publisher, version, self._hub, has_learnt)
        self._learner.thread.start()

    def stats(self) -> dict[str, Any]:
        return self._learner.stats()

    def hub_address(self) -> ChannelAddress:
        """Where the other learners of the run join."""
        assert self._hub is not None
        return self._hub.address

    def take_published(self, after: int) -> list[PublishedVersion]:
        return self._learner.take_published(after)

    def pause(self) -> WeightSnapshot:
        return self._learner.pause()

    def republish(self, snapshot: WeightSnapshot) -> WeightSnapshot:
        return self._learner.republish(snapshot)

    def resume(self) -> None:
        self._learner.resume()

    def finish(self, timeout_s: float) -> bool:
        """Stop learning, publish and save; False when an update does not end in time."""
        if is_over := self._learner.finish(timeout_s):
            self._publisher.close()
            if self._shards is not None:
                self._shards.close()
        return is_over


@ray.remote(max_concurrency=2)
class LearnerReplicaWorker:
    """A LearnerReplica in a process of its own; it joins the learner of the run at once, and each later incarnation."""

    def __init__(self, spec: RLSpec, setting: GatewaySetting) -> None:
        with freeze_loaded_objects():
            import torch._dynamo  # noqa: F401 - as every optimiser does

            from shoal.rl.learner_replica import LearnerReplica

        limit_device_memory(spec.learner.num_gpus)
        self._setting = setting
        self._replica = LearnerReplica(spec, setting.experience)
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
    """The store, the gateway and the learners of one run: started, called and closed together.

    has_learnt: the run is resumed, and has published weights before
    """

    def __init__(self, spec: RLSpec, setting: GatewaySetting, has_learnt: bool = False) -> None:
        self._run_id = setting.run_id
        self._taken_version = 0
        # The gateway stays on its host while that is up: its address should not change, and its ledger is a file there.
        placement = make_host_options()
        require_reachable_gateway(spec, get_node_address(placement["scheduling_strategy"].node_id), get_head_address())
        num_gpus = spec.learner.num_gpus if uses_gpu(spec) else 0
        if num_gpus and count_gpu_slots(num_gpus, gpus_by_host()) < spec.learner.replicas:
            problem = f"the cluster has no {num_gpus:g} GPUs for each of {spec.learner.replicas} learners"
            raise ConfigError("learner.device", "cuda", problem, "use learner.device=cpu, or a cluster with GPUs")
        self._store = start_weight_store(setting.run_id, placement)
        # Workers find each other by name: a handle among a constructor's arguments would prevent its restart.
        most = spec.learner.max_restarts
        options: dict[str, Any] = {"namespace": NAMESPACE, "max_restarts": -1 if most else 0}
        self._restart_limit = RestartLimit(most, AWAY_TIMEOUT_S)
        self._target_return = setting.target_return
        self._gateways: list[Any] = [
            GatewayWorker.options(  # type: ignore[attr-defined]
                name=_gateway_name(setting.run_id, number), **placement, **options
            ).remote(spec, own)
            for number, own in enumerate(split_setting(setting))
        ]
        self._gateway = self._gateways[0]  # where games, users and sessions are
        options |= {"num_cpus": spec.learner.num_cpus, "num_gpus": num_gpus}
        self._learner: Any = LearnerWorker.options(  # type: ignore[attr-defined]
            name=_learner_name(setting.run_id), **options
        ).remote(spec, setting, has_learnt)
        self._replicas: list[Any] = [
            LearnerReplicaWorker.options(  # type: ignore[attr-defined]
                name=f"{_learner_name(setting.run_id)}-{number}", **options
            ).remote(spec, setting)
            for number in range(1, spec.learner.replicas)
        ]

    def make_episode_service(self) -> RayEpisodeService:
        return RayEpisodeService(_gateway_name(self._run_id))

    def make_weight_source(self, follows_hold: bool = False) -> RayWeightSource:
        return RayWeightSource(self._store, follows_hold)

    def hold(self, snapshot: WeightSnapshot | None) -> None:
        """Let the endpoint have this version, or with None the newest again. Raises ClusterError."""
        self._call_until_answered(self._store.hold, snapshot)

    def wait_for_gateway(self) -> dict[str, str]:
        """Wait for the learner's first weights, and for the addresses of the gateway. Raises ClusterError when either
        does not start."""
        deadline = time.monotonic() + START_TIMEOUT_S
        self._wait_for_start("learner", self._learner.stats, deadline)
        found = [self._wait_for_start("gateway", each.addresses, deadline) for each in self._gateways]
        return join_shards(found)

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
        """(gateways', learner's); None while one is restarting. Raises ClusterError when one is gone for good."""
        gateway = self._merge([self._call_or_none(each, "stats") for each in self._gateways])
        learner = self._call_or_none(self._learner, "stats")
        self._restart_limit.check(time.monotonic(), gateway=gateway, learner=learner)
        return gateway, learner

    def take_events(self) -> list[tuple[float, str, dict[str, Any]]]:
        return [event for each in self._gateways for event in self._call_or_none(each, "take_events") or []]

    def take_published(self) -> list[PublishedVersion]:
        """The versions since the last call."""
        published = self._call_or_none(self._learner, "take_published", self._taken_version) or []
        if published:
            self._taken_version = published[-1].version
        return published

    def set_settings(self, values: GameSettings) -> None:
        """Tell the games these settings; the gateway's next counts say whether it has done so."""
        for each in self._gateways:
            each.set_settings.remote(values)

    def connect_front(self, url: str) -> None:
        """Name the endpoint that computes the policy for the gateway's front. Raises ClusterError."""
        self._call_until_answered(self._gateway.connect_front, url)

    def load_pool(self) -> list[WeightSnapshot]:
        """Past versions of the run, in the pool of opponents. Raises ClusterError."""
        return self._call_until_answered(self._gateway.load_pool)

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
        away = (*AWAY, ray.exceptions.RayTaskError)
        return bool(call_or_none(self._learner.finish, timeout_s, timeout_s=timeout_s + RETRY_S, away=away))

    def close_gateway(self, timeout_s: float = CALL_TIMEOUT_S) -> dict[str, Any] | None:
        """Dismiss the actors; the last stats, or None when the gateway is dead, does not answer in time or cannot write
        its ledger."""
        away = (*AWAY, LedgerUnwritable)
        return self._merge([call_or_none(each.close, timeout_s=timeout_s, away=away) for each in self._gateways])

    def _merge(self, shards: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
        known = [each for each in shards if each is not None]
        return merge_stats(known, self._target_return) if len(known) == len(shards) else None

    def close(self) -> None:
        """End the workers, without restarts. Idempotent."""
        for worker in (*self._replicas, self._learner, *self._gateways, self._store):
            ray.kill(worker, no_restart=True)

    def _call_until_answered(self, method: Any, *arguments: object) -> Any:
        """Ask until there is an answer: a worker may be on its way back. Raises ClusterError."""
        try:
            return call_until_answered(
                method, *arguments, patience_s=ACKNOWLEDGE_TIMEOUT_S + CALL_TIMEOUT_S, timeout_s=None
            )
        except AWAY as error:
            raise ClusterError(f"a worker did not answer: {error}") from error

    def _call_or_none(self, worker: Any, method: str, *parts: Any) -> Any:
        try:
            return call_or_none(getattr(worker, method), *parts)
        except ray.exceptions.RayActorError as error:
            raise ClusterError(f"a worker is gone for good: {error}") from error


def take_spaces(
    spec: SpecT, recorder: RunRecorder, token: str, staying: ExitStack, say: Callable[[str], None] = print_line
) -> SpecT:
    """The spec of a run with `env=ask` with the spaces of the first game that joins, as its record then has it; other
    specs as they are.

    staying: is to be closed when the gateway has taken its ports; until then games are told that the run begins
    say:     gets, every half a minute, what is waited for

    Raises ClusterError when the worker cannot start, or is gone.
    """
    if spec.env != ASK:
        return spec
    keys = load_curve_keys(recorder.folder) if spec.gateway.curve else None
    placement = make_host_options()
    node = get_node_address(placement["scheduling_strategy"].node_id)
    require_reachable_gateway(spec, node, get_head_address())
    options = {"max_concurrency": 2, "name": _first_game_name(recorder.id), "namespace": NAMESPACE, **placement}
    worker: Any = ray.remote(**options)(FirstGame).remote(spec, recorder.folder, token, keys)
    staying.callback(ray.kill, worker)
    try:
        host = resolve_reachable_host(spec.gateway.host, node)
        addresses = ray.get(worker.format_addresses.remote(host), timeout=FIRST_GAME_TIMEOUT_S)
        with suppress(RecordUnwritable):
            recorder.record_event("spaces_asked", addresses=addresses)
        while True:
            waiting = describe_waiting(addresses, keys[0].decode() if keys else "", str(home() / "token"))
            say(f"run {recorder.id}: {waiting}")
            env, brought_by = ray.get(worker.wait.remote(WAITING_PRINT_S))
            if env:
                break
        worker.stay.remote()
    except (ray.exceptions.RayError, TimeoutError) as error:
        reason = error_summary(str(error)) or str(error).strip().splitlines()[-1]
        raise ClusterError(f"the run cannot wait for its first game: {reason}") from error
    with suppress(RecordUnwritable):
        recorder.record_event("spaces_taken", actor_id=brought_by, spaces=env)
    say(f"run {recorder.id}: {brought_by} brings the spaces {env}")
    taken = spec.update({"env": env})
    recorder.change_spec(taken.to_record())
    return taken


def uses_gpu(spec: RLSpec) -> bool:
    """Whether the learners compute on GPUs: on `auto`, if the cluster has one for each."""
    if spec.learner.device != "auto":
        return spec.learner.device == "cuda"
    return count_gpu_slots(spec.learner.num_gpus, gpus_by_host()) >= spec.learner.replicas


def _release_ports(run_id: str) -> None:
    """Close the first game's listener of a run that has asked for its spaces, if it is there still."""
    with suppress(ValueError, ray.exceptions.RayError):
        first_game: Any = ray.get_actor(_first_game_name(run_id), NAMESPACE)
        ray.get(first_game.close.remote(), timeout=CALL_TIMEOUT_S)


def _first_game_name(run_id: str) -> str:
    return f"first-game-{run_id}"


def _gateway_name(run_id: str, number: int = 0) -> str:
    return f"gateway-{run_id}-{number}" if number else f"gateway-{run_id}"


def _learner_name(run_id: str) -> str:
    return f"learner-{run_id}"
