"""What a replica holds: the versions that somebody may ask for, and nothing of those that are gone."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from serving.replica_set import ReplicaSet, infer, register, until
from shoal.serve.replica.loader import BuiltModel, StagedVersion, VersionLoader
from shoal.serve.spec.model_source import model_from_ref


def weights_of(endpoint: ReplicaSet, version: int) -> weakref.ref[Any]:
    """Those of a version that the only replica has loaded."""
    [replica] = endpoint.replicas.values()
    loaded = replica.manager.get_model("linear").router.choose_track(version, "", "").loaded
    assert loaded is not None
    return weakref.ref(loaded)


def are_gone(*held: weakref.ref[Any]) -> bool:
    gc.collect()
    return all(each() is None for each in held)


def test_versions_that_are_left_are_forgotten_and_so_is_a_model_that_is_deleted() -> None:
    for _ in range(3):
        register(aliases=["champion"])

    async def body() -> None:
        async with ReplicaSet(model_from_ref("linear@1")) as endpoint:
            [replica] = await endpoint.start()
            await endpoint.administer(action="canary", model="linear", version=2, percent=10)
            tried = weights_of(endpoint, 2)
            await endpoint.administer(action="rollback", model="linear")
            await until(lambda: are_gone(tried), "a candidate that went")
            await endpoint.administer(action="canary", model="linear", version=2, percent=10)
            first, second = weights_of(endpoint, 1), weights_of(endpoint, 2)
            await endpoint.administer(action="promote", model="linear")
            await until(lambda: are_gone(first), "what was stable before")
            await endpoint.administer(action="deploy", model="linear", version=3)
            await until(lambda: are_gone(second), "a candidate that was promoted")
            assert (await infer(replica)).version == 3
            third, hosted = weights_of(endpoint, 3), weakref.ref(replica.manager.get_model("linear"))
            await endpoint.administer(action="delete", model="linear")
            await until(lambda: are_gone(third, hosted), "a model that was deleted")

    asyncio.run(body())


def test_a_replica_that_starts_during_a_canary_measures_the_candidate_by_the_stable_version(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for _ in range(2):
        register(aliases=["champion"])
    staged: list[tuple[int, bool, bool]] = []

    class Watched(VersionLoader):
        async def load_version(
            self, source: Any, version: int, options: Any, signature: Any, last: BuiltModel | None
        ) -> StagedVersion:
            staged.append((version, signature is not None, last is not None))
            return await super().load_version(source, version, options, signature, last)

    async def body() -> None:
        async with ReplicaSet(model_from_ref("linear@1")) as endpoint:
            await endpoint.start()
            await endpoint.administer(action="canary", model="linear", version=2, percent=10)
            monkeypatch.setattr("shoal.serve.replica.model_manager.VersionLoader", Watched)
            [late] = await endpoint.start()
            await until(lambda: late.manager.get_model("linear").versions == [1, 2])
            assert staged == [(1, False, False), (2, True, True)]

    asyncio.run(body())
