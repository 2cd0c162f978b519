"""Cuts a chain of layers into blocks, which the generated source computes, and a head, which torch computes.

A block is a convolution, a batch norm and one more operation, each of which may be missing; its input is stored for
the whole batch. Max-pooling and ReLU are one operation in either order: they commute. The head begins where images
become features: its layers are matrix products and elementwise operations of stacked tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shoal.libs.population.engines.engine import EngineMisfit
from shoal.libs.population.engines.lanes.layer_graph import LayerChain
from shoal.libs.population.engines.lanes.layers import (
    ActivationLayer,
    BatchNormLayer,
    ConvLayer,
    DropoutLayer,
    FlattenLayer,
    Layer,
    PoolLayer,
    Shape,
)

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
        """Of what the operation gets."""
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
        """Of what the last block gives."""
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
