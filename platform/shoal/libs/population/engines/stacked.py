"""Members as one more dimension: batched matrix products for chains of linear layers, torch.vmap for other models.

Called through MemberEngine, where the trial chose them. On a CPU they win for small networks and batches, on a GPU
nearly always; convolutions on a CPU lose (grouped convolutions are slow there).
Legend: k members of a chunk, B samples of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shoal.libs.population.engines.engine import DifferentiableEngine, EngineMisfit, Generators, Inputs, Tensors
from shoal.libs.population.engines.member_dropout import MemberDropout, replace_dropout
from shoal.libs.population.objective import Objective

# Layers that compute each number, or each sample's last dimensions, without parameters: as they are on [k, B, ...].
_POINTWISE: tuple[type[nn.Module], ...] = (
    *(nn.Identity, nn.ReLU, nn.LeakyReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Hardtanh, nn.ReLU6),
    *(nn.Tanh, nn.Sigmoid),
)


class VmapEngine(DifferentiableEngine):
    """torch.vmap of the model over the members."""

    name = "vmap"

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__(objective)
        self.model, self._dropout = replace_dropout(model)

    def forward(
        self, parameters: Tensors, buffers: Tensors, inputs: Inputs, *, is_own: bool, generators: Generators
    ) -> Any:
        self.model.train(generators is not None)
        self._dropout.generators = generators or ()

        def compute(tensors: dict[str, Tensor], member: Tensor, inputs: tuple[Any, ...]) -> Any:
            self._dropout.member = member
            return functional_call(self.model, tensors, inputs)

        device = next(iter(parameters.values())).device
        members = torch.arange(len(next(iter(parameters.values()))), device=device)
        # Rules of torch.vmap, such as batch norm's, change a copy of what is not contiguous.
        changed = (
            {name: each.data.contiguous() for name, each in buffers.items()} if generators is not None else buffers
        )
        outputs = torch.vmap(compute, (0, 0, 0 if is_own else None))({**parameters, **changed}, members, inputs)
        self._dropout.member = None
        if generators is not None:
            for name, each in changed.items():
                buffers[name].copy_(each)
        return outputs


class StackedEngine(DifferentiableEngine):
    """A chain of linear, pointwise, flatten, batch norm and dropout layers over [k, B, features].

    Linear layers are batched matrix products, without torch.vmap's cost of each operation. Raises EngineMisfit for
    other models.
    """

    name = "stacked"

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__(objective)
        self.model, self._dropout = replace_dropout(model)
        self._layers = list(_flatten_chain("", self.model))
        if not any(isinstance(layer, nn.Linear) for _, layer in self._layers):
            raise EngineMisfit("it has no linear layer")
        if len(dict(model.named_parameters())) != len(dict(model.named_parameters(remove_duplicate=False))):
            raise EngineMisfit("layers share weights")

    def forward(
        self, parameters: Tensors, buffers: Tensors, inputs: Inputs, *, is_own: bool, generators: Generators
    ) -> Any:
        is_training = generators is not None
        self.model.train(is_training)
        self._dropout.generators, self._dropout.member = generators or (), None
        tensors = {**parameters, **buffers}
        size = len(next(iter(parameters.values())))
        (activations,) = inputs
        if not is_own:
            activations = activations.expand(size, *activations.shape)
        for name, layer in self._layers:
            if isinstance(layer, nn.Linear):
                flat, weight = activations.flatten(1, -2), tensors[f"{name}weight"].mT  # between are any dimensions
                bias = tensors.get(f"{name}bias")
                product = torch.bmm(flat, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, weight)
                activations = product.view(*activations.shape[:-1], -1)
            elif isinstance(layer, nn.BatchNorm1d):
                own = {key.removeprefix(name): each for key, each in tensors.items() if key.startswith(name)}
                activations = _normalise(activations, layer, own)
            elif isinstance(layer, nn.Flatten):
                activations = activations.flatten(2)
            else:
                activations = layer(activations)
        return activations


def _flatten_chain(name: str, model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The layers of nested nn.Sequential with their prefixes. Raises EngineMisfit for a layer that is not supported."""
    if isinstance(model, nn.Sequential) and type(model).forward is nn.Sequential.forward:
        for part, child in model.named_children():
            yield from _flatten_chain(f"{name}{part}.", child)
    elif (
        type(model) in (nn.Linear, MemberDropout, *_POINTWISE)
        or (isinstance(model, nn.Flatten) and model.start_dim == 1 and model.end_dim == -1)
        or (type(model) is nn.BatchNorm1d and (model.momentum is not None or not model.track_running_stats))
    ):
        yield name, model
    else:
        raise EngineMisfit(
            f"{name.removesuffix('.') or 'the model'} is a {type(model).__name__}, not a layer of a chain"
        )


def _normalise(activations: Tensor, layer: nn.BatchNorm1d, tensors: Mapping[str, Tensor]) -> Tensor:
    """Batch normalisation of [k, B, features] as one over k * features channels."""
    size, num_samples, num_features = activations.shape
    channels = {name: each.reshape(-1) for name, each in tensors.items() if name in ("weight", "bias")}
    channels |= {name: tensors[name].flatten().clone() for name in ("running_mean", "running_var") if name in tensors}
    is_training = layer.training or not layer.track_running_stats
    flat = activations.transpose(0, 1).reshape(num_samples, size * num_features)
    mean, variance = channels.get("running_mean"), channels.get("running_var")
    normalised = nn.functional.batch_norm(
        flat,
        mean,
        variance,
        channels.get("weight"),
        channels.get("bias"),
        is_training,
        layer.momentum or 0.0,
        layer.eps,
    )
    if layer.training and mean is not None and variance is not None:
        tensors["running_mean"].copy_(mean.view(size, -1))
        tensors["running_var"].copy_(variance.view(size, -1))
        tensors["num_batches_tracked"].add_(1)
    return normalised.view(num_samples, size, num_features).transpose(0, 1)
