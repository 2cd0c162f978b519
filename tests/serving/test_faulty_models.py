"""Models that raise, hang, leak or answer nonsense, in a whole replica: who else asks is answered, all is counted."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import psutil
import pytest

from serving.faulty_models import FINE, HANG, LEAK, LEAK_BYTES, NAN, RAISE, SHAPE, SIGNATURE, factory, weights
from serving.replica_set import Asked, ReplicaSet, ask, until
from shoal.errors import ShoalError
from shoal.registry import Registry
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.replica import served_model
from shoal.serve.replica.replica import EndpointReplica
from shoal.serve.spec.model_source import model_from_ref


@asynccontextmanager
async def replica_of(hold: Path | str = "", **spec: Any) -> AsyncIterator[EndpointReplica]:
    """One replica with the faulty model, version 1."""
    Registry().register("faulty", weights(1), model=factory(str(hold)), signature=SIGNATURE)
    async with ReplicaSet(model_from_ref("faulty"), **spec) as endpoint:
        [replica] = await endpoint.start()
        yield replica


async def infer(replica: EndpointReplica, *rows: Sequence[float], **headers: str) -> Asked:
    """Ask; what is answered must be right."""
    tensor = {
        "name": "x",
        "shape": [len(rows), 2],
        "datatype": "FP32",
        "data": [value for row in rows for value in row],
    }
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await ask(replica, "POST", "/v2/models/faulty/infer", {"inputs": [tensor]}, named)
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
    async with ReplicaSet(model_from_ref("faulty")) as endpoint:
        [replica] = await endpoint.start()
        answers = [await infer(replica, (RAISE, 0.0)) for _ in range(2)]
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
        await infer(replica, (RAISE, 0.0))
        endpoint.controller.report(replica.report())  # many failures are one event
        assert endpoint.kinds().count("failure") == 1


@pytest.mark.parametrize(("fault", "word"), [(RAISE, "on purpose"), (SHAPE, "'y'"), (NAN, "'y'")])
async def test_a_poisonous_request_fails_alone_and_says_why(fault: float, word: str) -> None:
    async with replica_of(show_errors=True) as replica:
        asked = [infer(replica, (FINE, float(index))) for index in range(8)]
        asked.insert(3, infer(replica, (fault, 0.0)))
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
        hanging = asyncio.create_task(infer(replica, (HANG, 1.0), shoal_deadline_ms="200"))
        await until(lambda: counts(replica)["queued_rows"] == 0 and counts(replica)["submitted"] == 1)
        behind = await asyncio.gather(*[infer(replica, (FINE, 1.0), shoal_deadline_ms="200") for _ in range(3)])
        assert [answer.status for answer in (*behind, await hanging)] == [504] * 4
        with pytest.raises(ShoalError, match="hang_s"):
            replica.check_health()
        assert replica.manager.report().computing_s > 0.1
        hold.unlink()  # it comes to itself: what is late is not delivered, what is new is answered
        assert (await infer(replica, (FINE, 2.0))).status == 200
        replica.check_health()
        await until(lambda: replica.manager.report().computing_s == 0.0)


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
            assert (await infer(replica, (LEAK, 1.0))).status == 200
        with pytest.raises(ShoalError, match="max_memory_gib"):
            replica.check_health()


async def test_whatever_is_asked_is_answered_or_refused_and_counted() -> None:
    """Four hundred requests, a third of them bad in some way, some gone before their answer."""
    async with replica_of(model={"max_batch_size": 8, "max_queue_size": 64}) as replica:
        kinds = [FINE, RAISE, FINE, NAN, FINE, SHAPE]
        tasks = [asyncio.create_task(infer(replica, (kinds[n % 6], 1.0))) for n in range(300)]
        tasks += [asyncio.create_task(infer(replica, *[(FINE, 1.0)] * 9)) for _ in range(50)]
        late = [asyncio.create_task(infer(replica, (FINE, 1.0), shoal_deadline_ms="0.001")) for _ in range(50)]
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
