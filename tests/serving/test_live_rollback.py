"""Weights of a run that turn out to be bad, in whole replicas: who answers then, what is said, what hands can do."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from serving.faulty_models import NAN, RAISE, SHAPE, moody
from serving.live_set import LiveSet, everywhere, infer, live
from serving.replica_set import LINEAR, SIGNATURE, ReplicaSet, constant, register, until
from shoal.batching.batcher import Batch
from shoal.cli.display.serve_display import format_plain_lines, format_shares
from shoal.client.endpoint_status import EndpointStatus
from shoal.errors import InferenceError, ShoalError
from shoal.serve.model.predictor import Predictor
from shoal.serve.replica.loader import VersionLoader
from shoal.serve.replica.model_slot import SlotState
from shoal.serve.replica.replica import START_POLL_S
from shoal.serve.spec.model_options import GuardOptions
from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
from shoal.weights import WeightSnapshot, WeightStore


@pytest.mark.parametrize(("mood", "word"), [(RAISE, "on purpose"), (SHAPE, "expected FP32")])
def test_a_version_that_fails_is_left_no_request_fails_and_newer_ones_are_taken(mood: float, word: str) -> None:
    @live(replicas=2)
    async def body(endpoint: LiveSet) -> None:
        await endpoint.publish(moody(2, mood))
        assert await everywhere(endpoint) == {1}
        await until(lambda: endpoint.entries() == [("rollback", 1, 2, "guard")])
        assert endpoint.versions("moody") == [1, 1]
        event = endpoint.controller.state.events[0]
        assert "which the version before could answer" in event.reason
        assert word in event.reason
        assert endpoint.seen["reason"].startswith("version 2 was rejected, version 1 answered instead: it failed at")
        assert not endpoint.store.publish(moody(2))  # so it will not come again
        await endpoint.publish(moody(3))
        assert await everywhere(endpoint) == {3}
        assert endpoint.entries() == [("rollback", 1, 2, "guard")]

    body()


@live()
async def test_what_was_asked_is_not_the_versions_fault(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2))
    [replica] = endpoint.replicas.values()
    asked = [infer(replica, poison=number % 5 == 0) for number in range(20)]
    answers = await asyncio.gather(*asked)
    assert [answer.status for answer in answers] == [500 if number % 5 == 0 else 200 for number in range(20)]
    assert {answer.version for answer in answers if answer.status == 200} == {2}
    assert "its endpoint's log has the reason" in answers[0].body["error"]
    assert (endpoint.versions("moody"), endpoint.entries()) == ([2], [])


@live()
async def test_who_asks_for_a_version_by_its_number_gets_that_one_or_its_error(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2, RAISE))
    [replica] = endpoint.replicas.values()
    assert [(await infer(replica, version=version)).status for version in (1, 2)] == [200, 500]
    assert endpoint.versions("moody") == [2]


@live(replicas=2)
async def test_weights_that_are_not_finite_or_do_not_fit_are_not_taken(endpoint: LiveSet) -> None:
    nan = WeightSnapshot.of(2, {"weight": np.full(1, np.nan, np.float32), "mood": np.zeros(1, np.float32)})
    endpoint.store.publish(nan)
    await until(lambda: endpoint.entries() == [("abandon", 2, 1, "guard")])
    assert "'weight' is not finite" in endpoint.controller.state.events[0].reason
    assert await everywhere(endpoint) == {1}


@live(replicas=2)
async def test_without_the_controller_each_replica_leaves_what_is_bad_and_all_is_told_later(endpoint: LiveSet) -> None:
    endpoint.controller_away = True
    await endpoint.publish(moody(2, NAN))
    assert await everywhere(endpoint) == {1}
    assert endpoint.versions("moody") == [1, 1]
    endpoint.restart_controller()
    endpoint.controller_away = False
    await until(lambda: endpoint.entries() == [("rollback", 1, 2, "guard")])


@live(replicas=2)
async def test_a_replica_that_comes_when_the_newest_weights_were_left_gets_those_before(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2, RAISE))
    assert await everywhere(endpoint) == {1}
    await until(lambda: endpoint.controller.plan.models[0].is_retained)
    for name in ("r1", "r2"):
        await endpoint.kill(name)
    endpoint.restart_controller()  # the weights are in a file
    replica = endpoint.add("r3")
    await replica.start()
    assert (await infer(replica)).version == 1
    await endpoint.publish(moody(3))
    assert await everywhere(endpoint) == {3}


@live(replicas=2)
async def test_rolled_back_by_hand_it_stays_there_until_it_is_promoted(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2))
    assert await everywhere(endpoint) == {2}
    told = await endpoint.administer(action="rollback", model="moody", reason="it wobbles")
    assert (told["pinned"], endpoint.versions("moody")) == (1, [1, 1])
    endpoint.store.publish(moody(3))
    assert await everywhere(endpoint) == {1}
    [late] = await endpoint.start()  # it has never seen version 1
    assert (late.manager.is_ready, (await infer(late)).version) == (True, 1)
    endpoint.restart_controller()
    assert await everywhere(endpoint) == {1}
    await endpoint.administer(action="promote", model="moody")
    await until(lambda: endpoint.versions("moody") == [3, 3, 3])
    assert endpoint.entries() == [("pin", 1, 2, "tester"), ("follow", None, 1, "tester")]
    assert endpoint.controller.state.events[0].reason == "it wobbles"


@live(replicas=2)
async def test_a_version_that_only_one_replica_still_holds_is_given_to_the_others(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2))
    other = endpoint.replicas["r2"].manager.get_model("moody").live
    assert other is not None
    other.take(moody(3))
    await infer(endpoint.replicas["r2"])
    other.take(moody(4))  # so it holds 3 and 4, and r1 holds 2
    await until(lambda: endpoint.controller.live.available("moody") == [1, 2, 3, 4])
    await endpoint.administer(action="rollback", model="moody", version=2)
    assert endpoint.versions("moody") == [2, 2]


@live()
async def test_a_replica_is_let_in_when_it_has_what_is_pinned(endpoint: LiveSet) -> None:
    for version in (2, 3):
        await endpoint.publish(moody(version))
        assert await everywhere(endpoint) == {version}
    await endpoint.administer(action="rollback", model="moody", version=2)
    endpoint.giving.clear()
    late = endpoint.add("late")
    starting = asyncio.create_task(late.start())
    await until(lambda: late.manager.is_ready and endpoint.num_fetched == 1)  # with what the run has
    assert not (await asyncio.wait([starting], timeout=5 * START_POLL_S))[0]
    endpoint.controller.live.pin("moody", 1, "me", "")  # while it fetches another
    await until(lambda: endpoint.controller.plan.models[0].is_retained)
    await until(lambda: late.manager.report().generation == endpoint.controller.plan.generation)
    endpoint.giving.set()
    await starting
    await until(lambda: late.manager.get_model("moody").version == 1)


@live()
async def test_a_batch_that_two_versions_computed_does_not_say_how_long_one_takes(endpoint: LiveSet) -> None:
    [replica] = endpoint.replicas.values()
    hosted = replica.manager.get_model("moody")
    forwards, on_batch = hosted._forward_times, hosted._queue._on_batch
    assert on_batch is not None
    await until(lambda: sum(num for num, _ in forwards.get_medians(1).values()) == hosted.batcher_counts().batches)
    told, timed = [], []

    def tell(report: Batch[Any]) -> None:
        on_batch(report)
        told.append(report)

    hosted._queue._on_batch = tell
    forwards.add = lambda version, rows, seconds: timed.append((version, rows))  # type: ignore[method-assign]
    await endpoint.publish(moody(2, RAISE))
    for rows in (1, 2):
        assert (await infer(replica, rows=rows)).version == 1
    await until(lambda: len(told) == 2)
    assert timed == [(1, 2)]


@live(replicas=2)
async def test_the_version_that_answers_may_be_kept(endpoint: LiveSet) -> None:
    await endpoint.administer(action="rollback", model="moody", version=1)
    endpoint.store.publish(moody(2))
    assert await everywhere(endpoint) == {1}


@live(replicas=2, guard=GuardOptions(metric="return", min_value=100.0))
async def test_a_version_goes_by_what_a_user_measures(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2))
    assert await everywhere(endpoint) == {2}
    await until(lambda: endpoint.controller.live.answering("moody") == [2, 2])
    await endpoint.administer(action="metric", model="moody", metric="return", value=120.0)
    with pytest.raises(InferenceError, match="uses 'return', not 'other'"):
        await endpoint.administer(action="metric", model="moody", metric="other", value=1.0)
    assert endpoint.versions("moody") == [2, 2]
    await endpoint.administer(action="metric", model="moody", metric="return", value=80.0)
    await until(lambda: endpoint.versions("moody") == [1, 1])
    assert "return = 80 is below min_value = 100" in endpoint.seen["reason"]
    assert endpoint.entries() == [("rollback", 1, 2, "guard")]
    await until(lambda: endpoint.controller.live.answering("moody") == [1, 1])
    with pytest.raises(InferenceError, match="no version of 'moody' before 1 is available"):
        await endpoint.administer(action="metric", model="moody", metric="return", value=80.0)


@live()
async def test_status_says_what_it_follows_what_is_held_and_what_was_left(endpoint: LiveSet) -> None:
    def seen() -> list[str]:
        return format_plain_lines(
            EndpointStatus.from_json(json_of(endpoint.status.describe_endpoint())), "http://here"
        )[1:]

    await endpoint.publish(moody(2))
    await until(lambda: len(seen()) == 2)
    assert [line.partition(":")[0] for line in seen()] == ["moody@1 loaded", "moody@2 stable"]
    assert "share 100%" in seen()[1]
    assert seen()[1].endswith("follows a run")
    await endpoint.administer(action="rollback", model="moody")
    await until(lambda: [line.partition(":")[0] for line in seen()] == ["moody@1 stable"])
    assert seen()[0].endswith("pinned at version 1 of a run")
    model = EndpointStatus.from_json(json_of(endpoint.status.describe_endpoint())).models[0]
    assert format_shares(model) == "100% by 1 (stable), pinned at version 1 of a run"
    await endpoint.administer(action="promote", model="moody")
    await endpoint.publish(moody(3, RAISE))
    assert await everywhere(endpoint) <= {1, 2}
    await until(lambda: any(line.startswith("moody: ready version 3 was rejected") for line in seen()))


@live()
async def test_a_model_that_is_deleted_follows_no_more(endpoint: LiveSet) -> None:
    [replica] = endpoint.replicas.values()
    follower = replica.manager.followers["moody"]
    await endpoint.administer(action="delete", model="moody")
    endpoint.store.publish(moody(2))
    await until(lambda: not follower.thread.is_alive)
    replica.check_health()


def json_of(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("has no version before 1; available: 1. To stay", {"action": "rollback"}),
    ("version 9 of 'moody' is not available; available: 1", {"action": "rollback", "version": 9}),
    ("would leave version 1, not 2", {"action": "rollback", "from_version": 2}),
    ("version champion of 'moody' is not available", {"action": "rollback", "version": "champion"}),
    ("follows the weights of its run already", {"action": "promote"}),
    ("no version by its number: promote moody", {"action": "promote", "version": 1}),
    ("and no version by its number. Name moody", {"action": "canary", "version": 1, "percent": 10}),
    ("which selects its versions", {"action": "deploy", "version": 1}),
    ("which selects .* its options", {"action": "set", "options": {"max_batch_size": 2}}),
    ("has no shadow", {"action": "shadow", "percent": 0}),
]


@live()
async def test_what_makes_no_sense_for_a_live_model_is_refused_with_a_remedy(endpoint: LiveSet) -> None:
    await until(lambda: endpoint.controller.live.available("moody") == [1])
    for word, change in REFUSED:
        with pytest.raises(InferenceError, match=word) as caught:
            await endpoint.administer(model="moody", **change)
        assert (caught.value.status, endpoint.entries()) == (409, [])
    await endpoint.publish(moody(2))  # it follows its run still


def test_a_replica_that_hangs_while_it_takes_weights_of_its_run_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    release, load = threading.Event(), Predictor.load

    def hangs(predictor: Predictor, snapshot: WeightSnapshot) -> Any:
        if snapshot.version == 2:
            release.wait(60)
        return load(predictor, snapshot)

    monkeypatch.setattr(Predictor, "load", hangs)

    async def body() -> None:
        store = WeightStore()
        store.publish(constant(1))
        async with ReplicaSet(EndpointModel("live", LiveModel(LINEAR, SIGNATURE, store))) as endpoint:
            [replica] = await endpoint.start()
            monkeypatch.setattr(
                "shoal.serve.replica.model_manager.MAX_STAGING_S", 0.05
            )  # to start may well take longer
            follower = replica.manager.followers["live"]
            await until(lambda: not follower.thread.busy_s)
            replica.check_health()
            store.publish(constant(2))
            await until(lambda: follower.thread.busy_s > 0.05)
            with pytest.raises(ShoalError, match="has been loading for"):
                replica.check_health()
            release.set()
            await until(lambda: endpoint.versions("live") == [2] and not follower.thread.busy_s)
            replica.check_health()
        store.close()

    asyncio.run(body())


def test_a_live_model_that_is_deleted_while_it_is_built_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    build = VersionLoader.build_predictor

    async def slowly(stager: VersionLoader, *args: Any) -> Any:
        await asyncio.to_thread(release.wait, 10)
        return await build(stager, *args)

    async def body() -> None:
        store = WeightStore()
        store.publish(constant(1))
        monkeypatch.setattr(VersionLoader, "build_predictor", slowly)
        register()
        live = EndpointModel("live", LiveModel(LINEAR, SIGNATURE, store))
        async with ReplicaSet(model_from_ref("linear@1"), live) as endpoint:
            replica = endpoint.add()
            starting = asyncio.create_task(replica.start(10.0))
            await until(lambda: "live" in replica.manager._slots)
            await endpoint.administer(action="delete", model="live")
            await starting
            release.set()
            await until(lambda: replica.manager._slots["live"].state is SlotState.COLD)
            assert [model.name for model in replica.manager.list_models()] == ["linear"]
            assert replica.manager.followers == {}
        store.close()

    asyncio.run(body())
