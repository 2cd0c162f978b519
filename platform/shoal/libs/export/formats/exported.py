"""A program of torch.export (.pt2): weights and operations in one file, without their Python code.

Called by the predictor, and by `shoal models add` for the signature. torch.export imports much of torch, so it is
imported when the first program is loaded. Each version is a separate file and is compiled separately. An endpoint
checks each request by the `SizeLimits` of a version; a batch of another number of rows than the program admits is
computed in parts, or padded (`LimitedForward`).
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from shoal.errors import ConfigError, InferenceError, WeightsError
from shoal.extend.registry import Signature, TensorSignature
from shoal.extend.serve import Arrays, Forward, TemplateConfig, choose_kernels, make_torch_forward
from shoal.open_inference.datatypes import BY_NUMPY_NAME
from shoal.weights import WeightSnapshot

_DATATYPES = {getattr(torch, name): datatype for name, datatype in BY_NUMPY_NAME.items()} | {torch.bfloat16: "BF16"}
# torch traces with sizes of at least 2: a bound up to this is its own, or the user's, and it enforces neither.
MIN_TRACED = 2


class ExportedTemplate:
    """Programs with one signature, one for each version."""

    def __init__(self, setting: TemplateConfig) -> None:
        self._setting = setting

    def load(self, snapshot: WeightSnapshot) -> Forward:
        program = load_program(snapshot.payload, f"version {snapshot.version}")
        if self._setting.device != "cpu":
            from torch.export.passes import move_to_device_pass

            # With its index, as tensors on it have: a program may compare their device with this one.
            program = move_to_device_pass(program, f"cuda:{torch.cuda.current_device()}")
        module = flatten_program(program.module(check_guards=False))
        if self._setting.options.compile:
            module = torch.compile(module)
        elif self._setting.device == "cpu":
            choose_kernels(module)
        forward = make_torch_forward(bind_constants(program, module), self._setting)
        signature, options = self._setting.signature, self._setting.options
        inputs, outputs = (
            {spec.name: options.get_batch_dim(spec.name) for spec in side}
            for side in (signature.inputs, signature.outputs)
        )
        if self._setting.has_preprocess:  # what it gives has rows in dimension 0
            inputs = {each.name: 0 for each in _read_arguments(program)[0] if each.name is not None}
        return LimitedForward(forward, _read_limits(program, inputs), inputs | outputs)


def _read_limits(program: Any, batch_dims: Mapping[str, int | None]) -> SizeLimits:
    """Read the limits of a program's inputs; of sizes that are linear in one symbol.

    batch_dims: the dimension of each input's batch, by its name in a request, in order
    """
    nodes = {node.name: node for node in program.graph.nodes}
    tensors = [argument.name for argument in _read_arguments(program)[0] if argument.name is not None]
    shapes = {name: nodes[tensor].meta["val"].shape for name, tensor in zip(batch_dims, tensors, strict=True)}
    dimensions: list[Dimension] = []
    for name, shape in shapes.items():
        for index, size in enumerate(shape):
            symbols = [] if isinstance(size, int) else list(size.node.expr.free_symbols)
            if len(symbols) != 1:
                continue
            expression, (symbol,) = size.node.expr, symbols
            offset, factor = expression.subs(symbol, 0), expression.coeff(symbol, 1)
            if expression == factor * symbol + offset and factor > 0:
                batch = batch_dims[name]
                position = 0 if index == batch else index + (batch is None or index < batch)
                dimensions.append(Dimension(name, index, position, str(symbol), int(factor), int(offset)))
    sizes = {
        str(symbol): SizeRange(int(values.lower), int(values.upper) if values.upper.is_Integer else None)
        for symbol, values in program.range_constraints.items()
    }
    rows = {each.symbol for each in dimensions if each.position == 0}
    inner = [each for each in dimensions if each.symbol in sizes.keys() - rows]
    bounds = [sizes[each.symbol] for each in dimensions if each.position == 0 and each.symbol in sizes]
    return SizeLimits(inner, sizes, bounds[0] if bounds else SizeRange())


def flatten_program(module: Any) -> Any:
    """The program without the checks and nesting of its inputs, which are flat and already checked."""
    from torch.fx.graph import CodeGen

    module._forward_pre_hooks.clear()
    module._forward_pre_hooks_with_kwargs.clear()
    module.graph.set_codegen(CodeGen())
    module.recompile()
    return module


class _Argument(NamedTuple):
    """An input or output of a program: a tensor's name; or None and the exported constant."""

    name: str | None
    value: Any


