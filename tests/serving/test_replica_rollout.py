"""Rollouts over real replicas with real models: who answers, what happens when something fails, and what is said."""

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from refusals import refused
from registered import SIGNATURE, register, tensors
from serving.replica_set import ReplicaSet, ask, held_loads, infer, serving_one, tally, until
from shoal.cli.display.serve_display import format_plain_lines, format_shares
from shoal.client.endpoint_status import EndpointStatus
from shoal.errors import InferenceError, ShoalError
from shoal.registry import Registry, Signature
from shoal.serve.controller.change_request import parse_options
from shoal.serve.controller.rollout import Rollout
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.replica.loader import StagedVersion, VersionLoader
from shoal.serve.spec.model_options import GuardOptions
from shoal.serve.spec.model_source import RegisteredModel

ANY_SPEED = GuardOptions(max_latency_ratio=1e9)  # the few batches of a busy machine say nothing
TWICE = Signature(inputs=SIGNATURE.inputs, outputs=tensors(z=[-1, 2]))


def rollout(*versions: int, ref: str = "linear@1", replicas: int = 3, **options: Any) -> Callable[..., None]:
    """A test body that gets a running endpoint of `ref`; `versions` are registered before, the first as champion."""

    def decorate(body: Callable[[ReplicaSet], Awaitable[None]]) -> Callable[..., None]:
        async def test() -> None:
            for version in versions:
                register(aliases=("champion",) if version == versions[0] else ())
            async with ReplicaSet(ref, model={"guard": ANY_SPEED, **options}) as endpoint:
                await endpoint.start(replicas)
                await body(endpoint)

        test.__name__, test.__doc__ = body.__name__, body.__doc__
        return test

    return decorate


async def everywhere(endpoint: ReplicaSet, num: int = 40, **headers: str) -> Counter[int]:
    """Versions that answer `num` requests of each replica."""
    return await tally(endpoint, lambda replica: infer(replica, **headers), num)


def spoil(version: int) -> Path:
    """Damage the weights of a version; what to write back to restore them."""
    path = Registry().get(f"linear@{version}").weight_file().path
    os.rename(path, path.with_suffix(".kept"))
    return path


@rollout(1, 2)
async def test_a_version_that_one_replica_cannot_stage_is_taken_by_none(endpoint: ReplicaSet) -> None:
    path = spoil(2)
    with refused(409, r"version 2 of 'linear' was not taken.*weights"):
        await endpoint.administer("deploy", version=2)
    assert await everywhere(endpoint) == {1: 120}
    assert endpoint.kinds()[-1] == "abandon"
    assert "cannot be read" in (seen := endpoint.status.describe_endpoint())["models"][0]["reason"]
    assert not any(replica["error"] for replica in seen["replicas"])  # nobody wants it any more
    os.rename(path.with_suffix(".kept"), path)
    await endpoint.administer("deploy", version=2)  # what failed once may be tried again
    assert endpoint.versions() == [2, 2, 2]


@rollout(1, 2, replicas=2)
async def test_a_canary_gets_its_share_and_promotion_all(endpoint: ReplicaSet) -> None:
    await endpoint.administer("canary", version=2, percent=25)
    counts = await everywhere(endpoint, 100)
    assert counts[1] + counts[2] == 200
    assert 46 <= counts[2] <= 54
    assert await everywhere(endpoint, shoal_track="candidate") == {2: 80}
    assert await everywhere(endpoint, shoal_track="stable") == {1: 80}
    await endpoint.administer("canary", version=2, percent=0)
    assert await everywhere(endpoint) == {1: 80}
    await endpoint.administer("promote")
    assert await everywhere(endpoint) == {2: 80}
    assert await everywhere(endpoint, shoal_track="candidate") == {2: 80}  # there is no other side any more
    assert endpoint.kinds() == ["deploy", "canary", "canary", "promote"]


