"""Options of a running model change by a roll-out: everywhere or nowhere, and without a failed request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from serving.replica_set import ReplicaSet, ask, held_loads, infer, register, until
from serving.test_replica_rollout import everywhere, rollout
from shoal.errors import InferenceError
from shoal.serve.controller.change_request import parse_options
from shoal.serve.controller.rollout import Rollout
from shoal.serve.messages.infer_call import InferCall
from shoal.serve.spec.model_source import model_from_ref


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
        action="set", model="linear", options={"max_batch_size": 2, "guard": {"min_requests": 7}}, reason="small"
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
    with pytest.raises(InferenceError, match=r"version 1 of 'linear' was not taken: .*no_module") as caught:
        await endpoint.administer(**change)
    assert caught.value.status == 409
    assert endpoint.controller.state.models["linear"].deployment.options["preprocess"] is None
    assert [replica.manager.find_startup_error() for replica in endpoint.replicas.values()] == ["", ""]  # they answer
    assert await everywhere(endpoint, 4) == {1: 8}
    await endpoint.administer(action="set", model="linear", options={"max_batch_size": 4})  # nothing is in its way
    assert max_rows(endpoint) == [4, 4]
    await endpoint.administer(action="deploy", model="linear", version=2)
    assert (endpoint.versions(), max_rows(endpoint)) == ([2, 2], [4, 4])


@rollout(1, 2, replicas=2)
async def test_a_version_is_deployed_with_other_options(endpoint: ReplicaSet) -> None:
    await endpoint.administer(action="deploy", model="linear", version=2, options={"max_batch_size": 2})
    assert (endpoint.versions(), max_rows(endpoint)) == ([2, 2], [2, 2])
    await endpoint.administer(action="rollback", model="linear")
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
            await endpoint.administer(action="set", **change)
    await endpoint.administer(action="canary", model="linear", version=2, percent=10)
    with pytest.raises(InferenceError, match="promote it or roll it back first"):
        await endpoint.administer(action="set", model="linear", options={"max_batch_size": 2})
    [replica] = endpoint.replicas.values()
    path, change = "/shoal/v1/rollout", {"action": "set", "model": "linear", "options": {"odd": 1}}
    assert (await ask(replica, "POST", path, change)).status == 400


@rollout(1, 2, replicas=1)
async def test_another_version_is_deployed_while_one_loads_with_the_same_options(endpoint: ReplicaSet) -> None:
    options = {"max_batch_size": 2}
    with held_loads() as gate:
        setting = asyncio.create_task(endpoint.administer(action="set", model="linear", options=options))
        await until(lambda: endpoint.phase() == "staging")
        await endpoint.administer(action="rollback", model="linear")
        with pytest.raises(InferenceError, match="was not taken: asked for"):
            await setting
        deploying = asyncio.create_task(
            endpoint.administer(action="deploy", model="linear", version=2, options=options, timeout_s=30)
        )
        await until(lambda: endpoint.phase() == "staging")
        gate.set()
        await deploying
    assert (endpoint.versions(), max_rows(endpoint)) == ([2], [2])


async def test_a_model_that_never_answered_is_deployed_with_other_options() -> None:
    """One replica has its version already, under the former options."""
    register()
    async with ReplicaSet(model_from_ref("linear@1")) as endpoint:
        first = endpoint.add()
        await until(lambda: first.manager.list_models())
        model = endpoint.controller.state.models["linear"]
        model.rollout = Rollout(attempt=model.rollout.attempt, refused=1, reason="another replica could not")
        endpoint.controller.store.commit()
        await until(lambda: not first.manager.get_model("linear").versions)
        await endpoint.administer(action="deploy", model="linear", options={"max_batch_size": 2}, timeout_s=30)
        assert (endpoint.versions(), max_rows(endpoint)) == ([1], [2])


@rollout(1, replicas=1)
async def test_a_request_whose_body_arrives_after_a_change_is_answered(endpoint: ReplicaSet) -> None:
    """Its protocol has found the model before; that one has closed meanwhile."""
    [replica] = endpoint.replicas.values()
    before = replica.manager.get_model("linear")
    await endpoint.administer(action="set", model="linear", options={"max_batch_size": 2})
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