def _read_arguments(program: Any) -> tuple[list[_Argument], list[_Argument]]:
    """Read a program's flat inputs and outputs."""
    from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

    def read(argument: Any) -> _Argument:
        is_constant = isinstance(argument, ConstantArgument)
        return _Argument(None, argument.value) if is_constant else _Argument(argument.name, None)

    signature = program.graph_signature
    given = [read(each.arg) for each in signature.input_specs if each.kind is InputKind.USER_INPUT]
    return given, [read(each.arg) for each in signature.output_specs if each.kind is OutputKind.USER_OUTPUT]


def bind_constants(program: Any, call: Callable[..., Any]) -> Callable[..., Any]:
    """Bind a flat program to its exported constants, as a function of its tensors alone."""
    inputs, outputs = _read_arguments(program)
    if all(each.name is not None for each in (*inputs, *outputs)):
        return call

    def called(*tensors: torch.Tensor) -> list[Any]:
        ahead = iter(tensors)
        results = call(*[each.value if each.name is None else next(ahead) for each in inputs])
        return [result for result, each in zip(results, outputs, strict=True) if each.name is not None]

    return called


def read_signature(payload: bytes, file: str) -> Signature:
    """Read a program's signature. Raises ConfigError.

    Inputs have the names of its forward's arguments, outputs the keys of the returned dict. Without a dict they are
    `output`, or `output_0`, ... for several. Values other than tensors, such as None, are left out.
    """
    program = load_program(payload, file)
    nodes = {node.name: node for node in program.graph.nodes}
    given, made = _read_arguments(program)
    outputs = _name_outputs(program.call_spec.out_spec, [each.name for each in made])
    return Signature(
        inputs=[_to_tensor_signature(file, each.name, nodes[each.name]) for each in given if each.name is not None],
        outputs=[
            _to_tensor_signature(file, output_name, nodes[name]) for output_name, name in outputs if name is not None
        ],
    )


def _name_outputs(spec: Any, outputs: Sequence[str | None]) -> list[tuple[str, str | None]]:
    """Name the outputs nested by `spec`, a TreeSpec, by the keys of a flat dict when all are strings."""
    given = spec.unflatten(outputs)
    is_flat = isinstance(given, dict) and list(given.values()) == list(outputs)
    if is_flat and all(isinstance(key, str) and key.isidentifier() for key in given):
        return list(given.items())
    tensors = [name for name in outputs if name is not None]
    if len(tensors) == 1:
        return [("output", tensors[0])]
    return [(f"output_{index}", name) for index, name in enumerate(tensors)]


