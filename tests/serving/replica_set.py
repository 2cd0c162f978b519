"""An endpoint without Ray: real replicas and a real controller on one event loop, with faults by name.

    async with ReplicaSet(models) as endpoint:      # registry models in the test's $SHOAL_HOME
        await endpoint.start(3)
        endpoint.controller_away = True             # every call to it fails, as while Ray starts it again
        endpoint.restart_controller()               # forgets everything but its state file
        await endpoint.kill("r1")                   # without a word, as SIGKILL

Every model is `torch.nn.Linear` with zero weights and its version as bias: each number of an answer is its version.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, cast
from unittest.mock import patch

from shoal.errors import ConnectionLost, InferenceError, RequestLost
from shoal.serve.controller.config import build_controller_config
from shoal.serve.controller.service import ControllerService
from shoal.serve.messages.desired_state import EndpointPlan
from shoal.serve.messages.replica_report import PeerReport, ReplicaReport
from shoal.serve.replica.loader import VersionLoader
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.replica.watchers import ControllerClient
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, model_from_ref
from shoal.weights import WeightSnapshot

DEADLINE_S = 60.0


@contextmanager
def held_loads() -> Iterator[asyncio.Event]:
    """Versions that are loaded meanwhile wait until the event is set."""
    gate, load = asyncio.Event(), VersionLoader.load_version

    async def wait(*arguments: Any) -> Any:
        await gate.wait()
        return await load(*arguments)

    with patch.object(VersionLoader, "load_version", wait):
        yield gate


async def until(condition: Callable[[], object], what: str = "") -> None:
    """Wait for a state, with a deadline."""
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


class Asked:
    """One answer over HTTP."""

    def __init__(self, status: int, headers: Mapping[bytes, bytes], body: Any) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def version(self) -> int:
        return int(self.headers.get(b"shoal-model-version", b"0"))


async def ask(replica: EndpointReplica, method: str, path: str, body: object = None, **headers: str) -> Asked:
    """A request to a replica's application. `shoal_track="candidate"` is a header."""
    payload = b"" if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, answered, content = await exchange(replica, method, path, named, payload)
    pairs = {name.encode(): value.encode() for name, value in answered.items()}
    return Asked(status, pairs, json.loads(content) if content else None)


async def exchange(
    replica: EndpointReplica, method: str, path: str, headers: Mapping[str, str], body: bytes
) -> tuple[int, Mapping[str, str], bytes]:
    """The status, headers and body of an answer of a replica's application."""
    sent: list[Any] = []
    bodies = [body]

    async def receive() -> Any:
        if not bodies:
            await asyncio.Event().wait()  # this client does not go away
        return {"type": "http.request", "body": bodies.pop()}

    async def send(message: Any) -> None:
        sent.append(message)

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    await replica.app({"type": "http", "method": method, "path": path, "headers": pairs}, receive, send)
    content = b"".join(message.get("body", b"") for message in sent[1:])
    return sent[0]["status"], {name.decode(): value.decode() for name, value in sent[0]["headers"]}, content


async def infer(
    replica: EndpointReplica, model: str = "linear", *, rows: int = 1, version: int | None = None, **headers: str
) -> Asked:
    """Ask for an inference; an answer must be all of the version it names."""
    tensor = {"name": "x", "shape": [rows, 3], "datatype": "FP32", "data": [0.0] * 3 * rows}
    path = f"/v2/models/{model}" + (f"/versions/{version}" if version is not None else "") + "/infer"
    answer = await ask(replica, "POST", path, {"inputs": [tensor]}, **headers)
    if answer.status == 200:
        assert set(answer.body["outputs"][0]["data"]) == {float(answer.version)}, answer.body
        assert answer.body["model_version"] == str(answer.version)
    return answer


