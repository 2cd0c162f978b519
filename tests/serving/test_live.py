"""Models that follow a run, in whole replicas: weights that turn out to be bad, and the newest as a canary."""

import asyncio
import threading
from collections import Counter
from typing import Any

import msgspec
import pytest

from registered import LINEAR, SIGNATURE, constant, register
from serving.faulty_models import NAN, RAISE, moody
from serving.live_set import LiveSet, everywhere, infer, live
from serving.replica_set import ReplicaSet, serving_one, tally, until
from shoal.batching.batcher import Batch
from shoal.cli.display.serve_display import format_plain_lines, format_shares
from shoal.client.endpoint_status import EndpointStatus, ModelStatus
from shoal.errors import InferenceError, ShoalError
from shoal.serve.controller.canary_guard import MAX_LOST_REPLICAS
from shoal.serve.model.predictor import Predictor
from shoal.serve.replica.loader import VersionLoader
from shoal.serve.replica.replica import START_POLL_S
from shoal.serve.spec.model_source import EndpointModel, LiveModel
from shoal.weights import WeightSnapshot, WeightStore


@live(replicas=2)
async def test_a_version_that_fails_is_left_no_request_fails_and_newer_ones_are_taken(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2, RAISE))
    [replica, *_] = endpoint.replicas.values()
    by_number = [(await infer(replica, version=version)).status for version in (1, 2)]  # its own answer, or its error
    assert (by_number, endpoint.versions("moody")) == ([200, 500], [2, 2])
    assert await everywhere(endpoint) == {1}
    await until(lambda: endpoint.entries() == [("rollback", 1, 2, "guard")])
    assert endpoint.versions("moody") == [1, 1]
    [reason] = [each.reason for each in endpoint.controller.state.events if each.kind == "rollback"]
    assert "which the version before could answer" in reason
    assert "on purpose" in reason
    assert endpoint.seen["reason"].startswith("version 2 was rejected, version 1 answered instead: it failed at")
    assert not endpoint.store.publish(moody(2))  # so it will not come again
    await endpoint.publish(moody(3))
    assert await everywhere(endpoint) == {3}
    assert endpoint.entries() == [("rollback", 1, 2, "guard")]


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
    told = await endpoint.administer("rollback", "moody", reason="it wobbles")
    assert (told["pinned"], endpoint.versions("moody")) == (1, [1, 1])
    endpoint.store.publish(moody(3))
    assert await everywhere(endpoint) == {1}
    [late] = await endpoint.start()  # it has never seen version 1
    assert (late.manager.is_ready, (await infer(late)).version) == (True, 1)
    endpoint.restart_controller()
    assert await everywhere(endpoint) == {1}
    await endpoint.administer("promote", "moody")
    await until(lambda: endpoint.versions("moody") == [3, 3, 3])
    assert endpoint.entries() == [("pin", 1, 2, "tester"), ("follow", None, 1, "tester")]
    assert endpoint.controller.state.events[0].reason == "it wobbles"


@live()
async def test_a_replica_is_let_in_when_it_has_what_is_pinned(endpoint: LiveSet) -> None:
    for version in (2, 3):
        await endpoint.publish(moody(version))
        assert await everywhere(endpoint) == {version}
    await endpoint.administer("rollback", "moody", version=2)
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
    forwards, on_batch = hosted.forward_times, hosted._queue._on_batch
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


@live()
async def test_status_says_what_it_follows_what_is_held_and_what_was_left(endpoint: LiveSet) -> None:
    def lines() -> list[str]:
        return format_plain_lines(EndpointStatus("endpoint", models=[seen(endpoint)]), "http://here")[1:]

    def versions() -> list[str]:
        return [line.partition(":")[0] for line in lines() if line.startswith("moody@")]

    await endpoint.publish(moody(2))
    await until(lambda: versions() == ["moody@1 loaded", "moody@2 stable"])
    assert "share 100%" in lines()[1]
    assert lines()[1].endswith("follows a run")
    await until(lambda: any(line.endswith(" rows since the deployment") for line in lines()))
    await endpoint.administer("rollback", "moody")
    await until(lambda: versions() == ["moody@1 stable"])
    assert lines()[0].endswith("pinned at version 1 of a run")
    assert format_shares(seen(endpoint)) == "100% by 1 (stable), pinned at version 1 of a run"
    await endpoint.administer("promote", "moody")
    await endpoint.publish(moody(3, RAISE))
    assert await everywhere(endpoint) <= {1, 2}
    await until(lambda: any(line.startswith("moody: ready; version 3 was rejected") for line in lines()))


