"""Reads a module whose forward is a straight chain of layers into descriptions with shapes.

Owns which layers can be lanes, and the sentence that a user reads when one cannot. Called by `LaneNetwork`; computes
nothing but shapes.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from shoal.libs.population.engines.engine import EngineMisfit
from shoal.libs.population.engines.lanes.layers import (
    ActivationLayer,
    BatchNormLayer,
    ConvLayer,
    DropoutLayer,
    FlattenLayer,
    Layer,
    LayerChain,
    LayerNormLayer,
    LinearLayer,
    PoolLayer,
    Shape,
)

ACTIVATIONS: dict[Any, str] = {
    **dict.fromkeys((nn.ReLU, functional.relu, torch.relu, "relu"), "relu"),
    **dict.fromkeys((nn.Tanh, functional.tanh, torch.tanh, "tanh"), "tanh"),
    **dict.fromkeys((nn.Sigmoid, functional.sigmoid, torch.sigmoid, "sigmoid"), "sigmoid"),
    **dict.fromkeys((nn.GELU, functional.gelu), "gelu"),
    **dict.fromkeys((nn.SiLU, functional.silu), "silu"),
}


def read_layer_graph(model: nn.Module, input_shape: Shape) -> LayerChain:
    """The chain of a model for an input [B, *input_shape]. Raises EngineMisfit, which names the layer."""
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise EngineMisfit(f"cannot be lanes because layer {name or 'model'} has hooks")
    reader, evaluated = _Reader(model, input_shape), _Reader(model, input_shape)
    for node in _trace(model, is_training=True):
        reader.read(node)
    for node in _trace(model, is_training=False):
        evaluated.read(node)
    if reader.layers != evaluated.layers:
        raise EngineMisfit("cannot be lanes because its forward differs between training and evaluation")
    return LayerChain(input_shape, tuple(reader.layers))


class _RecordedLayer(nn.Module):
    """Stands for a layer of torch.nn while a forward is traced: appends a call of it to the graph."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *arguments: Any, **options: Any) -> Any:
        tracer = next(each for each in (*arguments, *options.values()) if isinstance(each, fx.Proxy)).tracer
        return tracer.create_proxy("call_module", self.name, arguments, options)


def _trace(model: nn.Module, *, is_training: bool) -> Iterable[fx.Node]:
    """The nodes of a forward. fx.Tracer exchanges nn.Module.__call__ for all threads meanwhile; this does not."""
    traced = copy.deepcopy(model).train(is_training)
    names = {id(module): name for name, module in traced.named_modules()}
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    samples = fx.Proxy(graph.placeholder("samples"), tracer)
    if _is_layer(traced):
        traced = _RecordedLayer("")
    for module in list(traced.modules()):
        for name, child in list(module.named_children()):
            if _is_layer(child):
                setattr(module, name, _RecordedLayer(names[id(child)]))
    try:
        output = traced(samples)
    except Exception as error:  # a forward may raise anything when it is given a symbol
        raise EngineMisfit(f"cannot be lanes because its forward cannot be traced: {error}") from error
    graph.output(tracer.create_arg(output))
    return graph.nodes


def _is_layer(module: nn.Module) -> bool:
    containers = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    return type(module).__module__.startswith("torch.nn") and not isinstance(module, containers)


