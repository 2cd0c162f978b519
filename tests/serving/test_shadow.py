"""What a shadow calls another answer, and what an error: numbers by their values, whatever holds them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import pytest

from gated_forward import DEADLINE_S, run, until
from serving.faulty_models import RAISE, SIGNATURE, SLOW, moody
from serving.live_set import MOODY, infer
from serving.replica_set import ReplicaSet
from serving.replica_set import until as until_there
from shoal.batching.batcher import Batcher
from shoal.errors import InferenceError
from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_bits
from shoal.registry import Registry
from shoal.serve.messages.inference import InferCall, Outputs
from shoal.serve.messages.metrics_snapshot import VersionSnapshot
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.replica.shadow import ShadowTraffic
from shoal.serve.replica.version_router import BatchGroup, CallBatch, Track
from shoal.serve.spec.model_options import GuardOptions, ModelOptions
from shoal.serve.spec.model_source import model_from_ref

TOLERANCE = 0.01
Forward = Callable[[CallBatch], list[Outputs]]


def array(datatype: str, values: Sequence[object]) -> np.ndarray:
    return bf16_bits(np.array(values, np.float32)) if datatype == "BF16" else np.array(values, NUMPY_DTYPES[datatype])


@pytest.mark.parametrize(
    ("datatype", "stable", "candidate", "differs"),
    [
        ("BF16", [1.0, -2.0], [1.0078125, -2.015625], False),  # the next numbers that there are
        ("BF16", [1.0, -2.0], [1.03125, -2.0], True),
        ("BF16", [0.0, np.nan], [-0.0, np.nan], False),
        ("FP32", [1.0, np.nan], [1.005, np.nan], False),
        ("FP16", [1.0], [1.05], True),
        ("UINT16", [1000], [1001], True),
        ("INT64", [7, 8], [7, 8], False),
        ("BYTES", [b"shoe"], [b"hat"], True),
    ],
)
def test_answers_differ_by_more_than_the_tolerance(
    datatype: str, stable: list[object], candidate: list[object], differs: bool
) -> None:
    def forward(batch: CallBatch) -> list[Outputs]:
        batch.version = 2
        return [{"y": array(datatype, candidate)} for _ in batch.requests]

    version = shadowed(forward, array(datatype, stable), datatype)
    assert (version["compared"], version["disagreed"], version["shadow_failed"]) == (1, differs, 0)


@pytest.mark.parametrize(
    ("error", "failed"),
    [
        (RuntimeError("on purpose"), True),
        (InferenceError(500, "an output is NaN"), True),
        (InferenceError(422, "the stable version took it"), False),
    ],
)
def test_a_failure_is_an_error_and_a_refusal_another_answer(error: Exception, failed: bool) -> None:
    def forward(batch: CallBatch) -> list[Outputs]:
        raise error

    version = shadowed(forward, array("FP32", [1.0]))
    assert (version["shadow_failed"], version["compared"], version["disagreed"]) == (failed, not failed, not failed)


def shadowed(forward: Forward, answer: np.ndarray, datatype: str = "FP32") -> VersionSnapshot:
    """What is counted of version 2 when `forward` is put beside an answer of the stable version."""

    async def body() -> VersionSnapshot:
        batcher: Batcher[BatchGroup, InferCall, Outputs] = Batcher()
        counts = ModelStatistics("m")
        options = ModelOptions(guard=GuardOptions(tolerance=TOLERANCE))
        shadow = ShadowTraffic("m", batcher, forward, options, counts, {"y": datatype}, lambda report: None)
        shadow.set_candidate(Track(SimpleNamespace(version=2, size_limits=None)), 100.0)  # type: ignore[arg-type]
        shadow.sample_call(InferCall({}, 1), {"y": answer}, None)
        await until(lambda: "2" in counts.snapshot()["versions"])
        shadow.close()
        batcher.close()
        return counts.snapshot()["versions"]["2"]

    return run(body)


def test_answers_of_before_a_promotion_are_not_held_against_the_next_candidate() -> None:
    """They wait for a slot, and are then computed by that one, beside answers of a version that is gone."""
    entered, gate = threading.Event(), threading.Event()

    async def body() -> None:
        batcher: Batcher[BatchGroup, InferCall, Outputs] = Batcher()
        counts = ModelStatistics("m")
        track = Track(SimpleNamespace(version=2, size_limits=None))  # type: ignore[arg-type]

        def forward(batch: CallBatch) -> list[Outputs]:
            entered.set()
            assert gate.wait(DEADLINE_S)
            assert track.loaded is not None
            batch.version = track.loaded.version
            return [{"y": array("FP32", [track.loaded.version])} for _ in batch.requests]

        shadow = ShadowTraffic("m", batcher, forward, ModelOptions(), counts, {"y": "FP32"}, lambda report: None)
        shadow.set_candidate(track, 100.0)
        shadow.sample_call(InferCall({}, 1), {"y": array("FP32", [1.0])}, "in hand")
        await until(entered.is_set)
        shadow.sample_call(InferCall({}, 1), {"y": array("FP32", [1.0])}, "waits")
        await asyncio.sleep(0)
        shadow.set_candidate(None, 0.0)
        track.loaded = SimpleNamespace(version=3, size_limits=None)  # type: ignore[assignment]
        shadow.set_candidate(track, 100.0)
        gate.set()
        shadow.sample_call(InferCall({}, 1), {"y": array("FP32", [3.0])}, "new")
        await until(lambda: "3" in counts.snapshot()["versions"] and not shadow._tasks)
        version = counts.snapshot()["versions"]["3"]
        assert (version["compared"], version["disagreed"]) == (1, 0)
        shadow.close()
        batcher.close()

    run(body)


def test_a_shadow_that_is_slow_is_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving.faulty_models.SLOW_S", 0.03)  # twice what the stable version takes on any machine
    for version, mood in ((1, 0.0), (2, SLOW)):
        Registry().register("moody", moody(version, mood), model=MOODY, signature=SIGNATURE)

    async def body() -> None:
        async with ReplicaSet(model_from_ref("moody@1"), model={"guard": {"min_requests": 20}}) as endpoint:
            [replica] = await endpoint.start()
            await endpoint.administer(action="shadow", model="moody", version=2, percent=100)
            for number in range(1, 25):  # one by one: forwards are compared where they have as many rows
                assert (await infer(replica)).version == 1
                await until_there(
                    lambda number=number: compared(replica) == number or endpoint.phase("moody") == "steady"
                )
            await until_there(lambda: endpoint.phase("moody") == "steady")
            event = endpoint.controller.state.events[-1]
            assert (event.kind, event.by) == ("rollback", "guard")
            assert "times as long: above max_latency_ratio = 2" in event.reason

    asyncio.run(body())


def test_a_shadow_that_fails_is_shown_and_rolled_back() -> None:
    for version, mood in ((1, 0.0), (2, RAISE)):
        Registry().register("moody", moody(version, mood), model=MOODY, signature=SIGNATURE)
    guard = {"min_requests": 20, "max_error_rate": 0.1}

    async def body() -> None:
        async with ReplicaSet(model_from_ref("moody@1"), model={"guard": guard}) as endpoint:
            [replica] = await endpoint.start()
            await endpoint.administer(action="shadow", model="moody", version=2, percent=100)
            for _ in range(5):
                assert (await infer(replica, poison=True)).status == 500  # which the stable version fails at, too
            for number in range(1, 21):
                assert (await infer(replica)).version == 1
                if number == 10:
                    await until_there(lambda: errors(endpoint) == [(2, "shadow", 10, 10)])
            await until_there(lambda: endpoint.phase("moody") == "steady")
            event = endpoint.controller.state.events[-1]
            assert (event.kind, event.by) == ("rollback", "guard")
            assert "20 of 20 requests failed" in event.reason

    asyncio.run(body())


def compared(replica: EndpointReplica) -> int:
    versions = replica.manager.get_model("moody").counts.snapshot()["versions"]
    return versions["2"]["compared"] if "2" in versions else 0


def errors(endpoint: ReplicaSet) -> list[tuple[int, str, int, int]]:
    found = endpoint.status.describe_model("moody")["versions"]
    return [
        (each["version"], each["track"], each["requests"], each["errors"]) for each in found if each["version"] == 2
    ]
