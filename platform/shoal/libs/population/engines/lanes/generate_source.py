"""C++ for a plan: which templates of `kernels/` are called with which sizes, in which order, on which memory.

Owns the layout of the workspace and the slots of tensors that a call is given. Three functions are exported:
`train_forward` stores what `train_backward` needs; `evaluate` stores nothing and uses running statistics. Blocks run
sample by sample, so that what one block writes is in the cache for the next; batch norm in training ends such a loop.
Called by `LaneNetwork`.

Names in the source, for block i: xi its input (s0: one that members share), yi what the operation gets, ai which
numbers a pooling chose, gi the gradient of xi, di that of what the convolution gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from shoal.libs.population.engines.lanes.layers import ActivationLayer, DropoutLayer, LaneBlock, NetworkPlan, PoolLayer

STRIP_BYTES = 12288


@dataclass
class LaneSource:
    """text:   the source
    slots:  {name: index} of the tensors of a call: "input", "features", "0.weight", "0.bias", "1.gamma", ...
    """

    text: str
    slots: dict[str, int]


@dataclass
class _Workspace:
    """Arrays of vectors, of the network or of each sample: {name: C++ expression of the size}."""

    fixed: dict[str, str] = field(default_factory=dict)
    sampled: dict[str, str] = field(default_factory=dict)

    def declare(self) -> list[str]:
        lines = ["constexpr long aligned(long size) { return (size + 3) / 4 * 4; }"]
        for kind, arrays in (("fixed", self.fixed), ("sampled", self.sampled)):
            previous = "0"
            for name, size in arrays.items():
                lines.append(f"constexpr long {name}_size = aligned({size}), {name}_at = {previous};")
                previous = f"{name}_at + {name}_size"
            lines.append(f"constexpr long {kind}_size = {previous};")
        lines.append('extern "C" long workspace_bytes(long B) { return (fixed_size + sampled_size * B) * sizeof(V); }')
        lines.append('extern "C" int count_lanes() { return LANES; }')
        return lines

    def open(self, num_samples: str) -> list[str]:
        """Pointers in a function: of sampled arrays, to the first sample."""
        lines = [f"V* const {name} = space + {name}_at;" for name in self.fixed]
        sampled = (f"V* const {name} = space + fixed_size + {name}_at * {num_samples};" for name in self.sampled)
        return [*lines, *sampled]


def generate_source(plan: NetworkPlan) -> LaneSource:
    """The same plan gives the same text."""
    return _Generator(plan).generate()


class _Generator:
    def __init__(self, plan: NetworkPlan) -> None:
        self.plan, self.blocks = plan, plan.blocks
        self.slots = {"input": 0, "features": 1}
        self.space = _Workspace()

    def generate(self) -> LaneSource:
        lines = ['#include "convolution.hpp"', '#include "pooling.hpp"', '#include "pointwise.hpp"']
        for index, block in enumerate(self.blocks):
            lines += self._declare_types(index, block)
            self._reserve(index, block)
        count = len(self.blocks)
        self.space.sampled[f"x{count}"] = str(prod(self.plan.feature_shape))
        gradients = self.space.sampled if self.blocks[-1].norm else self.space.fixed
        gradients[f"g{count}"] = str(prod(self.plan.feature_shape))
        lines += self.space.declare()
        lines += self._define("train_forward", self._emit_forward(is_training=True))
        lines += self._define("evaluate", self._emit_forward(is_training=False))
        lines += self._define("train_backward", self._emit_backward())
        return LaneSource("\n".join(lines) + "\n", self.slots)

    def _define(self, name: str, body: list[str]) -> list[str]:
        arguments = "int B, int k, int is_shared, const Rows* rows, const Rows* gradients, V* space"
        body = [*self.space.open("1" if name == "evaluate" else "B"), *body]
        return [f'extern "C" void {name}({arguments}) {{', *(f"    {line}" for line in body), "}"]

    # Sizes

    def _declare_types(self, i: int, block: LaneBlock) -> list[str]:
        lines = []
        if block.conv:
            c, h, w = block.conv.input_shape
            pairs = (*block.conv.kernel, *block.conv.stride, *block.conv.padding)
            lines.append(f"using C{i} = Conv<{h}, {w}, {c}, {block.conv.channels}, {', '.join(map(str, pairs))}>;")
        if isinstance(block.operation, PoolLayer):
            c, h, w = block.middle_shape
            pool = block.operation
            numbers = (h, w, c, *pool.kernel, *pool.stride, *pool.padding, *self._output_columns(i))
            lines.append(f"using P{i} = Pool<{', '.join(map(str, numbers))}>;")
            if _has_strips(block):
                row_size = pool.kernel[0] * w * c
                lines.append(f"constexpr int strip{i} = max_of(1, {STRIP_BYTES} / ({row_size} * (int)sizeof(V)));")
        return lines

    def _output_columns(self, i: int) -> tuple[int, int]:
        """How block i's output is stored: its row's width, and its first column."""
        padding = self.blocks[i + 1].padding if i + 1 < len(self.blocks) else 0
        return self.blocks[i].output_shape[2] + 2 * padding, padding

    def _slot(self, name: str) -> str:
        return f"rows[{self.slots.setdefault(name, len(self.slots))}]"

    def _gradient(self, name: str) -> str:
        return f"gradients[{self.slots[name]}]"

    def _reserve(self, i: int, block: LaneBlock) -> None:
        fixed, sampled = self.space.fixed, self.space.sampled
        (c, h, w), channels = block.input_shape, block.middle_shape[0]
        width = w + 2 * block.padding
        (fixed if i == 0 and block.conv else sampled)[f"x{i}"] = str(h * width * c)
        if i == 0 and block.conv:
            fixed["s0"] = str((h * width * c + 3) // 4)
        fixed[f"g{i}"] = str(h * w * c)
        if i and self.blocks[i - 1].norm:
            sampled[f"g{i}"] = fixed.pop(f"g{i}")
        if block.conv:
            fixed |= {f"w{i}": f"C{i}::NUM_WEIGHTS", f"bias{i}": str(channels), f"dw{i}": f"C{i}::NUM_WEIGHTS"}
            fixed |= {f"db{i}": str(channels), f"d{i}": f"C{i}::HO * C{i}::DW * C{i}::O"}
            if i:
                fixed[f"wt{i}"] = f"C{i}::NUM_WEIGHTS"
            is_stored = block.norm or _needs_input(block)
            (sampled if is_stored else fixed)[f"y{i}"] = str(prod(block.middle_shape))
        if block.norm:
            for name in ("mean", "variance", "inverse", "factor", "offset", "gamma", "beta", "dgamma", "dbeta"):
                fixed[f"{name}{i}"] = str(channels)
            fixed |= {f"slope{i}": str(channels), f"level{i}": str(channels)}
        if isinstance(block.operation, PoolLayer) and block.operation.kind == "max":
            sampled[f"a{i}"] = str((prod(block.output_shape) + 3) // 4)
        if isinstance(block.operation, DropoutLayer):
            fixed[f"mask{i}"] = str(prod(block.middle_shape))

    # Forward

    def _emit_forward(self, is_training: bool) -> list[str]:
        lines = []
        for i, block in enumerate(self.blocks):
            if block.conv:
                lines.append(f"exchange_weights<C{i}, true>({self._slot(f'{i}.weight')}, k, w{i}, C{i}::FORWARD.S);")
                if block.conv.has_bias:
                    lines.append(f"read_rows({self._slot(f'{i}.bias')}, k, C{i}::O, bias{i});")
            if block.norm:
                lines += self._emit_norm_inputs(i, block, is_training)
        body: list[str] = []
        for i, block in enumerate(self.blocks):
            body += self._emit_convolution(i, block, is_training)
            if block.norm and is_training:
                size, channels = prod(block.middle_shape[1:]), block.middle_shape[0]
                body.append(f"merge_moments<{size}, {channels}>({self._middle(i, True)}, b, mean{i}, variance{i});")
                lines += self._loop(body)  # and then means and variances of the batch
                lines.append(f"for (int c = 0; c < {channels}; c++) variance{i}[c] *= 1.f / ((float)B * {size});")
                lines.append(self._find_factors(i, block))
                names = ("mean", "variance")
                lines += [f"write_rows({self._slot(f'{i}.{n}')}, k, {channels}, {n}{i});" for n in names]
                body = []
            body += self._emit_operation(i, block, is_training)
        (c, h, w), last = self.plan.feature_shape, self._at(f"x{len(self.blocks)}", is_training)
        body.append(f"exchange_image<{c}, {h}, {w}, {w}, 0, false>({self._slot('features')}, k, b, {last});")
        return lines + self._loop(body)

    @staticmethod
    def _loop(body: list[str]) -> list[str]:
        return ["for (int b = 0; b < B; b++) {", *(f"    {line}" for line in body), "}"]

    def _at(self, name: str, is_training: bool) -> str:
        """Where an array of sample b begins; evaluation stores one sample."""
        return f"{name} + b * {name}_size" if is_training and name in self.space.sampled else name

    def _middle(self, i: int, is_training: bool) -> str:
        return self._at(f"y{i}" if self.blocks[i].conv else f"x{i}", is_training)

    def _emit_norm_inputs(self, i: int, block: LaneBlock, is_training: bool) -> list[str]:
        assert block.norm
        channels = block.middle_shape[0]
        lines = [f"for (int c = 0; c < {channels}; c++) gamma{i}[c] = V{{}} + 1.f, beta{i}[c] = V{{}};"]
        if block.norm.is_affine:
            lines = [f"read_rows({self._slot(f'{i}.{n}')}, k, {channels}, {n}{i});" for n in ("gamma", "beta")]
        if is_training:
            return [*lines, *(f"memset({n}{i}, 0, {n}{i}_size * sizeof(V));" for n in ("mean", "variance"))]
        lines += [f"read_rows({self._slot(f'{i}.{n}')}, k, {channels}, {n}{i});" for n in ("mean", "variance")]
        return [*lines, self._find_factors(i, block)]

    def _find_factors(self, i: int, block: LaneBlock) -> str:
        assert block.norm
        names = ", ".join(f"{name}{i}" for name in ("gamma", "beta", "inverse", "factor", "offset"))
        return f"find_factors({block.middle_shape[0]}, mean{i}, variance{i}, {block.norm.epsilon!r}f, {names});"

    def _emit_input(self, i: int, block: LaneBlock, is_training: bool) -> list[str]:
        """The image of the first block: floats where members share it and a convolution reads it, else lanes."""
        c, h, w = block.input_shape
        sizes = f"{c}, {h}, {w}, {w + 2 * block.padding}, {block.padding}"
        own = f"exchange_image<{sizes}, true>({self._slot('input')}, k, b, {self._at(f'x{i}', is_training)});"
        if not block.conv:
            return [own]
        shared = f"read_shared_image<{sizes}>({self._slot('input')}, b, reinterpret_cast<float*>(s0));"
        return [f"if (is_shared) {shared}", f"else {own}"]

    def _emit_convolution(self, i: int, block: LaneBlock, is_training: bool) -> list[str]:
        lines = self._emit_input(i, block, is_training) if i == 0 else []
        if not block.conv:
            return lines
        call = f"convolve<C{i}>({{}}, w{i}, bias{i}, {self._at(f'y{i}', is_training)}, {{}});"
        rows, x = f"0, C{i}::HO", self._at(f"x{i}", is_training)
        if _has_strips(block):
            lines.append(f"for (int r = 0; r < P{i}::HO; r += strip{i}) {{")
            rows = f"r * P{i}::KH, min_of(r + strip{i}, P{i}::HO) * P{i}::KH"
        if i == 0:
            lines.append(f"if (is_shared) {call.format('reinterpret_cast<const float*>(s0)', rows)}")
            lines.append(f"else {call.format(x, rows)}")
        else:
            lines.append(call.format(x, rows))
        if _has_strips(block):
            y = f"y{i} - r * P{i}::KH * P{i}::W * P{i}::C"
            lines += [self._pool_largest(i, block, y, f"r, min_of(r + strip{i}, P{i}::HO)", is_training), "}"]
        return lines

    def _pool_largest(self, i: int, block: LaneBlock, y: str, rows: str, is_training: bool) -> str:
        flags = f"{_boolean(block.norm)}, {_boolean(block.is_rectified)}"
        chosen = f"reinterpret_cast<Q*>({self._at(f'a{i}', is_training)})"
        out = self._at(f"x{i + 1}", is_training)
        return f"pool_largest<P{i}, {flags}>({y}, {self._factors(i)}, {out}, {chosen}, {rows});"

    def _factors(self, i: int) -> str:
        return f"factor{i}, offset{i}" if self.blocks[i].norm else "nullptr, nullptr"

    def _emit_operation(self, i: int, block: LaneBlock, is_training: bool) -> list[str]:
        operation = block.operation
        y = self._middle(i, is_training)
        out = self._at(f"x{i + 1}", is_training)
        if isinstance(operation, PoolLayer):
            if _has_strips(block):
                return []
            if operation.kind == "max":
                return [self._pool_largest(i, block, y, f"0, P{i}::HO", is_training)]
            return [f"pool_mean<P{i}, {_boolean(block.norm)}>({y}, {self._factors(i)}, {out});"]
        lines = []
        if isinstance(operation, DropoutLayer) and is_training:
            lines.append(self._read_mask(i, block))
        kind = f"Kind::{operation.kind if isinstance(operation, ActivationLayer) else 'identity'}"
        sizes = self._pointwise_sizes(i, block)
        lines.append(f"apply<{sizes}, {kind}, {_boolean(block.norm)}>({y}, {self._factors(i)}, {out});")
        if isinstance(operation, DropoutLayer) and is_training:
            lines.append(f"multiply<{sizes}>({out}, mask{i});")
        return lines

    def _read_mask(self, i: int, block: LaneBlock) -> str:
        c, h, w = block.middle_shape
        return f"exchange_image<{c}, {h}, {w}, {w}, 0, true>({self._slot(f'{i}.mask')}, k, b, mask{i});"

    def _pointwise_sizes(self, i: int, block: LaneBlock) -> str:
        c, h, w = block.middle_shape
        width, first = self._output_columns(i)
        return f"{h}, {w}, {c}, {width}, {first}"

    # Backward

    def _emit_backward(self) -> list[str]:
        lines: list[str] = []
        for i, block in enumerate(self.blocks):
            if block.conv:
                lines += [f"memset({n}{i}, 0, {n}{i}_size * sizeof(V));" for n in ("dw", "db")]
            if block.conv and i:
                lines.append(f"read_transposed_weights<C{i}>({self._slot(f'{i}.weight')}, k, wt{i});")
            if block.norm:
                lines += [f"memset({n}{i}, 0, {n}{i}_size * sizeof(V));" for n in ("dgamma", "dbeta")]
        (c, h, w), count = self.plan.feature_shape, len(self.blocks)
        gradient = self._at(f"g{count}", True)
        body = [f"exchange_image<{c}, {h}, {w}, {w}, 0, true>({self._gradient('features')}, k, b, {gradient});"]
        for i, block in reversed(list(enumerate(self.blocks))):
            is_read_only = i == 0 and not block.conv
            if is_read_only and not block.norm:
                break
            body += self._emit_operation_backward(i, block)
            if block.norm:
                arrays = f"{self._inner(i, block)[0]}, {self._middle(i, True)}, mean{i}, dbeta{i}, dgamma{i}"
                body.append(f"sum_moments<{self._moment_sizes(i, block)}>({arrays});")
                lines += [*self._loop(body), *self._emit_norm_gradients(i, block)]
                body = [] if is_read_only else self._emit_operation_backward(i, block)
            if is_read_only:
                break
            body += self._emit_convolution_backward(i, block)
        lines += self._loop(body)
        for i, block in enumerate(self.blocks):
            if block.conv:
                lines.append(
                    f"exchange_weights<C{i}, false>({self._gradient(f'{i}.weight')}, k, dw{i}, C{i}::WEIGHT.S);"
                )
                if block.conv.has_bias:
                    lines.append(f"write_rows({self._gradient(f'{i}.bias')}, k, C{i}::O, db{i});")
        return lines

    def _inner(self, i: int, block: LaneBlock) -> tuple[str, str]:
        """Where the gradient of what the operation gets is written, and how wide its rows are."""
        if block.conv:
            return f"d{i} + C{i}::DL * C{i}::O", f"C{i}::DW"
        return self._at(f"g{i}", True), str(block.input_shape[2])

    def _emit_operation_backward(self, i: int, block: LaneBlock) -> list[str]:
        operation, (to, width) = block.operation, self._inner(i, block)
        g = self._at(f"g{i + 1}", True)
        if isinstance(operation, PoolLayer):
            if operation.kind == "max":
                chosen = f"reinterpret_cast<const Q*>({self._at(f'a{i}', True)})"
                return [f"unpool_largest<P{i}, {width}>({g}, {chosen}, {to});"]
            return [f"unpool_mean<P{i}, {width}>({g}, {to});"]
        kind = f"Kind::{operation.kind if isinstance(operation, ActivationLayer) else 'identity'}"
        out = self._at(f"x{i + 1}", True)
        lines = [f"unapply<{self._pointwise_sizes(i, block)}, {width}, {kind}>({g}, {out}, {to});"]
        if _needs_input(block):
            c, h, w = block.middle_shape
            arrays = f"{g}, {self._middle(i, True)}, {self._factors(i)}, {to}"
            lines = [f"unapply_at<{h}, {w}, {c}, {width}, {kind}, {_boolean(block.norm)}>({arrays});"]
        if isinstance(operation, DropoutLayer):
            c, h, w = block.middle_shape
            lines += [self._read_mask(i, block), f"multiply<{h}, {w}, {c}, {width}, 0>({to}, mask{i});"]
        return lines

    def _moment_sizes(self, i: int, block: LaneBlock) -> str:
        c, h, w = block.middle_shape
        return f"{h}, {w}, {c}, {self._inner(i, block)[1]}, {w}"

    def _emit_norm_gradients(self, i: int, block: LaneBlock) -> list[str]:
        """Gradients of the factor and offset, and from their sums what the second loop needs."""
        assert block.norm
        channels, size = block.middle_shape[0], prod(block.middle_shape[1:])
        lines = [f"for (int c = 0; c < {channels}; c++) {{"]
        lines += [
            f"    slope{i}[c] = dgamma{i}[c] * inverse{i}[c] * inverse{i}[c] * factor{i}[c] / ((float)B * -{size});"
        ]
        lines += [f"    level{i}[c] = dbeta{i}[c] * factor{i}[c] / ((float)B * -{size});"]
        lines += [f"    dgamma{i}[c] *= inverse{i}[c];", "}"]
        if block.norm.is_affine:
            for name in ("gamma", "beta"):
                lines.append(f"write_rows({self._gradient(f'{i}.{name}')}, k, {channels}, d{name}{i});")
        return lines

    def _emit_convolution_backward(self, i: int, block: LaneBlock) -> list[str]:
        """Include what batch norm does to the gradient before it."""
        lines, (d, _) = [], self._inner(i, block)
        if block.norm:
            arrays = f"{d}, {self._middle(i, True)}, mean{i}, factor{i}, slope{i}, level{i}"
            lines.append(f"unnormalise<{self._moment_sizes(i, block)}>({arrays});")
        if not block.conv:
            return lines
        if block.conv.has_bias:
            lines.append(f"sum_channels<C{i}::HO, C{i}::WO, C{i}::O, C{i}::DW>({d}, db{i});")
        if i:
            lines.append(f"differentiate_weights<C{i}>({self._at(f'x{i}', True)}, {d}, dw{i});")
            lines.append(f"differentiate_input<C{i}>({d}, wt{i}, {self._at(f'g{i}', True)});")
            return lines
        call = f"differentiate_weights<C{i}>({{}}, {d}, dw{i});"
        lines += self._emit_input(i, block, is_training=True)
        lines.append(f"if (is_shared) {call.format('reinterpret_cast<const float*>(s0)')}")
        lines.append(f"else {call.format(f'x{i}')}")
        return lines


def _boolean(value: object) -> str:
    return "true" if value else "false"


def _needs_input(block: LaneBlock) -> bool:
    """Whether the operation's gradient is a function of what it was given, not of what it gave."""
    return isinstance(block.operation, ActivationLayer) and block.operation.kind in ("gelu", "silu")


def _has_strips(block: LaneBlock) -> bool:
    """Whether a few pooled rows are computed at a time, while what is pooled is in the cache."""
    pool = block.operation
    if not block.conv or block.norm or not isinstance(pool, PoolLayer) or pool.kind != "max":
        return False
    return pool.kernel == pool.stride and pool.padding == (0, 0)
