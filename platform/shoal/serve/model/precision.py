"""Converts a module's precision: its layers once per template, its weights once per version.

Called by the format of modules. Changes linear and convolution layers by exact type: a subclass may read its weights in
another way.

bf16  the weights of those layers become bfloat16 when a version is loaded, and the forward runs under autocast, which
      computes normalisation, softmax and losses in float32. Autocast alone would convert the weights in every forward,
      which on a CPU costs more than it saves.
int8  linear layers of at least `MIN_INT8_WEIGHTS` weights: each row of the weights and of the input is scaled to
      -127..127. The scale is per row, not per batch, so that no answer depends on its neighbours. Below that size the
      scaling costs more than the product saves. On the CPU only; bias and result are float32.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from shoal.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_INT8_WEIGHTS = 256 * 256
_BF16_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class PrecisionConverter:
    """Changes `module` in place, and the state of each version in the same way.

    Raises ConfigError when int8 would change no layer.
    """

    def __init__(self, precision: Literal["fp32", "bf16", "int8"], module: nn.Module) -> None:
        self._precision = precision
        self._layers: list[str] = []
        if precision == "bf16":
            self._layers = [name for name, layer in module.named_modules() if type(layer) in _BF16_LAYERS]
            for name in self._layers:
                module.get_submodule(name).to(torch.bfloat16)
        elif precision == "int8":
            self._layers = _quantise_layers(module)
            if not self._layers:
                problem = f"the model has no linear layer of {MIN_INT8_WEIGHTS} weights or more"
                raise ConfigError("precision", precision, problem, "smaller ones are faster in fp32: leave it")
            logger.info("int8: %d linear layers, %s", len(self._layers), ", ".join(self._layers[:8]))

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert one version's tensors for the changed module."""
        converted = dict(state)
        for layer in self._layers:
            weight = f"{layer}.weight"
            if self._precision == "bf16":
                for name in (weight, f"{layer}.bias"):
                    if name in converted:
                        converted[name] = converted[name].to(torch.bfloat16)
            else:
                converted[f"{layer}.units"], converted[f"{layer}.scale"] = _quantise_rows(converted.pop(weight))
        return converted


class Int8Linear(nn.Module):
    """A linear layer with weights int8 [outputs, inputs], and a scale for each row of them; x float32 [..., inputs].

    It has no `weight`: a module that reads its layers' weights itself would misread these units.
    """

    units: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.register_buffer("units", torch.zeros(layer.weight.shape, dtype=torch.int8))
        self.register_buffer("scale", torch.zeros(layer.out_features))
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        rows, scales = _quantise_rows(x.reshape(-1, self.in_features))
        y = torch._int_mm(rows, self.units.t()).to(x.dtype)
        y = y.mul_(self.scale).mul_(scales.unsqueeze(1))
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.view(*x.shape[:-1], self.out_features)


def _quantise_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise each row to int8 in -127..127; also returns its scale, which is NaN for a row with NaN."""
    scales = rows.abs().amax(1).div_(127)
    units = rows / scales.clamp_min(torch.finfo(rows.dtype).tiny).unsqueeze(1)
    return units.round_().to(torch.int8), scales


def _quantise_layers(module: nn.Module) -> list[str]:
    names = []
    for name, layer in list(module.named_modules()):
        if type(layer) is nn.Linear and layer.weight.numel() >= MIN_INT8_WEIGHTS and name:
            module.set_submodule(name, Int8Linear(layer))
            names.append(name)
        elif isinstance(layer, nn.TransformerEncoderLayer):
            layer.activation_relu_or_gelu = 0  # else its fused path would read the layers' weights as float32
        elif isinstance(layer, nn.TransformerEncoder):
            layer.use_nested_tensor = layer.enable_nested_tensor = False  # used by that path alone
    return names
