"""Whole replicas in one process: spec, models, batcher, plan and application together; no Ray, no socket."""

import asyncio
import gc
import json
import math
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from registered import LINEAR, SIGNATURE, constant, register
from serving.replica_set import ReplicaSet, ask, infer, serving_one, until
from serving.test_replica_rollout import everywhere, rollout
from shoal.errors import InferenceError, ShoalError
from shoal.flows.serving_spec import ServingSpec, check
from shoal.open_inference.episodes import EpisodeRequest
from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.model import device, predictor
from shoal.serve.model.formats.template import Arrays, Forward, Template
from shoal.serve.protocol.prometheus import CONTENT_TYPE
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.replica.served_model import ServedModel
from shoal.serve.spec.model_options import GuardOptions
from shoal.serve.spec.model_source import EndpointModel, LiveModel, RegisteredModel, model_from_ref
from shoal.weights import WeightSnapshot, WeightStore


async def test_a_replica_follows_weights_while_it_answers() -> None:
    store = WeightStore()
    async with serving_one(EndpointModel("linear", LiveModel(LINEAR, SIGNATURE, store))) as (endpoint, replica):
        assert (await infer(replica)).status == 503
        assert replica.report().models["linear"].latency == ()
        with pytest.raises(InferenceError, match="learn_from_endpoint"):
            await replica.manager.take_episode(EpisodeRequest("linear"))
        for version in (1, 2, 5):
            store.publish(constant(version))
            await until(lambda expected=version: endpoint.versions() == [expected])
            if version == 1:  # known before the first request
                latency = replica.report().models["linear"].latency
                assert [rows for rows, seconds in latency if 0.0 < seconds < 10.0] == [1, 2, 4, 8, 16, 32, 64]
            for answer in await asyncio.gather(*[infer(replica, rows=rows) for rows in (1, 3, 2)]):
                assert (answer.status, answer.version) == (200, version)
        stats = replica.stats()
        assert (stats["version"], stats["requests"], stats["statuses"]) == (5, 10, {"200": 9, "503": 1})
        counts = stats["models"]["linear"]["batcher"]
        assert (counts["answered"], counts["failed"], counts["rows"]) == (9, 0, 18)
        replica.check_health()
        await replica.close()
        await replica.close()
        with pytest.raises(ShoalError, match="died"):
            replica.check_health()
        assert (await infer(replica)).status == 503
        store.close()


async def test_a_name_as_hugging_face_has_them_holds_everywhere() -> None:
    name = "Qwen2.5-0.5B_Instruct"
    register(name, aliases=("champion",))
    spec = ServingSpec(models=[f"{name}@champion"]).override([f"endpoint.models.{name}.deadline_s=50"])
    check(spec)
    async with serving_one(*map(model_from_ref, spec.models), models=spec.endpoint.models) as (endpoint, replica):
        model = replica.manager.get_model(name)
        assert model.options.deadline_s == 50
        assert (await infer(replica, name)).version == 1
        assert (await infer(replica, name, version=1)).version == 1
        assert (await ask(replica, "GET", f"/v2/models/{name}")).body["name"] == name
        wrong = await ask(replica, "GET", f"/v2/models/{name.lower()}")
        assert wrong.status == 404
        assert name in wrong.body["error"]
        register(name)
        await endpoint.administer("canary", name, version=2, percent=50)
        assert (await infer(replica, name, shoal_track="candidate")).version == 2


class SmallDevice:
    """A template whose device has room for weights of `max_bytes`, and for forwards of `max_rows`."""

    max_bytes, max_rows = 1 << 20, 2

    def __init__(self, template: Template) -> None:
        self._template = template

    def load(self, snapshot: WeightSnapshot) -> Forward:
        forward = self._template.load(snapshot)
        self._reserve(len(snapshot.payload), self.max_bytes)

        def compute(inputs: Arrays) -> Arrays:
            self._reserve(len(inputs["x"]), self.max_rows)
            return forward(inputs)

        return compute

    def _reserve(self, size: int, limit: int) -> None:
        if size > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")


