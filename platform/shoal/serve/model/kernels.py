"""Runs linear layers in float32 with the faster of torch's two CPU libraries.

Called by the formats that run in torch. torch uses MKL, which leaves half of a non-Intel processor unused: on an AMD
EPYC, [64, 1024] by [1024, 2048] takes oneDNN 2.2 ms and MKL 7.1. For few rows oneDNN's calls cost more than they save.
The faster library is measured once per process. A model's weights, names and attributes do not change.
"""

from __future__ import annotations

import functools
import time
from statistics import median

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

MIN_ROWS = 8
MIN_PRODUCTS = 2**20  # rows by inputs by outputs: below it both take microseconds
MIN_SPEEDUP = 1.2  # the required speed-up, so that noise does not decide
_NUM_TIMINGS = 7


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs] by weight [outputs, inputs]; many rows go to oneDNN."""
    num_rows = x.numel() // weight.shape[1]
    if num_rows < MIN_ROWS or num_rows * weight.numel() < MIN_PRODUCTS or x.dtype != torch.float32:
        return nn.functional.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class OneDnnLinear(nn.Linear):
    """A linear layer that computes many rows with oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def choose_kernels(module: nn.Module) -> None:
    """Let a module's linear layers, of exactly that type, use the faster library on this CPU; those of a graph too."""
    if not (torch.backends.mkldnn.is_available() and is_onednn_faster()):
        return
    for layer in module.modules():
        if type(layer) is nn.Linear and layer.weight.dtype == torch.float32:
            layer.__class__ = OneDnnLinear
    if isinstance(module, GraphModule):
        for node in module.graph.nodes:
            if node.target is torch.ops.aten.linear.default:
                node.target = linear
        module.recompile()


@functools.cache
def is_onednn_faster() -> bool:
    """Whether oneDNN is faster on a medium product, measured in turns; takes some 10 ms."""
    x, layer = torch.randn(128, 512), nn.Linear(512, 512).requires_grad_(False)
    other = OneDnnLinear(512, 512).requires_grad_(False)
    times: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for _ in range(_NUM_TIMINGS):
            for each, taken in zip((layer, other), times, strict=True):
                start = time.perf_counter()
                each(x)
                taken.append(time.perf_counter() - start)
    return median(times[0]) > MIN_SPEEDUP * median(times[1])
