"""A registered model as ONNX: one that is not ONNX yet is traced by torch, which is imported here alone.

Called by `export_model`. What tracing fixes by mistake, such as a branch on the batch's size, shows where the answers
are compared.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shoal.errors import ConfigError, WeightsError, summarize_error
from shoal.extend.registry import ModelVersion
from shoal.extend.serve import ModelOptions, name_dynamic_axes, trace_to_onnx
from shoal.libs.export.examples import Example
from shoal.weights import WeightSnapshot

if TYPE_CHECKING:
    from torch import nn


def convert_to_onnx(
    version: ModelVersion,
    snapshot: WeightSnapshot,
    options: ModelOptions,
    example: Example,
    opset: int | None,
    has_doubles: bool,
) -> bytes:
    """Convert the model, traced with this example. Raises ConfigError, with the reason.

    opset: None: torch's; has_doubles: float64 stays what it is, otherwise float32, as engines of games compute
    """
    import torch

    from shoal.libs.export.formats.onnx import read_signature

    signature, parent = version.manifest.signature, version.manifest.lineage.get("parent")
    remedy = f"export {parent}, from which it was made" if parent else "use operations that ONNX has, or register ONNX"
    module = _open_module(version, snapshot)
    payload = trace_to_onnx(
        module if has_doubles else module.float(),
        [torch.from_numpy(example.inputs[spec.name].copy()) for spec in signature.inputs],
        [spec.name for spec in signature.inputs],
        [spec.name for spec in signature.outputs],
        name_dynamic_axes((*signature.inputs, *signature.outputs), options),
        version.ref,
        remedy,
        opset,
    )
    try:
        converted = read_signature(payload, version.ref)
    except WeightsError as error:  # of weights in bfloat16, for example
        problem = f"onnxruntime cannot compute its graph: {summarize_error(error.__cause__ or error)}"
        raise ConfigError("model", version.ref, problem, remedy) from error
    wanted, got = (
        [(each.name, each.datatype) for each in (*tensors.inputs, *tensors.outputs)]
        for tensors in (signature, converted)
    )
    if wanted != got:
        problem = f"its graph has the tensors {got}, the signature {wanted}"
        raise ConfigError("model", version.ref, problem, "use every input, and give outputs names of their own")
    return payload


def _open_module(version: ModelVersion, snapshot: WeightSnapshot) -> nn.Module:
    """Open the model as a module whose inputs and outputs are in the signature's order."""
    from torch import fx, nn

    from shoal.extend.serve import select_outputs
    from shoal.libs.export.formats.exported import bind_constants, flatten_program, load_program
    from shoal.libs.export.formats.torchscript import load_module
    from shoal.weights.tensor_files import read_tensors

    kind, signature = version.manifest.model.format, version.manifest.signature
    call: Any = None
    module: Any
    if kind == "torchscript":
        scripted: nn.Module = load_module(snapshot.payload, version.ref)
        return scripted  # which cannot be traced: it is converted as it is, branches included
    if kind == "torch_export":
        program = load_program(snapshot.payload, version.ref)
        flat = flatten_program(program.module(check_guards=False))
        module = fx.GraphModule(flat, flat.graph)  # the exporter calls `train`, which the program's own class refuses
        call = bind_constants(program, module)
    else:
        module = version.manifest.model.build()
        module.load_state_dict(read_tensors(snapshot))
        module.eval()
        if callable(predict := getattr(module, "predict", None)):
            names = [spec.name for spec in signature.inputs]
            call = lambda *tensors: predict(**dict(zip(names, tensors, strict=True)))  # noqa: E731

    class InOrder(nn.Module):
        """The model's outputs as a tuple."""

        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *tensors: Any) -> tuple[Any, ...]:
            result = self.module(*tensors) if call is None else call(*tensors)
            return tuple(select_outputs(result, signature.outputs).values())

    return InOrder().eval()
