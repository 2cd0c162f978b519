"""The controller as an actor: made by whoever needs it, gone when nobody does. How it dies is in test_serve."""

from pathlib import Path

import pytest
import ray

from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.errors import ConnectionLost, InferenceError
from shoal.ray_call import NAMESPACE
from shoal.serve.controller.config import ControllerConfig
from shoal.serve.controller.state import Deployment
from shoal.serve.on_ray.controller_actor import RayControllerClient
from shoal.serve.spec.model_options import ModelOptions
from waiting import wait_for

STATE_TIMEOUT_S = 400.0


def is_there(setting: ControllerConfig) -> bool:
    try:
        ray.get_actor(setting.actor_name, NAMESPACE)
    except ValueError:
        return False
    return True


def test_whoever_asks_finds_the_same_one_until_nobody_asks(cluster: EmbeddedCluster, tmp_path: Path) -> None:
    options = ModelOptions().model_dump(mode="json")
    model = Deployment("live", "", "", options)
    setting = ControllerConfig("e", "1", (model,), tmp_path / "endpoints", str(tmp_path), {"": options}, idle_s=1.0)
    first, second = RayControllerClient(setting), RayControllerClient(setting)
    assert first.call_blocking("pid") == second.call_blocking("pid")
    plan = first.call_blocking("follow", "r1", -1, 0.0)
    assert [each.name for each in plan.models] == ["live"]
    with pytest.raises(InferenceError, match="there is no model 'x'") as caught:
        second.call_blocking("administer", {"action": "delete", "model": "x"}, "me")
    assert caught.value.status == 404
    wait_for(lambda: not is_there(setting), STATE_TIMEOUT_S, "end of the idle controller")
    with pytest.raises(ConnectionLost):
        first.call_blocking("status")
    assert first.call_blocking("status")["models"][0]["name"] == "live"  # a new one, which goes on from its file
    first.stop()
    first.stop()
    wait_for(lambda: not is_there(setting), STATE_TIMEOUT_S, "end of the controller")
    assert not list((tmp_path / "endpoints").glob("*.json"))
