"""More models than fit: any replica answers for any of them."""

from __future__ import annotations

import numpy as np

from serving.on_demand_setting import NAMES, NUM_MODELS, damage, infer_everywhere, loaded, on_demand
from serving.replica_set import ReplicaSet, ask, infer, until
from shoal.open_inference import inference_pb2 as pb
from shoal.serve.controller import assignments
from shoal.serve.grpc.service import Invocation
from shoal.serve.messages.inference import InferCall


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


@on_demand()
async def test_a_call_of_grpc_is_forwarded_too(endpoint: ReplicaSet) -> None:
    tensor = pb.ModelInferRequest.InferInputTensor(
        name="x", datatype="FP32", shape=[1, 3], contents=pb.InferTensorContents(fp32_contents=[0.0] * 3)
    )
    request = pb.ModelInferRequest(model_name="m0", id="7", inputs=[tensor]).SerializeToString()
    for replica in endpoint.replicas.values():
        invocation = Invocation({})
        answer = pb.ModelInferResponse.FromString(await replica.servicer.model_infer(request, invocation))
        assert (answer.model_version, answer.id) == ("1", "7")
        assert list(
            np.frombuffer(answer.raw_output_contents[0], np.float32)
            if answer.raw_output_contents
            else answer.outputs[0].contents.fp32_contents
        ) == [1.0, 1.0]
    assert endpoint.num_forwarded > 0


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
