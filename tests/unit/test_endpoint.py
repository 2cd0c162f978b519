"""A whole replica in one process: spec, predictor, batcher, follower and application together; no Ray, no socket."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal.errors import ConfigError, ShoalError
from shoal.registry.manifest import ModelFactory, Signature, TensorSignature
from shoal.serve.endpoint import EndpointSpec
from shoal.serve.replica import EndpointReplica
from shoal.weights import WeightSnapshot, WeightStore

DEADLINE_S = 5.0
LINEAR = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 3, "out_features": 2})
SIGNATURE = Signature(
    inputs=[TensorSignature(name="x", datatype="FP32", shape=[-1, 3])],
    outputs=[TensorSignature(name="y", datatype="FP32", shape=[-1, 2])],
)


def spec(**values: Any) -> EndpointSpec:
    return EndpointSpec.parse({"name": "linear", **values})


def nested(field: str, value: object) -> dict[str, Any]:
    """`a.b` and a value as {"a": {"b": value}}."""
    parent, _, leaf = field.rpartition(".")
    return {parent: {leaf: value}} if parent else {field: value}


def constant(version: int) -> WeightSnapshot:
    """Every output is the version."""
    return WeightSnapshot.of(version, {"weight": np.zeros((2, 3), np.float32), "bias": np.full(2, version, np.float32)})


async def infer(replica: EndpointReplica, num_rows: int = 1) -> tuple[int, Any]:
    tensor = {"name": "x", "shape": [num_rows, 3], "datatype": "FP32", "data": [0.0] * 3 * num_rows}
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": json.dumps({"inputs": [tensor]}).encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    path = "/v2/models/linear/infer"
    await replica.app({"type": "http", "method": "POST", "path": path, "headers": []}, receive, send)
    return sent[0]["status"], json.loads(sent[1]["body"])


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.001)


def test_a_replica_follows_weights_while_it_answers() -> None:
    async def body() -> None:
        store = WeightStore()
        replica = EndpointReplica(spec(), LINEAR, SIGNATURE, store)
        assert (await infer(replica))[0] == 503
        for version in (1, 2, 5):
            store.publish(constant(version))
            await until(lambda expected=version: replica.version == expected)
            for status, answer in await asyncio.gather(*[infer(replica, rows) for rows in (1, 3, 2)]):
                assert (status, answer["model_version"]) == (200, str(version))
                assert set(answer["outputs"][0]["data"]) == {float(version)}
        stats = replica.stats()
        assert (stats["version"], stats["requests"], stats["statuses"]) == (5, 10, {"200": 9, "503": 1})
        assert (stats["batcher"]["answered"], stats["batcher"]["failed"], stats["batcher"]["rows"]) == (9, 1, 18)
        replica.check_health()
        replica.close()
        replica.close()
        with pytest.raises(ShoalError, match="died"):
            replica.check_health()
        assert (await infer(replica))[0] == 503

    asyncio.run(body())


def test_more_rows_than_a_batch_holds_are_422() -> None:
    async def body() -> None:
        store = WeightStore()
        replica = EndpointReplica(spec(model={"max_batch_size": 2}), LINEAR, SIGNATURE, store)
        status, answer = await infer(replica, 3)
        assert (status, answer) == (422, {"error": "a request holds 1 to 2 rows, this one has 3"})
        store.close()  # wakes the follower
        replica.close()

    asyncio.run(body())


@pytest.mark.parametrize(
    ("field", "value", "word"),
    [
        ("host", "0.0.0.0", "encryption"),
        ("host", "example.org", "encryption"),
        ("name", "a/b", "pattern"),
        ("token", "", "token"),
        ("token", "two words", "blanks"),
        ("token", "**********", "masked"),
        ("port", 70000, "65535"),
        ("model.max_batch_size", 0, "1"),
        ("max_replicas", 0, "1"),
        ("retries", 3, "no such field"),
    ],
)
def test_a_spec_that_cannot_work_is_refused(field: str, value: object, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        spec(**nested(field, value))
    assert caught.value.field == field


def test_a_queue_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_queue_size = 8 is below max_batch_size = 16"):
        spec(model={"max_batch_size": 16, "max_queue_size": 8})


def test_serve_lets_in_what_the_queue_may_hold_and_what_it_refuses() -> None:
    subject = spec(model={"max_batch_size": 8, "max_queue_size": 100}, models={"b": {"max_queue_size": 5000}})
    assert subject.max_ongoing_requests > 100 + 8 + 5000 + 64


def test_replicas_are_added_when_batches_are_full_and_never_above_what_they_may_hold() -> None:
    subject = spec(num_replicas=2, max_replicas=4, model={"max_batch_size": 8}, models={"b": {"max_batch_size": 32}})
    assert subject.is_autoscaled
    assert subject.target_ongoing_requests == 2 * 32 < subject.max_ongoing_requests
    assert not spec(num_replicas=2, max_replicas=2).is_autoscaled
    assert not spec(num_replicas=2).is_autoscaled
    with pytest.raises(ConfigError, match="max_replicas = 1 is below num_replicas = 2"):
        spec(num_replicas=2, max_replicas=1)


def test_a_model_is_served_with_its_own_options_or_with_everybodys() -> None:
    subject = spec(model={"max_batch_size": 8}, models={"b": {"max_batch_size": 32}})
    assert (subject.options("a").max_batch_size, subject.options("b").max_batch_size) == (8, 32)


def test_the_token_is_never_printed() -> None:
    subject = spec(token="hush-hush")
    assert "hush" not in f"{subject} {subject!r} {subject.to_yaml()}"