@pytest.fixture
def small_device(monkeypatch: pytest.MonkeyPatch) -> None:
    original = predictor.open_template
    monkeypatch.setattr(predictor, "open_template", lambda setting: SmallDevice(original(setting)))


@pytest.mark.usefixtures("small_device")
async def test_a_batch_beyond_the_devices_memory_is_halved_and_a_request_beyond_it_has_an_error() -> None:
    register()
    async with serving_one("linear@1", model={"warm_up": False}) as (_, replica):
        answers = await asyncio.gather(*[infer(replica, rows=rows) for rows in (1, 2, 1, 3, 2, 1)])
        assert [each.status for each in answers] == [200, 200, 200, 500, 200, 200]
        assert "the GPU's memory is too small for 3 rows (20.00 MiB more). Reserve" in answers[3].body["error"]
        replica.check_health()


@pytest.mark.usefixtures("small_device")
async def test_a_version_beyond_the_devices_memory_is_rejected_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    async with ReplicaSet("linear@1", model={"warm_up": False}) as endpoint:
        await endpoint.start()
        monkeypatch.setattr(SmallDevice, "max_bytes", 8)
        said = r"'linear' cannot be .* too small for version 1, whose weights are \d+ B"
        with pytest.raises(ShoalError, match=said):
            await endpoint.start()


async def test_a_replica_with_a_part_of_a_device_has_that_part_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    monkeypatch.setattr("shoal.serve.replica.replica.limit_device_memory", shares.append)
    register()
    for num_gpus in (0.25, None):
        async with ReplicaSet("linear@1", num_gpus=num_gpus) as endpoint:
            endpoint.add()
    assert shares == [0.25, 0.0]


