"""A forward from arrays to arrays through torch, shared by the formats that run in torch.

Called by `module`, `exported` and `torchscript`. Knows the datatypes, the device and the precision; never a weight.

Linear layers in float32 run with the faster of torch's two CPU libraries (`choose_kernels`). torch uses MKL, which
leaves half of a non-Intel processor unused: on an AMD EPYC, [64, 1024] by [1024, 2048] takes oneDNN 2.2 ms and MKL 7.1.
For few rows oneDNN's calls cost more than they save. The faster library is measured once per process. A model's
weights, names and attributes do not change.

`copy_to_host` is the one place where memory of the host is pinned for outputs. The device writes to pinned memory by
itself, so all outputs are under way before the one wait, and no driver copies them a second time; torch reuses that
memory once an output is garbage. Small outputs are copied plainly, and so are inputs, which would have to be copied
into pinned memory first.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from shoal.errors import InferenceError
from shoal.registry.manifest import TensorSignature
from shoal.serve.model.formats.template import Arrays, Forward, TemplateConfig

PINNED_BYTES = 1 << 20  # from which size on; benchmarks/gpu/predictor.py compares


def copy_to_host(outputs: Iterable[Any]) -> list[Any]:
    """Copy each tensor of the device into its own memory; other values are returned as they are."""
    copies, must_wait = [], False
    for each in outputs:
        if isinstance(each, Tensor) and each.nbytes >= PINNED_BYTES:
            each, must_wait = _allocate_pinned(each).copy_(each, non_blocking=True), True
        elif isinstance(each, Tensor):
            each = each.to("cpu", copy=True)
        copies.append(each)
    if must_wait:
        _wait_for_copies()
    return copies


def _allocate_pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _wait_for_copies() -> None:
    torch.cuda.current_stream().synchronize()


# Floating-point outputs whose type a forward's precision may have changed, and the signature's type.
_FLOATS = {"FP16": torch.float16, "BF16": torch.bfloat16, "FP32": torch.float32, "FP64": torch.float64}

COPIED_BYTES = 4096  # up to which an output is copied, which takes less time than to look for another owner
MIN_ROWS = 8
MIN_PRODUCTS = 2**20  # rows by inputs by outputs: below it both take microseconds
MIN_SPEEDUP = 1.2  # the required speed-up, so that noise does not decide
_NUM_TIMINGS = 7


def make_torch_forward(
    call: Callable[..., Any], setting: TemplateConfig, *, by_name: bool = False, names: frozenset[str] = frozenset()
) -> Forward:
    """Wrap `call`, a function of tensors (by name or in order), as a forward of arrays.

    names: its parameters, by which it gets what a preprocessing hook gave, where all of that has these names
    """
    parameters = names if setting.has_preprocess else frozenset()
    device = torch.device(setting.device)
    bf16_inputs, outputs = setting.bf16_inputs, setting.outputs
    as_they_are = device.type == "cpu" and not bf16_inputs
    writes = False  # whether the model writes to its inputs, which belong to the callers (a shadow reads them again)

    def forward(inputs: Arrays) -> Arrays:
        nonlocal writes
        # Not in inference mode, in which a tensor does not count its writes.
        tensors = [to_tensor(array, writes) for array in inputs.values()]
        if not as_they_are:
            pairs = zip(inputs, tensors, strict=True)
            tensors = [each.view(torch.bfloat16) if name in bf16_inputs else each for name, each in pairs]
            tensors = [each.to(device) if isinstance(each, Tensor) else each for each in tensors]
        with _InferenceMode(True):
            is_named = by_name or (parameters and parameters.issuperset(inputs))
            result = call(**dict(zip(inputs, tensors, strict=True))) if is_named else call(*tensors)
            for each in tensors:
                # A caller's own inference mode, as a program around `shoal.load` may have, leaves no version.
                writes = writes or (isinstance(each, Tensor) and not each.is_inference() and each._version > 0)
            found = name_all_outputs(result) if outputs is None else select_outputs(result, outputs)
            if device.type != "cpu":
                names = [name for name, each in found.items() if isinstance(each, Tensor) and each.is_cuda]
                found.update(zip(names, copy_to_host(found[name] for name in names), strict=True))
        del result  # an output that the model does not retain has no other owner then
        for name in found:
            found[name] = to_array(found[name])
        return found

    def forward_bf16(inputs: Arrays) -> Arrays:
        # Weights are already bfloat16 where they should be: there is nothing to cache.
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            return forward(inputs)

    return forward_bf16 if setting.options.precision == "bf16" else forward


def to_tensor(array: np.ndarray, copies: bool) -> Any:
    """The array as a tensor, in the same memory unless it is read-only or has negative strides, as no tensor has.

    BYTES, which torch does not have, stay arrays.
    """
    if copies or not (array.flags.carray or (array.flags.writeable and min(array.strides, default=0) >= 0)):
        array = array.copy()
    return array if array.dtype.hasobject else torch.from_numpy(array)


def select_outputs(result: Any, specs: Sequence[TensorSignature]) -> dict[str, Any]:
    """Select the signature's outputs from a model's result: a dict by name, a tensor or a tuple in the signature's
    order."""
    if isinstance(result, Tensor) and len(specs) == 1:
        return {specs[0].name: _detach_output(result, specs[0])}
    if not isinstance(result, Mapping):
        values = (result,) if isinstance(result, Tensor | np.ndarray) else result
        result = {spec.name: value for spec, value in zip(specs, values, strict=False)}
    promised = {}
    for spec in specs:
        if spec.name not in result:
            raise InferenceError(500, f"output {spec.name!r} is missing: the model gave {', '.join(map(repr, result))}")
        promised[spec.name] = _detach_output(result[spec.name], spec)
    return promised


def name_all_outputs(result: Any) -> dict[str, Any]:
    """Name all outputs of a model, with a registered network's default names where it has none."""
    if isinstance(result, tuple | list):
        result = {f"output_{index}": value for index, value in enumerate(result)}
    elif not isinstance(result, Mapping):
        result = {"output": result}
    return {name: _detach_output(value, None) for name, value in result.items()}


