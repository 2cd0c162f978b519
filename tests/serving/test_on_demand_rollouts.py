"""More models than fit: versions, aliases and canaries."""

from __future__ import annotations

import asyncio

import pytest

from serving.on_demand_setting import damage, infer_everywhere, loaded, on_demand
from serving.replica_set import SIGNATURE, ReplicaSet, infer, register, until
from shoal.errors import InferenceError
from shoal.registry import Signature, TensorSignature


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
