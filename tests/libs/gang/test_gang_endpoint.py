"""What an endpoint whose models several workers share may be, and what its replicas reserve."""
# Models of format onnx, torch_export and torchscript are opened by shoal.libs.export.

from __future__ import annotations

from typing import Any

import gang_models
import pytest

from shoal.errors import ConfigError
from shoal.registry import ModelFactory, Registry
from shoal.serve.controller.config import build_controller_config
from shoal.serve.on_ray.options import deployment_options
from shoal.serve.spec.endpoint import EndpointSpec
from shoal.serve.spec.model_source import EndpointModel, LiveModel, model_from_ref
from shoal.weights import WeightSnapshot, WeightStore


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"num_workers": 2, "num_gpus": 1}, "num_gpus"),
        ({"num_workers": 2, "model": {"device": "cuda"}}, "device: cuda"),
        ({"num_workers": 2, "memory": "1GiB"}, "leave out memory"),
        ({"num_workers": 2, "num_cpus": 0}, "num_cpus is above 0"),
        ({"num_workers": 2, "models": {"m": {"precision": "int8"}}}, "models.m.precision"),
        ({"num_workers": 2, "model": {"compile": True}}, "model.compile"),
        ({"num_workers": 2, "parallel": "fsdp"}, "parallel"),
    ],
)
def test_what_workers_cannot_share_is_rejected(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        EndpointSpec.parse({"name": "m", **values})


def test_workers_reserve_bundles_and_the_replica_nothing() -> None:
    options = deployment_options(EndpointSpec(name="m", num_workers=3, num_cpus=2.0))
    assert options["placement_group_bundles"] == [{"CPU": 2.0}] * 3
    assert options["ray_actor_options"] == {"num_cpus": 0.0}
    assert "placement_group_bundles" not in deployment_options(EndpointSpec(name="m"))


def test_models_that_cannot_be_split_are_rejected_before_a_replica_starts() -> None:
    spec, signature = EndpointSpec(name="m", num_workers=2), gang_models.SIGNATURES["ConvNet"]
    live = LiveModel(ModelFactory(factory="gang_models:ConvNet"), signature, WeightStore())
    with pytest.raises(ConfigError, match="'live' follows a run"):
        build_controller_config(spec, [EndpointModel("live", live)])
    Registry().register(
        "file", WeightSnapshot.from_payload(1, b"file"), model=ModelFactory(format="onnx"), signature=signature
    )
    with pytest.raises(ConfigError, match="'file' is of format onnx"):
        build_controller_config(spec, [model_from_ref("file@champion")])
