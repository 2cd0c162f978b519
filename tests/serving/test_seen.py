"""What is seen of an endpoint from outside: a scrape, the traces, its keys; whole replicas, no Ray, no socket."""
# Traces are recorded by shoal.libs.tracing.

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from registered import register
from serving.replica_set import ReplicaSet, ask, infer, until
from shoal.serve.messages.auth_failures import AuthFailure
from shoal.serve.protocol.prometheus import CONTENT_TYPE
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.model_source import model_from_ref

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
    async with ReplicaSet(model_from_ref("linear@champion")) as endpoint:
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
    async with ReplicaSet(model_from_ref("linear@champion"), trace=f"file:{tmp_path}/traces?ratio=0") as endpoint:
        [replica] = await endpoint.start()
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
    async with ReplicaSet(model_from_ref("linear@champion"), token="the-token") as endpoint:
        [replica] = await endpoint.start()
        assert (await infer(replica, shoal_from="10.0.0.7")).status == 401
        assert (await ask(replica, "GET", "/no-such-path", headers={"shoal-from": "10.0.0.8"})).status == 401
        assert replica.report().refused == (AuthFailure("", 401, 2, "10.0.0.8"),)


TOKEN, ADA = "t0ken", "key-of-ada"
BURST, NUM_REPLICAS = 8, 2
KEYS = [{"name": "ada", "key": ADA, "models": ["linear"], "requests_per_s": 0.01, "burst": BURST}]


async def test_replicas_know_the_keys_and_share_their_rates() -> None:
    register(aliases=("champion",))
    async with ReplicaSet(model_from_ref("linear@champion"), token=TOKEN, keys=KEYS) as endpoint:
        replicas = await endpoint.start(NUM_REPLICAS)
        await until(lambda: all(len(each._follower.peers) == NUM_REPLICAS - 1 for each in replicas))
        for replica in replicas:
            nobody = await infer(replica)
            assert (nobody.status, nobody.headers[b"www-authenticate"]) == (401, b'Bearer realm="shoal"')
            assert (await infer(replica, "other", authorization=f"Bearer {ADA}")).status == 403
            body = {"action": "rollback", "model": "linear"}
            for key, status in ((ADA, 403), (TOKEN, 409)):  # it was never another version
                headers = {"authorization": f"Bearer {key}"}
                assert (await ask(replica, "POST", "/shoal/v1/rollout", body, headers)).status == status
            answers = [await infer(replica, authorization=f"Bearer {ADA}") for _ in range(BURST)]
            num_taken = BURST // NUM_REPLICAS
            assert [answer.status for answer in answers] == [200] * num_taken + [429] * (BURST - num_taken)
            assert int(answers[-1].headers[b"retry-after"]) > 100
            assert "'ada'" in answers[-1].body["error"]
