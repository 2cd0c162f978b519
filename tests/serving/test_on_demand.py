"""More models than fit: over real replicas and a real controller, without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from serving.replica_set import ReplicaSet, ask, infer, register, until
from shoal.serve.spec.model_source import model_from_ref

NUM_MODELS = 6


def on_demand(num_replicas: int = 2, fit: int = 2, **spec: Any) -> Callable[..., Callable[[], None]]:
    """A test body that gets a running endpoint of six models, of which `fit` fit each replica."""

    def decorate(body: Callable[[ReplicaSet], Awaitable[None]]) -> Callable[[], None]:
        def test() -> None:
            size_bytes = max(register(f"m{number}").manifest.size_bytes for number in range(NUM_MODELS))

            async def run() -> None:
                models = [model_from_ref(f"m{number}") for number in range(NUM_MODELS)]
                async with ReplicaSet(*models, memory=fit * size_bytes, **spec) as endpoint:
                    await endpoint.start(num_replicas)
                    await body(endpoint)

            asyncio.run(run())

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def loaded(endpoint: ReplicaSet, replica: str) -> set[str]:
    return {model.name for model in endpoint.replicas[replica].manager.list_loaded()}


@on_demand()
async def test_any_replica_answers_for_any_model(endpoint: ReplicaSet) -> None:
    assert not loaded(endpoint, "r1") | loaded(endpoint, "r2")
    for number in range(NUM_MODELS):
        for replica in endpoint.replicas.values():
            answer = await infer(replica, f"m{number}")
            assert answer.status == 200, answer.body
    assert endpoint.num_forwarded >= NUM_MODELS
    await until(lambda: all(len(loaded(endpoint, each)) <= 2 for each in endpoint.replicas))
    status = endpoint.status.describe_endpoint()
    assert sum(len(loaded(endpoint, each)) for each in endpoint.replicas) >= 2, status


@on_demand()
async def test_a_model_that_is_not_loaded_is_described_without_a_load(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]
    for path in (
        "/v2/models/m0",
        "/v2/models/m0/ready",
        "/v2/models/m0/config",
        "/v2/models/m0/stats",
        "/v2/health/ready",
    ):
        answer = await ask(replica, "GET", path)
        assert answer.status == 200, answer.body
    index = (await ask(replica, "POST", "/v2/repository/index", {})).body
    assert {(each["name"], each["state"]) for each in index} == {(f"m{number}", "READY") for number in range(6)}
    assert not loaded(endpoint, "r1") | loaded(endpoint, "r2")
