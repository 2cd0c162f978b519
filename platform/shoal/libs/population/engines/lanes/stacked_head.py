"""The layers of a chain on features [k, B, F], by torch: batched matrix products and elementwise operations.

Called by `LaneNetwork`. Also owns the masks of dropout and the running statistics of batch norm, for all layers.
Legend: k members, B samples, F features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from shoal.libs.population.engines.lanes.layers import (
    ActivationLayer,
    BatchNormLayer,
    DropoutLayer,
    FlattenLayer,
    Layer,
    LayerNormLayer,
    LinearLayer,
)
from shoal.libs.population.engines.member_dropout import draw_masks

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "gelu": functional.gelu,
    "silu": functional.silu,
}


def apply_head(
    layers: Sequence[Layer],
    h: Tensor,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    generators: Sequence[torch.Generator] | None,
) -> Tensor:
    """h: [k, B, ...]. The rest is as in LaneNetwork.forward."""

    def find(name: str) -> Tensor:
        return parameters[name] if name in parameters else buffers[name]

    for layer in layers:
        match layer:
            case FlattenLayer():
                h = h.flatten(2)
            case LinearLayer():
                weight = find(f"{layer.name}.weight").transpose(1, 2)  # [k, in, out]
                bias = find(f"{layer.name}.bias").unsqueeze(1) if layer.has_bias else None
                h = torch.bmm(h, weight) if bias is None else torch.baddbmm(bias, h, weight)
            case ActivationLayer():
                h = _ACTIVATIONS[layer.kind](h)
            case DropoutLayer():
                if generators is not None:
                    h = h * draw_mask(layer, h.shape[0], h.shape[1], generators).view(h.shape)
            case LayerNormLayer():
                h = functional.layer_norm(h, h.shape[2:], eps=layer.epsilon)
                if layer.has_weight:
                    h = h * find(f"{layer.name}.weight").unsqueeze(1)
                if layer.has_bias:
                    h = h + find(f"{layer.name}.bias").unsqueeze(1)
            case BatchNormLayer():
                h = _normalise(layer, h, parameters, buffers, generators is not None)
            case _:
                raise AssertionError(layer)
    return h


def _normalise(
    layer: BatchNormLayer, h: Tensor, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], is_training: bool
) -> Tensor:
    """h: [k, B, F]: the members' features side by side are the features of one batch norm."""
    k, batch, features = h.shape
    wide = h.transpose(0, 1).reshape(batch, k * features)
    weight = bias = None
    if layer.is_affine:
        tensors = [parameters if f"{layer.name}.{n}" in parameters else buffers for n in ("weight", "bias")]
        weight, bias = (t[f"{layer.name}.{n}"].flatten() for t, n in zip(tensors, ("weight", "bias"), strict=True))
    if is_training:
        with torch.no_grad():
            variance, mean = torch.var_mean(h, 1, correction=0)
        wide = functional.batch_norm(wide, None, None, weight, bias, True, eps=layer.epsilon)
        update_statistics(layer, buffers, mean, variance, batch)
    else:
        mean, variance = (buffers[f"{layer.name}.running_{n}"].flatten() for n in ("mean", "var"))
        wide = functional.batch_norm(wide, mean, variance, weight, bias, False, eps=layer.epsilon)
    return wide.view(batch, k, features).transpose(0, 1)


def update_statistics(
    layer: BatchNormLayer, buffers: Mapping[str, Tensor], mean: Tensor, variance: Tensor, count: int
) -> None:
    """Moves the running statistics [k, C] by those of a batch; the variance is of all its `count` numbers."""
    if count < 2:
        raise ValueError(f"batch norm {layer.name} needs more than one number for each channel in training")
    with torch.no_grad():
        counter = buffers[f"{layer.name}.num_batches_tracked"]
        counter += 1
        weight: Tensor | float = layer.momentum if layer.momentum is not None else 1 / counter.float()[:, None]
        for kind, value in (("mean", mean), ("var", variance * (count / (count - 1)))):
            running = buffers[f"{layer.name}.running_{kind}"]
            running += (value - running) * weight


def draw_mask(layer: DropoutLayer, k: int, batch: int, generators: Sequence[torch.Generator]) -> Tensor:
    """[k, B, *sample]: zero where a number is dropped, else 1 / (1 - p); each member's from its own generator."""
    shape = (batch, *layer.mask_shape)
    masks = torch.zeros(k, *shape)
    if layer.probability < 1:
        masks = draw_masks(shape, layer.probability, generators, masks)
    return masks.expand(k, batch, *layer.input_shape)
