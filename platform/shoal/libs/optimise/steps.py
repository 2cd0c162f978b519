"""The steps by which a network becomes smaller after its training: another precision, or an ONNX graph.

Called by `search`. Each takes a model of the registry's form and gives one; none is registered, and none measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import safetensors.torch
import torch
from torch import nn

from shoal.errors import ConfigError, needs_extra
from shoal.extend.registry import ModelFactory, Signature, find_format
from shoal.extend.serve import ModelOptions, PrecisionConverter, name_dynamic_axes, trace_to_onnx
from shoal.libs.optimise import entry

Step = Literal["int8", "bf16", "onnx", "onnx-int8"]
STEPS: tuple[Step, ...] = ("int8", "bf16", "onnx", "onnx-int8")
_QUANTISED = ["MatMul", "Gemm", "Attention", "LSTM", "Gather"]  # integer convolutions are slower than those of floats


@dataclass(frozen=True)
class Model:
    """A model that may be registered.

    steps:   by which it came from the teacher; () is the teacher
    payload: of the factory's format: its weights, or a graph
    run_id:  of its distillation
    flops:   of one sample in float32; None: not countable
    """

    steps: tuple[str, ...]
    factory: ModelFactory
    payload: bytes
    run_id: str | None = None
    flops: float | None = None

    @property
    def title(self) -> str:
        return ", ".join(self.steps) or "as it is"


def convert_model(
    model: Model, step: Step, teacher: ModelFactory, signature: Signature, inputs: Sequence[Any]
) -> Model:
    """The model after one more step. Raises ConfigError where it cannot be taken, MissingExtra.

    teacher: whose hooks the result has
    inputs:  tensors of two samples, for tracing
    """
    if step in ("int8", "bf16"):
        factory, payload = _convert_precision(model, step, teacher)
    else:
        hooks = entry.hook_references(teacher)
        factory = ModelFactory(format="onnx", kwargs=entry.hook_kwargs(teacher), action=teacher.action, **hooks)
        payload = _export_onnx(entry.build_network(model.factory, model.payload), teacher, signature, inputs)
        if step == "onnx-int8":
            payload = quantise_onnx(payload)
    return replace(model, steps=(*model.steps, step), factory=factory, payload=payload)


def require_step(step: Step) -> None:
    """Raises MissingExtra when its libraries are not installed."""
    if step in ("onnx", "onnx-int8"):
        with needs_extra("export"):
            import onnx  # noqa: F401 - torch's exporter needs it
            import onnxruntime  # noqa: F401 - endpoints do


def _convert_precision(model: Model, precision: Any, teacher: ModelFactory) -> tuple[ModelFactory, bytes]:
    network = entry.build_module(model.factory)
    state = PrecisionConverter(precision, network).convert(safetensors.torch.load(model.payload))
    if precision == "bf16":
        state = {f"network.{name}": tensor for name, tensor in state.items()}
    state = {name: tensor.contiguous() for name, tensor in state.items()}
    return entry.make_factory(model.factory, precision, teacher), safetensors.torch.save(state)


def _export_onnx(network: nn.Module, teacher: ModelFactory, signature: Signature, inputs: Sequence[Any]) -> bytes:
    """Outputs have the signature's names; the network's own where a hook follows, or where it names them."""
    with torch.no_grad():
        outputs = network(*inputs)
    described = [*signature.inputs, *(() if teacher.postprocess else signature.outputs)]
    input_names, output_names = [each.name for each in signature.inputs], list(entry.name_outputs(outputs))
    if not (teacher.postprocess or isinstance(outputs, Mapping)):
        own = [each.name for each in signature.outputs]
        output_names = [*own, *output_names[len(own) :]]
    axes = name_dynamic_axes(described, ModelOptions())
    dynamic = {name: axes.get(name, {0: "batch"}) for name in (*input_names, *output_names)}
    payload = trace_to_onnx(network, inputs, input_names, output_names, dynamic, "the network", "leave it out")
    graph = find_format("onnx").read_signature(payload, "the network")
    if (taken := [each.name for each in graph.inputs]) != input_names:
        raise ConfigError("--try", "onnx", f"its graph takes {', '.join(taken)} alone", "use every input in forward")
    return payload


def quantise_onnx(payload: bytes) -> bytes:
    """The graph with int8 weights, quantised by row, and activations quantised as they come, by onnxruntime."""
    with needs_extra("export"):
        import onnx
        from onnxruntime.quantization import QuantType, quantize_dynamic
        from onnxruntime.quantization.shape_inference import quant_pre_process
    with tempfile.TemporaryDirectory() as folder:
        prepared, quantised = Path(folder, "prepared.onnx"), Path(folder, "quantised.onnx")
        quant_pre_process(onnx.load_from_string(payload), prepared, skip_symbolic_shape=True)
        quantize_dynamic(
            prepared, quantised, op_types_to_quantize=_QUANTISED, per_channel=True, weight_type=QuantType.QInt8
        )
        return quantised.read_bytes()
