"""What `serve deploy` builds from a file's `args`; no cluster is needed to build it."""

from typing import Any

import numpy as np
import pytest

from shoal.errors import ConfigError, RegistryError
from shoal.registry import ModelFactory, Registry, Signature, TensorSignature
from shoal.serve.on_ray.serve_app import build
from shoal.weights import WeightSnapshot

TENSOR = TensorSignature(name="x", datatype="FP32", shape=[-1, 1])


@pytest.fixture
def model() -> str:
    registry = Registry()
    if not registry.has("built"):
        snapshot = WeightSnapshot.of(1, {"weight": np.zeros((1, 1), np.float32), "bias": np.zeros(1, np.float32)})
        factory = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 1, "out_features": 1})
        registry.register("built", snapshot, model=factory, signature=Signature(inputs=[TENSOR], outputs=[TENSOR]))
    return "built@champion"


def options(**endpoint: Any) -> Any:
    app = build({"models": ["built@champion"], "endpoint": endpoint})
    return app._bound_deployment


def test_a_fixed_number_of_replicas_whose_queues_serve_does_not_cut_short(model: str) -> None:
    deployment = options(num_replicas=2, model={"max_batch_size": 8, "max_queue_size": 100})
    assert deployment.num_replicas == 2
    assert deployment.max_ongoing_requests > 108
    assert deployment.ray_actor_options["num_cpus"] == 0.5


def test_replicas_follow_the_load_in_batches(model: str) -> None:
    scaling = options(num_replicas=1, max_replicas=3, model={"max_batch_size": 8})._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (1, 3, 16)
    assert scaling.upscale_delay_s < 10 < scaling.downscale_delay_s < 600


@pytest.mark.parametrize(
    ("error", "word", "args"),
    [
        (ConfigError, "models", {"models": []}),
        (ConfigError, "no such field", {"models": ["built"], "endpoint": {"replicas": 2}}),
        (ConfigError, "SHOAL_TOKEN", {"models": ["built"], "endpoint": {"token": "secret"}}),
        (ConfigError, "there twice", {"models": ["built", "built@1"]}),
        (RegistryError, "no model 'absent'", {"models": ["absent@1"]}),
    ],
)
def test_what_cannot_be_served_is_refused(model: str, error: type[Exception], word: str, args: dict[str, Any]) -> None:
    with pytest.raises(error, match=word):
        build(args)
