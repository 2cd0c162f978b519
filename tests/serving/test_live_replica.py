"""A replica and the run that it follows: what hangs while it is loaded, what is deleted while it is made."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from serving.replica_set import LINEAR, SIGNATURE, ReplicaSet, constant, register, until
from shoal.errors import ShoalError
from shoal.serve.model.predictor import Predictor
from shoal.serve.replica.loader import VersionLoader
from shoal.serve.replica.model_slot import SlotState
from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
from shoal.weights import WeightSnapshot, WeightStore


def test_a_replica_that_hangs_while_it_takes_weights_of_its_run_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    release, load = threading.Event(), Predictor.load

    def hangs(predictor: Predictor, snapshot: WeightSnapshot) -> Any:
        if snapshot.version == 2:
            release.wait(60)
        return load(predictor, snapshot)

    monkeypatch.setattr(Predictor, "load", hangs)

    async def body() -> None:
        store = WeightStore()
        store.publish(constant(1))
        async with ReplicaSet(EndpointModel("live", LiveModel(LINEAR, SIGNATURE, store))) as endpoint:
            [replica] = await endpoint.start()
            monkeypatch.setattr(
                "shoal.serve.replica.model_manager.MAX_STAGING_S", 0.05
            )  # to start may well take longer
            follower = replica.manager.followers["live"]
            await until(lambda: not follower.thread.busy_s)
            replica.check_health()
            store.publish(constant(2))
            await until(lambda: follower.thread.busy_s > 0.05)
            with pytest.raises(ShoalError, match="has been loading for"):
                replica.check_health()
            release.set()
            await until(lambda: endpoint.versions("live") == [2] and not follower.thread.busy_s)
            replica.check_health()
        store.close()

    asyncio.run(body())


def test_a_live_model_that_is_deleted_while_it_is_built_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    build = VersionLoader.build_predictor

    async def slowly(stager: VersionLoader, *args: Any) -> Any:
        await asyncio.to_thread(release.wait, 10)
        return await build(stager, *args)

    async def body() -> None:
        store = WeightStore()
        store.publish(constant(1))
        monkeypatch.setattr(VersionLoader, "build_predictor", slowly)
        register()
        live = EndpointModel("live", LiveModel(LINEAR, SIGNATURE, store))
        async with ReplicaSet(model_from_ref("linear@1"), live) as endpoint:
            replica = endpoint.add()
            starting = asyncio.create_task(replica.start(10.0))
            await until(lambda: "live" in replica.manager._slots)
            await endpoint.administer(action="delete", model="live")
            await starting
            release.set()
            await until(lambda: replica.manager._slots["live"].state is SlotState.COLD)
            assert [model.name for model in replica.manager.list_models()] == ["linear"]
            assert replica.manager.followers == {}
        store.close()

    asyncio.run(body())