class _Reader:
    """Goes through the nodes of a traced forward; `last` is the one whose value is the sample so far."""

    def __init__(self, model: nn.Module, input_shape: Shape) -> None:
        self.model, self.shape = model, input_shape
        self.layers: list[Layer] = []
        self.last: fx.Node | None = None
        self.sizes: set[fx.Node] = set()  # of the batch, which a view may name
        self.seen: set[str] = set()

    def read(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            if self.last is not None:
                raise EngineMisfit("cannot be lanes because it has more than one input")
            self.last = node
            return
        if node.op == "output":
            if node.args[0] is not self.last:
                raise EngineMisfit("cannot be lanes because its output is not the last layer's alone")
            return
        if self._is_size(node):
            self.sizes.add(node)
            return
        parents = [each for each in node.all_input_nodes if each not in self.sizes]
        if parents != [self.last]:
            raise self._misfit(node, "does not follow the layer before it alone")
        try:
            layer = self._describe_module(node) if node.op == "call_module" else self._describe_call(node)
        except (ValueError, TypeError) as error:
            raise self._misfit(node, str(error)) from None
        self.last = node
        if layer is not None:
            self.layers.append(layer)
            self.shape = layer.output_shape

    def _is_size(self, node: fx.Node) -> bool:
        """x.size(0), x.shape, x.size() and the first number of these: the size of the batch, for any x."""
        if node.op == "call_method" and node.target == "size":
            return bool(node.args[1:] in ((), (0,)))
        if node.target is getattr:
            return bool(node.args[1] == "shape")
        return bool(node.target is operator.getitem and node.args[0] in self.sizes and node.args[1] == 0)

    def _misfit(self, node: fx.Node, problem: str) -> EngineMisfit:
        name = node.target if node.op == "call_module" else node.name
        return EngineMisfit(f"cannot be lanes because layer {name} {problem}")

    def _describe_module(self, node: fx.Node) -> Layer | None:
        name = str(node.target)
        module = self.model.get_submodule(name)
        if name in self.seen and next(module.parameters(), None) is not None:
            raise self._misfit(node, "is used twice")
        self.seen.add(name)
        if isinstance(module, nn.Identity):
            return None
        if getattr(module, "approximate", "none") != "none":
            raise ValueError(f"is approximated by {module.approximate}")
        if type(module) in ACTIVATIONS:
            return ActivationLayer(ACTIVATIONS[type(module)], self.shape)
        return _describe_layer(name, module, self.shape)

    def _describe_call(self, node: fx.Node) -> Layer | None:
        target = node.target
        if target in ACTIVATIONS:
            if unknown := node.kwargs.keys() - {"inplace"}:
                raise ValueError(f"has the argument {min(unknown)}")
            return ActivationLayer(ACTIVATIONS[target], self.shape)
        if target in (torch.flatten, "flatten"):
            return FlattenLayer.of(self.shape, *_bind(node, start_dim=0, end_dim=-1))
        if target in ("view", "reshape", torch.reshape):
            sizes = node.args[1:] if len(node.args) > 2 else node.args[1]
            sizes = tuple(sizes) if isinstance(sizes, tuple | list) else (sizes,)
            return FlattenLayer.of_view(self.shape, (-1 if sizes[0] in self.sizes else sizes[0], *sizes[1:]))
        if target in (functional.max_pool2d, torch.max_pool2d):
            names = {"kernel_size": None, "stride": None, "padding": 0, "dilation": 1, "ceil_mode": False}
            *options, has_indices = _bind(node, **names, return_indices=False)
            if has_indices:
                raise ValueError("returns indices")
            return PoolLayer.of("max", self.shape, *options)
        if target is functional.avg_pool2d:
            names = {"kernel_size": None, "stride": None, "padding": 0, "ceil_mode": False, "count_include_pad": True}
            kernel, stride, padding, is_ceil, counts_padding = _bind(node, **names)
            return PoolLayer.of("mean", self.shape, kernel, stride, padding, 1, is_ceil, counts_padding)
        if target is functional.adaptive_avg_pool2d:
            return PoolLayer.of_adaptive(self.shape, *_bind(node, output_size=None))
        raise self._misfit(node, "is none of the layers that lanes know")


def _bind(node: fx.Node, **defaults: Any) -> list[Any]:
    """The arguments of a call after its first, in the order of `defaults`."""
    values = dict(zip(defaults, node.args[1:], strict=False)) | dict(node.kwargs)
    if unknown := values.keys() - defaults.keys():
        raise ValueError(f"has the argument {min(unknown)}")
    return [values.get(name, default) for name, default in defaults.items()]


def _describe_layer(name: str, module: Any, shape: Shape) -> Layer | None:
    """Describe a layer of torch.nn; None where it does nothing. Raises ValueError, which says what is wrong."""
    match type(module):
        case nn.Conv2d:
            return ConvLayer.of(name, module, shape)
        case nn.MaxPool2d:
            if module.return_indices:
                raise ValueError("returns indices")
            sizes = (module.kernel_size, module.stride, module.padding, module.dilation)
            return PoolLayer.of("max", shape, *sizes, module.ceil_mode)
        case nn.AvgPool2d:
            if module.divisor_override:
                raise ValueError("has a divisor_override")
            sizes = (module.kernel_size, module.stride, module.padding, 1)
            return PoolLayer.of("mean", shape, *sizes, module.ceil_mode, module.count_include_pad)
        case nn.AdaptiveAvgPool2d:
            return PoolLayer.of_adaptive(shape, module.output_size)
        case nn.BatchNorm1d | nn.BatchNorm2d:
            if len(shape) != (3 if isinstance(module, nn.BatchNorm2d) else 1) or shape[0] != module.num_features:
                raise ValueError(f"expects {module.num_features} features, and gets {list(shape)}")
            if module.running_mean is None:
                raise ValueError("has no running statistics")
            return BatchNormLayer(name, shape, module.eps, module.momentum, module.affine)
        case nn.LayerNorm:
            if tuple(module.normalized_shape) != shape or len(shape) != 1:
                raise ValueError(f"normalises {list(module.normalized_shape)} of {list(shape)}")
            return LayerNormLayer(name, shape, module.eps, module.weight is not None, module.bias is not None)
        case nn.Linear:
            if shape != (module.in_features,):
                raise ValueError(f"expects {module.in_features} features, and gets {list(shape)}")
            return LinearLayer(name, shape, module.out_features, module.bias is not None)
        case nn.Dropout | nn.Dropout2d:
            drops_channels = isinstance(module, nn.Dropout2d)
            if drops_channels and len(shape) != 3:
                raise ValueError("drops channels of what is no image")
            return DropoutLayer(module.p, shape, drops_channels) if module.p else None
        case nn.Flatten:
            return FlattenLayer.of(shape, module.start_dim, module.end_dim)
    raise ValueError(f"is a {type(module).__name__}")