@pytest.mark.parametrize("is_lost", [False, True])
def test_a_replica_whose_gpu_fails_for_good_is_replaced(is_lost: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an assertion in a kernel every call of CUDA fails; after other errors of CUDA none does."""
    register()

    def fail(*_: object) -> None:
        raise torch.AcceleratorError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "synchronize", fail if is_lost else lambda: None)

    async def body() -> None:
        async with serving_one("linear@1") as (_, replica):
            monkeypatch.setattr(replica.manager.get_model("linear").router.loaded[1], "_forward", fail)
            answers = await asyncio.gather(*[infer(replica) for _ in range(3)])
            assert [each.status for each in answers] == [503 if is_lost else 500] * 3
            if not is_lost:
                replica.check_health()
                return
            with pytest.raises(ShoalError, match="the GPU fails"):
                replica.check_health()

    try:
        asyncio.run(body())
    finally:
        device.device_lost.clear()


def weights_of(endpoint: ReplicaSet, version: int) -> weakref.ref[Any]:
    """Those of a version that the only replica has loaded."""
    [replica] = endpoint.replicas.values()
    loaded = replica.manager.get_model("linear").router.choose_track(version, "", "").loaded
    assert loaded is not None
    return weakref.ref(loaded)


def are_gone(*held: weakref.ref[Any]) -> bool:
    gc.collect()
    return all(each() is None for each in held)


async def test_versions_that_are_left_are_forgotten_and_so_is_a_model_that_is_deleted() -> None:
    for _ in range(3):
        register(aliases=["champion"])
    async with serving_one("linear@1") as (endpoint, replica):
        await endpoint.administer("canary", version=2, percent=10)
        tried = weights_of(endpoint, 2)
        await endpoint.administer("rollback")
        await until(lambda: are_gone(tried), "a candidate that went")
        await endpoint.administer("canary", version=2, percent=10)
        first, second = weights_of(endpoint, 1), weights_of(endpoint, 2)
        await endpoint.administer("promote")
        await until(lambda: are_gone(first), "what was stable before")
        await endpoint.administer("deploy", version=3)
        await until(lambda: are_gone(second), "a candidate that was promoted")
        assert (await infer(replica)).version == 3
        third, hosted = weights_of(endpoint, 3), weakref.ref(replica.manager.get_model("linear"))
        await endpoint.administer("delete")
        await until(lambda: are_gone(third, hosted), "a model that was deleted")


@rollout(1)
async def test_a_replica_that_missed_a_deletion_serves_a_model_as_it_was_deployed_anew(endpoint: ReplicaSet) -> None:
    register("other")
    await endpoint.administer("deploy", "other")
    cut_off = endpoint.replicas["r3"]
    endpoint.dead.add("r3")  # for longer than its lease, and back when all is done
    endpoint.controller._last_seen_s["r3"] = -math.inf
    cut_off._follower._apply = lambda plan: None  # also for what it has asked before
    await until(lambda: list(endpoint.controller.reports) == ["r1", "r2"])
    await endpoint.administer("delete", "other")
    await endpoint.administer("deploy", "other", options={"max_batch_size": 2})
    cut_off._follower._apply, cut_off._follower._known_generation = cut_off.manager.apply, -1
    endpoint.dead.discard("r3")
    await until(lambda: cut_off.manager._plan == endpoint.controller.plan and cut_off.manager.is_staged)
    assert [(await infer(each, "other", rows=3)).status for each in endpoint.replicas.values()] == [422] * 3
    assert await everywhere(endpoint) == {1: 120}


@rollout(1, replicas=2)
async def test_what_still_answers_of_a_model_that_was_deleted_is_not_taken_for_the_next_of_its_name(
    endpoint: ReplicaSet,
) -> None:
    register("other")
    await endpoint.administer("deploy", "other")
    release, load = threading.Event(), RegisteredModel.load_package
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedModel, "is_idle", property(lambda hosted: release.is_set()))
        with pytest.raises(InferenceError, match="still answering"):
            await endpoint.administer("delete", "other", timeout_s=0.2)
        patch.setattr(
            RegisteredModel, "load_package", lambda source, version: release.wait(60) and load(source, version)
        )
        deploying = asyncio.create_task(endpoint.administer("deploy", "other", timeout_s=0.5))
        with pytest.raises(InferenceError, match="was not ready after"):  # since no replica has it
            await deploying
        release.set()
    await endpoint.administer("deploy", "other", options={"max_batch_size": 2})
    assert [(await infer(each, "other", rows=3)).status for each in endpoint.replicas.values()] == [422] * 2


@rollout(1, replicas=1, guard=GuardOptions(max_latency_ratio=5.0), max_batch_size=8)
async def test_options_of_one_model_leave_what_they_do_not_name_as_the_endpoint_has_it(endpoint: ReplicaSet) -> None:
    register("other")
    await endpoint.administer("deploy", "other", options={"guard": {"min_requests": 10}})
    options = endpoint.replicas["r1"].manager.get_model("other").options
    assert (options.guard.min_requests, options.guard.max_latency_ratio, options.max_batch_size) == (10, 5.0, 8)


# -- what is seen of an endpoint from outside: a scrape, the traces, its keys; whole replicas, no Ray, no socket

# Traces are recorded by shoal.libs.tracing.


CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def scrape(replica: EndpointReplica) -> dict[str, dict[str, float]]:
    """name -> replica -> value, added up over the other labels."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b""}

    async def send(message: Any) -> None:
        sent.append(message)

    await replica.app({"type": "http", "method": "GET", "path": "/metrics", "headers": []}, receive, send)
    assert sent[0]["status"] == 200
    assert (b"content-type", CONTENT_TYPE) in sent[0]["headers"]
    values: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(sent[1]["body"].decode()):
        for sample in family.samples:
            of = values.setdefault(sample.name, {})
            of[sample.labels["replica"]] = of.get(sample.labels["replica"], 0.0) + sample.value
    return values


async def test_a_scrape_of_any_replica_sees_all_of_them() -> None:
    register(aliases=("champion",))
    async with ReplicaSet("linear@champion") as endpoint:
        first, second = await endpoint.start(2)
        for replica, rows in ((first, 1), (second, 2), (second, 3)):
            await infer(replica, rows=rows)
        await infer(first, "no-such-model")

        async def sees_both(replica: EndpointReplica) -> bool:
            return (await scrape(replica))["nv_inference_count_total"] == {"r1": 1, "r2": 5}

        for replica in (first, second):
            async with asyncio.timeout(60.0):
                while not await sees_both(replica):
                    await asyncio.sleep(0.01)
        seen = await scrape(first)
        assert seen["nv_inference_request_success_total"] == {"r1": 1, "r2": 2}
        assert seen["shoal_batch_rows_sum"] == {"r1": 1, "r2": 5}
        assert seen["shoal_serving_version"] == {"r1": 1, "r2": 1}
        assert seen["shoal_replica_ready"] == {"r1": 1, "r2": 1}
        assert seen["shoal_http_answers_total"]["r1"] > 2  # the scrapes too


async def test_a_traced_request_is_followed_from_the_ingress_to_the_forward(tmp_path: Path) -> None:
    register(aliases=("champion",))
    async with serving_one("linear@champion", trace=f"file:{tmp_path}/traces?ratio=0") as (_, replica):
        await infer(replica, rows=2, traceparent=CALLER)
        await infer(replica)
        await infer(replica, "no-such-model", traceparent=CALLER)
        await replica.close()
    [file] = (tmp_path / "traces").iterdir()
    spans = [json.loads(line) for line in file.read_text().splitlines()]
    requests = {
        span["attributes"]["http.response.status_code"]: span
        for span in spans
        if span["parent_id"] == "0xb7ad6b7169203331"
    }
    assert set(requests) == {200, 404}
    assert requests[200]["attributes"]["shoal.version"] == 1
    answered = requests[200]["context"]["span_id"]
    assert {span["name"] for span in spans if span["parent_id"] == answered} == {"queue", "compute"}
    [batch] = [span for span in spans if span["name"] == "batch"]
    assert [link["context"]["span_id"] for link in batch["links"]] == [answered]
    assert [span["parent_id"] for span in spans if span["name"] == "forward"] == [batch["context"]["span_id"]]
    inside = [span for span in spans if span["parent_id"] == answered]
    assert all(requests[200]["start_time"] <= span["start_time"] <= span["end_time"] for span in inside)


async def test_a_replica_reports_whom_it_refused() -> None:
    register(aliases=("champion",))
    async with serving_one("linear@champion", token="the-token") as (_, replica):
        assert (await infer(replica, shoal_from="10.0.0.7")).status == 401
        assert (await ask(replica, "GET", "/no-such-path", shoal_from="10.0.0.8")).status == 401
        assert replica.report().refused == (AuthFailure("", 401, 2, "10.0.0.8"),)


TOKEN, ADA = "t0ken", "key-of-ada"
BURST, NUM_REPLICAS = 8, 2
KEYS = [{"name": "ada", "key": ADA, "models": ["linear"], "requests_per_s": 0.01, "burst": BURST}]


async def test_replicas_know_the_keys_and_share_their_rates() -> None:
    register(aliases=("champion",))
    async with ReplicaSet("linear@champion", token=TOKEN, keys=KEYS) as endpoint:
        replicas = await endpoint.start(NUM_REPLICAS)
        await until(lambda: all(len(each._follower.peers) == NUM_REPLICAS - 1 for each in replicas))
        for replica in replicas:
            answers = [await infer(replica, authorization=f"Bearer {ADA}") for _ in range(BURST)]
            num_taken = BURST // NUM_REPLICAS
            assert [answer.status for answer in answers] == [200] * num_taken + [429] * (BURST - num_taken)
            assert int(answers[-1].headers[b"retry-after"]) > 100
            assert "'ada'" in answers[-1].body["error"]
