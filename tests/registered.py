"""Models of tests, and their versions in the registry of the test."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.registry import ModelFactory, ModelVersion, Registry, Signature, TensorSignature
from shoal.weights import WeightSnapshot


def tensors(**named: list[int] | tuple[str, list[int]]) -> list[TensorSignature]:
    """`tensors(x=[-1, 3], ids=("INT64", [-1]))`: FP32 where no datatype is given."""
    typed = {name: each if isinstance(each, tuple) else ("FP32", each) for name, each in named.items()}
    return [TensorSignature(name=name, datatype=datatype, shape=shape) for name, (datatype, shape) in typed.items()]


LINEAR = ModelFactory(factory="torch.nn:Linear", kwargs={"in_features": 3, "out_features": 2})
SIGNATURE = Signature(inputs=tensors(x=[-1, 3]), outputs=tensors(y=[-1, 2]))


def constant(version: int) -> WeightSnapshot:
    """Of LINEAR: every output is the version."""
    return WeightSnapshot.of(version, {"weight": np.zeros((2, 3), np.float32), "bias": np.full(2, version, np.float32)})


def arrays_of(network: Any) -> dict[str, np.ndarray]:
    """Its weights by name: views."""
    return {name: each.detach().numpy() for name, each in network.state_dict().items()}


def register(
    name: str = "linear", *, aliases: Sequence[str] = (), signature: Signature = SIGNATURE, **facts: Any
) -> ModelVersion:
    """The next version of a model whose answers are its version. facts: `run_id`, `lineage`, ..."""
    registry = Registry()
    version = len(registry.list(name)) + 1 if registry.has(name) else 1
    return registry.register(name, constant(version), model=LINEAR, signature=signature, aliases=aliases, **facts)
