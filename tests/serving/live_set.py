"""An endpoint without Ray that serves a model live, from the weights of a run that a test publishes."""

from collections.abc import Awaitable, Callable
from typing import Any

from serving.faulty_models import ASKED, RAISE, SIGNATURE, moody
from serving.replica_set import Asked, ReplicaSet, ask, tally, until
from shoal.registry import ModelFactory
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.model_source import EndpointModel, LiveModel
from shoal.weights import WeightSnapshot, WeightStore

MOODY = ModelFactory(factory="serving.faulty_models:Moody")


class LiveSet(ReplicaSet):
    """`store` is the run's."""

    def __init__(self, store: WeightStore, **spec: Any) -> None:
        super().__init__(EndpointModel("moody", LiveModel(MOODY, SIGNATURE, store)), **spec)
        self.store = store

    async def publish(self, snapshot: WeightSnapshot) -> None:
        """And wait until every replica answers with it."""
        self.store.publish(snapshot)
        await until(lambda: set(self.versions("moody")) == {snapshot.version})

    @property
    def seen(self) -> dict[str, Any]:
        """What the status says of the model."""
        return self.status.describe_model("moody")

    def entries(self) -> list[tuple[str, int | None, int | None, str]]:
        """The changes: a model's failures on requests are none."""
        changes = [each for each in self.controller.state.events if each.kind != "failure"]
        return [(each.kind, each.version, each.previous, each.by) for each in changes]


def live(
    replicas: int = 1, **options: Any
) -> Callable[[Callable[[LiveSet], Awaitable[None]]], Callable[[], Awaitable[None]]]:
    """A test body that gets a running endpoint, whose run has published version 1, which has answered."""

    def decorate(body: Callable[[LiveSet], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def test() -> None:
            store = WeightStore()
            store.publish(moody(1))
            async with LiveSet(store, model=options) as endpoint:
                await endpoint.start(replicas)
                assert await everywhere(endpoint) == {1}
                await body(endpoint)
                store.close()

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


async def infer(
    replica: EndpointReplica, *, poison: bool = False, version: int | None = None, rows: int = 1, **headers: str
) -> Asked:
    """Ask; an answer must be all of the version that it names."""
    data = [ASKED, RAISE if poison else 0.0] * rows
    tensor = {"name": "x", "shape": [rows, 2], "datatype": "FP32", "data": data}
    path = "/v2/models/moody" + (f"/versions/{version}" if version is not None else "") + "/infer"
    answer = await ask(replica, "POST", path, {"inputs": [tensor]}, **headers)
    if answer.status == 200:
        assert answer.body["outputs"][0]["data"] == [float(answer.version)] * rows
    return answer


async def everywhere(endpoint: LiveSet, num: int = 8) -> set[int]:
    """The versions that answer `num` requests at once to each replica; not one may fail."""
    return set(await tally(endpoint, infer, num))