@rollout(1, 2)
async def test_a_key_stays_on_its_side_in_every_replica_and_when_the_share_grows(endpoint: ReplicaSet) -> None:
    keys = [f"user-{number}" for number in range(100)]

    async def sides() -> dict[str, int]:
        found: dict[str, int] = {}
        for key in keys:
            versions = {(await infer(each, shoal_sticky=key)).version for each in endpoint.replicas.values()}
            assert len(versions) == 1
            found[key] = versions.pop()
        return found

    await endpoint.administer("canary", version=2, percent=20)
    few = await sides()
    await endpoint.administer("canary", version=2, percent=60)
    many = await sides()
    assert {key for key in keys if few[key] == 2} < {key for key in keys if many[key] == 2}
    assert 8 <= sum(version == 2 for version in few.values()) <= 35


@rollout(1, 2, replicas=1)
async def test_what_was_admitted_for_a_candidate_is_answered_when_it_goes(endpoint: ReplicaSet) -> None:
    [replica] = endpoint.replicas.values()
    await endpoint.administer("canary", version=2, percent=50)
    asked = [asyncio.create_task(infer(replica, shoal_track="candidate")) for _ in range(20)]
    by_number = [asyncio.create_task(infer(replica, version=2)) for _ in range(20)]
    await asyncio.sleep(0)  # all are admitted, none is answered
    await endpoint.administer("rollback", reason="no good")
    assert {answer.status for answer in await asyncio.gather(*asked, *by_number)} == {200}
    assert {(await each).version for each in by_number} == {2}
    assert await everywhere(endpoint) == {1: 40}


@rollout(1, 2, ref="linear@champion")
async def test_promotion_and_rollback_move_the_alias_and_are_moved_by_it(endpoint: ReplicaSet) -> None:
    registry = Registry()
    await endpoint.administer("canary", version=2, percent=10)
    assert registry.get("linear@champion").version == 1
    await endpoint.administer("promote")
    assert registry.get("linear@champion").version == 2
    await endpoint.administer("rollback")
    assert (registry.get("linear@champion").version, endpoint.versions()) == (1, [1, 1, 1])
    registry.promote("linear@2", "champion")
    await until(lambda: endpoint.versions() == [2, 2, 2])
    await until(lambda: endpoint.phase() == "steady")
    assert endpoint.kinds() == ["deploy", "canary", "promote", "rollback", "follow"]


@rollout(1, 2, replicas=2)
async def test_shadowed_answers_are_compared_and_reach_no_client(endpoint: ReplicaSet) -> None:
    await endpoint.administer("shadow", version=2, percent=50)
    assert await everywhere(endpoint, 100) == {1: 200}
    for replica in endpoint.replicas.values():
        assert (await infer(replica, shoal_track="candidate")).version == 1

    def shadowed() -> Any:
        return next(each for each in endpoint.status.describe_model("linear")["versions"] if each["version"] == 2)

    await until(lambda: shadowed()["compared"] >= 95)
    assert shadowed()["track"] == "shadow"

    def status() -> EndpointStatus:
        return msgspec.convert(endpoint.status.describe_endpoint(), EndpointStatus)

    assert format_shares(status().models[0]).startswith("100% by 1 (stable), shadowed by 2 (shadow)")
    assert "differ 100.00%" in "".join(format_plain_lines(status(), ""))
    assert shadowed()["disagreed"] == shadowed()["compared"] <= 105
    assert endpoint.phase() == "canary"  # recorded only
    await endpoint.administer("canary", version=2, percent=10)
    for replica in endpoint.replicas.values():  # it has a share now
        await until(lambda replica=replica: replica.manager.get_model("linear").router.percent == 10.0)
        assert (await infer(replica, shoal_track="candidate")).version == 2
    await endpoint.administer("promote", version=2)
    await until(lambda: shadowed()["track"] == "stable")
    assert "differ 100.00%" not in "".join(format_plain_lines(status(), ""))


@rollout(1, 2)
async def test_a_replica_that_comes_late_has_all_that_answers_before_it_is_ready(endpoint: ReplicaSet) -> None:
    await endpoint.administer("canary", version=2, percent=100)
    [late] = await endpoint.start()
    assert (late.manager.is_ready, (await infer(late)).version) == (True, 2)
    assert (await infer(late, shoal_track="stable")).version == 1


