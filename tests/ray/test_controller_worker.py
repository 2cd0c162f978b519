"""The controller as an actor: when it is made and ends, and how replicas learn of what fails in it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray

from refusals import refused
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.errors import ConnectionLost, InferenceError
from shoal.ray_call import NAMESPACE
from shoal.serve.controller.config import ControllerConfig
from shoal.serve.controller.service import ControllerService
from shoal.serve.controller.state import Deployment
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.on_ray.controller_actor import RayControllerClient, RemoteMethod
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
from waiting import wait_for

STATE_TIMEOUT_S = 400.0
SPEC = EndpointSpec(name="e")


def is_there(setting: ControllerConfig) -> bool:
    try:
        ray.get_actor(setting.actor_name, NAMESPACE)
    except ValueError:
        return False
    return True


def test_whoever_asks_finds_the_same_one_until_nobody_asks(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    options = ModelOptions().model_dump(mode="json")
    model = Deployment("live", "", "", options)
    setting = ControllerConfig(SPEC, "1", (model,), tmp_path / "endpoints", str(tmp_path), idle_s=1.0)
    first, second = RayControllerClient(setting), RayControllerClient(setting)
    assert first.call_blocking("pid") == second.call_blocking("pid")
    plan = first.call_blocking("follow", "r1", -1, 0.0)
    assert [each.name for each in plan.models] == ["live"]
    with refused(404, "there is no model 'x'"):
        second.call_blocking("administer", {"action": "delete", "model": "x"}, "me")
    wait_for(lambda: not is_there(setting), STATE_TIMEOUT_S, "end of the idle controller")
    with pytest.raises(ConnectionLost):
        first.call_blocking("status")
    assert first.call_blocking("status")["models"][0]["name"] == "live"  # a new one, which goes on from its file
    first.stop()
    first.stop()
    wait_for(lambda: not is_there(setting), STATE_TIMEOUT_S, "end of the controller")
    assert not list((tmp_path / "endpoints").glob("*.json"))


class FailingActor:
    """An actor's handle: every call of a method ends with its error, which was raised in the actor."""

    def __init__(self, **errors: Exception) -> None:
        self.call, self._errors = self, errors
        self.report = SimpleNamespace(remote=lambda encoded: self.remote("report"))

    async def remote(self, method: str, *arguments: object) -> None:
        from ray.exceptions import RayTaskError

        raise RayTaskError("method", "the traceback", self._errors[method]).as_instanceof_cause()


def test_what_fails_in_the_controller_stops_no_replica_and_is_told_to_people(tmp_path: Path) -> None:
    full, no = OSError("the disk is full"), InferenceError(409, "no")
    controller = RayControllerClient(ControllerConfig(SPEC, "1", (), tmp_path, str(tmp_path)))
    controller._handle = FailingActor(report=full, status=full, administer=no)
    with pytest.raises(ConnectionLost, match=r"the controller of 'e' failed: .*the disk is full"):
        asyncio.run(controller.report(ReplicaReport("r1")))
    with pytest.raises(OSError, match="the traceback"):
        asyncio.run(controller.status())
    with pytest.raises(InferenceError, match="no"):
        asyncio.run(controller.administer({}, "me"))


def test_the_client_of_a_controller_calls_methods_that_the_controller_has(tmp_path: Path) -> None:
    service = ControllerService(ControllerConfig(SPEC, "1", (), tmp_path, str(tmp_path)))
    methods = [each.name for each in vars(RayControllerClient).values() if isinstance(each, RemoteMethod)]
    assert {"follow", "status", "fetch_weights"} < {*methods}
    assert all(callable(getattr(service, each)) for each in (*methods, "report"))
