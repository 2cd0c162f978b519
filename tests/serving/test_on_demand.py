"""More models than fit: any replica answers for any of them, and a lost replica, controller or registry spares others.

Over real replicas and a real controller, without Ray.
"""

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refusals import refused
from registered import SIGNATURE, register, tensors
from serving import faulty_models
from serving.replica_set import Asked, ReplicaSet, ask, infer, until
from shoal.errors import ConfigError, InferenceError
from shoal.registry import Registry, Signature
from shoal.serve.controller import assignments
from shoal.serve.controller.config import build_controller_config
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.replica import cold_models
from shoal.serve.replica.loader import StagedVersion, StagingError
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.scaling import decode
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import model_from_ref

NUM_MODELS = 6
NAMES = [f"m{number}" for number in range(NUM_MODELS)]


def on_demand(
    num_replicas: int = 2, fit: int = 2, prepare: Callable[[Path], object] = lambda folder: None, **spec: Any
) -> Callable[..., Callable[[Path], Awaitable[None]]]:
    """A test body that gets a running endpoint of six models, of which `fit` fit each replica.

    prepare: is called before, with the test's folder; its models are served, too
    """

    def decorate(body: Callable[..., Awaitable[None]]) -> Callable[[Path], Awaitable[None]]:
        async def test(tmp_path: Path) -> None:
            size_bytes = max(register(name, aliases=("champion",)).manifest.size_bytes for name in NAMES)
            prepare(tmp_path)
            refs = [f"{name}@champion" for name in sorted({each.name for each in Registry().list()})]
            models = [model_from_ref(ref) for ref in refs]
            async with ReplicaSet(*models, memory=fit * size_bytes, **spec) as endpoint:
                await endpoint.start(num_replicas)
                states = endpoint.controller.state.models
                await until(lambda: all(each.rollout.is_open for each in states.values()))
                await (body(endpoint, tmp_path) if len(signature(body).parameters) == 2 else body(endpoint))

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


def damage(name: str, version: int = 1) -> Path:
    """Move a version's weights away, to the returned path."""
    path = Registry().get(f"{name}@{version}").weight_file().path
    return path.rename(path.with_suffix(".away"))


def loaded(endpoint: ReplicaSet, *replicas: str) -> list[str]:
    """The models that these replicas have, of all replicas without a name."""
    names = replicas or tuple(endpoint.replicas)
    return sorted(model.name for name in names for model in endpoint.replicas[name].manager.list_loaded())


async def infer_everywhere(endpoint: ReplicaSet, *names: str) -> None:
    for name in names:
        for replica in endpoint.replicas.values():
            answer = await infer(replica, name)
            assert answer.status == 200, answer.body


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
    for token in ({}, {"shoal_peer": "guessed"}):
        answer = await ask(endpoint.replicas["r1"], "POST", "/shoal/v1/peers/m0/infer", {"inputs": [tensor]}, **token)
        assert answer.status == 401


@on_demand()
async def test_a_version_and_a_track_reach_the_replica_that_has_the_model(endpoint: ReplicaSet) -> None:
    register("m0")
    await endpoint.administer("deploy", "m0", version=2)
    await until(lambda: loaded(endpoint) == ["m0"])  # on one replica: nothing is staged on the other
    await infer_everywhere(endpoint, "m0")
    await endpoint.administer("canary", "m0", version=1, percent=0)
    for replica in endpoint.replicas.values():
        assert (await infer(replica, "m0")).version == 2
        assert (await infer(replica, "m0", shoal_track="candidate")).version == 1
        assert (await infer(replica, "m0", version=1)).version == 1
    await endpoint.administer("promote", "m0")
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
    with refused(409, r"takes .* endpoint\.memory leaves"):
        await endpoint.administer("canary", "m0", version=2, percent=5)
    await endpoint.administer("deploy", "m0", version=2)
    assert endpoint.replicas["r1"].manager.get_model("m0").version == 2
    assert loaded(endpoint) == ["m0"]
    assert (await infer(endpoint.replicas["r1"], "m0")).version == 2
    other = Signature(inputs=SIGNATURE.inputs, outputs=tensors(other=[-1, 2]))
    register("m0", signature=other)
    with pytest.raises(InferenceError, match="deploy it by another name"):
        await endpoint.administer("deploy", "m0", version=3)
    assert (await infer(endpoint.replicas["r1"], "m0")).version == 2


