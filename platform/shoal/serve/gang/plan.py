"""How a model is split between the workers of a replica: by training's own plans, found without the weights.

Called by `template` in the replica, which sends the plan to the workers. The model is built with parameters that have
no memory; the plan is found on an example, as training finds it on a batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.batch_tree import tensors_of
from shoal.errors import ConfigError
from shoal.parallel.loss import Loss
from shoal.parallel.pipeline.partition import StagePartition, find_partition
from shoal.parallel.state.skeleton import build_skeleton, make_constant, set_parameters
from shoal.parallel.tensor.plan import TensorPlan, find_tensor_plan
from shoal.registry.manifest import ModelFactory
from shoal.serve.spec.endpoint import GangSplit

WEIGHT = 0.02  # of every parameter: sums are finite, and not zero


@dataclass(frozen=True)
class GangPlan:
    """One of the two, for `num_workers`."""

    num_workers: int
    stages: StagePartition | None = None
    layers: TensorPlan | None = None


class _Example:
    """A plan's view of a model that answers: the example is its batch, and any use of an output counts as its loss."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        self._inputs = tuple(inputs)

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return self._inputs

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        found = [each.double().mean() for each in tensors_of(outputs) if each.is_floating_point()]
        return torch.stack(found).sum()

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Loss]:
        return {}

    def tensor_plan(self) -> dict[str, str] | None:
        return None

    def pipeline_cuts(self) -> list[str] | None:
        return None


def build_model(factory: ModelFactory) -> nn.Module:
    """Build the model without its parameters. Raises ConfigError."""

    def build() -> nn.Module:
        module = factory.build()
        if not isinstance(module, nn.Module) or callable(getattr(module, "predict", None)):
            problem = "gives no nn.Module that is called by its forward, as workers that share a model need"
            raise ConfigError("model.factory", factory.factory, problem, "serve it with num_workers=1")
        return module

    return build_skeleton(build)


def find_plan(factory: ModelFactory, example: Mapping[str, np.ndarray], split: GangSplit, num_workers: int) -> GangPlan:
    """Find the plan. Raises PlanError, ConfigError; and the model's own error on the example.

    example: inputs in the model's order and shapes
    """
    model = build_model(factory)
    set_parameters(model, {name: make_constant(each, WEIGHT) for name, each in model.named_parameters()})
    learnable = _Example([torch.from_numpy(each) if each.dtype != object else each for each in example.values()])
    if split == "tensor":
        return GangPlan(num_workers, layers=find_tensor_plan(model, learnable, num_workers, ()))
    device = torch.device("cpu")
    return GangPlan(num_workers, find_partition(model, learnable, (), num_workers, device, has_weights=False))
