"""The controller as a Ray actor that outlives its creator and restarts when it dies, and the replicas' client of it.

Its behaviour is in `controller.service`. A client starts the actor when there is none.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from shoal.cluster.growth import ON_HEAD
from shoal.errors import ConnectionLost, ShoalError
from shoal.ray_call import CALL_TIMEOUT_S, NAMESPACE, call_or_none
from shoal.serve.controller.config import LOAD_TIMEOUT_S, ControllerConfig
from shoal.serve.controller.state import StateFile
from shoal.serve.messages.replica_report import PeerReport, ReplicaReport, decode_report, encode_report
from shoal.serve.on_ray.ownership import is_serve_running
from shoal.serve.replica.watchers import ControllerClient

CHANGE_TIMEOUT_S = 3700.0  # above what a change may ask for
logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")
ServiceMethod = Callable[Concatenate[ControllerClient, P], Coroutine[Any, Any, T]]


@ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=1000)
class ControllerWorker:
    """A ControllerService as an actor.

    Ray imports this class wherever the actor is called. A replica would start later by what only the service needs, so
    that is imported in the actor's own process.
    """

    def __init__(self, setting: ControllerConfig) -> None:
        from shoal.serve.controller.service import ControllerService

        if ray.get_runtime_context().was_current_actor_reconstructed:
            from shoal.serve.on_ray.ingress_front import restore_front  # it loads Serve

            restore_front(setting.spec)
        self._name = setting.name
        self._service = ControllerService(setting, end_this_actor, is_serve_running)
        self._reports: dict[str, bytes] = {}

    def __repr__(self) -> str:
        """Its name in Ray's logs, by which `shoal serve logs` finds them."""
        return f"EndpointController:{self._name}"

    async def call(self, method: str, *arguments: object, **named: object) -> Any:
        return await getattr(self._service, method)(*arguments, **named)

    async def report(self, encoded: bytes) -> list[PeerReport]:
        """Take in a replica's report; the others' are passed on as they came."""
        report = decode_report(encoded)
        others = await self._service.report(report)
        known = self._reports | {report.replica: encoded}
        self._reports = {each.replica: known[each.replica] for each in (report, *others) if each.replica in known}
        return [PeerReport.of(each, known.get(each.replica)) for each in others]


def end_this_actor() -> None:
    ray.kill(ray.get_runtime_context().current_actor, no_restart=True)


def stop_controller(name: str) -> None:
    """End the actor of this name, if there is one, and remove its state. Idempotent."""
    try:
        actor = ray.get_actor(name, NAMESPACE)
    except ValueError:
        return
    call_or_none(actor.call, "forget", away=(RayActorError, GetTimeoutError))
    ray.kill(actor, no_restart=True)


class RemoteMethod(Generic[P, T]):
    """A method of the actor as one of its client, with the parameters and the answer that it has in the actor.

    is_routine: what a replica calls by itself, for as long as it lives: any failure of it is a ConnectionLost, after
                which the replica calls again
    """

    def __init__(
        self, method: ServiceMethod[P, T], timeout_s: float = CALL_TIMEOUT_S, is_routine: bool = False
    ) -> None:
        self.name = method.__name__
        self.timeout_s = timeout_s
        self.is_routine = is_routine

    def __get__(self, client: RayControllerClient, owner: type) -> Callable[P, Coroutine[Any, Any, T]]:
        return partial(client.call, self)


class RayControllerClient:
    """The client of the replicas and the driver: implements `ControllerClient`. Can be pickled; starts the actor when
    there is none."""

    follow = RemoteMethod(ControllerClient.follow, is_routine=True)
    leave = RemoteMethod(ControllerClient.leave, is_routine=True)
    request_load = RemoteMethod(ControllerClient.request_load)
    store_weights = RemoteMethod(ControllerClient.store_weights, is_routine=True)
    fetch_weights = RemoteMethod(ControllerClient.fetch_weights, is_routine=True)
    administer = RemoteMethod(ControllerClient.administer, CHANGE_TIMEOUT_S)
    load = RemoteMethod(ControllerClient.load, LOAD_TIMEOUT_S + CALL_TIMEOUT_S)
    unload = RemoteMethod(ControllerClient.unload, LOAD_TIMEOUT_S)
    status = RemoteMethod(ControllerClient.status)

    def __init__(self, setting: ControllerConfig) -> None:
        self._config = setting
        self._handle: Any = None
        self._last_problem = ""  # its last error

    def __reduce__(self) -> tuple[object, ...]:
        return (RayControllerClient, (self._config,))

    @property
    def handle(self) -> Any:
        if self._handle is None:
            self._handle = ControllerWorker.options(  # type: ignore[attr-defined]
                name=self._config.actor_name,
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                resources=dict(ON_HEAD),  # with HAProxy and the state file
            ).remote(self._config)
        return self._handle

    def start(self) -> None:
        _ = self.handle

    def call_blocking(self, method: str, *arguments: object) -> Any:
        """Call from a thread without an event loop. Raises ConnectionLost, or the controller's error."""
        try:
            return ray.get(self.handle.call.remote(method, *arguments), timeout=CALL_TIMEOUT_S)
        except (RayActorError, GetTimeoutError, RayTaskError) as error:
            raise self._translate_error(error) from error

    def stop(self) -> None:
        """End the actor, if there is one, and remove its state. Idempotent."""
        StateFile(self._config.state_file).remove()
        stop_controller(self._config.actor_name)

    async def report(self, report: ReplicaReport) -> list[PeerReport]:
        """Raises ConnectionLost."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                others: list[PeerReport] = await self.handle.report.remote(encode_report(report))
                return others
        except (RayActorError, RayTaskError, TimeoutError) as error:
            raise self._translate_error(error, is_routine=True) from error

    async def call(self, method: RemoteMethod[P, T], /, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            async with asyncio.timeout(method.timeout_s):
                answer: T = await self.handle.call.remote(method.name, *arguments, **named)
                return answer
        except (RayActorError, RayTaskError, TimeoutError) as error:
            raise self._translate_error(error, method.is_routine) from error

    def _translate_error(self, error: Exception, is_routine: bool = False) -> Exception:
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, ShoalError):
                return error.cause
            if not is_routine:
                return error
            problem = f"the controller of {self._config.name!r} failed: {error.cause!r}"
            if problem != self._last_problem:  # it would repeat with every report
                self._last_problem = problem
                logger.exception("%s", problem)
            return ConnectionLost(problem)
        if isinstance(error, ray.exceptions.ActorDiedError):
            self._handle = None  # it ended for good, idle or by mistake: the next call starts another
        return ConnectionLost(f"the controller of {self._config.name!r} did not answer: {error}")