def load_program(payload: bytes, what: str) -> Any:
    """Load a file's program. Raises WeightsError."""
    import torch.export

    logged: list[BaseException] = []

    def keep_errors(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        logged.extend([error] if error else [])
        return error is None

    logger = logging.getLogger("torch.export")
    logger.addFilter(keep_errors)  # torch logs the first error as a traceback instead of raising it
    try:
        return torch.export.load(io.BytesIO(payload))
    except Exception as error:  # it has no error class: zip, pickle, JSON and schema errors arrive here
        reason = str(logged[0] if logged else error).partition(". ")[0]  # advice follows
        raise WeightsError(f"{what} is not a program of torch.export that this torch can load: {reason}") from error
    finally:
        logger.removeFilter(keep_errors)


def _to_tensor_signature(file: str, name: str, node: Any) -> TensorSignature:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        raise ConfigError("file", file, f"{name!r} is not a tensor", "export a model that takes and gives tensors")
    shape = [size if isinstance(size, int) else -1 for size in value.shape]
    return TensorSignature(name=name, datatype=_DATATYPES[value.dtype], shape=shape)


class SizeRange(NamedTuple):
    """The bounds of a size; `most` is None without an upper one."""

    least: int = 0
    most: int | None = None

    def has(self, size: int) -> bool:
        """Whether the program admits this size."""
        return not self.is_below(size) and (self.most is None or size <= self.most)

    def is_below(self, size: int) -> bool:
        """Whether the size is too small."""
        return size < self.least and self.least > MIN_TRACED


class Dimension(NamedTuple):
    """Dimension `axis` of an input: its size is `factor` times the size `symbol`, plus `offset`.

    position: of the dimension in batch-first arrays (`BatchLayout`)
    """

    input: str
    axis: int
    position: int
    symbol: str
    factor: int = 1
    offset: int = 0

    def format_range(self, size: SizeRange) -> str:
        """`2 to 64`, or `at least 6 in steps of 2`."""
        least = self.factor * size.least + self.offset
        bounds = f"at least {least}" if size.most is None else f"{least} to {self.factor * size.most + self.offset}"
        return bounds if self.factor == 1 else f"{bounds} in steps of {self.factor}"


class SizeLimits:
    """The limits of one version.

    dimensions: the variable dimensions, except the rows
    sizes:      the bounds of their symbols
    rows:       the bounds of a batch
    """

    def __init__(
        self,
        dimensions: Sequence[Dimension] = (),
        sizes: Mapping[str, SizeRange] | None = None,
        rows: SizeRange = SizeRange(),  # noqa: B008 - immutable
    ) -> None:
        self._dimensions = dimensions
        self._sizes = sizes or {}
        self.rows = rows

    def check(self, inputs: Arrays) -> None:
        """Check a request's inputs, batch-first. Raises InferenceError (422)."""
        sizes: dict[str, tuple[int, Dimension]] = {}
        for dimension in self._dimensions:
            name, axis, position, symbol, factor, offset = dimension
            actual, bounds = inputs[name].shape[position], self._sizes[symbol]
            size, rest = divmod(actual - offset, factor)
            if rest or not bounds.has(size):
                expected = f"this version takes {dimension.format_range(bounds)} in dimension {axis}"
                raise InferenceError(422, f"input {name!r}: {expected}, got {actual}")
            other_size, other = sizes.setdefault(symbol, (size, dimension))
            if size != other_size:
                given = f"{inputs[other.input].shape[other.position]} in dimension {other.axis} of {other.input!r}"
                expected = f"expected {factor * other_size + offset} in dimension {axis}, as given by {given}"
                raise InferenceError(422, f"input {name!r}: {expected}, got {actual}")


class LimitedForward:
    """A forward that computes a larger batch than the version admits in parts, and pads a smaller one with its last
    row.

    batch_dims: the dimension of the batch in inputs and outputs; None for a tensor without it
    """

    def __init__(self, forward: Forward, limits: SizeLimits, batch_dims: Mapping[str, int | None]) -> None:
        self._forward = forward
        self.limits = limits
        self._batch_dims = batch_dims

    def __call__(self, inputs: Arrays) -> Arrays:
        limit = self.limits.rows
        if limit == SizeRange() or limit.has(num_rows := self._count_rows(inputs)):
            return self._forward(inputs)
        step = limit.most or num_rows
        parts = []
        for start in range(0, num_rows, step):
            rows = np.arange(start, min(start + step, num_rows))
            if not limit.is_below(len(rows)):
                parts.append(self._forward(self._select_rows(inputs, rows)))
                continue
            padded = self._select_rows(inputs, start + np.minimum(np.arange(limit.least), len(rows) - 1))
            parts.append(self._select_rows(self._forward(padded), np.arange(len(rows))))
        joined = {}
        for name, first in parts[0].items():
            dimension = self._batch_dims.get(name, 0)
            joined[name] = first if dimension is None else np.concatenate([part[name] for part in parts], dimension)
        return joined

    def _count_rows(self, inputs: Arrays) -> int:
        return next(
            int(array.shape[dimension])
            for name, array in inputs.items()
            if (dimension := self._batch_dims.get(name, 0)) is not None
        )

    def _select_rows(self, arrays: Arrays, rows: np.ndarray) -> Arrays:
        return {
            name: array if (dimension := self._batch_dims.get(name, 0)) is None else array.take(rows, dimension)
            for name, array in arrays.items()
        }
