"""More models than fit: a replica, the controller or the registry is lost."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from serving.on_demand_setting import infer_everywhere, loaded, on_demand
from serving.replica_set import ReplicaSet, infer, until
from shoal.registry import Registry
from shoal.serve.replica import cold_models
from shoal.serve.replica.loader import StagedVersion, StagingError


@on_demand()
async def test_a_dead_replica_s_models_are_loaded_by_another(endpoint: ReplicaSet) -> None:
    """Although the controller has not noticed."""
    await infer_everywhere(endpoint, "m0", "m1")
    (holder,) = endpoint.controller.state.placement["m0"]
    (survivor,) = set(endpoint.replicas) - {holder}
    endpoint.dead.add(holder)
    await endpoint.replicas.pop(holder).close()
    for _ in range(3):
        answer = await infer(endpoint.replicas[survivor], "m0")
        assert answer.status == 200, answer.body
    assert "m0" in loaded(endpoint, survivor)


@on_demand(num_replicas=1)
async def test_a_load_that_fails_while_the_controller_is_away_fails_its_requests(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]

    async def load(*_: object) -> StagedVersion:
        await until(lambda: replica.manager.on_demand.get_use("m0").waited)
        endpoint.controller_away = True
        raise StagingError("the file is damaged")

    replica.manager._host.loader.load_version = load  # type: ignore[method-assign]
    asking = asyncio.create_task(infer(replica, "m0"))
    await until(lambda: "m0" in replica.manager._slots and replica.manager._slots["m0"].rejected)
    answer = await asyncio.wait_for(asking, cold_models.LOAD_WAIT_S / 2)
    assert (answer.status, "cannot be loaded" in answer.body["error"]) == (503, True)


@on_demand(num_replicas=5)
async def test_a_request_that_replicas_die_of_is_not_sent_to_a_third(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0")
    (holder,) = endpoint.controller.state.placement["m0"]
    caller = next(name for name in reversed(endpoint.replicas) if name != holder)
    endpoint.deadly = set(endpoint.replicas) - {caller}
    answer = await infer(endpoint.replicas[caller], "m0")
    assert len(endpoint.replicas) >= 3
    assert (answer.status == 503) == (len(endpoint.replicas) == 3)  # or the caller loaded it


@on_demand()
async def test_a_replica_that_does_not_know_the_token_yet_is_not_asked_again(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0")
    (holder,) = endpoint.controller.state.placement["m0"]
    (other,) = set(endpoint.replicas) - {holder}
    manager = endpoint.replicas[holder].manager
    manager._plan = replace(manager._plan, peer_token="of another plan")  # type: ignore[type-var]
    answer = await infer(endpoint.replicas[other], "m0")
    assert answer.status == 200, answer.body


@on_demand()
async def test_while_the_controller_is_away_loaded_models_answer_and_others_say_when_to_come_again(
    endpoint: ReplicaSet,
) -> None:
    await infer_everywhere(endpoint, "m0")
    endpoint.controller_away = True
    await infer_everywhere(endpoint, "m0")
    answer = await infer(endpoint.replicas["r1"], "m1")
    assert (answer.status, answer.headers[b"retry-after"]) == (503, b"1"), answer.body
    endpoint.controller_away = False
    endpoint.restart_controller()
    await infer_everywhere(endpoint, "m0", "m1")
    assert loaded(endpoint) == ["m0", "m1"]
    assert sum(replica.report().models["m0"].residency.loads for replica in endpoint.replicas.values()) == 1  # type: ignore[union-attr]


@on_demand()
async def test_a_controller_that_starts_without_the_registry_serves_what_is_loaded(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0")
    root = Path(Registry().location)
    os.rename(root, root.with_suffix(".away"))
    endpoint.restart_controller()
    endpoint.controller.state.models["m5"].described = None  # a model that it has never read
    endpoint.controller.store.commit()
    generation = endpoint.controller.plan.generation
    await until(lambda: all(each.generation >= generation for each in endpoint.controller.reports.values()))
    late = endpoint.add("late")
    await until(lambda: late.manager.list_models())
    await infer_everywhere(endpoint, "m0")
    answer = await infer(late, "m5")
    assert answer.status == 503, answer.body
    os.rename(root.with_suffix(".away"), root)
    await until(lambda: "m5" in late.manager.on_demand.models)
    await infer_everywhere(endpoint, "m1", "m5")