@rollout(1, 2, replicas=1)
async def test_a_late_replica_compares_the_candidate_with_the_stable_version(endpoint: ReplicaSet) -> None:
    """Its tensors must be the stable version's, and its answers to the example if it is built in another way."""
    await endpoint.administer("canary", version=2, percent=10)
    loaded: list[tuple[int, bool]] = []
    load = VersionLoader.load_version

    async def record(loader: VersionLoader, source: Any, version: int, *rest: Any) -> StagedVersion:
        loaded.append((version, rest[-1] is not None))
        return await load(loader, source, version, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(VersionLoader, "load_version", record)
        await endpoint.start()
        await until(lambda: len(loaded) == 2)
    assert loaded == [(1, False), (2, True)]


@rollout(1, 2)
async def test_a_replica_that_cannot_stage_what_answers_does_not_become_ready(endpoint: ReplicaSet) -> None:
    spoil(1)
    with pytest.raises(ShoalError, match=r"linear.*cannot be served.*cannot be read"):
        await endpoint.add("late").start()
    assert await everywhere_but("late", endpoint) == {1}


async def everywhere_but(name: str, endpoint: ReplicaSet) -> set[int]:
    return {(await infer(replica)).version for each, replica in endpoint.replicas.items() if each != name}


@rollout(1, 2)
async def test_a_replica_that_dies_while_others_wait_for_it_holds_nobody_up(endpoint: ReplicaSet) -> None:
    victim = endpoint.replicas["r3"]
    victim.manager.apply = lambda plan: None  # type: ignore[method-assign]  # it hears the plan and never acts
    victim._follower._apply = victim.manager.apply
    deploying = asyncio.create_task(endpoint.administer("deploy", version=2))
    await until(lambda: endpoint.phase() == "staging")
    await until(
        lambda: (
            [replica.manager.get_model("linear").versions for replica in endpoint.replicas.values()][:2] == [[1, 2]] * 2
        )
    )
    assert endpoint.versions() == [1, 1, 1]  # all or none
    await endpoint.kill("r3")
    await deploying
    assert endpoint.versions() == [2, 2]
    assert "replica_lost" in endpoint.kinds()


@rollout(1, 2)
async def test_replicas_serve_without_their_controller_and_go_on_with_another(endpoint: ReplicaSet) -> None:
    await endpoint.administer("canary", version=2, percent=100)
    endpoint.controller_away = True
    assert await everywhere(endpoint) == {2: 120}
    [replica, *_] = endpoint.replicas.values()
    refused = await ask(replica, "GET", "/shoal/v1/status")
    assert (refused.status, refused.headers[b"retry-after"]) == (503, b"1")
    endpoint.restart_controller()
    endpoint.controller_away = False
    assert endpoint.phase() == "canary"
    await endpoint.administer("promote")
    assert endpoint.versions() == [2, 2, 2]
    assert endpoint.kinds() == ["deploy", "canary", "promote"]


@rollout(1)
async def test_models_are_loaded_and_unloaded_on_every_replica(endpoint: ReplicaSet) -> None:
    register("other")
    [replica, *_] = endpoint.replicas.values()
    loaded = await ask(replica, "POST", "/v2/repository/models/other/load", {})
    assert (loaded.status, loaded.body) == (200, {})
    for each in endpoint.replicas.values():
        assert (await infer(each, "other")).version == 1
    index = (await ask(replica, "POST", "/v2/repository/index", {})).body
    assert [(entry["name"], entry["state"]) for entry in index] == [("linear", "READY"), ("other", "READY")]
    assert (await ask(replica, "POST", "/v2/repository/models/other/unload", {})).status == 200
    for each in endpoint.replicas.values():
        assert (await infer(each, "other")).status == 404
        assert (await infer(each)).version == 1
    assert (await ask(replica, "POST", "/v2/repository/models/nobody/load", {})).status == 404
    assert (await ask(replica, "POST", "/v2/repository/models/nobody/unload", {})).status == 404
    assert endpoint.kinds() == ["deploy", "load", "delete"]


@rollout(1, replicas=1)
async def test_a_replica_stays_ready_while_another_model_loads(endpoint: ReplicaSet) -> None:
    [replica] = endpoint.replicas.values()
    register("slow")

    async def is_ready() -> tuple[int, int]:
        endpoint, slow = [await ask(replica, "GET", f"/v2/{each}/ready") for each in ("health", "models/slow")]
        return endpoint.status, slow.status

    with held_loads() as gate:
        loading = asyncio.create_task(endpoint.administer("deploy", "slow"))
        await until(lambda: "slow" in replica.manager._slots)
        assert await is_ready() == (200, 503)
        assert endpoint.status.describe_endpoint()["ready"]
        told = await ask(replica, "GET", "/v2/models/slow/ready")
        assert (told.status, told.body) == (503, {"error": "model 'slow' is loading; try again later"})
        gate.set()
        await loading
    assert await is_ready() == (200, 200)


async def test_a_replica_that_wakes_an_endpoint_says_why_it_cannot_load_the_model() -> None:
    register(aliases=("champion",))
    async with ReplicaSet("linear@1", scale={"min": 0, "max": 2}, show_errors=True) as endpoint:
        await endpoint.start()
        await endpoint.replicas.pop("r1").close()
        path = spoil(1)
        for _ in range(2):
            [waking] = await endpoint.start()
            answer = await infer(waking)
            assert (answer.status, answer.headers[b"retry-after"]) == (503, b"1")
            assert "'linear' cannot be loaded: WeightsError: weights version 1 cannot be read" in answer.body["error"]
            await until(lambda: endpoint.status.describe_endpoint()["replicas"][0]["error"])
            assert (waking.manager.is_ready, "cannot be read" in waking.start_error) == (False, True)
            await endpoint.replicas.pop("r1").close()
        assert endpoint.kinds() == ["deploy", "load_failure"]
        os.rename(path.with_suffix(".kept"), path)
        assert (await infer((await endpoint.start())[0])).version == 1


@rollout(1)
async def test_a_version_with_other_tensors_is_not_taken(endpoint: ReplicaSet) -> None:
    register(signature=TWICE)
    with pytest.raises(InferenceError, match=r"other tensors .*\(not alike: y, z\)"):
        await endpoint.administer("deploy", version=2)
    assert endpoint.versions() == [1, 1, 1]


REFUSED: list[tuple[int, str, dict[str, Any]]] = [
    (400, "action", {"action": "destroy", "model": "linear"}),
    (400, "percent", {"action": "canary", "model": "linear", "version": 2, "percent": 101}),
    (400, "percent", {"action": "canary", "model": "linear", "version": 2}),
    (400, "name", {"action": "deploy", "model": "../etc"}),
    (400, "name it once", {"action": "deploy", "model": "linear@1", "version": 2}),
    (400, "metric", {"action": "metric", "model": "linear"}),
    (404, "there is no model 'x'", {"action": "canary", "model": "x", "version": 2, "percent": 1}),
    (404, "has no '9'", {"action": "canary", "model": "linear", "version": 9, "percent": 1}),
    (409, "stable one already", {"action": "canary", "model": "linear", "version": 1, "percent": 1}),
    (409, "no open candidate", {"action": "promote", "model": "linear"}),
    (409, "no open candidate", {"action": "metric", "model": "linear", "metric": "m", "value": 1}),
    (409, "no version to go back to", {"action": "rollback", "model": "linear"}),
]


@rollout(1, 2, replicas=1)
async def test_what_cannot_be_done_is_refused_in_words(endpoint: ReplicaSet) -> None:
    for status, word, change in REFUSED:
        with refused(status, word):
            await endpoint.administer(**change)
        assert endpoint.kinds() == ["deploy"]


async def test_a_replica_that_hangs_while_it_stages_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    register()
    release = threading.Event()
    async with serving_one("linear@1", stage_timeout_s=2.0) as (endpoint, replica):
        monkeypatch.setattr("shoal.serve.replica.model_manager.MAX_STAGING_S", 0.05)
        replica.check_health()
        monkeypatch.setattr(RegisteredModel, "load_package", lambda source, version: release.wait(60))
        with pytest.raises(InferenceError, match="had not staged version 2 after"):
            await endpoint.administer("deploy", version=2)
        with pytest.raises(ShoalError, match="has been loading for"):
            replica.check_health()
        assert (await infer(replica)).version == 1
        release.set()


# -- options of a running model change by a roll-out: everywhere or nowhere, and without a failed request


def max_rows(endpoint: ReplicaSet) -> list[int]:
    return [replica.manager.get_model("linear").options.max_batch_size for replica in endpoint.replicas.values()]


@rollout(1, replicas=2)
async def test_options_change_everywhere_without_a_failed_request(endpoint: ReplicaSet) -> None:
    answered = 0

    async def keep_asking() -> None:
        nonlocal answered
        while True:
            for replica in endpoint.replicas.values():
                assert (await infer(replica)).version == 1
                answered += 1

    asking = asyncio.create_task(keep_asking())
    await until(lambda: answered > 10)
    status = await endpoint.administer(
        "set", options={"max_batch_size": 2, "guard": {"min_requests": 7}}, reason="small"
    )
    await until(lambda then=answered: answered > then + 10)
    asking.cancel()
    await asyncio.wait([asking])
    assert asking.cancelled(), "a request failed"
    assert max_rows(endpoint) == [2, 2]
    assert (status["stable"], status["max_batch_rows"], status["phase"]) == (1, 2, "steady")
    event = endpoint.controller.state.events[-1]
    assert (event.kind, event.version, event.previous, event.by) == ("set", 1, 1, "tester")
    assert event.reason == "small (max_batch_size=2, guard.min_requests=7)"
    counts = [
        replica.manager.get_model("linear").counts.snapshot().versions[1] for replica in endpoint.replicas.values()
    ]
    assert sum(each.statuses[200] for each in counts) >= answered  # they go on
    assert [(await infer(each, rows=3)).status for each in endpoint.replicas.values()] == [422, 422]
    assert await everywhere(endpoint, 4) == {1: 8}


@rollout(1, 2, replicas=2)
async def test_options_that_one_replica_cannot_serve_are_taken_by_none(endpoint: ReplicaSet) -> None:
    change = {"action": "set", "model": "linear", "options": {"preprocess": "shoal.no_module:function"}}
    with refused(409, r"version 1 of 'linear' was not taken: .*no_module"):
        await endpoint.administer(**change)
    assert endpoint.controller.state.models["linear"].deployment.options["preprocess"] is None
    assert [replica.manager.find_startup_error() for replica in endpoint.replicas.values()] == ["", ""]  # they answer
    assert await everywhere(endpoint, 4) == {1: 8}
    await endpoint.administer("set", options={"max_batch_size": 4})  # nothing is in its way
    assert max_rows(endpoint) == [4, 4]
    await endpoint.administer("deploy", version=2)
    assert (endpoint.versions(), max_rows(endpoint)) == ([2, 2], [4, 4])


@rollout(1, 2, replicas=2)
async def test_a_version_is_deployed_with_other_options(endpoint: ReplicaSet) -> None:
    await endpoint.administer("deploy", version=2, options={"max_batch_size": 2})
    assert (endpoint.versions(), max_rows(endpoint)) == ([2, 2], [2, 2])
    await endpoint.administer("rollback")
    assert (endpoint.versions(), max_rows(endpoint)) == ([1, 1], [2, 2])


@rollout(1, replicas=1)
async def test_a_replica_and_a_controller_that_start_meanwhile_have_the_new_options(endpoint: ReplicaSet) -> None:
    with held_loads() as gate:
        change = {"action": "set", "model": "linear", "options": {"max_batch_size": 2}}
        changing = asyncio.create_task(endpoint.administer(**change))
        await until(lambda: endpoint.phase() == "staging")
        late = endpoint.add("late")
        endpoint.restart_controller()
        assert endpoint.phase() == "staging"
        assert (await infer(endpoint.replicas["r1"], rows=3)).status == 200  # as before
        gate.set()
        await until(lambda: endpoint.phase() == "steady")
        await late.start(60.0)
        await until(lambda: max_rows(endpoint) == [2, 2])
        assert endpoint.controller.state.models["linear"].deployment.options["max_batch_size"] == 2
        changing.cancel()
        await asyncio.wait([changing])


@rollout(1, 2, replicas=1)
async def test_what_set_cannot_do_is_refused_by_name(endpoint: ReplicaSet) -> None:
    refused = {
        "there is no model 'nobody'": {"model": "nobody", "options": {"max_batch_size": 2}},
        "set needs options": {"model": "linear"},
        "and no version": {"model": "linear@2", "options": {"max_batch_size": 2}},
        "options.max_batch_size = -1": {"model": "linear", "options": {"max_batch_size": -1}},
    }
    for words, change in refused.items():
        with pytest.raises(InferenceError, match=words):
            await endpoint.administer("set", **change)
    await endpoint.administer("canary", version=2, percent=10)
    with pytest.raises(InferenceError, match="promote it or roll it back first"):
        await endpoint.administer("set", options={"max_batch_size": 2})
    [replica] = endpoint.replicas.values()
    path, change = "/shoal/v1/rollout", {"action": "set", "model": "linear", "options": {"odd": 1}}
    assert (await ask(replica, "POST", path, change)).status == 400


@rollout(1, 2, replicas=1)
async def test_another_version_is_deployed_while_one_loads_with_the_same_options(endpoint: ReplicaSet) -> None:
    options = {"max_batch_size": 2}
    with held_loads() as gate:
        setting = asyncio.create_task(endpoint.administer("set", options=options))
        await until(lambda: endpoint.phase() == "staging")
        await endpoint.administer("rollback")
        with pytest.raises(InferenceError, match="was not taken: asked for"):
            await setting
        deploying = asyncio.create_task(endpoint.administer("deploy", version=2, options=options, timeout_s=30))
        await until(lambda: endpoint.phase() == "staging")
        gate.set()
        await deploying
    assert (endpoint.versions(), max_rows(endpoint)) == ([2], [2])


async def test_a_model_that_never_answered_is_deployed_with_other_options() -> None:
    """One replica has its version already, under the former options."""
    register()
    async with ReplicaSet("linear@1") as endpoint:
        first = endpoint.add()
        await until(lambda: first.manager.list_models())
        model = endpoint.controller.state.models["linear"]
        model.rollout = Rollout(attempt=model.rollout.attempt, refused=1, reason="another replica could not")
        endpoint.controller.store.commit()
        await until(lambda: not first.manager.get_model("linear").versions)
        await endpoint.administer("deploy", options={"max_batch_size": 2}, timeout_s=30)
        assert (endpoint.versions(), max_rows(endpoint)) == ([1], [2])


@rollout(1, replicas=1)
async def test_a_request_whose_body_arrives_after_a_change_is_answered(endpoint: ReplicaSet) -> None:
    """Its protocol has found the model before; that one has closed meanwhile."""
    [replica] = endpoint.replicas.values()
    before = replica.manager.get_model("linear")
    await endpoint.administer("set", options={"max_batch_size": 2})
    await until(lambda: before._queue.closed)
    answer = await before.infer(InferCall({"x": np.zeros((1, 3), np.float32)}, 1))
    assert answer.outputs["y"].tolist() == [[1.0, 1.0]]
    with pytest.raises(InferenceError, match="1 to 2 rows"):
        await before.infer(InferCall({"x": np.zeros((3, 3), np.float32)}, 3))


def test_a_change_undoes_the_dimension_of_a_batch() -> None:
    before = parse_options({"batch_dim": {"state": 1, "rate": None}}, {})
    assert parse_options({"batch_dim": {"state": 0}}, before)["batch_dim"] == {"rate": None}
    assert parse_options({"max_batch_size": 0, "batch_dim": {"state": 0, "rate": 0}}, before)["batch_dim"] == {}
    with pytest.raises(InferenceError, match=r"\(batch_dim=\{state: 0, rate: 0\} undoes it\)"):
        parse_options({"max_batch_size": 0}, before)