@on_demand(num_replicas=1, fit=3)
async def test_a_version_replaces_one_that_cannot_be_loaded(endpoint: ReplicaSet) -> None:
    replica = endpoint.replicas["r1"]
    damage("m0")
    assert (await infer(replica, "m0")).status == 503
    for _ in range(2):
        register("m0")
    with pytest.raises(InferenceError, match="cannot stage version 1"):
        await endpoint.administer("canary", "m0", version=2, percent=5)
    damage("m0", 3)
    with refused(409, r"version 3 .*weights\.safetensors"):
        await endpoint.administer("deploy", "m0", version=3)
    await endpoint.administer("deploy", "m0", version=2)
    assert loaded(endpoint) == ["m0"]  # before its first request
    assert (await infer(replica, "m0")).version == 2


@on_demand(num_replicas=4)
async def test_a_canary_survives_replicas_without_its_model(endpoint: ReplicaSet) -> None:
    register("m0")
    await infer_everywhere(endpoint, "m0")
    await endpoint.administer("canary", "m0", version=2, percent=50)
    (holder,) = endpoint.controller.state.placement["m0"]
    for name in set(endpoint.replicas) - {holder}:
        await endpoint.kill(name)
    await until(lambda: list(endpoint.controller.reports) == [holder])
    assert (endpoint.phase("m0"), endpoint.controller.state.models["m0"].rollout.lost_replicas) == ("canary", 0)


@on_demand(fit=3)
async def test_a_replica_that_takes_over_a_canary_answers_once_it_has_both_versions(endpoint: ReplicaSet) -> None:
    register("m0")
    await infer_everywhere(endpoint, "m0")
    await endpoint.administer("canary", "m0", version=2, percent=50)
    (holder,) = endpoint.controller.state.placement["m0"]
    await endpoint.kill(holder)
    (survivor,) = endpoint.replicas.values()
    answers = await asyncio.gather(infer(survivor, "m0", version=2), infer(survivor, "m0", shoal_track="candidate"))
    assert [(each.status, each.version) for each in answers] == [(200, 2)] * 2


@on_demand(models={"m0": {"pin": True}})
async def test_a_pinned_model_is_on_every_replica_and_stays(endpoint: ReplicaSet) -> None:
    assert loaded(endpoint) == ["m0", "m0"]
    await infer_everywhere(endpoint, *NAMES)
    assert loaded(endpoint).count("m0") == 2
    await until(lambda: len(loaded(endpoint)) == 4)


@on_demand(num_replicas=1, fit=3)
async def test_a_model_that_is_pinned_later_counts_once(endpoint: ReplicaSet) -> None:
    await infer_everywhere(endpoint, "m0", "m1")
    await endpoint.administer("set", "m0", options={"pin": True})
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


# -- faults


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
        await until(lambda: replica.manager.on_demand.get_use("m0").residency.waited)
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
    return asyncio.create_task(ask(replica, "POST", f"/v2/models/{name}/infer", {"inputs": [tensor]}, **headers))


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
    await until(lambda: replica.manager.on_demand.get_use("slow").residency.waiting == 2)
    assert decode(replica.measure_load()).waiting == 2
    assert (await ask_gated(replica)).status == 503  # full
    await infer_everywhere(endpoint, "m0")  # another model loads meanwhile
    late = ask_gated(replica, "slow2", shoal_deadline_ms="1")
    assert (await late).status == 504
    first.append(ask_gated(replica, "slow2"))
    await until(lambda: replica.manager.on_demand.get_use("slow2").residency.waiting)
    assert "8 bytes wait" in (await ask_gated(replica, "slow2")).body["error"]
    for name in ("slow", "slow2"):
        os.remove(folder / name)
    assert [(await each).status for each in first] == [200, 200, 200]
    loads = replica.report().models["slow"].residency
    assert loads is not None
    assert loads.loads == 1