@live()
async def test_a_model_that_is_deleted_follows_no_more(endpoint: LiveSet) -> None:
    [replica] = endpoint.replicas.values()
    follower = replica.manager.followers["moody"]
    await endpoint.administer("delete", "moody")
    endpoint.store.publish(moody(2))
    await until(lambda: not follower.thread.is_alive)
    replica.check_health()


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


async def test_a_replica_that_hangs_while_it_takes_weights_of_its_run_is_not_healthy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    release, load = threading.Event(), Predictor.load

    def hangs(predictor: Predictor, snapshot: WeightSnapshot) -> Any:
        if snapshot.version == 2:
            release.wait(60)
        return load(predictor, snapshot)

    monkeypatch.setattr(Predictor, "load", hangs)
    store = WeightStore()
    store.publish(constant(1))
    async with serving_one(EndpointModel("live", LiveModel(LINEAR, SIGNATURE, store))) as (endpoint, replica):
        monkeypatch.setattr("shoal.serve.replica.model_manager.MAX_STAGING_S", 0.05)  # to start may well take longer
        loader = replica.manager._host.loader
        await until(lambda: not loader.longest_load_s)
        replica.check_health()
        store.publish(constant(2))
        await until(lambda: loader.longest_load_s > 0.05)
        with pytest.raises(ShoalError, match="has been loading for"):
            replica.check_health()
        release.set()
        await until(lambda: endpoint.versions("live") == [2] and not loader.longest_load_s)
        replica.check_health()
    store.close()


async def test_a_live_model_that_is_deleted_while_it_is_built_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    build = VersionLoader.build_predictor

    async def slowly(stager: VersionLoader, *args: Any) -> Any:
        await asyncio.to_thread(release.wait, 10)
        return await build(stager, *args)

    store = WeightStore()
    store.publish(constant(1))
    monkeypatch.setattr(VersionLoader, "build_predictor", slowly)
    register()
    live = EndpointModel("live", LiveModel(LINEAR, SIGNATURE, store))
    async with ReplicaSet("linear@1", live) as endpoint:
        replica = endpoint.add()
        starting = asyncio.create_task(replica.start(10.0))
        await until(lambda: "live" in replica.manager._slots)
        await endpoint.administer("delete", "live")
        await starting
        release.set()
        [retired] = replica.manager._retired
        await until(lambda: not retired.is_ending)
        assert [model.name for model in replica.manager.list_models()] == ["linear"]
        assert replica.manager.followers == {}
    store.close()


# -- the newest weights beside a pinned version


def seen(endpoint: LiveSet) -> ModelStatus:
    return msgspec.convert(endpoint.status.describe_endpoint(), EndpointStatus).models[0]


def candidates(endpoint: LiveSet) -> list[int]:
    return [replica.manager.get_model("moody").router.candidate_version for replica in endpoint.replicas.values()]


async def beside(endpoint: LiveSet, version: int, mood: float = 0.0) -> None:
    """The run publishes, and every replica has it as the candidate."""
    endpoint.store.publish(moody(version, mood))
    await until(lambda: set(candidates(endpoint)) == {version})


async def answered(endpoint: LiveSet, num: int = 100, **headers: str) -> Counter[int]:
    """Who answers `num` requests to each replica; not one may fail."""
    return await tally(endpoint, lambda replica: infer(replica, **headers), num)


