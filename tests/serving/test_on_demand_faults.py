"""More models than fit: a replica, controller or registry that is lost, and a flood of one model, spare the others."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path

from serving import faulty_models
from serving.on_demand_setting import damage, infer_everywhere, loaded, on_demand
from serving.replica_set import Asked, ReplicaSet, ask, infer, until
from shoal.registry import Registry
from shoal.serve.controller import assignments
from shoal.serve.replica import cold_models
from shoal.serve.replica.loader import StagedVersion, StagingError
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.scaling.replica_counts import decode


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


def register_gated(folder: Path) -> None:
    """Two models whose load waits until the file is gone."""
    for name in ("slow", "slow2"):
        (folder / name).touch()
        made = faulty_models.factory(start=str(folder / name))
        Registry().register(name, faulty_models.weights(1), model=made, signature=faulty_models.SIGNATURE)


def ask_gated(replica: EndpointReplica, name: str = "slow", **headers: str) -> asyncio.Task[Asked]:
    tensor = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.0, 0.0]}
    named = {header.replace("_", "-"): value for header, value in headers.items()}
    return asyncio.create_task(ask(replica, "POST", f"/v2/models/{name}/infer", {"inputs": [tensor]}, named))


@on_demand(prepare=register_gated, models={"slow": {"max_queue_size": 4, "max_batch_size": 2}})
async def test_a_flood_of_a_model_that_is_not_loaded_leaves_the_others_alone(
    endpoint: ReplicaSet, folder: Path
) -> None:
    """At every replica, while its load hangs."""
    flood = [ask_gated(replica) for _ in range(40) for replica in endpoint.replicas.values()]
    await until(lambda: any(each.done() for each in flood))
    await infer_everywhere(endpoint, "m0", "m1", "m0", "m2")
    os.remove(folder / "slow")
    answers = [await each for each in flood]
    assert {each.status for each in answers} == {200, 503}
    assert sum(each.status == 200 for each in answers) >= 4
    assert all(b"retry-after" in each.headers for each in answers if each.status == 503)
    reports = [replica.report().models["slow"].residency for replica in endpoint.replicas.values()]
    assert sum(each.loads for each in reports if each) == 1


def register_faulty(folder: Path) -> None:
    Registry().register(
        "faulty", faulty_models.weights(1), model=faulty_models.factory(), signature=faulty_models.SIGNATURE
    )


@on_demand(num_replicas=1)
async def test_a_model_that_cannot_be_loaded_drops_no_other_for_a_while(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0", "m1")
    away = damage("m2")
    for _ in range(3):
        answer = await infer(endpoint.replicas["r1"], "m2")
        assert answer.status == 503, answer.body
        assert "weights.safetensors" not in answer.body["error"]
        assert int(answer.headers[b"retry-after"]) >= 1
    await until(lambda: "weights.safetensors" in endpoint.status.describe_model("m2")["reason"])
    await infer_everywhere(endpoint, "m0")
    found = [model.residency for model in endpoint.replicas["r1"].report().models.values()]
    assert sum(each.evictions for each in found if each is not None) <= 2
    assert endpoint.controller.assignments._failed["m2"].retry_s == assignments.RETRY_LOAD_S  # one try
    away.rename(away.with_suffix(".safetensors"))
    endpoint.controller.assignments._failed["m2"].until_s = 0.0  # the while is over
    await infer_everywhere(endpoint, "m2")


@on_demand(
    num_replicas=1,
    prepare=register_gated,
    models={"slow": {"max_queue_size": 2, "max_batch_size": 2}, "slow2": {"max_queue_bytes": 8}},
)
async def test_requests_wait_for_a_load_within_bounds(endpoint: ReplicaSet, folder: Path) -> None:
    replica = endpoint.replicas["r1"]
    first = [ask_gated(replica), ask_gated(replica)]
    await until(lambda: replica.manager.on_demand.get_use("slow").waiting == 2)
    assert decode(replica.measure_load()).waiting == 2
    assert (await ask_gated(replica)).status == 503  # full
    await infer_everywhere(endpoint, "m0")  # another model loads meanwhile
    late = ask_gated(replica, "slow2", shoal_deadline_ms="1")
    assert (await late).status == 504
    first.append(ask_gated(replica, "slow2"))
    await until(lambda: replica.manager.on_demand.get_use("slow2").waiting)
    assert "8 bytes wait" in (await ask_gated(replica, "slow2")).body["error"]
    for name in ("slow", "slow2"):
        os.remove(folder / name)
    assert [(await each).status for each in first] == [200, 200, 200]
    loads = replica.report().models["slow"].residency
    assert loads is not None
    assert loads.loads == 1


@on_demand(num_replicas=1, prepare=register_faulty, models={"m0": {"max_queue_size": 8, "max_batch_size": 8}})
async def test_a_flood_of_one_model_and_errors_of_another_leave_the_others_alone(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]
    await infer_everywhere(endpoint, "m1")
    faults = (faulty_models.RAISE, faulty_models.NAN)
    tensors = [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [fault, 0.0]} for fault in faults]
    path = "/v2/models/faulty/infer"
    flood = [infer(replica, "m0") for _ in range(100)]
    poison = [ask(replica, "POST", path, {"inputs": [tensor]}) for tensor in tensors * 10]
    fine = [infer(replica, "m1") for _ in range(20)]
    answers = await asyncio.gather(*flood, *poison, *fine)
    assert {each.status for each in answers[:100]} <= {200, 429, 503}
    assert {each.status for each in answers[100:120]} == {500}
    assert {each.status for each in answers[120:]} == {200}


@on_demand(num_replicas=1, fit=1)
async def test_two_models_for_one_capacity_take_turns(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]
    answers = await asyncio.gather(*[infer(replica, name) for name in ("m0", "m1") * 5])
    assert [each.status for each in answers] == [200] * 10
    loads = [replica.report().models[name].residency.loads for name in ("m0", "m1")]  # type: ignore[union-attr]
    assert sum(loads) <= 4  # not one for each request
