"""What `serve deploy` builds from a file's `args`, and what Serve is told of gRPC. No cluster here."""

import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from registered import register
from shoal.cluster.embedded_cluster import EmbeddedCluster
from shoal.errors import ConfigError, ConnectionLost, InferenceError, RegistryError
from shoal.ray_call import NAMESPACE
from shoal.registry import Registry
from shoal.serve.controller.config import ControllerConfig
from shoal.serve.controller.service import ControllerService
from shoal.serve.controller.state import Deployment
from shoal.serve.messages.replica_report import ReplicaReport
from shoal.serve.on_ray.controller_actor import RayControllerClient, RemoteMethod
from shoal.serve.on_ray.serve_app import build
from shoal.serve.scaling.policy import ReplicaLoad
from shoal.serve.scaling.replica_counts import encode
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_options import ModelOptions
from waiting import wait_for

REPLICA = ReplicaID("r", DeploymentID(name="replica", app_name="m"))


@pytest.fixture
def model() -> str:
    if not Registry().has("built"):
        register("built", aliases=("champion",))
    return "built@champion"


def options(**endpoint: Any) -> Any:
    app = build({"models": ["built@champion"], "endpoint": endpoint})
    return app._bound_deployment


def test_a_fixed_number_of_replicas_whose_queues_serve_does_not_cut_short(model: str) -> None:
    deployment = options(num_replicas=2, model={"max_batch_size": 8, "max_queue_size": 100})
    assert deployment.num_replicas == 2
    assert deployment.max_ongoing_requests > 108
    assert deployment.ray_actor_options["num_cpus"] == 0.5


def test_replicas_follow_what_they_count_themselves(model: str) -> None:
    scaling = options(scale={"max": 3}, model={"deadline_s": 0.2})._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 3)
    policy = scaling.policy.get_policy()(**scaling.policy.policy_kwargs)

    def decide(now_s: float, requests: float, waiting: float) -> int:
        """Serve's own wrapper around the policy, with what one replica's newest report says."""
        numbers = encode(ReplicaLoad(requests, waiting, 0.0, ((1, 0.01), (8, 0.08))))
        series = {
            name: {REPLICA: [TimeStampedValue(0.0, -1.0), TimeStampedValue(now_s, value)]}
            for name, value in numbers.items()
        }
        context = AutoscalingContext(
            deployment_id=REPLICA.deployment_id,
            deployment_name="replica",
            app_name="m",
            current_num_replicas=1,
            target_num_replicas=1,
            running_replicas=[REPLICA],
            total_num_requests=0.0,  # requests bypass Serve
            total_queued_requests=0.0,
            aggregated_metrics=None,
            raw_metrics=series,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=3,
            policy_state={},
            last_scale_up_time=None,
            last_scale_down_time=None,
            current_time=now_s,
            config=scaling,
        )
        return _apply_autoscaling_config(policy)(context)[0]

    assert [decide(1000.0 + second, 20.0 * second, 0.0) for second in range(5)] == [1] * 5
    assert decide(1004.5, 1000.0, 50.0) == 1  # once a second
    assert decide(1005.0, 1000.0, 50.0) == 3


@pytest.mark.parametrize(
    ("error", "word", "args"),
    [
        (ConfigError, "models", {"models": []}),
        (ConfigError, "no such field", {"models": ["built"], "endpoint": {"replicas": 2}}),
        (RegistryError, "no model 'absent'", {"models": ["absent@1"]}),
        (ConfigError, "use `shoal serve deploy`", {"models": ["built"], "endpoint": {"ingress": "every_node"}}),
    ],
)
def test_what_cannot_be_served_is_refused(model: str, error: type[Exception], word: str, args: dict[str, Any]) -> None:
    with pytest.raises(error, match=word):
        build(args)


def test_every_process_that_gets_the_options_listens_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """On their way to Serve's fallback proxy, where nothing else of ours runs, they are copied and pickled."""
    from ray import cloudpickle
    from ray.serve._private.grpc_util import set_proxy_default_grpc_options

    from shoal.serve.on_ray import bind_address as ray_grpc

    called: list[bool] = []
    monkeypatch.setattr(ray_grpc, "patch_bind_addresses", lambda: called.append(True))
    options: Any = ray_grpc.grpc_options(5)
    for hops in (1, 2):
        options = cloudpickle.loads(cloudpickle.dumps(set_proxy_default_grpc_options(options)))
        assert len(called) == hops
    assert options.port == 5
    assert not options.enable_reflection


# -- the controller as an actor: when it is made and ends, and how replicas learn of what fails in it

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


def test_the_client_of_a_controller_calls_methods_that_the_controller_has() -> None:
    methods = [each.name for each in vars(RayControllerClient).values() if isinstance(each, RemoteMethod)]
    assert {"follow", "status", "fetch_weights"} < {*methods}
    assert all(inspect.iscoroutinefunction(vars(ControllerService).get(each)) for each in (*methods, "report"))
