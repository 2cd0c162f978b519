"""A model that is deleted and deployed anew under its name: what is left of its last life is not taken for this one."""

from __future__ import annotations

import asyncio
import math
import threading

import pytest

from serving.replica_set import ReplicaSet, infer, register, until
from serving.test_replica_rollout import everywhere, rollout
from shoal.errors import InferenceError
from shoal.serve.replica.served_model import ServedModel
from shoal.serve.spec.model_options import GuardOptions
from shoal.serve.spec.model_source import RegisteredModel


@rollout(1)
async def test_a_replica_that_missed_a_deletion_serves_a_model_as_it_was_deployed_anew(endpoint: ReplicaSet) -> None:
    register("other")
    await endpoint.administer(action="deploy", model="other")
    cut_off = endpoint.replicas["r3"]
    endpoint.dead.add("r3")  # for longer than its lease, and back when all is done
    endpoint.controller._last_seen_s["r3"] = -math.inf
    cut_off._follower._apply = lambda plan: None  # also for what it has asked before
    await until(lambda: list(endpoint.controller.reports) == ["r1", "r2"])
    await endpoint.administer(action="delete", model="other")
    await endpoint.administer(action="deploy", model="other", options={"max_batch_size": 2})
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
    await endpoint.administer(action="deploy", model="other")
    release, load = threading.Event(), RegisteredModel.load_package
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedModel, "is_idle", property(lambda hosted: release.is_set()))
        with pytest.raises(InferenceError, match="still answering"):
            await endpoint.administer(action="delete", model="other", timeout_s=0.2)
        patch.setattr(
            RegisteredModel, "load_package", lambda source, version: release.wait(60) and load(source, version)
        )
        deploying = asyncio.create_task(endpoint.administer(action="deploy", model="other", timeout_s=0.5))
        with pytest.raises(InferenceError, match="was not ready after"):  # since no replica has it
            await deploying
        release.set()
    await endpoint.administer(action="deploy", model="other", options={"max_batch_size": 2})
    assert [(await infer(each, "other", rows=3)).status for each in endpoint.replicas.values()] == [422] * 2


@rollout(1, replicas=1, guard=GuardOptions(max_latency_ratio=5.0), max_batch_size=8)
async def test_options_of_one_model_leave_what_they_do_not_name_as_the_endpoint_has_it(endpoint: ReplicaSet) -> None:
    register("other")
    await endpoint.administer(action="deploy", model="other", options={"guard": {"min_requests": 10}})
    options = endpoint.replicas["r1"].manager.get_model("other").options
    assert (options.guard.min_requests, options.guard.max_latency_ratio, options.max_batch_size) == (10, 5.0, 8)
