"""How a model is split between the workers of a replica: by training's own plans, found without the weights.

Called by `template` in the replica, which sends the plan to the workers. The model is built with parameters that have
no memory; the plan is found on an example, as training finds it on a batch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.batch_tree import tensors_of
from shoal.errors import ConfigError, PlanError, ShoalError, summarize_error
from shoal.libs.gang.stages import check_stages
from shoal.parallel.loss import Loss
from shoal.parallel.pipeline.partition import StagePartition, find_partition
from shoal.parallel.state.skeleton import build_skeleton, make_constant, set_parameters
from shoal.parallel.tensor.plan import TensorPlan, find_tensor_plan
from shoal.registry.manifest import ModelFactory
from shoal.serve.model.formats.template import Arrays
from shoal.serve.model.formats.torch_forward import to_tensor
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

    def __init__(self, inputs: tuple[Any, ...], needs_gradient: bool) -> None:
        self._inputs, self._needs_gradient = inputs, needs_gradient

    def inputs(self, batch: Any) -> tuple[Any, ...]:
        return self._inputs

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        found = [each.double().mean() for each in tensors_of(outputs) if each.is_floating_point()]
        if not found or (self._needs_gradient and torch.is_grad_enabled() and not any(e.requires_grad for e in found)):
            problem = "a plan follows the gradients of floating-point outputs, and the model gives none that has one"
            remedy = "let it return floats too, such as its logits, without torch.no_grad; or use num_workers=1"
            raise PlanError("parallel", "outputs", problem, remedy)
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


def to_inputs(arrays: Arrays, bf16: Collection[str]) -> tuple[Any, ...]:
    """A model's inputs as it gets them; those of BYTES stay arrays.

    bf16: the names of those that are bits of bfloat16
    """
    inputs = {name: to_tensor(array, copies=False) for name, array in arrays.items()}
    return tuple(each.view(torch.bfloat16) if name in bf16 else each for name, each in inputs.items())


def find_plan(
    factory: ModelFactory, example: Arrays, split: GangSplit, num_workers: int, bf16: Collection[str] = ()
) -> GangPlan:
    """Find the plan. Raises PlanError, also when the model fails on the example; and ConfigError.

    example: inputs in the model's order and shapes
    bf16:    the names of those that are bits of bfloat16
    """
    model = build_model(factory)
    set_parameters(model, {name: make_constant(each, WEIGHT) for name, each in model.named_parameters()})
    learnable = _Example(to_inputs(example, bf16), split == "pipeline")
    try:
        return _find_plan(model, learnable, split, num_workers)
    except ShoalError:
        raise
    except Exception as error:  # any error of the user's module
        shapes = ", ".join(f"{name} {list(array.shape)}" for name, array in example.items())
        problem = f"the model fails on the example ({shapes}) on which its plan is found: {summarize_error(error)}"
        remedy = "give its signature the sizes that it takes, in place of -1; or use num_workers=1"
        raise PlanError("parallel", split, problem, remedy) from error


def _find_plan(model: nn.Module, learnable: _Example, split: GangSplit, num_workers: int) -> GangPlan:
    if split == "tensor":
        return GangPlan(num_workers, layers=find_tensor_plan(model, learnable, num_workers, ()))
    stages = find_partition(model, learnable, (), num_workers, torch.device("cpu"), has_weights=False)
    check_stages(model, stages, learnable.inputs(()), WEIGHT)
    return GangPlan(num_workers, stages)