class ReplicaSet:
    """See the module's docstring. `models`: as for `deploy`, or references to versions."""

    def __init__(
        self, *models: EndpointModel | str, lease_s: float = 20.0, stage_timeout_s: float = 60.0, **spec: Any
    ) -> None:
        self.spec = EndpointSpec.parse({"name": "endpoint", **spec})
        self.lease_s, self.stage_timeout_s = lease_s, stage_timeout_s
        self.replicas: dict[str, EndpointReplica] = {}
        self.controller_away = False
        self.dead: set[str] = set()
        self.deadly: set[str] = set()  # replicas that die of the next request that another one sends
        self.num_forwarded = 0
        self.giving, self.num_fetched = asyncio.Event(), 0  # of the weights that the controller keeps
        self.giving.set()
        self._config, self._live = build_controller_config(
            self.spec, [model_from_ref(each) if isinstance(each, str) else each for each in models]
        )
        self.restart_controller()

    async def __aenter__(self) -> ReplicaSet:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ticking.cancel()
        for replica in self.replicas.values():
            await replica.close()

    def restart_controller(self) -> None:
        """Another one in its place, which knows what is in the state file."""
        self.service = ControllerService(self._config)
        self.controller, self.status = self.service._controller, self.service._status
        self.controller._lease_s, self.controller._stage_timeout_s = self.lease_s, self.stage_timeout_s

    async def start(self, num_replicas: int = 1) -> list[EndpointReplica]:
        """Add replicas, and wait until they are ready as Serve would."""
        added = [self.add() for _ in range(num_replicas)]
        await asyncio.gather(*[replica.start(DEADLINE_S) for replica in added])
        return added

    def add(self, name: str = "") -> EndpointReplica:
        """A replica that is not yet waited for."""
        name = name or f"r{len(self.replicas) + 1}"
        replica = self.replicas[name] = EndpointReplica(
            name, self.spec, self._live, cast(ControllerClient, LocalController(self, name)), peers=LocalPeers(self)
        )
        replica.address = name
        return replica

    async def kill(self, name: str) -> None:
        """The controller hears nothing of it any more, and its lease is over, unlike those of the others."""
        self.dead.add(name)
        self.controller._last_seen_s[name] = -math.inf
        await self.replicas.pop(name).close()

    def versions(self, model: str = "linear") -> list[int]:
        """The stable version of every replica."""
        return [replica.manager.get_model(model).version for replica in self.replicas.values()]

    def kinds(self) -> list[str]:
        """Of every event."""
        return [event.kind for event in self.controller.state.events]

    def phase(self, model: str = "linear") -> str:
        return str(self.controller.state.models[model].rollout.phase)

    async def administer(self, action: str, model: str = "linear", **change: Any) -> dict[str, Any]:
        return await self.service.administer({"action": action, "model": model, **change}, "tester")

    # -- what replicas ask of the controller, where it is not the service's method

    async def take_follow(self, replica: str, known_generation: int, timeout_s: float) -> EndpointPlan | None:
        return await self.controller.follow(replica, known_generation, min(timeout_s, 0.1))

    async def take_report(self, report: ReplicaReport) -> list[PeerReport]:
        return [PeerReport.of(each) for each in await self.service.report(report)]

    async def take_fetch_weights(self, model: str, version: int) -> WeightSnapshot | None:
        self.num_fetched += 1
        await self.giving.wait()
        return await self.service.fetch_weights(model, version)

    async def _tick(self) -> None:
        while True:
            self.controller.tick()
            self.status.sample()
            await asyncio.sleep(0.02)


class LocalController:
    """A replica's end of the controller: the methods of a `ControllerClient`."""

    def __init__(self, replicas: ReplicaSet, replica: str) -> None:
        self._set, self._replica = replicas, replica

    def __getattr__(self, method: str) -> Callable[..., Coroutine[Any, Any, Any]]:
        async def call(*arguments: Any) -> Any:
            if self._set.controller_away or self._replica in self._set.dead:
                raise ConnectionLost("the controller is away")
            service = self._set.service
            return await getattr(self._set, f"take_{method}", getattr(service, method))(*arguments)

        return call


class LocalPeers:
    """A replica's way to the others, whose addresses are their names."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._set = replicas

    async def post(
        self, address: str, path: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, Mapping[str, str], bytes]:
        self._set.num_forwarded += 1
        if address not in self._set.replicas:
            raise ConnectionLost(f"{address} is dead")
        if address in self._set.deadly:
            await self._set.kill(address)
            raise RequestLost(f"{address} died of it")
        return await exchange(self._set.replicas[address], "POST", path, headers, body)

    async def relay(self, address: str, path: str, headers: Mapping[str, str], body: bytes, send: Any) -> None:
        status, named, content = await self.post(address, path, headers, body)
        if status == 503:
            raise InferenceError(503, f"{address} cannot answer now")
        given = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": given})
        await send({"type": "http.response.body", "body": content})

    def retain(self, addresses: Collection[str]) -> None:
        pass

    def close(self) -> None:
        pass


async def tally(
    endpoint: ReplicaSet, one: Callable[[EndpointReplica], Coroutine[Any, Any, Asked]], num: int
) -> Counter[int]:
    """Who answers `num` requests at once to each replica, each asked by `one`; not one may fail."""
    found: Counter[int] = Counter()
    for replica in endpoint.replicas.values():
        for answer in await asyncio.gather(*[one(replica) for _ in range(num)]):
            assert answer.status == 200, answer.body
            found[answer.version] += 1
    return found


@asynccontextmanager
async def serving_one(
    *models: EndpointModel | str, **options: Any
) -> AsyncIterator[tuple[ReplicaSet, EndpointReplica]]:
    """An endpoint with one replica, which is ready."""
    async with ReplicaSet(*models, **options) as endpoint:
        [replica] = await endpoint.start()
        yield endpoint, replica
