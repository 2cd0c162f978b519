"""A canary is judged by its own mistakes, and not by those of its callers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from serving.faulty_models import FINE, RAISE, SHAPE, SIGNATURE, moody
from serving.live_set import MOODY, infer
from serving.replica_set import ReplicaSet
from shoal.registry import Registry
from shoal.serve.messages.metrics_snapshot import VersionSnapshot, merge_snapshots
from shoal.serve.spec.model_source import model_from_ref

NUM_REQUESTS = 80


@asynccontextmanager
async def canary_of(mood: float = FINE, percent: float = 50.0, action: str = "canary") -> AsyncIterator[ReplicaSet]:
    """A candidate of this mood beside a version that fails at poison alone."""
    for version, its_mood in ((1, FINE), (2, mood)):
        Registry().register("moody", moody(version, its_mood), model=MOODY, signature=SIGNATURE)
    # Not judged by latency: forwards of 20 µs on a busy machine are slow or fast by chance.
    options = {"warm_up": False, "guard": {"max_latency_ratio": 1e6}}
    async with ReplicaSet(model_from_ref("moody@1"), model=options) as endpoint:
        await endpoint.start(2)
        await endpoint.administer(action=action, model="moody", version=2, percent=percent)
        yield endpoint


async def ask_many(endpoint: ReplicaSet, *, poison_every: int = 10) -> Counter[int]:
    """The statuses of many requests at once to each replica; then the controller judges what was counted."""
    statuses: Counter[int] = Counter()
    for replica in endpoint.replicas.values():
        asked = [infer(replica, poison=number % poison_every == 0) for number in range(NUM_REQUESTS)]
        statuses.update([answer.status for answer in await asyncio.gather(*asked)])
    for replica in endpoint.replicas.values():
        endpoint.controller.report(replica.manager.report())
    return statuses


def count(endpoint: ReplicaSet, version: int) -> VersionSnapshot:
    snapshots = [replica.manager.get_model("moody").counts.snapshot() for replica in endpoint.replicas.values()]
    return merge_snapshots(snapshots)["versions"][str(version)]


def test_a_candidate_stays_though_a_client_makes_both_versions_raise() -> None:
    async def body() -> None:
        async with canary_of() as endpoint:
            assert await ask_many(endpoint) == {200: 144, 500: 16}
            assert endpoint.phase("moody") == "canary"
            both = [count(endpoint, version) for version in (1, 2)]
            assert sum(each["statuses"]["500"] for each in both) == 16
            assert sum(each["failed_on_both"] for each in both) == 16
            assert min(sum(each["statuses"].values()) for each in both) >= 50  # it could have been judged

    asyncio.run(body())


@pytest.mark.parametrize(("mood", "percent"), [(RAISE, 50.0), (SHAPE, 100.0)])
def test_a_candidate_goes_that_fails_where_the_stable_version_answers(mood: float, percent: float) -> None:
    """Beside a client whose mistakes both versions answer with 500, and with a share that leaves the other nothing."""

    async def body() -> None:
        async with canary_of(mood, percent) as endpoint:
            statuses = await ask_many(endpoint)
            assert statuses[500] > 60
            assert endpoint.phase("moody") == "steady"
            event = endpoint.controller.state.events[-1]
            assert (event.kind, event.by) == ("rollback", "guard")
            assert "requests failed, of the stable version 0 of" in event.reason

    asyncio.run(body())


def test_a_shadow_is_not_compared_at_requests_that_are_at_fault() -> None:
    async def body() -> None:
        async with canary_of(percent=100.0, action="shadow") as endpoint:
            assert await ask_many(endpoint) == {200: 144, 500: 16}
            assert endpoint.phase("moody") == "canary"
            assert count(endpoint, 1)["failed_on_both"] == 16

    asyncio.run(body())
