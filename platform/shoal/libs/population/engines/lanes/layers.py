"""Descriptions of the layers that can be lanes: sizes of one sample, without the batch, and options; and their blocks.

Read from a module by `layer_graph`; the sources and the head are made from them. A misfit is a ValueError that says
what the layer is or has. Legend: C channels, H, W image, F features.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any, Self

from shoal.libs.population.engines.engine import EngineMisfit

Shape = tuple[int, ...]
Pair = tuple[int, int]


def _pair(value: Any) -> Pair:
    return (value, value) if isinstance(value, int) else tuple(value)


def _require_image(shape: Shape) -> None:
    if len(shape) != 3:
        raise ValueError(f"expects images [C, H, W], and gets {list(shape)}")


def _require_size(image: Pair, kernel: Pair, padding: Pair) -> None:
    if any(size + 2 * pad < side for size, side, pad in zip(image, kernel, padding, strict=True)):
        raise ValueError(f"has a kernel of {list(kernel)}, larger than its image of {list(image)}")


@dataclass(frozen=True)
class ConvLayer:
    """input_shape (C, H, W); weights [channels, C, *kernel]."""

    name: str
    input_shape: Shape
    channels: int
    kernel: Pair
    stride: Pair
    padding: Pair
    has_bias: bool

    @classmethod
    def of(cls, name: str, module: Any, shape: Shape) -> Self:
        _require_image(shape)
        if module.groups != 1:
            raise ValueError("has groups")
        if _pair(module.dilation) != (1, 1):
            raise ValueError("is dilated")
        if module.padding_mode != "zeros" and module.padding != "valid":
            raise ValueError(f"pads by {module.padding_mode}")
        if module.in_channels != shape[0]:
            raise ValueError(f"expects {module.in_channels} channels, and gets {shape[0]}")
        kernel = _pair(module.kernel_size)
        stride = _pair(module.stride)
        padding = module.padding
        if padding == "same":
            if kernel[0] % 2 == 0 or kernel[1] % 2 == 0:
                raise ValueError("pads an even kernel to the same size")
            padding = (kernel[0] // 2, kernel[1] // 2)
        padding = (0, 0) if padding == "valid" else _pair(padding)
        _require_size((shape[1], shape[2]), kernel, padding)
        return cls(name, shape, module.out_channels, kernel, stride, padding, module.bias is not None)

    @property
    def output_shape(self) -> Shape:
        return (self.channels, *_slide(self.input_shape, self.kernel, self.stride, self.padding))


@dataclass(frozen=True)
class PoolLayer:
    """kind: "max" or "mean"."""

    kind: str
    input_shape: Shape
    kernel: Pair
    stride: Pair
    padding: Pair

    @classmethod
    def of(
        cls,
        kind: str,
        shape: Shape,
        kernel: Any,
        stride: Any = None,
        padding: Any = 0,
        dilation: Any = 1,
        is_ceil: bool = False,
        counts_padding: bool = True,
    ) -> Self:
        _require_image(shape)
        sides = _pair(kernel)
        steps = _pair(stride or kernel)
        pads = _pair(padding)
        if is_ceil:
            raise ValueError("rounds its size up (ceil_mode)")
        if _pair(dilation) != (1, 1):
            raise ValueError("is dilated")
        if pads != (0, 0) and not counts_padding:
            raise ValueError("pads without counting the padding")
        if kind == "max" and prod(sides) > 126:
            raise ValueError(f"has a kernel of {list(sides)}, more than 126 numbers")
        _require_size((shape[1], shape[2]), sides, pads)
        return cls(kind, shape, sides, steps, pads)

    @classmethod
    def of_adaptive(cls, shape: Shape, output_size: Any) -> Self:
        _require_image(shape)
        sizes = _pair(output_size)
        if None in sizes or shape[1] % sizes[0] or shape[2] % sizes[1]:
            raise ValueError(f"pools {list(shape[1:])} to {list(sizes)}, in windows of several sizes")
        return cls.of("mean", shape, (shape[1] // sizes[0], shape[2] // sizes[1]))

    @property
    def output_shape(self) -> Shape:
        return (self.input_shape[0], *_slide(self.input_shape, self.kernel, self.stride, self.padding))


def _slide(shape: Shape, kernel: Pair, stride: Pair, padding: Pair) -> Pair:
    height, width = (
        (size + 2 * pad - side) // step + 1
        for size, side, step, pad in zip(shape[1:], kernel, stride, padding, strict=True)
    )
    return height, width


class _SameShape:
    """A layer whose output has the shape of its input."""

    input_shape: Shape

    @property
    def output_shape(self) -> Shape:
        return self.input_shape


@dataclass(frozen=True)
class ActivationLayer(_SameShape):
    """kind: "relu", "tanh", "sigmoid", "gelu" or "silu"."""

    kind: str
    input_shape: Shape


@dataclass(frozen=True)
class BatchNormLayer(_SameShape):
    """momentum: None for the mean over all batches."""

    name: str
    input_shape: Shape
    epsilon: float
    momentum: float | None
    is_affine: bool


@dataclass(frozen=True)
class LayerNormLayer(_SameShape):
    name: str
    input_shape: Shape
    epsilon: float
    has_weight: bool
    has_bias: bool


@dataclass(frozen=True)
class LinearLayer:
    name: str
    input_shape: Shape
    features: int
    has_bias: bool

    @property
    def output_shape(self) -> Shape:
        return (self.features,)


@dataclass(frozen=True)
class DropoutLayer(_SameShape):
    """drops_channels: all numbers of a channel together."""

    probability: float
    input_shape: Shape
    drops_channels: bool = False


@dataclass(frozen=True)
class FlattenLayer:
    input_shape: Shape

    @classmethod
    def of(cls, shape: Shape, start_dim: int, end_dim: int) -> Self:
        if start_dim != 1 or end_dim not in (-1, len(shape)):
            raise ValueError(f"flattens dimensions {start_dim} to {end_dim}, not a sample")
        return cls(shape)

    @classmethod
    def of_view(cls, shape: Shape, sizes: tuple[Any, ...]) -> Self:
        """sizes: with -1 for the batch, or for the features."""
        if len(sizes) != 2 or sizes[0] != -1 or sizes[1] not in (-1, prod(shape)):
            raise ValueError(f"is a view of {list(sizes)}, not of flat samples")
        return cls(shape)

    @property
    def output_shape(self) -> Shape:
        return (prod(self.input_shape),)


Layer = (
    ConvLayer
    | PoolLayer
    | ActivationLayer
    | BatchNormLayer
    | LayerNormLayer
    | LinearLayer
    | DropoutLayer
    | FlattenLayer
)


# -- blocks, which the generated source computes, and a head, which torch computes
#
# A block is a convolution, a batch norm and one more operation, each of which may be missing; its input is stored for
# the whole batch. Max-pooling and ReLU are one operation in either order: they commute. The head begins where images
# become features: its layers are matrix products and elementwise operations of stacked tensors.


@dataclass(frozen=True)
class LayerChain:
    """The layers of a model in their order, for samples of `input_shape` (without the batch)."""

    input_shape: Shape
    layers: tuple[Layer, ...]

    @property
    def output_shape(self) -> Shape:
        return self.layers[-1].output_shape if self.layers else self.input_shape


Operation = PoolLayer | ActivationLayer | DropoutLayer


@dataclass(frozen=True)
class LaneBlock:
    """conv, norm and operation, in this order. is_rectified: ReLU follows the operation, a max-pooling."""

    input_shape: Shape
    conv: ConvLayer | None = None
    norm: BatchNormLayer | None = None
    operation: Operation | None = None
    is_rectified: bool = False

    @property
    def middle_shape(self) -> Shape:
        """The shape of what the operation gets."""
        return self.conv.output_shape if self.conv else self.input_shape

    @property
    def output_shape(self) -> Shape:
        return self.operation.output_shape if self.operation else self.middle_shape

    @property
    def padding(self) -> int:
        """Columns of zeros left and right with which its input is stored."""
        return self.conv.padding[1] if self.conv else 0


@dataclass(frozen=True)
class NetworkPlan:
    input_shape: Shape
    blocks: tuple[LaneBlock, ...]
    head: tuple[Layer, ...]
    output_shape: Shape

    @property
    def feature_shape(self) -> Shape:
        """The shape of what the last block gives."""
        return self.blocks[-1].output_shape


def plan_blocks(chain: LayerChain) -> NetworkPlan:
    """Raises EngineMisfit where there is no convolution: stacked matrix products are as fast as lanes then."""
    if len(chain.input_shape) != 3:
        raise EngineMisfit(f"cannot be lanes because its samples are no images [C, H, W]: {list(chain.input_shape)}")
    layers = list(chain.layers)
    first = next((at for at, each in enumerate(layers) if isinstance(each, FlattenLayer)), len(layers))
    while 0 < first < len(layers):
        last = layers[first - 1]
        if not isinstance(last, DropoutLayer) or last.drops_channels:
            break
        first -= 1  # single numbers are dropped: the same on features
    blocks = _merge(layers[:first], chain.input_shape)
    if not any(block.conv for block in blocks):
        raise EngineMisfit("cannot be lanes because it has no convolution: stacked members are as fast")
    return NetworkPlan(chain.input_shape, tuple(blocks), tuple(layers[first:]), chain.output_shape)


def _merge(layers: list[Layer], shape: Shape) -> list[LaneBlock]:
    blocks: list[LaneBlock] = []
    current = LaneBlock(shape)

    def begin() -> LaneBlock:
        if current.conv or current.norm or current.operation:
            blocks.append(current)
        return LaneBlock(current.output_shape)

    for layer in layers:
        operation = current.operation
        if isinstance(layer, ConvLayer):
            current = replace(begin(), conv=layer)
        elif isinstance(layer, BatchNormLayer):
            current = replace(begin() if current.norm or operation else current, norm=layer)
        elif _is_relu(layer) and isinstance(operation, PoolLayer) and operation.kind == "max":
            current = replace(current, is_rectified=True)
        elif _is_relu(operation) and isinstance(layer, PoolLayer) and layer.kind == "max":
            current = replace(current, operation=layer, is_rectified=True)
        else:
            assert isinstance(layer, Operation)
            current = replace(begin() if operation else current, operation=layer)
    begin()
    return blocks


def _is_relu(layer: Layer | None) -> bool:
    return isinstance(layer, ActivationLayer) and layer.kind == "relu"
