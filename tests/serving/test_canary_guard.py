"""A canary is judged by its own mistakes, and not by those of its callers; what a shadow calls another answer; models
that raise, hang, leak or answer nonsense."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from gated_forward import DEADLINE_S, run, until
from serving.faulty_models import (
    FINE,
    HANG,
    LEAK,
    LEAK_BYTES,
    NAN,
    RAISE,
    SHAPE,
    SIGNATURE,
    SLOW,
    factory,
    moody,
    weights,
)
from serving.live_set import MOODY, infer
from serving.replica_set import Asked, ReplicaSet, ask, serving_one
from serving.replica_set import until as until_there
from shoal.batching.batcher import Batcher
from shoal.errors import InferenceError, ShoalError
from shoal.open_inference.datatypes import NUMPY_DTYPES, bf16_bits
from shoal.registry import Registry
from shoal.serve.messages.counts import VersionCounts, merge
from shoal.serve.messages.infer_call import InferCall, Outputs
from shoal.serve.replica import served_model
from shoal.serve.replica.model_statistics import ModelStatistics
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.replica.shadow import ShadowTraffic
from shoal.serve.replica.version_router import BatchGroup, CallBatch, Track
from shoal.serve.spec.model_options import GuardOptions, ModelOptions

NUM_REQUESTS = 80


@asynccontextmanager
async def canary_of(mood: float = FINE, percent: float = 50.0, action: str = "canary") -> AsyncIterator[ReplicaSet]:
    """A candidate of this mood beside a version that fails at poison alone."""
    for version, its_mood in ((1, FINE), (2, mood)):
        Registry().register("moody", moody(version, its_mood), model=MOODY, signature=SIGNATURE)
    # Not judged by latency: forwards of 20 µs on a busy machine are slow or fast by chance.
    options = {"warm_up": False, "guard": {"max_latency_ratio": 1e6}}
    async with ReplicaSet("moody@1", model=options) as endpoint:
        await endpoint.start(2)
        await endpoint.administer(action, "moody", version=2, percent=percent)
        yield endpoint


async def ask_many(endpoint: ReplicaSet, *, poison_every: int = 10) -> Counter[int]:
    """The statuses of many requests at once to each replica; then the controller judges what was counted."""
    statuses: Counter[int] = Counter()
    for replica in endpoint.replicas.values():
        asked = [infer(replica, poison=number % poison_every == 0) for number in range(NUM_REQUESTS)]
        statuses.update([answer.status for answer in await asyncio.gather(*asked)])
    for replica in endpoint.replicas.values():
        endpoint.controller.report(replica.manager.report())
    return statuses


def count(endpoint: ReplicaSet, version: int) -> VersionCounts:
    snapshots = [replica.manager.get_model("moody").counts.snapshot() for replica in endpoint.replicas.values()]
    return merge(snapshots).versions[version]


async def test_a_candidate_stays_though_a_client_makes_both_versions_raise() -> None:
    async with canary_of() as endpoint:
        assert await ask_many(endpoint) == {200: 144, 500: 16}
        assert endpoint.phase("moody") == "canary"
        both = [count(endpoint, version) for version in (1, 2)]
        assert sum(each.statuses[500] for each in both) == 16
        assert sum(each.failed_on_both for each in both) == 16
        assert min(sum(each.statuses.values()) for each in both) >= 50  # it could have been judged


@pytest.mark.parametrize(("mood", "percent"), [(RAISE, 50.0), (SHAPE, 100.0)])
async def test_a_candidate_goes_that_fails_where_the_stable_version_answers(mood: float, percent: float) -> None:
    """Beside a client whose mistakes both versions answer with 500, and with a share that leaves the other nothing."""
    async with canary_of(mood, percent) as endpoint:
        statuses = await ask_many(endpoint)
        assert statuses[500] > 60
        assert endpoint.phase("moody") == "steady"
        event = endpoint.controller.state.events[-1]
        assert (event.kind, event.by) == ("rollback", "guard")
        assert "requests failed, of the stable version 0 of" in event.reason


async def test_a_shadow_is_not_compared_at_requests_that_are_at_fault() -> None:
    async with canary_of(percent=100.0, action="shadow") as endpoint:
        assert await ask_many(endpoint) == {200: 144, 500: 16}
        assert endpoint.phase("moody") == "canary"
        assert count(endpoint, 1).failed_on_both == 16


# -- shadow traffic

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
    assert (version.compared, version.disagreed, version.shadow_failed) == (1, differs, 0)


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
    assert (version.shadow_failed, version.compared, version.disagreed) == (failed, not failed, not failed)


def shadowed(forward: Forward, answer: np.ndarray, datatype: str = "FP32") -> VersionCounts:
    """What is counted of version 2 when `forward` is put beside an answer of the stable version."""

    async def body() -> VersionCounts:
        batcher: Batcher[BatchGroup, InferCall, Outputs] = Batcher()
        counts = ModelStatistics("m")
        options = ModelOptions(guard=GuardOptions(tolerance=TOLERANCE))
        shadow = ShadowTraffic("m", batcher, forward, options, counts, {"y": datatype}, lambda report: None)
        shadow.set_candidate(Track(SimpleNamespace(version=2, size_limits=None)), 100.0)  # type: ignore[arg-type]
        shadow.sample_call(InferCall({}, 1), {"y": answer}, None)
        await until(lambda: 2 in counts.snapshot().versions)
        shadow.close()
        batcher.close()
        return counts.snapshot().versions[2]

    return run(body)


async def test_answers_of_before_a_promotion_are_not_held_against_the_next_candidate() -> None:
    """They wait for a slot, and are then computed by that one, beside answers of a version that is gone."""
    entered, gate = threading.Event(), threading.Event()

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
    await until(lambda: 3 in counts.snapshot().versions and not shadow._tasks)
    version = counts.snapshot().versions[3]
    assert (version.compared, version.disagreed) == (1, 0)
    shadow.close()
    batcher.close()


@pytest.mark.parametrize(
    ("mood", "guard", "word"),
    [
        (SLOW, {"max_error_rate": 1.0}, "times as long: above max_latency_ratio = 2"),
        (RAISE, {"max_latency_ratio": 1e6, "max_error_rate": 0.1}, "20 of 20 requests failed"),
    ],
)
async def test_a_shadow_that_is_slow_or_fails_is_rolled_back(
    mood: float, guard: dict[str, float], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serving.faulty_models.SLOW_S", 0.03)  # twice what the stable version takes on any machine
    for version, its_mood in ((1, FINE), (2, mood)):
        Registry().register("moody", moody(version, its_mood), model=MOODY, signature=SIGNATURE)
    async with serving_one("moody@1", model={"guard": {"min_requests": 20, **guard}}) as (endpoint, replica):
        await endpoint.administer("shadow", "moody", version=2, percent=100)
        assert (await infer(replica, poison=True)).status == 500  # which the stable version fails at, too
        for number in range(1, 25):  # one by one: forwards are compared where they have as many rows
            assert (await infer(replica)).version == 1
            await until_there(lambda number=number: shadowed_calls(replica) == number)
            endpoint.controller.report(replica.report())
            if endpoint.phase("moody") == "steady":
                break
        event = endpoint.controller.state.events[-1]
        assert (event.kind, event.by) == ("rollback", "guard")
        assert word in event.reason


def shadowed_calls(replica: EndpointReplica) -> int:
    """Those that version 2 has computed, or failed at."""
    versions = replica.manager.get_model("moody").counts.snapshot().versions
    return versions[2].requests - sum(versions[2].statuses.values()) if 2 in versions else 0


# -- whoever else asks is answered, and all is counted


@asynccontextmanager
async def replica_of(hold: Path | str = "", **spec: Any) -> AsyncIterator[EndpointReplica]:
    """One replica with the faulty model, version 1."""
    Registry().register("faulty", weights(1), model=factory(str(hold)), signature=SIGNATURE)
    async with serving_one("faulty", **spec) as (_, replica):
        yield replica


async def infer_rows(replica: EndpointReplica, *rows: Sequence[float], **headers: str) -> Asked:
    """Ask; what is answered must be right."""
    tensor = {
        "name": "x",
        "shape": [len(rows), 2],
        "datatype": "FP32",
        "data": [value for row in rows for value in row],
    }
    answer = await ask(replica, "POST", "/v2/models/faulty/infer", {"inputs": [tensor]}, **headers)
    if answer.status == 200:
        assert answer.body["outputs"][0]["data"] == [value + answer.version for _, value in rows]
    return answer


def counts(replica: EndpointReplica) -> dict[str, int]:
    found: dict[str, int] = replica.stats()["models"]["faulty"]["batcher"]
    return found


async def test_a_model_s_own_words_go_to_the_log_and_the_status_and_to_callers_if_the_endpoint_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    Registry().register("faulty", weights(1), model=factory(), signature=SIGNATURE)
    async with serving_one("faulty") as (endpoint, replica):
        answers = [await infer_rows(replica, (RAISE, 0.0)) for _ in range(2)]
        told = [answer.body["error"] for answer in answers]
        assert [answer.status for answer in answers] == [500, 500]
        assert told[0] != told[1]
        assert not any("on purpose" in each for each in told)
        references = [each.rpartition("(")[2].rstrip(")") for each in told]
        logged = [record for record in caplog.records if record.exc_info and "failed on a request" in record.msg]
        assert [record.args[-1] for record in logged] == references  # type: ignore[index]
        endpoint.controller.report(replica.report())
        [event] = [each for each in endpoint.controller.state.events if each.kind == "failure"]
        assert (event.model, event.version) == ("faulty", 1)
        assert event.reason == f"RuntimeError: on purpose ({references[1]})"
        assert endpoint.status.describe_model("faulty")["last_failure"] == event.reason
        await infer_rows(replica, (RAISE, 0.0))
        endpoint.controller.report(replica.report())  # many failures are one event
        assert endpoint.kinds().count("failure") == 1


@pytest.mark.parametrize(("fault", "word"), [(RAISE, "on purpose"), (SHAPE, "'y'"), (NAN, "'y'")])
async def test_a_poisonous_request_fails_alone_and_says_why(fault: float, word: str) -> None:
    async with replica_of(show_errors=True) as replica:
        asked = [infer_rows(replica, (FINE, float(index))) for index in range(8)]
        asked.insert(3, infer_rows(replica, (fault, 0.0)))
        answers = await asyncio.gather(*asked)
        assert [answer.status for answer in answers] == [200] * 3 + [500] + [200] * 5
        assert word in answers[3].body["error"]
        found = counts(replica)
        assert (found["submitted"], found["answered"], found["failed"]) == (9, 8, 1)
        replica.check_health()


async def test_a_model_that_hangs_is_late_for_all_and_then_unhealthy(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    async with replica_of(hold, hang_s=0.1) as replica:
        hanging = asyncio.create_task(infer_rows(replica, (HANG, 1.0), shoal_deadline_ms="200"))
        await until_there(lambda: counts(replica)["queued_rows"] == 0 and counts(replica)["submitted"] == 1)
        behind = await asyncio.gather(*[infer_rows(replica, (FINE, 1.0), shoal_deadline_ms="200") for _ in range(3)])
        assert [answer.status for answer in (*behind, await hanging)] == [504] * 4
        with pytest.raises(ShoalError, match="hang_s"):
            replica.check_health()
        assert replica.manager.report().computing_s > 0.1
        hold.unlink()  # it comes to itself: what is late is not delivered, what is new is answered
        assert (await infer_rows(replica, (FINE, 2.0))).status == 200
        replica.check_health()
        await until_there(lambda: replica.manager.report().computing_s == 0.0)


async def test_a_call_that_nobody_waits_for_any_more_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_model, "TIMER_TOLERANCE_S", 1800.0)
    hold = tmp_path / "hold"
    hold.touch()
    async with replica_of(hold) as replica:
        model = replica.manager.get_model("faulty")
        traces = []
        for left_s in (3600.0, 900.0):  # the protocol's timer may be the first that goes off
            inputs = {"x": np.array([[HANG, 1.0]], np.float32)}
            traces.append(SimpleNamespace(submitted_ns=0, cancelled_status=499))
            call = InferCall(inputs, 1, deadline_s=time.monotonic() + left_s, trace=cast(Any, traces[-1]))
            asked = asyncio.create_task(model.infer(call))
            await asyncio.sleep(0)
            asked.cancel()
            await asyncio.wait([asked])
        assert model.counts.snapshot().refused == {499: 1, 504: 1}
        assert [trace.cancelled_status for trace in traces] == [499, 504]
        hold.unlink()


async def test_a_model_that_leaks_is_answered_until_its_replica_is_too_large() -> None:
    most_gib = (psutil.Process().memory_info().rss + 2 * LEAK_BYTES) / 2**30
    async with replica_of(max_memory_gib=most_gib) as replica:
        replica.check_health()
        for _ in range(4):
            assert (await infer_rows(replica, (LEAK, 1.0))).status == 200
        with pytest.raises(ShoalError, match="max_memory_gib"):
            replica.check_health()


async def test_whatever_is_asked_is_answered_or_refused_and_counted() -> None:
    """Four hundred requests, a third of them bad in some way, some gone before their answer."""
    async with replica_of(model={"max_batch_size": 8, "max_queue_size": 64}) as replica:
        kinds = [FINE, RAISE, FINE, NAN, FINE, SHAPE]
        tasks = [asyncio.create_task(infer_rows(replica, (kinds[n % 6], 1.0))) for n in range(300)]
        tasks += [asyncio.create_task(infer_rows(replica, *[(FINE, 1.0)] * 9)) for _ in range(50)]
        late = [asyncio.create_task(infer_rows(replica, (FINE, 1.0), shoal_deadline_ms="0.001")) for _ in range(50)]
        await asyncio.sleep(0)
        for task in tasks[::29]:
            task.cancel()
        done = await asyncio.gather(*tasks, *late, return_exceptions=True)
        statuses = Counter(one.status if isinstance(one, Asked) else type(one).__name__ for one in done)
        assert set(statuses) <= {200, 422, 429, 500, 504, "CancelledError"}
        assert sum(statuses.values()) == 400
        assert statuses[200] > 0
        assert statuses[422] + statuses["CancelledError"] >= 50
        found = counts(replica)
        settled = found["answered"] + found["failed"] + found["cancelled"] + found["expired"]
        assert found["submitted"] == settled
        assert found["queued_rows"] == 0
        replica.check_health()
