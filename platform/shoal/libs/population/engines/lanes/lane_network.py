"""The engine of members as lanes: chains of layers as blocks of compiled lanes, then stacked matrix products.

On a CPU it wins for networks of small convolutions. A `LaneNetwork` of each input shape owns a model's library and the
workspaces of its calls, and holds no weights. It is compiled at its first batch by $CXX, else g++ or clang++ of the
PATH; libraries are stored in the home's folder, by a hash of source, options, compiler and CPU.
Legend: k members, B samples, L lanes.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.atomic_file import make_folder
from shoal.differentiation import is_each_operation_needed, is_plain_backward_needed
from shoal.home import file_lock, home
from shoal.libs.population.engines.engine import DifferentiableEngine, EngineMisfit, Generators, Inputs, Tensors
from shoal.libs.population.engines.lanes.generate_source import generate_source
from shoal.libs.population.engines.lanes.layer_graph import read_layer_graph
from shoal.libs.population.engines.lanes.layers import (
    ActivationLayer,
    BatchNormLayer,
    DropoutLayer,
    FlattenLayer,
    Layer,
    LayerNormLayer,
    LinearLayer,
    plan_blocks,
)
from shoal.libs.population.engines.member_dropout import draw_masks
from shoal.libs.population.objective import Objective

MAX_DIMS = 5
KERNELS = Path(__file__).parent / "kernels"
OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fno-trapping-math", "-fno-math-errno", "-shared", "-fPIC")
COMPILE_TIMEOUT_S = 600


class LanesEngine(DifferentiableEngine):
    """Raises EngineMisfit, at the first batch too, for a model that is no chain of known layers, with the reason."""

    name = "lanes"

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__(objective)
        self.model = model
        self._networks: dict[tuple[int, ...], LaneNetwork] = {}

    def forward(
        self, parameters: Tensors, buffers: Tensors, inputs: Inputs, *, is_own: bool, generators: Generators
    ) -> Tensor:
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor):
            raise EngineMisfit("cannot be lanes because its input is not one tensor")
        samples = inputs[0][0] if is_own else inputs[0]
        if samples.device.type != "cpu":
            raise EngineMisfit(f"cannot be lanes because its device is {samples.device.type}, not a CPU")
        if samples.requires_grad or is_each_operation_needed():
            raise EngineMisfit("cannot be lanes because its inputs need gradients: engine=auto takes another")
        shape = tuple(samples.shape[1:])
        if shape not in self._networks:
            self._networks[shape] = LaneNetwork(self.model, samples)
        network = self._networks[shape]
        return network.forward(parameters, buffers, inputs[0], is_own=is_own, generators=generators)


class LaneNetwork:
    """A model's forward and backward for k members, up to L of them in one call of the kernels.

    Raises EngineMisfit where the model is no chain of known layers in float32, or there is no compiler.
    options: of the compiler, for tests
    """

    def __init__(self, model: nn.Module, example_input: Tensor, options: tuple[str, ...] = ()) -> None:
        if any(each.dtype != torch.float32 for each in (*model.parameters(), example_input)):
            raise EngineMisfit("cannot be lanes because its numbers are not all float32")
        self.plan = plan_blocks(read_layer_graph(model, tuple(example_input.shape[1:])))
        source = generate_source(self.plan)
        self.slots = source.slots
        self.library = load_kernels(source.text, options)
        self.library.workspace_bytes.restype = ctypes.c_long
        self.num_lanes: int = self.library.count_lanes()
        self.names: dict[str, str] = {}  # {slot: name of the parameter}
        for index, block in enumerate(self.plan.blocks):
            if block.conv:
                self.names[f"{index}.weight"] = f"{block.conv.name}.weight"
                if block.conv.has_bias:
                    self.names[f"{index}.bias"] = f"{block.conv.name}.bias"
            if block.norm and block.norm.is_affine:
                norm = block.norm.name
                self.names |= {f"{index}.gamma": f"{norm}.weight", f"{index}.beta": f"{norm}.bias"}
        self._spaces: dict[int, list[Tensor]] = {}

    def forward(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor, *, is_own: bool = False, generators: Generators
    ) -> Tensor:
        """Outputs [k, B, ...]; differentiable in the parameters in training.

        parameters: {name: [k, *shape]}; buffers: {name: [k, *shape]}, whose running statistics training changes
        inputs:     [B, ...] of all members, or [k, B, ...] where is_own
        generators: one a member in training, for dropout; None in evaluation
        Raises ValueError for inputs of another shape or type.
        """
        tensors = {slot: parameters[name] if name in parameters else buffers[name] for slot, name in self.names.items()}
        k, batch = len(next(iter(tensors.values()))), inputs.shape[1 if is_own else 0]
        expected = self.plan.input_shape
        if tuple(inputs.shape[2 if is_own else 1 :]) != expected or inputs.dtype != torch.float32:
            raise ValueError(f"inputs {list(inputs.shape)} of {inputs.dtype} are no float32 samples {list(expected)}")
        for index, block in enumerate(self.plan.blocks):
            if isinstance(block.operation, DropoutLayer) and generators is not None:
                tensors[f"{index}.mask"] = draw_mask(block.operation, k, batch, generators)
        others = {}  # statistics of batch normalisation
        for index, block in enumerate(self.plan.blocks):
            if block.norm is None:
                continue
            for kind, suffix in (("mean", "mean"), ("variance", "var")):
                running = buffers[f"{block.norm.name}.running_{suffix}"]
                others[f"{index}.{kind}"] = torch.empty(running.shape) if generators is not None else running
        if generators is not None:
            arguments = (self, is_own, inputs, others, list(tensors), *tensors.values())
            features: Tensor = _Blocks.apply(*arguments)  # type: ignore[no-untyped-call]
            for index, block in enumerate(self.plan.blocks):
                if block.norm:
                    count = batch * prod(block.middle_shape[1:])
                    mean, variance = others[f"{index}.mean"], others[f"{index}.variance"]
                    update_statistics(block.norm, buffers, mean, variance, count)
        else:
            features = torch.empty(k, batch, *self.plan.feature_shape)
            call = _Call(self, is_own, inputs, {**tensors, **others, "features": features})
            space = self.take_space(1)
            for start in range(0, k, self.num_lanes):
                call.run("evaluate", start, min(self.num_lanes, k - start), space)
            self.give_space(1, space)
        return apply_head(self.plan.head, features, parameters, buffers, generators)

    def take_space(self, batch: int) -> Tensor:
        """A workspace for a batch; what it stores between samples' borders is zero, and stays so."""
        unused = self._spaces.setdefault(batch, [])
        return unused.pop() if unused else torch.zeros(self.library.workspace_bytes(ctypes.c_long(batch)) // 4)

    def give_space(self, batch: int, space: Tensor) -> None:
        self._spaces[batch].append(space)


@dataclass
class _Call:
    """The tensors of a call of the kernels: {slot: [k, ...]}; a shared input is [B, ...]."""

    network: LaneNetwork
    is_own: bool
    inputs: Tensor
    tensors: dict[str, Tensor]

    def run(
        self, function: str, start: int, count: int, space: Tensor, gradients: Mapping[str, Tensor] | None = None
    ) -> None:
        """Call the function for members `start` to `start + count`."""
        inputs = self.inputs if self.is_own else self.inputs.unsqueeze(0)
        batch = inputs.shape[1]
        rows = self._table({**self.tensors, "input": inputs}, start)
        slopes = self._table(gradients or {}, start)
        pointer = ctypes.c_void_p(space.data_ptr())
        self.network.library[function](batch, count, int(not self.is_own), rows, slopes, pointer)

    def _table(self, tensors: Mapping[str, Tensor], start: int) -> Any:
        """List each slot's address and strides, which are `Rows` in the source."""
        numbers = [0] * ((MAX_DIMS + 1) * len(self.network.slots))
        for slot, tensor in tensors.items():
            at = self.network.slots[slot] * (MAX_DIMS + 1)
            strides = tensor.stride()
            if slot == "input" and not self.is_own:
                strides = (0, *strides[1:])
            numbers[at] = tensor.data_ptr() + start * strides[0] * 4
            numbers[at + 1 : at + 1 + len(strides)] = strides
        return (ctypes.c_long * len(numbers))(*numbers)


class _Blocks(torch.autograd.Function):
    """(network, is_own, inputs, statistics, slots, *tensors [k, ...]) to features [k, B, ...]."""

    @staticmethod
    def forward(
        ctx: Any,
        network: LaneNetwork,
        is_own: bool,
        inputs: Tensor,
        others: dict[str, Tensor],
        slots: list[str],
        *tensors: Tensor,
    ) -> Tensor:
        named = {**dict(zip(slots, tensors, strict=True)), **others}
        k, batch = len(tensors[0]), inputs.shape[1 if is_own else 0]
        features = torch.empty(k, batch, *network.plan.feature_shape)
        call = _Call(network, is_own, inputs, {**named, "features": features})
        ctx.spaces = []
        for start in range(0, k, network.num_lanes):
            ctx.spaces.append(network.take_space(batch))
            call.run("train_forward", start, min(network.num_lanes, k - start), ctx.spaces[-1])
        ctx.network = network
        ctx.is_own = is_own
        ctx.slots = slots
        ctx.save_for_backward(inputs, *tensors)
        return features

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if is_plain_backward_needed(gradient):
            raise EngineMisfit("gives no second derivatives (create_graph=True): engine=auto takes another")
        inputs, *tensors = ctx.saved_tensors
        network: LaneNetwork = ctx.network
        k, batch = gradient.shape[:2]
        named = dict(zip(ctx.slots, tensors, strict=True))
        slopes = {slot: _empty_like(tensor) for slot, tensor in named.items() if not slot.endswith("mask")}
        call = _Call(network, ctx.is_own, inputs, named)
        for start, space in zip(range(0, k, network.num_lanes), ctx.spaces, strict=True):
            count = min(network.num_lanes, k - start)
            call.run("train_backward", start, count, space, {**slopes, "features": gradient})
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            for space in ctx.spaces:
                network.give_space(batch, space)
            ctx.spaces = []
        return None, None, None, None, None, *(slopes.get(slot) for slot in ctx.slots)


def _empty_like(tensor: Tensor) -> Tensor:
    """Keep the tensor's order of dimensions in memory, so that a copy into a row is one of runs."""
    if tensor.dim() != MAX_DIMS:
        return torch.empty(tensor.shape)
    k, o, c, kh, kw = tensor.shape
    return torch.empty(k, o, kh, kw, c).permute(0, 1, 4, 2, 3)


# -- the head: layers on features [k, B, F], by batched matrix products and elementwise operations of torch


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
    shape = (batch, layer.input_shape[0], 1, 1) if layer.drops_channels else (batch, *layer.input_shape)
    masks = torch.zeros(k, *shape)
    if layer.probability < 1:
        masks = draw_masks(shape, layer.probability, generators, masks)
    return masks.expand(k, batch, *layer.input_shape)


def load_kernels(source: str, options: tuple[str, ...] = ()) -> ctypes.CDLL:
    """The library of a source, compiled where this machine has none yet. Its calls release the GIL.

    options: of the compiler, after the usual ones. Raises EngineMisfit without a compiler, or where it fails.
    """
    compiler = find_compiler()
    options = (*OPTIONS, *options)
    parts = [source, *(path.read_text() for path in sorted(KERNELS.glob("*.hpp"))), *compiler, *options, _cpu()]
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    folder = home() / "kernels"
    path = folder / f"{name}.so"
    make_folder(folder)
    with file_lock(folder / "compile.lock", 2 * COMPILE_TIMEOUT_S):  # threads and processes need the same one
        if not path.exists():
            command = [*compiler, *options]
            with tempfile.TemporaryDirectory(dir=folder) as drafts:
                draft = Path(drafts, "kernels.so")
                arguments = [*command, "-w", "-I", str(KERNELS), "-x", "c++", "-", "-o", str(draft)]
                done = subprocess.run(
                    arguments, input=source, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S
                )
                if done.returncode:
                    lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                    raise EngineMisfit(f"cannot be lanes because the compiler failed: {' '.join(command)}: {lines[:1]}")
                os.replace(draft, path)
    return ctypes.CDLL(str(path))


def find_compiler() -> list[str]:
    """Return its command. Raises EngineMisfit without one."""
    if given := os.environ.get("CXX"):
        command = shlex.split(given)
        if not shutil.which(command[0]):
            raise EngineMisfit(f"cannot be lanes because CXX = {given!r} is no program")
        return command
    for name in ("g++", "clang++"):
        if path := shutil.which(name):
            return [path]
    raise EngineMisfit("cannot be lanes because there is no C++ compiler: install g++, or set CXX")


@cache
def _cpu() -> str:
    """What `-march=native` depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()} {platform.node()}"
    kinds = ("model name", "flags", "Features", "CPU part", "cpu family", "model")
    return "\n".join(sorted({line for line in lines if line.partition("\t")[0].strip() in kinds}))
