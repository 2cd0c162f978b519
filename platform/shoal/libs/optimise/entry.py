"""How the registry builds what this library registers: a student of the user's own, a network in another precision.

Named by the `factory` of a registered version, with everything needed in its `kwargs`. Knows no measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import safetensors.torch
import torch
from torch import Tensor, nn

from shoal.errors import ConfigError
from shoal.extend.registry import ModelFactory, find_callable, load_source
from shoal.extend.serve import PrecisionConverter
from shoal.weights import WeightFile, WeightSnapshot
from shoal.weights.tensor_files import read_tensors

Precision = Literal["fp32", "bf16", "int8"]


class Bf16Network(nn.Module):
    """A network whose forward runs in bfloat16 wherever autocast allows it; its layers hold their weights so."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, *inputs: Any) -> Any:
        device = next((each.device.type for each in inputs if isinstance(each, Tensor)), "cpu")
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            return self.network(*inputs)


def make_factory(network: ModelFactory, precision: Precision, teacher: ModelFactory) -> ModelFactory:
    """The factory of `network` in a precision, with the teacher's steps before and after it."""
    own = network.model_dump(include={"factory", "kwargs", "code"})
    return ModelFactory(
        factory=f"{__name__}:build", kwargs={"network": own, "precision": precision, **hook_kwargs(teacher)},
        action=teacher.action, **hook_references(teacher),
    )  # fmt: skip


def hook_references(teacher: ModelFactory) -> dict[str, Any]:
    """The fields of a factory that name the teacher's hooks, by way of this module."""
    return {name: f"{__name__}:{name}" if getattr(teacher, name) else "" for name in ("preprocess", "postprocess")}


def hook_kwargs(teacher: ModelFactory) -> dict[str, Any]:
    """What the hooks of this module take; {} where the teacher has none."""
    return {"hooks": teacher.model_dump()} if teacher.preprocess or teacher.postprocess else {}


def build_module(factory: ModelFactory) -> nn.Module:
    """A module of PyTorch's with fresh weights. Raises ConfigError."""
    module = factory.build()
    assert isinstance(module, nn.Module)
    return module


def build(network: Mapping[str, Any], precision: Precision, hooks: object = None) -> nn.Module:
    """A network with fresh weights. Raises ConfigError."""
    module = build_module(ModelFactory.parse(network))
    if precision != "fp32":
        PrecisionConverter(precision, module)
    return Bf16Network(module) if precision == "bf16" else module


def read_payload(snapshot: WeightSnapshot) -> bytes:
    """The weights as one file, in memory: those of several are joined. Raises WeightsError."""
    is_joined = isinstance(snapshot, WeightFile) and snapshot.has_index
    return safetensors.torch.save(read_tensors(snapshot)) if is_joined else snapshot.payload


def build_network(factory: ModelFactory, payload: bytes) -> nn.Module:
    """A module of the registry with its weights, frozen. Raises ConfigError."""
    network = build_module(factory)
    network.load_state_dict(safetensors.torch.load(payload))
    return network.eval().requires_grad_(False)


def build_student(source: str, reference: str, kwargs: Mapping[str, Any]) -> nn.Module:
    """An instance of the class of `file.py:Class`, whose text is `source`, or of an installed module's. Raises
    ConfigError."""
    name = reference.rpartition(":")[2]
    if source:
        factory = getattr(load_source(source, reference, "--student"), name, None)
        if factory is None:
            raise ConfigError("--student", reference, f"there is no {name!r} in it", "name a class of that file")
    else:
        factory = find_callable("--student", reference)
    try:
        module = factory(**kwargs)
    except Exception as error:  # user code may raise anything
        raise ConfigError("--student", reference, f"refuses {dict(kwargs)}: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ConfigError("--student", reference, f"gives a {type(module).__name__}", "name a torch.nn.Module")
    return module


def preprocess(hooks: Mapping[str, Any], **_: Any) -> Any:
    """The teacher's step before the network. Raises ConfigError."""
    return ModelFactory.parse(hooks).make_hook("preprocess")


def postprocess(hooks: Mapping[str, Any], **_: Any) -> Any:
    """The teacher's step after the network. Raises ConfigError."""
    return ModelFactory.parse(hooks).make_hook("postprocess")


def name_outputs(outputs: Any) -> dict[str, Any]:
    """The outputs of a network by name, as an endpoint names them."""
    if isinstance(outputs, Mapping):
        return dict(outputs)
    if isinstance(outputs, tuple | list):
        return {f"output_{index}": value for index, value in enumerate(outputs)}
    return {"output": outputs}