@live(replicas=2)
async def test_the_newest_gets_its_share_until_it_is_promoted(endpoint: LiveSet) -> None:
    told = await endpoint.administer("canary", "moody", percent=20, reason="carefully")
    assert (told["pinned"], told["newest_percent"]) == (1, 20.0)
    assert await answered(endpoint) == {1: 200}  # there is nothing newer yet
    for version in (2, 3):
        await beside(endpoint, version)
        found = await answered(endpoint)
        assert found[1] + found[version] == 200
        assert 36 <= found[version] <= 44
    assert await answered(endpoint, 8, shoal_track="candidate") == {3: 16}
    assert await answered(endpoint, 8, shoal_track="stable") == {1: 16}
    assert await answered(endpoint, 8, version=3) == {3: 16}  # type: ignore[arg-type]
    shares = "80% by 1 (stable), 20% by 3 (candidate), pinned at version 1 of a run, beside its newest"
    await until(lambda: format_shares(seen(endpoint)) == shares)  # once both replicas have reported
    assert len(await answered(endpoint, 8, shoal_sticky="customer 17")) == 1
    await endpoint.administer("canary", "moody", percent=0)
    assert await answered(endpoint) == {1: 200}
    [late] = await endpoint.start()
    await until(lambda: candidates(endpoint) == [3, 3, 3])
    assert (await infer(late)).version == 1
    endpoint.restart_controller()
    await endpoint.administer("promote", "moody")
    assert await everywhere(endpoint) == {3}
    assert [(kind, version, before) for kind, version, before, _ in endpoint.entries()] == [
        ("pin", 1, 1), ("canary", None, 1), ("canary", None, 1), ("follow", None, 1),
    ]  # fmt: skip
    assert endpoint.controller.state.events[1].reason == "carefully (20 percent of the requests, 0 percent shadowed)"


@live(replicas=2)
async def test_rolled_back_what_was_pinned_answers_everything_and_a_second_time_does_nothing(endpoint: LiveSet) -> None:
    await endpoint.publish(moody(2))
    assert await everywhere(endpoint) == {2}
    await endpoint.administer("canary", "moody", percent=50)
    await beside(endpoint, 3)
    await until(lambda: seen(endpoint).candidate == 3)
    with pytest.raises(InferenceError, match="would leave the newest weights of its run, not version 2"):
        await endpoint.administer("rollback", "moody", from_version=2)
    told = await endpoint.administer("rollback", "moody", from_version=3)
    assert (told["pinned"], told["newest_percent"], candidates(endpoint)) == (2, None, [0, 0])
    assert await answered(endpoint) == {2: 200}
    endpoint.store.publish(moody(4))
    with pytest.raises(InferenceError, match="would leave version 2, not 3"):
        await endpoint.administer("rollback", "moody", from_version=3)
    assert await everywhere(endpoint) == {2}
    assert endpoint.entries()[-1] == ("rollback", 2, 3, "tester")
    await endpoint.administer("canary", "moody", percent=20)
    await until(lambda: seen(endpoint).candidate == 4)
    told = await endpoint.administer("rollback", "moody", version=4)  # the candidate is pinned
    assert (told["pinned"], told["newest_percent"], await everywhere(endpoint)) == (4, None, {4})


@live(replicas=2)
async def test_a_newest_version_that_fails_is_left_no_request_fails_and_the_next_one_gets_the_share(
    endpoint: LiveSet,
) -> None:
    await endpoint.administer("canary", "moody", percent=100)
    for version in (2, 3):
        await beside(endpoint, version, RAISE)
        assert await answered(endpoint, 8) == {1: 16}
        await until(lambda: candidates(endpoint) == [0, 0])
    await beside(endpoint, 4)
    assert await answered(endpoint, 8) == {4: 16}
    assert ("rollback", 1, 2, "guard") in endpoint.entries()
    assert endpoint.versions("moody") == [1, 1]


@live(replicas=MAX_LOST_REPLICAS + 2)
async def test_when_replicas_die_the_newest_loses_its_share(endpoint: LiveSet) -> None:
    await endpoint.administer("canary", "moody", percent=10)
    await beside(endpoint, 2)
    for name in list(endpoint.replicas)[1:]:
        await endpoint.kill(name)
    await until(lambda: candidates(endpoint) == [0])
    [event] = [each for each in endpoint.controller.state.events if each.kind == "rollback"]
    assert (event.version, event.by) == (1, "guard")
    assert "replicas died while it answered" in event.reason
