"""The floating point operations of an operator: torch's own formulas, and ours where it has none.

Multiplications and additions of matrices are counted (a fused multiply-add is two), as usual for MFU; elementwise
operations, moves and lookups are 0 by that convention. An operator without a formula of ours or torch's is *unknown*,
which is never the same as 0. Pure functions of shapes; called by the operator counter.

Errors of torch's `FlopCounterMode` (2.13): LSTM and fused attention count 0 on the CPU; Bilinear, matrix times vector
and distances count 0 everywhere; products in place and custom operators silently count 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

aten = torch.ops.aten

Formula = Callable[[Sequence[Any], Any], int]  # of the operator's arguments and its result

# Prefixes of aten operators that multiply and add matrices, but have no formula here.
_UNKNOWN_ATEN = (
    *(
        "linalg_",
        "_linalg_",
        "_sparse_",
        "sparse_",
        "cholesky",
        "lu_solve",
        "lu_unpack",
        "ormqr",
        "geqrf",
        "triangular_",
    ),
    *(
        "_nested_",
        "_ctc_loss",
        "_cudnn_ctc_loss",
        "miopen_rnn",
        "mkldnn_linear",
        "_weight_int",
        "_transform_bias_rescale",
        "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention",
        "_pdist_",
    ),
    *("grid_sampler", "_grouped_mm", "_scaled_grouped_mm", "segment_reduce", "fbgemm_"),
)
# Operators with these prefixes that multiply no matrices.
_FREE_ATEN = frozenset({"linalg_vector_norm", "linalg_cross", "_sparse_coo_tensor_with_dims_and_tensors"})
# Namespaces whose operators move data or read metadata, and compute nothing.
_FREE_NAMESPACES = frozenset(
    {"prim", "prims", "c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "profiler"}
)


def count_flops(op: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> int | None:
    """The operations of one call; 0 if nothing is multiplied, None if unknown."""
    packet = op._overloadpacket
    if op.namespace == "aten" and packet.__name__.endswith("_"):  # `addmm_` multiplies as much as `addmm`
        packet = getattr(aten, packet.__name__.removesuffix("_"), packet)
    own = FORMULAS.get(packet)
    if own is not None:
        return own(args, out)
    known = flop_registry.get(packet)
    if known is not None:
        return int(known(*args, **kwargs, out_val=out))
    if op.namespace == "aten":
        name = packet.__name__
        return None if name.startswith(_UNKNOWN_ATEN) and name not in _FREE_ATEN else 0
    return 0 if op.namespace in _FREE_NAMESPACES else None


def _count_rows(inputs: Tensor) -> int:
    return int(inputs.numel() // max(inputs.shape[-1], 1))


def _onednn_rnn(args: Sequence[Any], out: Any) -> int:
    """One layer in one direction: every row of the input meets the input's and the hidden state's weights."""
    inputs = args[0]
    weight_input = args[1]
    weight_hidden = args[2]
    return 2 * _count_rows(inputs) * int(weight_input.numel() + weight_hidden.numel())


def _cudnn_rnn(args: Sequence[Any], out: Any) -> int:
    inputs, weights = args[0], args[1]
    return 2 * _count_rows(inputs) * sum(int(weight.numel()) for weight in weights if weight.dim() == 2)


def _double(forward: Formula) -> Formula:
    """A backward pass multiplies once for the inputs' gradient and once for the weights'."""
    return lambda args, out: 2 * forward(args, out)


def _trilinear(args: Sequence[Any], out: Any) -> int:
    """aten multiplies three tensors element by element, broadcast against each other, and sums: 3 an element."""
    shapes = []
    for tensor, expanded in zip(args[:3], args[3:6], strict=True):
        shape = list(tensor.shape)
        for dimension in sorted(expanded):
            shape.insert(dimension, 1)
        shapes.append(shape)
    return 3 * int(math.prod(torch.broadcast_shapes(*shapes)))


def _attention(args: Sequence[Any], out: Any) -> int:
    query, key, value = args[:3]
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))


def _attention_backward(args: Sequence[Any], out: Any) -> int:
    gradient, query, key, value = args[:4]
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))


def _summed_products(args: Sequence[Any], out: Any) -> int:
    """The sum of all products of two matrices, or of two stacks of them."""
    return 2 * int(args[1].numel()) * int(args[2].shape[-1])


def _convolution_backward(args: Sequence[Any], out: Any) -> int:
    """Each requested gradient takes as much as forward: all weights at each place of the output [B, C, ...] or, for a
    transposed convolution, of the input. A weight belongs to one group only."""
    gradient = args[0]
    inputs = args[1]
    weight = args[2]
    transposed = args[7]
    asked = args[10]
    places = inputs if transposed else gradient
    num_places = int(places.shape[0] * math.prod(places.shape[2:]))
    return 2 * sum(map(bool, asked[:2])) * int(weight.numel()) * num_places


def _distances(args: Sequence[Any], out: Any) -> int:
    """Each distance subtracts, raises and adds over the width."""
    points = args[0] if args[0].dim() >= 2 else args[1]
    return 3 * int(out.numel()) * int(points.shape[-1])


def _fourier(args: Sequence[Any], out: Any) -> int:
    """5 n log2 n for each transform of n points."""
    longest = args[0] if args[0].numel() >= out.numel() else out
    points = math.prod(longest.shape[dimension] for dimension in args[1])
    return int(5 * longest.numel() * math.log2(max(points, 2)))


FORMULAS: dict[Any, Formula] = {
    aten.mkldnn_rnn_layer: _onednn_rnn,
    aten.mkldnn_rnn_layer_backward: _double(_onednn_rnn),
    aten._cudnn_rnn: _cudnn_rnn,
    aten._cudnn_rnn_backward: _double(_cudnn_rnn),
    aten._trilinear: _trilinear,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
    aten._scaled_dot_product_fused_attention_overrideable_backward: _attention_backward,
    aten.mv: lambda args, out: 2 * args[-2].numel(),
    aten.addmv: lambda args, out: 2 * args[-2].numel(),
    aten.addbmm: _summed_products,
    # Each of the outputs [T, B, C] meets the weights [kernel, C_in, C] of its channel.
    aten.conv_tbc: lambda args, out: 2 * out.numel() * args[1].shape[0] * args[1].shape[1],
    aten.convolution_backward: _convolution_backward,
    aten.dot: lambda args, out: 2 * args[0].numel(),
    aten.vdot: lambda args, out: 2 * args[0].numel(),
    aten.addr: lambda args, out: 2 * out.numel(),
    aten._int_mm: lambda args, out: 2 * out.numel() * args[-2].shape[-1],
    aten._addmm_activation: _summed_products,
    aten._cdist_forward: _distances,
    # For many points torch computes one product of the points, each extended by its square and a one.
    aten._euclidean_dist: lambda args, out: 2 * out.numel() * (args[0].shape[-1] + 2),
    aten._cdist_backward: lambda args, out: 3 * args[4].numel() * args[1].shape[-1],
    aten._fft_r2c: _fourier,
    aten._fft_c2r: _fourier,
    aten._fft_c2c: _fourier,
}