def _detach_output(value: Any, spec: TensorSignature | None) -> Any:
    """Detach the value into a new tensor object, so that the model's can be freed; bfloat16 becomes the wanted type."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        value = value.to(_FLOATS.get(spec.datatype, torch.float32) if spec else torch.float32)
    return value.detach()


def to_array(value: Any) -> np.ndarray:
    """The tensor as an array in unshared memory: a model may retain its output and write the next batch's to it."""
    if not isinstance(value, Tensor):
        return np.array(value)
    if value.dtype == torch.bfloat16:
        value = value.view(torch.uint16)
    is_copied = value.nbytes <= COPIED_BYTES or _count_owners(value) > _SOLE_OWNER  # the array is an owner, too
    array: np.ndarray = value.numpy()
    return array.copy() if is_copied else array


def _count_owners(tensor: Tensor) -> int:
    """Count the tensors that share its memory, in Python and in C++."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


_InferenceMode = torch._C._InferenceMode  # what `torch.inference_mode` enters, without its Python, which takes 4 µs
_FRESH = torch.empty(1)
_SOLE_OWNER = _count_owners(_FRESH)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., inputs] by weight [outputs, inputs]; many rows go to oneDNN."""
    num_rows = x.numel() // weight.shape[1]
    if num_rows < MIN_ROWS or num_rows * weight.numel() < MIN_PRODUCTS or x.dtype != torch.float32:
        return nn.functional.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


class OneDnnLinear(nn.Linear):
    """A linear layer that computes many rows with oneDNN."""

    def forward(self, input: Tensor) -> Tensor:  # by its name, too, as of the class that it takes the place of
        return linear(input, self.weight, self.bias)


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
