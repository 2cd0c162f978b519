"""More models than fit: any replica answers for any of them, by what counts as how much, in every version."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from serving.on_demand_setting import NAMES, NUM_MODELS, damage, infer_everywhere, loaded, on_demand
from serving.replica_set import SIGNATURE, ReplicaSet, ask, infer, register, until
from shoal.errors import ConfigError, InferenceError
from shoal.registry import Registry, Signature, TensorSignature
from shoal.serve.controller import assignments
from shoal.serve.controller.config import build_controller_config
from shoal.serve.messages.inference import InferCall
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import model_from_ref


@on_demand()
async def test_any_replica_answers_for_any_model(endpoint: ReplicaSet) -> None:
    assert loaded(endpoint) == []
    await infer_everywhere(endpoint, *NAMES)
    assert endpoint.num_forwarded >= NUM_MODELS
    await until(lambda: len(loaded(endpoint, "r1")) == len(loaded(endpoint, "r2")) == 2)
    reports = [replica.report() for replica in endpoint.replicas.values()]
    found = [report.models[name].residency for report in reports for name in NAMES if name in report.models]
    assert sum(each.loads for each in found if each) == NUM_MODELS
    assert sum(each.evictions for each in found if each) == NUM_MODELS - 4
    assert sum(each.forwarded for each in found if each) == NUM_MODELS
    assert sum(report.statuses["200"] for report in reports) == 2 * NUM_MODELS  # as clients see them


@on_demand()
async def test_a_model_that_is_not_loaded_is_described_without_a_load(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]
    paths = ["/v2/models/m0", "/v2/models/m0/ready", "/v2/models/m0/config", "/v2/models/m0/stats", "/v2/health/ready"]
    for path in paths:
        answer = await ask(replica, "GET", path)
        assert answer.status == 200, answer.body
    index = (await ask(replica, "POST", "/v2/repository/index", {})).body
    assert {(each["name"], each["state"]) for each in index} == {(name, "READY") for name in NAMES}
    assert len((await ask(replica, "GET", "/v2/models/stats")).body["model_stats"]) == NUM_MODELS
    assert (await infer(replica, "m0", version=2)).status == 404
    assert (await infer(replica, "m9")).status == 404
    assert loaded(endpoint) == []


@on_demand(num_replicas=1)
async def test_a_model_makes_way_for_another_and_says_so(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0", "m1", "m0", "m2")
    assert "m2" in loaded(endpoint)
    assert len(loaded(endpoint)) == 2
    endpoint.controller.report(endpoint.replicas["r1"].report())
    seen = {model["name"]: model for model in endpoint.status.describe_endpoint()["models"]}
    assert all(seen[name]["state"] == "READY" for name in NAMES)
    assert [name for name in NAMES if seen[name]["residency"]["replicas"]] == loaded(endpoint)
    assert sum(seen[name]["residency"]["evictions"] for name in NAMES) == 1
    assert all(seen[name]["residency"]["resident_bytes"] > 0 for name in loaded(endpoint))


@on_demand()
async def test_the_protocol_s_load_loads_a_model_before_it_is_requested(endpoint: ReplicaSet) -> None:
    answer = await ask(endpoint.replicas["r1"], "POST", "/v2/repository/models/m0/load", {})
    assert answer.status == 200, answer.body
    assert loaded(endpoint) == ["m0"]
    damage("m1")
    answer = await ask(endpoint.replicas["r1"], "POST", "/v2/repository/models/m1/load", {})
    assert answer.status == 409
    assert "weights.safetensors" in answer.body["error"]


@on_demand(num_replicas=1)
async def test_a_body_that_arrives_while_its_model_makes_way_is_answered(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]
    await infer_everywhere(endpoint, "m0", "m1")
    early = replica.manager.get_model("m0")
    for name in ("m2", "m3"):
        await infer_everywhere(endpoint, name)
    assert loaded(endpoint) == ["m2", "m3"]
    call = InferCall({"x": np.zeros((1, 3), np.float32)}, 1)
    assert (await early.infer(call)).version == 1


@on_demand(num_replicas=1)
async def test_the_path_between_replicas_takes_their_token(endpoint: ReplicaSet) -> None:
    tensor = {"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [0.0] * 3}
    for token in ({}, {"shoal-peer": "guessed"}):
        answer = await ask(endpoint.replicas["r1"], "POST", "/shoal/v1/peers/m0/infer", {"inputs": [tensor]}, token)
        assert answer.status == 401


@on_demand(fit=3)
async def test_a_hot_model_gets_another_replica_and_a_cold_one_does_not(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0", "m1")
    (holder,) = endpoint.controller.state.placement["m0"]
    report = endpoint.replicas[holder].report().models["m0"]
    rate = 100.0 / report.latency[0][1]  # of which one replica is not capable

    chosen = endpoint.controller.assignments
    await until(lambda: ("m0", holder) in chosen._uses)

    def is_spread() -> bool:
        """Each report has the requests since the last one, which are none: the rate would fall before it is looked at,
        or come before the report that has the latency."""
        chosen._uses["m0", holder].requests_per_s = rate
        chosen._spread_s -= assignments.SPREAD_EVERY_S
        chosen.tick()
        return loaded(endpoint) == ["m0", "m0", "m1"]

    await until(is_spread)


@on_demand()
async def test_a_version_and_a_track_reach_the_replica_that_has_the_model(endpoint: ReplicaSet) -> None:
    register("m0")
    await endpoint.administer(action="deploy", model="m0", version=2)
    await until(lambda: loaded(endpoint) == ["m0"])  # on one replica: nothing is staged on the other
    await infer_everywhere(endpoint, "m0")
    await endpoint.administer(action="canary", model="m0", version=1, percent=0)
    for replica in endpoint.replicas.values():
        assert (await infer(replica, "m0")).version == 2
        assert (await infer(replica, "m0", shoal_track="candidate")).version == 1
        assert (await infer(replica, "m0", version=1)).version == 1
    await endpoint.administer(action="promote", model="m0")
    assert {(await infer(replica, "m0")).version for replica in endpoint.replicas.values()} == {1}


@on_demand()
async def test_an_alias_that_moves_is_followed_by_the_replicas_that_have_the_model(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0")
    for name in ("m0", "m1"):
        register(name, aliases=("champion",))
    for name in ("m0", "m1"):
        await until(lambda name=name: endpoint.controller.state.models[name].rollout.stable == 2)  # type: ignore[misc]
    await infer_everywhere(endpoint, "m0", "m1")
    assert {(await infer(replica, "m1")).version for replica in endpoint.replicas.values()} == {2}


@on_demand(num_replicas=1, fit=1)
async def test_a_version_that_does_not_fit_alongside_the_former_replaces_it(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0")
    register("m0")
    with pytest.raises(InferenceError, match=r"takes .* endpoint\.memory leaves") as caught:
        await endpoint.administer(action="canary", model="m0", version=2, percent=5)
    assert caught.value.status == 409
    await endpoint.administer(action="deploy", model="m0", version=2)
    assert endpoint.replicas["r1"].manager.get_model("m0").version == 2
    assert loaded(endpoint) == ["m0"]
    assert (await infer(endpoint.replicas["r1"], "m0")).version == 2
    other = Signature(inputs=SIGNATURE.inputs, outputs=[TensorSignature(name="other", datatype="FP32", shape=[-1, 2])])
    register("m0", signature=other)
    with pytest.raises(InferenceError, match="deploy it by another name"):
        await endpoint.administer(action="deploy", model="m0", version=3)
    assert (await infer(endpoint.replicas["r1"], "m0")).version == 2


@on_demand(num_replicas=1, fit=3)
async def test_a_version_replaces_one_that_cannot_be_loaded(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]
    damage("m0")
    assert (await infer(replica, "m0")).status == 503
    for _ in range(2):
        register("m0")
    with pytest.raises(InferenceError, match="cannot stage version 1"):
        await endpoint.administer(action="canary", model="m0", version=2, percent=5)
    damage("m0", 3)
    with pytest.raises(InferenceError, match=r"version 3 .*weights\.safetensors") as caught:
        await endpoint.administer(action="deploy", model="m0", version=3)
    assert caught.value.status == 409
    await endpoint.administer(action="deploy", model="m0", version=2)
    assert loaded(endpoint) == ["m0"]  # before its first request
    assert (await infer(replica, "m0")).version == 2


@on_demand(num_replicas=4)
async def test_a_canary_survives_replicas_without_its_model(endpoint: ReplicaSet) -> None:
    register("m0")
    await infer_everywhere(endpoint, "m0")
    await endpoint.administer(action="canary", model="m0", version=2, percent=50)
    (holder,) = endpoint.controller.state.placement["m0"]
    for name in set(endpoint.replicas) - {holder}:
        await endpoint.kill(name)
    await until(lambda: list(endpoint.controller.reports) == [holder])
    assert (endpoint.phase("m0"), endpoint.controller.state.models["m0"].rollout.lost_replicas) == ("canary", 0)


@on_demand(fit=3)
async def test_a_replica_that_takes_over_a_canary_answers_once_it_has_both_versions(endpoint: ReplicaSet) -> None:
    register("m0")
    await infer_everywhere(endpoint, "m0")
    await endpoint.administer(action="canary", model="m0", version=2, percent=50)
    (holder,) = endpoint.controller.state.placement["m0"]
    await endpoint.kill(holder)
    (survivor,) = endpoint.replicas.values()
    answers = await asyncio.gather(infer(survivor, "m0", version=2), infer(survivor, "m0", shoal_track="candidate"))
    assert [(each.status, each.version) for each in answers] == [(200, 2)] * 2


@on_demand(num_replicas=1)
async def test_a_model_measured_to_be_large_fits_again_after_the_controller_has_restarted(endpoint: ReplicaSet) -> None:
    replica, size_bytes = endpoint.replicas["r1"], Registry().get("m0@1").manifest.size_bytes
    replica.manager.on_demand.get_use("m1")
    replica.manager._host.memory.loads["m1"].measured_bytes[1] = int(1.6 * size_bytes)
    endpoint.restart_controller()
    for name in ("m0", "m1", "m0", "m1"):
        await infer_everywhere(endpoint, name)
        assert loaded(endpoint) == [name]  # the two take more than there is


@on_demand(num_replicas=1)
async def test_a_model_measured_to_exceed_all_memory_is_loaded_alone_and_measured_again(endpoint: ReplicaSet) -> None:
    """Something else may have grown while it was loaded."""
    await infer_everywhere(endpoint, "m0", "m1")
    measured_bytes = endpoint.replicas["r1"].manager._host.memory.loads["m0"].measured_bytes
    measured_bytes[1] = 1 << 40
    endpoint.controller.report(endpoint.replicas["r1"].report())
    await until(lambda: len(loaded(endpoint)) == 1)
    await infer_everywhere(endpoint, "m1", "m0")
    assert loaded(endpoint) == ["m0"]
    measured_bytes[1] = 1  # as the next load may say
    endpoint.controller.report(endpoint.replicas["r1"].report())
    await infer_everywhere(endpoint, "m1", "m0")
    assert loaded(endpoint) == ["m0", "m1"]


@on_demand(fit=1)
async def test_replicas_that_measured_a_model_differently_take_the_least(endpoint: ReplicaSet) -> None:
    assignments, size_bytes = endpoint.controller.assignments, Registry().get("m0@1").manifest.size_bytes
    for replica, measured_bytes in zip(endpoint.replicas.values(), (1 << 40, size_bytes + 1), strict=True):
        replica.manager.on_demand.get_use("m0")
        replica.manager._host.memory.loads["m0"].measured_bytes[1] = measured_bytes
        endpoint.controller.report(replica.report())
    endpoint.controller.store.commit()
    assignments._memory_bytes = 2 * size_bytes
    assert assignments._version_bytes("m0", endpoint.controller.state.models["m0"]) == size_bytes + 1


@on_demand(num_replicas=1, models={"m0": {"pin": True}})
async def test_a_pinned_model_counts_with_its_payload(endpoint: ReplicaSet) -> None:
    """As at the start, which then accepted any one of the others."""
    endpoint.replicas["r1"].manager.on_demand.get_use("m0")
    endpoint.replicas["r1"].manager._host.memory.loads["m0"].measured_bytes[1] = 1 << 40
    endpoint.controller.report(endpoint.replicas["r1"].report())
    await infer_everywhere(endpoint, "m0", "m1")


@on_demand(num_replicas=1, fit=1)
async def test_a_small_version_fits_after_a_large_one_of_its_name(endpoint: ReplicaSet) -> None:
    replica, name = endpoint.replicas["r1"], "m0"
    await infer_everywhere(endpoint, name)
    replica.manager._host.memory.loads[name].measured_bytes[1] = 1 << 40
    await endpoint.administer(action="delete", model=name)
    register(name)
    await endpoint.administer(action="deploy", model=name, version=2)
    assert (await infer(replica, name)).version == 2


@on_demand(models={"m0": {"pin": True}})
async def test_a_pinned_model_is_on_every_replica_and_stays(endpoint: ReplicaSet) -> None:
    assert loaded(endpoint) == ["m0", "m0"]
    await infer_everywhere(endpoint, *NAMES)
    assert loaded(endpoint).count("m0") == 2
    await until(lambda: len(loaded(endpoint)) == 4)


@on_demand(num_replicas=1, fit=3)
async def test_a_model_that_is_pinned_later_counts_once(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0", "m1")
    await endpoint.administer(action="set", model="m0", options={"pin": True})
    await until(lambda: list(endpoint.controller.state.placement) == ["m1"])
    (memory,) = endpoint.controller.assignments._build_memory(set()).values()
    size_bytes = Registry().get("m0@1").manifest.size_bytes
    assert memory.free_bytes == endpoint.controller.assignments._memory_bytes - 2 * size_bytes  # type: ignore[operator]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"memory": 10}, r"endpoint\.memory = '10 B'.*'m0' takes"),
        ({"memory": 10, "model": {"pin": True}}, r"endpoint\.memory = '10 B'.*less than the pinned models take"),
    ],
)
def test_a_memory_that_is_too_small_is_refused_at_once(fields: dict[str, Any], reason: str) -> None:
    register("m0")
    with pytest.raises(ConfigError, match=reason):
        build_controller_config(EndpointSpec.parse({"name": "e", **fields}), [model_from_ref("m0")])
