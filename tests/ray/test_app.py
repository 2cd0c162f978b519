"""What `serve deploy` builds from a file's `args`, and what Serve is told of gRPC. No cluster here."""

from typing import Any

import pytest
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.autoscaling_policy import _apply_autoscaling_config
from ray.serve.config import AutoscalingContext

from registered import register
from shoal.errors import ConfigError, RegistryError
from shoal.registry import Registry
from shoal.serve.on_ray.serve_app import build
from shoal.serve.scaling import ReplicaLoad, encode

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
